"""Conversations over HTTP and sockets, with the SDK."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from tests.support.actors import says
from tests.support.gateway import create, gateway, receive, turn, until_terminal

USER: dict[str, Any] = {"type": "message", "role": "user", "content": "hello"}


def sdk(base: str, key: str = "k") -> AsyncOpenAI:
    return AsyncOpenAI(base_url=base, api_key=key, max_retries=0)


async def texts(client: AsyncOpenAI, conversation_id: str) -> list[str]:
    items = client.conversations.items.list(conversation_id, order="asc", limit=2)
    return [item.content[0].text async for item in items]  # type: ignore[union-attr]


async def test_the_life_of_a_conversation() -> None:
    async with gateway(says("ok")) as running, sdk(running.http) as client:
        made = await client.conversations.create(metadata={"a": "b"}, items=[USER])  # type: ignore[list-item]
        assert made.object == "conversation"
        assert await client.conversations.retrieve(made.id) == made
        updated = await client.conversations.update(made.id, metadata={"c": "d"})
        assert (updated.metadata, updated.created_at) == ({"c": "d"}, made.created_at)
        added = await client.conversations.items.create(made.id, items=[USER, USER])  # type: ignore[list-item]
        assert len(added.data) == 3 - 1
        assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[1].id, False)
        one = await client.conversations.items.retrieve(added.first_id, conversation_id=made.id)
        assert one == added.data[0]
        after = await client.conversations.items.delete(added.first_id, conversation_id=made.id)
        assert after.id == made.id
        assert await texts(client, made.id) == ["hello", "hello"]
        deleted = await client.conversations.delete(made.id)
        assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(made.id)


async def test_an_empty_body_makes_an_empty_conversation() -> None:
    async with gateway(says("ok")) as running, sdk(running.http) as client:
        made = await client.conversations.create()
        async with httpx.AsyncClient(base_url=running.http) as raw:
            bare = (await raw.post("/conversations")).json()
            listed = (await raw.get(f"/conversations/{bare['id']}/items")).json()

    assert made.metadata == bare["metadata"] == {}
    assert listed == {"object": "list", "data": [], "first_id": "", "last_id": "", "has_more": False}


async def test_turns_over_http_and_on_a_socket_add_to_it() -> None:
    async with gateway(says("ok")) as running, sdk(running.http) as client, running.connect() as ws:
        made = (await client.conversations.create(items=[USER])).id  # type: ignore[list-item]
        first = await client.responses.create(model="m", input="one", conversation=made)
        second = (await turn(ws, input="two", conversation={"id": made}))[-1]["response"]
        third = await client.responses.create(model="m", input="three", conversation=made, stream=True)
        events = [event async for event in third]
        counted = await client.responses.input_tokens.count(model="m", input="four", conversation=made)
        fourth = await client.responses.create(model="m", input="four", conversation=made)

        assert first.conversation is not None
        assert first.conversation.id == second["conversation"]["id"] == made
        assert events[-1].type == "response.completed"
        assert fourth.usage is not None
        assert counted.input_tokens == fourth.usage.input_tokens
        assert (await texts(client, made))[::2] == ["hello", "ok", "ok", "ok", "ok"]
        assert (await texts(client, made))[1::2] == ["one", "two", "three", "four"]


async def test_a_response_of_a_conversation_can_be_branched_from() -> None:
    async with gateway(says("ok")) as running, sdk(running.http) as client:
        made = (await client.conversations.create()).id
        first = await client.responses.create(model="m", input="one", conversation=made)
        await client.responses.create(model="m", input="aside", previous_response_id=first.id)
        await client.responses.delete(first.id)

        assert await texts(client, made) == ["one", "ok"]
        assert (await client.responses.create(model="m", input="two", conversation=made)).status == "completed"


async def test_two_turns_at_once() -> None:
    async with (
        gateway(says("word " * 10, pause=0.03)) as running,
        sdk(running.http) as client,
        running.connect() as ws,
    ):
        made = (await client.conversations.create()).id
        await create(ws, input="one", conversation=made)
        while (await receive(ws))["type"] != "response.in_progress":
            pass
        with pytest.raises(openai.BadRequestError) as http:
            await client.responses.create(model="m", input="two", conversation=made)
        with pytest.raises(openai.BadRequestError):
            await client.conversations.items.create(made, items=[USER])  # type: ignore[list-item]
        async with running.connect() as other:
            socket = (await turn(other, input="two", conversation=made))[-1]
        assert (await until_terminal(ws))[-1]["type"] == "response.completed"
        assert (await client.responses.create(model="m", input="two", conversation=made)).status == "completed"

    assert http.value.code == "conversation_locked"
    assert http.value.response.headers["retry-after"] == "1"
    assert (socket["status"], socket["error"]["code"]) == (400, "conversation_locked")


async def test_a_client_that_leaves_adds_nothing_and_lets_go() -> None:
    async with gateway(says("word " * 50, pause=0.03)) as running, sdk(running.http) as client:
        made = (await client.conversations.create()).id
        stream = await client.responses.create(model="m", input="one", conversation=made, stream=True)
        await anext(aiter(stream))
        await stream.close()
        for _ in range(100):
            try:
                await client.conversations.items.create(made, items=[USER])  # type: ignore[list-item]
                break
            except openai.BadRequestError:
                await asyncio.sleep(0.02)

        assert await texts(client, made) == ["hello"]


async def test_a_conversation_excludes_a_previous_response() -> None:
    async with gateway(says("ok")) as running, sdk(running.http) as client:
        made = (await client.conversations.create()).id
        first = await client.responses.create(model="m", input="one")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="m", input="x", conversation=made, previous_response_id=first.id)

    assert (refused.value.code, refused.value.param) == ("mutually_exclusive_parameters", "conversation")


async def test_another_key_finds_nothing() -> None:
    async with (
        gateway(says("ok"), {"server": {"api_keys": ["one", "two"]}}) as running,
        sdk(running.http, "one") as ours,
        sdk(running.http, "two") as theirs,
    ):
        made = (await ours.conversations.create(items=[USER])).id  # type: ignore[list-item]
        item = (await ours.conversations.items.list(made)).data[0].id
        looks = [
            theirs.conversations.retrieve(made),
            theirs.conversations.update(made, metadata={}),
            theirs.conversations.delete(made),
            theirs.conversations.items.create(made, items=[USER]),  # type: ignore[list-item]
            theirs.conversations.items.retrieve(item or "", conversation_id=made),
            theirs.conversations.items.delete(item or "", conversation_id=made),
            theirs.responses.create(model="m", input="x", conversation=made),
        ]
        for look in looks:
            with pytest.raises(openai.NotFoundError) as refused:
                await look
            assert refused.value.body["message"] == f"Conversation with id '{made}' not found."  # type: ignore[index]
        assert await texts(ours, made) == ["hello"]


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("", {"items": [USER] * 21}, "array_above_max_length", "items"),
        ("", {"items": "hello"}, "invalid_type", "items"),
        ("", {"items": [{"type": "nonsense"}]}, "invalid_value", "items[0].type"),
        ("", {"items": [USER, {"type": "message", "role": "user"}]}, "missing_required_parameter", "items[1].content"),
        ("", {"items": [{"type": "item_reference", "id": "msg_1"}]}, "invalid_value", "items[0]"),
        ("", {"metadata": {"a": 1}}, "invalid_type", "metadata.a"),
        ("", {"metadata": {str(n): "" for n in range(17)}}, "invalid_value", "metadata"),
        ("/ID", {}, "missing_required_parameter", "metadata"),
        ("/ID", {"metadata": []}, "invalid_type", "metadata"),
        ("/ID/items", {}, "missing_required_parameter", "items"),
        ("/ID/items", {"items": [USER] * 21}, "array_above_max_length", "items"),
    ],
)
async def test_bad_bodies(path: str, body: dict[str, Any], code: str, param: str) -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        made = (await client.post("/conversations")).json()["id"]
        answer = await client.post(f"/conversations{path.replace('ID', made)}", json=body)

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/conversations/conv_nope", 404),
        ("DELETE", "/conversations/conv_nope", 404),
        ("GET", "/conversations/conv_nope/items", 404),
        ("GET", "/conversations/ID/items/msg_nope", 404),
        ("DELETE", "/conversations/ID/items/msg_nope", 404),
        ("GET", "/conversations/ID/items?limit=0", 400),
        ("GET", "/conversations", 405),
        ("PUT", "/conversations/ID", 405),
    ],
)
async def test_bad_paths(method: str, path: str, status: int) -> None:
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        made = (await client.post("/conversations")).json()["id"]
        answer = await client.request(method, path.replace("ID", made))

    assert answer.status_code == status
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
