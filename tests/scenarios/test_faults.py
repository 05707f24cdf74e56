"""Scenarios of spec/bugs.md that need a misbehaving peer, spoken to byte by byte (O-10, O-13, O-15), many of them, a
clock or a look at memory (O-71, O-73, O-82, O-83), all transports side by side (O-90), and every fault at every step
of a turn."""

from __future__ import annotations

import asyncio
import gc
import random
import re
import socket
import struct
import time
import tracemalloc
from typing import Any

import pytest

from actors.conversation import Response
from actors.session import Session
from inference.scripted import Fault, Stall
from tests.conformance.driver import Gated, Result, call, connected, eventually, function, says, script, serving
from tests.conformance.raw import CLOSE, TEXT, create, masked, raw
from tests.support.cost import TRIES
from tests.support.gateway import Running


async def test_o10_shutdown_is_bounded_by_the_grace_for_a_client_that_never_answers() -> None:
    """icebear0828/codex-proxy#752: half-open clients held up the shutdown without bound."""
    settings = {"limits": {"drain_grace_s": 0.3}}
    async with serving(Gated(), settings) as running, raw(running) as idle, raw(running) as busy:
        busy.writer.write(masked(TEXT, create("hi")))
        await busy.until("response.output_text.delta")
        await asyncio.wait_for(running.gateway.drain(1001, "shutting down"), 30)
        assert not running.gateway.sockets
        code, body = await idle.frame()
        assert (code, body[:2]) == (CLOSE, struct.pack("!H", 1001))
        await busy.until("response.failed")
        code, body = await busy.frame()
        assert (code, body[:2]) == (CLOSE, struct.pack("!H", 1001))


async def test_o13_a_large_request_that_comes_slowly_counts_as_life() -> None:
    """router-for-me/CLIProxyAPI#5734. A client cannot send a pong in the middle of a frame, so what it sends counts."""
    settings = {"limits": {"ping_interval_s": 0.5, "ping_timeout_s": 2.0}}
    async with serving(says("ok"), settings) as running, raw(running) as slow:
        frame = masked(TEXT, create("x" * 100_000))
        for start in range(0, len(frame), 2500):
            slow.writer.write(frame[start : start + 2500])
            await slow.writer.drain()
            await asyncio.sleep(0.1)
        await slow.until("response.completed")


async def test_o15_a_frozen_client_is_noticed_and_its_turn_stopped() -> None:
    """python-websockets/websockets#1128: no FIN, no pong."""
    engine = Gated()
    settings = {"limits": {"ping_interval_s": 0.1, "ping_timeout_s": 0.2}}
    async with serving(engine, settings) as running, raw(running) as frozen, connected(running) as other:
        frozen.writer.write(masked(TEXT, create("hi")))
        await frozen.until("response.output_text.delta")
        await eventually(lambda: len(running.gateway.sockets) == 1, 12)
        await eventually(lambda: engine.aborted == 1)
        engine.open.set()
        assert (await other.turn(input="hi")).completed


ANSWER = "<think>\nhm\n</think>\n\nLook: " + call("f", '{"a": 1}')


@pytest.mark.parametrize("fault", ["overloaded", "unavailable", "invalid"])
async def test_the_nth_chunk_fails(fault: Any) -> None:
    """Every fault at every step of a turn: one ending, a grammar that holds (the driver), a parent that is gone as the
    rules have it, a socket that works, and nothing left running."""
    pieces = [piece for piece in re.split(r"(?<=\W)", ANSWER) if piece]
    engine = says("ok")
    async with serving(engine, thinking=True) as running, connected(running) as one:
        tasks = len(asyncio.all_tasks())
        for number in range(1, len(pieces)):
            parent = (await one.turn(input="hi")).id
            engine.enqueue(script(*pieces[:number], Fault(fault, "no")))
            result = await one.turn(input="on", previous_response_id=parent, tools=[function("f")])
            assert result.last["type"] == "response.failed"
            again = await one.turn(input="on", previous_response_id=parent)
            assert again.error["code"] == "previous_response_not_found"
        await one.silent(0.05)
        assert (await engine.load()).running == 0
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


async def test_a_client_goes_after_the_nth_event() -> None:
    """CANCEL, and MEM O-76: the engine stops, the socket and its tasks are gone, whenever it happens."""
    engine = says(*[piece for word in ANSWER.split(" ") for piece in (f"{word} ", Stall(0.02))])
    async with serving(engine, thinking=True) as running:
        tasks = len(asyncio.all_tasks())
        for number in range(1, 16):
            async with connected(running) as one:
                await one.create(input="hi", tools=[function("f")])
                for _ in range(number):
                    await one.receive()
                one.ws.transport.abort()
            await eventually(lambda: not running.gateway.sockets)
        assert (await engine.load()).running == 0
        await eventually(lambda: len(asyncio.all_tasks()) <= tasks)


IDLE_SOCKET_BYTES = 40 * 1024
"""Objects of Python for one socket: 24 KiB as counted here, 70 KiB with a compression that nobody bounds."""


async def test_o71_a_megabyte_without_words_holds_up_no_stream() -> None:
    """openai/tiktoken#195: such a text took a time that grew with its square. Other such texts, and what they take, are
    in tests/inference/test_long_text.py. Encoded on the event loop it would be a gap of most of its own time."""
    text = "".join(random.Random(71).choices("abcdefghijklmnopqrstuvwxyz", k=1 << 20))
    engine = says("ok")
    async with serving(engine) as running, connected(running) as streaming, connected(running) as other:
        engine.enqueue(script(*[piece for n in range(9000) for piece in (f"w{n} ", Stall(0.01))]))
        await streaming.create(input="hi")
        await streaming.until("response.output_text.delta")
        for _ in range(TRIES):
            sent = asyncio.create_task(other.turn(input=text))
            longest, began = 0.0, time.monotonic()
            before = began
            while not sent.done():
                await streaming.receive()
                longest, before = max(longest, time.monotonic() - before), time.monotonic()
            assert sent.result().completed
            if longest < (before - began) / 2:
                break
        else:
            raise AssertionError(f"a gap of {longest:.2f} s in each of {TRIES} tries")


async def test_o73_an_idle_socket_has_a_budget_though_its_client_offers_to_compress() -> None:
    """Kludex/uvicorn#1862: a zlib window each way for every socket. The process as a whole is in benchmarks/turn.py."""
    async with serving(says("ok")) as running:
        clients = [await idle(running) for _ in range(20)]
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            clients += [await idle(running) for _ in range(200)]
            await eventually(lambda: len(running.gateway.sockets) == 220)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert grown / 200 < IDLE_SOCKET_BYTES
        for client in clients:
            client.close()
        await eventually(lambda: not running.gateway.sockets)


async def idle(running: Running) -> socket.socket:
    """A socket that offers permessage-deflate, costs its own side nothing and says no more."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", running.port))
    lines = ["GET /v1/responses HTTP/1.1", "Host: 127.0.0.1", "Upgrade: websocket", "Connection: Upgrade"]
    lines += ["Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==", "Sec-WebSocket-Version: 13"]
    lines += ["Sec-WebSocket-Extensions: permessage-deflate; client_max_window_bits", "", ""]
    await loop.sock_sendall(client, "\r\n".join(lines).encode())
    answer = await loop.sock_recv(client, 4096)
    assert answer.startswith(b"HTTP/1.1 101"), answer
    return client


def alive(*kinds: type) -> int:
    """Objects of these types that something still holds."""
    gc.collect()
    return sum(type(each) in kinds for each in gc.get_objects())


async def test_o82_sessions_that_are_over_leave_nothing() -> None:
    """ray-project/ray#58815: memory grew with each cycle. Ray's own controller is not ours to test."""
    async with serving(says("ok")) as running:
        tasks, held = len(asyncio.all_tasks()), alive(Session, Response)
        for _ in range(3):
            for _ in range(10):
                async with connected(running) as one:
                    parent = (await one.turn(input="hi")).id
                    await one.turn(input="on", previous_response_id=parent, stream_id="lane")
            await eventually(lambda: not running.gateway.sockets and len(asyncio.all_tasks()) <= tasks)
            assert alive(Session, Response) == held
        assert running.gateway.actor.memory_bytes == 0


async def test_o83_two_hundred_turns_cut_at_random_end_once_each() -> None:
    """ray-project/ray#39703, and ray-project/ray#38368 (O-76): the actor crashed, or tasks stayed behind."""
    engine = says(*[piece for word in ANSWER.split(" ") for piece in (f"{word} ", Stall(0.05))])
    moments = random.Random(83)
    async with serving(engine, thinking=True) as running:
        tasks = len(asyncio.all_tasks())

        async def cut() -> None:
            async with connected(running) as one:
                await one.create(input="hi", tools=[function("f")])
                await one.receive()
                await asyncio.sleep(moments.uniform(0, 0.5))
                one.ws.transport.abort()

        for _ in range(4):
            await asyncio.gather(*(cut() for _ in range(50)))
        await eventually(lambda: not running.gateway.sockets and len(asyncio.all_tasks()) <= tasks, 10)
        assert (await engine.load()).running == 0
        assert len(engine.received) == 200
        shown = (await running.gateway.actor.metrics.render()).decode()
        ends = re.findall(r'limpet_turns_total\{.*outcome="(\w+)"\} (\d+)', shown)
        assert sum(int(count) for _, count in ends) == 200
        assert {outcome for outcome, _ in ends} <= {"cancelled", "abandoned", "completed"}
        async with connected(running) as one:
            assert (await one.turn(input="hi")).completed


SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": False}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"model": "other"},
    {"model": ""},
    {"model": 5},
    {"model": None},
    {"input": []},
    {"input": None},
    {"input": 5},
    {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}, {"role": "nobody", "content": "b"}]},
    {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA=="}]}]},
    {"input": [{"type": "function_call_output", "call_id": "none", "output": "x"}]},
    {"input": [{"type": "item_reference", "id": "msg_none"}]},
    {"input": "word " * 2000},
    {"input": "word " * 2000, "truncation": "auto"},
    {"instructions": "be brief", "metadata": {"a": "b"}, "user": "u", "unheard_of": 1},
    {"instructions": 5},
    {"metadata": {"a": 5}},
    {"max_output_tokens": 16},
    {"max_output_tokens": 1},
    {"temperature": 0.5, "top_p": 0.5},
    {"temperature": 9},
    {"top_logprobs": 2, "include": ["message.output_text.logprobs"]},
    {"top_logprobs": 99},
    {"reasoning": {"effort": "high"}},
    {"reasoning": {"effort": "boundless"}},
    {"tools": [function("f")], "tool_choice": "required", "parallel_tool_calls": False},
    {"tools": [function("f")], "tool_choice": {"type": "function", "name": "g"}},
    {"tools": [{"type": "function"}]},
    {"tools": [{"type": "web_search"}]},
    {"text": {"format": {"type": "json_schema", "name": "s", "schema": SCHEMA}}},
    {"text": {"format": {"type": "json_schema", "name": "s", "schema": {"type": "nonsense"}}}},
    {"text": {"format": {"type": "letter"}}},
    {"previous_response_id": "resp_none"},
    {"previous_response_id": "resp_none", "conversation": "conv_none"},
    {"conversation": "conv_none"},
    {"prompt": {"id": "pmpt_none"}},
    {"service_tier": "flex"},
]


@pytest.mark.parametrize("model", ["m", "nobody"])
async def test_o90_each_request_gets_the_same_on_each_transport(model: str) -> None:
    """BerriAI/litellm#41081: the socket looked its provider up in another way, and failed."""
    engine = says("word " * 30)
    async with (
        serving(engine, models=("m", "other"), context_length=1000) as running,
        connected(running, "socket") as ws,
        connected(running, "sse") as sse,
        connected(running, "json") as http,
    ):
        for options in OPTIONS:
            body = {"model": model, "input": "hi", "store": True, **options}
            outcomes = [outcome(await one.turn(**body)) for one in (ws, sse, http)]
            assert outcomes[1] == outcomes[0], options
            assert outcomes[2] == outcomes[0], options


def outcome(result: Result) -> Any:
    """What came of a turn, without what differs from one turn to the next."""
    if result.last["type"] == "error":
        return result.error
    response = {key: value for key, value in result.response.items() if not key.endswith("_at") and key != "id"}
    del response["usage"]["input_tokens_details"]  # the second one finds the first one's prefix
    ids = ("id", "call_id")
    response["output"] = [{key: value for key, value in item.items() if key not in ids} for item in response["output"]]
    return response
