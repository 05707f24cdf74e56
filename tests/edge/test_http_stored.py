"""Responses after they were made: retrieve, delete, list their input, count tokens, compact. The SDK is the judge."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from inference.engine import EngineError
from tests.support.actors import says
from tests.support.engines import PlannedEngine
from tests.support.gateway import create, gateway, turn, until_terminal

TWO_KEYS = {"server": {"api_keys": ["one", "two"]}}


def sdk(base: str, key: str = "k") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base, api_key=key, max_retries=0)


def plain(response: Response) -> dict[str, Any]:
    return response.model_dump(mode="json", exclude_unset=True)


TOOL = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}, "strict": False}


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"tools": [{**TOOL, "name": f"look_{n}"} for n in range(60)], "metadata": {"a": "b"}},
        {"instructions": "x" * 9000},
    ],
)
async def test_retrieve_repeats_what_create_said(fields: dict[str, Any]) -> None:
    async with gateway(says("Hello.")) as running, sdk(running.http) as client:
        created = await client.responses.create(model="m", input="hi", **fields)
        found = await client.responses.retrieve(created.id, include=["reasoning.encrypted_content"])

    assert plain(found) == plain(created)
    assert found.output_text == "Hello."


async def test_what_a_socket_stored_is_retrievable_and_what_it_did_not_store_is_not() -> None:
    async with gateway(says("ok")) as running, sdk(running.http) as client, running.connect() as ws:
        stored = (await turn(ws, input="hi", store=True))[-1]["response"]
        warmed = (await turn(ws, input="hi", store=True, generate=False))[-1]["response"]
        unstored = (await turn(ws, input="hi"))[-1]["response"]

        assert plain(await client.responses.retrieve(stored["id"])) == stored
        assert plain(await client.responses.retrieve(warmed["id"])) == warmed
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unstored["id"])
        with pytest.raises(openai.NotFoundError):
            await client.responses.delete(unstored["id"])


async def test_a_deleted_response_is_gone_for_everyone_but_its_children() -> None:
    async with gateway(says("ok")) as running, sdk(running.http) as client, running.connect() as ws:
        first = (await turn(ws, input="one", store=True))[-1]["response"]["id"]
        child = (await turn(ws, input="two", store=True, previous_response_id=first, stream_id="b"))[-1]["response"][
            "id"
        ]
        await client.responses.delete(first)

        for again in (client.responses.retrieve(first), client.responses.delete(first)):
            with pytest.raises(openai.NotFoundError) as refused:
                await again
            assert refused.value.body["message"] == f"Response with id '{first}' not found."  # type: ignore[index]
        with pytest.raises(openai.BadRequestError) as error:
            await client.responses.create(model="m", input="x", previous_response_id=first)
        assert error.value.code == "previous_response_not_found"
        same_socket = (await turn(ws, input="x", previous_response_id=first))[-1]
        async with running.connect() as other:
            new_socket = (await turn(other, input="x", previous_response_id=first))[-1]
        assert {same_socket["error"]["code"], new_socket["error"]["code"]} == {"previous_response_not_found"}
        assert (await client.responses.create(model="m", input="x", previous_response_id=child)).status == "completed"
        assert (await turn(ws, input="x", previous_response_id=child))[-1]["type"] == "response.completed"


async def test_delete_answers_with_what_was_deleted() -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        made = (await client.post("/responses", json={"model": "m", "input": "x"})).json()["id"]
        answer = await client.delete(f"/responses/{made}")

    assert answer.json() == {"id": made, "object": "response", "deleted": True}


async def test_input_items_are_the_whole_context_newest_first() -> None:
    call: list[Any] = [
        {"role": "user", "content": "one"},
        {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "found"},
    ]
    async with gateway(says("ok")) as running, sdk(running.http) as client:
        first = await client.responses.create(model="m", input=call)
        second = await client.responses.create(model="m", input="two", previous_response_id=first.id)
        items = [item async for item in client.responses.input_items.list(second.id)]
        paged = [item async for item in client.responses.input_items.list(second.id, limit=2, order="asc")]
        firsts = [item async for item in client.responses.input_items.list(first.id, order="asc")]

    assert [item.type for item in items] == [
        "message",
        "message",
        "function_call_output",
        "function_call",
        "message",
    ]
    assert paged == items[::-1]
    assert firsts == paged[:3]
    assert len({item.id for item in items}) == 5
    assert paged[3].model_dump(exclude_unset=True) == first.output[0].model_dump(exclude_unset=True)
    for item in items:
        assert type(item).model_validate(item.model_dump(exclude_unset=True))  # all that the type demands is there


async def test_a_failed_response_is_retrievable() -> None:
    async with gateway(PlannedEngine([EngineError("invalid", "gone")])) as running, sdk(running.http) as client:
        created = await client.responses.create(model="m", input="hi")
        found = await client.responses.retrieve(created.id)
        items = [item async for item in client.responses.input_items.list(created.id)]

    assert found.status == "failed"
    assert plain(found) == plain(created)
    assert len(items) == 1


async def test_every_look_is_scoped_to_the_key() -> None:
    async with gateway(says("ok"), TWO_KEYS) as running, sdk(running.http, "one") as ours:
        made = (await ours.responses.create(model="m", input="x")).id
        async with sdk(running.http, "two") as theirs:
            looks = [
                theirs.responses.retrieve(made),
                theirs.responses.delete(made),
                theirs.responses.cancel(made),
                theirs.responses.input_items.list(made),
            ]
            for look in looks:
                with pytest.raises(openai.NotFoundError) as refused:
                    await look
                assert refused.value.body["message"] == f"Response with id '{made}' not found."  # type: ignore[index]
        assert (await ours.responses.retrieve(made)).id == made


@pytest.mark.parametrize("method", ["GET", "DELETE"])
@pytest.mark.parametrize("name", ["resp_nope", f"resp_{'f' * 40}", "x", "%00", "resp_%2e%2e", "ü" * 300])
async def test_ids_of_nothing(method: str, name: str) -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        answer = await client.request(method, f"/responses/{name}")

    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    assert answer.headers["x-request-id"]
    assert len(answer.content) < 2000


@pytest.mark.parametrize(
    ("query", "code", "param"),
    [
        ("limit=0", "integer_below_min_value", "limit"),
        ("limit=-1", "integer_below_min_value", "limit"),
        ("limit=101", "integer_above_max_value", "limit"),
        ("limit=ten", "invalid_type", "limit"),
        ("limit=²", "invalid_type", "limit"),
        ("limit=9999999999999999999999", "invalid_type", "limit"),
        ("order=up", "invalid_value", "order"),
        ("after=nothing", "invalid_value", "after"),
    ],
)
async def test_bad_pages(query: str, code: str, param: str) -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        made = (await client.post("/responses", json={"model": "m", "input": "x"})).json()["id"]
        answer = await client.get(f"/responses/{made}/input_items?{query}")

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


class TestInputTokens:
    @pytest.mark.parametrize("fields", [{}, {"instructions": "Be brief."}, {"tools": [TOOL], "tool_choice": "none"}])
    async def test_it_is_what_a_create_would_report(self, fields: dict[str, Any]) -> None:
        engine = says("ok")
        async with gateway(engine) as running, sdk(running.http) as client:
            first = await client.responses.create(model="m", input="one")
            with_context = {"previous_response_id": first.id, "model": "m", "input": "two", **fields}
            counted = await client.responses.input_tokens.count(**with_context)
            before = len(engine.seen)
            second = await client.responses.create(**with_context)

        assert second.usage is not None
        assert (counted.object, counted.input_tokens) == ("response.input_tokens", second.usage.input_tokens)
        assert before == 1

    async def test_it_counts_what_would_not_fit(self) -> None:
        async with gateway(says("ok"), context_length=500) as running, sdk(running.http) as client:
            counted = await client.responses.input_tokens.count(model="m", input="word " * 1000)

        assert counted.input_tokens > 500

    async def test_without_a_model_it_is_the_only_one(self) -> None:
        async with gateway(says("ok"), models=("m",)) as running, sdk(running.http) as client:
            assert (await client.responses.input_tokens.count(input="hi")).input_tokens > 0
            with pytest.raises(openai.NotFoundError):
                await client.responses.input_tokens.count(model="other", input="hi")

    async def test_a_missing_model_among_several_is_refused(self) -> None:
        async with gateway(says("ok"), models=("m", "n")) as running, sdk(running.http) as client:
            with pytest.raises(openai.BadRequestError) as refused:
                await client.responses.input_tokens.count(input="hi")

        assert refused.value.param == "model"


class TestCompact:
    async def test_the_window_begins_a_new_chain(self) -> None:
        async with gateway(says("ok")) as running, sdk(running.http) as client:
            first = await client.responses.create(model="m", input="remember 7")
            compacted = await client.responses.compact(model="m", previous_response_id=first.id)
            window: Any = [item.model_dump(exclude_unset=True, warnings=False) for item in compacted.output]
            after = await client.responses.create(model="m", input=[*window, {"role": "user", "content": "go on"}])

        assert compacted.object == "response.compaction"
        assert compacted.output[-1].type == "compaction"
        assert compacted.usage.total_tokens > 0
        assert after.status == "completed"

    @pytest.mark.parametrize(
        ("body", "status", "param"),
        [
            ({"input": "x"}, 400, "model"),
            ({"model": "m"}, 400, "input"),
            ({"model": "m", "previous_response_id": "resp_nope"}, 400, "previous_response_id"),
        ],
    )
    async def test_bad_bodies(self, body: dict[str, Any], status: int, param: str) -> None:
        async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
            answer = await client.post("/responses/compact", json=body)

        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


async def test_a_socket_that_queued_a_turn_on_a_deleted_parent_hears_not_found() -> None:
    async with gateway(says("word " * 20, pause=0.01)) as running, sdk(running.http) as client, running.connect() as ws:
        first = (await turn(ws, input="one", store=True))[-1]["response"]["id"]
        await create(ws, input="two", previous_response_id=first)
        await create(ws, input="three", previous_response_id=first)
        await client.responses.delete(first)
        assert (await until_terminal(ws))[-1]["type"] == "response.completed"
        assert (await until_terminal(ws))[-1]["error"]["code"] == "previous_response_not_found"
