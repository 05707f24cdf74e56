"""Processes that are killed: what clients see, how soon, what goes on afterwards, and that nothing is lost."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import httpx
import pytest
from openai import OpenAI

from tests.support.faults import MODEL, FaultyCluster
from tests.support.gateway import TERMINALS
from tests.support.talk import Line, Told, audit, error_of, owner, rows_of

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]
NOTICED_S = 10.0
"""How soon a client must know; it is far less on a quiet machine."""
SPREAD_S = 60.0
EDGE_BACK_S = 90.0
"""Serve starts a proxy again that has not answered three checks, 10 s apart."""
LONG = "la " * 800
DELTA = "response.output_text.delta"


@asynccontextmanager
async def lines(cluster: FaultyCluster, told: Told, count: int) -> AsyncIterator[list[Line]]:
    async with AsyncExitStack() as stack:
        found = [await Line.dial(cluster.ws, told) for _ in range(count)]
        for line in found:
            stack.push_async_callback(line.close)
        yield found


async def by_owner(cluster: FaultyCluster, told: Told, each: int) -> list[list[tuple[Line, str]]]:
    """Sockets of both actors, `each` of both, and a first response of each socket. HAProxy hears of a new actor some
    time after it runs, and gives it sockets as long as it has fewer than the other one."""
    groups: defaultdict[str, list[tuple[Line, str]]] = defaultdict(list)
    async with asyncio.timeout(SPREAD_S):
        while len(groups) < 2 or min(map(len, groups.values())) < each:
            line = await Line.dial(cluster.ws, told)
            first = (await line.turn("One."))["response"]["id"]
            groups[owner(first)].append((line, first))
            await asyncio.sleep(0.05)
    for group in groups.values():
        for line, _ in group[each:]:
            await line.close()
    return [group[:each] for group in groups.values()]


async def killed(cluster: FaultyCluster, part: str) -> None:
    """The oldest of them; of HAProxy all, as one that was replaced lives as long as its sockets."""
    found = await asyncio.to_thread(cluster.find, part)
    for victim in found if part == "haproxy" else found[:1]:
        await asyncio.to_thread(cluster.kill, victim)


async def settled(cluster: FaultyCluster) -> None:
    await asyncio.to_thread(cluster.settled)


async def agreed(cluster: FaultyCluster, told: Told) -> None:
    found = await audit(cluster.settings, cluster.http, told)
    assert found.agrees, found


def test_actors_and_engines_get_as_much_of_the_machine_as_others_do(cluster: FaultyCluster) -> None:
    """Ray would run them at nice 15: with two busy cores and this cluster's sort of processes beside them, a vLLM did
    not load within five minutes."""
    victims = [victim for part in ("session", "engine", "controller") for victim in cluster.find(part)]
    ours = os.getpriority(os.PRIO_PROCESS, 0)
    assert len(victims) == 5
    assert {os.getpriority(os.PRIO_PROCESS, victim.pid) for victim in victims} == {ours}


async def test_a_killed_session_actor_takes_its_sockets_and_no_stored_response(
    cluster: FaultyCluster, told: Told
) -> None:
    groups = await by_owner(cluster, told, 4)
    private, ends, streams = {}, {}, []
    for (idle, _), (streaming, first), (between, second), (unstored, _), *_ in groups:
        private[unstored] = (await unstored.turn("Two.", store=False))["response"]["id"]
        await streaming.start(LONG, previous_response_id=first)
        started = (await streaming.until("response.created"))["response"]["id"]
        await streaming.until(DELTA)
        streams.append((streaming, started))
        del idle
        ends[between] = (await between.turn("Two.", previous_response_id=second))["response"]["id"]
    # The last terminal event came a moment ago: nothing waits for a write before the kill.
    await killed(cluster, "session")
    began = time.monotonic()

    closing = [[asyncio.create_task(line.lost()) for line, _ in group] for group in groups]
    await asyncio.wait([task for tasks in closing for task in tasks], return_when=asyncio.FIRST_COMPLETED)
    dead = next(n for n, tasks in enumerate(closing) if any(task.done() for task in tasks))
    codes = await asyncio.gather(*closing[dead])
    assert time.monotonic() - began < NOTICED_S
    assert set(codes) == {"close 1006"}
    living = 1 - dead
    assert not any(task.done() for task in closing[living])
    for task in closing[living]:
        task.cancel()
    await asyncio.wait(closing[living])

    (idle, first), (streaming, before), (between, _), (unstored, _), *_ = groups[dead]
    del idle, streaming
    async with lines(cluster, told, 1) as (again,):
        for what, previous in (("an old one", first), ("of a cut turn", before), ("just told", ends[between])):
            event = await again.turn("Three.", previous_response_id=previous)
            assert event["type"] == "response.completed", f"{what}: {event}"
            assert owner(event["response"]["id"]) != owner(first)
        assert error_of(await again.turn("x", previous_response_id=private[unstored])) == "previous_response_not_found"
        assert (await again.turn("Anew.", store=False))["type"] == "response.completed"
    # What was cut was never complete, and nobody says so.
    gone = await asyncio.to_thread(httpx.get, f"{cluster.http}/responses/{streams[dead][1]}", timeout=30)
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "not_found")
    with OpenAI(base_url=cluster.http, api_key="k", max_retries=2) as client:
        assert client.responses.retrieve(ends[between]).output_text == "Two."
        answer = client.responses.create(model=MODEL, input="x", previous_response_id=first, store=False)
        told.others.add(answer.id)
        assert answer.status == "completed"
    # Nobody else noticed.
    for line, _ in groups[living]:
        if line.running:
            assert (await line.rest())[-1]["type"] == "response.completed"
        assert (await line.turn("Still here."))["type"] == "response.completed"
    for group in groups:
        for line, _ in group:
            await line.close()
    await settled(cluster)
    await agreed(cluster, told)


async def test_a_turn_whose_engine_is_killed_in_the_middle_fails_and_its_conversation_goes_on(
    cluster: FaultyCluster, told: Told
) -> None:
    await settled(cluster)
    async with lines(cluster, told, 6) as found:
        firsts = []
        for number, line in enumerate(found):
            first = (await line.turn("One.", store=number % 2 == 0))["response"]["id"]
            firsts.append(first)
            await line.start(LONG, previous_response_id=first, store=number % 2 == 0)
        for line in found:
            await line.until(DELTA)
        await killed(cluster, "engine")
        began = time.monotonic()
        failing, failed = [], 0

        async def watch(line: Line) -> dict[str, object]:
            event = (await line.rest())[-1]
            if event["type"] == "response.failed":
                failing.append(time.monotonic() - began)
            return event

        ends = await asyncio.gather(*map(watch, found))
        for number, (line, first, event) in enumerate(zip(found, firsts, ends, strict=True)):
            stored = number % 2 == 0
            if event["type"] == "response.failed":
                failed += 1
                assert error_of(event) == "server_error"
                again = await line.turn("Again.", previous_response_id=first, store=stored)
                if stored:
                    assert again["type"] == "response.completed"
                else:  # a failed turn evicts what it continued (protocol.md 4.4)
                    assert error_of(again) == "previous_response_not_found"
            else:
                assert event["type"] == "response.completed"
            assert (await line.turn("Anew.", store=False))["type"] == "response.completed"
        assert 0 < failed < len(found)
        assert max(failing) < NOTICED_S
    await settled(cluster)
    await agreed(cluster, told)


async def test_a_turn_whose_engine_is_killed_before_its_first_token_is_answered_by_another(
    cluster: FaultyCluster, told: Told
) -> None:
    await settled(cluster)
    victim, other = await asyncio.to_thread(cluster.find, "engine")
    async with lines(cluster, told, 6) as found:
        # An actor gives turns to the engine with the fewest of its own: of the three or more that one actor has here,
        # both engines get some.
        cluster.stop(victim)
        cluster.stop(other)
        try:
            for line in found:
                await line.start("Hello there.")
                await line.until("response.in_progress")
            await asyncio.to_thread(cluster.kill, victim)
        finally:
            cluster.resume(other)
        began = time.monotonic()
        for line in found:
            events = await line.rest()
            assert events[-1]["type"] == "response.completed", events[-1]
            numbers = [event["sequence_number"] for event in events]
            assert numbers == list(range(2, 2 + len(numbers)))
            assert "".join(event["delta"] for event in events if event["type"] == DELTA) == "Hello there."
        assert time.monotonic() - began < NOTICED_S
    await settled(cluster)
    await agreed(cluster, told)


async def test_without_serves_controller_sockets_turns_and_dials_go_on(cluster: FaultyCluster, told: Told) -> None:
    await settled(cluster)
    async with lines(cluster, told, 4) as found:
        for line in found:
            await line.start(LONG)
            await line.until(DELTA)
        await killed(cluster, "controller")
        async with lines(cluster, told, 1) as (another,):
            first = await another.turn("One.")
        for line in found:
            last = (await line.rest())[-1]
            assert last["type"] == "response.completed"
            again = await line.turn("Two.", previous_response_id=first["response"]["id"])
            assert again["type"] == "response.completed"
    await settled(cluster)
    await agreed(cluster, told)


async def test_without_the_control_store_sockets_turns_and_dials_go_on_and_it_comes_back(
    cluster: FaultyCluster, told: Told
) -> None:
    await settled(cluster)
    async with lines(cluster, told, 4) as found:
        firsts = []
        for line in found:
            firsts.append((await line.turn("One."))["response"]["id"])
            await line.start(LONG)
            await line.until(DELTA)
        await killed(cluster, "gcs")
        async with lines(cluster, told, 2) as others:
            for line in others:
                assert (await line.turn("One."))["type"] == "response.completed"
        for line, first in zip(found, firsts, strict=True):
            assert (await line.rest())[-1]["type"] == "response.completed"
            again = await line.turn("Two.", previous_response_id=first)
            assert again["type"] == "response.completed"
        await asyncio.to_thread(cluster.start_gcs)
        # It knows its cluster again: what is lost now is replaced.
        await killed(cluster, "session")
    await settled(cluster)
    await agreed(cluster, told)


async def test_a_killed_haproxy_cuts_every_socket_and_comes_back(cluster: FaultyCluster, told: Told) -> None:
    await settled(cluster)
    async with lines(cluster, told, 4) as found:
        kept = []
        for number, line in enumerate(found):
            kept.append((await line.turn("One.", store=number % 2 == 0))["response"]["id"])
        await found[0].start(LONG)
        await found[0].until(DELTA)
        await killed(cluster, "haproxy")
        began = time.monotonic()
        assert {await line.lost() for line in found} == {"close 1006"}
        assert time.monotonic() - began < NOTICED_S
    async with lines(cluster, told, 1) as (again,):
        assert time.monotonic() - began < EDGE_BACK_S
        for number, previous in enumerate(kept):
            event = await again.turn("Two.", previous_response_id=previous)
            assert event["type"] in TERMINALS
            if number % 2 == 0:
                assert event["type"] == "response.completed"
            else:  # it lived on the socket
                assert error_of(event) == "previous_response_not_found"
    await settled(cluster)
    await agreed(cluster, told)


async def test_a_full_disk_stops_no_turn_and_costs_no_response(cluster: FaultyCluster, told: Told) -> None:
    await settled(cluster)
    groups = await by_owner(cluster, told, 2)
    # Neighbours are on different actors.
    pairs = [pair for both in zip(*groups, strict=False) for pair in both][:4]
    found, previous = [line for line, _ in pairs], [first for _, first in pairs]
    quiet = [await timed(found, previous, number % 4) for number in range(40)]
    await agreed(cluster, told)  # by now all of that is written
    with cluster.full_disk():
        before = await counted(cluster)
        full = [await timed(found, previous, number % 4) for number in range(80)]
        assert await counted(cluster) == before, "the database was written on a full disk"
    assert statistics.median(full) < 2 * statistics.median(quiet) + 0.25  # a write that is tried again takes longer
    for group in groups:
        for line, _ in group:
            await line.close()
    await agreed(cluster, told)


async def timed(found: list[Line], previous: list[str], number: int) -> float:
    """One turn on what a neighbour was told, which another actor owns; seconds to its terminal event."""
    began = time.monotonic()
    event = await found[number].turn("Next.", previous_response_id=previous[number - 1])
    seconds = time.monotonic() - began
    assert event["type"] == "response.completed", event
    previous[number] = event["response"]["id"]
    return seconds


async def counted(cluster: FaultyCluster) -> int:
    stored, _ = await rows_of(cluster.settings)
    return len(stored)
