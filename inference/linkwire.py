"""What both ends of the token link share: frames out of reads, writes collected, back-pressure, pings."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from inference import linkframes as frames
from inference.engine import EngineFault
from inference.linkframes import FrameSplitter, Kind, LinkProtocolError

log = logging.getLogger(__name__)

_WRITE_HIGH_WATER = 256 * 1024
_FLUSH_BYTES = 64 * 1024  # more than this isn't kept for the end of the loop's turn

Failure = tuple[EngineFault, str]


@dataclass(frozen=True, slots=True)
class Timing:
    """Deadlines, in seconds. `connect_s`: for dialling and the hello together. `ask_s`: for an answer about load or
    health. `check_s`: for one about a guide, which may have to be compiled. After a failed dial further ones are
    refused for `retry_first_s`, doubled up to `retry_most_s`."""

    connect_s: float = 5.0
    ask_s: float = 5.0
    check_s: float = 30.0
    close_s: float = 2.0
    ping_every_s: float = 3.0
    pings_unanswered: int = 3
    retry_first_s: float = 0.05
    retry_most_s: float = 2.0

    @property
    def dead_after_s(self) -> float:
        """The longest silence of a peer before it is given up."""
        return self.ping_every_s * (self.pings_unanswered + 2)


class Wire(asyncio.Protocol):
    """What both ends share: cutting into frames, collecting writes, back-pressure, pings."""

    def __init__(self, timing: Timing, limit: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._timing = timing
        self._splitter = FrameSplitter(limit)
        self._transport: asyncio.Transport | None = None
        self._out: list[bytes] = []
        self._out_bytes = 0
        self._ticker: asyncio.TimerHandle | None = None
        self._silent_ticks = 0
        self._may_write = asyncio.Event()
        self._may_write.set()
        self.paused = False
        self.turn = 0  # counts reads
        self.ended = self._loop.create_future()
        self.reason = "the connection was lost"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.set_write_buffer_limits(high=_WRITE_HIGH_WATER)
        self._ticker = self._loop.call_later(self._timing.ping_every_s, self._tick)

    def data_received(self, data: bytes) -> None:
        self._silent_ticks = 0
        self.turn += 1
        try:
            for kind, number, body in self._splitter.feed(data):
                self._frame(kind, number, body)
        except LinkProtocolError as problem:
            log.warning("token link: %s", problem)
            self.abort(str(problem))

    def connection_lost(self, exc: Exception | None) -> None:
        del exc  # says no more than that it's lost
        self._transport = None
        self._out.clear()
        self._out_bytes = 0
        if self._ticker is not None:
            self._ticker.cancel()
        self._may_write.set()
        self._lost()
        if not self.ended.done():
            self.ended.set_result(None)

    def pause_writing(self) -> None:
        self.paused = True
        self._may_write.clear()

    def resume_writing(self) -> None:
        self.paused = False
        self._may_write.set()

    def send(self, frame: bytes) -> None:
        """Queues a frame for the end of this turn of the loop. Does nothing once the connection is lost."""
        if self._transport is None:
            return
        if len(frame) > _FLUSH_BYTES:  # written by itself, so that it isn't copied into one piece with others
            self.flush()
            self._transport.write(frame)
            return
        if not self._out:
            self._loop.call_soon(self.flush)
        self._out.append(frame)
        self._out_bytes += len(frame)
        if self._out_bytes > _FLUSH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes what was queued."""
        if self._out and self._transport is not None:
            self._transport.write(self._out[0] if len(self._out) == 1 else b"".join(self._out))
            self._out.clear()
            self._out_bytes = 0

    async def drain(self) -> None:
        """Waits while the peer doesn't take what was written; bounded by the pings. Ends when the connection does."""
        await self._may_write.wait()

    def abort(self, reason: str) -> None:
        """Cuts the connection without waiting for anything."""
        self.reason = reason
        if self._transport is not None:
            self._transport.abort()

    def end(self) -> None:
        """Closes the connection after what was written."""
        self.flush()
        if self._transport is not None:
            self._transport.close()

    def _tick(self) -> None:
        # Ticks are counted, not seconds: after a stall of our own loop there is one late tick, and then the answers
        # that waited in the socket are read before the next one.
        if self._silent_ticks > self._timing.pings_unanswered:
            log.warning("token link: the peer has been silent for %.0f s", self._timing.dead_after_s)
            self.abort("the peer stopped answering")
            return
        if self._silent_ticks:
            self.send(frames.encode(Kind.PING))
        self._silent_ticks += 1
        self._ticker = self._loop.call_later(self._timing.ping_every_s, self._tick)

    def _frame(self, kind: int, number: int, body: bytes) -> None:
        """One frame that only this end understands, or PING and PONG. Raises `LinkProtocolError`."""
        del number, body
        if kind == Kind.PING:
            self.send(frames.encode(Kind.PONG))
        elif kind != Kind.PONG:
            raise LinkProtocolError(f"an unexpected frame of kind {kind}")

    def _lost(self) -> None:
        """The connection is gone."""
        raise NotImplementedError


async def settle(wires: Sequence[Wire], deadline_s: float) -> None:
    """Waits until closed connections are gone, and cuts those that take longer than the deadline."""
    if not wires:
        return
    _, late = await asyncio.wait([wire.ended for wire in wires], timeout=deadline_s)
    if late:
        for wire in wires:
            wire.abort("closing took too long")
        await asyncio.wait(late, timeout=deadline_s)
