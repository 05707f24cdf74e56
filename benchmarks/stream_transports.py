"""Ways from an engine's process to a session's, to be compared: the token link, pyzmq, grpc.aio, and none.

Those beside the link carry the same frames, one a token, and nothing else: no hello, no pings, no back-pressure, no
cancellation. So they cost less here than a link built on them would.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import zmq

from benchmarks.processes import TOKEN
from benchmarks.stream_engine import PacedEngine
from inference import linkframes as frames
from inference.engine import Chunk, Engine, Generation
from inference.link import LinkEngine, serve_link

Generate = Callable[[Generation], AsyncIterator[Chunk]]
_HEAD = 9  # bytes of a frame before its body
_CHUNKS_PER_TURN = 32  # as the link's server
_GRPC_METHOD = "/link/generate"


@dataclass(frozen=True, slots=True)
class Transport:
    """`serve` offers an engine and returns the port; `dial` makes what reaches it."""

    serve: Callable[[Engine], Awaitable[int]]
    dial: Callable[[int], Generate]


async def _serve_link(engine: Engine) -> int:
    return (await serve_link(engine, "127.0.0.1", 0, TOKEN)).address[1]


class _ZmqServer:
    """A ROUTER whose file descriptor the event loop watches. That one tells of changes only, so what has come is looked
    for after sending, too."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._router.set_hwm(0)
        self.port: int = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._tasks: set[asyncio.Task[None]] = set()
        asyncio.get_running_loop().add_reader(self._router.fileno(), self._read)

    def _read(self) -> None:
        while int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            peer, frame = self._router.recv_multipart(zmq.NOBLOCK)
            generation, _ = frames.decode_open(frame[_HEAD:])
            task = asyncio.create_task(self._pump(peer, int.from_bytes(frame[5:_HEAD], "little"), generation))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, peer: bytes, number: int, generation: Generation) -> None:
        send, count = self._router.send_multipart, 0
        async for chunk in self._engine.generate(generation):
            send((peer, frames.encode_chunk(number, chunk)), zmq.NOBLOCK)
            count += 1
            if not count % _CHUNKS_PER_TURN:
                self._read()
                await asyncio.sleep(0)
        self._read()


async def _serve_zmq(engine: Engine) -> int:
    return _ZmqServer(engine).port


class _ZmqClient:
    """A DEALER that many generations share."""

    def __init__(self, port: int) -> None:
        self._dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._dealer.set_hwm(0)
        self._dealer.connect(f"tcp://127.0.0.1:{port}")
        self._waiting: dict[int, tuple[deque[Chunk], asyncio.Event]] = {}
        self._last = 0
        asyncio.get_running_loop().add_reader(self._dealer.fileno(), self._read)

    def _read(self) -> None:
        while int(self._dealer.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            frame = self._dealer.recv(zmq.NOBLOCK)
            chunks, arrived = self._waiting[int.from_bytes(frame[5:_HEAD], "little")]
            chunks.append(frames.decode_chunk(frame[_HEAD:]))
            arrived.set()

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        self._last += 1
        number = self._last
        chunks, arrived = self._waiting[number] = (deque(), asyncio.Event())
        self._dealer.send(frames.encode_open(number, generation), zmq.NOBLOCK)
        self._read()
        while True:
            await arrived.wait()
            arrived.clear()
            while chunks:
                chunk = chunks.popleft()
                yield chunk
                if chunk.finish is not None:
                    del self._waiting[number]
                    return


async def _serve_grpc(engine: Engine) -> int:
    async def generate(request: bytes, context: Any) -> AsyncIterator[bytes]:  # noqa: ARG001
        generation, _ = frames.decode_open(request[_HEAD:])
        async for chunk in engine.generate(generation):
            yield frames.encode_chunk(1, chunk)

    handlers = {"generate": grpc.unary_stream_rpc_method_handler(generate)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("link", handlers),))
    port: int = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    _SERVERS.append(server)
    return port


_SERVERS: list[Any] = []  # a server that nobody holds stops


def _dial_grpc(port: int) -> Generate:
    call = grpc.aio.insecure_channel(f"127.0.0.1:{port}").unary_stream(_GRPC_METHOD)

    async def generate(generation: Generation) -> AsyncIterator[Chunk]:
        async for frame in call(frames.encode_open(1, generation)):
            yield frames.decode_chunk(frame[_HEAD:])

    return generate


async def _serve_nothing(engine: Engine) -> int:  # noqa: ARG001
    return 0


TRANSPORTS = {
    "link": Transport(_serve_link, lambda port: LinkEngine(("127.0.0.1", port), TOKEN).generate),
    "pyzmq": Transport(_serve_zmq, lambda port: _ZmqClient(port).generate),
    "grpc.aio": Transport(_serve_grpc, _dial_grpc),
    "none": Transport(_serve_nothing, lambda port: PacedEngine().generate),  # noqa: ARG005
}
"""By name. `none` is the scripted engine in the consumer's own process: the others' cost without the way."""
