"""What an actor has acknowledged and not yet written is found, or said to be out of reach for now: never said not to
exist, which clients would take for an answer."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors import durable as module
from actors import spill_replay
from actors.durable import Durability
from actors.session import SessionActor
from actors.spill import Spill
from actors.store.database import Database, StoreConfig
from actors.store.errors import StoreError, Unreadable
from actors.store.jobs import ConversationJob, Job
from gateway.protocol.errors import ApiError
from gateway.protocol.items import Message
from tests.support.actors import TENANT, Network, actor, asked, run_turn, says


class Nodes:
    """Actors on nodes, with one database. Each holds its own writes back until all is over."""

    def __init__(self, path: Path, stack: AsyncExitStack) -> None:
        self.network = Network()
        self.over = asyncio.Event()
        self._path = path
        self._stack = stack

    async def start(self, owner: str, node: str) -> SessionActor:
        database = await Database.open(StoreConfig(f"sqlite:///{self._path / 'store.db'}"))
        kept = Held(self.over, database, Spill(self._path / node, owner))
        kept.post.start()  # what others have left is looked for only when it is asked for
        made = await self._stack.enter_async_context(actor(says("Fine."), owner, durability=kept, peers=self.network))
        self.network.actors.append(made)
        return made

    async def kill(self, made: SessionActor) -> None:
        """Nobody hears of it again; the lock on its file goes."""
        self.network.actors.remove(made)
        assert isinstance(made.durability, Held)
        await made.durability.die()


class Held(Durability):
    """One whose own writes wait for a signal, and that can die with them."""

    def __init__(self, over: asyncio.Event, database: Database, spill: Spill) -> None:
        super().__init__(database, spill=spill)
        self._over = over
        self._dead = False

    async def write(self, jobs: Sequence[Job]) -> list[ConversationJob]:
        await self._over.wait()
        return await super().write(jobs)

    async def die(self) -> None:
        self._dead = True
        await self.post.close()
        await self.database.close()
        assert self.spill is not None
        self.spill.close()

    async def close(self, deadline_s: float) -> None:
        if not self._dead:
            await super().close(deadline_s)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    async with AsyncExitStack() as stack:
        found = Nodes(tmp_path, stack)
        yield found
        found.over.set()


@asynccontextmanager
async def refused(code: str) -> AsyncIterator[None]:
    with pytest.raises(ApiError) as caught:
        yield
    assert caught.value.code == code


@pytest.mark.parametrize("node", ["one", "other"])
async def test_an_owner_that_can_not_be_reached(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, node: str) -> None:
    monkeypatch.setattr(module, "RECOVER_S", 0.1)
    owner, other = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", node)
    near = await nodes.start("cccccccc", "one")
    first = await run_turn(owner, asked("one"))
    made = owner.conversations.memory.create(TENANT, {"a": "b"}, (Message("user", "Once."),))
    nodes.network.actors.remove(owner)  # a question to it is lost
    for each in (other, near):
        async with refused("store_unavailable"):
            await run_turn(each, asked("two", previous_response_id=first["id"]))
        async with refused("store_unavailable"):
            await each.archive.retrieve(TENANT, first["id"])
        async with refused("store_unavailable"):
            await each.conversations.call("get", TENANT, made["id"])
    nodes.network.actors.append(owner)
    second = await run_turn(other, asked("two", previous_response_id=first["id"]))
    assert second["status"] == "completed"
    assert await other.conversations.call("get", TENANT, made["id"]) == made


async def test_an_owner_that_answers_is_believed_at_once(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "RECOVER_S", 600.0)
    await nodes.start("aaaaaaaa", "one")
    other = await nodes.start("bbbbbbbb", "one")
    async with refused("previous_response_not_found"):
        await run_turn(other, asked("x", previous_response_id=f"resp_aaaaaaaa{'0' * 32}"))
    async with refused("not_found"):
        await other.archive.retrieve(TENANT, f"resp_aaaaaaaa{'0' * 32}")
    async with refused("not_found"):
        await other.conversations.call("get", TENANT, f"conv_aaaaaaaa{'0' * 32}")


@pytest.mark.parametrize("node", ["one", "other"])
async def test_an_owner_that_is_gone_leaves_all_to_those_beside_it(nodes: Nodes, node: str) -> None:
    owner, asking = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", node)
    await nodes.start("cccccccc", "one")
    first = await run_turn(owner, asked("one"))
    second = await run_turn(owner, asked("two", previous_response_id=first["id"]))
    made = owner.conversations.memory.create(TENANT, {"a": "b"}, (Message("user", "Once."),))
    await nodes.kill(owner)
    assert json.loads(await asking.archive.retrieve(TENANT, first["id"])) == first
    third = await run_turn(asking, asked("three", previous_response_id=second["id"]))
    assert third["status"] == "completed"
    assert await asking.conversations.call("get", TENANT, made["id"]) == made
    async with refused("not_found"):
        await asking.archive.retrieve(TENANT, f"resp_aaaaaaaa{'0' * 32}")


async def test_of_a_node_that_is_gone_nothing_is_known(nodes: Nodes) -> None:
    owner, asking = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", "other")
    first = await run_turn(owner, asked("one"))
    await nodes.kill(owner)
    async with refused("previous_response_not_found"):
        await run_turn(asking, asked("two", previous_response_id=first["id"]))


async def test_changes_of_a_conversation_come_before_it_is_taken_over(nodes: Nodes) -> None:
    """Once another one owns it, what its old owner had still to write would change nothing."""
    owner = await nodes.start("aaaaaaaa", "one")
    made = owner.conversations.memory.create(TENANT, {}, (Message("user", "Once."),))
    await nodes.kill(owner)
    second, beside = await nodes.start("bbbbbbbb", "other"), await nodes.start("cccccccc", "one")
    assert await second.conversations.call("get", TENANT, made["id"]) == made
    first = await run_turn(second, asked("one", conversation=made["id"]))
    await nodes.kill(second)
    await nodes.start("dddddddd", "other")
    again = await run_turn(beside, asked("two", conversation=made["id"]))
    assert again["status"] == "completed"
    head = beside.conversations.memory._known[made["id"]].head  # type: ignore[union-attr]
    assert head is not None
    assert head.parent is not None
    assert head.parent.id == first["id"]


async def test_a_database_that_refuses_writes_for_now(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is locked, full, or read-only: what is left can't be written, and reads work."""
    owner, other = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", "one")
    first = await run_turn(owner, asked("one"))
    await nodes.kill(owner)
    assert other.durability is not None
    with monkeypatch.context() as patched:
        patched.setattr(module, "RECOVER_S", 0.2)
        patched.setattr(other.durability.database, "write", locked)
        async with refused("store_unavailable"):
            await run_turn(other, asked("two", previous_response_id=first["id"]))
        async with refused("store_unavailable"):
            await other.archive.retrieve(TENANT, first["id"])
    assert json.loads(await other.archive.retrieve(TENANT, first["id"])) == first


@pytest.mark.parametrize("gone", [True, False])
async def test_what_is_written_between_two_looks(nodes: Nodes, monkeypatch: pytest.MonkeyPatch, gone: bool) -> None:
    """Somebody else replays it, or its owner writes it and forgets it, just after the database was asked."""
    owner, other = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", "one")
    third = await nodes.start("cccccccc", "one")
    first = await run_turn(owner, asked("one"))
    second = await run_turn(owner, asked("two", previous_response_id=first["id"]))
    assert third.durability is not None
    assert other.durability is not None
    load, ask = other.durability.database.load, nodes.network.ask
    if gone:
        await nodes.kill(owner)

    async def asked_then(operation: str, args: tuple[Any, ...]) -> list[Any]:
        if operation == "response.export":
            if gone:
                assert await third.durability.recover("aaaaaaaa")  # type: ignore[union-attr]
            else:
                nodes.over.set()
                while await load(TENANT, second["id"]) is None:  # noqa: ASYNC110 - it offers nothing to wait for
                    await asyncio.sleep(0.01)
                owner.store._memory._by_id.clear()  # type: ignore[attr-defined]
        return await ask(operation, args)

    monkeypatch.setattr(nodes.network, "ask", asked_then)
    assert (await run_turn(other, asked("three", previous_response_id=second["id"])))["status"] == "completed"


async def locked(*_: Any) -> Any:
    raise StoreError("transient", "database is locked")


async def late(*_: Any) -> list[Any]:
    return [TimeoutError()]


async def test_a_question_that_nobody_answered_in_time(nodes: Nodes, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, other = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", "other")
    first = await run_turn(owner, asked("one"))
    made = owner.conversations.memory.create(TENANT, {}, ())

    with monkeypatch.context() as patched:
        patched.setattr(nodes.network, "ask", late)
        for question in (
            other.archive.retrieve(TENANT, first["id"]),
            other.archive.delete(TENANT, first["id"]),
            other.conversations.call("get", TENANT, made["id"]),
        ):
            async with refused("store_unavailable"):
                await question
    assert json.loads(await other.archive.retrieve(TENANT, first["id"])) == first


@pytest.mark.parametrize("node", ["one", "other"])
async def test_a_deletion_reaches_what_an_owner_has_left(nodes: Nodes, node: str) -> None:
    owner, other = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", node)
    await nodes.start("cccccccc", "one")
    first = await run_turn(owner, asked("one"))
    await nodes.kill(owner)
    await other.archive.delete(TENANT, first["id"])
    async with refused("not_found"):
        await other.archive.retrieve(TENANT, first["id"])


async def test_what_can_never_be_read_does_not_make_everything_unknown(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The row of a parent can't be decrypted: its child waits until it can. Of others that is no reason to say so."""
    monkeypatch.setattr(spill_replay.replay, "__kwdefaults__", {"patience_s": -1.0, "first": ""})
    older, owner = await nodes.start("cccccccc", "one"), await nodes.start("aaaaaaaa", "one")
    other = await nodes.start("bbbbbbbb", "one")
    parent = await run_turn(older, asked("zero"))
    first = await run_turn(owner, asked("one", previous_response_id=parent["id"]))
    await nodes.kill(owner)
    assert other.durability is not None
    load = other.durability.database.load

    async def unreadable(tenant: str, response_id: str) -> Any:
        if response_id == parent["id"]:
            raise Unreadable("permanent", "its key is gone")
        return await load(tenant, response_id)

    monkeypatch.setattr(other.durability.database, "load", unreadable)
    for _ in range(2):
        async with refused("not_found"):
            await other.archive.retrieve(TENANT, f"resp_aaaaaaaa{'0' * 32}")
    monkeypatch.setattr(other.durability.database, "load", load)
    assert json.loads(await other.archive.retrieve(TENANT, first["id"])) == first


async def test_a_look_up_that_is_given_up_leaves_the_files_to_others(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", "one")
    first = await run_turn(owner, asked("one"))
    await nodes.kill(owner)
    take = spill_replay._take
    taken = threading.Event()

    def slowly(*args: Any) -> Any:
        found = take(*args)
        taken.set()
        time.sleep(0.1)
        return found

    monkeypatch.setattr(spill_replay, "_take", slowly)
    assert other.durability is not None
    asking = asyncio.create_task(other.archive.retrieve(TENANT, first["id"]))
    await asyncio.to_thread(taken.wait, 5)
    replaying = other.durability._replaying
    assert replaying is not None
    asking.cancel()
    replaying.cancel()  # as at the end of the process
    await asyncio.gather(asking, replaying, return_exceptions=True)
    monkeypatch.undo()
    near = await nodes.start("cccccccc", "one")
    assert json.loads(await near.archive.retrieve(TENANT, first["id"])) == first


async def test_a_turn_is_added_to_its_conversation_though_its_owner_could_not_be_asked_once(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, other = await nodes.start("aaaaaaaa", "one"), await nodes.start("bbbbbbbb", "other")
    made = owner.conversations.memory.create(TENANT, {}, ())
    lease = await other.conversations.begin(TENANT, made["id"])
    session = other.open(TENANT)
    turn = session.turn(asked("one"), None)
    async for _ in turn.run():
        pass
    node = session.cache.get(turn.response_id)
    assert node is not None
    with monkeypatch.context() as patched:
        patched.setattr(nodes.network, "ask", late)
        committing = asyncio.create_task(lease.commit(node))
        await asyncio.sleep(0.1)
    await committing
    lease.release()
    head = owner.conversations.memory._known[made["id"]].head  # type: ignore[union-attr]
    assert head is not None
    assert head.id == turn.response_id
