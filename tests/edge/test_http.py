"""The HTTP face, with the official SDK and with raw requests."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest
from openai import AsyncOpenAI

from inference.engine import Chunk, EngineError
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.engines import PlannedEngine
from tests.support.gateway import gateway

TOKENIZER = scripted_tokenizer()
END = TOKENIZER.special("<|im_end|>")


def says(words: str, pause: float | None = None) -> PlannedEngine:
    plan: list[Chunk | float] = []
    for token in unpack_ids(TOKENIZER.encode(words)):
        plan.append(Chunk([token], cached_tokens=0))
        if pause is not None:
            plan.append(pause)
    return PlannedEngine([*plan, Chunk([END], finish="stop")])


async def test_a_post_answers_with_the_whole_response() -> None:
    async with gateway(says("Hello.")) as running, AsyncOpenAI(base_url=running.http, api_key="k") as client:
        response = await client.responses.create(model="m", input="hi")

    assert response.output_text == "Hello."
    assert response.status == "completed"
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + 3


async def test_a_stored_response_continues_over_http_with_only_new_input() -> None:
    engine = says("ok")
    async with gateway(engine) as running, AsyncOpenAI(base_url=running.http, api_key="k") as client:
        first = await client.responses.create(model="m", input="one")
        second = await client.responses.create(model="m", input="two", previous_response_id=first.id)

    assert second.previous_response_id == first.id
    assert engine.seen[1].prompt.startswith(engine.seen[0].prompt)


async def test_an_unstored_response_is_not_found_by_http() -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        first = (await client.post("/responses", json={"model": "m", "input": "one", "store": False})).json()
        answer = await client.post(
            "/responses", json={"model": "m", "input": "two", "previous_response_id": first["id"]}
        )

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "previous_response_not_found"
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


async def test_sse_is_the_same_events_framed() -> None:
    async with (
        gateway(says("Hi you")) as running,
        httpx.AsyncClient(base_url=running.http) as client,
        client.stream("POST", "/responses", json={"model": "m", "input": "x", "stream": True}) as answer,
    ):
        assert answer.headers["content-type"] == "text/event-stream"
        assert answer.headers["x-request-id"]
        raw = (await answer.aread()).decode()

    blocks = raw.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    events = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks[:-1]]
    assert all(event["event"] == json.loads(event["data"])["type"] for event in events)
    assert events[0]["event"] == "response.created"
    assert events[-1]["event"] == "response.completed"


async def test_the_sdk_streams() -> None:
    async with gateway(says("Hi you")) as running, AsyncOpenAI(base_url=running.http, api_key="k") as client:
        stream = await client.responses.create(model="m", input="x", stream=True)
        text = "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])

    assert text == "Hi you"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_stops_the_engine(stream: bool) -> None:
    engine = says("word " * 200, pause=0.02)
    async with gateway(engine) as running, httpx.AsyncClient(base_url=running.http) as client:
        body = {"model": "m", "input": "x", "stream": stream}
        if stream:
            async with client.stream("POST", "/responses", json=body) as answer:
                await anext(answer.aiter_bytes())
        else:
            with pytest.raises(httpx.ReadTimeout):
                await client.post("/responses", json=body, timeout=0.3)
        for _ in range(100):
            if engine.aborted:
                break
            await asyncio.sleep(0.02)

    assert engine.aborted == 1


async def test_an_engine_that_breaks_ends_the_stream_with_failed() -> None:
    half = Chunk(unpack_ids(TOKENIZER.encode("He")), cached_tokens=0)
    engine = PlannedEngine([half, EngineError("unavailable", "the engine is gone")])
    async with gateway(engine) as running, httpx.AsyncClient(base_url=running.http) as client:
        answer = await client.post("/responses", json={"model": "m", "input": "x"})

    response = answer.json()
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")


@pytest.mark.parametrize(
    ("body", "status", "code", "param"),
    [
        (b"{", 400, "invalid_json", None),
        (b'{"input":"x"}', 400, "missing_required_parameter", "model"),
        (b'{"model":"m"}', 400, "missing_required_parameter", "input"),
        (b'{"model":"m","input":"x","stream_id":"a"}', 400, "invalid_stream_id", "stream_id"),
        (b'{"model":"m","input":[{"type":"nonsense"}]}', 400, "invalid_value", "input[0].type"),
    ],
)
async def test_bad_bodies(body: bytes, status: int, code: str, param: str | None) -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        answer = await client.post("/responses", content=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (status, code, param)


async def test_refusals_of_the_edge() -> None:
    async with (
        gateway(says("ok"), {"server": {"request_max_bytes": 65536}}, models=("m",)) as running,
        httpx.AsyncClient(base_url=running.http) as client,
    ):
        assert (await client.get("/responses")).status_code == 426
        assert (await client.post("/responses", json={"model": "no", "input": "x"})).status_code == 404
        assert (await client.post("/responses", content=b"x" * 65537)).status_code == 413
        missing = await client.get("/nothing")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert (await client.put("/responses")).status_code == 405


async def test_models_and_health() -> None:
    async with gateway(says("ok"), models=("m", "n")) as running, httpx.AsyncClient(base_url=running.http) as client:
        await running.gateway.actor.models.resolve("m")
        await running.gateway.actor.models.resolve("n")
        listed = (await client.get("/models")).json()
        assert [model["id"] for model in listed["data"]] == ["m", "n"]
        assert (await client.get("/models/n")).json()["object"] == "model"
        assert (await client.get("/models/x")).status_code == 404
        root = running.http.removesuffix("/v1")
        assert (await client.get(f"{root}/health/ready")).json() == {"ready": True}
        running.gateway.draining = True
        assert (await client.get(f"{root}/health/ready")).status_code == 503
        assert (await client.post("/responses", json={"model": "m", "input": "x"})).status_code == 503


async def test_keys_are_asked_for() -> None:
    async with (
        gateway(says("ok"), {"server": {"api_keys": ["right"]}}) as running,
        httpx.AsyncClient(base_url=running.http) as client,
    ):
        body = {"model": "m", "input": "x"}
        refused = await client.post("/responses", json=body)
        assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
        assert (await client.post("/responses", json=body, headers={"api-key": "right"})).status_code == 200


async def test_another_keys_response_is_not_found() -> None:
    async with (
        gateway(says("ok"), {"server": {"api_keys": ["one", "two"]}}) as running,
        httpx.AsyncClient(base_url=running.http) as client,
    ):
        first = await client.post("/responses", json={"model": "m", "input": "x"}, headers={"api-key": "one"})
        body = {"model": "m", "input": "y", "previous_response_id": first.json()["id"]}
        theirs = await client.post("/responses", json=body, headers={"api-key": "two"})
        ours = await client.post("/responses", json=body, headers={"api-key": "one"})

    assert theirs.json()["error"]["code"] == "previous_response_not_found"
    assert ours.status_code == 200
