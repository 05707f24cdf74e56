"""Halting a generation: wherever its reader is, the engine's stream is closed once, and no cancellation is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from actors.halting import Halt, Where
from inference.engine import Chunk, EngineError


class Source:
    """Chunks when the test says so. `closed` counts ends; `fault` is what a cancelled wait turns into."""

    def __init__(self, fault: BaseException | None = None) -> None:
        self.chunks: asyncio.Queue[Chunk] = asyncio.Queue()
        self.asked = self.closed = 0
        self.fault = fault

    async def generate(self) -> AsyncGenerator[Chunk, None]:
        self.asked += 1
        try:
            while True:
                yield await self.chunks.get()
        except (asyncio.CancelledError, GeneratorExit):
            if self.fault is not None:
                raise self.fault from None
            raise
        finally:
            self.closed += 1


class Reader:
    """Reads as `Turn.run` does; `gate` holds up what it sends."""

    def __init__(self, source: Source) -> None:
        self.halt = Halt()
        self.source = source
        self.gate = asyncio.Event()
        self.read = 0
        self.task = asyncio.create_task(self.run())

    async def run(self) -> str | None:
        chunks = self.source.generate()
        async with self.halt.reading(chunks):
            async for _ in chunks:
                self.read += 1
                self.halt.where = Where.SENDING
                await self.gate.wait()
                self.halt.where = Where.WAITING
                if self.halt.reason is not None:
                    break
        return self.halt.reason


async def until(where: Where, reader: Reader) -> None:
    for _ in range(20):
        if reader.halt.where is where and reader.source.asked:
            break
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert reader.halt.where is where


async def test_ahead_of_the_first_chunk_the_engine_is_never_asked() -> None:
    reader = Reader(Source())
    reader.halt.halt("x")

    assert await reader.task == "x"
    assert reader.source.asked == 0


@pytest.mark.parametrize("fault", [None, EngineError("unavailable", "gone")])
async def test_a_wait_for_the_model_is_cut_short(fault: EngineError | None) -> None:
    reader = Reader(Source(fault))
    await until(Where.WAITING, reader)
    reader.halt.halt("x")

    assert await reader.task == "x"
    assert (reader.source.closed, reader.task.cancelling()) == (1, 0)


@pytest.mark.parametrize("fault", [None, EngineError("unavailable", "gone")])
async def test_while_it_sends_the_stream_is_closed_beside_it(fault: EngineError | None) -> None:
    reader = Reader(Source(fault))
    reader.source.chunks.put_nowait(Chunk([1]))
    await until(Where.SENDING, reader)
    reader.halt.halt("x")
    for _ in range(5):
        await asyncio.sleep(0)

    assert (reader.source.closed, reader.task.done()) == (1, False)
    reader.gate.set()
    assert await reader.task == "x"
    assert reader.read == 1


async def test_a_chunk_that_came_in_the_same_moment_is_not_read() -> None:
    reader = Reader(Source())
    await until(Where.WAITING, reader)
    reader.source.chunks.put_nowait(Chunk([1]))
    reader.halt.halt("x")

    assert await reader.task == "x"
    assert (reader.read, reader.source.closed) == (0, 1)


async def test_past_the_end_only_the_reason_changes() -> None:
    reader = Reader(Source())
    await until(Where.WAITING, reader)
    reader.halt.halt("steered")
    await reader.task
    reader.halt.halt("interrupted")

    assert (reader.halt.reason, reader.halt.where) == ("interrupted", Where.AFTER)
    assert reader.task.cancelling() == 0


@pytest.mark.parametrize("first", ["halt", "cancel"])
@pytest.mark.parametrize("where", [Where.WAITING, Where.SENDING])
async def test_somebody_elses_cancellation_goes_on(first: str, where: Where) -> None:
    reader = Reader(Source())
    if where is Where.SENDING:
        reader.source.chunks.put_nowait(Chunk([1]))
    await until(where, reader)
    for what in (first, "cancel" if first == "halt" else "halt"):
        if what == "halt":
            reader.halt.halt("x")
        else:
            reader.task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await reader.task
    assert reader.source.closed == 1


async def test_a_deadline_around_it_still_counts() -> None:
    async def bounded() -> None:
        async with asyncio.timeout(0) as deadline:
            chunks = source.generate()
            async with halt.reading(chunks):
                async for _ in chunks:
                    pass
            deadline.reschedule(None)

    source, halt = Source(), Halt()
    task = asyncio.create_task(bounded())
    await asyncio.sleep(0)
    halt.halt("x")

    with pytest.raises(TimeoutError):
        await task


@pytest.mark.parametrize("error", [EngineError("invalid", "no"), ValueError("x")])
async def test_without_a_halt_faults_pass(error: Exception) -> None:
    async def failing() -> AsyncGenerator[Chunk, None]:
        yield Chunk([1])
        raise error

    chunks, seen = failing(), 0
    with pytest.raises(type(error)):  # noqa: PT012 - the loop is what raises
        async with Halt().reading(chunks):
            async for _ in chunks:
                seen += 1
    assert seen == 1
