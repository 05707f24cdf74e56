"""Connections to one database: transactions run off the event loop (SQLite) or in steps on it (PostgreSQL).

Each has a deadline. A transaction that ran past it may still be carried out, which is why all of them may be repeated.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol, TypeVar

from sqlalchemy import URL, Connection, Engine, create_engine, event, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from actors.store import migrations
from actors.store.errors import StoreError, store_error

Result = TypeVar("Result")

SQLITE_READERS = 2
MIGRATE_S = 600.0
"""A migration may have to go over every row, which no deadline of a turn allows for."""
_MIGRATION_LOCK = 0x6C696D706574  # any number that nobody else takes
_JOURNAL_BYTES = 64 << 20
_CHECKPOINT_MS = 1000
# A TimeoutError is an OSError. The last two: a value that a column can't hold.
_FAULTS = (SQLAlchemyError, sqlite3.Error, OSError, OverflowError, UnicodeError)


class Connections(Protocol):
    """How the store reaches its database. All raise `StoreError`."""

    async def migrate(self) -> None:
        """Bring the schema up to date, within `MIGRATE_S`. Others that do so at the same time wait for one another."""
        ...

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        """Run a transaction that writes nothing."""
        ...

    async def write(self, work: Callable[[Connection], Result]) -> Result:
        """Run a transaction; it is durable when this returns."""
        ...

    async def close(self) -> None:
        """Let go of all connections, after what is running. Once."""
        ...


class SqliteConnections:
    """A file in WAL mode, with one thread that writes and `SQLITE_READERS` that read. Other processes of this machine
    may have it open too."""

    def __init__(self, url: URL, *, durable: bool, deadline_s: float) -> None:
        if not url.database or url.database == ":memory:":
            raise ValueError("the store needs a file: sqlite:////path/to/file.db")
        self._path = Path(url.database)
        self._deadline_s = deadline_s
        synchronous = "FULL" if durable else "NORMAL"
        self._writer = self._engine(url, "BEGIN IMMEDIATE", synchronous, 1)
        self._reader = self._engine(url, "BEGIN", synchronous, SQLITE_READERS)
        self._write_thread = ThreadPoolExecutor(1, "store-write")
        self._read_threads = ThreadPoolExecutor(SQLITE_READERS, "store-read")

    async def migrate(self) -> None:
        """Readers need no write lock to see that there is nothing to do. A new file is for its owner's eyes only."""
        await self._bounded(asyncio.get_running_loop().run_in_executor(self._write_thread, self._create))
        if await self.read(migrations.current_revision) != migrations.newest_revision():
            await self._run(self._write_thread, self._writer, migrations.upgrade, MIGRATE_S)

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        return await self._run(self._read_threads, self._reader, work)

    async def write(self, work: Callable[[Connection], Result]) -> Result:
        return await self._run(self._write_thread, self._writer, work)

    async def close(self) -> None:
        self._write_thread.shutdown(wait=False)
        self._read_threads.shutdown(wait=False)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                await asyncio.to_thread(self._dispose)

    def _create(self) -> None:
        self._path.touch(0o600)

    def _dispose(self) -> None:
        """The file alone holds everything then, unless another process is reading: nobody who copies it should have to
        know of the log beside it."""
        self._write_thread.shutdown()
        self._read_threads.shutdown()
        with contextlib.suppress(SQLAlchemyError, sqlite3.Error):
            connection = self._writer.raw_connection()
            try:
                connection.cursor().execute(f"PRAGMA busy_timeout={_CHECKPOINT_MS}").close()
                connection.cursor().execute("PRAGMA wal_checkpoint(TRUNCATE)").close()
            finally:
                connection.close()
        self._reader.dispose()
        self._writer.dispose()

    async def _run(
        self,
        threads: ThreadPoolExecutor,
        engine: Engine,
        work: Callable[[Connection], Result],
        deadline_s: float | None = None,
    ) -> Result:
        running = asyncio.get_running_loop().run_in_executor(threads, _transact, engine, work)
        return await self._bounded(running, deadline_s)

    async def _bounded(self, running: asyncio.Future[Result], deadline_s: float | None = None) -> Result:
        try:
            async with asyncio.timeout(deadline_s or self._deadline_s):
                return await running
        except _FAULTS as error:
            raise store_error(error) from None

    def _engine(self, url: URL, begin: str, synchronous: str, size: int) -> Engine:
        engine = create_engine(
            url.set(drivername="sqlite+pysqlite"), pool_size=size, max_overflow=0, hide_parameters=True
        )
        # Less than the deadline, so that a lock is named as what it is.
        busy_ms = int(self._deadline_s * 800)

        def connected(connection: Any, _: Any) -> None:
            connection.isolation_level = None  # we begin transactions, not the driver
            for pragma in (
                f"busy_timeout={busy_ms}",
                "journal_mode=WAL",
                f"journal_size_limit={_JOURNAL_BYTES}",
                f"synchronous={synchronous}",
                "secure_delete=ON",  # deleted content is overwritten, not only unlinked
            ):
                connection.execute(f"PRAGMA {pragma}").close()

        def begun(connection: Connection) -> None:
            connection.connection.cursor().execute(begin)

        event.listen(engine, "connect", connected)
        event.listen(engine, "begin", begun)
        return engine


class PostgresConnections:
    """A pool of at most `size` connections, made when they are needed."""

    def __init__(self, url: URL, *, durable: bool, deadline_s: float, size: int) -> None:
        self._url = url
        self._durable = durable
        self._deadline_s = deadline_s
        self._running = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._engine = self._make_engine(deadline_s, size)

    async def migrate(self) -> None:
        """The lock is asked for only when there is something to do."""
        if await self.read(migrations.current_revision) == migrations.newest_revision():
            return
        patient = self._make_engine(MIGRATE_S, 1)  # the server's and the driver's deadlines come with a connection
        try:
            await self._run(patient, _migrate_locked, MIGRATE_S)
        finally:
            await patient.dispose()

    async def read(self, work: Callable[[Connection], Result]) -> Result:
        return await self.write(work)

    async def write(self, work: Callable[[Connection], Result]) -> Result:
        return await self._run(self._engine, work, self._deadline_s)

    async def _run(self, engine: AsyncEngine, work: Callable[[Connection], Result], deadline_s: float) -> Result:
        self._running += 1
        self._idle.clear()
        try:
            async with asyncio.timeout(deadline_s), engine.begin() as connection:
                return await connection.run_sync(work)
        except _FAULTS as error:
            raise store_error(error) from None
        finally:
            self._running -= 1
            if not self._running:
                self._idle.set()

    def _make_engine(self, deadline_s: float, size: int) -> AsyncEngine:
        server_ms = str(int(deadline_s * 1000))
        return create_async_engine(
            _for_asyncpg(self._url),
            pool_size=size,
            max_overflow=0,
            pool_timeout=self._deadline_s,
            hide_parameters=True,
            connect_args={
                "timeout": self._deadline_s,
                "command_timeout": deadline_s,
                "server_settings": {
                    "application_name": "limpet",
                    # The server gives up too, when we are gone.
                    "statement_timeout": server_ms,
                    "lock_timeout": server_ms,
                    "idle_in_transaction_session_timeout": server_ms,
                    "synchronous_commit": "on" if self._durable else "off",
                },
            },
        )

    async def close(self) -> None:
        with contextlib.suppress(TimeoutError, SQLAlchemyError, OSError):
            async with asyncio.timeout(self._deadline_s):
                await self._idle.wait()
        with contextlib.suppress(TimeoutError, SQLAlchemyError, OSError):
            async with asyncio.timeout(self._deadline_s):
                await self._engine.dispose()


class ClosedConnections:
    """What a store has once it is closed."""

    async def migrate(self) -> None:
        raise _closed()

    async def read(self, work: Callable[[Connection], Result]) -> Result:  # noqa: ARG002 - the interface's
        raise _closed()

    async def write(self, work: Callable[[Connection], Result]) -> Result:  # noqa: ARG002 - the interface's
        raise _closed()

    async def close(self) -> None:
        """Nothing is left to close."""


def _transact(engine: Engine, work: Callable[[Connection], Result]) -> Result:
    with engine.begin() as connection:
        return work(connection)


def _for_asyncpg(url: URL) -> URL:
    """Libpq's `sslmode`, which most URLs are written with, is `ssl` here."""
    query = dict(url.query)
    if "sslmode" in query:
        query["ssl"] = query.pop("sslmode")
    return url.set(drivername="postgresql+asyncpg", query=query)


def _closed() -> StoreError:
    return StoreError("permanent", "The store is closed.")


def _migrate_locked(connection: Connection) -> None:
    connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _MIGRATION_LOCK})
    migrations.upgrade(connection)
