"""What HAProxy and Serve must not change: codes, limits, refusals; and that scaling cuts nobody."""

from __future__ import annotations

import asyncio
import itertools
import json
import time

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from tests.cluster.conftest import SCRIPTED
from tests.support.cluster import Cluster
from tests.support.gateway import receive, text, turn

pytestmark = [pytest.mark.ray, pytest.mark.timeout(400)]


async def test_a_large_frame_ends_with_1009_and_a_binary_one_with_1003(cluster: Cluster) -> None:
    for frame, code in (("x" * (cluster.settings.server.request_max_bytes + 1), 1009), (b"\x00", 1003)):
        async with connect(cluster.ws, max_size=None) as ws:
            await ws.send(frame)
            with pytest.raises(ConnectionClosed) as closed:
                await receive(ws)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == code


async def test_refusals_leave_the_socket_usable(cluster: Cluster) -> None:
    async with connect(cluster.ws) as ws:
        await ws.send("{")
        assert (await receive(ws))["error"]["code"] == "invalid_json"
        assert (await turn(ws, model="gpt-0", input="x"))[-1]["error"]["code"] == "model_not_found"
        unknown = await turn(ws, model=SCRIPTED, input="x", previous_response_id="resp_none")
        assert unknown[-1]["error"]["code"] == "previous_response_not_found"
        first = (await turn(ws, model=SCRIPTED, input="x"))[-1]["response"]["id"]
        output = {"type": "function_call_output", "call_id": "call_none", "output": "1"}
        wrong = await turn(ws, model=SCRIPTED, input=[output], previous_response_id=first)
        assert wrong[-1]["error"]["code"] == "invalid_function_call_output"
        assert text(await turn(ws, model=SCRIPTED, input="x")) == "PONG"


def test_a_stored_conversation_goes_on_at_any_actor(cluster: Cluster) -> None:
    previous, owners = None, set()
    for _ in range(12):
        with httpx.Client() as client:
            body = {"model": SCRIPTED, "input": "x", "previous_response_id": previous}
            response = client.post(f"{cluster.http}/responses", json=body, timeout=30).json()
        assert response.get("status") == "completed", response
        previous = response["id"]
        owners.add(previous[5:13])

    assert len(owners) > 1
    prompts = [record.prompt for record in cluster.records(SCRIPTED)][-12:]
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier


async def test_scaling_up_cuts_no_socket(cluster: Cluster) -> None:
    actors = len(await asyncio.to_thread(cluster.counters))
    sockets = [await connect(cluster.ws) for _ in range(24)]
    try:
        firsts = [(await turn(ws, model=SCRIPTED, input="x"))[-1]["response"]["id"] for ws in sockets]
        deadline = time.monotonic() + 120
        while len(await asyncio.to_thread(cluster.counters)) <= actors:
            assert time.monotonic() < deadline, "no actor was added"
            await asyncio.sleep(1)
        await asyncio.sleep(8)  # HAProxy was replaced; sockets of its old process must live on
        for ws, first in zip(sockets, firsts, strict=True):
            assert text(await turn(ws, model=SCRIPTED, input="y", previous_response_id=first)) == "PONG"
        counts = [part["sockets"] for part in await asyncio.to_thread(cluster.counters)]
        assert sum(counts) >= 24
    finally:
        for ws in sockets:
            await ws.close()


async def test_steps_lead_a_client_through_a_tool_loop(cluster: Cluster) -> None:
    steps = [{"call": "look", "args": {"at": "a"}}, {"custom": "run", "input": "say $1"}]
    tools = [
        {
            "type": "function",
            "name": "look",
            "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
        },
        {"type": "custom", "name": "run"},
    ]
    async with connect(cluster.ws) as ws:
        first = (await turn(ws, model=SCRIPTED, tools=tools, input=f"Go. STEPS={json.dumps(steps)}"))[-1]["response"]
        (call,) = first["output"]
        assert (call["type"], json.loads(call["arguments"])) == ("function_call", {"at": "a"})
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "it is TOK_1a"}
        body = {"model": SCRIPTED, "tools": tools, "previous_response_id": first["id"]}
        second = (await turn(ws, **body, input=[output]))[-1]["response"]
        (custom,) = second["output"]
        assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "run", "say TOK_1a")
        output = {"type": "custom_tool_call_output", "call_id": custom["call_id"], "output": "done TOK_2b"}
        body["previous_response_id"] = second["id"]
        assert text(await turn(ws, **body, input=[output])) == "RESULT TOK_2b"
