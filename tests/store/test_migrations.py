"""The schema's history leads to the tables that the code uses, whoever comes first."""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from alembic.autogenerate import compare_metadata
from alembic.runtime.migration import MigrationContext

from actors.store import migrations
from actors.store.database import Database, StoreConfig, _connections
from actors.store.errors import StoreError
from actors.store.tables import metadata
from tests.support.responses import put, same, turn

ROOT = Path(__file__).resolve().parents[2]
OPEN = """
import asyncio, sys
from actors.store.database import Database, StoreConfig
from tests.support.responses import put, turn
async def main():
    print("ready", flush=True)
    sys.stdin.readline()
    store = await Database.open(StoreConfig(sys.argv[1], deadline_s=30))
    await store.write([put(turn(sys.argv[2]))])
    await store.close()
asyncio.run(main())
"""


def differences(connection: sa.Connection) -> list[Any]:
    return compare_metadata(MigrationContext.configure(connection), metadata)


def tables(connection: sa.Connection) -> set[str]:
    return set(sa.inspect(connection).get_table_names())


async def test_an_upgrade_from_nothing_makes_the_tables(database: Database) -> None:
    assert await database._connections.read(differences) == []
    assert await database._connections.read(migrations.current_revision) == migrations.newest_revision()


async def test_there_is_a_way_back(database: Database) -> None:
    await database._connections.write(migrations.downgrade)
    assert await database._connections.read(tables) == {"alembic_version"}
    await database._connections.migrate()

    assert await database._connections.read(differences) == []


async def test_a_failed_upgrade_leaves_nothing(url: str) -> None:
    connections = _connections(StoreConfig(url))

    def fail(connection: sa.Connection) -> None:
        migrations.upgrade(connection)
        raise TimeoutError

    try:
        with pytest.raises(StoreError):
            await connections.write(fail)
        assert await connections.read(tables) == set()
    finally:
        await connections.close()


async def test_an_upgrade_may_take_longer_than_a_turn_waits_for_the_database(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    upgrade = migrations.upgrade

    def slowly(connection: sa.Connection) -> None:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.text("SELECT pg_sleep(2.5)"))
        else:
            time.sleep(2.5)
        upgrade(connection)

    monkeypatch.setattr(migrations, "upgrade", slowly)
    database = await Database.open(StoreConfig(url, deadline_s=1.5))
    assert await database._connections.read(differences) == []
    await database.close()


async def test_a_database_of_a_newer_limpet_is_refused_in_words(database: Database, url: str) -> None:
    change = sa.text("UPDATE alembic_version SET version_num = 'from the future'")
    await database._connections.write(lambda connection: connection.execute(change) and None)

    with pytest.raises(StoreError, match="Use a newer one") as caught:
        await Database.open(StoreConfig(url))
    assert caught.value.kind == "permanent"


async def test_many_open_an_empty_database_at_once(url: str) -> None:
    """Two processes and five tasks of this one."""
    processes = [
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", OPEN, url, f"p{n}", stdin=-1, stdout=-1, stderr=-1, cwd=ROOT
        )
        for n in range(2)
    ]
    for process in processes:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
    ends = [asyncio.create_task(process.communicate(b"\n")) for process in processes]
    stores = await asyncio.gather(*(Database.open(StoreConfig(url, deadline_s=30)) for _ in range(5)))
    try:
        for process, end in zip(processes, ends, strict=True):
            _, errors = await end
            assert process.returncode == 0, errors.decode()
        for number in range(2):
            job = put(turn(f"p{number}"))
            assert same(await stores[number].load("t", job.record.id), job)
    finally:
        for store in stores:
            await store.close()
