"""A deadline for each of many waits, with one timer for all of them.

`asyncio.timeout` around every read of a stream costs 12 us a token, most of it for a timer that never fires.
"""

from __future__ import annotations

import asyncio


class Silence:
    """Ends waits that take too long. Each is bracketed by `begin` and `end`; time between them does not count.

    When one is overdue the waiting task is cancelled and `broke` tells so: the caller catches `CancelledError` and asks
    it, as the task may have been cancelled by others, too. Call `close` in the end.
    """

    __slots__ = ("_cancels", "_due", "_handle", "_loop", "_task", "_wait_s")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[object] | None = None
        self._cancels: int | None = None  # how often the task had been cancelled before this was overdue
        self._due = 0.0
        self._wait_s = 0.0

    def begin(self, wait_s: float) -> None:
        """A wait of so many seconds at most begins, in this task. Another duration than the last costs a timer."""
        self._due = self._loop.time() + wait_s
        self._task = asyncio.current_task()
        if wait_s != self._wait_s:
            self._wait_s = wait_s
            self._arm()

    def end(self) -> None:
        """What was waited for is there."""
        self._task = None

    def broke(self) -> bool:
        """Whether a cancellation that the wait ended with was this deadline's, and nobody else's as well."""
        task, cancels = self._task, self._cancels
        self._task = self._cancels = None
        return task is not None and cancels is not None and task.uncancel() <= cancels

    def close(self) -> None:
        """No more waits."""
        self._task = None
        if self._handle is not None:
            self._handle.cancel()

    def _arm(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = self._loop.call_at(self._due, self._look)

    def _look(self) -> None:
        if self._task is None:
            self._due = self._loop.time() + self._wait_s
            self._arm()
        elif self._loop.time() < self._due:
            self._arm()
        else:
            self._cancels = self._task.cancelling()
            self._task.cancel()
