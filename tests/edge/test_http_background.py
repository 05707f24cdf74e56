"""Background responses over HTTP, with the SDK: poll, stream, come back, cancel, leave, drain."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from inference.engine import EngineError
from tests.support.actors import says
from tests.support.engines import PlannedEngine
from tests.support.gateway import Running, gateway

ENDED = ("completed", "failed", "incomplete", "cancelled")


def sdk(running: Running, key: str = "k") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=running.http, api_key=key, max_retries=0)


async def polled(client: AsyncOpenAI, response_id: str) -> Response:
    for _ in range(500):
        found = await client.responses.retrieve(response_id)
        if found.status in ENDED:
            return found
        await asyncio.sleep(0.01)
    raise AssertionError(found.status)


def parsed(raw: str) -> list[dict[str, Any]]:
    blocks = raw.strip().split("\n\n")
    assert blocks[-1] == "data: [DONE]"
    events = [dict(line.split(": ", 1) for line in block.split("\n")) for block in blocks[:-1]]
    assert all(event["event"] == json.loads(event["data"])["type"] for event in events)
    return [json.loads(event["data"]) for event in events]


def numbers(events: Sequence[Any]) -> list[int]:
    return [event["sequence_number"] if isinstance(event, dict) else event.sequence_number for event in events]


async def test_create_and_poll() -> None:
    async with gateway(says("one two", pause=0.02)) as running, sdk(running) as client:
        queued = await client.responses.create(model="m", input="hi", background=True)
        assert (queued.status, queued.background, queued.output, queued.usage) == ("queued", True, [], None)
        done = await polled(client, queued.id)

    assert (done.status, done.output_text, done.created_at) == ("completed", "one two", queued.created_at)


async def test_stream_leave_and_come_back() -> None:
    async with gateway(says("a b c d e f g h", pause=0.03)) as running, sdk(running) as client:
        seen = []
        stream = await client.responses.create(model="m", input="hi", background=True, stream=True)
        async for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
        assert seen[0].type == "response.created"
        made = seen[0].response.id
        rest = [
            event
            async for event in await client.responses.retrieve(
                made, stream=True, starting_after=seen[-1].sequence_number
            )
        ]
        whole = [event async for event in await client.responses.retrieve(made, stream=True)]

    assert numbers([*seen, *rest]) == numbers(whole) == list(range(len(whole)))
    assert [event.type for event in [*seen, *rest]] == [event.type for event in whole]
    assert rest[-1].type == "response.completed"


async def test_a_finished_one_is_replayed_to_the_letter() -> None:
    body = {"model": "m", "input": "x", "background": True, "stream": True}
    async with gateway(says("one two")) as running, httpx.AsyncClient(base_url=running.http) as client:
        first = (await client.post("/responses", json=body)).text
        made = parsed(first)[0]["response"]["id"]
        again = await client.get(f"/responses/{made}?stream=true&include_obfuscation=false")
        after = await client.get(f"/responses/{made}?stream=true&starting_after=3")
        beyond = await client.get(f"/responses/{made}?stream=1&starting_after=99999")

    assert again.headers["content-type"] == "text/event-stream"
    assert again.headers["x-request-id"]
    assert again.text == first
    assert parsed(after.text) == parsed(first)[4:]
    assert beyond.text == "data: [DONE]\n\n"


async def test_a_client_that_leaves_changes_nothing() -> None:
    engine = says("word " * 10, pause=0.02)
    body = {"model": "m", "input": "x", "background": True, "stream": True}
    async with gateway(engine) as running, sdk(running) as client:
        async with (
            httpx.AsyncClient(base_url=running.http) as raw,
            raw.stream("POST", "/responses", json=body) as answer,
        ):
            first = await anext(answer.aiter_text())
        made = json.loads(first.split("data: ", 1)[1].split("\n", 1)[0])["response"]["id"]
        done = await polled(client, made)

    assert done.status == "completed"
    assert engine.aborted == 0


async def test_cancel_is_idempotent() -> None:
    engine = says("word " * 100, pause=0.05)
    async with gateway(engine) as running, sdk(running) as client:
        made = await client.responses.create(model="m", input="hi", background=True)
        stream = asyncio.create_task(_all(client, made.id))
        await asyncio.sleep(0.1)
        first = await client.responses.cancel(made.id)
        second = await client.responses.cancel(made.id)
        found = await client.responses.retrieve(made.id)
        events = await asyncio.wait_for(stream, 30)

    assert first.status == "cancelled"
    assert first == second == found
    assert engine.aborted == 1
    assert events
    assert not {event.type for event in events} & {"response.completed", "response.failed", "response.incomplete"}


async def _all(client: AsyncOpenAI, response_id: str) -> list[Any]:
    return [event async for event in await client.responses.retrieve(response_id, stream=True)]


async def test_cancelling_what_has_ended_shows_it() -> None:
    async with gateway(says("ok")) as running, sdk(running) as client:
        made = await client.responses.create(model="m", input="hi", background=True)
        done = await polled(client, made.id)

        assert await client.responses.cancel(made.id) == done


async def test_an_engine_error_shows_as_failed() -> None:
    async with gateway(PlannedEngine([EngineError("overloaded", "gone")])) as running, sdk(running) as client:
        made = await client.responses.create(model="m", input="hi", background=True)
        done = await polled(client, made.id)
        events = await _all(client, made.id)

    assert done.status == "failed"
    assert done.error is not None
    assert done.error.code == "rate_limit_exceeded"
    assert [event.type for event in events] == ["response.created", "response.in_progress", "response.failed"]


@pytest.mark.parametrize(
    ("fields", "status", "param"),
    [
        ({"store": False}, 400, "store"),
        ({"previous_response_id": "resp_nope"}, 400, "previous_response_id"),
        ({"model": "other"}, 404, "model"),
        ({"background": "yes"}, 400, "background"),
    ],
)
async def test_bad_requests_are_refused_at_once(fields: dict[str, Any], status: int, param: str) -> None:
    body = {"model": "m", "input": "x", "background": True, **fields}
    async with gateway(says("ok"), models=("m",)) as running, httpx.AsyncClient(base_url=running.http) as client:
        answer = await client.post("/responses", json=body)

    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("stream=maybe", "invalid_type", "stream"),
        ("stream=true&starting_after=-2", "integer_below_min_value", "starting_after"),
        ("stream=true&starting_after=x", "invalid_type", "starting_after"),
    ],
)
async def test_bad_replays(query: str, code: str, param: str) -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        made = (await client.post("/responses", json={"model": "m", "input": "x", "background": True})).json()["id"]
        answer = await client.get(f"/responses/{made}?{query}")

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


async def test_a_foreground_response_is_neither_streamed_again_nor_cancelled() -> None:
    async with gateway(says("ok")) as running, sdk(running) as client:
        made = await client.responses.create(model="m", input="hi")
        with pytest.raises(openai.BadRequestError) as streamed:
            await client.responses.retrieve(made.id, stream=True)
        with pytest.raises(openai.BadRequestError):
            await client.responses.cancel(made.id)

    assert streamed.value.param == "stream"


async def test_another_key_can_do_nothing_with_it() -> None:
    async with (
        gateway(says("word " * 50, pause=0.02), {"server": {"api_keys": ["one", "two"]}}) as running,
        sdk(running, "one") as ours,
        sdk(running, "two") as theirs,
    ):
        made = (await ours.responses.create(model="m", input="hi", background=True)).id
        for look in (
            theirs.responses.retrieve(made),
            theirs.responses.retrieve(made, stream=True),
            theirs.responses.cancel(made),
            theirs.responses.delete(made),
        ):
            with pytest.raises(openai.NotFoundError):
                await look
        assert (await ours.responses.cancel(made)).status == "cancelled"


async def test_too_many_are_refused_with_a_time_to_wait() -> None:
    from actors.background import BackgroundLimits, BackgroundTurns

    async with gateway(says("word " * 100, pause=0.05)) as running, httpx.AsyncClient(base_url=running.http) as client:
        actor = running.gateway.actor
        actor.background = BackgroundTurns(actor, BackgroundLimits(running=1, queued_per_tenant=1))
        body = {"model": "m", "input": "x", "background": True}
        made = [(await client.post("/responses", json=body)) for _ in range(3)]
        for answer in made[:2]:
            await client.post(f"/responses/{answer.json()['id']}/cancel")

    assert [answer.status_code for answer in made] == [200, 200, 429]
    assert made[2].json()["error"]["code"] == "rate_limit_exceeded"
    assert made[2].headers["retry-after"] == "5"


class TestDrain:
    async def test_what_runs_ends_and_can_be_collected(self) -> None:
        async with gateway(says("one two three", pause=0.05)) as running, sdk(running) as client:
            made = await client.responses.create(model="m", input="hi", background=True)
            await running.gateway.drain(1012, "stop")
            done = await client.responses.retrieve(made.id)
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model="m", input="hi", background=True)

        assert done.status == "completed"

    async def test_what_outlives_the_grace_fails_and_its_stream_says_so(self) -> None:
        settings = {"limits": {"drain_grace_s": 0.2}}
        async with gateway(says("word " * 200, pause=0.05), settings) as running, sdk(running) as client:
            made = await client.responses.create(model="m", input="hi", background=True)
            stream = asyncio.create_task(_all(client, made.id))
            await asyncio.sleep(0.1)
            await running.gateway.drain(1012, "stop")
            done = await client.responses.retrieve(made.id)
            events = await asyncio.wait_for(stream, 30)

        assert done.status == "failed"
        assert events[-1].type == "response.failed"
