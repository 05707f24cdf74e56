"""How sockets and streams end: readers that stop, drains, deadlines, and what must not outlive them."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
from collections.abc import Callable

import httpx
import pytest
from websockets.exceptions import ConnectionClosed

from inference.engine import Chunk
from inference.scripted import Say, Script, ScriptedEngine, Stall
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.engines import PlannedEngine
from tests.support.gateway import Running, create, gateway, receive, turn, until_terminal

QUICK = {"limits": {"send_timeout_s": 0.4, "keepalive_s": 0.4, "sse_comment_s": 0.4, "drain_grace_s": 0.5}}
TOKENIZER = scripted_tokenizer()
END = TOKENIZER.special("<|im_end|>")


def talker() -> ScriptedEngine:
    """Says more than any buffer holds, as fast as it can."""
    return ScriptedEngine(TOKENIZER, Script((Say("word " * 300_000),)), tokens_per_second=0)


async def eventually(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came to that"
        await asyncio.sleep(0.02)


async def stopped_reader(running: Running) -> socket.socket:
    """A client that starts a turn and then reads nothing more."""
    loop = asyncio.get_running_loop()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await loop.sock_connect(client, ("127.0.0.1", running.port))
    key = base64.b64encode(os.urandom(16)).decode()
    upgrade = "Upgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13"
    request = f"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\n{upgrade}\r\nSec-WebSocket-Key: {key}\r\n\r\n"
    await loop.sock_sendall(client, request.encode())
    await loop.sock_recv(client, 1000)
    text = json.dumps({"type": "response.create", "model": "m", "input": "x", "store": False}).encode()
    await loop.sock_sendall(client, bytes([0x81, 0x80 | len(text)]) + bytes(4) + text)
    return client


async def test_a_client_that_reads_nothing_is_let_go_and_its_turn_stopped() -> None:
    engine = talker()
    async with gateway(engine, QUICK) as running:
        client = await stopped_reader(running)
        await eventually(lambda: bool(running.gateway.sockets))
        await eventually(lambda: not running.gateway.sockets)
        await eventually(lambda: engine.aborted == 1)
        client.close()


async def test_a_client_that_reads_nothing_does_not_hold_up_a_drain() -> None:
    async with gateway(talker(), QUICK | {"limits": {**QUICK["limits"], "send_timeout_s": 600}}) as running:
        client = await stopped_reader(running)
        await eventually(lambda: bool(running.gateway.sockets))
        await asyncio.wait_for(running.gateway.drain(1001, "over"), 30)
        await eventually(lambda: not running.gateway.sockets)
        client.close()


async def test_a_stream_whose_client_reads_nothing_is_let_go() -> None:
    engine = talker()
    async with gateway(engine, QUICK) as running:
        body = json.dumps({"model": "m", "input": "x", "stream": True}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", running.port, limit=4096)
        head = f"POST /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await reader.readline()
        await eventually(lambda: engine.aborted == 1)
        await eventually(lambda: not running.gateway.http_turns.tasks)
        writer.close()


async def test_a_turn_past_its_deadline_fails_with_a_terminal_event_and_the_socket_goes_on() -> None:
    engine = ScriptedEngine(TOKENIZER, tokens_per_second=0)
    engine.enqueue(Script((Say("one two"), Stall(3600))))
    async with gateway(engine, {"limits": {"turn_deadline_s": 0.3}}) as running, running.connect() as ws:
        events = await turn(ws, input="x")
        assert events[-1]["type"] == "response.failed"
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        assert "longer than this gateway allows" in events[-1]["response"]["error"]["message"]
        assert (await turn(ws, input="y"))[-1]["type"] == "response.completed"
        await eventually(lambda: engine.aborted == 1)


@pytest.mark.parametrize("stream", [True, False])
async def test_an_http_turn_cut_by_a_drain_hears_how_it_ended(stream: bool) -> None:
    engine = ScriptedEngine(TOKENIZER, Script((Say("one "), Stall(3600))), tokens_per_second=0)
    async with gateway(engine, QUICK) as running, httpx.AsyncClient(base_url=running.http) as client:
        asked = asyncio.create_task(client.post("/responses", json={"model": "m", "input": "x", "stream": stream}))
        await eventually(lambda: len(engine.received) == 1)
        await running.gateway.drain(1001, "over")
        answer = await asked

    assert answer.status_code == 200
    assert "shutting down" in answer.text
    assert answer.text.endswith("data: [DONE]\n\n") if stream else answer.json()["status"] == "failed"


async def test_a_turn_cut_by_a_drain_fails_before_its_socket_closes() -> None:
    engine = ScriptedEngine(TOKENIZER, Script((Say("one "), Stall(3600))), tokens_per_second=0)
    async with gateway(engine, QUICK) as running, running.connect() as ws:
        await create(ws, input="x")
        while (await receive(ws))["type"] != "response.output_text.delta":
            pass
        drain = asyncio.create_task(running.gateway.drain(1012, "stopping"))
        assert (await until_terminal(ws))[-1]["type"] == "response.failed"
        with pytest.raises(ConnectionClosed) as closed:
            await receive(ws)
        await drain

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1012


async def test_turns_that_wait_when_the_socket_goes_are_never_started() -> None:
    ids = unpack_ids(TOKENIZER.encode("a b c"))
    engine = PlannedEngine([Chunk(ids, cached_tokens=0), 0.2, Chunk([END], finish="stop")])
    async with gateway(engine) as running:
        async with running.connect() as ws:
            for _ in range(5):
                await create(ws, input="x")
            await receive(ws)
        await eventually(lambda: not running.gateway.sockets)
        seen = len(engine.seen)
        await asyncio.sleep(0.5)
        assert len(engine.seen) == seen == 1


async def test_warm_ups_end_with_their_socket_and_replace_each_other() -> None:
    engine = ScriptedEngine(TOKENIZER, Script((Stall(3600),)), tokens_per_second=0)
    async with gateway(engine) as running:
        async with running.connect() as ws:
            for number in range(20):
                await turn(ws, input=f"{number}", generate=False)
            await eventually(lambda: len(engine.received) > 0)
            load = await engine.load()
            assert load.running + load.waiting <= 1
        await eventually(lambda: not running.gateway.sockets)
        load = await engine.load()
        assert (load.running, load.waiting) == (0, 0)


async def test_a_signal_of_life_comes_in_a_silent_turn_only() -> None:
    engine = ScriptedEngine(TOKENIZER, tokens_per_second=0)
    engine.enqueue(Script((Stall(1.0), Say("late"))))
    async with gateway(engine, QUICK) as running, running.connect() as ws:
        events = await turn(ws, input="x")
        alive = [event for event in events if event["type"] == "keepalive"]
        assert alive
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(ws.recv(), 1.0)
