"""What the way from the engine costs, and how soon the engine hears of a consumer that is gone."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, ExitStack, aclosing
from typing import Any, cast

from benchmarks.processes import TOKEN, Part, running
from benchmarks.stream_engine import request
from benchmarks.stream_parts import Consumer, consumer, generations, source, trace_of
from inference.engine import Chunk
from inference.link import LinkEngine
from inference.tokenizer import scripted_tokenizer

LOADS = ((1, 10_000, 0), (8, 2_500, 0), (32, 625, 0), (1, 4_000, 4_000), (32, 500, 1_000), (32, 100, 50))
"""Streams at once, tokens of each, tokens a second of each (0: as fast as possible)."""
COMPARED = (LOADS[0], LOADS[4], LOADS[5])
"""Those that the other transports are measured at."""
IN_TOTAL = LOADS[4]
"""The one whose figures stand at the top level."""
ROUNDS = 3
ABORTS = 30
ABORTED_RATE, ABORTED_TOKENS = 1_000, 4_000
"""What runs when it is aborted."""


class _Way:
    """An engine's process, a consumer's, and what is between them. `none` has one process."""

    def __init__(self, transport: str, ends: tuple[Part, Part], taker: Consumer) -> None:
        self.transport, self._ends, self._taker = transport, ends, taker

    async def measure(self, streams: int, tokens: int, rate: int) -> dict[str, float]:
        """One round of a load."""
        before = [part.thread_cpu_s() for part in self._ends]
        told = await self._taker.take(streams, tokens, rate)
        engine, client = (part.thread_cpu_s() - had for part, had in zip(self._ends, before, strict=True))
        total = streams * tokens
        return {
            "tok_s": total / told["seconds"],
            "tokens_per_chunk": total / told["chunks"],
            "client_cpu_us": client / total * 1e6,
            "engine_cpu_us": engine / total * 1e6,
        }


async def measure_transports(transports: tuple[str, ...]) -> list[dict[str, Any]]:
    """A row for each transport and load, medians of rounds that take turns."""
    async with AsyncExitStack() as clients:
        with ExitStack() as parts:
            ways = []
            for name in transports:
                engine = parts.enter_context(running(source, name))
                client = parts.enter_context(running(consumer, name, engine.port))
                taker = await clients.enter_async_context(Consumer(client))
                await taker.take(1, 100, 0)
                ways.append(_Way(name, (engine, client), taker))
            plan = [(way, load) for load in LOADS for way in ways if way.transport == "link" or load in COMPARED]
            found: dict[tuple[str, tuple[int, int, int]], list[dict[str, float]]] = {}
            for _ in range(ROUNDS):
                for way, load in plan:
                    found.setdefault((way.transport, load), []).append(await way.measure(*load))
    return [_row(name, load, rounds) for (name, load), rounds in found.items()]


def _row(name: str, load: tuple[int, int, int], rounds: list[dict[str, float]]) -> dict[str, Any]:
    row = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
    both = row["client_cpu_us"] + row["engine_cpu_us"]
    return {
        "transport": name,
        "streams": load[0],
        "rate": load[2],
        **row,
        "client_tok_s_per_core": 1e6 / row["client_cpu_us"],
        "tok_s_per_core": 1e6 / both,
    }


async def link_aborts(engine: Part) -> list[float]:
    """Milliseconds from closing an iterator of the link until the engine's is closed."""
    vocabulary = scripted_tokenizer()
    link = LinkEngine(("127.0.0.1", engine.port), TOKEN)
    taken = []
    try:
        for _ in range(ABORTS):
            number = generations(engine) + 1
            asked = request(vocabulary, "aborted", ABORTED_TOKENS, ABORTED_RATE)
            async with aclosing(cast("AsyncGenerator[Chunk]", link.generate(asked))) as chunks:
                await anext(chunks)
                await any_moment()
                begin = time.monotonic()
            taken.append((await trace_of(engine, number)).closed - begin)
    finally:
        await link.close()
    return [seconds * 1e3 for seconds in taken]


async def any_moment() -> None:
    """Wait a little, in no step with the engine."""
    await asyncio.sleep(random.uniform(0.005, 0.02))  # noqa: S311  no secret
