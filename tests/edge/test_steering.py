"""`response.steer` over a real socket (protocol.md 2.2, 3.8): boundaries, successors, required outputs, every fault.

What the model must see is a conversation in which the client had sent the same items itself.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai import AsyncOpenAI
from openai.types.responses import ResponseSteerAcceptedEvent, ResponseSteerFailedEvent, ResponseSteerPendingEvent
from websockets.asyncio.client import ClientConnection

from inference.engine import EngineError
from tests.support.gateway import Running, create, gateway, receive, text, turn, until_terminal
from tests.support.plans import (
    CALL,
    FUNCTION,
    SILENCE,
    Gate,
    Plans,
    check_response,
    plan,
    settled,
    types,
    until,
    until_closed,
    words,
)

SDK = {
    "response.steer.accepted": ResponseSteerAcceptedEvent,
    "response.steer.pending": ResponseSteerPendingEvent,
    "response.steer.failed": ResponseSteerFailedEvent,
}


async def steer(ws: ClientConnection, response: str, given: object, **more: Any) -> None:
    await ws.send(json.dumps({"type": "response.steer", "previous_response_id": response, "input": given, **more}))


async def steered(ws: ClientConnection, response: str, given: object, gate: Gate) -> list[dict[str, Any]]:
    """Steer; the model goes on when that has been answered. The events up to the answer."""
    await steer(ws, response, given)
    events = await until(ws, "steer.accepted", "steer.failed")
    gate.set()
    return events


def message(words: str, role: str = "user") -> dict[str, Any]:
    return {"type": "message", "role": role, "content": words}


def output(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": "1"}


def controls(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The steer events, each valid by the SDK's type."""
    found = [event for event in events if event["type"] in SDK]
    for event in found:
        SDK[event["type"]].model_validate(event, strict=True)
    return found


def by_response(events: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """One lane's events, by response: an answer about a response that has ended belongs to the one it names."""
    groups: dict[str, list[dict[str, Any]]] = {}
    current = ""
    for event in events:
        if event["type"] == "response.created":
            current = event["response"]["id"]
        named = event["steer"]["previous_response_id"] if "steer" in event else current
        groups.setdefault(named, []).append(event)
    return list(groups.values())


async def same_prompt_as(engine: Plans, running: Running, items: list[Any], **more: Any) -> None:
    """The last prompt reads as that of a new conversation which consists of these items."""
    continued = words(engine.seen[-1].prompt)
    async with running.connect() as other:
        await turn(other, input=items, **more)
    assert words(engine.seen[-1].prompt) == continued


# --- where the response ends ------------------------------------------------------------------------------------------


async def test_a_response_that_ends_by_itself_completes_and_its_successor_follows() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, " two."), plan("Three."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", instructions="Be brief.", stream_id="main")
        events = await until(ws, "output_text.delta")
        first = events[0]["response"]["id"]
        events += await steered(ws, first, "go left", gate)
        events += [*await until_terminal(ws), *await until_terminal(ws)]

        a, b = by_response(events)
        assert check_response(a)["status"] == "completed"
        successor = check_response(b)
        assert (successor["status"], successor["previous_response_id"]) == ("completed", first)
        assert successor["instructions"] == "Be brief."
        assert text(b) == "Three."
        (accepted,) = controls(events)
        assert accepted["steer"] == {"id": accepted["steer"]["id"], "previous_response_id": first}
        assert accepted["steer"]["id"].startswith("steer_")
        assert {event["stream_id"] for event in events} == {"main"}
        assert engine.aborted == 0
        assert engine.seen[1].prompt.startswith(engine.seen[0].prompt)  # sampled ids are kept
        said = [message("go on"), message("One two.", "assistant"), message("go left")]
        await same_prompt_as(engine, running, said, instructions="Be brief.")


async def test_a_silent_model_is_stopped_at_once() -> None:
    engine = Plans([SILENCE], plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on")
        events = await until(ws, "in_progress")
        await steer(ws, events[0]["response"]["id"], "go left")
        events += [*await until_terminal(ws), *await until_terminal(ws)]

        a, b = by_response(events)
        assert types(a) == ["created", "steer.accepted", "incomplete"]
        cut = check_response(a)
        assert (cut["incomplete_details"], cut["output"]) == ({"reason": "steered"}, [])
        assert check_response(b)["status"] == "completed"
        assert engine.aborted == 1
        await same_prompt_as(engine, running, [message("go on"), message("go left")])


async def test_the_current_item_is_finished_and_no_other_one_begins() -> None:
    gate = Gate()
    engine = Plans(plan("Let me", gate, " look.\n", CALL, SILENCE), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = await until(ws, "output_text.delta")
        events += await steered(ws, events[0]["response"]["id"], "go left", gate)
        events += [*await until_terminal(ws), *await until_terminal(ws)]

        a, b = by_response(events)
        cut = check_response(a)
        assert cut["incomplete_details"] == {"reason": "steered"}
        assert [(item["type"], item["status"]) for item in cut["output"]] == [("message", "completed")]
        assert cut["output"][0]["content"][0]["text"] == "Let me look."
        assert check_response(b)["tools"] == cut["tools"] != []
        assert engine.aborted == 1
        said = [message("go on"), message("Let me look.", "assistant"), message("go left")]
        await same_prompt_as(engine, running, said, tools=[FUNCTION])
        await settled(running, engine, sockets=1)


@pytest.mark.parametrize("at", ["output_item.added", "output_item.done"])
async def test_a_call_runs_to_its_end_and_its_output_is_asked_for(at: str) -> None:
    gate, end = Gate(), Gate()
    engine = Plans(plan(CALL[:40], gate, CALL[40:], end), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION], stream_id="main")
        if at == "output_item.done":
            gate.set()
        events = await until(ws, at)
        events += await steered(ws, events[0]["response"]["id"], "go left", gate)
        end.set()
        events += await until(ws, "steer.pending")

        a = check_response(events)
        assert a["status"] == "completed"
        (call,) = a["output"]
        accepted, pending = controls(events)
        assert pending["steer"] == accepted["steer"]
        assert pending["stream_id"] == "main"
        stub = {"type": "function_call_output", "call_id": call["call_id"], "name": "f"}
        assert (pending["reason"], pending["required_input"]) == ("waiting_for_required_input", [stub])

        given = [output(call), message("and tell me")]
        again = await turn(ws, input=given, previous_response_id=a["id"], tools=[FUNCTION], stream_id="main")
        assert check_response(again)["status"] == "completed"
        said = {"type": "function_call", "call_id": call["call_id"], "name": "f", "arguments": call["arguments"]}
        await same_prompt_as(engine, running, [message("go on"), said, message("go left"), *given], tools=[FUNCTION])
        assert engine.aborted == 0


async def test_a_create_that_is_there_already_needs_no_pending() -> None:
    gate = Gate()
    engine = Plans(plan(CALL, gate), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = await until(ws, "output_item.done")
        response, call = events[0]["response"]["id"], events[-1]["item"]
        await create(ws, input=[output(call)], previous_response_id=response, tools=[FUNCTION])
        events += await steered(ws, response, "go left", gate)
        events += [*await until_terminal(ws), *await until_terminal(ws)]

        assert [event["type"] for event in controls(events)] == ["response.steer.accepted"]
        said = {"type": "function_call", "call_id": call["call_id"], "name": "f", "arguments": call["arguments"]}
        await same_prompt_as(
            engine, running, [message("go on"), said, message("go left"), output(call)], tools=[FUNCTION]
        )


async def test_a_steer_after_the_end_of_a_response_that_waits() -> None:
    engine = Plans(plan(CALL), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        events = await turn(ws, input="go on", tools=[FUNCTION])
        await steer(ws, events[-1]["response"]["id"], "go left")
        events += await until(ws, "steer.pending")

        assert [event["type"] for event in controls(events)] == ["response.steer.accepted", "response.steer.pending"]
        check_response(events)


async def test_several_steers_go_in_together_before_what_is_queued() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, " two."), plan("Three."), plan("Four."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on")
        events = await until(ws, "output_text.delta")
        first = events[0]["response"]["id"]
        await create(ws, input="queued")
        more = [message("then"), {"role": "user", "content": [{"type": "input_text", "text": "up"}]}]
        await steer(ws, first, "go left")
        events += await until(ws, "steer.accepted")
        events += await steered(ws, first, more, gate)
        events += [*await until_terminal(ws), *await until_terminal(ws)]

        said = [message("go on"), message("One two.", "assistant"), message("go left"), message("then"), message("up")]
        prompt = engine.seen[1].prompt
        queued = await until_terminal(ws)
        assert text(queued) == "Four."
        async with running.connect() as other:
            await turn(other, input=said)
        assert engine.seen[-1].prompt == prompt
        assert len(controls(events)) == 2


async def test_a_successor_can_be_steered_and_interrupted() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, "."), plan("Two", SILENCE))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on")
        events = await until(ws, "output_text.delta")
        await steered(ws, events[0]["response"]["id"], "go left", gate)
        await until_terminal(ws)
        second = await until(ws, "output_text.delta")
        await steer(ws, second[0]["response"]["id"], "go right")
        await ws.send(json.dumps({"type": "response.interrupt", "response_id": second[0]["response"]["id"]}))
        second += await until(ws, "steer.failed")

        last = check_response(second)
        assert last["incomplete_details"] == {"reason": "interrupted"}
        accepted, failed = controls(second)
        assert failed["steer"] == {**accepted["steer"], "input": "go right"}
        assert failed["error"]["code"] == "response_not_active"
        await settled(running, engine, sockets=1)


async def test_lanes_are_steered_apart() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, " two."))
    async with gateway(engine) as running, running.connect() as ws:
        firsts: dict[str, str] = {}
        for lane in ("a", "b"):
            await create(ws, input="go on", stream_id=lane)
        events: list[dict[str, Any]] = []
        while len(firsts) < 2:
            events.append(await receive(ws))
            if events[-1]["type"] == "response.created":
                firsts[events[-1]["stream_id"]] = events[-1]["response"]["id"]
        events += await steered(ws, firsts["b"], "go left", gate)
        for _ in range(3):
            events += await until_terminal(ws)

    assert len(by_response([event for event in events if event["stream_id"] == "a"])) == 1
    a, b = by_response([event for event in events if event["stream_id"] == "b"])
    assert check_response(a)["status"] == check_response(b)["status"] == "completed"
    assert [event["stream_id"] for event in controls(events)] == ["b"]


# --- what cannot be ---------------------------------------------------------------------------------------------------


async def test_a_successor_that_is_refused_leaves_the_response_as_it_was() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, "."), plan("Fine."))
    async with gateway(engine, context_length=400) as running, running.connect() as ws:
        await create(ws, input="go on")
        events = await until(ws, "output_text.delta")
        events += await steered(ws, events[0]["response"]["id"], "word " * 500, gate)
        events += await until(ws, "steer.failed")

        first = check_response(events)
        accepted, failed = controls(events)
        assert failed["error"]["code"] == "successor_creation_failed"
        assert failed["steer"] == {**accepted["steer"], "input": "word " * 500}
        assert "error" not in {event["type"] for event in events}
        again = await turn(ws, input="shorter", previous_response_id=first["id"])
        assert check_response(again)["status"] == "completed"


async def test_input_that_this_model_cannot_see_comes_back() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, "."))
    picture = [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on")
        events = await until(ws, "output_text.delta")
        events += await steered(ws, events[0]["response"]["id"], picture, gate)
        events += await until(ws, "steer.failed")

        failed = controls(events)[-1]
        given = [{"type": "message", **picture[0]}]
        assert (failed["error"]["code"], failed["steer"]["input"]) == ("successor_creation_failed", given)


async def test_a_refused_create_gives_the_steer_back_after_its_error() -> None:
    engine = Plans(plan(CALL), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        first = await turn(ws, input="go on", tools=[FUNCTION])
        response = first[-1]["response"]["id"]
        await steer(ws, response, "go left")
        await until(ws, "steer.pending")
        await create(ws, input="no output", previous_response_id=response, tools=[FUNCTION])
        error, failed = await receive(ws), await receive(ws)

        assert (error["type"], error["error"]["code"]) == ("error", "invalid_function_call_output")
        assert failed["error"]["code"] == "successor_creation_failed"
        controls([failed])
        assert check_response(await turn(ws, input="new"))["status"] == "completed"


@pytest.mark.parametrize(
    ("target", "more", "code"),
    [
        ("resp_unknown", {}, "response_not_found"),
        ("done", {}, "response_already_completed"),
        ("running", {"stream_id": "a"}, "invalid_input"),
        ("running", {"input": [{"type": "function_call_output", "call_id": "c", "output": "1"}]}, "invalid_input"),
    ],
)
async def test_a_refused_steer_leaves_the_response_running(target: str, more: dict[str, Any], code: str) -> None:
    gate = Gate()
    engine = Plans(plan("Done."), plan("One", gate, " two."))
    async with gateway(engine) as running, running.connect() as ws:
        done = (await turn(ws, input="a"))[-1]["response"]["id"]
        await create(ws, input="b", previous_response_id=done)
        events = await until(ws, "output_text.delta")
        ids = {"done": done, "running": events[0]["response"]["id"]}
        await steer(ws, ids.get(target, target), **{"given": "go left", **more})
        failed = (await until(ws, "steer.failed"))[-1]
        gate.set()
        rest = await until_terminal(ws)

    controls([failed])
    assert failed["error"]["code"] == code
    assert "id" not in failed["steer"]
    assert rest[-1]["type"] == "response.completed"


async def test_automatic_compaction_and_conversations_are_not_steered() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, "."))
    compaction = [{"type": "compaction", "compact_threshold": 100_000}]
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="a", context_management=compaction)
        events = await until(ws, "output_text.delta")
        events += await steered(ws, events[0]["response"]["id"], "go left", gate)
        events += await until_terminal(ws)

        (failed,) = controls(events)
        assert failed["error"]["code"] == "steering_not_supported"
        assert check_response(events)["status"] == "completed"


# --- each moment, each fault ------------------------------------------------------------------------------------------

SPOKEN = plan("One two.\n", CALL, " Three")
MOMENTS = range(12)


def slowly(steps: list[Any]) -> list[Any]:
    return [part for step in steps for part in (step, 0.01)]


@pytest.mark.parametrize("moment", MOMENTS)
async def test_at_each_event(moment: int) -> None:
    """Before the call the response is cut behind its message; from the call on it waits for the output."""
    engine = Plans(slowly(SPOKEN), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = [await receive(ws) for _ in range(moment + 1)]
        await steer(ws, events[0]["response"]["id"], "go left")
        events += await until_terminal(ws)
        first = check_response(events)

        calls = [item for item in first["output"] if item["type"] == "function_call"]
        said: list[dict[str, Any]] = []
        for item in first["output"]:
            if item in calls:
                said.append({key: item[key] for key in ("type", "call_id", "name", "arguments")})
            else:
                said.append(message(item["content"][0]["text"], "assistant"))
        if calls:
            assert first["status"] == "completed"
            pending = await receive(ws)
            controls([pending])
            assert pending["type"] == "response.steer.pending"
            answers = [output(call) for call in calls]
            second = await turn(ws, input=answers, previous_response_id=first["id"], tools=[FUNCTION])
        else:
            assert (first["incomplete_details"], engine.aborted) == ({"reason": "steered"}, 1)
            second = await until_terminal(ws)
        assert check_response(second)["status"] == "completed"
        if not calls:  # behind a call the model said more, which its context shows in that order
            said.append(message("go left"))
            await same_prompt_as(engine, running, [message("go on"), *said], tools=[FUNCTION])
        await settled(running, engine, sockets=1)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_engine_fails_at_each_step(moment: int) -> None:
    gate = Gate()
    steps = [*SPOKEN[:moment], gate, EngineError("overloaded", "Too much.")]
    engine = Plans(steps, plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = [await receive(ws)]
        events += await steered(ws, events[0]["response"]["id"], "go left", gate)
        events += await until_terminal(ws)

        if events[-1]["type"] == "response.failed":
            events.append(await receive(ws))
            accepted, failed = controls(events)
            assert failed["steer"] == {**accepted["steer"], "input": "go left"}
            assert failed["error"]["code"] == "response_not_active"
        else:
            assert check_response(await until_terminal(ws))["status"] == "completed"
        check_response(events)
        assert check_response(await turn(ws, input="well?"))["status"] == "completed"
        await settled(running, engine, sockets=1)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_the_client_leaves_after_steering(moment: int) -> None:
    engine = Plans(slowly(SPOKEN), plan("Fine.", SILENCE))
    async with gateway(engine) as running:
        async with running.connect() as ws:
            await create(ws, input="go on", tools=[FUNCTION])
            events = [await receive(ws) for _ in range(moment + 1)]
            await steer(ws, events[0]["response"]["id"], "go left")
            await asyncio.sleep(0.02)
            ws.transport.abort()
        await settled(running, engine)


@pytest.mark.parametrize("moment", MOMENTS)
async def test_a_draining_socket_gives_the_steer_back(moment: int) -> None:
    engine = Plans(slowly(SPOKEN), plan("Fine."))
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION])
        events = [await receive(ws) for _ in range(moment + 1)]
        await steer(ws, events[0]["response"]["id"], "go left")
        while not controls(events):
            events.append(await receive(ws))
        draining = asyncio.create_task(next(iter(running.gateway.sockets)).drain(1012, "update"))
        events += await until_closed(ws, 1012)
        await draining

        for group in by_response(events):
            check_response(group)
        # given back, unless the successor had begun before
        assert len(by_response(events)) == 2 or controls(events)[-1]["type"] == "response.steer.failed"
        await settled(running, engine)


# --- a real client ----------------------------------------------------------------------------------------------------


async def test_the_official_sdk_steers_and_returns_tool_outputs() -> None:
    first, second = Gate(), Gate()
    engine = Plans(plan("One", first, " two."), plan(CALL, second), plan("Done."))
    async with gateway(engine) as running:
        client = AsyncOpenAI(base_url=running.http, api_key="none", max_retries=0)
        seen: list[str] = []
        gates = [first, second]
        current = ""
        async with client, client.responses.connect() as connection, asyncio.timeout(30):
            await connection.response.create(model="m", input="go on", store=False, tools=[FUNCTION])  # type: ignore[list-item]
            async for event in connection:
                seen.append(event.type)
                if event.type == "response.output_item.added" and gates:
                    await connection.response.steer(previous_response_id=current, input="go left")
                elif event.type == "response.steer.accepted":
                    gates.pop(0).set()
                elif event.type == "response.created":
                    current = event.response.id
                elif event.type == "response.steer.pending":
                    stub = event.required_input[0]
                    assert stub.type == "function_call_output"
                    done: Any = {"type": stub.type, "call_id": stub.call_id, "output": "1"}
                    await connection.response.create(
                        model="m", previous_response_id=event.steer.previous_response_id, input=[done], store=False
                    )
                elif event.type == "response.completed" and event.response.output_text == "Done.":
                    break
    small = [kind for kind in seen if "steer" in kind or kind in {"response.created", "response.completed"}]
    assert small == [
        "response.created",
        "response.steer.accepted",
        "response.completed",
        "response.created",
        "response.steer.accepted",
        "response.completed",
        "response.steer.pending",
        "response.created",
        "response.completed",
    ]
