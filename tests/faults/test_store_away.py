"""While the database is away, memory answers for what it has: that of any actor (design.md decision 10)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from actors.durable import Durability
from actors.session import SessionActor
from actors.store.connections import SqliteConnections
from actors.store.database import Database, StoreConfig
from actors.store.errors import StoreError
from gateway.protocol.errors import ApiError
from tests.support.actors import TENANT, Network, actor, asked, run_turn, says


async def away(*_: Any) -> Any:
    raise StoreError("transient", "The database can't be reached.")


@asynccontextmanager
async def two_without_a_database(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[SessionActor, SessionActor]]:
    """Two actors whose database goes away when they have opened it."""
    network = Network()
    async with AsyncExitStack() as stack:
        for owner in ("aaaaaaaa", "bbbbbbbb"):
            kept = Durability(await Database.open(StoreConfig(f"sqlite:///{path / 'store.db'}")))
            kept.start()
            made = await stack.enter_async_context(actor(says("Fine."), owner, durability=kept, peers=network))
            network.actors.append(made)
        with monkeypatch.context() as patched:
            patched.setattr(SqliteConnections, "write", away)  # every way to it, whatever the look-up is called
            patched.setattr(SqliteConnections, "read", away)
            one, two = network.actors
            yield one, two


async def test_another_actor_goes_on_with_what_its_owner_remembers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with two_without_a_database(tmp_path, monkeypatch) as (one, two):
        first = await run_turn(one, asked("one"))
        second = await run_turn(two, asked("two", previous_response_id=first["id"]))
        assert second["status"] == "completed"
        assert json.loads(await one.archive.retrieve(TENANT, second["id"])) == second


@pytest.mark.parametrize("owner", ["aaaaaaaa", "bbbbbbbb", "cccccccc"])
async def test_what_no_actor_remembers_can_not_be_told_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: str
) -> None:
    """Not `not_found`: clients would take that for an answer."""
    unknown = f"resp_{owner}{'0' * 32}"
    async with two_without_a_database(tmp_path, monkeypatch) as (one, _):
        with pytest.raises(ApiError) as continued:
            await run_turn(one, asked("x", previous_response_id=unknown))
        with pytest.raises(ApiError) as retrieved:
            await one.archive.retrieve(TENANT, unknown)
        assert {continued.value.code, retrieved.value.code} == {"store_unavailable"}
