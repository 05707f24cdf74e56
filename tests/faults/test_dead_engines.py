"""Engines that died: who finds one looks around, so that a turn's few tries are not spent on the dead."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import pytest

from actors.engines import Endpoint, EnginePool
from inference.engine import Chunk, EngineError, Generation, Sampling
from tests.support.engines import PlannedEngine

GENERATION = Generation("r", "m", (b"\1\0\0\0",), Sampling(max_tokens=4))
ANSWER = [Chunk([1], cached_tokens=0), Chunk([2], finish="stop")]
GONE = EngineError("unavailable", "gone")


async def run(engine: object) -> list[int]:
    return [token async for chunk in engine.generate(GENERATION) for token in chunk.ids]  # type: ignore[attr-defined]


@pytest.mark.parametrize("plan", [[GONE], [*ANSWER[:1], GONE]], ids=["before its first token", "in the middle"])
async def test_the_first_turn_that_meets_a_dead_engine_has_it_forgotten(plan: list[Chunk | EngineError]) -> None:
    dead = {f"dead{number}": PlannedEngine(plan) for number in range(4)}
    engines = {**dead, "lives": PlannedEngine(ANSWER)}
    running = list(engines)

    async def discover() -> Sequence[Endpoint]:
        return [Endpoint(name, "127.0.0.1", 1) for name in running]

    pool = EnginePool(discover, lambda endpoint: engines[endpoint.replica], refresh_s=3600, patience_s=0)
    await pool.start()
    running[:] = ["lives"]
    with suppress(EngineError):
        await run(pool.pinned())
    async with asyncio.timeout(30):
        while set(pool.active()) != {"lives"}:  # noqa: ASYNC110 - nobody is told
            await asyncio.sleep(0)

    assert await run(pool.pinned()) == [1, 2]
    await pool.close()
