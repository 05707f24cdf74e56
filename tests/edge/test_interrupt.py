"""`response.interrupt` over a real socket: the engine stops, finished items stay, the rest never was (protocol.md 3.8).

Five things hold whatever happens: one terminal event, a grammatical stream, a state that equals one where only the
finished items were ever said, a socket that works or closes with a code, and nothing left running.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from websockets.asyncio.client import ClientConnection

from inference.engine import Chunk, EngineError
from tests.support.gateway import Running, create, gateway, receive, turn, until_terminal
from tests.support.plans import (
    CALL,
    END,
    FUNCTION,
    SILENCE,
    Gate,
    Plans,
    check_response,
    ids_of,
    plan,
    settled,
    types,
    until,
    until_closed,
)


async def interrupt(ws: ClientConnection, response: object, **more: Any) -> None:
    await ws.send(json.dumps({"type": "response.interrupt", "response_id": response, **more}))


def message(text: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": text}


async def same_prompt_as(engine: Plans, running: Running, items: list[Any]) -> None:
    """The last prompt is that of a new conversation which consists of these items."""
    continued = engine.seen[-1].prompt
    async with running.connect() as other:
        await turn(other, input=items, tools=[FUNCTION])
    assert engine.seen[-1].prompt == continued


async def test_the_open_item_is_discarded_and_the_response_can_be_continued() -> None:
    engine = Plans(plan("One two three", SILENCE), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = await until(ws, "output_text.delta")
        response = events[0]["response"]["id"]
        await interrupt(ws, response, mode="discard_partial_items")
        events += await until_terminal(ws)

        last = check_response(events)
        assert types(events)[-3:] == ["interrupt.accepted", "output_item.interrupted", "incomplete"]
        accepted, discarded = (event for event in events if "interrupt" in event["type"])
        added = next(event for event in events if event["type"] == "response.output_item.added")
        assert {**accepted, "sequence_number": 0} == {
            "type": "response.interrupt.accepted",
            "response_id": response,
            "sequence_number": 0,
        }
        assert discarded.keys() == {"type", "response_id", "item_id", "output_index", "sequence_number"}
        assert (discarded["response_id"], discarded["item_id"]) == (response, added["item"]["id"])
        assert (last["status"], last["incomplete_details"]) == ("incomplete", {"reason": "interrupted"})
        assert last["output"] == []
        assert last["usage"]["output_tokens"] >= 1
        await settled(running, engine, sockets=1)
        assert engine.aborted == 1

        again = await turn(ws, input="stop", previous_response_id=response, tools=[FUNCTION])
        assert check_response(again)["status"] == "completed"
        await same_prompt_as(engine, running, [message("go on"), message("stop")])


async def test_a_silent_model_is_stopped_before_its_first_word() -> None:
    engine = Plans([SILENCE], plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on")
        events = await until(ws, "in_progress")
        await interrupt(ws, events[0]["response"]["id"])
        events += await asyncio.wait_for(until_terminal(ws), 30)

        assert types(events) == ["created", "interrupt.accepted", "incomplete"]
        assert check_response(events)["output"] == []
        assert engine.aborted == 1
        again = await turn(ws, input="well?", previous_response_id=events[0]["response"]["id"])
        assert check_response(again)["status"] == "completed"


async def test_finished_items_stay_and_a_call_that_is_cut_is_none() -> None:
    engine = Plans(plan("Let me look.\n", CALL[:40], SILENCE), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = await until(ws, "output_item.done")
        while events[-1]["type"] != "response.output_item.added":
            events.append(await receive(ws))
        assert events[-1]["item"]["type"] == "function_call"
        await interrupt(ws, events[0]["response"]["id"])
        events += await until_terminal(ws)

        last = check_response(events)
        assert [item["type"] for item in last["output"]] == ["message"]
        await turn(ws, input="stop", previous_response_id=last["id"], tools=[FUNCTION])
        said = message("Let me look.", "assistant")
        await same_prompt_as(engine, running, [message("go on"), said, message("stop")])
        await settled(running, engine, sockets=1)


async def test_a_finished_call_stays_and_must_be_answered() -> None:
    engine = Plans(plan(CALL, SILENCE), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = await until(ws, "output_item.done")
        await interrupt(ws, events[0]["response"]["id"])
        events += await until_terminal(ws)

        last = check_response(events)
        assert [item["type"] for item in last["output"]] == ["function_call"]
        call = last["output"][0]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}
        again = await turn(ws, input=[output], previous_response_id=last["id"], tools=[FUNCTION])
        assert check_response(again)["status"] == "completed"
        said = {"type": "function_call", "call_id": call["call_id"], "name": "f", "arguments": call["arguments"]}
        await same_prompt_as(engine, running, [message("go on"), said, output])


async def test_while_the_client_reads_nothing_the_engine_stops_and_no_event_is_lost() -> None:
    word = ids_of(" word" * 4000)
    engine = Plans([*(Chunk(word, cached_tokens=0) for _ in range(400)), SILENCE], plan("Fine."))
    async with gateway(engine) as running, running.connect(max_queue=1) as ws:
        await create(ws, input="go on")
        events = await until(ws, "output_text.delta")
        socket = next(iter(running.gateway.sockets))
        for _ in range(200):  # until the transport is full
            await asyncio.sleep(0.02)
            if socket._sending and (loop_time := asyncio.get_running_loop().time()) - socket._last_sent > 0.2:
                break
        assert socket._sending
        assert loop_time
        assert engine.aborted == 0
        await interrupt(ws, events[0]["response"]["id"])
        for _ in range(100):
            if engine.aborted:
                break
            await asyncio.sleep(0.01)
        assert (engine.aborted, engine.running) == (1, 0)

        events += await until_terminal(ws)
        last = check_response(events)
        assert (last["incomplete_details"], last["output"]) == ({"reason": "interrupted"}, [])
        again = await turn(ws, input="well?", previous_response_id=last["id"])
        assert check_response(again)["status"] == "completed"


async def test_a_response_whose_end_is_on_its_way_can_no_longer_be_stopped() -> None:
    """Its terminal event was made, but a client that reads nothing does not have it yet."""
    words = ids_of(" word") * 60_000
    engine = Plans([*(Chunk(words, cached_tokens=0) for _ in range(12)), Chunk([END], finish="stop")], plan("Fine."))
    async with gateway(engine) as running, running.connect(max_queue=1) as ws:
        await create(ws, input="go on")
        events = await until(ws, "output_text.delta")
        socket = next(iter(running.gateway.sockets))
        for _ in range(500):
            await asyncio.sleep(0.02)
            if [turn for turn in socket._turns.values() if turn.turn is not None and turn.turn.ending is not None]:
                break
        assert socket._sending
        response = events[0]["response"]["id"]
        await interrupt(ws, response)
        steer = {"type": "response.steer", "previous_response_id": response, "input": "go left"}
        await ws.send(json.dumps(steer))
        events += await until(ws, "steer.failed")

        assert check_response(events)["status"] == "completed"
        codes = [event["error"]["code"] for event in events if event["type"].endswith("failed")]
        assert codes == ["response_already_completed"] * 2
        assert events[-1]["type"] == "response.steer.failed"


async def test_it_passes_the_queue_and_the_queued_turn_follows() -> None:
    engine = Plans(plan("One", SILENCE), plan("Two."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="a", stream_id="main")
        events = await until(ws, "output_text.delta")
        await create(ws, input="b", stream_id="main")
        await interrupt(ws, events[0]["response"]["id"])
        events += await until_terminal(ws)
        check_response(events)
        assert {event["stream_id"] for event in events} == {"main"}

        assert check_response(await until_terminal(ws))["status"] == "completed"


async def test_other_lanes_go_on() -> None:
    engine = Plans(plan("One", SILENCE), plan("Two", 0.2, " three."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="a", stream_id="a")
        first = await until(ws, "output_text.delta")
        await create(ws, input="b", stream_id="b")
        await interrupt(ws, first[0]["response"]["id"])
        events = [*first, *await until_terminal(ws), *await until_terminal(ws)]

    for lane, status in (("a", "incomplete"), ("b", "completed")):
        assert check_response([event for event in events if event["stream_id"] == lane])["status"] == status


@pytest.mark.parametrize("mode", [None, "keep_partial_items"])
async def test_what_cannot_be_interrupted_says_so_and_goes_on(mode: str | None) -> None:
    gate = Gate()
    engine = Plans(plan("Done."), plan("One", gate, " two."))
    async with gateway(engine) as running, running.connect() as ws:
        done = check_response(await turn(ws, input="a"))
        await create(ws, input="b")
        events = await until(ws, "output_text.delta")
        now = events[0]["response"]["id"]
        targets = [done["id"], "resp_unknown", 5] if mode is None else [now]
        for target in targets:
            await interrupt(ws, target, **({} if mode is None else {"mode": mode}))
            events += await until(ws, "interrupt.failed")
        gate.set()
        events += await until_terminal(ws)

    failed = [event for event in events if event["type"] == "response.interrupt.failed"]
    codes = [event["error"]["code"] for event in failed]
    expected = ["response_already_completed", "response_not_found", "response_not_found"]
    assert codes == (expected if mode is None else ["interrupt_not_supported"])
    assert all(event["error"]["message"] for event in failed)
    assert check_response(events)["status"] == "completed"


async def test_twice_is_once() -> None:
    engine = Plans(plan("One", SILENCE))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="a")
        events = await until(ws, "output_text.delta")
        await interrupt(ws, events[0]["response"]["id"])
        await interrupt(ws, events[0]["response"]["id"])
        seen = [await receive(ws) for _ in range(4)]

        assert check_response(events + seen)["status"] == "incomplete"
        failed = [event for event in seen if event["type"] == "response.interrupt.failed"]
        assert len(failed) == 1
        assert engine.aborted == 1


# --- each moment, each fault ------------------------------------------------------------------------------------------

MOMENTS = range(12)
SPOKEN = plan("One two.\n", CALL, " Three", end=False)


def slowly(steps: list[Any]) -> list[Any]:
    """Then it falls silent, so that every test comes in time."""
    return [*(part for step in steps for part in (step, 0.01)), SILENCE]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_at_each_event(moment: int) -> None:
    engine = Plans(slowly(SPOKEN), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = [await receive(ws) for _ in range(moment + 1)]
        await interrupt(ws, events[0]["response"]["id"])
        events += await until_terminal(ws)

        last = check_response(events)
        assert last["incomplete_details"] == {"reason": "interrupted"}
        assert engine.aborted == 1
        answers, said = [], []
        for item in last["output"]:
            if item["type"] == "function_call":
                keys = ("type", "call_id", "name", "arguments")
                said.append({key: item[key] for key in keys})
                answers.append({"type": "function_call_output", "call_id": item["call_id"], "output": "1"})
            else:
                said.append(message(item["content"][0]["text"], "assistant"))
        more = [*answers, message("stop")]
        again = await turn(ws, input=more, previous_response_id=last["id"], tools=[FUNCTION])
        assert check_response(again)["status"] == "completed"
        await same_prompt_as(engine, running, [message("go on"), *said, *more])
        await settled(running, engine, sockets=1)
    assert engine.running == 0


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_engine_fails_at_each_step(moment: int) -> None:
    """The failure and the interrupt race: one terminal event, whichever wins."""
    steps = [*SPOKEN[:moment], EngineError("overloaded", "Too much.")]
    engine = Plans(steps, plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = [await receive(ws)]
        await interrupt(ws, events[0]["response"]["id"])
        events += await until_terminal(ws)

        failed = events[-1]["type"] == "response.failed"
        check_response(events)
        if failed:
            late = await receive(ws)
            assert late["type"] == "response.interrupt.failed"
            assert late["error"]["code"] == "response_not_active"
        assert check_response(await turn(ws, input="well?"))["status"] == "completed"
        await settled(running, engine, sockets=1)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_client_leaves_after_interrupting(moment: int) -> None:
    engine = Plans(slowly(SPOKEN))
    async with gateway(engine) as running:
        async with running.connect() as ws:
            await create(ws, input="go on", tools=[FUNCTION])
            events = [await receive(ws) for _ in range(moment + 1)]
            await interrupt(ws, events[0]["response"]["id"])
            ws.transport.abort()
        await settled(running, engine)
        assert engine.aborted == 1


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_socket_drains_after_an_interrupt(moment: int) -> None:
    engine = Plans(slowly(SPOKEN))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = [await receive(ws) for _ in range(moment + 1)]
        await interrupt(ws, events[0]["response"]["id"])
        socket = next(iter(running.gateway.sockets))
        draining = asyncio.create_task(socket.drain(1012, "update"))
        events += await until_closed(ws, 1012)
        await draining
        assert check_response(events)["status"] in {"incomplete", "failed"}
        await settled(running, engine)


async def test_a_turn_that_is_cut_off_by_its_deadline_loses_no_number() -> None:
    engine = Plans(plan("One", SILENCE))
    async with gateway(engine, {"limits": {"turn_deadline_s": 0.3}}) as running, running.connect() as ws:
        events = await turn(ws, input="a")
        assert check_response(events)["status"] == "failed"
        await interrupt(ws, events[0]["response"]["id"])
        assert (await receive(ws))["error"]["code"] == "response_not_active"
        await settled(running, engine, sockets=1)


async def test_a_client_that_floods_and_never_reads_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers that belong to no turn are bounded in time too: nothing else would end such a socket, or let it drain."""
    monkeypatch.setattr("gateway.websocket.LAST_WORDS_S", 0.2)
    flood = json.dumps({"type": "response.steer", "previous_response_id": "x", "input": "y" * 60_000})
    async with (
        gateway(Plans(plan("ok")), {"limits": {"send_timeout_s": 0.3}}) as running,
        running.connect(max_queue=1) as ws,
    ):

        async def send() -> None:
            for _ in range(2000):
                await ws.send(flood)

        sending = asyncio.create_task(send())
        for _ in range(500):
            await asyncio.sleep(0.01)
            if not running.gateway.sockets:
                break
        assert not running.gateway.sockets
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
        ws.transport.abort()
