"""Kills at random moments, under load: in the end the store has what clients were told, once, and nothing else."""

from __future__ import annotations

import asyncio
import random

import pytest

from tests.support.faults import FaultyCluster
from tests.support.killing import kill_at_random
from tests.support.talk import Told, audit

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
SECONDS = 40.0
TURNS = 300


async def test_the_store_has_what_clients_were_told(cluster: FaultyCluster, told: Told) -> None:
    await asyncio.to_thread(cluster.settled)
    seed = random.SystemRandom().randrange(1 << 32)
    turns, kills = await kill_at_random(cluster, told, SECONDS, random.Random(seed))

    assert turns > TURNS, f"seed {seed}"
    assert kills, f"seed {seed}"  # how many depends on how quickly what was killed is replaced
    await asyncio.to_thread(cluster.settled)
    found = await audit(cluster.settings, cluster.http, told)
    assert found.agrees, f"seed {seed}: {found}"
