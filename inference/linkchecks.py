"""What an engine says about guides, remembered: many sessions send the same tools, and compiling takes seconds."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from functools import partial
from hashlib import blake2b

from inference.engine import Engine, EngineError, Guide

REMEMBERED = 4096
"""Guides whose outcome is kept, the least recently used ones forgotten first."""


class GuideChecks:
    """Asks the engine about each guide once, however many want to know at the same time. Only what can't change is
    kept: that a guide is good, or why it is `invalid`."""

    def __init__(self, engine: Engine, remembered: int = REMEMBERED) -> None:
        self._engine = engine
        self._remembered = remembered
        self._outcomes: OrderedDict[bytes, str | None] = OrderedDict()
        self._running: dict[bytes, asyncio.Task[None]] = {}

    async def check(self, guide: Guide) -> None:
        """As `Engine.check`. A caller who gives up doesn't end the check, so that it is known next time."""
        key = blake2b(f"{guide.kind}\0{guide.value}".encode(errors="surrogatepass"), digest_size=16).digest()
        if key in self._outcomes:
            self._outcomes.move_to_end(key)
            if (refusal := self._outcomes[key]) is not None:
                raise EngineError("invalid", refusal)
            return
        if (task := self._running.get(key)) is None:
            task = self._running[key] = asyncio.create_task(self._check(guide))
            task.add_done_callback(partial(self._done, key))
        await asyncio.shield(task)

    async def _check(self, guide: Guide) -> None:
        await self._engine.check(guide)

    def close(self) -> None:
        """Ends what runs."""
        for task in self._running.values():
            task.cancel()

    def _done(self, key: bytes, task: asyncio.Task[None]) -> None:
        del self._running[key]
        if task.cancelled():
            return
        problem = task.exception()
        if problem is None or (isinstance(problem, EngineError) and problem.fault == "invalid"):
            self._outcomes[key] = None if problem is None else problem.message
            if len(self._outcomes) > self._remembered:
                self._outcomes.popitem(last=False)
