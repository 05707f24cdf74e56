"""What is acknowledged survives; what is not is named, soon, and can be tried again."""

from __future__ import annotations

import asyncio
import pickle
import random
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, OperationalError

from actors.store.database import Database, StoreConfig
from actors.store.errors import StoreError, Unreadable, store_error
from actors.store.jobs import PutResponse, PutUsage
from actors.store.tables import responses, usage
from tests.support.postgres import PostgresServer, running_postgres
from tests.support.responses import NOW, TOOLS, asked, chain, put, same, turn

ROOT = Path(__file__).resolve().parents[2]
WRITER = """
import asyncio, sys
from actors.store.database import Database, StoreConfig
from tests.support.responses import put, turn
from tests.store.test_faults import line
async def main():
    store = await Database.open(StoreConfig(sys.argv[1]))
    number, node = 0, None
    while True:
        jobs = []
        for _ in range(1 + number % 7):
            node = turn(f"{sys.argv[2]}x{number}", node, said="words " * 100)
            jobs += [put(node), line(node.id)]
            number += 1
        await store.write(jobs)
        print(number, flush=True)
asyncio.run(main())
"""


def line(name: str) -> PutUsage:
    return PutUsage("t", name, "key", "m", "completed", NOW, 1, 1, 1, 1)


async def ids(database: Database, table: sa.Table) -> set[str]:
    return set(await database._connections.read(lambda connection: connection.execute(sa.select(table.c.id)).scalars()))


async def kind_of(work: Any) -> str:
    with pytest.raises(StoreError) as caught:
        await work
    return caught.value.kind


class TestKill:
    def test_a_killed_writer_loses_nothing_that_was_acknowledged(self, url: str) -> None:
        """kill -9 at any moment: all acknowledged is there, and nothing is there by half."""
        acknowledged: dict[int, int] = {}
        for attempt, pause in enumerate((0.0, 0.05, 0.4)):
            process = subprocess.Popen(
                [sys.executable, "-c", WRITER, url, str(attempt)], stdout=subprocess.PIPE, cwd=ROOT
            )
            assert process.stdout is not None
            for _ in range(random.randrange(1, 60)):
                acknowledged[attempt] = int(process.stdout.readline())
            time.sleep(pause)
            process.kill()
            # What it said before it died counts too; the last line may be cut.
            rest = process.stdout.read().decode().splitlines(keepends=True)
            acknowledged[attempt] = max([acknowledged[attempt], *(int(each) for each in rest if each.endswith("\n"))])
            process.wait()
            process.stdout.close()
        asyncio.run(self._check(url, acknowledged))

    async def _check(self, url: str, acknowledged: dict[int, int]) -> None:
        database = await Database.open(StoreConfig(url))
        try:
            known = await ids(database, responses)
            assert known == await ids(database, usage)
            for attempt, count in acknowledged.items():
                mine = {name for name in known if name.startswith(f"resp_{attempt}x")}
                assert mine == {f"resp_{attempt}x{number}" for number in range(len(mine))}
                assert count <= len(mine) <= count + 7  # the write that was under way
                found = await database.load("t", f"resp_{attempt}x{len(mine) - 1}")
                assert found is not None
                assert found.node is not None
                assert [node.id for node in found.node.lineage()] == [
                    f"resp_{attempt}x{number}" for number in reversed(range(len(mine)))
                ]
        finally:
            await database.close()


class TestAway:
    @pytest.fixture
    def server(self) -> Iterator[PostgresServer]:
        with running_postgres() as server:
            yield server

    @pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGQUIT])
    async def test_a_server_that_restarts(self, server: PostgresServer, how: signal.Signals) -> None:
        """Stopped or crashed in the middle of writes: transient errors, then all works, and nothing is lost."""
        database = await Database.open(StoreConfig(server.url(), deadline_s=5))
        done: list[str] = []
        kinds: list[str] = []
        stop, again = asyncio.Event(), asyncio.Event()

        async def writer(number: int) -> None:
            node, step = None, 0
            while not stop.is_set():
                made = turn(f"{number}x{step}", node)
                try:
                    await database.write([put(made), line(made.id)])
                except StoreError as error:
                    kinds.append(error.kind)
                    await asyncio.sleep(0.05)
                    continue  # the same again
                done.append(made.id)
                if kinds and len(done) % 20 == 0:
                    again.set()
                node, step = made, step + 1

        writers = [asyncio.create_task(writer(number)) for number in range(4)]
        await asyncio.sleep(0.5)
        await asyncio.to_thread(server.stop, how)
        await asyncio.sleep(0.3)
        await asyncio.to_thread(server.start)
        again.clear()
        async with asyncio.timeout(30):
            await again.wait()
        stop.set()
        await asyncio.gather(*writers)
        assert kinds
        assert set(kinds) == {"transient"}
        assert await ids(database, responses) == await ids(database, usage) == set(done)
        await database.close()

    async def test_a_server_that_never_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as mute:
            start = time.monotonic()
            url = f"postgresql://limpet@127.0.0.1:{mute.getsockname()[1]}/d"
            assert await kind_of(Database.open(StoreConfig(url, deadline_s=0.5))) == "transient"
            assert time.monotonic() - start < 30


class TestSlow:
    async def test_a_lock_that_another_holds(self, url: str) -> None:
        """The wait is bounded, holds nothing else up, and leaves no trace."""
        holder = await Database.open(StoreConfig(url))
        database = await Database.open(StoreConfig(url, deadline_s=1))
        free, held = asyncio.Event(), asyncio.Event()
        loop = asyncio.get_running_loop()
        job = put(turn("a"))

        async def hold() -> None:
            if url.startswith("sqlite"):
                path = url.removeprefix("sqlite:///")
                with closing(sqlite3.connect(path, isolation_level=None)) as raw:
                    raw.execute("BEGIN IMMEDIATE")
                    held.set()
                    await free.wait()
            else:
                engine = holder._connections._engine  # type: ignore[attr-defined]
                async with engine.connect() as raw:
                    await raw.execute(sa.text("LOCK TABLE responses"))
                    held.set()
                    await free.wait()

        holding = asyncio.create_task(hold())
        await held.wait()
        ticks = 0
        start = loop.time()
        failing = asyncio.create_task(kind_of(database.write([job])))
        while not failing.done():
            await asyncio.sleep(0.01)
            ticks += 1
        assert await failing == "transient"
        assert loop.time() - start < 30
        assert ticks > 5
        free.set()
        await holding
        await database.write([job])
        assert same(await database.load("t", "resp_a"), job)
        await database.close()
        await holder.close()

    async def test_cancelled_writes_can_be_repeated(self, database: Database) -> None:
        jobs = [put(node, request=asked(tools=TOOLS)) for node in chain("a", 30)]
        for number, job in enumerate(jobs):
            task = asyncio.create_task(database.write([job, line(job.record.id)]))
            await asyncio.sleep(0.0005 * (number % 8))
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        for job in jobs:
            await database.write([job, line(job.record.id)])

        assert same(await database.load("t", "resp_a29"), jobs[29])
        assert await ids(database, responses) == await ids(database, usage) == {job.record.id for job in jobs}

    async def test_more_at_once_than_connections(self, url: str) -> None:
        database = await Database.open(StoreConfig(url, connections=2))
        jobs = [put(turn(f"a{number}")) for number in range(60)]
        await asyncio.gather(*(database.write([job]) for job in jobs))
        found = await asyncio.gather(*(database.body("t", job.record.id) for job in jobs))
        await database.close()

        assert found == [job.record.body() for job in jobs]


class TestFull:
    async def test_a_full_disk_is_named_and_works_again_with_room(self, tmp_path: Path) -> None:
        database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))

        async def limit(pages: int) -> None:
            await database._connections.write(
                lambda connection: connection.exec_driver_sql(f"PRAGMA max_page_count={pages}").close()
            )

        await limit(60)
        noise = random.Random(1).randbytes(3000).hex()
        done: list[PutResponse] = []

        async def fill() -> None:
            for number in range(200):
                job = put(turn(f"a{number}", said=noise))
                await database.write([job, line(job.record.id)])
                done.append(job)

        with pytest.raises(StoreError) as caught:
            await fill()
        assert caught.value.kind == "full"
        assert done
        assert await ids(database, responses) == await ids(database, usage) == {each.record.id for each in done}
        assert same(await database.load("t", done[0].record.id), done[0])
        await limit(10_000)
        job = put(turn(f"a{len(done)}", said=noise))
        await database.write([job, line(job.record.id)])
        assert same(await database.load("t", job.record.id), job)
        await database.close()


class FromServer(Exception):
    """An error of the driver's, as far as its state goes."""

    def __init__(self, sqlstate: str) -> None:
        super().__init__("the launch code is 417")
        self.sqlstate = sqlstate


class TestKinds:
    @pytest.mark.parametrize(
        ("state", "kind"),
        [
            ("53100", "full"),  # disk_full
            ("53300", "transient"),  # too_many_connections
            ("57P01", "transient"),  # admin_shutdown
            ("57014", "transient"),  # query_canceled: a statement timeout
            ("40P01", "transient"),  # deadlock_detected
            ("08006", "transient"),  # connection_failure
            ("25006", "transient"),  # read_only_sql_transaction
            ("55P03", "transient"),  # lock_not_available
            ("42P01", "permanent"),  # undefined_table
            ("28P01", "permanent"),  # invalid_password
            ("23505", "permanent"),  # unique_violation
        ],
    )
    def test_what_postgresql_says(self, state: str, kind: str) -> None:
        """Codes: PostgreSQL's manual, appendix A."""
        error = store_error(DBAPIError("INSERT", {"body": "the launch code is 417"}, FromServer(state)))

        assert error.kind == kind
        assert state in str(error)
        assert "launch" not in str(error)

    @pytest.mark.parametrize(
        ("statement", "kind"),
        [
            ("SELECT pg_terminate_backend(pg_backend_pid())", "transient"),
            ("SELECT pg_sleep(9)", "transient"),
            ("SELECT 1/0", "permanent"),
            ("SELECT launch_code", "permanent"),
        ],
    )
    async def test_what_a_real_postgresql_says(self, postgres: PostgresServer, statement: str, kind: str) -> None:
        database = await Database.open(StoreConfig(postgres.create_database(), deadline_s=1))
        with pytest.raises(StoreError) as caught:
            await database._connections.write(lambda connection: connection.exec_driver_sql(statement) and None)
        assert caught.value.kind == kind
        assert "launch" not in str(caught.value)
        assert await database.body("t", "resp_a") is None
        await database.close()

    @pytest.mark.parametrize(("content", "kind"), [(b"not a database at all" * 100, "permanent"), (None, "transient")])
    async def test_a_file_that_is_no_database_and_none_at_all(
        self, tmp_path: Path, content: bytes | None, kind: str
    ) -> None:
        path = tmp_path / "sub" / "store.db"
        if content is not None:
            path.parent.mkdir()
            path.write_bytes(content)

        assert await kind_of(Database.open(StoreConfig(f"sqlite:///{path}"))) == kind

    @pytest.mark.parametrize("error", [StoreError("full", "no room"), Unreadable("permanent", "changed")])
    def test_an_error_survives_the_way_to_another_actor(self, error: StoreError) -> None:
        copy = pickle.loads(pickle.dumps(error))

        assert (type(copy), copy.kind, str(copy)) == (type(error), error.kind, str(error))

    def test_a_read_only_file_is_permanent(self) -> None:
        original = sqlite3.OperationalError("attempt to write a readonly database")
        original.sqlite_errorcode = sqlite3.SQLITE_READONLY
        original.sqlite_errorname = "SQLITE_READONLY"

        assert store_error(OperationalError("", {}, original)).kind == "permanent"
