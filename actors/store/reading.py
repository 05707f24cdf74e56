"""What is read: one statement each, and the values made from its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
from sqlalchemy import Connection, Select, bindparam, case, func, null, select

from actors.conversation import Response
from actors.store.encryption import BlobCodec, Place
from actors.store.errors import Unreadable
from actors.store.jobs import StoredConversation, UsageTotal
from actors.store.records import SplitBody, items_from_lists, join_body, parse, turn_from_list
from actors.store.tables import LIVING, conversation_items, conversations, echoes, responses, usage
from actors.stored import StoredResponse

Rows = Sequence[Any]
# What reading bytes that we did not write ends in.
_DAMAGES = (ValueError, TypeError, KeyError, IndexError, msgspec.MsgspecError)


def response_rows(connection: Connection, tenant: str, response_id: str) -> Rows:
    """The response's row and all those that it stands on, oldest first; none for one that can't be found."""
    return connection.execute(_LINEAGE, {"tenant": tenant, "id": response_id}).all()


def response_of(rows: Rows, codec: BlobCodec, tenant: str) -> StoredResponse | None:
    """The response whose rows those are. Raises `Unreadable`."""
    if not rows:
        return None
    newest = rows[-1]
    if rows[0].parent_id is not None:
        raise Unreadable("permanent", "A stored response lacks the one that it continues.")
    try:
        node, size = _node(rows, codec, tenant) if newest.delta is not None else (None, 0)
        pieces, given = _body(newest, codec, tenant)
        body = join_body(pieces)
        items = items_from_lists(given) if isinstance(given, list) else () if node is None else node.items[:given]
    except _DAMAGES:
        raise Unreadable("permanent", "A stored response is damaged.") from None
    return StoredResponse(newest.id, body, None, newest.background, items, node, len(body) + size)


def body_text(connection: Connection, codec: BlobCodec, tenant: str, response_id: str) -> str | None:
    """The Response object as JSON text."""
    row = connection.execute(_BODY, {"tenant": tenant, "id": response_id}).one_or_none()
    if row is None:
        return None
    try:
        return join_body(_body(row, codec, tenant)[0])
    except _DAMAGES:
        raise Unreadable("permanent", "A stored response is damaged.") from None


def conversation(
    connection: Connection, codec: BlobCodec, tenant: str, conversation_id: str
) -> StoredConversation | None:
    """The conversation with its items."""
    key = {"tenant": tenant, "id": conversation_id}
    row = connection.execute(_CONVERSATION, key).one_or_none()
    if row is None:
        return None
    contents = connection.execute(_ITEMS, key).all()
    try:
        raw = [parse(codec.open(item_place(tenant, conversation_id, name), blob))[0] for name, blob in contents]
        metadata = parse(codec.open(Place("conversations", "metadata", tenant, conversation_id), row.metadata))
        items = items_from_lists(raw)
    except _DAMAGES:
        raise Unreadable("permanent", "A stored conversation is damaged.") from None
    return StoredConversation(row.id, tenant, row.owner, row.created_at, metadata, items, row.head, row.rendered)


def conversation_owner(connection: Connection, tenant: str, conversation_id: str) -> str | None:
    """The tag of its owner."""
    row = connection.execute(_CONVERSATION, {"tenant": tenant, "id": conversation_id}).one_or_none()
    return None if row is None else str(row.owner)


def item_place(tenant: str, conversation_id: str, key: bytes) -> Place:
    """Where an item's blob is."""
    return Place("conversation_items", "content", tenant, f"{conversation_id}/{key.hex()}")


def usage_totals(connection: Connection, since: int, until: int, tenant: str | None) -> list[UsageTotal]:
    """By tenant and model."""
    query = _USAGE if tenant is None else _USAGE.where(usage.c.tenant == bindparam("tenant"))
    rows = connection.execute(query, {"tenant": tenant, "since": since, "until": until})
    return [UsageTotal(tenant, model, *map(int, counts)) for tenant, model, *counts in rows]


def _node(rows: Rows, codec: BlobCodec, tenant: str) -> tuple[Response, int]:
    """The newest turn with its lineage, and about how many bytes it all holds."""
    node: Response | None = None
    size = 0
    for row in rows:
        delta = codec.open(Place("responses", "delta", tenant, row.id), row.delta)
        size += len(delta)
        for raw in parse(delta):
            node = turn_from_list(raw, node)
    if node is None:
        raise ValueError("no turn")
    return replace(node, size=size), size


def _body(row: Any, codec: BlobCodec, tenant: str) -> tuple[SplitBody, Any]:
    pieces, given = parse(codec.open(Place("responses", "body", tenant, row.id), row.body))
    shared = ""
    if row.echo is not None:
        shared = codec.open(Place("echoes", "content", tenant, row.echo.hex()), row.shared).decode()
    return SplitBody(pieces, shared), given


def _lineage() -> Select[Any]:
    """Up the parents by their keys alone, then the blobs of what was found."""
    newest = (
        select(responses.c.id, responses.c.tenant, responses.c.parent_id)
        .where(
            responses.c.id == bindparam("id"), responses.c.tenant == bindparam("tenant"), responses.c.state == LIVING
        )
        .cte("lineage", recursive=True)
    )
    above = responses.alias("above")
    lineage = newest.union_all(
        select(above.c.id, above.c.tenant, above.c.parent_id).where(
            above.c.id == newest.c.parent_id, above.c.tenant == newest.c.tenant
        )
    )
    own = responses.c.id == bindparam("id")
    return (
        select(
            responses.c.id,
            responses.c.parent_id,
            responses.c.background,
            responses.c.delta,
            case((own, responses.c.body), else_=null()).label("body"),
            case((own, responses.c.echo), else_=null()).label("echo"),
            echoes.c.content.label("shared"),
        )
        .select_from(
            lineage.join(responses, (responses.c.id == lineage.c.id) & (responses.c.tenant == lineage.c.tenant)).join(
                echoes,
                own & (echoes.c.digest == responses.c.echo) & (echoes.c.tenant == responses.c.tenant),
                isouter=True,
            )
        )
        .order_by(responses.c.depth)
    )


_LINEAGE = _lineage()
_BODY = (
    select(responses.c.id, responses.c.body, responses.c.echo, echoes.c.content.label("shared"))
    .select_from(
        responses.outerjoin(echoes, (echoes.c.digest == responses.c.echo) & (echoes.c.tenant == responses.c.tenant))
    )
    .where(responses.c.id == bindparam("id"), responses.c.tenant == bindparam("tenant"), responses.c.state == LIVING)
)
_CONVERSATION = select(conversations).where(
    conversations.c.id == bindparam("id"), conversations.c.tenant == bindparam("tenant")
)
_ITEMS = (
    select(conversation_items.c.item_id, conversation_items.c.content)
    .where(conversation_items.c.conversation_id == bindparam("id"), conversation_items.c.tenant == bindparam("tenant"))
    .order_by(conversation_items.c.position)
)
_USAGE = (
    select(
        usage.c.tenant,
        usage.c.model,
        func.count(),
        func.sum(usage.c.input_tokens),
        func.sum(usage.c.cached_tokens),
        func.sum(usage.c.output_tokens),
        func.sum(usage.c.reasoning_tokens),
    )
    .where(usage.c.created_at >= bindparam("since"), usage.c.created_at < bindparam("until"))
    .group_by(usage.c.tenant, usage.c.model)
    .order_by(usage.c.tenant, usage.c.model)
)
