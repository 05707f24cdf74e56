"""The events of one background response, kept as they were sent, for clients that come (back) later (protocol.md 6.3).

Sequence numbers are dense from 0, so an event's number is its place. Beyond `limit` bytes the oldest events are let go
of: the answer itself is never lost, only the replay from its beginning, and that is refused in words.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from gateway.protocol.emitter import Event
from gateway.protocol.errors import ApiError


class EventLog:
    """Grows while its response runs; readers wait for more. Owned by one event loop."""

    __slots__ = ("_events", "_first", "_limit", "_waiting", "ended", "size")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._events: list[Event] = []
        self._first = 0
        self._waiting: set[asyncio.Future[None]] = set()
        self.ended = False
        self.size = 0

    def append(self, events: Sequence[Event]) -> None:
        """The next events, in order."""
        self._events += events
        self.size += sum(len(event.data) for event in events)
        if self.size > self._limit:
            self._shorten(self._limit - self._limit // 4)
        self._wake()

    def end(self) -> None:
        """No more will come. Idempotent."""
        self.ended = True
        self._wake()

    def clear(self) -> None:
        """Let go of every event."""
        self._shorten(0)

    def since(self, after: int, most: int) -> tuple[list[Event], bool]:
        """Up to `most` events after this sequence number, and whether those are the last ever. Raises `ApiError` when
        the first of them is no longer kept."""
        start = after + 1 - self._first
        if start < 0:
            raise ApiError(
                "invalid_value",
                f"The events up to {self._first - 1} of this response are no longer kept. Read on from there, or get "
                "the whole response without 'stream'.",
                "starting_after",
            )
        found = self._events[start : start + most]
        return found, self.ended and start + len(found) >= len(self._events)

    async def more(self, after: int, seconds: float) -> None:
        """Wait until there is an event after this one, or the end, or no more time."""
        if self.ended or after + 1 < self._first + len(self._events):
            return
        waiter = asyncio.get_running_loop().create_future()
        self._waiting.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=seconds)
        finally:
            self._waiting.discard(waiter)

    def _shorten(self, wanted: int) -> None:
        count = 0
        while self.size > wanted:
            self.size -= len(self._events[count].data)
            count += 1
        del self._events[:count]
        self._first += count

    def _wake(self) -> None:
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)
