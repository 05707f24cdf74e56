"""A second request beside one that gives no sign of life: whichever speaks first answers, the other is closed.

Only before the first chunk (design.md decision 8). `actors.retrying.Hedging` decides when and how often.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable

from inference.engine import Chunk, EngineError

Chunks = AsyncGenerator[Chunk, None]


async def hedged(first: Chunks, delay_s: float, second: Callable[[], Chunks | None]) -> Chunks:
    """The chunks of `first`, or of `second()` if nothing came of it within the delay and that speaks earlier. Raises
    the `EngineError` of the last one that failed. Closing it, or cancelling its reader, closes both."""
    waiting = {_next(first): first}
    streams = [first]
    try:
        done, _ = await asyncio.wait(waiting, timeout=delay_s)
        if not done and (other := second()) is not None:
            streams.append(other)
            waiting[_next(other)] = other
        winner, chunk = await _earliest(waiting)
        await _end(waiting)
        for stream in streams:
            if stream is not winner:
                await stream.aclose()
        if chunk is None:
            return
        yield chunk
        async for more in winner:
            yield more
    finally:
        await _end(waiting)
        for stream in streams:
            await stream.aclose()


def _next(stream: Chunks) -> asyncio.Task[Chunk | None]:
    return asyncio.ensure_future(anext(stream, None))


async def _earliest(waiting: dict[asyncio.Task[Chunk | None], Chunks]) -> tuple[Chunks, Chunk | None]:
    """Whose first chunk is there, and that. One that fails is out, unless it is the last."""
    while True:
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        task = done.pop()
        stream = waiting.pop(task)
        try:
            return stream, task.result()
        except EngineError:
            if not waiting:
                raise


async def _end(waiting: dict[asyncio.Task[Chunk | None], Chunks]) -> None:
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    waiting.clear()
