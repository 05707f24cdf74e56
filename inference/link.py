"""The token link: one multiplexed TCP connection between a session actor and an engine replica.

`serve_link` offers an engine to other processes, `LinkEngine` makes such a remote engine look like a local one. The
frames are in `inference.linkframes`. Frames written in one turn of the event loop leave in one write.

- *Cancellation*: closing a generation's iterator, or cancelling the task that reads it, sends CANCEL at once; the
  server then cancels its task, which closes the engine's iterator.
- *Prompts*: a server remembers, for each connection, the prompts it got and what was sampled after them. What a
  generation has in common with one of those (`Generation.known`) isn't sent again. A server that doesn't have it, or
  has something else, says so and gets the whole prompt: one more round trip, which the caller doesn't see.
- *Back-pressure*: a server whose socket is full stops taking chunks from the engine. A client never stops reading:
  what a slow consumer left over from an earlier read is merged into one chunk, so a stream holds no more than the ids
  of its own `max_tokens`.
- *Loss*: when the connection goes, every stream and question of it ends with `EngineError("unavailable", …)`, and
  the server aborts all generations it ran for it. A peer that sends nothing at all is asked with PING and given up
  after `Timing.dead_after_s`.

The secret and the prompts travel in the clear: the link belongs on a private network.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import replace

from inference import linkframes as frames
from inference.engine import Chunk, EngineError, Generation, Guide, Load
from inference.linkframes import Kind, LinkProtocolError, Question
from inference.linkserver import LinkServer, serve_link
from inference.linkwire import Failure, Timing, Wire, settle

__all__ = ["LinkEngine", "LinkServer", "Timing", "serve_link"]

log = logging.getLogger(__name__)

_CLOSED: Failure = ("unavailable", "The engine link is closed.")


class _Stream:
    """A generation as the client sees it: chunks that wait for the consumer, and how it failed, if it did. `whole` is
    the request, kept while the server may still ask for all of its prompt."""

    __slots__ = ("chunks", "failure", "turn", "waiter", "whole")

    def __init__(self, whole: Generation | None) -> None:
        self.whole = whole
        self.chunks: deque[Chunk] = deque()
        self.turn = 0
        self.failure: Failure | None = None
        self.waiter: asyncio.Future[None] | None = None

    def put(self, chunk: Chunk, turn: int) -> None:
        """Adds a chunk that came with read number `turn`; merges it if the consumer has left some of an earlier
        read."""
        if self.chunks and self.turn != turn:
            frames.merge(self.chunks[-1], chunk)
        else:
            self.chunks.append(chunk)
            self.turn = turn
        self.wake()

    def fail(self, failure: Failure) -> None:
        """Nothing more comes after what is there."""
        self.failure = failure
        self.wake()

    def wake(self) -> None:
        if self.waiter is not None and not self.waiter.done():
            self.waiter.set_result(None)
        self.waiter = None


class _ClientWire(Wire):
    """The connection to an engine."""

    def __init__(self, timing: Timing, token: str) -> None:
        super().__init__(timing, frames.MAX_FRAME_BYTES)
        self._token = token
        self._last_number = 0
        self._streams: dict[int, _Stream] = {}
        self._questions: dict[int, asyncio.Future[Load | Failure]] = {}
        self.welcome: asyncio.Future[str | None] = self._loop.create_future()  # None, or why not
        self.usable = False
        self.prompt_bytes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.send(frames.encode_hello(self._token))

    def _lost(self) -> None:
        self.usable = False
        failure: Failure = ("unavailable", self._lost_message())
        for stream in self._streams.values():
            stream.fail(failure)
        self._streams.clear()
        for question in self._questions.values():
            if not question.done():
                question.set_result(failure)
        self._settle_welcome(self.reason)

    def _settle_welcome(self, refusal: str | None) -> None:
        if not self.welcome.done():
            self.usable = refusal is None
            self.welcome.set_result(refusal)

    def _frame(self, kind: int, number: int, body: bytes) -> None:
        if kind == Kind.CHUNK:
            # of an unknown stream: it was cancelled while this was on its way
            if (stream := self._streams.get(number)) is not None:
                chunk = frames.decode_chunk(body)
                if chunk.finish is not None:
                    del self._streams[number]
                stream.whole = None
                stream.put(chunk, self.turn)
        elif kind == Kind.UNKNOWN:
            self._send_whole(number)
        elif kind == Kind.ERROR:
            failure = frames.decode_error(body)
            if (stream := self._streams.pop(number, None)) is not None:
                stream.fail(failure)
            elif (question := self._questions.get(number)) is not None and not question.done():
                question.set_result(failure)
        elif kind == Kind.ANSWER:
            if (question := self._questions.get(number)) is not None and not question.done():
                question.set_result(frames.decode_answer(body))
        elif kind == Kind.WELCOME:
            self._settle_welcome(None)
        elif kind == Kind.REFUSE:
            self._settle_welcome(body[:200].decode(errors="replace"))
        else:
            super()._frame(kind, number, body)

    def _number(self) -> int:
        while True:
            self._last_number = self._last_number % 0xFFFF_FFFF + 1
            if self._last_number not in self._streams and self._last_number not in self._questions:
                return self._last_number

    def _check(self) -> None:
        # It may have been lost between the end of the dial and now.
        if not self.usable:
            raise EngineError("unavailable", self._lost_message())

    def _lost_message(self) -> str:
        return f"The connection to the engine was lost ({self.reason})."

    def open(self, generation: Generation) -> tuple[int, _Stream]:
        """Starts a generation. Raises `EngineError("invalid", …)` for one too large for a frame."""
        self._check()
        number = self._number()
        base, rest = frames.split_known(generation)
        self.send(frames.encode_open(number, generation, base, rest))
        self.prompt_bytes += sum(map(len, rest))
        stream = self._streams[number] = _Stream(None if base is None else generation)
        return number, stream

    def _send_whole(self, number: int) -> None:
        """The server lacks what a prompt begins with."""
        if (stream := self._streams.get(number)) is None:
            return  # it was cancelled meanwhile
        if stream.whole is None:
            raise LinkProtocolError("a prompt that was sent whole is unknown")
        generation, stream.whole = replace(stream.whole, known=None), None
        try:
            self.send(frames.encode_open(number, generation))
        except EngineError as problem:  # too large for a frame
            del self._streams[number]
            stream.fail((problem.fault, problem.message))
        else:
            self.prompt_bytes += 4 * generation.prompt_tokens

    def release(self, number: int) -> None:
        """The consumer is gone: if the generation still runs, it must stop now."""
        if self._streams.pop(number, None) is not None:
            self.send(frames.encode(Kind.CANCEL, number))
            self.flush()

    async def ask(self, question: int, guide: Guide | None = None) -> Load:
        """Raises `EngineError`: the engine's own, or `unavailable` after `Timing.ask_s`, with a guide `check_s`."""
        self._check()
        number = self._number()
        frame = frames.encode_ask(number, question, guide)
        answer = self._questions[number] = self._loop.create_future()
        self.send(frame)
        patience = self._timing.ask_s if guide is None else self._timing.check_s
        try:
            async with asyncio.timeout(patience):
                outcome = await answer
        except TimeoutError:
            raise EngineError("unavailable", f"The engine did not answer in {patience:g} s.") from None
        finally:
            del self._questions[number]
        if isinstance(outcome, Load):
            return outcome
        raise EngineError(*outcome)


class LinkEngine:
    """A remote engine. Connects when first needed, and again when needed after a loss. A dial that fails says so at
    once instead of waiting for better times, since another replica may do; until the pause after it is over
    (`Timing.retry_first_s`, doubling), further calls fail without a dial.

    `address` is host and port of a `LinkServer`, `token` its secret. Belongs to one event loop.
    """

    def __init__(self, address: tuple[str, int], token: str, timing: Timing | None = None) -> None:
        self.address = address
        self._token = token
        self._timing = timing or Timing()
        self._wire: _ClientWire | None = None
        self._earlier_bytes = 0  # of prompts, on connections before this one
        self._dialling: asyncio.Task[None] | None = None
        self._outcome: asyncio.Future[_ClientWire | Failure] | None = None  # of the dial that is under way
        self._failures = 0
        self._retry_at = 0.0
        self._last_failure = ""
        self._closed = False

    @property
    def prompt_bytes_sent(self) -> int:
        """Bytes of prompts that went to the engine so far, those that had to be sent again included."""
        return self._earlier_bytes + (0 if self._wire is None else self._wire.prompt_bytes)

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """See `Engine.generate`. Raises `EngineError`; `unavailable` when the engine can't be reached or is lost.
        There is no deadline for the next chunk, as an engine may queue a request; a dead peer is found by pings."""
        wire = await self._connected()
        number, stream = wire.open(generation)
        chunks = stream.chunks
        try:
            if wire.paused:
                await wire.drain()
            while True:
                while chunks:
                    chunk = chunks.popleft()
                    finish = chunk.finish
                    yield chunk
                    if finish is not None:
                        return
                if stream.failure is not None:
                    raise EngineError(*stream.failure)
                stream.waiter = asyncio.get_running_loop().create_future()
                await stream.waiter
        finally:
            wire.release(number)

    async def check(self, guide: Guide) -> None:
        """See `Engine.check`. Within `connect_s` + `check_s`."""
        await (await self._connected()).ask(Question.CHECK, guide)

    async def load(self) -> Load:
        """The remote engine's load. Raises `EngineError`, within `connect_s` + `ask_s`."""
        return await (await self._connected()).ask(Question.LOAD)

    async def check_health(self) -> None:
        """Raises `EngineError` when the engine is ill or can't be reached, within `connect_s` + `ask_s`."""
        await (await self._connected()).ask(Question.HEALTH)

    async def close(self) -> None:
        """Ends the connection; generations that run on it get `unavailable`. The remote engine goes on. Idempotent."""
        self._closed = True
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(_CLOSED)
        if self._dialling is not None:
            self._dialling.cancel()
            await asyncio.wait([self._dialling])
        if self._wire is not None:
            wire, self._wire = self._wire, None
            self._earlier_bytes += wire.prompt_bytes
            wire.reason = "closed"
            wire.end()
            await settle([wire], self._timing.close_s)

    async def _connected(self) -> _ClientWire:
        if self._closed:
            raise EngineError(*_CLOSED)
        if self._wire is not None and self._wire.usable:
            return self._wire
        if self._outcome is None:
            loop = asyncio.get_running_loop()
            if loop.time() < self._retry_at:
                raise EngineError("unavailable", self._last_failure)
            self._outcome = loop.create_future()
            self._dialling = loop.create_task(self._dial(self._outcome))
        # One dial serves all that wait for it: one of them giving up must not end it.
        outcome = await asyncio.shield(self._outcome)
        if isinstance(outcome, _ClientWire):
            return outcome
        raise EngineError(*outcome)

    async def _dial(self, outcome: asyncio.Future[_ClientWire | Failure]) -> None:
        wire: _ClientWire | None = None
        try:
            async with asyncio.timeout(self._timing.connect_s):
                _, wire = await asyncio.get_running_loop().create_connection(
                    lambda: _ClientWire(self._timing, self._token), *self.address
                )
                refusal = await wire.welcome
        except TimeoutError:
            refusal = f"no answer in {self._timing.connect_s:g} s"
        except (OSError, ValueError, OverflowError) as problem:
            refusal = type(problem).__name__
        except asyncio.CancelledError:  # by `close`, which has set the outcome
            if wire is not None:
                wire.abort("closed")
            raise
        self._outcome = None
        if wire is not None and refusal is None:
            self._earlier_bytes = self.prompt_bytes_sent
            self._failures, self._wire = 0, wire
            outcome.set_result(wire)
        else:
            if wire is not None:
                wire.abort("refused")
            outcome.set_result(self._dial_failed(str(refusal)))

    def _dial_failed(self, why: str) -> Failure:
        pause = min(self._timing.retry_most_s, self._timing.retry_first_s * 2 ** min(self._failures, 16))
        self._failures += 1
        self._retry_at = asyncio.get_running_loop().time() + pause * random.uniform(0.5, 1.0)  # noqa: S311  jitter
        host, port = self.address
        self._last_failure = f"The engine at {host}:{port} could not be reached ({why})."
        log.warning("token link: no connection to %s:%d: %s", host, port, why)
        return ("unavailable", self._last_failure)
