"""Engines for tests of what is above them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence

from inference.engine import Chunk, EngineError, Generation, Guide, Load


class PlannedEngine:
    """Plays the same plan for every generation: chunks, errors to raise, or seconds to wait."""

    def __init__(self, plan: Sequence[Chunk | EngineError | float]) -> None:
        self.plan = plan
        self.seen: list[Generation] = []
        self.aborted = 0
        self.closed = False
        self.refusal: EngineError | None = None
        self.checked: list[Guide] = []

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        self.seen.append(generation)
        try:
            for step in self.plan:
                if isinstance(step, EngineError):
                    raise step
                if isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield step
        except (GeneratorExit, asyncio.CancelledError):
            self.aborted += 1
            raise

    async def check(self, guide: Guide) -> None:
        self.checked.append(guide)
        if self.refusal is not None:
            raise self.refusal

    async def load(self) -> Load:
        return Load(0, 0)

    async def check_health(self) -> None:
        return None

    async def close(self) -> None:
        self.closed = True
