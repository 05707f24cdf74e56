"""The schema's history: `upgrade` brings a database to the newest revision."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection

from actors.store.errors import StoreError


def upgrade(connection: Connection, revision: str = "head") -> None:
    """Inside the transaction of `connection`, which holds whatever lock keeps others from doing the same. Raises
    `StoreError` for a database that a newer Limpet has changed."""
    config = _config(connection)
    current = current_revision(connection)
    known = {script.revision for script in ScriptDirectory.from_config(config).walk_revisions()}
    if current is not None and current not in known:
        raise StoreError(
            "permanent", f"The database is at revision {current}, which this Limpet does not know. Use a newer one."
        )
    command.upgrade(config, revision)


def downgrade(connection: Connection, revision: str = "base") -> None:
    """Back to an older revision; what the newer ones added is lost."""
    command.downgrade(_config(connection), revision)


def current_revision(connection: Connection) -> str | None:
    """The database's revision; None for an empty one."""
    return MigrationContext.configure(connection).get_current_revision()


def newest_revision() -> str | None:
    """The revision that this code wants."""
    return ScriptDirectory(str(Path(__file__).parent)).get_current_head()


def _config(connection: Connection) -> Config:
    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "newline")
    config.attributes["connection"] = connection
    return config
