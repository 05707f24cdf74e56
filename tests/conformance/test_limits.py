"""Limits and ends, E1 to E9 of protocol.md 10."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from inference.scripted import Fault, Stall
from tests.conformance.driver import Gated, SocketClient, client, connected, eventually, says, script, serving, slowly
from tests.conformance.raw import CLOSE, PING, PONG, TEXT, create, masked, raw

SHORT = {"socket_lifetime_s": 0.3, "lifetime_jitter_s": 0.0, "lifetime_grace_s": 5.0}
LIMIT = "websocket_connection_limit_reached"


async def closing(one: SocketClient) -> int:
    """The close code that comes next."""
    with pytest.raises(ConnectionClosed) as closed:
        await one.receive()
    assert closed.value.rcvd is not None, "no close frame"
    return closed.value.rcvd.code


async def test_e1_an_idle_socket_of_age_gets_the_error_and_1000() -> None:
    async with client(says("ok"), settings={"limits": SHORT}) as one:
        assert (await one.turn(input="hi")).completed
        frame = await one.receive()
        assert (frame["type"], frame["error"]["code"], frame["status"]) == ("error", LIMIT, 400)
        assert "stream_id" not in frame
        assert await closing(one) == 1000


async def test_e2_a_running_turn_finishes_within_the_grace() -> None:
    """1.7: meanwhile nothing is admitted, and the refusal names its lane."""
    async with client(slowly(seconds=0.1), settings={"limits": SHORT}) as one:
        await one.create(input="hi")
        await one.until("response.output_text.delta")
        await asyncio.sleep(0.3)
        await one.create(input="late", stream_id="late")
        events = await one.until("response.completed", "response.failed")
        (refused,) = [event for event in events if event["type"] == "error"]
        assert (refused["error"]["code"], refused["stream_id"]) == (LIMIT, "late")
        assert events[-1]["type"] == "response.completed"
        assert (await one.receive())["error"]["code"] == LIMIT
        assert await closing(one) == 1000


async def test_e2_a_turn_beyond_the_grace_ends_as_failed() -> None:
    """LIFE O-01: never a bare close in mid-turn."""
    async with client(Gated(), settings={"limits": {**SHORT, "lifetime_grace_s": 0.2}}) as one:
        await one.create(input="hi")
        assert (await one.until("response.failed"))[-1]["response"]["error"]["code"] == "server_error"
        assert (await one.receive())["error"]["code"] == LIMIT
        assert await closing(one) == 1000


@pytest.mark.parametrize("how", ["close", "abort"])
async def test_e3_a_client_that_goes_stops_the_engine(how: str) -> None:
    engine = Gated()
    async with serving(engine) as running, connected(running) as one:
        for lane in ("a", "b"):
            await one.create(input="hi", stream_id=lane)
        await eventually(lambda: engine.running == 2)
        if how == "close":
            await one.ws.close()
        else:
            one.ws.transport.abort()
        await eventually(lambda: engine.aborted == 2)
        await eventually(lambda: not running.gateway.sockets)


async def test_e4_shutdown_closes_with_1001() -> None:
    """Idle ones at once and without a word, busy ones after their turn."""
    async with serving(slowly()) as running, connected(running) as idle, connected(running) as busy:
        await busy.create(input="hi")
        await busy.until("response.output_text.delta")
        draining = asyncio.create_task(running.gateway.drain(1001, "shutting down"))
        assert await closing(idle) == 1001
        assert (await busy.finish()).completed
        assert await closing(busy) == 1001
        await draining


BAD_JSON = ["{", "[]", '"x"', "{'a':1}", "", "nul", '{"type":"response.create"', "\ufeff{}", "1e999"]


@pytest.mark.parametrize("text", BAD_JSON)
async def test_e5_malformed_json_is_400_and_the_socket_stays(text: str) -> None:
    async with client(says("ok")) as one:
        await one.send(text)
        frame = await one.receive()
        assert (frame["status"], frame["error"]["code"]) == (400, "invalid_json")
        assert "stream_id" not in frame
        assert (await one.turn(input="hi")).completed


async def test_e5_invalid_utf8_closes_with_1007() -> None:
    """1.6."""
    async with serving(says("ok")) as running, raw(running) as one:
        one.writer.write(masked(TEXT, b'{"type":"\xff"}'))
        kind, body = await asyncio.wait_for(one.frame(), 30)
        assert (kind, int.from_bytes(body[:2])) == (CLOSE, 1007)
        await eventually(lambda: not running.gateway.sockets)


async def test_e5_a_fragmented_message_is_one_message() -> None:
    """1.4: fragmentation is allowed, also with a ping in between."""
    async with serving(says("ok")) as running, raw(running) as one:
        text = create("hi")
        one.writer.write(masked(0x01, text[:10]) + masked(PING, b"x") + masked(0x00, text[10:20]))
        assert (await asyncio.wait_for(one.frame(), 30)) == (PONG, b"x")
        one.writer.write(masked(0x80, text[20:]))
        await one.until("response.completed")


@pytest.mark.parametrize("kind", ["response.cancel", "response.append", "session.update", "", None, 7, {"a": 1}])
async def test_e6_an_unknown_type_is_400(kind: Any) -> None:
    async with client(says("ok")) as one:
        await one.send({} if kind is None else {"type": kind})
        frame = await one.receive()
        assert (frame["status"], frame["error"]["code"], frame["error"]["param"]) == (400, "unsupported_event", "type")
        assert (await one.turn(input="hi")).completed


async def test_e6_processed_is_silent() -> None:
    """Old Codex sends it after each response."""
    async with client(says("ok")) as one:
        result = await one.turn(input="hi")
        await one.send({"type": "response.processed", "response_id": result.id})
        await one.silent(0.2)


CONTROLS = [
    ({"type": "response.interrupt", "response_id": "resp_x", "mode": "discard_partial_items"}, None),
    ({"type": "response.steer", "previous_response_id": "resp_x", "input": "stop"}, "response_not_found"),
    ({"type": "response.inject", "response_id": "resp_x", "input": []}, "response_not_found"),
]


@pytest.mark.parametrize(("frame", "code"), CONTROLS)
@pytest.mark.parametrize("busy", [True, False])
async def test_e6_interrupt_steer_and_inject_fail_in_their_own_way(frame: Any, code: str | None, busy: bool) -> None:
    """3.8, 2.3, 2.4: never an error frame, which costs Codex its socket; a running response goes on."""
    async with client(slowly()) as one:
        if busy:
            await one.create(input="hi")
            await one.until("response.output_text.delta")
        await one.send(frame)
        events = await one.until(f"{frame['type']}.failed")
        assert not [event for event in events if event["type"] == "error"]
        if code is not None:
            assert events[-1]["error"]["code"] == code
        if busy:
            assert (await one.finish()).completed
        assert (await one.turn(input="hi")).completed


REFUSALS: list[dict[str, Any] | str] = [
    "{",
    {"type": "nonsense"},
    {"type": "response.create", "stream_id": ""},
    {"type": "response.create", "input": "x"},
    {"type": "response.create", "model": "unknown", "input": "x"},
    {"type": "response.create", "model": "m", "input": "x", "previous_response_id": "resp_x"},
    {"type": "response.create", "model": "m", "input": "x", "previous_response_id": "a", "conversation": "b"},
    {"type": "response.create", "model": "m", "input": "x", "background": True},
    {"type": "response.create", "model": "m", "input": "x", "prompt": {"id": "p"}},
    {"type": "response.create", "model": "m", "input": "x", "max_output_tokens": 1},
    {"type": "response.create", "model": "m", "input": "x", "top_logprobs": 99},
    {"type": "response.create", "model": "m", "input": "x", "tools": [{"type": "function"}]},
    {"type": "response.create", "model": "m", "input": "x", "tool_choice": {"type": "function", "name": "f"}},
    {"type": "response.create", "model": "m", "input": [{"type": "nonsense"}]},
    {
        "type": "response.create",
        "model": "m",
        "input": [{"type": "function_call_output", "call_id": "c", "output": ""}],
    },
    {"type": "response.create", "model": "m", "input": [{"role": "user", "content": [{"type": "input_image"}]}]},
    {"type": "response.create", "model": "m", "input": [{"type": "item_reference", "id": "msg_x"}]},
    {"type": "response.create", "model": "m", "input": "x" * 10_485_761},
    {"type": "response.create", "model": "m", "input": "a " * 3000},
]


async def test_e7_every_error_frame_has_status_and_an_error_object() -> None:
    """5.1: without the numeric status Codex hangs. The driver checks the shape of each; table-driven as bugs.md O-50
    asks. Afterwards the socket still works."""
    async with client(says("ok"), models=("m",), context_length=2000) as one:
        for frame in REFUSALS:
            await one.send(frame)
            event = await one.receive()
            assert event["type"] == "error", (str(frame)[:200], event)
            assert event["status"] in (400, 404)
            assert set(event) <= {"type", "status", "error", "stream_id", "headers"}
        assert (await one.turn(input="hi")).completed


async def test_e8_retry_after_is_in_headers() -> None:
    """Where a retry helps: top level (Copilot) and in the error (5.1)."""
    engine = Gated()
    async with client(engine, settings={"limits": {"queued_turns": 0}}) as one:
        await one.create(input="hi")
        await one.until("response.created")
        await one.create(input="one more", stream_id="a")
        await one.create(input="too many", stream_id="a")
        events = await one.until("error")
        frame = events[-1]
        assert (frame["status"], frame["error"]["code"]) == (429, "websocket_queue_full")
        assert int(frame["headers"]["retry-after"]) >= 0
        assert frame["error"]["headers"] == frame["headers"]
        assert frame["stream_id"] == "a"
        engine.open.set()
        await one.until("response.completed", count=2)


async def test_e8_an_http_refusal_has_the_header_too() -> None:
    async with serving(says("ok")) as running, connected(running, "json") as one:
        running.gateway.draining = True
        result = await one.turn(input="hi")
        assert result.error["status"] == 503
        assert int(result.headers["retry-after"]) >= 0
        running.gateway.draining = False


async def test_e9_an_idle_connection_is_silent() -> None:
    """1.5: opencode takes any frame between turns for a fault. Not even keepalives, only pings."""
    settings = {"limits": {"keepalive_s": 0.05, "ping_interval_s": 0.05, "ping_timeout_s": 5.0}}
    async with client(says("ok"), settings=settings) as one:
        await one.silent(0.3)
        assert (await one.turn(input="hi")).completed
        await one.silent(0.3)


async def test_e9_within_a_silent_turn_keepalives_come() -> None:
    """3.7, 8.8: inside a turn only, and each takes a sequence number."""
    settings = {"limits": {"keepalive_s": 0.1}}
    async with client(says(Stall(0.5), "ok"), settings=settings) as one:
        result = await one.turn(input="hi")
        assert result.types.count("keepalive") >= 2
        assert result.completed
        await one.silent(0.3)


@pytest.mark.parametrize("fault", ["overloaded", "unavailable", "invalid"])
async def test_e_an_engine_that_fails_ends_the_turn_and_not_the_socket(fault: Any) -> None:
    """8.6: after created it is response.failed, with a code of the published set."""
    engine = says()
    async with client(engine) as one:
        for before in ((), ("partial ",)):
            engine.script = script(*before, Fault(fault, "no"))
            result = await one.turn(input="hi")
            assert result.last["type"] == "response.failed"
            assert result.response["error"]["code"] in ("rate_limit_exceeded", "server_error", "invalid_prompt")
        engine.script = script("ok")
        assert (await one.turn(input="hi")).completed
