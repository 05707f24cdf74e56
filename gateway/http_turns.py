"""Turns over HTTP: as server-sent events (protocol.md 6.2), or as one response object at the end.

A turn runs in a task of its own, next to one that waits for the client to leave; whichever ends first ends the other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from actors.turn import Turn
from gateway.http_answers import request_id
from gateway.protocol.decode import encode
from gateway.protocol.emitter import Event
from gateway.protocol.errors import ApiError
from gateway.settings import LimitSettings
from gateway.timer import Every

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
COMMENT = b": ping\n\n"

Body = Callable[[bytes], Awaitable[None]]
Result = TypeVar("Result")


@dataclass(slots=True, eq=False)
class HttpTurns:
    """What requests of one replica are waiting for: tasks of any kind, and the turns among them."""

    tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    running: set[Turn] = field(default_factory=set)


def frame(event: Event) -> bytes:
    """One event as SSE; its JSON never holds a line break."""
    return f"event: {event.type}\ndata: {event.data}\n\n".encode()


def error_frame(error: ApiError, number: int) -> bytes:
    """What stops a stream that has begun, in both published forms at once (protocol.md 5.1), with the number of the
    event that should have come."""
    flat = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": number}
    return frame(Event("error", encode({"type": "error", **flat, **error.frame()})))


async def whole_response(turn: Turn, receive: Receive, turns: HttpTurns, limits: LimitSettings) -> dict[str, Any]:
    """The response object of a turn's terminal event. Raises `ApiError` for a turn that did not start, and
    `ClientDisconnect` when nobody waits for it any more."""

    async def last() -> dict[str, Any]:
        event = None
        async with aclosing(_batches(turn, turn.run(), turns, limits)) as batches:
            async for events in batches:
                event = events[-1]
        if event is None:
            raise ApiError("server_error", "The turn produced nothing; try again.")
        response: dict[str, Any] = orjson.loads(event.data)["response"]
        return response

    return await while_connected(last(), receive, turns)


class EventStream(Response):
    """Events as an SSE answer, from batches of them; `number` is the sequence number of the first one."""

    def __init__(
        self,
        batches: AsyncGenerator[list[Event], None],
        first: list[Event],
        turns: HttpTurns,
        limits: LimitSettings,
        *,
        number: int = 0,
    ) -> None:
        super().__init__(
            headers={
                "x-request-id": request_id(),
                "cache-control": "no-cache, no-store",
                "x-accel-buffering": "no",  # nginx holds a stream back otherwise
                "content-type": "text/event-stream",
            }
        )
        del self.headers["content-length"]
        self._first = first
        self._number = number
        self._rest = batches
        self._turns = turns
        self._limits = limits

    @classmethod
    async def of_turn(cls, turn: Turn, turns: HttpTurns, limits: LimitSettings) -> Self:
        """Run the turn up to `response.in_progress`, so that a refusal before it is still an ordinary HTTP error.
        Raises `ApiError`."""
        batches = turn.run()
        first = await anext(batches)
        return cls(_batches(turn, batches, turns, limits), first, turns, limits)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - Starlette names it
        """Send all of it, or stop when the client is gone."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            await while_connected(self._write(send), receive, self._turns)
        except ClientDisconnect:
            pass
        finally:
            await self._rest.aclose()

    async def _write(self, send: Send) -> None:
        silence = _Silence(send, self._limits)
        try:
            if self._first:
                await self._send_events(self._first, silence.send)
            async with aclosing(self._rest) as batches:
                async for events in batches:
                    await self._send_events(events, silence.send)
        except ApiError as error:
            await silence.send(error_frame(error, self._number))
        finally:
            silence.stop()
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _send_events(self, events: Sequence[Event], body: Body) -> None:
        self._number += len(events)
        await body(b"".join(frame(event) for event in events))


class _Silence:
    """Sends for one stream, and looks after it: a comment whenever nothing else was sent for a while, and an end when
    the client reads nothing for `send_timeout_s`. Belongs to the task that writes."""

    def __init__(self, send: Send, limits: LimitSettings) -> None:
        self._send = send
        self._limits = limits
        self._writer = asyncio.current_task()
        self._loop = asyncio.get_running_loop()
        self._last = self._loop.time()
        self._sending = False
        self._comment: asyncio.Task[None] | None = None
        self._timer = Every(min(limits.sse_comment_s, limits.send_timeout_s) / 2, self._look)

    async def send(self, data: bytes) -> None:
        """A piece of the body."""
        if self._comment is not None:
            await asyncio.wait((self._comment,))
        self._last, self._sending = self._loop.time(), True
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})
        finally:
            self._sending = False
        self._last = self._loop.time()

    def stop(self) -> None:
        """No more comments."""
        self._timer.stop()
        if self._comment is not None:
            self._comment.cancel()

    def _look(self) -> None:
        silent = self._loop.time() - self._last
        stuck = self._sending or (self._comment is not None and not self._comment.done())
        if stuck and silent >= self._limits.send_timeout_s and self._writer is not None:
            self._writer.cancel()
        elif not stuck and silent >= self._limits.sse_comment_s:
            self._last = self._loop.time()
            self._comment = asyncio.create_task(self._say(), name="sse-comment")

    async def _say(self) -> None:
        await self._send({"type": "http.response.body", "body": COMMENT, "more_body": True})
        self._comment = None


async def _batches(
    turn: Turn, source: AsyncGenerator[list[Event], None], turns: HttpTurns, limits: LimitSettings
) -> AsyncGenerator[list[Event], None]:
    """A turn's events up to its terminal one. When the gateway itself fails that is `response.failed`; a turn that had
    not started raises instead. The deadline is the turn's own to keep: a timeout here would fall into the sending."""
    turns.running.add(turn)
    limit = turn.expire_after(limits.turn_deadline_s)
    try:
        async with aclosing(source) as batches:
            async for events in batches:
                yield events
    except ApiError:
        raise
    except Exception:
        events = turn.abandon("The gateway failed on this request; try again.")
        if not events:
            raise
        log.exception("a turn failed in the gateway itself")
        yield events
    finally:
        limit.cancel()
        turns.running.discard(turn)


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive, turns: HttpTurns) -> Result:
    """The work's result. Raises `ClientDisconnect`, and cancels the work, when the client leaves first."""
    task = asyncio.create_task(work, name="http-turn")
    watcher = asyncio.create_task(_disconnected(receive), name="http-disconnect")
    turns.tasks.add(task)
    task.add_done_callback(turns.tasks.discard)
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done() or task.cancelled():
            raise ClientDisconnect
        return task.result()
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
