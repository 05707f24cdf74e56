"""The processes of `benchmarks.stream`."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from benchmarks.processes import Part, Report
from benchmarks.stream_engine import PacedEngine, Trace, request
from benchmarks.stream_transports import TRANSPORTS, Generate
from inference.engine import Generation
from inference.tokenizer import scripted_tokenizer

_CLOSED_WITHIN_S = 10.0


async def source(report: Report, transport: str) -> None:
    """The scripted engine behind a transport. It tells how many generations it has had and the `Trace` of the last."""
    engine = PacedEngine()
    port = await TRANSPORTS[transport].serve(engine)
    report(port, lambda: (engine.generations, engine.newest))
    await asyncio.Event().wait()


def generations(part: Part) -> int:
    """How many a `source` has had."""
    count: int = part.ask()[0]
    return count


async def trace_of(part: Part, number: int) -> Trace:
    """What a `source` did in its generation `number`, from 1, which must be the last; waits until it has ended."""
    deadline = time.monotonic() + _CLOSED_WITHIN_S
    while time.monotonic() < deadline:
        count, trace = part.ask()
        if count == number and trace.closed:
            assert isinstance(trace, Trace)
            return trace
        await asyncio.sleep(0.01)
    raise TimeoutError("the engine goes on with a generation that nobody wants")


async def consumer(report: Report, transport: str, engine_port: int) -> None:
    """The session actor's end of a transport: for a line `streams tokens rate` it takes that many answers at once and
    says what came and how long it took."""
    generate = TRANSPORTS[transport].dial(engine_port)
    vocabulary = scripted_tokenizer()

    async def obey(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while line := await reader.readline():
            streams, tokens, rate = (int(word) for word in line.split())
            asked = [request(vocabulary, f"s{index}", tokens, rate) for index in range(streams)]
            begin = time.monotonic()
            counts = await asyncio.gather(*(_take(generate, generation) for generation in asked))
            seconds = time.monotonic() - begin
            told = {"seconds": seconds, "tokens": sum(n for n, _ in counts), "chunks": sum(n for _, n in counts)}
            writer.write(json.dumps(told).encode() + b"\n")
            await writer.drain()

    server = await asyncio.start_server(obey, "127.0.0.1", 0)
    report(server.sockets[0].getsockname()[1])
    await asyncio.Event().wait()


async def _take(generate: Generate, generation: Generation) -> tuple[int, int]:
    """Ids and chunks of one answer."""
    ids = chunks = 0
    async for chunk in generate(generation):
        ids += len(chunk.ids)
        chunks += 1
    return ids, chunks


async def bare(report: Report, frame_bytes: int) -> None:
    """A bare `websockets` server on the scripted engine's schedule: the message "N R" is answered with the time of
    CLOCK_MONOTONIC at which the first frame is due, then with N frames at R a second."""
    from websockets.asyncio.server import ServerConnection, serve

    frame = "x" * frame_bytes

    async def handler(connection: ServerConnection) -> None:
        async for message in connection:
            count, rate = (int(word) for word in str(message).split())
            start = time.monotonic()
            await connection.send(repr(start))
            for index in range(count):
                left = start + index / rate - time.monotonic()
                if left > 0:
                    await asyncio.sleep(max(left, 0.001))
                await connection.send(frame)

    async with serve(handler, "127.0.0.1", 0, compression=None) as server:
        report(next(iter(server.sockets)).getsockname()[1])
        await asyncio.Event().wait()


class Consumer:
    """The way to tell a `consumer` what to do."""

    def __init__(self, part: Part) -> None:
        self._part = part

    async def __aenter__(self) -> Consumer:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._part.port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def take(self, streams: int, tokens: int, rate: int) -> dict[str, Any]:
        """So many answers at once."""
        self._writer.write(f"{streams} {tokens} {rate}\n".encode())
        told: dict[str, Any] = json.loads(await self._reader.readline())
        if told["tokens"] != streams * tokens:
            raise ValueError(f"{told['tokens']} tokens came of {streams * tokens}")
        return told
