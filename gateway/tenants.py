"""What operators ask of the store about tenants: what they used, and that all they have stored be deleted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import TypeVar

from actors.spill_replay import ReplayReport, replay
from actors.store.database import Database
from actors.store.errors import StoreError
from actors.store.jobs import UsageTotal
from gateway import daemon
from gateway.auth import OPEN_TENANT, tenant_of
from gateway.rollout import StartError
from gateway.settings import Settings
from gateway.storage import default_store, spill_directory, store_config

DAY_S = 86_400
_COLUMNS = ("tenant", "model", "turns", "input", "cached", "output", "reasoning")
_Result = TypeVar("_Result")


def usage(settings: Settings, days: float, tenant: str | None, *, as_json: bool) -> str:
    """What was used in the last so many days, as a table or as JSON: a list of objects. Raises `StartError`."""
    until = int(time.time()) + 1
    totals = _asked(settings, lambda database: database.usage(until - int(days * DAY_S), until, tenant))
    if as_json:
        return json.dumps([asdict(total) for total in totals])
    names = named_tenants(settings)
    rows = [_COLUMNS, *(_row(total, names) for total in totals)]
    return "\n".join(_aligned(rows)) if totals else f"nothing was used in {days:g} days"


def purge(settings: Settings, tenant: str) -> str:
    """Delete all responses and conversations of a tenant; what was done. Raises `StartError`."""
    store = default_store(settings).store
    assert store.url is not None
    folder = spill_directory(store.url)

    async def run(database: Database) -> tuple[int, bool]:
        """How many, and whether more may come: what actors that died have left is written first."""
        report = await replay(folder, database, store.keys()) if folder.is_dir() else ReplayReport()
        return await database.purge_tenant(tenant), report.left > 0

    count, left = _asked(settings, run)
    lines = [f"deleted {count} responses and conversations of {tenant}; the ledger keeps what was used"]
    if left:
        lines.append(f"some of what actors that died have left can't be written yet ({folder}): purge again when it is")
    running = [each for each in daemon.read_records(daemon.state_directory()) if each.process() is not None]
    if running or store.kind != "sqlite":
        lines.append("what gateways hold in memory stays until they stop: purge again after that")
    return "\n".join(lines)


def named_tenants(settings: Settings) -> dict[str, str]:
    """Names of tenants, by tenant: which of the configured keys it is, never the key."""
    keys = {tenant_of(key): f"key {number}" for number, key in enumerate(settings.server.api_keys, 1)}
    return {OPEN_TENANT: "no keys", **keys}


def _row(total: UsageTotal, names: dict[str, str]) -> tuple[str, ...]:
    name = names.get(total.tenant)
    counts = (total.responses, total.input_tokens, total.cached_tokens, total.output_tokens, total.reasoning_tokens)
    return (total.tenant if name is None else f"{total.tenant} ({name})", total.model, *(f"{n:,}" for n in counts))


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Words to the left, figures to the right."""
    columns = [
        [cell.ljust(width) if at < 2 else cell.rjust(width) for cell in column]
        for at, column in enumerate(zip(*rows, strict=True))
        for width in [max(map(len, column))]
    ]
    return ["  ".join(row) for row in zip(*columns, strict=True)]


def _asked(settings: Settings, question: Callable[[Database], Awaitable[_Result]]) -> _Result:
    store = default_store(settings).store
    if store.url is None or store.kind == "memory":
        raise StartError("nothing is stored: store.url is `memory`")
    config = store_config(store)

    async def run() -> _Result:
        database = await Database.open(config)
        try:
            return await question(database)
        finally:
            await database.close()

    try:
        return asyncio.run(run())
    except (StoreError, OSError) as error:
        raise StartError(f"the store can't be used: {error}") from None
