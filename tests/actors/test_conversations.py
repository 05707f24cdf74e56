"""Conversations: their items, the turns on them, on one actor and on the wrong one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from actors.conversation_memory import LEASE_S, ConversationLimits, ConversationMemory
from actors.listing import Page
from actors.session import SessionActor
from gateway.protocol.errors import ApiError
from gateway.protocol.ids import IdSource
from gateway.protocol.items import CompactionTrigger, FunctionCall, FunctionCallOutput, Item, ItemReference, Message
from inference.engine import EngineError
from tests.support.actors import TENANT, Network, actor, asked, run_turn, says, two_actors
from tests.support.engines import PlannedEngine

HELLO = Message("user", "hello")
ALL = Page(100, "asc")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def memory(clock: Clock | None = None, **limits: int) -> ConversationMemory:
    number = iter(range(1, 100_000))
    ids = IdSource("0123abcd", lambda size: f"{next(number):0{2 * size}x}")
    return ConversationMemory(ids, ConversationLimits(**limits), lambda: 7, clock or Clock())


def refused(error: pytest.ExceptionInfo[ApiError]) -> tuple[int, str, str | None]:
    return error.value.status, error.value.code, error.value.param


async def texts(actor: SessionActor, conversation_id: str) -> list[str]:
    listed = await actor.conversations.call("items", TENANT, conversation_id, ALL)
    return [item["content"][0]["text"] for item in listed["data"]]


class TestMemory:
    def test_the_object(self) -> None:
        held = memory()
        made = held.create(TENANT, {"a": "b"}, [HELLO])

        assert made == held.get(TENANT, made["id"])
        assert made == {"id": made["id"], "object": "conversation", "created_at": 7, "metadata": {"a": "b"}}
        assert held.update(TENANT, made["id"], {"c": "d"})["metadata"] == {"c": "d"}
        assert held.delete(TENANT, made["id"]) == {
            "id": made["id"],
            "object": "conversation.deleted",
            "deleted": True,
        }
        assert (len(held), held.size) == (0, 0)

    def test_items_get_ids_and_keep_those_they_have(self) -> None:
        held = memory()
        made = held.create(TENANT, {}, [HELLO])
        added = held.add(TENANT, made["id"], [Message("user", "x", id="msg_mine")])

        assert [item["id"] for item in added["data"]] == ["msg_mine"]
        assert held.item(TENANT, made["id"], "msg_mine")["content"] == [{"type": "input_text", "text": "x"}]
        ids = [item["id"] for item in held.items(TENANT, made["id"], ALL)["data"]]
        assert ids[1:] == ["msg_mine"]
        assert held.remove(TENANT, made["id"], ids[0])["object"] == "conversation"
        assert [item["id"] for item in held.items(TENANT, made["id"], ALL)["data"]] == ["msg_mine"]

    @pytest.mark.parametrize(
        "items",
        [
            [ItemReference("msg_1")],
            [CompactionTrigger()],
            [HELLO, Message("user", "x", id="msg_known")],
            [Message("user", "x", id="msg_new"), Message("user", "y", id="msg_new")],
        ],
    )
    def test_what_cannot_be_held_is_refused_whole(self, items: list[Item]) -> None:
        held = memory()
        made = held.create(TENANT, {}, [Message("user", "known", id="msg_known")])
        before, size = held.items(TENANT, made["id"], ALL), held.size
        with pytest.raises(ApiError) as error:
            held.add(TENANT, made["id"], items)

        assert error.value.status == 400
        assert (held.items(TENANT, made["id"], ALL), held.size) == (before, size)

    def test_another_tenants_conversation_is_not_found(self) -> None:
        held = memory()
        made = held.create(TENANT, {}, [Message("user", "x", id="msg_1")])["id"]
        looks: list[tuple[Any, ...]] = [
            (held.get,), (held.update, {}), (held.delete,), (held.add, []), (held.items, ALL), (held.item, "msg_1"),
            (held.remove, "msg_1"), (held.begin, False), (held.context, False), (held.renew, "l"),
            (held.commit, "l", [], False),
        ]  # fmt: skip
        words = set()
        for look, *args in looks:
            with pytest.raises(ApiError) as error:
                look("other", made, *args)
            words.add(error.value.message)

        assert words == {f"Conversation with id '{made}' not found."}
        assert held.release("other", made, "l") is False

    def test_items_are_bounded(self) -> None:
        held = memory(items=2)
        made = held.create(TENANT, {}, [HELLO])["id"]
        with pytest.raises(ApiError):
            held.add(TENANT, made, [HELLO, HELLO])
        held.add(TENANT, made, [HELLO])
        with pytest.raises(ApiError) as error:
            held.begin(TENANT, made, False)

        assert refused(error) == (400, "array_above_max_length", "conversation")

    def test_the_least_recently_used_go_first_but_none_with_a_turn(self) -> None:
        held = memory(conversations=3)
        first, second, third = (held.create(TENANT, {}, [])["id"] for _ in range(3))
        held.begin(TENANT, second, False)
        held.get(TENANT, first)
        fourth = held.create(TENANT, {}, [])["id"]
        fifth = held.create(TENANT, {}, [])["id"]

        known = []
        for each in (first, second, third, fourth, fifth):
            try:
                held.get(TENANT, each)
                known.append(each)
            except ApiError:
                pass
        assert known == [second, fourth, fifth]

    def test_bytes_are_bounded(self) -> None:
        held = memory(bytes=5000)
        for _ in range(10):
            held.create(TENANT, {}, [Message("user", "x" * 1000)])

        assert 3 <= len(held) <= 4
        assert held.size <= 5000

    @pytest.mark.parametrize("operation", ["begin", "add", "remove"])
    def test_one_turn_at_a_time(self, operation: str) -> None:
        held = memory()
        made = held.create(TENANT, {}, [Message("user", "x", id="msg_1")])["id"]
        lease = held.begin(TENANT, made, False)["lease"]
        args: dict[str, Any] = {"begin": False, "add": [HELLO], "remove": "msg_1"}
        with pytest.raises(ApiError) as error:
            getattr(held, operation)(TENANT, made, args[operation])
        assert refused(error) == (400, "conversation_locked", "conversation")
        assert held.items(TENANT, made, ALL)["data"]
        assert held.release(TENANT, made, lease)
        getattr(held, operation)(TENANT, made, args[operation])

    def test_a_lease_of_another_actor_ends_when_it_is_not_renewed(self) -> None:
        clock = Clock()
        held = memory(clock)
        made = held.create(TENANT, {}, [])["id"]
        lost = held.begin(TENANT, made, True)["lease"]
        clock.now += LEASE_S - 1
        assert held.renew(TENANT, made, lost)
        clock.now += LEASE_S - 1
        with pytest.raises(ApiError):
            held.begin(TENANT, made, True)
        clock.now += 2
        held.begin(TENANT, made, True)

        assert not held.renew(TENANT, made, lost)
        assert not held.commit(TENANT, made, lost, [], True)
        assert not held.release(TENANT, made, lost)

    def test_one_of_this_actor_does_not_end_by_itself(self) -> None:
        clock = Clock()
        held = memory(clock)
        made = held.create(TENANT, {}, [])["id"]
        held.begin(TENANT, made, False)
        clock.now += 1e6
        with pytest.raises(ApiError):
            held.begin(TENANT, made, False)


@pytest.fixture(params=["owner", "other"])
async def sides(request: pytest.FixtureRequest) -> AsyncIterator[tuple[SessionActor, SessionActor, Network]]:
    """The actor that has the conversation, and the one that runs the turns: the same, or its peer."""
    async with two_actors(says("ok")) as (one, two, network):
        yield one, one if request.param == "owner" else two, network


Sides = tuple[SessionActor, SessionActor, Network]


class TestTurns:
    async def test_input_and_output_are_added(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [HELLO])["id"]
        response = await run_turn(runner, asked("one", conversation=made))
        assert response["conversation"] == {"id": made}
        await run_turn(runner, asked("two", conversation={"id": made}))

        assert await texts(runner, made) == ["hello", "one", "ok", "two", "ok"]
        assert await texts(owner, made) == await texts(runner, made)

    async def test_the_context_is_that_of_a_chain_of_responses(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [])["id"]
        first = await run_turn(runner, asked("one"))
        by_id = await run_turn(runner, asked("two", previous_response_id=first["id"]))
        await run_turn(runner, asked("one", conversation=made))
        counted = await runner.open(TENANT).turn(asked("two", conversation=made), None).count()
        by_conversation = await run_turn(runner, asked("two", conversation=made))

        assert by_conversation["usage"] == by_id["usage"]
        assert counted == by_id["usage"]["input_tokens"]

    async def test_only_what_is_new_is_rendered(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [HELLO] * 5)["id"]
        await run_turn(runner, asked("one", conversation=made))
        before = runner.counters.rendered_items
        await owner.conversations.call("add", TENANT, made, [HELLO])
        await run_turn(runner, asked("two", conversation=made))

        assert runner.counters.rendered_items - before == 2

    async def test_a_deleted_item_is_no_longer_in_the_context(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [Message("user", "secret " * 50, id="msg_s")])["id"]
        await run_turn(runner, asked("one", conversation=made))
        long = await runner.open(TENANT).turn(asked("two", conversation=made), None).count()
        await runner.conversations.call("remove", TENANT, made, "msg_s")
        short = await runner.open(TENANT).turn(asked("two", conversation=made), None).count()
        await run_turn(runner, asked("two", conversation=made))

        assert long - short > 50
        assert await texts(runner, made) == ["one", "ok", "two", "ok"]

    async def test_a_failed_turn_adds_nothing_and_lets_the_next_one_in(self) -> None:
        async with actor(PlannedEngine([EngineError("unavailable", "gone")])) as one:
            made = one.conversations.memory.create(TENANT, {}, [HELLO])["id"]
            for _ in range(2):
                response = await run_turn(one, asked("one", conversation=made))
                assert response["status"] == "failed"

            assert await texts(one, made) == ["hello"]

    async def test_a_refused_turn_lets_the_next_one_in(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [])["id"]
        orphan: Any = [{"type": "function_call_output", "call_id": "c", "output": "o"}]
        for _ in range(2):
            with pytest.raises(ApiError) as error:
                await run_turn(runner, asked(orphan, conversation=made))
            assert error.value.code == "invalid_function_call_output"
            await asyncio.sleep(0.01)
        assert await texts(owner, made) == []

    async def test_calls_and_outputs_over_two_turns(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [HELLO, FunctionCall("c", "look", "{}")])["id"]
        with pytest.raises(ApiError, match="No tool output"):
            await run_turn(runner, asked("one", conversation=made))
        await asyncio.sleep(0.01)
        await owner.conversations.call("add", TENANT, made, [FunctionCallOutput("c", "found")])
        assert (await run_turn(runner, asked("one", conversation=made)))["status"] == "completed"

    async def test_a_second_turn_at_once_is_refused(self) -> None:
        async with two_actors(says("word " * 20, pause=0.02)) as (one, two, _):
            made = one.conversations.memory.create(TENANT, {}, [])["id"]
            running = asyncio.create_task(run_turn(one, asked("one", conversation=made)))
            await asyncio.sleep(0.1)
            for each in (one, two):
                with pytest.raises(ApiError) as error:
                    await run_turn(each, asked("two", conversation=made))
                assert refused(error) == (400, "conversation_locked", "conversation")
            await running
            assert (await run_turn(two, asked("two", conversation=made)))["status"] == "completed"
            assert (await texts(two, made))[::2] == ["one", "two"]

    async def test_a_turn_that_is_cancelled_adds_nothing(self) -> None:
        async with two_actors(says("word " * 20, pause=0.02)) as (one, two, _):
            made = one.conversations.memory.create(TENANT, {}, [])["id"]
            for each in (one, two):
                running = asyncio.create_task(run_turn(each, asked("one", conversation=made)))
                await asyncio.sleep(0.1)
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                await asyncio.sleep(0.02)
                assert await texts(one, made) == []
            assert (await run_turn(one, asked("two", conversation=made)))["status"] == "completed"

    async def test_a_conversation_deleted_under_a_turn_stays_deleted(self) -> None:
        async with two_actors(says("word " * 10, pause=0.02)) as (one, two, _):
            for each in (one, two):
                made = one.conversations.memory.create(TENANT, {}, [])["id"]
                running = asyncio.create_task(run_turn(each, asked("one", conversation=made)))
                await asyncio.sleep(0.1)
                await each.conversations.call("delete", TENANT, made)

                assert (await running)["status"] == "completed"
                with pytest.raises(ApiError) as error:
                    await each.conversations.call("get", TENANT, made)
                assert error.value.status == 404

    async def test_an_unstored_turn_adds_its_items_too(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [])["id"]
        await run_turn(runner, asked("one", conversation=made, store=False))

        assert await texts(owner, made) == ["one", "ok"]

    async def test_in_the_background(self, sides: Sides) -> None:
        owner, runner, _ = sides
        made = owner.conversations.memory.create(TENANT, {}, [])["id"]
        run = await runner.background.submit(TENANT, asked("one", conversation=made, background=True))
        await run.done.wait()

        assert json.loads(await owner.archive.retrieve(TENANT, run.id))["status"] == "completed"
        assert await texts(owner, made) == ["one", "ok"]

    async def test_compaction_starts_it_anew_and_lists_it_whole(self, sides: Sides) -> None:
        owner, runner, _ = sides
        many = [Message("user", "word " * 100) for _ in range(18)]
        made = owner.conversations.memory.create(TENANT, {}, many)["id"]
        manage = [{"type": "compaction", "compact_threshold": 1000}]
        await run_turn(runner, asked("one", conversation=made))
        long = await runner.open(TENANT).turn(asked("x", conversation=made), None).count()
        response = await run_turn(runner, asked("two", conversation=made, context_management=manage))
        short = await runner.open(TENANT).turn(asked("x", conversation=made), None).count()
        types = [item["type"] for item in response["output"]]
        listed = await owner.conversations.call("items", TENANT, made, ALL)

        assert types == ["compaction", "message"]
        assert long > 1800
        assert short < 1000
        assert len(listed["data"]) == 18 + 2 + 3
        assert (await run_turn(runner, asked("three", conversation=made)))["usage"]["input_tokens"] < 1000

    async def test_a_conversation_of_nobody_is_not_found(self, sides: Sides) -> None:
        owner, runner, network = sides
        for name in ("conv_nope", f"conv_{owner.ids.owner}{'0' * 32}", f"conv_eeeeeeee{'0' * 32}"):
            with pytest.raises(ApiError) as error:
                await run_turn(runner, asked("one", conversation=name))
            assert error.value.status == 404
        assert len(network.asked) <= 2
