"""Room for what turns leave behind, taken before they start: backpressure instead of loss (design.md section 1).

A turn that has begun will end, and what it leaves must be kept. So the time to say no is before it begins, and how much
it may leave is reserved while it runs.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from gateway.protocol.errors import ApiError

RETRY_AFTER_S = 5
"""Advice to a turn that found no room."""
OVERLOADED = "rate_limit_exceeded"
"""The code of that refusal. Not `server_is_overloaded`, which is fatal to Codex (protocol.md 5.3)."""


class Room:
    """A turn's right to leave this many jobs. Leave its `with` block, or `close` it, when the turn is over: what was
    not used is then free for others."""

    __slots__ = ("_free", "_reserved")

    def __init__(self, free: Callable[[int], None], reserved: int) -> None:
        self._free = free
        self._reserved = reserved

    def use(self) -> None:
        """One job was left: it is counted where it waits now, no longer here."""
        if self._reserved:
            self._reserved -= 1
            self._free(1)

    def close(self) -> None:
        """Nothing more will be left. Idempotent."""
        reserved, self._reserved = self._reserved, 0
        self._free(reserved)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Rooms:
    """All rooms of one queue. `fits` says whether so many jobs more can be held, reserved ones included; whoever makes
    it come true calls `admit`. Turns get room in the order of asking."""

    def __init__(self, fits: Callable[[int], bool]) -> None:
        self._fits = fits
        self._turns: deque[tuple[asyncio.Future[None], int]] = deque()
        self._closed = False
        self.reserved = 0
        self.waits = 0
        self.refusals = 0

    @property
    def waiting(self) -> int:
        """Turns that wait for room."""
        return len(self._turns)

    async def take(self, jobs: int, deadline_s: float) -> Room:
        """Wait for room, at most `deadline_s`. Raises `ApiError` with advice when to try again."""
        if self._closed:
            raise _stopping()
        if self._turns or not self._fits(jobs):
            self.waits += 1
            await self._wait(jobs, deadline_s)
        else:
            self.reserved += jobs
        return Room(self._give_back, jobs)

    def admit(self) -> None:
        """Let in whoever fits now."""
        while self._turns and self._fits(self._turns[0][1]):
            future, jobs = self._turns.popleft()
            if not future.done():
                self.reserved += jobs
                future.set_result(None)

    def close(self) -> None:
        """Refuse all turns from now on, and those that wait. Rooms that were taken stay. Idempotent."""
        self._closed = True
        while self._turns:
            future, _ = self._turns.popleft()
            if not future.done():
                future.set_exception(_stopping())

    def _give_back(self, jobs: int) -> None:
        self.reserved -= jobs
        self.admit()

    async def _wait(self, jobs: int, deadline_s: float) -> None:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        place = future, jobs
        self._turns.append(place)
        try:
            async with asyncio.timeout(deadline_s):
                await future
        except BaseException as error:
            if place in self._turns:
                self._turns.remove(place)
                self.admit()  # those behind may be content with less
            elif not future.cancelled() and future.exception() is None:
                self._give_back(jobs)  # it came in the moment the wait ended
            if not isinstance(error, TimeoutError):
                raise
            self.refusals += 1
            message = "This gateway can't write what turns leave behind fast enough; try again shortly."
            raise ApiError(OVERLOADED, message, retry_after_s=RETRY_AFTER_S) from None


def _stopping() -> ApiError:
    return ApiError("server_is_overloaded", "This replica is shutting down; connect again.", retry_after_s=1)
