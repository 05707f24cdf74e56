"""A repeating timer without a task: idle sockets and silent turns cost a heap entry, not a coroutine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Every:
    """Calls `action` every `seconds` on the running loop until `stop`. An exception in `action` ends it."""

    __slots__ = ("_action", "_handle", "_loop", "_seconds")

    def __init__(self, seconds: float, action: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._action = action
        self._handle = self._loop.call_later(seconds, self._fire)

    def stop(self) -> None:
        """No more calls. Idempotent."""
        self._handle.cancel()

    def _fire(self) -> None:
        self._action()
        self._handle = self._loop.call_later(self._seconds, self._fire)
