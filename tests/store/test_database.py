"""What was put is found again, once, by whom it belongs to; on SQLite and on PostgreSQL."""

from __future__ import annotations

import asyncio
import itertools
import sqlite3
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, given, settings

from actors.conversation import Response
from actors.store.database import Database, StoreConfig
from actors.store.errors import StoreError, Unreadable
from actors.store.jobs import DeleteResponse, PutConversation, PutItems, PutUsage, UsageTotal
from actors.store.tables import echoes, responses, usage
from actors.stored import StoredResponse
from gateway.protocol.items import Message
from tests.support.postgres import PostgresServer
from tests.support.responses import NOW, TOOLS, asked, chain, chains, facts, jobs_of, put, same, turn

LINE = PutUsage("t", "resp_a", "key-1", "m", "completed", NOW, 100, 90, 10, 5, 12, 340)
TENANTS = itertools.count()
FIRST, SECOND = b"1" * 32, b"2" * 32


def modes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()}


def contents(folder: Path) -> list[bytes]:
    return [path.read_bytes() for path in folder.iterdir()]


async def count(database: Database, table: sa.Table) -> int:
    return await database._connections.read(
        lambda connection: connection.execute(sa.select(sa.func.count()).select_from(table)).scalar_one()
    )


class TestResponses:
    async def test_a_response_comes_back_with_its_history(self, database: Database) -> None:
        jobs = [put(node, request=asked(tools=TOOLS)) for node in chain("a", 5)]
        for job in jobs:
            assert await database.write([job]) == []

        for job in jobs:
            assert same(await database.load("t", job.record.id), job)
            assert await database.body("t", job.record.id) == job.record.body()
        assert await database.load("t", "resp_unknown") is None
        assert await database.body("t", "resp_unknown") is None

    @settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
    @given(nodes=chains())
    async def test_any_chain_comes_back(self, database: Database, nodes: list[Response]) -> None:
        tenant = f"t{next(TENANTS)}"  # hypothesis may draw the same ids again
        jobs = jobs_of(nodes, tenant)
        await database.write(jobs)

        assert same(await database.load(tenant, nodes[-1].id), jobs[-1])
        assert same(await database.load(tenant, nodes[0].id), jobs[0])

    async def test_one_that_failed_is_kept_without_a_place(self, database: Database) -> None:
        job = put(turn("a"))
        job = replace(job, record=StoredResponse.of("resp_a", '{"id":"resp_a"}', asked()), status="failed")
        await database.write([job])
        found = await database.load("t", "resp_a")

        assert found is not None
        assert found.node is None
        assert found.given == (Message("user", "hello"),)

    async def test_forks_share_their_history(self, database: Database) -> None:
        trunk = chain("a", 4)
        forks = [turn(f"fork{number}", trunk[1], said=str(number)) for number in range(3)]
        jobs = [put(node) for node in (*trunk, *forks)]
        await database.write(jobs)

        for job in jobs:
            assert same(await database.load("t", job.record.id), job)
        assert await count(database, responses) == 7

    async def test_a_parent_that_was_never_written_comes_with_its_child(self, database: Database) -> None:
        """Its write failed for good, or it is another store's: the child can be continued all the same."""
        nodes = chain("a", 30)
        await database.write([put(node) for node in nodes[28:]])

        assert same(await database.load("t", nodes[29].id), put(nodes[29]))
        assert await database.load("t", nodes[27].id) is None
        assert await count(database, responses) == 2

    async def test_what_is_not_to_be_stored_is_not_written_with_a_child(self, database: Database, url: str) -> None:
        kept_off = turn("off", said="the launch code is 417", store=False)
        child = turn("on", kept_off, said="fine")
        grandchild = turn("on2", child, said="fine too")
        await database.write([put(child)])
        await database.write([put(grandchild)])

        for node in (child, grandchild):
            found = await database.load("t", node.id)
            assert found is not None
            assert (found.body(), found.node, found.given) == (put(node).record.body(), None, node.items[:1])
        rows = await database._connections.read(lambda connection: connection.execute(sa.select(responses)).all())
        assert not any(b"launch" in (cell or b"") for row in rows for cell in (row.body, row.delta))

    async def test_a_long_conversation_is_bounded_in_depth(
        self, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        depth = 20
        monkeypatch.setattr("actors.store.writing.SNAPSHOT_DEPTH", depth)
        nodes = chain("a", depth + 3)
        jobs = [put(node) for node in nodes]
        for start in range(0, len(jobs), 6):
            await database.write(jobs[start : start + 6])
        deepest = await database._connections.read(
            lambda connection: connection.execute(sa.select(sa.func.max(responses.c.depth))).scalar_one()
        )

        assert deepest == depth - 1
        for number in (depth - 1, depth, depth + 2):
            found = await database.load("t", nodes[number].id)
            assert found is not None
            assert facts(found.node) == facts(nodes[number])

    async def test_long_echoes_are_kept_once(self, database: Database) -> None:
        request = asked(tools=TOOLS)
        nodes = chain("a", 20)
        await database.write([put(node, request=request) for node in nodes[:10]])
        for node in nodes[10:]:
            await database.write([put(node, request=asked(tools=TOOLS, previous_response_id=node.id))])
        await database.write([put(turn("b"), "other", request=request)])

        assert await count(database, echoes) == 2  # one of each tenant

    async def test_the_same_jobs_again_change_nothing(self, database: Database) -> None:
        jobs = [*(put(node, request=asked(tools=TOOLS)) for node in chain("a", 3)), LINE]
        for _ in range(3):
            await database.write(jobs)
        await database.write([*jobs, *jobs])

        assert same(await database.load("t", "resp_a2"), put(chain("a", 3)[2], request=asked(tools=TOOLS)))
        assert (await count(database, responses), await count(database, echoes), await count(database, usage)) == (
            3,
            1,
            1,
        )

    async def test_another_tenants_id_is_not_found(self, database: Database) -> None:
        """Ids are random, but even the same one in two tenants is two responses."""
        mine, theirs = put(turn("a", said="mine")), put(turn("a", said="theirs"), "u")
        await database.write([mine])
        assert await database.load("u", "resp_a") is None
        assert await database.body("u", "resp_a") is None
        assert not await database.delete("u", "resp_a")
        await database.write([theirs])

        assert same(await database.load("t", "resp_a"), mine)
        assert same(await database.load("u", "resp_a"), theirs)
        assert await database.delete("u", "resp_a")
        assert same(await database.load("t", "resp_a"), mine)

    @pytest.mark.parametrize("name", ["resp_\0", "\ud800", "é" * 5000, "'; DROP TABLE responses; --", ""])
    async def test_any_text_may_be_asked_for(self, database: Database, name: str) -> None:
        assert await database.load("t", name) is None
        assert await database.body("t", name) is None
        assert not await database.delete("t", name)
        assert await database.conversation("t", name) is None
        assert not await database.claim("t", name, "a", "b")

    async def test_writers_at_once(self, database: Database, url: str) -> None:
        """Ten writers through two stores, all continuing one response, some of them writing the same."""
        other = await Database.open(StoreConfig(url))
        root = turn("root")
        await database.write([put(root)])

        async def writer(number: int) -> None:
            store = (database, other)[number % 2]
            node = root
            for step in range(10):
                node = turn(f"{number // 2}_{step}", node, said=str(number // 2))
                line = replace(LINE, id=node.id)
                await store.write([put(node, request=asked(tools=TOOLS)), line])

        try:
            await asyncio.gather(*(writer(number) for number in range(10)))
        finally:
            await other.close()
        for number in range(5):
            found = await database.load("t", f"resp_{number}_9")
            assert found is not None
            assert len(facts(found.node)) == 11
        assert await count(database, responses) == 51
        assert await database.usage(0, NOW + 1, "t") == [UsageTotal("t", "m", 50, 5000, 4500, 500, 250)]

    async def test_jobs_of_one_write_are_all_done_or_none(self, database: Database) -> None:
        broken = replace(LINE, id="resp_b", input_tokens=1 << 80)

        with pytest.raises(StoreError) as caught:
            await database.write([put(turn("a")), LINE, broken])
        assert caught.value.kind == "permanent"
        assert await database.load("t", "resp_a") is None
        assert await database.usage(0, NOW + 1, "t") == []


class TestUsage:
    async def test_the_ledger_adds_up_by_model(self, database: Database) -> None:
        lines = [
            LINE,
            replace(LINE, id="resp_b", input_tokens=1),
            replace(LINE, id="resp_c", model="n", created_at=NOW + 10),
            replace(LINE, id="resp_d", tenant="u"),
        ]
        await database.write(lines)
        await database.write([replace(LINE, input_tokens=999)])

        assert await database.usage(NOW, NOW + 11, "t") == [
            UsageTotal("t", "m", 2, 101, 180, 20, 10),
            UsageTotal("t", "n", 1, 100, 90, 10, 5),
        ]
        assert await database.usage(NOW, NOW + 10, "t") == [UsageTotal("t", "m", 2, 101, 180, 20, 10)]
        assert await database.usage(NOW + 11, NOW + 99, "t") == []
        everybody = await database.usage(NOW, NOW + 10)
        assert [(total.tenant, total.responses) for total in everybody] == [("t", 2), ("u", 1)]


class TestSealed:
    async def test_keys_can_be_replaced_and_a_missing_one_is_named(self, url: str) -> None:
        nodes = chain("a", 3)
        jobs = [put(node, request=asked(tools=TOOLS)) for node in nodes]
        for keys, job in zip(([], [FIRST], [SECOND, FIRST]), jobs, strict=True):
            store = await Database.open(StoreConfig(url, keys=keys))
            await store.write([job])
            await store.close()
        both = await Database.open(StoreConfig(url, keys=[SECOND, FIRST]))
        one = await Database.open(StoreConfig(url, keys=[SECOND]))
        try:
            assert same(await both.load("t", nodes[2].id), jobs[2])
            assert await one.body("t", nodes[2].id) == jobs[2].record.body()
            with pytest.raises(Unreadable, match="is sealed with key"):
                await one.load("t", nodes[2].id)
        finally:
            await both.close()
            await one.close()

    async def test_no_content_is_in_the_files(self, tmp_path: Path) -> None:
        store = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db", keys=[FIRST]))
        secret = "launchcode"
        await store.write([put(turn("a", said=secret), request=asked(instructions=secret * 200))])
        await store.close()

        files = contents(tmp_path)
        assert files
        assert not any(secret.encode() in content for content in files)

    async def test_damage_is_named(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        store = await Database.open(StoreConfig(f"sqlite:///{path}"))
        try:
            await store.write([put(turn("a")), PutConversation("t", "conv_1", "o", NOW)])
            await store.write([PutItems("t", "conv_1", "o", (Message("user", "x", id="msg_1"),))])
            for damage in (b"", b"\0", b"\0\x93\x01\x02", b"\1no frame", b"\0\x91\x91\xcc\xff"):
                with closing(sqlite3.connect(path)) as raw, raw:
                    raw.execute("UPDATE responses SET body = ?, delta = ?", (damage, damage))
                    raw.execute("UPDATE conversation_items SET content = ?", (damage,))
                for work in (store.load("t", "resp_a"), store.body("t", "resp_a"), store.conversation("t", "conv_1")):
                    with pytest.raises(Unreadable, match="damaged"):
                        await work
        finally:
            await store.close()

    async def test_a_blob_moved_to_another_row_is_refused(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        store = await Database.open(StoreConfig(f"sqlite:///{path}", keys=[FIRST]))
        try:
            await store.write([put(turn("a")), put(turn("b"), "u")])
            with closing(sqlite3.connect(path)) as raw, raw:
                raw.execute("UPDATE responses SET body = (SELECT body FROM responses WHERE id = 'resp_a')")
            assert await store.body("t", "resp_a") is not None
            with pytest.raises(Unreadable, match="belongs elsewhere"):
                await store.body("u", "resp_b")
        finally:
            await store.close()


class TestOpening:
    @pytest.mark.parametrize("url", ["mysql://h/d", "sqlite://", "sqlite:///:memory:", "nonsense"])
    async def test_what_cannot_be_a_store_is_refused_in_words(self, url: str) -> None:
        with pytest.raises(ValueError, match="the store"):
            await Database.open(StoreConfig(url))

    @pytest.mark.parametrize(
        "url", ["sqlite:////nowhere/at/all/store.db", "postgresql://nobody@127.0.0.1:9/d", "postgresql:///?host=/none"]
    )
    async def test_one_that_is_not_there_is_a_transient_error(self, url: str) -> None:
        with pytest.raises(StoreError) as caught:
            await Database.open(StoreConfig(url, deadline_s=5))
        assert caught.value.kind == "transient"

    async def test_deleting_in_the_same_write_is_in_order(self, database: Database) -> None:
        first, again = put(turn("a")), put(turn("b"))
        await database.write([first, DeleteResponse("t", "resp_a"), again, first])

        assert await database.load("t", "resp_a") is None
        assert same(await database.load("t", "resp_b"), again)

    async def test_closing_lets_running_writes_end_and_no_new_ones_begin(self, url: str) -> None:
        database = await Database.open(StoreConfig(url))
        jobs = [put(turn(f"a{number}")) for number in range(10)]
        writes = [asyncio.create_task(database.write([job])) for job in jobs]
        await asyncio.sleep(0)
        await database.close()
        await database.close()
        await asyncio.gather(*writes)
        with pytest.raises(StoreError, match="closed"):
            await database.write(jobs)
        again = await Database.open(StoreConfig(url))

        assert all([same(await again.load("t", job.record.id), job) for job in jobs])
        await again.close()

    async def test_a_new_file_is_for_its_owner_alone(self, tmp_path: Path) -> None:
        path = tmp_path / "store.db"
        database = await Database.open(StoreConfig(f"sqlite:///{path}"))
        found = modes(tmp_path)
        await database.close()

        assert found == {"store.db": 0o600, "store.db-wal": 0o600, "store.db-shm": 0o600}

    @pytest.mark.parametrize(("durable", "level"), [(True, 2), (False, 1)])
    async def test_sqlite_is_in_wal_mode_and_as_safe_as_asked_for(
        self, tmp_path: Path, durable: bool, level: int
    ) -> None:
        """synchronous: 2 is FULL, 1 is NORMAL (SQLite's manual)."""
        database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db", durable=durable))
        for run in (database._connections.read, database._connections.write):
            for pragma, value in (("journal_mode", "wal"), ("synchronous", level), ("secure_delete", 1)):
                statement = f"PRAGMA {pragma}"
                found = await run(lambda connection, text=statement: connection.exec_driver_sql(text).scalar_one())
                assert found == value
        await database.close()

    @pytest.mark.parametrize(("durable", "level"), [(True, "on"), (False, "off")])
    async def test_postgresql_is_as_safe_as_asked_for(
        self, postgres: PostgresServer, durable: bool, level: str
    ) -> None:
        database = await Database.open(StoreConfig(postgres.create_database(), durable=durable))
        statement = "SHOW synchronous_commit"
        found = await database._connections.write(lambda connection: connection.exec_driver_sql(statement).scalar_one())
        await database.close()

        assert found == level

    async def test_urls_may_ask_for_tls_as_libpq_does(self, postgres: PostgresServer) -> None:
        """The server has no certificate."""
        with pytest.raises(StoreError):
            await Database.open(StoreConfig(f"{postgres.url()}?sslmode=require"))
        plain = await Database.open(StoreConfig(f"{postgres.create_database()}?sslmode=disable"))
        await plain.close()


async def test_after_closing_the_file_alone_holds_everything(tmp_path: Path) -> None:
    """Whoever copies it need not know of SQLite's log beside it."""
    file = tmp_path / "store.db"
    opened = await Database.open(StoreConfig(f"sqlite:///{file}"))
    await opened.write([put(turn("a")), LINE])
    reader = sqlite3.connect(file)  # another process that has it open leaves the log in place
    reader.execute("SELECT count(*) FROM responses").fetchall()
    await opened.close()
    (tmp_path / "copy.db").write_bytes(file.read_bytes())
    reader.close()
    copied = await Database.open(StoreConfig(f"sqlite:///{tmp_path / 'copy.db'}"))
    assert await copied.load("t", "resp_a") is not None
    await copied.close()
