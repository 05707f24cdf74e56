"""The socket as a client sees it: real frames over a real uvicorn, a planned or scripted engine behind."""

from __future__ import annotations

import asyncio
import json

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from inference.engine import Chunk
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.engines import PlannedEngine
from tests.support.gateway import create, gateway, receive, text, turn, until_terminal

TOKENIZER = scripted_tokenizer()
END = TOKENIZER.special("<|im_end|>")


def says(words: str) -> PlannedEngine:
    ids = unpack_ids(TOKENIZER.encode(words))
    return PlannedEngine([*(Chunk([token], cached_tokens=0) for token in ids), Chunk([END], finish="stop")])


async def test_one_turn() -> None:
    async with gateway(says("Hello there.")) as running, running.connect() as ws:
        events = await turn(ws, input="hi")

    assert text(events) == "Hello there."
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[-1]["type"] == "response.completed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


async def test_a_continuation_sends_all_earlier_ids_and_encodes_only_the_new_item() -> None:
    engine = says("Fine.")
    async with gateway(engine) as running, running.connect() as ws:
        first = (await turn(ws, input="How are you?"))[-1]["response"]
        await turn(ws, input="Good.", previous_response_id=first["id"])
        counters = running.gateway.actor.counters

    before, after = (generation.prompt for generation in engine.seen)
    sampled = TOKENIZER.encode("Fine.") + END.to_bytes(4, "little")
    assert after.startswith(before + sampled)
    assert counters.rendered_items == 2
    assert counters.reused_tokens == len(unpack_ids(after[: len(before + sampled)])) + 1 - _head_length(before)


def _head_length(prompt: bytes) -> int:
    """Ids of the head: everything before the user's message."""
    ids = unpack_ids(prompt)
    user = unpack_ids(TOKENIZER.encode("user\nHow are you?"))
    return next(at for at in range(len(ids)) if ids[at : at + len(user)] == user) - 1


async def test_three_turns_grow_one_prompt() -> None:
    engine = says("ok")
    async with gateway(engine) as running, running.connect() as ws:
        previous = None
        for word in ("one", "two", "three"):
            previous = (await turn(ws, input=word, previous_response_id=previous))[-1]["response"]["id"]

    prompts = [generation.prompt for generation in engine.seen]
    assert prompts[1].startswith(prompts[0])
    assert prompts[2].startswith(prompts[1])
    for word in ("one", "two", "three"):
        assert TOKENIZER.encode(f"user\n{word}") in prompts[2]


async def test_instructions_are_not_inherited() -> None:
    engine = says("ok")
    async with gateway(engine) as running, running.connect() as ws:
        first = (await turn(ws, input="a", instructions="Speak Latin."))[-1]["response"]
        await turn(ws, input="b", previous_response_id=first["id"])

    assert TOKENIZER.encode("Speak Latin.") in engine.seen[0].prompt
    assert TOKENIZER.encode("Speak Latin.") not in engine.seen[1].prompt


@pytest.mark.parametrize("message", ["{", "[]", '"x"', "{'a':1}", ""])
async def test_bad_json_is_told_and_the_socket_stays(message: str) -> None:
    async with gateway(says("ok")) as running, running.connect() as ws:
        await ws.send(message)
        error = await receive(ws)
        assert (error["type"], error["status"], error["error"]["code"]) == ("error", 400, "invalid_json")
        assert (await turn(ws, input="hi"))[-1]["type"] == "response.completed"


async def test_an_unknown_model_is_404() -> None:
    async with gateway(says("ok"), models=("m",)) as running, running.connect() as ws:
        error = (await turn(ws, model="gpt-0", input="hi"))[-1]
        assert (error["status"], error["error"]["code"], error["error"]["param"]) == (404, "model_not_found", "model")
        assert (await turn(ws, input="hi"))[-1]["type"] == "response.completed"


async def test_an_unknown_parent_is_told_quickly_and_the_socket_stays() -> None:
    async with gateway(says("ok")) as running, running.connect() as ws:
        error = (await turn(ws, input="hi", previous_response_id="resp_nowhere", stream_id="a"))[-1]
        assert (error["status"], error["error"]["code"]) == (400, "previous_response_not_found")
        assert error["error"]["param"] == "previous_response_id"
        assert error["stream_id"] == "a"
        assert (await turn(ws, input="hi"))[-1]["type"] == "response.completed"


async def test_an_output_of_an_unknown_call_fails_and_evicts_the_parent() -> None:
    """Open Responses tests exactly this over a socket."""
    async with gateway(says("ok")) as running, running.connect() as ws:
        first = (await turn(ws, input="hi"))[-1]["response"]["id"]
        output = {"type": "function_call_output", "call_id": "call_x", "output": "1"}
        wrong = (await turn(ws, input=[output], previous_response_id=first))[-1]
        assert (wrong["status"], wrong["error"]["param"]) == (400, "input")
        again = (await turn(ws, input="hi", previous_response_id=first))[-1]

    assert again["error"]["code"] == "previous_response_not_found"


async def test_a_binary_frame_ends_the_socket_with_1003() -> None:
    async with gateway(says("ok")) as running, running.connect() as ws:
        await ws.send(b"\x00\x01")
        with pytest.raises(ConnectionClosed) as closed:
            await receive(ws)

    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 1003


@pytest.mark.parametrize(("over", "code"), [(0, None), (1, 1009)])
async def test_the_size_limit_is_exact(over: int, code: int | None) -> None:
    limit = 65536
    async with (
        gateway(says("ok"), {"server": {"request_max_bytes": limit}, "limits": {"queued_bytes": limit}}) as running,
        running.connect() as ws,
    ):
        frame = json.dumps({"type": "response.create", "model": "m", "store": False, "input": ""})
        frame = frame[:-2] + "x" * (limit + over - len(frame)) + frame[-2:]
        await ws.send(frame)
        if code is None:
            assert (await until_terminal(ws))[-1]["type"] == "response.completed"
        else:
            with pytest.raises(ConnectionClosed) as closed:
                await until_terminal(ws)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == code


async def test_a_client_that_leaves_stops_the_engine() -> None:
    ids = unpack_ids(TOKENIZER.encode("word " * 50))
    plan: list[Chunk | float] = []
    for token in ids:
        plan += [Chunk([token], cached_tokens=0), 0.05]
    engine = PlannedEngine(plan)
    async with gateway(engine) as running:
        async with running.connect() as ws:
            await create(ws, input="go on")
            while (await receive(ws))["type"] != "response.output_text.delta":
                pass
        for _ in range(100):
            if engine.aborted:
                break
            await asyncio.sleep(0.02)
        assert engine.aborted == 1
        assert not running.gateway.sockets


async def test_two_lanes_run_side_by_side() -> None:
    ids = unpack_ids(TOKENIZER.encode("a b c d e f g h"))
    plan: list[Chunk | float] = []
    for token in ids:
        plan += [Chunk([token], cached_tokens=0), 0.01]
    engine = PlannedEngine([*plan, Chunk([END], finish="stop")])
    async with gateway(engine) as running, running.connect() as ws:
        await create(ws, input="x", stream_id="one")
        await create(ws, input="y", stream_id="two")
        seen = []
        ended = 0
        while ended < 2:
            event = await receive(ws)
            seen.append(event["stream_id"])
            ended += event["type"] == "response.completed"

    first_end = max(index for index, lane in enumerate(seen) if lane == "one")
    assert "two" in seen[:first_end]


async def test_warm_up_builds_state_and_generates_nothing_visible() -> None:
    engine = says("ok")
    async with gateway(engine) as running, running.connect() as ws:
        developer = {"type": "message", "role": "developer", "content": "Be terse."}
        warm = await turn(ws, input=[developer], generate=False)
        assert [event["type"] for event in warm] == ["response.created", "response.in_progress", "response.completed"]
        assert warm[-1]["response"]["output"] == []
        for _ in range(100):
            if engine.seen:
                break
            await asyncio.sleep(0.01)
        primed = engine.seen[0]
        await turn(ws, input="hi", previous_response_id=warm[-1]["response"]["id"])

    assert primed.sampling.max_tokens == 1
    assert engine.seen[1].prompt.startswith(primed.prompt)
    assert TOKENIZER.encode("Be terse.")[8:] in engine.seen[1].prompt


async def test_a_full_replica_refuses_the_handshake_with_503() -> None:
    from websockets.exceptions import InvalidStatus

    full = {"sessions": {"max_sockets_per_replica": 1, "target_sockets_per_replica": 1}}
    async with gateway(says("ok"), full) as running, running.connect():
        with pytest.raises(InvalidStatus) as refused:
            await running.connect()

    assert refused.value.response.status_code == 503
    assert refused.value.response.headers["retry-after"]


async def test_a_bad_key_is_refused_before_the_upgrade() -> None:
    from websockets.exceptions import InvalidStatus

    async with gateway(says("ok"), {"server": {"api_keys": ["right"]}}) as running:
        with pytest.raises(InvalidStatus) as refused:
            async with running.connect(additional_headers={"Authorization": "Bearer wrong"}):
                pass
        response = refused.value.response
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert json.loads(response.body or b"")["error"]["code"] == "invalid_api_key"
        async with running.connect(additional_headers={"Authorization": "Bearer right"}) as ws:
            assert (await turn(ws, input="hi"))[-1]["type"] == "response.completed"


async def test_another_path_has_no_socket_and_says_where_there_is_one() -> None:
    from websockets.exceptions import InvalidStatus

    async with gateway(says("ok")) as running:
        for path in ("/", "/v1", "/v1/realtime"):
            with pytest.raises(InvalidStatus) as refused:
                async with connect(f"ws://127.0.0.1:{running.port}{path}"):
                    pass
            response = refused.value.response
            assert response.status_code == 404
            error = json.loads(response.body or b"")["error"]
            assert (error["code"], "/v1/responses" in error["message"]) == ("not_found", True)
