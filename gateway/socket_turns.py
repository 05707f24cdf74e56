"""One running turn of a socket: its task, and the order in which its events go out.

Most events come from the turn's own task. Some come from elsewhere while it waits for the model or for a slow client: a
sign of life, the answers to steers and interrupts (protocol.md 3.8). Each is numbered when it is made and queued in the
same step, and one at a time sends what is queued; so the order on the wire is that of the numbers.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable

from actors.rollout import Rollout, not_waiting
from actors.turn import Turn
from gateway.protocol.actions import Append, Control, Start, Steer, Tell
from gateway.protocol.emitter import Event


class RunningTurn:
    """`turn` is None until the create was understood. Cancelling a task that has not taken its first step would skip
    its clean-up, so that waits for `enter`."""

    __slots__ = (
        "_busy",
        "_entered",
        "_flusher",
        "_free",
        "_out",
        "_send",
        "ended",
        "limit",
        "reported",
        "start",
        "stopped",
        "task",
        "turn",
    )

    def __init__(self, start: Start, send: Callable[[str], Awaitable[None]]) -> None:
        self.start = start
        self.turn: Turn | None = None
        self.task: asyncio.Task[None] | None = None
        self.limit: asyncio.TimerHandle | None = None
        self.stopped = False
        self.reported = False
        self.ended = asyncio.Event()
        self._send = send
        self._out: deque[str] = deque()
        # Whether somebody sends what is queued, and what the turn waits for meanwhile: a lock costs a microsecond
        # a token.
        self._busy = False
        self._free: asyncio.Future[None] | None = None
        self._flusher: asyncio.Task[None] | None = None
        self._entered = False

    def enter(self) -> None:
        """The task's first step."""
        self._entered = True
        if self.stopped:
            raise asyncio.CancelledError

    def stop(self) -> None:
        """End it: nothing more of it is generated."""
        self.stopped = True
        if self._flusher is not None:
            self._flusher.cancel()
        if self._entered and self.task is not None:
            self.task.cancel()

    def obey(self, action: Control) -> None:
        """Carry out what was decided about the response that runs, at once and without waiting for the client."""
        assert self.turn is not None
        if isinstance(action, Tell):
            self.tell(self.turn.control(action.kind, action.fields))
        elif isinstance(action, Steer):
            self.turn.steer()
        elif isinstance(action, Append):
            if not isinstance(self.turn, Rollout):
                self.tell(not_waiting(self.turn))
            elif (refusal := self.turn.append(action.frame)) is not None:
                self.tell(refusal)
        else:
            self.turn.interrupt()

    async def write(self, events: Iterable[Event]) -> None:
        """Send these behind what is queued, and wait for the client to take them. For the turn's task."""
        out = self._out
        for event in events:
            out.append(event.data)
        while self._busy:
            self._free = asyncio.get_running_loop().create_future()
            await self._free
        self._busy = True
        try:
            while out:
                # A frame stays queued until it is out: a cancelled `send` has written nothing.
                await self._send(out[0])
                out.popleft()
        finally:
            self._busy = False
            if self._free is not None and not self._free.done():
                self._free.set_result(None)

    def tell(self, event: Event) -> None:
        """Queue one event, from anywhere. Whoever sends takes it along; otherwise a task of its own does."""
        self._out.append(event.data)
        if not self._busy and (self._flusher is None or self._flusher.done()):
            self._flusher = asyncio.create_task(self._flush(), name="turn-events")

    async def finish(self) -> None:
        """All that is queued is out, or nobody can take it any more."""
        if self._flusher is not None:
            await asyncio.gather(self._flusher, return_exceptions=True)
        await self.write(())

    async def _flush(self) -> None:
        if not self._busy:
            await self.write(())
