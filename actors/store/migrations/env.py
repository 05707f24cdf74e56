"""Alembic's entry: runs revisions on the connection that it was given, inside that one's transaction."""

from __future__ import annotations

from alembic import context

from actors.store.tables import metadata

context.configure(connection=context.config.attributes["connection"], target_metadata=metadata, transactional_ddl=False)
context.run_migrations()
