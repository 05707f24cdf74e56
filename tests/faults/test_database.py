"""A PostgreSQL server that goes away or is slow: turns don't wait for it, and in the end it has everything."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import asyncpg
import httpx
import pytest

from tests.support.faults import FaultyCluster, fault_settings
from tests.support.postgres import PostgresServer, running_postgres
from tests.support.talk import RECEIVE_S, Line, Talker, Told, audit, error_of, talk

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
AWAY_S = 30.0
SLOW_S = 1.0
REMEMBERED = 16
WAITING = 1000
ROOM_S = 2.0
PROMPT_S = 4.0
"""A refusal that waits for nothing comes within this time; in milliseconds on a quiet machine."""


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    with running_postgres() as running:
        yield running


@pytest.fixture(scope="module")
def postgres(server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[FaultyCluster]:
    bounds = {"memory_responses": REMEMBERED, "waiting_jobs": WAITING, "room_deadline_s": ROOM_S}
    folder: Path = tmp_path_factory.mktemp("postgres")
    with FaultyCluster(fault_settings(server.create_database(), store=bounds), folder) as running:
        yield running


@pytest.fixture(scope="module")
def heard() -> Told:
    """What the clients of this cluster were told."""
    return Told()


@asynccontextmanager
async def away(server: PostgresServer) -> AsyncIterator[None]:
    await asyncio.to_thread(server.stop)
    try:
        yield
    finally:
        await asyncio.to_thread(server.start)


@asynccontextmanager
async def slow(url: str) -> AsyncIterator[None]:
    """Every write waits a second for its turn."""
    connection = await asyncpg.connect(url)

    async def hold() -> None:
        while True:
            async with connection.transaction():
                await connection.execute("LOCK TABLE responses, usage IN EXCLUSIVE MODE")
                await asyncio.sleep(SLOW_S)

    holding = asyncio.create_task(hold())
    try:
        yield
    finally:
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        await connection.close()


async def paced(cluster: FaultyCluster, told: Told, seconds: float, clients: int = 4) -> list[float]:
    """Conversations for so long, a turn of each in a fifth of a second; how long their turns took."""
    told.turn_s.clear()
    talkers = [Talker(cluster.ws, told) for _ in range(clients)]
    over = time.monotonic() + seconds
    await talk(talkers, "Word after word.", lambda: time.monotonic() > over, pause_s=0.2)
    assert not told.recoveries
    return list(told.turn_s)


def no_slower(during: list[float], before: list[float]) -> bool:
    """The middle turn waits for no write, which would take `SLOW_S` and more; others load the machine too."""
    return statistics.median(during) < 2 * statistics.median(before) + SLOW_S / 4


async def test_turns_go_on_without_the_database(postgres: FaultyCluster, server: PostgresServer, heard: Told) -> None:
    line = await Line.dial(postgres.ws, heard)
    old = (await line.turn("Old."))["response"]["id"]
    await line.close()
    before = await paced(postgres, heard, 6)
    # By now it has left the memory of both actors.
    assert len(heard.ended) > 2 * REMEMBERED
    async with away(server):
        ends = time.monotonic() + AWAY_S
        during = asyncio.create_task(paced(postgres, heard, AWAY_S))
        line = await Line.dial(postgres.ws, heard)
        began = time.monotonic()
        unreadable = await line.turn("x", previous_response_id=old)
        assert error_of(unreadable) == "store_unavailable"
        async with httpx.AsyncClient(timeout=RECEIVE_S) as client:
            answer = await client.get(f"{postgres.http}/responses/{old}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "store_unavailable")
        assert int(answer.headers["retry-after"]) > 0
        assert time.monotonic() - began < PROMPT_S
        # What was said a moment ago goes on, at any actor.
        first = (await line.turn("One."))["response"]["id"]
        for _ in range(6):
            other = await Line.dial(postgres.ws, heard)
            event = await other.turn("Two.", previous_response_id=first)
            assert event["type"] == "response.completed", event
            await other.close()
        took = await during
        assert time.monotonic() > ends
    assert no_slower(took, before), (statistics.median(took), statistics.median(before))
    found = await audit(postgres.settings, postgres.http, heard)
    assert found.agrees, found
    assert (await line.turn("Now.", previous_response_id=old))["type"] == "response.completed"
    await line.close()


async def test_a_slow_database_makes_no_turn_slower(
    postgres: FaultyCluster, server: PostgresServer, heard: Told
) -> None:
    before = await paced(postgres, heard, 3)
    assert postgres.settings.store.url is not None
    async with slow(postgres.settings.store.url):
        during = await paced(postgres, heard, 8)
    assert no_slower(during, before), (statistics.median(during), statistics.median(before))
    found = await audit(postgres.settings, postgres.http, heard)
    assert found.agrees, found


async def test_when_as_much_as_may_be_waits_turns_are_refused_and_nothing_is_lost(
    postgres: FaultyCluster, server: PostgresServer, heard: Told
) -> None:
    async with away(server):
        refusals = await asyncio.gather(*(until_refused(postgres, heard) for _ in range(16)))
        for event, seconds in refusals:
            assert error_of(event) == "rate_limit_exceeded"
            assert (event["status"], int(event["headers"]["retry-after"]) > 0) == (429, True)
            assert seconds < ROOM_S + PROMPT_S
    found = await audit(postgres.settings, postgres.http, heard)
    assert found.agrees, found
    line = await Line.dial(postgres.ws, heard)
    assert (await line.turn("Room again."))["type"] == "response.completed"
    await line.close()


async def until_refused(cluster: FaultyCluster, told: Told) -> tuple[dict[str, object], float]:
    """As many turns as are taken; the refusal, and how long it took, seconds."""
    line = await Line.dial(cluster.ws, told)
    for _ in range(2 * WAITING):
        began = time.monotonic()
        event = await line.turn("x")
        if event["type"] != "response.completed":
            await line.close()
            return event, time.monotonic() - began
    raise AssertionError("never refused")
