"""What a request says of its urgency reaches the engine: the lowest number goes first there."""

from __future__ import annotations

import asyncio
from typing import Any

from openai import AsyncOpenAI

from actors.priority import PRIMING
from tests.support.actors import says
from tests.support.engines import PlannedEngine
from tests.support.gateway import gateway, turn


async def seen(engine: PlannedEngine, count: int) -> list[int]:
    async with asyncio.timeout(30):
        while len(engine.seen) < count:  # noqa: ASYNC110 - the engine offers nothing to wait for
            await asyncio.sleep(0.005)
    return [generation.priority for generation in engine.seen]


async def test_turns_are_told_apart_by_tier_and_by_whether_somebody_waits() -> None:
    engine = says("ok")
    async with gateway(engine) as running, AsyncOpenAI(base_url=running.http, api_key="k") as client:
        more: dict[str, Any]
        for more in ({"service_tier": "priority"}, {}, {"service_tier": "flex"}, {"background": True}):
            await client.responses.create(model="m", input="hi", **more)
        found = await seen(engine, 4)

    assert found == [-10, 0, 10, 5]


async def test_a_warm_up_goes_last() -> None:
    engine = says("ok")
    async with gateway(engine) as running, running.connect() as ws:
        await turn(ws, input="hi", generate=False, service_tier="priority")
        assert await seen(engine, 1) == [PRIMING]
