"""What keeping a turn costs, and reading a conversation back, on SQLite and PostgreSQL in the same run.

    python -m benchmarks.store [--json]

Turns are like a coding agent's: some 20 kB of tools that every request repeats, a tool's output of 1 kB, an answer of
60 words and a call, 400 token ids. PostgreSQL is a server of our own on loopback (`tests.support.postgres`), flushing
as in production. CPU times are this process's, all threads: a server's own are not in them. `snapshots` shows what a
copy of the whole lineage in every so many rows would cost and save.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import sqlalchemy as sa
from sqlalchemy.ext.asyncio import create_async_engine

from actors.conversation import Response
from actors.store import writing
from actors.store.database import Database, StoreConfig
from actors.store.jobs import Job, PutResponse, PutUsage
from actors.stored import StoredResponse
from actors.tokencache import EMPTY
from gateway.protocol.items import FunctionCall, FunctionCallOutput, Item, Message, OutputText
from gateway.protocol.requests import parse_create
from gateway.protocol.response import ResponseObject
from gateway.protocol.tooldefs import ToolMemo
from tests.support.postgres import running_postgres

LENGTHS = (10, 100, 1000)
BATCHES = (1, 16, 64)
WRITES = 512
LOADS = 9
SPACINGS = (64, 256, 1024)
TENANT = "benchmark"
BUDGET_CPU_MS = 0.3
_WORDS = Path(__file__).read_text().split()
_RANDOM = random.Random(7)  # noqa: S311 - the same text in every run


def text(words: int) -> str:
    """Words of this file."""
    return " ".join(_RANDOM.choices(_WORDS, k=words))


TOOLS = [
    {
        "type": "function",
        "name": f"tool_{number}",
        "description": text(60),
        "parameters": {"type": "object", "properties": {name: {"type": "string"} for name in set(_WORDS[:30])}},
        "strict": False,
    }
    for number in range(22)
]


def turn(name: str, parent: Response | None, number: int) -> tuple[Response, Sequence[Item]]:
    """One turn of an agent: tool output in (a question at first), text and a call out."""
    given: Item = Message("user", text(40))
    if parent is not None:
        given = FunctionCallOutput(f"call_{number - 1}", text(130))
    output = (
        Message("assistant", (OutputText(text(60)),), id=f"msg_{name}", status="completed"),
        FunctionCall(f"call_{number}", "tool_3", json.dumps({"path": text(5)}), id=f"fc_{name}", status="completed"),
    )
    before = EMPTY if parent is None else parent.tokens
    ids = b"".join(_RANDOM.randrange(150_000).to_bytes(4, "little") for _ in range(400))
    pending = {f"call_{number}": "tool_3"}
    items = (given, *output)
    return Response(name, parent, items, before.extend(ids), None, (), pending, None, "m", True, len(before)), output


def chain(prefix: str, length: int) -> list[Job]:
    """The jobs of a conversation: a response and a line of the ledger for each turn."""
    jobs: list[Job] = []
    memo = ToolMemo()
    parent: Response | None = None
    for number in range(length):
        previous = {} if parent is None else {"previous_response_id": parent.id}
        request = parse_create({"model": "m", "input": "x", "tools": TOOLS, **previous}, transport="http", memo=memo)
        name = f"resp_{prefix}{number:031d}"
        parent, output = turn(name, parent, number)
        body = ResponseObject(name, 1_800_000_000, request.echo).render("completed", list(output))
        record = StoredResponse.of(name, body, request, parent, len(output))
        jobs.append(PutResponse(TENANT, record, "completed", "m", 1_800_000_000, 1_900_000_000))
        jobs.append(PutUsage(TENANT, name, "key", "m", "completed", 1_800_000_000, 400 * number, 390 * number, 90, 0))
    return jobs


async def write_times(database: Database, jobs: Sequence[Job], turns: int) -> dict[str, float]:
    """Milliseconds of one transaction of so many turns, and CPU of one turn."""
    times = []
    cpu = time.process_time()
    for start in range(0, len(jobs), 2 * turns):
        begin = time.perf_counter()
        await database.write(jobs[start : start + 2 * turns])
        times.append((time.perf_counter() - begin) * 1e3)
    cpu_ms = (time.process_time() - cpu) / (len(jobs) / 2) * 1e3
    ranked = sorted(times)
    return {
        "turns": turns,
        "p50_ms": statistics.median(times),
        "p99_ms": ranked[int(len(ranked) * 0.99)],
        "cpu_ms_per_turn": cpu_ms,
    }


async def hydrate(database: Database, name: str) -> dict[str, float]:
    """Milliseconds to have a response with its whole conversation, and of its object alone."""
    times, bodies = [], []
    cpu = time.process_time()
    for _ in range(LOADS):
        begin = time.perf_counter()
        found = await database.load(TENANT, name)
        times.append((time.perf_counter() - begin) * 1e3)
        if found is None or found.node is None:
            raise RuntimeError("a stored response was not found")
    cpu_ms = (time.process_time() - cpu) / LOADS * 1e3
    for _ in range(LOADS):
        begin = time.perf_counter()
        await database.body(TENANT, name)
        bodies.append((time.perf_counter() - begin) * 1e3)
    return {"ms": statistics.median(times), "cpu_ms": cpu_ms, "body_ms": statistics.median(bodies)}


async def measure(url: str, keys: Sequence[bytes]) -> dict[str, Any]:
    """All figures of one database."""
    database = await Database.open(StoreConfig(url, keys=keys))
    try:
        await database.write(chain("w", 8))
        writes = [await write_times(database, chain(f"{batch:x}b", WRITES), batch) for batch in BATCHES]
        hydrates = {}
        for length in LENGTHS:
            jobs = chain(f"{length:x}c", length)
            before = await content_bytes(url)
            for start in range(0, len(jobs), 128):
                await database.write(jobs[start : start + 128])
            grown = await content_bytes(url) - before
            hydrates[str(length)] = {"turns": length, "bytes_per_turn": grown / length} | await hydrate(
                database, f"resp_{length:x}c{length - 1:031d}"
            )
    finally:
        await database.close()
    return {"writes": writes, "hydrates": list(hydrates.values())}


async def spaced(url: str, depth: int) -> dict[str, float]:
    """The longest conversation, with snapshots that far apart."""
    prefix, length = f"{depth:x}d", LENGTHS[-1]
    database = await Database.open(StoreConfig(url))
    try:
        before = await content_bytes(url)
        with patch.object(writing, "SNAPSHOT_DEPTH", depth):
            jobs = chain(prefix, length)
            for start in range(0, len(jobs), 128):
                await database.write(jobs[start : start + 128])
        grown = await content_bytes(url) - before
        found = await hydrate(database, f"resp_{prefix}{length - 1:031d}")
    finally:
        await database.close()
    return {"every": depth, "turns": length, "bytes_per_turn": grown / length} | found


async def without_echo_dedup() -> float:
    """Bytes of a turn when each keeps its own copy of what it repeats."""
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/store.db"
        database = await Database.open(StoreConfig(url))
        try:
            jobs = [
                replace(job, record=replace(job.record, own=job.record.body(), echo=None))
                for job in chain("e", 100)
                if isinstance(job, PutResponse)
            ]
            await database.write(jobs)
            return await content_bytes(url) / len(jobs)
        finally:
            await database.close()


async def content_bytes(url: str) -> int:
    """Of all rows of responses and shared texts, without indexes."""
    driver = url.replace("sqlite:", "sqlite+pysqlite:")
    query = sa.text(
        "SELECT (SELECT coalesce(sum(coalesce(length(body), 0) + coalesce(length(delta), 0) + length(id)"
        " + length(tenant) + coalesce(length(parent_id), 0) + coalesce(length(echo), 0) + 40), 0) FROM responses)"
        " + (SELECT coalesce(sum(length(content) + length(digest) + length(tenant)), 0) FROM echoes)"
    )
    if driver.startswith("sqlite"):
        engine = sa.create_engine(driver)
        try:
            with engine.connect() as connection:
                return int(connection.execute(query).scalar_one())
        finally:
            engine.dispose()
    server = create_async_engine(url.replace("postgresql:", "postgresql+asyncpg:"))
    try:
        async with server.connect() as connection:
            return int((await connection.execute(query)).scalar_one())
    finally:
        await server.dispose()


async def run() -> dict[str, Any]:
    """Both databases, SQLite with encryption too."""
    result: dict[str, Any] = {"bytes_per_turn_without_echo_dedup": await without_echo_dedup()}
    with tempfile.TemporaryDirectory() as folder:
        result["sqlite"] = await measure(f"sqlite:///{folder}/plain.db", ())
        result["sqlite"]["snapshots"] = [await spaced(f"sqlite:///{folder}/plain.db", depth) for depth in SPACINGS]
        result["sqlite sealed"] = await measure(f"sqlite:///{folder}/sealed.db", (b"k" * 32,))
    with running_postgres(durable=True) as server:
        url = server.create_database()
        result["postgresql"] = await measure(url, ())
        result["postgresql"]["snapshots"] = [await spaced(url, depth) for depth in SPACINGS]
    return result


def table(result: dict[str, Any]) -> str:
    """For people."""
    names = [name for name in result if isinstance(result[name], dict)]
    lines = [f"{'writes':14} {'turns/write':>11} {'p50 ms':>8} {'p99 ms':>8} {'CPU ms/turn':>12}"]
    for name in names:
        lines += [
            f"{name:14} {row['turns']:11} {row['p50_ms']:8.2f} {row['p99_ms']:8.2f} {row['cpu_ms_per_turn']:12.3f}"
            for row in result[name]["writes"]
        ]
    lines.append(f"{'hydrate':14} {'turns':>11} {'ms':>8} {'CPU ms':>8} {'body ms':>8} {'bytes/turn':>11}")
    for name in names:
        lines += [
            f"{name:14} {row['turns']:11} {row['ms']:8.2f} {row['cpu_ms']:8.2f} {row['body_ms']:8.2f} "
            f"{row['bytes_per_turn']:11.0f}"
            for row in result[name]["hydrates"]
        ]
    lines.append(f"{'snapshots':14} {'every turns':>11} {'ms':>8} {'CPU ms':>8} {'body ms':>8} {'bytes/turn':>11}")
    for name in names:
        lines += [
            f"{name:14} {row['every']:11} {row['ms']:8.2f} {row['cpu_ms']:8.2f} {row['body_ms']:8.2f} "
            f"{row['bytes_per_turn']:11.0f}"
            for row in result[name].get("snapshots", ())
        ]
    lines.append(f"bytes/turn with a copy of the tools in each: {result['bytes_per_turn_without_echo_dedup']:.0f}")
    best = result["sqlite"]["writes"][-1]["cpu_ms_per_turn"]
    lines.append(f"CPU ms/turn, batched, SQLite: {best:.3f} of {BUDGET_CPU_MS} budgeted ({best / BUDGET_CPU_MS:.0%})")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.store", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    result = asyncio.run(run())
    sys.stdout.write(table(result) + "\n")
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
