"""One transaction that carries out jobs. Synchronous: `actors.store.connections` runs it off the loop, or on it in
steps.

Everything here may be done twice: a writer whose commit was not answered sends the same jobs again.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Table, bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from actors.conversation import Response
from actors.store.encryption import BlobCodec, Place
from actors.store.jobs import (
    ConversationJob,
    DeleteConversation,
    DeleteResponse,
    Job,
    PutConversation,
    PutItems,
    PutResponse,
    PutUsage,
)
from actors.store.reading import item_place
from actors.store.records import EchoTexts, dump, items_to_lists, split_body, turn_to_list
from actors.store.removal import chunks, delete_responses, lock_tenants
from actors.store.tables import HOLLOW, LIVING, conversation_items, conversations, echoes, responses, usage

SNAPSHOT_DEPTH = 1024
"""Every so many turns a row has the whole lineage again, so that no load or deletion climbs further. They come late and
only bound: `benchmarks.store` shows that one at every 64th of 1,000 turns makes the store 4.7 times as large and takes
at most a third off a load's CPU, which mostly goes into making the items."""

Key = tuple[str, str]
"""(id, tenant), as in the primary keys."""


@dataclass(frozen=True, slots=True)
class Row:
    """A response ready to be written: made before the transaction, so that no lock is held meanwhile. `values` has its
    delta as it is when the parent is there; `pieces` and `echo` are the two parts of its object."""

    key: Key
    job: PutResponse
    values: dict[str, Any]
    pieces: list[str | int]
    echo: bytes


def prepare(job: PutResponse, codec: BlobCodec, texts: EchoTexts) -> Row:
    """Encode, compress and seal what a response adds."""
    record = job.record
    split = split_body(record.own, record.echo, texts)
    shared = split.shared.encode()
    node = record.node
    delta = None if node is None or not node.store else _delta(job.tenant, [node], codec)
    given: Any = len(record.given) if node is not None and delta is not None else items_to_lists(record.given)
    body = dump([split.pieces, given])
    values = {
        "id": record.id,
        "tenant": job.tenant,
        "state": LIVING,
        "parent_id": None,
        "depth": 0,
        "created_at": job.created_at,
        "expires_at": job.expires_at,
        "status": job.status,
        "model": job.model,
        "background": record.background,
        "echo": codec.digest(job.tenant, shared) if shared else None,
        "body": codec.pack(Place("responses", "body", job.tenant, record.id), body),
        "delta": delta,
    }
    return Row((record.id, job.tenant), job, values, split.pieces, shared)


class LineageWanted(Exception):
    """Responses that must stand alone, for which `prepare_lineage` is to be called before the jobs are tried again:
    encoding a long history takes too long for a transaction, and for the loop."""

    def __init__(self, rows: Sequence[Row]) -> None:
        super().__init__(f"{len(rows)} rows")
        self.rows = rows


def prepare_lineage(row: Row, codec: BlobCodec) -> dict[str, Any]:
    """The values of a row that stands alone: with its whole lineage, or with none if part of it is not to be stored."""
    job, node = row.job, row.job.record.node
    lineage = [] if node is None else list(node.lineage())
    if lineage and all(turn.store for turn in lineage):
        return row.values | {"delta": _delta(job.tenant, lineage[::-1], codec)}
    place = Place("responses", "body", job.tenant, job.record.id)
    body = codec.pack(place, dump([row.pieces, items_to_lists(job.record.given)]))
    return row.values | {"delta": None, "body": body}


class Transaction:
    """Carries out jobs on one connection, inside its transaction. `alone` holds what `prepare_lineage` made so far;
    `now` is seconds since 1970."""

    def __init__(self, connection: Connection, codec: BlobCodec, now: int, alone: Mapping[Key, dict[str, Any]]) -> None:
        self._connection = connection
        self._codec = codec
        self._now = now
        self._alone = alone
        self._wanted: list[Row] = []

    def write(self, jobs: Sequence[Job], rows: dict[int, Row]) -> list[ConversationJob]:
        """Carry them out; returns those on conversations of other owners, which changed nothing. `rows` are the
        prepared ones of the `PutResponse` jobs, by index. Only the order among jobs on the same thing matters."""
        tenants = {job.tenant for job in jobs if isinstance(job, PutResponse | DeleteResponse)}
        deletes = any(isinstance(job, DeleteResponse) for job in jobs)
        lock_tenants(self._connection, tenants, exclusive=deletes)
        waiting: list[Row] = []
        for index, job in enumerate(jobs):
            if isinstance(job, PutResponse):
                waiting.append(rows[index])
            elif isinstance(job, DeleteResponse):
                self._put_responses(waiting)
                waiting = []
                delete_responses(self._connection, job.tenant, [job.id], self._now)
        self._put_responses(waiting)
        self._insert_new(usage, [_usage_row(job) for job in jobs if isinstance(job, PutUsage)])
        return [
            job
            for job in jobs
            if not isinstance(job, PutResponse | DeleteResponse | PutUsage) and not self._change_conversation(job)
        ]

    def _put_responses(self, rows: Sequence[Row]) -> None:
        if not rows:
            return
        known = self._known(rows)
        new, shared = [], []
        for row in rows:
            if row.key in known:
                continue
            values = self._linked(row, known)
            known[row.key] = None if values["delta"] is None else values["depth"]
            new.append(values)
            if row.echo:
                shared.append(row)
        if self._wanted:
            raise LineageWanted(self._wanted)
        self._put_echoes(shared)
        self._insert_new(responses, new)

    def _known(self, rows: Sequence[Row]) -> dict[Key, int | None]:
        """The depth of those rows and their parents that are there; None if they can't be continued."""
        wanted = {row.key for row in rows}
        for row in rows:
            node = row.job.record.node
            if node is not None and node.parent is not None:
                wanted.add((node.parent.id, row.job.tenant))
        found: dict[Key, int | None] = {}
        for ids in chunks(sorted({response_id for response_id, _ in wanted})):
            for response_id, tenant, depth, usable in self._connection.execute(_KNOWN, {"ids": ids}):
                found[response_id, tenant] = depth if usable else None
        return {key: depth for key, depth in found.items() if key in wanted}

    def _linked(self, row: Row, known: dict[Key, int | None]) -> dict[str, Any]:
        """The row's values with its place. Without its parent's row it stands alone, with the whole lineage."""
        node = row.job.record.node
        if node is None or row.values["delta"] is None or node.parent is None:
            return row.values
        depth = known.get((node.parent.id, row.job.tenant))
        if depth is not None and depth + 1 < SNAPSHOT_DEPTH:
            return row.values | {"parent_id": node.parent.id, "depth": depth + 1}
        alone = self._alone.get(row.key)
        if alone is None:
            self._wanted.append(row)
        return alone or row.values

    def _put_echoes(self, rows: Sequence[Row]) -> None:
        wanted = {(row.values["echo"], row.job.tenant): row.echo for row in rows}
        if not wanted:
            return
        for digests in chunks(sorted({digest for digest, _ in wanted})):
            for digest, tenant in self._connection.execute(_ECHOES, {"digests": digests}):
                wanted.pop((digest, tenant), None)
        missing = [
            {
                "digest": digest,
                "tenant": tenant,
                "content": self._codec.pack(Place("echoes", "content", tenant, digest.hex()), content),
            }
            for (digest, tenant), content in sorted(wanted.items())
        ]
        self._insert_new(echoes, missing)

    def _insert_new(self, table: Table, rows: Sequence[dict[str, Any]]) -> None:
        if rows:
            self._connection.execute(insert_new(self._connection.dialect.name, table), rows)

    def _change_conversation(self, job: ConversationJob) -> bool:
        """False if another owns it."""
        if isinstance(job, PutConversation):
            return self._put_conversation(job)
        if isinstance(job, DeleteConversation):
            if not self._owned(job.tenant, job.id, job.owner):
                return False
            key = {"of_id": job.id, "of_tenant": job.tenant}
            self._connection.execute(_DELETE_ITEMS, key)
            self._connection.execute(_DELETE_CONVERSATION, key)
            return True
        if not self._owned(job.tenant, job.conversation_id, job.owner):
            return False
        key = {"of_id": job.conversation_id, "of_tenant": job.tenant}
        if isinstance(job, PutItems):
            self._put_items(job)
        else:
            self._connection.execute(_DELETE_ITEM, key | {"of_item": item_key(job.item_id)})
        self._connection.execute(_MOVE_HEAD, key | {"new_head": job.head, "new_rendered": job.rendered})
        return True

    def _put_conversation(self, job: PutConversation) -> bool:
        content = self._codec.pack(Place("conversations", "metadata", job.tenant, job.id), dump(dict(job.metadata)))
        new = {
            "id": job.id,
            "tenant": job.tenant,
            "owner": job.owner,
            "created_at": job.created_at,
            "expires_at": job.expires_at,
            "metadata": content,
            "head": None,
            "rendered": 0,
        }
        self._insert_new(conversations, [new])
        changed = self._connection.execute(
            _SET_METADATA,
            {
                "of_id": job.id,
                "of_tenant": job.tenant,
                "of_owner": job.owner,
                "new_metadata": content,
                "new_expiry": job.expires_at,
            },
        )
        return changed.rowcount == 1

    def _owned(self, tenant: str, conversation_id: str, owner: str) -> bool:
        key = {"of_id": conversation_id, "of_tenant": tenant}
        return self._connection.execute(_OWNER, key).scalar() == owner

    def _put_items(self, job: PutItems) -> None:
        key = {"of_id": job.conversation_id, "of_tenant": job.tenant}
        first = self._connection.execute(_NEXT_POSITION, key).scalar_one()
        rows = []
        for index, item in enumerate(job.items):
            if item.id is None:
                raise ValueError("an item of a conversation needs an id")
            place = item_place(job.tenant, job.conversation_id, item_key(item.id))
            row = {"conversation_id": job.conversation_id, "tenant": job.tenant, "item_id": item_key(item.id)}
            content = self._codec.pack(place, dump(items_to_lists([item])))
            rows.append(row | {"position": first + index, "content": content})
        self._insert_new(conversation_items, rows)


def item_key(item_id: str) -> bytes:
    """As in the table: clients may put anything into an id."""
    return item_id.encode(errors="surrogatepass")


@functools.cache
def insert_new(dialect: str, table: Table) -> Any:
    """An INSERT that leaves rows that are there as they are."""
    make = postgresql.insert if dialect == "postgresql" else sqlite.insert
    return make(table).on_conflict_do_nothing()


def _usage_row(job: PutUsage) -> dict[str, Any]:
    """The job's fields are the table's columns."""
    return {name: getattr(job, name) for name in usage.c.keys()}  # noqa: SIM118 - a collection of columns, no mapping


def _delta(tenant: str, turns: Sequence[Response], codec: BlobCodec) -> bytes:
    """`turns` oldest first; the row's own is the last."""
    place = Place("responses", "delta", tenant, turns[-1].id)
    return codec.pack(place, dump([turn_to_list(turn) for turn in turns]))


_KNOWN = select(
    responses.c.id,
    responses.c.tenant,
    responses.c.depth,
    (responses.c.state != HOLLOW) & responses.c.delta.is_not(None),
).where(responses.c.id.in_(bindparam("ids", expanding=True)))
_ECHOES = select(echoes.c.digest, echoes.c.tenant).where(echoes.c.digest.in_(bindparam("digests", expanding=True)))
_THIS = (conversations.c.id == bindparam("of_id")) & (conversations.c.tenant == bindparam("of_tenant"))
_ITS_ITEMS = (conversation_items.c.conversation_id == bindparam("of_id")) & (
    conversation_items.c.tenant == bindparam("of_tenant")
)
_OWNER = select(conversations.c.owner).where(_THIS).with_for_update()
_SET_METADATA = (
    update(conversations)
    .where(_THIS, conversations.c.owner == bindparam("of_owner"))
    .values(metadata=bindparam("new_metadata"), expires_at=bindparam("new_expiry"))
)
_MOVE_HEAD = update(conversations).where(_THIS).values(head=bindparam("new_head"), rendered=bindparam("new_rendered"))
_NEXT_POSITION = select(func.coalesce(func.max(conversation_items.c.position) + 1, 0)).where(_ITS_ITEMS)
_DELETE_ITEMS = delete(conversation_items).where(_ITS_ITEMS)
_DELETE_ITEM = delete(conversation_items).where(_ITS_ITEMS, conversation_items.c.item_id == bindparam("of_item"))
_DELETE_CONVERSATION = delete(conversations).where(_THIS)
