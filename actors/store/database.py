"""The store as the rest of the actor sees it: one object, every call of it bounded in time.

docs/decisions tells why the tables are as they are; `actors.store.tables` tells what is in them.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

from sqlalchemy import Connection, make_url
from sqlalchemy.exc import ArgumentError

from actors.store import reading, removal
from actors.store.connections import ClosedConnections, Connections, PostgresConnections, SqliteConnections
from actors.store.encryption import BlobCodec
from actors.store.jobs import ConversationJob, Job, PutResponse, StoredConversation, UsageTotal
from actors.store.records import EchoTexts
from actors.store.tables import conversations
from actors.store.writing import Key, LineageWanted, Row, Transaction, prepare, prepare_lineage
from actors.stored import StoredResponse

_Result = TypeVar("_Result")

OFF_LOOP_BYTES = 64 << 10
"""Encoding or decoding more than about this is left to a thread: 64 KiB take about 1 ms."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Where and how.

    `url` is `sqlite:////absolute/file.db` or `postgresql://user:password@host/database`. `keys` have 32 bytes each: the
    first seals, all open; none: content is kept as it is. `durable`: what was acknowledged survives a power cut, not
    only a crash of ours. `deadline_s` bounds every call, `connections` those to PostgreSQL.
    """

    url: str
    keys: Sequence[bytes] = field(default=(), repr=False)
    durable: bool = True
    deadline_s: float = 10.0
    connections: int = 8


class Database:
    """The durable store. All methods raise `StoreError`, whose `kind` tells whether to try again. Ids of other tenants
    are not found. Owned by one event loop."""

    _connections: Connections

    def __init__(self, connections: Connections, codec: BlobCodec, now: Callable[[], float] = time.time) -> None:
        self._connections = connections
        self._codec = codec
        self._now = now
        self._texts = EchoTexts()

    @classmethod
    async def open(cls, config: StoreConfig, now: Callable[[], float] = time.time) -> Self:
        """Connect and bring the schema up to date; any number of actors may do so at once. Raises `StoreError` if the
        database can't be reached, ValueError for a URL or key that can't be used."""
        opened = cls(_connections(config), BlobCodec(config.keys), now)
        try:
            await opened._connections.migrate()
        except BaseException:
            await opened.close()
            raise
        return opened

    async def write(self, jobs: Sequence[Job]) -> list[ConversationJob]:
        """Carry out all jobs or none, in one transaction; durable when this returns. Doing it again changes nothing.

        Returns the jobs on conversations that another actor owns or that are gone: they changed nothing. After a
        `StoreError` or a cancellation the jobs may have been carried out or not: send them again.
        """
        if not jobs:
            return []
        puts = [(index, job) for index, job in enumerate(jobs) if isinstance(job, PutResponse)]
        rows = await self._coded(sum(job.record.size for _, job in puts), functools.partial(self._prepare, puts))
        alone: dict[Key, dict[str, Any]] = {}

        def work(connection: Connection) -> list[ConversationJob]:
            return Transaction(connection, self._codec, int(self._now()), alone).write(jobs, rows)

        while True:  # each time more of the rows are prepared, so this ends
            try:
                return await self._connections.write(work)
            except LineageWanted as wanted:
                for row in wanted.rows:
                    alone[row.key] = await asyncio.to_thread(prepare_lineage, row, self._codec)

    async def load(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response with all that it continues, ready to be continued: one query, O(history) bytes, nothing is
        rendered or tokenized."""
        if not _storable(response_id):
            return None
        rows = await self._connections.read(lambda connection: reading.response_rows(connection, tenant, response_id))
        size = sum(len(row.delta or b"") for row in rows)
        return await self._coded(size, functools.partial(reading.response_of, rows, self._codec, tenant))

    async def body(self, tenant: str, response_id: str) -> str | None:
        """The Response object as JSON text, whatever the length of the conversation."""
        if not _storable(response_id):
            return None
        return await self._connections.read(
            lambda connection: reading.body_text(connection, self._codec, tenant, response_id)
        )

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete the response; True if it was there. Its object is gone when this returns, and so are its items and
        token ids unless a response continues it: those go with the last one that does."""

        def work(connection: Connection) -> bool:
            removal.lock_tenants(connection, {tenant}, exclusive=True)
            return bool(removal.delete_responses(connection, tenant, [response_id], int(self._now())))

        return _storable(response_id) and await self._connections.write(work)

    async def purge_tenant(self, tenant: str, limit: int = 500) -> int:
        """Delete all of a tenant's responses and conversations, in steps of at most `limit`; how many there were. Its
        usage stays in the ledger, which holds no content."""
        total = 0
        while count := await self._connections.write(
            lambda connection: removal.purge_tenant(connection, tenant, limit)
        ):
            total += count
        return total

    async def expire(self, limit: int = 500) -> int:
        """Delete what is past its time, at most `limit` of a kind; how many rows there were to deal with. 0: no more.
        A response that is continued keeps what its living descendants need, as with `delete`."""
        now = int(self._now())
        return await self._connections.write(lambda connection: removal.expire(connection, now, limit))

    async def usage(self, since: int, until: int, tenant: str | None = None) -> list[UsageTotal]:
        """What a tenant (None: each) used from `since` up to but without `until` (seconds since 1970), by model."""
        return await self._connections.read(lambda connection: reading.usage_totals(connection, since, until, tenant))

    async def conversation(self, tenant: str, conversation_id: str) -> StoredConversation | None:
        """The conversation with all its items."""
        if not _storable(conversation_id):
            return None
        return await self._connections.read(
            lambda connection: reading.conversation(connection, self._codec, tenant, conversation_id)
        )

    async def owner(self, tenant: str, conversation_id: str) -> str | None:
        """Who owns the conversation, None if there is none. Its items are not read."""
        if not _storable(conversation_id):
            return None
        return await self._connections.read(
            lambda connection: reading.conversation_owner(connection, tenant, conversation_id)
        )

    async def claim(self, tenant: str, conversation_id: str, from_owner: str, to_owner: str) -> bool:
        """Make `to_owner` the owner if `from_owner` is: of several that try, one gets True. So does one that repeats
        its successful try. The old owner's jobs change nothing from then on."""

        def work(connection: Connection) -> bool:
            this = (conversations.c.id == conversation_id) & (conversations.c.tenant == tenant)
            mine = this & conversations.c.owner.in_((from_owner, to_owner))
            changed = connection.execute(conversations.update().where(mine).values(owner=to_owner))
            return changed.rowcount == 1

        return _storable(conversation_id) and await self._connections.write(work)

    async def close(self) -> None:
        """Let go of all connections, after what is running. Idempotent; anything else fails from then on."""
        open_ones, self._connections = self._connections, ClosedConnections()
        await open_ones.close()

    def _prepare(self, puts: Sequence[tuple[int, PutResponse]]) -> dict[int, Row]:
        return {index: prepare(job, self._codec, self._texts) for index, job in puts}

    async def _coded(self, size: int, work: Callable[[], _Result]) -> _Result:
        return work() if size < OFF_LOOP_BYTES else await asyncio.to_thread(work)


def _storable(name: str) -> bool:
    """Whether a client's word for something can be in a text column at all: PostgreSQL takes no NUL, and nobody a lone
    surrogate."""
    return "\0" not in name and not any("\ud800" <= char <= "\udfff" for char in name)


def _connections(config: StoreConfig) -> Connections:
    try:
        url = make_url(config.url)
    except ArgumentError:
        raise ValueError("the store's URL can't be read") from None
    backend = url.get_backend_name()
    if backend == "sqlite":
        return SqliteConnections(url, durable=config.durable, deadline_s=config.deadline_s)
    if backend in {"postgresql", "postgres"}:
        return PostgresConnections(url, durable=config.durable, deadline_s=config.deadline_s, size=config.connections)
    raise ValueError(f"the store needs SQLite or PostgreSQL, not '{backend}'")
