"""The tables. `migrations` makes them; a test holds both to the same.

A response's row is what its turn added (`delta`) and which row it continues (`parent_id`). A row without a parent
stands alone: it begins a conversation, or its delta holds the whole lineage. `state` is

    LIVING     found by its id
    DELETED    not found any more, but rows that continue it need its delta
    HOLLOW     nothing left but the id, so that a late retry can't bring it back; `expire` takes it away

Columns of type LargeBinary are blobs of `actors.store.encryption`, except digests and the ids of items: clients may
choose those, and as bytes they may be any text. No other column holds what a client wrote.
"""

from __future__ import annotations

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    SmallInteger,
    Table,
    Text,
    text,
)

LIVING, DELETED, HOLLOW = 0, 1, 2

metadata = MetaData(naming_convention={"ix": "ix_%(table_name)s_%(column_0_N_name)s", "pk": "pk_%(table_name)s"})

responses = Table(
    "responses",
    metadata,
    # The id first: a batch is looked up by ids alone.
    Column("id", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("state", SmallInteger, nullable=False),
    Column("parent_id", Text),
    Column("depth", Integer, nullable=False),  # rows between this one and the one that stands alone
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("status", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("background", Boolean, nullable=False),
    Column("echo", LargeBinary),  # digest of the text in `echoes` that the object repeats
    Column("body", LargeBinary),
    Column("delta", LargeBinary),
)
Index(
    None,
    responses.c.parent_id,
    responses.c.tenant,
    sqlite_where=text("parent_id IS NOT NULL"),
    postgresql_where=text("parent_id IS NOT NULL"),
)
Index(
    None,
    responses.c.expires_at,
    sqlite_where=text("expires_at IS NOT NULL"),
    postgresql_where=text("expires_at IS NOT NULL"),
)
Index(
    None,
    responses.c.echo,
    responses.c.tenant,
    sqlite_where=text("echo IS NOT NULL"),
    postgresql_where=text("echo IS NOT NULL"),
)

echoes = Table(
    "echoes",
    metadata,
    Column("digest", LargeBinary, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("content", LargeBinary, nullable=False),
)

usage = Table(
    "usage",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("key", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("status", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("input_tokens", BigInteger, nullable=False),
    Column("cached_tokens", BigInteger, nullable=False),
    Column("output_tokens", BigInteger, nullable=False),
    Column("reasoning_tokens", BigInteger, nullable=False),
    Column("first_token_ms", BigInteger),
    Column("total_ms", BigInteger),
    Column("inference_ms", BigInteger),
    Column("overhead_ms", BigInteger),
    Column("tool_ms", BigInteger),
)
Index(None, usage.c.tenant, usage.c.created_at)

conversations = Table(
    "conversations",
    metadata,
    Column("id", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("owner", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("metadata", LargeBinary, nullable=False),
    Column("head", Text),
    Column("rendered", Integer, nullable=False),
)
Index(
    None,
    conversations.c.expires_at,
    sqlite_where=text("expires_at IS NOT NULL"),
    postgresql_where=text("expires_at IS NOT NULL"),
)

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("conversation_id", Text, primary_key=True),
    Column("tenant", Text, primary_key=True),
    Column("item_id", LargeBinary, primary_key=True),
    Column("position", BigInteger, nullable=False),
    Column("content", LargeBinary, nullable=False),
)
