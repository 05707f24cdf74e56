"""The first tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision: str | None = None


def upgrade() -> None:
    """Responses with the texts they share, usage, conversations with their items."""
    op.create_table(
        "responses",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("state", sa.SmallInteger, nullable=False),
        sa.Column("parent_id", sa.Text),
        sa.Column("depth", sa.Integer, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("background", sa.Boolean, nullable=False),
        sa.Column("echo", sa.LargeBinary),
        sa.Column("body", sa.LargeBinary),
        sa.Column("delta", sa.LargeBinary),
        sa.PrimaryKeyConstraint("id", "tenant", name="pk_responses"),
    )
    _partial_index("responses", "parent_id", "tenant")
    _partial_index("responses", "expires_at")
    _partial_index("responses", "echo", "tenant")
    op.create_table(
        "echoes",
        sa.Column("digest", sa.LargeBinary, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("digest", "tenant", name="pk_echoes"),
    )
    op.create_table(
        "usage",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("key", sa.Text, nullable=False),
        sa.Column("model", sa.Text, nullable=False),
        sa.Column("status", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("input_tokens", sa.BigInteger, nullable=False),
        sa.Column("cached_tokens", sa.BigInteger, nullable=False),
        sa.Column("output_tokens", sa.BigInteger, nullable=False),
        sa.Column("reasoning_tokens", sa.BigInteger, nullable=False),
        sa.Column("first_token_ms", sa.BigInteger),
        sa.Column("total_ms", sa.BigInteger),
        sa.Column("inference_ms", sa.BigInteger),
        sa.Column("overhead_ms", sa.BigInteger),
        sa.Column("tool_ms", sa.BigInteger),
        sa.PrimaryKeyConstraint("id", "tenant", name="pk_usage"),
    )
    op.create_index("ix_usage_tenant_created_at", "usage", ["tenant", "created_at"])
    op.create_table(
        "conversations",
        sa.Column("id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("owner", sa.Text, nullable=False),
        sa.Column("created_at", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.BigInteger),
        sa.Column("metadata", sa.LargeBinary, nullable=False),
        sa.Column("head", sa.Text),
        sa.Column("rendered", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("id", "tenant", name="pk_conversations"),
    )
    _partial_index("conversations", "expires_at")
    op.create_table(
        "conversation_items",
        sa.Column("conversation_id", sa.Text, nullable=False),
        sa.Column("tenant", sa.Text, nullable=False),
        sa.Column("item_id", sa.LargeBinary, nullable=False),
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("content", sa.LargeBinary, nullable=False),
        sa.PrimaryKeyConstraint("conversation_id", "tenant", "item_id", name="pk_conversation_items"),
    )
    if op.get_bind().dialect.name == "postgresql":
        # The blobs are compressed already: the server need not try again.
        op.execute("ALTER TABLE responses ALTER body SET STORAGE EXTERNAL, ALTER delta SET STORAGE EXTERNAL")
        op.execute("ALTER TABLE echoes ALTER content SET STORAGE EXTERNAL")
        op.execute("ALTER TABLE conversation_items ALTER content SET STORAGE EXTERNAL")


def downgrade() -> None:
    """Nothing is left."""
    for table in ("conversation_items", "conversations", "usage", "echoes", "responses"):
        op.drop_table(table)


def _partial_index(table: str, *columns: str) -> None:
    """An index of the rows whose first column is set."""
    where = sa.text(f"{columns[0]} IS NOT NULL")
    name = f"ix_{table}_{'_'.join(columns)}"
    op.create_index(name, table, list(columns), sqlite_where=where, postgresql_where=where)
