"""What survives its actor: responses, conversations, usage; and what is written nowhere."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from actors.durable import Durability
from actors.session import SessionActor
from actors.spill import Spill
from actors.store.database import Database, StoreConfig
from actors.store.errors import StoreError
from actors.stored import StoreLimits
from gateway.protocol.errors import ApiError
from gateway.protocol.items import Message
from inference.tokenizer import unpack_ids
from tests.support.actors import TENANT, Network, actor, asked, run_turn, says


@asynccontextmanager
async def durable(
    path: Path, engine: Any, owner: str = "aaaaaaaa", **options: Any
) -> AsyncIterator[tuple[SessionActor, Durability]]:
    """An actor on a SQLite file. It writes what waits when the block ends."""
    database = await Database.open(StoreConfig(f"sqlite:///{path / 'store.db'}"))
    kept = Durability(database, spill=Spill(path / "spill", owner), audit=True)
    kept.start()
    async with actor(engine, owner, durability=kept, **options) as made:
        yield made, kept


async def kill(kept: Durability) -> None:
    """What waits is not written, and the lock on the spill goes."""
    for task in kept._tasks:
        task.cancel()
    await kept.post.close()
    assert kept.spill is not None
    kept.spill.close()


ZSTD = b"\x28\xb5\x2f\xfd"


def everything(folder: Path) -> bytes:
    """All that is on the disk, compressed values unpacked."""
    found = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    with sqlite3.connect(folder / "store.db") as database:
        tables = [name for (name,) in database.execute("select name from sqlite_master where type = 'table'")]
        rows = [row for table in tables for row in database.execute(f"select * from {table}")]
    packed = [value for row in rows for value in row if isinstance(value, bytes) and ZSTD in value]
    found += [zstandard.ZstdDecompressor().decompress(value[value.index(ZSTD) :]) for value in packed]
    return b"".join(found)


async def test_a_conversation_goes_on_after_a_restart_with_the_same_ids(tmp_path: Path) -> None:
    engine = says("Fine.")
    async with durable(tmp_path, engine) as (one, _):
        first = await run_turn(one, asked("one", instructions="Be kind."))
        second = await run_turn(one, asked("two", previous_response_id=first["id"]))
    async with durable(tmp_path, engine, "bbbbbbbb") as (two, _):
        third = await run_turn(two, asked("three", previous_response_id=second["id"]))
        assert json.loads(await two.archive.retrieve(TENANT, first["id"])) == first
        assert two.counters.encoded_tokens < 20  # nothing of the history is encoded again
    before, after = (generation.prompt for generation in engine.seen[-2:])
    assert unpack_ids(after)[: len(before) // 4] == unpack_ids(before)
    assert third["status"] == "completed"


async def test_a_context_that_comes_from_the_database_counts_in_memory(tmp_path: Path) -> None:
    engine = says("Fine.")
    async with durable(tmp_path, engine) as (one, _):
        first = await run_turn(one, asked("word " * 2000))
    async with durable(tmp_path, engine, "bbbbbbbb") as (two, _):
        session = two.open(TENANT)
        async for _ in session.turn(asked("more", previous_response_id=first["id"]), None).run():
            pass
        assert two.memory_bytes > 10_000  # text, and four bytes a token


async def test_what_is_not_durable_yet_is_answered_by_its_owner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Design decision 10: any actor continues it from the moment its terminal event was sent."""
    engine, network, gate = says("Fine."), Network(), asyncio.Event()
    write = Database.write

    async def slow(self: Database, jobs: Any) -> Any:
        await gate.wait()
        return await write(self, jobs)

    monkeypatch.setattr(Database, "write", slow)
    async with (
        durable(tmp_path, engine, "aaaaaaaa", peers=network) as (one, kept),
        durable(tmp_path, engine, "bbbbbbbb", peers=network) as (two, _),
    ):
        network.actors = [one, two]
        first = await run_turn(one, asked("one"))
        assert not kept.post.durable(first["id"])
        second = await run_turn(two, asked("two", previous_response_id=first["id"]))
        gate.set()
        await asyncio.wait_for(kept.post.drain(10), 30)
        assert kept.post.durable(first["id"])
    async with durable(tmp_path, engine, "cccccccc") as (three, _):
        assert json.loads(await three.archive.retrieve(TENANT, second["id"])) == second


async def test_what_was_acknowledged_survives_a_kill_before_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, network, write = says("Fine."), Network(), Database.write

    async def never(self: Database, jobs: Any) -> Any:
        await asyncio.Event().wait()

    monkeypatch.setattr(Database, "write", never)
    async with durable(tmp_path, engine, "aaaaaaaa") as (one, kept):
        made = one.conversations.memory.create(TENANT, {}, ())
        first = await run_turn(one, asked("one", conversation=made["id"]))
        await kill(kept)
    monkeypatch.setattr(Database, "write", write)
    monkeypatch.setattr("actors.durable.REPLAY_S", 3600.0)
    async with durable(tmp_path, engine, "bbbbbbbb", peers=network) as (two, kept):
        network.actors = [two]
        second = await run_turn(two, asked("two", conversation=made["id"]))
        third = await run_turn(two, asked("three", previous_response_id=first["id"]))
        assert json.loads(await two.archive.retrieve(TENANT, first["id"])) == first
        await kept.post.drain(10)
        (total,) = await kept.database.usage(0, 1 << 40, TENANT)
        assert total.responses == 3
    assert [each["status"] for each in (first, second, third)] == ["completed"] * 3
    before, *after = (generation.prompt for generation in engine.seen)
    assert all(prompt.startswith(before) for prompt in after)


async def test_store_false_is_written_nowhere(tmp_path: Path) -> None:
    secret, answer = "xylophone-4711", "marmalade-0815"
    public = "harmless-1234"
    async with durable(tmp_path, says(answer)) as (made, _):
        await run_turn(made, asked(secret, store=False, instructions=secret))
        await run_turn(made, asked(public))
    found = everything(tmp_path)
    assert public.encode() in found
    assert answer.encode() in found  # to the public one
    assert secret.encode() not in found
    # The ledger has its tokens all the same.
    async with durable(tmp_path, says("x")) as (_, kept):
        (total,) = await kept.database.usage(0, 1 << 40, TENANT)
        assert total.responses == 2


async def test_a_deleted_response_stays_deleted_even_if_it_was_not_written_yet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, gate, write = says("Fine."), asyncio.Event(), Database.write

    async def slow(self: Database, jobs: Any) -> Any:
        await gate.wait()
        return await write(self, jobs)

    monkeypatch.setattr(Database, "write", slow)
    async with durable(tmp_path, engine) as (made, _):
        first = await run_turn(made, asked("one"))
        await made.archive.delete(TENANT, first["id"])
        with pytest.raises(ApiError, match="not found"):
            await made.archive.retrieve(TENANT, first["id"])
        gate.set()
    async with durable(tmp_path, engine) as (made, _):
        with pytest.raises(ApiError, match="not found"):
            await made.archive.retrieve(TENANT, first["id"])


async def test_a_database_that_is_gone_is_said_so_and_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, away = says("Fine."), True
    write, load = Database.write, Database.load

    async def failing(self: Database, jobs: Any) -> Any:
        if away:
            raise StoreError("transient", "gone")
        return await write(self, jobs)

    async def blind(self: Database, tenant: str, response_id: str) -> Any:
        if away:
            raise StoreError("transient", "gone")
        return await load(self, tenant, response_id)

    monkeypatch.setattr(Database, "write", failing)
    monkeypatch.setattr(Database, "load", blind)
    async with durable(tmp_path, engine) as (made, kept):
        first = await run_turn(made, asked("one"))
        second = await run_turn(made, asked("two", previous_response_id=first["id"]))
        with pytest.raises(ApiError) as refused:
            await run_turn(made, asked("x", previous_response_id="resp_bbbbbbbb" + "0" * 40))
        assert (refused.value.code, refused.value.status) == ("store_unavailable", 500)
        away = False
        await asyncio.wait_for(kept.post.drain(20), 20)
    async with durable(tmp_path, engine) as (made, _):
        assert json.loads(await made.archive.retrieve(TENANT, second["id"])) == second


async def test_the_least_recently_used_leave_memory_for_the_store(tmp_path: Path) -> None:
    engine = says("Fine.")
    async with durable(tmp_path, engine, store=StoreLimits(responses=3)) as (made, kept):
        answers = [await run_turn(made, asked(f"number {n}")) for n in range(10)]
        assert len(made.store._memory) == 3  # type: ignore[attr-defined]
        await kept.post.drain(10)
        for answer in answers:
            assert json.loads(await made.archive.retrieve(TENANT, answer["id"])) == answer


async def test_sockets_give_stored_contexts_back_when_all_hold_too_much(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("actors.session.WEIGH_S", 0.0)
    engine = says("Fine.")
    async with durable(tmp_path, engine, memory_bytes=30_000) as (made, kept):
        sessions, ends = [made.open(TENANT) for _ in range(8)], []
        for session in sessions:
            turn = session.turn(asked("word " * 1000), None)
            async for _ in turn.run():
                pass
            ends.append(turn.response_id)
            while not kept.post.durable(turn.response_id):  # noqa: ASYNC110 - it offers nothing to wait for
                await asyncio.sleep(0.01)
        assert made.memory_bytes <= 30_000 + 10_000
        assert made.counters.released_sessions >= 4
        # They go on where they were.
        async for _ in sessions[0].turn(asked("more", previous_response_id=ends[0]), None).run():
            pass
    assert unpack_ids(engine.seen[-1].prompt)[:1000] == unpack_ids(engine.seen[0].prompt)[:1000]


async def test_a_conversation_in_memory_only_has_a_bound_with_a_name() -> None:
    async with actor(says("Fine."), conversation_bytes=4000) as made:
        session, parent, refusal = made.open(TENANT), None, None
        for _ in range(40):
            request = asked("word " * 20, store=False, previous_response_id=parent)
            turn = session.turn(request, None)
            try:
                async for _ in turn.run():
                    pass
            except ApiError as error:
                refusal = error
                break
            parent = turn.response_id
            assert made.memory_bytes > 0
        assert refusal is not None
        assert (refusal.code, refusal.status) == ("conversation_too_large", 400)
        assert "4000" in refusal.message
        # It can still be compacted, and others begun.
        async for _ in session.turn(asked("new", store=False), None).run():
            pass


async def test_a_conversation_object_is_taken_over_by_one_of_those_that_ask(tmp_path: Path) -> None:
    engine = says("Fine.")
    async with durable(tmp_path, engine, "aaaaaaaa") as (one, _):
        made = one.conversations.memory.create(TENANT, {"a": "b"}, (Message("user", "Once."),))
        first = await run_turn(one, asked("one", conversation=made["id"]))
    network = Network()
    async with AsyncExitStack() as stack:
        pairs = [
            await stack.enter_async_context(durable(tmp_path, engine, owner, peers=network))
            for owner in ("bbbbbbbb", "cccccccc", "dddddddd")
        ]
        network.actors = [each for each, _ in pairs]
        gets = [each.conversations.call("get", TENANT, made["id"]) for each in network.actors]
        assert await asyncio.gather(*gets) == [made] * 3
        holders = [each for each in network.actors if each.conversations.memory.has(made["id"])]
        assert len(holders) == 1
        others = [each for each in network.actors if each is not holders[0]]
        second = await run_turn(others[0], asked("two", conversation=made["id"]))
        assert second["status"] == "completed"
        assert holders[0].conversations.memory._known[made["id"]].head.id == second["id"]  # type: ignore[union-attr]
    before, after = (generation.prompt for generation in engine.seen[-2:])
    assert unpack_ids(after)[: len(before) // 4] == unpack_ids(before)
    assert first["conversation"] == {"id": made["id"]}


async def test_a_deleted_conversation_does_not_come_back(tmp_path: Path) -> None:
    async with durable(tmp_path, says("Fine."), "aaaaaaaa") as (one, _):
        made = one.conversations.memory.create(TENANT, {}, ())
        await one.conversations.call("delete", TENANT, made["id"])
    async with durable(tmp_path, says("Fine."), "bbbbbbbb") as (two, _):
        with pytest.raises(ApiError, match="not found"):
            await two.conversations.call("get", TENANT, made["id"])


async def test_another_tenant_finds_nothing(tmp_path: Path) -> None:
    async with durable(tmp_path, says("Fine.")) as (one, _):
        first = await run_turn(one, asked("one"))
        made = one.conversations.memory.create(TENANT, {}, ())
    async with durable(tmp_path, says("Fine."), "bbbbbbbb") as (two, _):
        with pytest.raises(ApiError, match="not found"):
            await two.archive.retrieve("other", first["id"])
        with pytest.raises(ApiError, match="not found"):
            await two.conversations.call("get", "other", made["id"])


async def test_each_turn_is_in_the_ledger_once_and_in_the_audit_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "limpet.audit")
    async with durable(tmp_path, says("Fine.")) as (made, kept):
        answers = [await run_turn(made, asked("one", store=store)) for store in (True, False, True)]
        await kept.post.drain(10)
        (total,) = await kept.database.usage(0, 1 << 40, TENANT)
    assert (total.responses, total.model) == (3, "m")
    assert total.input_tokens == sum(answer["usage"]["input_tokens"] for answer in answers)
    assert total.output_tokens == sum(answer["usage"]["output_tokens"] for answer in answers)
    lines = [json.loads(record.message) for record in caplog.records if record.name == "limpet.audit"]
    assert [line["id"] for line in lines] == [answer["id"] for answer in answers]
    assert {line["status"] for line in lines} == {"completed"}
