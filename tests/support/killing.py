"""Conversations under random kills of the processes that carry them."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import dataclass

from tests.support.faults import FaultyCluster, Part
from tests.support.talk import Poster, Talker, Told, talk

VICTIMS: tuple[Part, ...] = ("session", "engine")
PAUSES_S = 5.0, 12.0
"""Between kills. Serve replaces a replica in some 12 s, so at times none is left for a while."""
WORDS = "One word comes after another word."


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, and when (monotonic seconds)."""

    part: Part
    when: float


async def kill_at_random(
    cluster: FaultyCluster, told: Told, seconds: float, chance: random.Random, sockets: int = 8, posters: int = 2
) -> tuple[int, list[Kill]]:
    """Have clients talk for so long while session actors and engines are killed; how many turns were completed, and the
    kills."""
    talkers = [Talker(cluster.ws, told) for _ in range(sockets)]
    talkers += [Poster(f"{cluster.http}/responses", told) for _ in range(posters)]
    over = time.monotonic() + seconds
    kills: list[Kill] = []

    async def work() -> None:
        while time.monotonic() < over:
            await asyncio.sleep(min(chance.uniform(*PAUSES_S), max(0.0, over - time.monotonic())))
            part = chance.choice(VICTIMS)
            found = await asyncio.to_thread(cluster.find, part)
            if found:
                kills.append(Kill(part, time.monotonic()))
                await asyncio.to_thread(cluster.kill, chance.choice(found))

    async with asyncio.TaskGroup() as group:
        group.create_task(work())
        group.create_task(talk(talkers, WORDS, lambda: time.monotonic() > over))
    return sum(talker.turns for talker in talkers), kills
