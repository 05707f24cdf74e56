"""Ending a generation early, from outside of the task that reads it (protocol.md 3.8: interrupt, steer).

The task may be waiting for the model, which may be silent for long, or for a client that reads slowly. In both cases
the engine must stop now, and what was already handed to the client must not be lost:

    where       the reading task is                    what `halt` does
    BEFORE      ahead of its first chunk               nothing: the engine will not be asked
    WAITING     waiting for a chunk                    cancels the wait, as a timeout would
    SENDING     suspended while events are sent        closes the engine's stream beside it
    AFTER       past its last chunk                    nothing: the task looks at `reason` before it ends

This costs a running generation two assignments a chunk: no task, no queue.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from enum import Enum
from types import TracebackType
from typing import Self

from inference.engine import Chunk, EngineError

OVERDUE = "The turn took longer than this gateway allows."
"""What a client is told of a turn past its deadline, on every transport."""

Chunks = AsyncGenerator[Chunk, None]


class Where(Enum):
    """Where the reading task is."""

    BEFORE = "before"
    WAITING = "waiting"
    SENDING = "sending"
    AFTER = "after"


class Halt:
    """Of one response. `reason` is why it was halted, None while it was not; the last one given counts.

    The reading task enters it around its loop over the chunks, sets `where` to SENDING before each yield and to WAITING
    after it, and leaves the loop when `reason` is set. Leaving closes the stream. What the halt itself brought about, a
    cancellation or a broken stream, ends there; somebody else's cancellation goes on.
    """

    __slots__ = ("_base", "_cancelled", "_chunks", "_closing", "_task", "reason", "where")

    def __init__(self) -> None:
        self.reason: str | None = None
        self.where = Where.BEFORE
        self._chunks: Chunks | None = None
        self._closing: asyncio.Future[None] | None = None
        self._task: asyncio.Task[object] | None = None
        self._base = 0
        self._cancelled = False

    def halt(self, reason: str) -> None:
        """Stop the engine. For other tasks than the reading one; never waits."""
        first, self.reason = self.reason is None, reason
        if not first:
            return
        if self.where is Where.WAITING and self._task is not None:
            self._cancelled = True
            self._task.cancel()
        elif self.where is Where.SENDING and self._chunks is not None:
            self._closing = asyncio.ensure_future(_close(self._chunks))

    def reading(self, chunks: Chunks) -> Self:
        """The context in which the current task reads these."""
        self._chunks = chunks
        return self

    async def __aenter__(self) -> None:
        assert self._chunks is not None
        self._task = asyncio.current_task()
        self._base = 0 if self._task is None else self._task.cancelling()
        if self.reason is not None:
            await self._chunks.aclose()  # it never started
        self.where = Where.WAITING

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        assert self._chunks is not None
        self.where = Where.AFTER
        await (self._chunks.aclose() if self._closing is None else self._closing)
        cancelled, self._cancelled = self._cancelled, False
        if cancelled and self._task is not None and self._task.uncancel() > self._base:
            raise asyncio.CancelledError
        ours = (asyncio.CancelledError, EngineError) if cancelled else EngineError
        return self.reason is not None and isinstance(error, ours)


async def _close(chunks: Chunks) -> None:
    with suppress(EngineError):
        await chunks.aclose()
