"""The engine's end of the token link."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import traceback
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any

from inference import linkframes as frames
from inference.engine import Chunk, Engine, EngineError, Generation, Guide, Load
from inference.linkchecks import GuideChecks
from inference.linkframes import Kind, LinkProtocolError, Question
from inference.linkmemory import MEMORY_BYTES, PromptMemory, Remembered
from inference.linkwire import Timing, Wire, settle

log = logging.getLogger(__name__)

MAX_STREAMS = 4096
"""Generations that one connection may have open."""
_CHUNKS_PER_TURN = 32  # an engine that never waits must not keep the loop from reading a CANCEL


class _ServerWire(Wire):
    """A client of ours. Owns the tasks that run its generations."""

    def __init__(self, server: LinkServer) -> None:
        super().__init__(server.timing, frames.MAX_HELLO_BYTES)
        self._server = server
        self._name = server.name_connection()
        self._greeted = False
        self._refused = False
        self._deadline: asyncio.TimerHandle | None = None
        self.streams: dict[int, asyncio.Task[None]] = {}
        self.questions: set[asyncio.Task[None]] = set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        if self._server.closing:  # it was accepted while the listener closed
            self.abort("the engine is shutting down")
            return
        self._server.wires.add(self)
        self._deadline = self._loop.call_later(self._timing.connect_s, self.abort, "no hello came")

    def _lost(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        for task in (*self.streams.values(), *self.questions):
            task.cancel()
        self._server.memory.forget(self._name)
        self._server.wires.discard(self)

    def _frame(self, kind: int, number: int, body: bytes) -> None:
        if self._refused:
            return  # what it sent before it read the refusal
        if not self._greeted:
            self._greet(kind, body)
        elif kind == Kind.OPEN:
            self._open(number, body)
        elif kind == Kind.CANCEL:
            if (task := self.streams.get(number)) is not None:
                task.cancel()
        elif kind == Kind.ASK:
            task = self._server.start(self._answer(number, *frames.decode_ask(body)))
            self.questions.add(task)
            task.add_done_callback(self.questions.discard)
        else:
            super()._frame(kind, number, body)

    def _greet(self, kind: int, body: bytes) -> None:
        if kind != Kind.HELLO:
            raise LinkProtocolError("the peer's first frame is no hello of a token link")
        version, secret = frames.decode_hello(body)
        refusal = None
        if version != frames.VERSION:
            refusal = f"this engine speaks version {frames.VERSION} of the token link, not {version}"
        elif not self._server.is_secret(secret):
            refusal = "wrong token"
        if refusal is not None:
            log.warning("token link: refused a client: %s", refusal)
            self.send(frames.encode(Kind.REFUSE, 0, refusal.encode()))
            self._refused = True
            self.end()
            return
        assert self._deadline is not None
        self._deadline.cancel()
        self._greeted = True
        self._splitter.limit = frames.MAX_FRAME_BYTES
        self.send(frames.encode_welcome())

    def _open(self, number: int, body: bytes) -> None:
        if number in self.streams:
            raise LinkProtocolError("a stream number that is in use")
        generation, base = frames.decode_open(body)
        memory = self._server.memory
        if self._server.closing:
            self.send(frames.encode_error(number, "unavailable", "The engine is shutting down."))
        elif len(self.streams) >= MAX_STREAMS:
            self.send(frames.encode_error(number, "overloaded", "Too many generations on one engine link."))
        else:
            checksum = None
            if base is not None:
                completed = memory.complete(self._name, base, generation.prompt)
                if completed is None:
                    self.send(frames.encode(Kind.UNKNOWN, number))
                    return
                prompt, checksum = completed
                generation = replace(generation, parts=(prompt,))
            entry = memory.remember(self._name, generation.request_id, generation.prompt, checksum)
            task = self._server.start(self._pump(number, generation, entry))
            self.streams[number] = task
            task.add_done_callback(lambda _: self.streams.pop(number, None))

    async def _pump(self, number: int, generation: Generation, entry: Remembered) -> None:
        """Carries one generation from the engine to the client."""
        stream = self._server.engine.generate(generation)
        memory = self._server.memory
        finished, count = False, 0
        try:
            async for chunk in stream:
                self.send(frames.encode_chunk(number, chunk))
                memory.extend(entry, chunk.ids)
                finished = chunk.finish is not None
                count += 1
                if self.paused:
                    await self.drain()
                elif not count % _CHUNKS_PER_TURN:
                    await asyncio.sleep(0)
            if not finished:
                self.send(frames.encode_error(number, "unavailable", "The engine stopped in the middle."))
        except EngineError as problem:
            self.send(frames.encode_error(number, problem.fault, problem.message))
        except Exception as problem:  # noqa: BLE001  the client must hear of it, whatever it is
            log.warning("token link: the engine failed: %s", _describe(problem))
            self.send(frames.encode_error(number, "unavailable", "The engine failed."))
        finally:
            await _close_iterator(stream)

    async def _answer(self, number: int, question: int, guide: Guide | None) -> None:
        load = Load(0, 0)
        try:
            async with asyncio.timeout(self._timing.ask_s if guide is None else self._timing.check_s):
                if guide is not None:
                    await self._server.checks.check(guide)
                elif question == Question.HEALTH:
                    await self._server.engine.check_health()
                else:
                    load = await self._server.engine.load()
            self.send(frames.encode_answer(number, load))
        except EngineError as problem:
            self.send(frames.encode_error(number, problem.fault, problem.message))
        except Exception as problem:  # noqa: BLE001  a question must be answered, whatever the engine does
            log.warning("token link: the engine could not answer: %s", _describe(problem))
            self.send(frames.encode_error(number, "unavailable", "The engine could not answer."))

    def stop(self) -> None:
        """Ends every generation with an error to the client, then the connection."""
        for number, task in self.streams.items():
            self.send(frames.encode_error(number, "unavailable", "The engine is shutting down."))
            task.cancel()
        self.end()


async def _close_iterator(stream: AsyncIterator[Chunk]) -> None:
    """Tells an engine that its iterator is of no more use; an engine that fails at that is only logged."""
    close = getattr(stream, "aclose", None)
    if close is not None:
        try:
            await close()
        except Exception as problem:  # noqa: BLE001  the generation is over; there is nobody to tell
            log.warning("token link: the engine failed while a generation was closed: %s", _describe(problem))


def _describe(problem: Exception) -> str:
    """Type and place. Not the message, which may hold a client's text."""
    place = traceback.extract_tb(problem.__traceback__)
    return f"{type(problem).__name__} at {place[-1].filename}:{place[-1].lineno}" if place else type(problem).__name__


class LinkServer:
    """An engine offered over the token link. Made by `serve_link`. Doesn't own the engine."""

    def __init__(self, engine: Engine, token: str, timing: Timing, memory_bytes: int) -> None:
        self.engine = engine
        self.checks = GuideChecks(engine)
        self.memory = PromptMemory(memory_bytes)
        self.timing = timing
        self.closing = False
        self.wires: set[_ServerWire] = set()
        self._secret = hashlib.sha256(token.encode()).digest()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections = 0
        self._listener: asyncio.Server | None = None
        self.address: tuple[str, int] = ("", 0)
        """Host and port as bound; with a wildcard host the caller must put the node's own address in its place."""

    @property
    def active(self) -> int:
        """Generations that are running for clients."""
        return sum(len(wire.streams) for wire in self.wires)

    def name_connection(self) -> int:
        """A number that no other connection has."""
        self._connections += 1
        return self._connections

    def is_secret(self, secret: bytes) -> bool:
        """Compares in constant time, the length included."""
        return hmac.compare_digest(hashlib.sha256(secret).digest(), self._secret)

    def start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Runs a coroutine as a task that `close` waits for."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def listen(self, host: str, port: int) -> None:
        """Raises OSError when the address can't be bound."""
        loop = asyncio.get_running_loop()
        self._listener = await loop.create_server(lambda: _ServerWire(self), host, port)
        self.address = self._listener.sockets[0].getsockname()[:2]

    async def close(self, drain_s: float = 0.0) -> None:
        """Refuses new connections and generations, gives the running ones `drain_s` seconds, then aborts them (their
        clients get `unavailable`) and waits until the engine has closed their iterators. Idempotent."""
        self.closing = True
        if self._listener is not None:
            self._listener.close()
        if self._tasks and drain_s > 0:
            await asyncio.wait(set(self._tasks), timeout=drain_s)
        self.checks.close()
        wires: list[Wire] = list(self.wires)
        for wire in list(self.wires):
            wire.stop()
        await settle(wires, self.timing.close_s)
        if self._tasks:
            _, late = await asyncio.wait(set(self._tasks), timeout=self.timing.close_s)
            if late:
                log.error("token link: %d generations did not end", len(late))


async def serve_link(
    engine: Engine,
    host: str,
    port: int = 0,
    token: str = "",
    *,
    timing: Timing | None = None,
    memory_bytes: int = MEMORY_BYTES,
) -> LinkServer:
    """Offers `engine` on a TCP address; port 0 takes a free one. `token` is the secret clients must show.
    `memory_bytes` bounds what is remembered of prompts. Raises OSError when the address can't be bound, ValueError for
    an empty token."""
    if not token:
        raise ValueError("a token link needs a secret")
    server = LinkServer(engine, token, timing or Timing(), memory_bytes)
    await server.listen(host, port)
    return server
