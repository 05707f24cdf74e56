"""Rollouts over a real socket (docs/rollout-extension.md): one response that waits for its tools and goes on."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from websockets.asyncio.client import ClientConnection

from actors.adoption import flatten, restore
from inference.engine import Chunk, EngineError
from inference.tokenizer import pack_ids
from tests.support.gateway import create, gateway, receive, text, turn, until_terminal
from tests.support.plans import (
    CALL,
    END,
    FUNCTION,
    SILENCE,
    TOKENIZER,
    Gate,
    Plans,
    check_response,
    ids_of,
    plan,
    settled,
    types,
    until,
    words,
)

ON = {"server": {"rollout_extension": True}}
TWO_CALLS = (plan("Let me look.\n", CALL), plan(CALL), plan("It rains."))
OPENING = TOKENIZER.encode("assistant\n")
CUSTOM = {"type": "custom", "name": "g"}


async def begin(ws: ClientConnection, **more: Any) -> list[dict[str, Any]]:
    """A rollout up to its first `response.done`."""
    await create(ws, **{"input": "go on", "tools": [FUNCTION], "rollout": True, **more})
    return await until(ws, "done")


async def append(ws: ClientConnection, response: object, given: object, **more: Any) -> None:
    await ws.send(json.dumps({"type": "response.append", "response_id": response, "input": given, **more}))


def outputs(done: dict[str, Any], text: str = "1") -> list[dict[str, Any]]:
    """What a `response.done` waits for."""
    return [{"type": one["type"], "call_id": one["call_id"], "output": text} for one in done["required_input"]]


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def sampled(*parts: str) -> bytes:
    return pack_ids([*(token for part in parts for token in ids_of(part)), END])


async def test_one_response_of_three_generations() -> None:
    engine = Plans(*TWO_CALLS, plan("Fine."))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        first = events[-1]
        response = events[0]["response"]["id"]
        await append(ws, response, outputs(first, "north"))
        events += await until(ws, "done")
        second = events[-1]
        await append(ws, response, [*outputs(second, "south"), user("And tell me.")])
        events += await until_terminal(ws)

        last = check_response(events)
        assert (last["id"], last["status"]) == (response, "completed")
        assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call", "message"]
        added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
        assert added == [0, 1, 2, 3]
        assert types(events).count("created") == 1
        assert text(events) == "Let me look.It rains."

        call = last["output"][1]
        stub = {"type": "function_call_output", "call_id": call["call_id"], "name": "f"}
        assert first.keys() == {"type", "sequence_number", "response_id", "required_input", "usage"}
        assert (first["response_id"], first["required_input"]) == (response, [stub])

        prompts = [generation.prompt for generation in engine.seen]
        assert prompts[1].startswith(prompts[0] + sampled("Let me look.\n", CALL))
        assert prompts[2].startswith(prompts[1] + sampled(CALL))
        lengths = [len(prompt) // 4 for prompt in prompts]
        spoken = [len(sampled("Let me look.\n", CALL)) // 4, len(sampled(CALL)) // 4, len(sampled("It rains.")) // 4]
        counts = [(each["input_tokens"], each["output_tokens"]) for each in (first["usage"], last["usage"])]
        assert counts == [(lengths[0], spoken[0]), (sum(lengths), sum(spoken))]

        # It goes on as from any other response: what was said, then what is new.
        again = await turn(ws, input="And now?", previous_response_id=response, tools=[FUNCTION])
        assert check_response(again)["status"] == "completed"
        assert engine.seen[3].prompt.startswith(prompts[2] + sampled("It rains."))
        # Another actor may adopt it: it is one step behind its parent, as any response.
        node = next(iter(running.gateway.sockets))._session.cache.get(response)
        assert node is not None
        assert restore(flatten(node)).tokens.tail(0) == node.tokens.tail(0)
        await settled(running, engine, sockets=1)


async def test_its_prompts_are_those_of_ordinary_turns() -> None:
    engine = Plans(*TWO_CALLS, *TWO_CALLS)
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        for _ in range(2):
            await append(ws, events[0]["response"]["id"], outputs(events[-1]))
            events += await until(ws, "done", "completed")
        last: list[dict[str, Any]] = []
        given: Any = "go on"
        for _ in range(3):
            more = {"previous_response_id": last[-1]["response"]["id"]} if last else {}
            last = await turn(ws, input=given, tools=[FUNCTION], **more)
            calls = [item for item in last[-1]["response"]["output"] if item["type"] == "function_call"]
            given = [{"type": "function_call_output", "call_id": each["call_id"], "output": "1"} for each in calls]
    prompts = [generation.prompt for generation in engine.seen]
    assert prompts[:3] == prompts[3:]


async def test_several_calls_of_both_kinds_and_a_lane() -> None:
    other = '<tool_call>\n{"name": "g", "arguments": {"input": "x"}}\n</tool_call>'
    engine = Plans(plan(CALL, "\n", other), plan("Two."))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws, stream_id="a", tools=[FUNCTION, CUSTOM])
        required = events[-1]["required_input"]
        kinds = [(each["type"], each["name"]) for each in required]
        assert kinds == [("function_call_output", "f"), ("custom_tool_call_output", "g")]
        response = events[0]["response"]["id"]
        await append(ws, response, outputs(events[-1])[:1])
        failed = await receive(ws)
        assert (failed["type"], failed["stream_id"]) == ("response.append.failed", "a")
        assert failed["error"]["code"] == "invalid_function_call_output"
        await append(ws, response, outputs(events[-1]))
        events += await until_terminal(ws)
        assert {event["stream_id"] for event in events} == {"a"}
        assert check_response(events)["status"] == "completed"


async def test_a_bad_append_says_so_and_the_wait_goes_on() -> None:
    gate = Gate()
    engine = Plans(plan(CALL), plan("One", gate, " two."))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        good, response = outputs(events[-1]), events[0]["response"]["id"]
        image = {"type": "input_image", "image_url": "data:image/png;base64,AA=="}
        bad: list[tuple[object, object, str, str | None]] = [
            ("resp_unknown", good, "response_not_found", "response_id"),
            (5, good, "response_not_found", "response_id"),
            (response, None, "missing_required_parameter", "input"),
            (response, [], "missing_required_parameter", "input"),
            (response, "text", "invalid_type", "input"),
            (response, [5], "invalid_type", "input[0]"),
            (response, [user("hi")], "invalid_function_call_output", "input"),
            (response, [user("hi"), *good], "invalid_value", "input[1]"),
            (response, [*good, {**user("hi"), "role": "system"}], "invalid_value", "input[1]"),
            (response, [{**good[0], "call_id": "call_other"}], "invalid_function_call_output", "input"),
            (response, [{**good[0], "output": [image]}], "unsupported_parameter", "input[0].output[0]"),
        ]
        for target, given, code, param in bad:
            await append(ws, target, given)
            failed = await receive(ws)
            assert failed.keys() == {"type", "response_id", "error"}, code
            assert failed["type"] == "response.append.failed"
            assert failed["error"].keys() == {"type", "code", "message", "param"}
            assert (failed["error"]["type"], failed["error"]["code"]) == ("invalid_request_error", code)
            assert failed["error"]["param"] == param
        assert len(engine.seen) == 1

        await append(ws, response, good)
        events += await until(ws, "output_text.delta")
        await append(ws, response, good)  # now it speaks
        late = await receive(ws)
        assert late["error"]["code"] == "response_not_waiting"
        gate.set()
        events += await until_terminal(ws)
        assert check_response(events)["status"] == "completed"

        await append(ws, response, good)  # now it is over
        assert (await receive(ws))["error"]["code"] == "response_already_completed"


async def test_an_append_that_is_too_long_can_be_sent_again_shorter() -> None:
    engine = Plans(plan(CALL), plan("Fine."))
    async with gateway(engine, ON, context_length=300) as running, running.connect() as ws:
        events = await begin(ws)
        response = events[0]["response"]["id"]
        await append(ws, response, outputs(events[-1], "word " * 400))
        assert (await receive(ws))["error"]["code"] == "context_length_exceeded"
        await append(ws, response, outputs(events[-1]))
        assert check_response([*events, *await until_terminal(ws)])["status"] == "completed"


async def test_an_ordinary_response_takes_no_append() -> None:
    gate = Gate()
    engine = Plans(plan("One", gate, CALL))
    async with gateway(engine, ON) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION], rollout=False)
        events = await until(ws, "output_text.delta")
        await append(ws, events[0]["response"]["id"], [])
        assert (await receive(ws))["error"]["code"] == "response_not_waiting"
        gate.set()
        events += await until_terminal(ws)
        assert check_response(events)["status"] == "completed"
        assert "done" not in types(events)


@pytest.mark.parametrize("value", [True, "yes"])
async def test_it_is_off_by_default(value: object) -> None:
    engine = Plans(plan(CALL))
    async with gateway(engine) as running, running.connect() as ws:
        events = await turn(ws, input="go on", tools=[FUNCTION], rollout=value)
        assert check_response(events)["status"] == "completed"
        await append(ws, events[0]["response"]["id"], [])
        assert (await receive(ws))["error"]["code"] == "unsupported_event"


async def test_what_opts_in_is_a_boolean() -> None:
    async with gateway(Plans(plan("Fine.")), ON) as running, running.connect() as ws:
        (refused,) = await turn(ws, input="go on", rollout="yes")
        assert (refused["status"], refused["error"]["code"]) == (400, "invalid_type")
        assert refused["error"]["param"] == "rollout"
        assert check_response(await turn(ws, input="go on", rollout=None))["status"] == "completed"


async def test_the_lane_is_busy_while_it_waits() -> None:
    engine = Plans(plan(CALL), plan("One."), plan("Two."))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        await create(ws, input="next")
        await asyncio.sleep(0.1)
        assert len(engine.seen) == 1
        await append(ws, events[0]["response"]["id"], outputs(events[-1]))
        check_response([*events, *await until_terminal(ws)])
        assert text(await until_terminal(ws)) == "Two."


async def test_a_socket_lost_while_it_waits_leaves_nothing() -> None:
    engine = Plans(plan(CALL))
    async with gateway(engine, ON) as running:
        async with running.connect() as ws:
            await begin(ws)
            ws.transport.abort()
        await settled(running, engine)
        assert len(engine.seen) == 1


@pytest.mark.parametrize("store", [False, True])
async def test_an_interrupt_while_it_waits_keeps_what_was_said(store: bool) -> None:
    engine = Plans(*TWO_CALLS[:2], plan("Fine."))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws, store=store)
        response = events[0]["response"]["id"]
        await append(ws, response, outputs(events[-1]))
        events += await until(ws, "done")
        done = events[-1]
        await ws.send(json.dumps({"type": "response.interrupt", "response_id": response}))
        events += await until_terminal(ws)

        last = check_response(events)
        assert types(events)[-2:] == ["interrupt.accepted", "incomplete"]
        assert last["incomplete_details"] == {"reason": "interrupted"}
        assert [item["type"] for item in last["output"]] == ["message", "function_call", "function_call"]
        assert last["usage"] == done["usage"]
        await append(ws, response, outputs(done))
        assert (await receive(ws))["type"] == "response.append.failed"
        again = await turn(ws, input=outputs(done), previous_response_id=response, tools=[FUNCTION])
        assert check_response(again)["status"] == "completed"
        assert engine.seen[2].prompt.startswith(engine.seen[1].prompt + sampled(CALL))
        await settled(running, engine, sockets=1)


async def test_an_interrupt_in_a_later_generation_keeps_what_was_appended() -> None:
    engine = Plans(plan(CALL), plan("One two", SILENCE), plan("Fine."), plan("Fine."))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        response, given = events[0]["response"]["id"], outputs(events[-1])
        await append(ws, response, given)
        events += await until(ws, "output_text.delta")
        await ws.send(json.dumps({"type": "response.interrupt", "response_id": response}))
        events += await until_terminal(ws)

        last = check_response(events)
        assert [item["type"] for item in last["output"]] == ["function_call"]
        await turn(ws, input="stop", previous_response_id=response, tools=[FUNCTION])
        # The second prompt without what opens the answer, of which nothing is left.
        kept = engine.seen[1].prompt[: -len(OPENING)]
        assert engine.seen[1].prompt.endswith(OPENING)
        assert engine.seen[2].prompt.startswith(kept)
        assert "One" not in words(engine.seen[2].prompt[len(kept) :])
        await settled(running, engine, sockets=1)


async def test_an_interrupt_while_an_append_is_taken() -> None:
    engine = Plans(plan(CALL), plan("One two", SILENCE))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        response = events[0]["response"]["id"]
        await append(ws, response, outputs(events[-1], "word " * 200_000))  # encoded in a thread
        await ws.send(json.dumps({"type": "response.interrupt", "response_id": response}))
        events += await until_terminal(ws)
        last = check_response(events)
        assert last["incomplete_details"] == {"reason": "interrupted"}
        assert [item["type"] for item in last["output"]] == ["function_call"]
        await settled(running, engine, sockets=1)


async def test_one_that_is_stored_in_a_conversation() -> None:
    engine = Plans(*TWO_CALLS, plan("Fine."))
    async with gateway(engine, ON) as running, httpx.AsyncClient(base_url=running.http) as client:
        conversation = (await client.post("/conversations", json={})).json()["id"]
        async with running.connect() as ws:
            events = await begin(ws, store=True, conversation=conversation)
            for _ in range(2):
                await append(ws, events[0]["response"]["id"], outputs(events[-1]))
                events += await until(ws, "done", "completed")
            last = check_response(events)
            again = await turn(ws, input="And now?", conversation=conversation, tools=[FUNCTION])
            assert check_response(again)["status"] == "completed"
        assert engine.seen[3].prompt.startswith(engine.seen[2].prompt + sampled("It rains."))
        stored = (await client.get(f"/responses/{last['id']}")).json()
        assert stored == last
        asked = (await client.get(f"/responses/{last['id']}/input_items")).json()["data"]
        assert [item["type"] for item in asked] == ["message"]
        items = (await client.get(f"/conversations/{conversation}/items", params={"order": "asc"})).json()["data"]
        call, output = "function_call", "function_call_output"
        kinds = ["message", "message", call, output, call, output, "message"]
        assert [item["type"] for item in items][: len(kinds)] == kinds


async def test_it_cannot_be_steered() -> None:
    async with gateway(Plans(plan(CALL), plan("Fine.")), ON) as running, running.connect() as ws:
        events = await begin(ws)
        response = events[0]["response"]["id"]
        await ws.send(json.dumps({"type": "response.steer", "previous_response_id": response, "input": "go left"}))
        events.append(await receive(ws))
        assert events[-1]["type"] == "response.steer.failed"
        assert events[-1]["error"]["code"] == "steering_not_supported"
        await append(ws, response, outputs(events[-2]))
        assert check_response([*events, *await until_terminal(ws)])["status"] == "completed"


async def test_a_wait_ends_at_the_deadline_of_a_turn() -> None:
    engine = Plans(plan(CALL), plan("Fine."))
    async with gateway(engine, ON | {"limits": {"turn_deadline_s": 0.5}}) as running, running.connect() as ws:
        events = await begin(ws)
        last = check_response([*events, *await until_terminal(ws)])
        assert (last["status"], last["error"]["code"]) == ("failed", "server_error")
        assert check_response(await turn(ws, input="well?"))["status"] == "completed"
        await settled(running, engine, sockets=1)


async def test_each_wait_has_its_own_time() -> None:
    engine = Plans(*TWO_CALLS)
    async with gateway(engine, ON | {"limits": {"turn_deadline_s": 0.6}}) as running, running.connect() as ws:
        events = await begin(ws)
        for _ in range(2):
            await asyncio.sleep(0.4)
            await append(ws, events[0]["response"]["id"], outputs(events[-1]))
            events += await until(ws, "done", "completed", "failed")
        assert check_response(events)["status"] == "completed"


@pytest.mark.parametrize("bound", [0, 1])
async def test_the_bound_on_output_is_one_for_the_whole(bound: int) -> None:
    length = len(ids_of(CALL)) + 1
    engine = Plans(plan(CALL), [Chunk(ids_of(" word"), cached_tokens=0, finish="length")])
    async with gateway(engine, ON) as running, running.connect() as ws:
        await create(ws, input="go on", tools=[FUNCTION], rollout=True, max_output_tokens=length + bound)
        events = await until(ws, "done", "incomplete")
        if bound:
            await append(ws, events[0]["response"]["id"], outputs(events[-1]))
            events += await until_terminal(ws)
            assert engine.seen[1].sampling.max_tokens == bound
        last = check_response(events)
        assert last["incomplete_details"] == {"reason": "max_output_tokens"}
        assert last["output"][0]["status"] == "completed"


async def test_the_engine_fails_in_a_later_generation() -> None:
    engine = Plans(plan(CALL), [EngineError("overloaded", "Too much.")], plan("Fine."))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        await append(ws, events[0]["response"]["id"], outputs(events[-1]))
        last = check_response([*events, *await until_terminal(ws)])
        assert (last["status"], last["error"]["code"]) == ("failed", "rate_limit_exceeded")
        assert check_response(await turn(ws, input="well?"))["status"] == "completed"


async def test_a_drain_ends_a_wait_with_words() -> None:
    engine = Plans(plan(CALL))
    async with gateway(engine, ON) as running, running.connect() as ws:
        events = await begin(ws)
        drain = asyncio.create_task(running.gateway.drain(1012, "stopping", 0.1))
        assert check_response([*events, *await until_terminal(ws)])["status"] == "failed"
        await drain


@pytest.mark.parametrize("value", [True, "yes"])
async def test_over_http_it_is_an_unknown_field(value: object) -> None:
    async with gateway(Plans(plan(CALL)), ON) as running, httpx.AsyncClient(base_url=running.http) as client:
        body = {"model": "m", "input": "go on", "tools": [FUNCTION], "rollout": value}
        answer = (await client.post("/responses", json=body)).json()
        assert (answer["status"], [item["type"] for item in answer["output"]]) == ("completed", ["function_call"])
