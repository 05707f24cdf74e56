"""Where one gateway keeps what must survive: settings become an open database."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from pathlib import Path

from actors.durable import Durability
from actors.postwork import PostWorkLimits
from actors.spill import Spill
from actors.store.database import Database, StoreConfig
from actors.store.errors import StoreError
from gateway.daemon import state_directory
from gateway.settings import Settings
from gateway.settings_store import MEMORY, StoreSettings

log = logging.getLogger(__name__)

DATABASE_FILE = "store.db"
OPEN_S = 120.0
"""How long a replica that starts waits for its database, seconds: one that restarts beside it takes a minute."""
PAUSE_S = 1.0
LINGER_S = 0.1
"""How long a group of writes is held open, seconds: a write alone costs six times the CPU of one among 64, and what
waits survives a kill of the actor."""
DAY_S = 86_400.0


def default_store(settings: Settings) -> Settings:
    """The settings of `limpet up` with a URL: a file on the machine whose Ray we start, memory on a cluster."""
    if settings.store.url is not None:
        return settings
    url = MEMORY
    if settings.ray.address is None:
        directory = state_directory()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        url = f"sqlite:///{directory / DATABASE_FILE}"
    else:
        log.warning("store.url is not set: on a cluster stored responses are kept in memory only")
    return settings.model_copy(update={"store": settings.store.model_copy(update={"url": url})})


def store_config(store: StoreSettings) -> StoreConfig:
    """How a database that is named is opened. Raises ValueError for keys that can't be used."""
    assert store.url is not None
    return StoreConfig(store.url, store.keys(), store.durable, store.deadline_s, store.connections)


async def open_store(settings: Settings, owner: str) -> Durability | None:
    """The database of one session actor, `owner` being its tag, not started; None for memory only. Raises `StoreError`
    if it can't be reached for `OPEN_S`, or never could be."""
    store = settings.store
    if store.kind in ("memory", "default"):
        return None
    assert store.url is not None
    config = store_config(store)
    deadline = asyncio.get_running_loop().time() + OPEN_S
    limits = PostWorkLimits(store.waiting_jobs, store.waiting_bytes, linger_s=LINGER_S)
    keys = store.keys()
    ttl_s = None if store.ttl_days is None else store.ttl_days * DAY_S
    while True:
        try:
            database = await Database.open(config)
            spill = Spill(spill_directory(store.url), owner, keys)
            return Durability(database, limits, ttl_s, store.room_deadline_s, spill, keys, audit=store.audit)
        except StoreError as error:
            if error.kind == "permanent" or asyncio.get_running_loop().time() > deadline:
                raise
            log.warning("the store is not there yet: %s", error)
            await asyncio.sleep(PAUSE_S)


def spill_directory(url: str) -> Path:
    """On this node, and of this database: what was left there must never be written to another one."""
    name = hashlib.sha256(url.encode()).hexdigest()[:16]
    return state_directory() / "spill" / name
