"""One parametrised fixture: every test that asks for `url` or `database` runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from actors.store.database import Database, StoreConfig
from tests.support.postgres import PostgresServer, running_postgres


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of a new, empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database()


@pytest_asyncio.fixture
async def database(url: str) -> AsyncIterator[Database]:
    opened = await Database.open(StoreConfig(url))
    try:
        yield opened
    finally:
        await opened.close()
