"""Faults on a real cluster while agents talk through it: what is lost, what comes twice, how long until turns go on.

    python -m benchmarks.faults [--json] [--repeats N] [--seconds S] [--only FAULT]

Two session actors and two scripted engines behind HAProxy, on SQLite for the faults of processes and disks, on a
PostgreSQL of our own for those of the database. Agents hold sockets, chain stored responses and send again what failed
or was cut. After each kind of fault the store is held against what they were told: `lost` responses are not there, or
not as they were told, `doubled` ones are there or accounted for twice, or are complete though nobody can have waited
for them. `recovery` is how long the agents that were hit took to complete the turn that was, all tries included. The
last row is random kills of actors and engines for `--seconds`.
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
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import asyncpg

from tests.support.faults import FaultyCluster, Part, fault_settings, wait_for
from tests.support.killing import kill_at_random
from tests.support.postgres import PostgresServer, running_postgres
from tests.support.talk import Audit, Poster, Talker, Told, audit, talk

SOCKETS = 6
POSTERS = 2
WORDS = "One word comes after another word, and then there are some more."
BEFORE_S = 2.0
AWAY_S = 30.0
FULL_S = 10.0
SLOW_S = 10.0
LOCK_S = 1.0
GCS_S = 10.0
DEADLINE_S = 180.0

Inject = Callable[[], AbstractAsyncContextManager[None]]
"""The fault is there inside of the block."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of fault. `survived` are faults after which every agent went on; seconds; `codes` counts what clients
    were told meanwhile."""

    fault: str
    tried: int
    survived: int
    turns: int
    lost: int
    doubled: int
    hit: int
    recovery_median_s: float | None
    recovery_max_s: float | None
    turn_median_ms: float
    codes: dict[str, int]


async def measure(cluster: FaultyCluster, fault: str, inject: Inject, repeats: int, told: Told) -> Row:
    """The same fault so many times, each on a cluster that is whole."""
    before = len(told.ended)
    told.codes.clear()
    told.recoveries.clear()
    told.turn_s.clear()
    survived = 0
    for _ in range(repeats):
        await asyncio.to_thread(cluster.settled, DEADLINE_S)
        survived += await survives(cluster, inject, told)
    await asyncio.to_thread(cluster.settled, DEADLINE_S)
    found = await audit(cluster.settings, cluster.http, told)
    return row(fault, repeats, survived, len(told.ended) - before, found, told)


async def survives(cluster: FaultyCluster, inject: Inject, told: Told) -> bool:
    """Whether every agent completes a turn after the fault."""
    talkers = [Talker(cluster.ws, told) for _ in range(SOCKETS)]
    talkers += [Poster(f"{cluster.http}/responses", told) for _ in range(POSTERS)]
    over, fine = False, False

    async def disturb() -> None:
        nonlocal over
        try:
            await asyncio.sleep(BEFORE_S)
            async with inject():
                pass
            await asyncio.sleep(BEFORE_S)
        finally:
            over = True

    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(talk(talkers, WORDS, lambda: over))
            group.create_task(disturb())
        fine = True
    except* (AssertionError, TimeoutError) as failed:
        sys.stderr.write("".join(f"  {error}\n" for error in failed.exceptions))
    return fine


def row(fault: str, tried: int, survived: int, turns: int, found: Audit, told: Told) -> Row:
    """What was seen."""
    recoveries = told.recoveries
    return Row(
        fault,
        tried,
        survived,
        turns,
        len(found.lost) + len(found.changed),
        len(found.doubled) + len(found.invented),
        len(recoveries),
        round(statistics.median(recoveries), 2) if recoveries else None,
        round(max(recoveries), 2) if recoveries else None,
        round(1000 * statistics.median(told.turn_s), 1),
        dict(told.codes),
    )


def killing(cluster: FaultyCluster, part: Part) -> Inject:
    """Kill -9 of the first process of this kind."""

    @asynccontextmanager
    async def inject() -> AsyncIterator[None]:
        await asyncio.to_thread(wait_for, lambda: cluster.find(part), DEADLINE_S, f"there is a {part} to kill")
        await asyncio.to_thread(lambda: cluster.kill(cluster.find(part)[0]))
        yield

    return inject


def without_gcs(cluster: FaultyCluster) -> Inject:
    """Kill -9 of the control store, which comes back after a while."""

    @asynccontextmanager
    async def inject() -> AsyncIterator[None]:
        async with killing(cluster, "gcs")():
            await asyncio.sleep(GCS_S)
        await asyncio.to_thread(cluster.start_gcs)
        yield

    return inject


def full_disk(cluster: FaultyCluster) -> Inject:
    """No file of the actors grows."""

    @asynccontextmanager
    async def inject() -> AsyncIterator[None]:
        with cluster.full_disk():
            await asyncio.sleep(FULL_S)
            yield

    return inject


def without_database(server: PostgresServer) -> Inject:
    """The server is stopped and started again."""

    @asynccontextmanager
    async def inject() -> AsyncIterator[None]:
        await asyncio.to_thread(server.stop)
        try:
            await asyncio.sleep(AWAY_S)
            yield
        finally:
            await asyncio.to_thread(server.start)

    return inject


def slow_database(url: str) -> Inject:
    """Every write waits a second."""

    @asynccontextmanager
    async def inject() -> AsyncIterator[None]:
        connection = await asyncpg.connect(url)
        try:
            ends = time.monotonic() + SLOW_S
            while time.monotonic() < ends:
                async with connection.transaction():
                    await connection.execute("LOCK TABLE responses, usage IN EXCLUSIVE MODE")
                    await asyncio.sleep(LOCK_S)
            yield
        finally:
            await connection.close()

    return inject


async def random_kills(cluster: FaultyCluster, seconds: float, told: Told) -> Row:
    """Actors and engines, at random moments."""
    before = len(told.ended)
    told.codes.clear()
    told.recoveries.clear()
    told.turn_s.clear()
    await asyncio.to_thread(cluster.settled, DEADLINE_S)
    survived = False
    kills = 0
    try:
        _, made = await kill_at_random(cluster, told, seconds, random.Random())  # noqa: S311 - which to kill
        survived, kills = True, len(made)
    except* (AssertionError, TimeoutError) as failed:
        sys.stderr.write("".join(f"  {error}\n" for error in failed.exceptions))
    await asyncio.to_thread(cluster.settled, DEADLINE_S)
    found = await audit(cluster.settings, cluster.http, told)
    return row("random kills", kills, kills if survived else 0, len(told.ended) - before, found, told)


async def run(repeats: int, seconds: float, only: str | None) -> list[Row]:
    """All faults, or those with `only` in their names."""
    rows: list[Row] = []

    async def each(cluster: FaultyCluster, faults: dict[str, Inject], told: Told) -> None:
        for name, inject in faults.items():
            if only is None or only in name:
                rows.append(await measure(cluster, name, inject, repeats, told))
                sys.stderr.write(line(rows[-1]) + "\n")

    with tempfile.TemporaryDirectory(prefix="limpet-faults-") as folder:
        with FaultyCluster(fault_settings(f"sqlite:///{folder}/store.db"), Path(folder)) as cluster:
            told = Told()
            parts: tuple[Part, ...] = ("session", "engine", "controller", "haproxy")
            faults = {f"kill -9 {part}": killing(cluster, part) for part in parts}
            faults |= {"kill -9 gcs, back after 10 s": without_gcs(cluster), "disk full": full_disk(cluster)}
            await each(cluster, faults, told)
            if only is None or only in "random kills":
                rows.append(await random_kills(cluster, seconds, told))
                sys.stderr.write(line(rows[-1]) + "\n")
        with running_postgres(durable=True) as server, tempfile.TemporaryDirectory(prefix="limpet-faults-") as other:
            url = server.create_database()
            with FaultyCluster(fault_settings(url), Path(other)) as cluster:
                faults = {"database away 30 s": without_database(server), "database slow 1 s": slow_database(url)}
                await each(cluster, faults, Told())
    return rows


HEAD = (
    f"{'fault':30} {'tried':>5} {'survived':>8} {'turns':>6} {'lost':>4} {'doubled':>7} {'hit':>4} "
    f"{'recovery s median':>17} {'max':>6} {'turn ms':>7}  codes"
)


def line(found: Row) -> str:
    """One row for people."""
    times = [f"{s:.2f}" if s is not None else "-" for s in (found.recovery_median_s, found.recovery_max_s)]
    codes = ", ".join(f"{name} {count}" for name, count in sorted(found.codes.items())) or "none"
    return (
        f"{found.fault:30} {found.tried:5} {found.survived:8} {found.turns:6} {found.lost:4} {found.doubled:7} "
        f"{found.hit:4} {times[0]:>17} {times[1]:>6} {found.turn_median_ms:7.1f}  {codes}"
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.faults", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--repeats", type=int, default=3, help="times each fault is tried (3)")
    parser.add_argument("--seconds", type=float, default=300.0, help="length of the random kills (300)")
    parser.add_argument("--only", help="faults with this in their names")
    options = parser.parse_args()
    rows = asyncio.run(run(options.repeats, options.seconds, options.only))
    sys.stdout.write("\n".join([HEAD, *map(line, rows)]) + "\n")
    if options.json:
        sys.stdout.write(json.dumps({"faults": [asdict(found) for found in rows]}) + "\n")
    if any(found.lost or found.doubled or found.survived < found.tried for found in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
