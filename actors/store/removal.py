"""Deleting: what goes at once, what waits for its descendants, and what TTL takes.

A deleted response's object is gone at once, and so is its delta unless a row needs it that can still be found. Whoever
deletes locks out those who write for the same tenant, so that no row gets a parent that is just being emptied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Sequence
from typing import Any, TypeVar

from sqlalchemy import BindParameter, Connection, Select, Table, bindparam, delete, exists, select, text, update
from sqlalchemy.dialects.postgresql import ARRAY
from sqlalchemy.types import BigInteger

from actors.store.tables import (
    DELETED,
    HOLLOW,
    LIVING,
    conversation_items,
    conversations,
    echoes,
    responses,
)

CHUNK = 500
"""Values in one statement; SQLite and PostgreSQL take some 32,000 parameters."""
LATE_RETRY_S = 3600
"""How long the id of a deleted response is kept against a write that was on its way."""
_Value = TypeVar("_Value")
_LOCKS = b"limpet store tenant\0"


def chunks(values: Sequence[_Value]) -> Iterable[Sequence[_Value]]:
    """Few enough for one statement."""
    return (values[start : start + CHUNK] for start in range(0, len(values), CHUNK))


def lock_tenants(connection: Connection, tenants: Collection[str], *, exclusive: bool) -> None:
    """Until the transaction ends, and all at once in one order, so that nobody waits in a circle. SQLite has one writer
    anyway."""
    if not tenants or connection.dialect.name != "postgresql":
        return
    keys = sorted(_lock_key(tenant) for tenant in tenants)
    connection.execute(_LOCK if exclusive else _LOCK_SHARED, {"keys": keys})


def delete_responses(connection: Connection, tenant: str, ids: Sequence[str], now: int) -> list[str]:
    """Delete those of the ids that can be found; returns them. The tenant's lock is held."""
    found: dict[str, bytes | None] = {}
    for chunk in chunks(ids):
        found |= {row.id: row.echo for row in connection.execute(_LIVING, {"tenant": tenant, "ids": chunk})}
    if not found:
        return []
    for chunk in chunks(list(found)):
        connection.execute(_TO_DELETED, {"of_tenant": tenant, "ids": chunk})
    _drop_echoes(connection, tenant, {echo for echo in found.values() if echo is not None})
    _empty(connection, tenant, list(found), now)
    return list(found)


def expire(connection: Connection, now: int, limit: int) -> int:
    """Delete at most `limit` responses and `limit` conversations whose time is over, and forget the ids of those
    deleted long ago. Returns how many rows it dealt with: 0 means that there is no more to do."""
    due = connection.execute(_DUE, {"now": now, "limit": limit}).all()
    lock_tenants(connection, {row.tenant for row in due}, exclusive=True)
    for tenant in sorted({row.tenant for row in due}):
        mine = [row for row in due if row.tenant == tenant]
        delete_responses(connection, tenant, [row.id for row in mine if row.state == LIVING], now)
        for chunk in chunks([row.id for row in mine if row.state == HOLLOW]):
            connection.execute(_FORGET, {"of_tenant": tenant, "ids": chunk})
    old = connection.execute(_DUE_CONVERSATIONS, {"now": now, "limit": limit}).all()
    for tenant, conversation_id in old:
        key = {"of_tenant": tenant, "of_id": conversation_id}
        connection.execute(_DELETE_ITEMS, key)
        connection.execute(_DELETE_CONVERSATION, key)
    return len(due) + len(old)


def purge_tenant(connection: Connection, tenant: str, limit: int) -> int:
    """Delete content of a tenant, at most `limit` rows of a kind; how many responses and conversations there were. 0:
    no more, and nothing else of theirs either. The ledger stays: it holds no content."""
    lock_tenants(connection, {tenant}, exclusive=True)
    counts = [_purge(connection, table, tenant, limit) for table in (responses, conversations)]
    if not any(counts):
        for table in (echoes, conversation_items):
            connection.execute(delete(table).where(table.c.tenant == tenant))
    return sum(counts)


def _purge(connection: Connection, table: Table, tenant: str, limit: int) -> int:
    some = select(table.c.id).where(table.c.tenant == tenant).limit(limit)
    ids = [row.id for row in connection.execute(some)]
    for chunk in chunks(ids):
        connection.execute(delete(table).where(table.c.tenant == tenant, table.c.id.in_(chunk)))
    return len(ids)


def _empty(connection: Connection, tenant: str, ids: list[str], now: int) -> None:
    """Take the deltas of deleted rows that nothing needs, and then those of the rows that only these needed."""
    while ids:
        found: dict[str, str | None] = {}
        for chunk in chunks(ids):
            found |= {row.id: row.parent_id for row in connection.execute(_UNNEEDED, {"tenant": tenant, "ids": chunk})}
        for chunk in chunks(list(found)):
            connection.execute(_TO_HOLLOW, {"of_tenant": tenant, "ids": chunk, "until": now + LATE_RETRY_S})
        # Where branches met, the parent was still needed by the other one.
        ids = sorted({parent for parent in found.values() if parent is not None and parent not in found})


def _drop_echoes(connection: Connection, tenant: str, digests: set[bytes]) -> None:
    for chunk in chunks(sorted(digests)):
        connection.execute(_DROP_ECHOES, {"of_tenant": tenant, "digests": chunk})


def _lock_key(tenant: str) -> int:
    digest = hashlib.blake2b(_LOCKS + tenant.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


_LOCK_SHARED = text("SELECT count(pg_advisory_xact_lock_shared(k)) FROM unnest(:keys) k").bindparams(
    bindparam("keys", type_=ARRAY(BigInteger))
)
_LOCK = text("SELECT count(pg_advisory_xact_lock(k)) FROM unnest(:keys) k").bindparams(
    bindparam("keys", type_=ARRAY(BigInteger))
)
_IDS: BindParameter[Any] = bindparam("ids", expanding=True)
_LIVING = select(responses.c.id, responses.c.echo).where(
    responses.c.id.in_(_IDS), responses.c.tenant == bindparam("tenant"), responses.c.state == LIVING
)
_OF_THESE = (responses.c.id.in_(_IDS)) & (responses.c.tenant == bindparam("of_tenant"))
_TO_DELETED = update(responses).where(_OF_THESE).values(state=DELETED, echo=None, body=None, expires_at=None)
_TO_HOLLOW = (
    update(responses)
    .where(_OF_THESE)
    .values(state=HOLLOW, delta=None, parent_id=None, depth=0, expires_at=bindparam("until"))
)
_FORGET = delete(responses).where(_OF_THESE, responses.c.state == HOLLOW)
_DROP_ECHOES = delete(echoes).where(
    echoes.c.digest.in_(bindparam("digests", expanding=True)),
    echoes.c.tenant == bindparam("of_tenant"),
    ~exists().where(responses.c.echo == echoes.c.digest, responses.c.tenant == echoes.c.tenant),
)
_DUE = (
    select(responses.c.id, responses.c.tenant, responses.c.state)
    .where(responses.c.expires_at <= bindparam("now"))
    .order_by(responses.c.expires_at)
    .limit(bindparam("limit"))
)
_DUE_CONVERSATIONS = (
    select(conversations.c.tenant, conversations.c.id)
    .where(conversations.c.expires_at <= bindparam("now"))
    .limit(bindparam("limit"))
    .with_for_update(skip_locked=True)
)
_DELETE_ITEMS = delete(conversation_items).where(
    conversation_items.c.conversation_id == bindparam("of_id"), conversation_items.c.tenant == bindparam("of_tenant")
)
_DELETE_CONVERSATION = delete(conversations).where(
    conversations.c.id == bindparam("of_id"), conversations.c.tenant == bindparam("of_tenant")
)


def _unneeded() -> Select[Any]:
    """Of the deleted rows `ids` those without a row that continues them, and upwards from each the rows that only the
    one before needed."""
    first, child = responses.alias("first"), responses.alias("child")
    continued = exists().where(child.c.parent_id == first.c.id, child.c.tenant == first.c.tenant)
    gone = (
        select(first.c.id, first.c.parent_id)
        .where(first.c.id.in_(_IDS), first.c.tenant == bindparam("tenant"), first.c.state == DELETED, ~continued)
        .cte("gone", recursive=True)
    )
    parent, other = responses.alias("parent"), responses.alias("other")
    shared = exists().where(
        other.c.parent_id == parent.c.id, other.c.tenant == parent.c.tenant, other.c.id != gone.c.id
    )
    above = select(parent.c.id, parent.c.parent_id).where(
        parent.c.id == gone.c.parent_id, parent.c.tenant == bindparam("tenant"), parent.c.state == DELETED, ~shared
    )
    both = gone.union_all(above)
    return select(both.c.id, both.c.parent_id)


_UNNEEDED = _unneeded()
