"""Engine replicas that remember what they were given and what they sampled, for assertions on real engines."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.engine import Chunk, Engine, Generation, Guide, Load
from inference.replica import EngineReplica, ScriptedReplica, VllmReplica
from inference.tokenizer import unpack_ids


@dataclass(slots=True)
class Record:
    """One generation as the engine saw it."""

    prompt: list[int]
    sampled: list[int] = field(default_factory=list)
    cached_tokens: int | None = None
    finish: str | None = None


class Recorder:
    """An engine around another one."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.records: list[Record] = []

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        record = Record(unpack_ids(generation.prompt))
        self.records.append(record)
        async with aclosing(self._engine.generate(generation)) as chunks:  # type: ignore[type-var]
            async for chunk in chunks:
                record.sampled += chunk.ids
                record.finish = chunk.finish
                if chunk.cached_tokens is not None:
                    record.cached_tokens = chunk.cached_tokens
                yield chunk

    async def check(self, guide: Guide) -> None:
        await self._engine.check(guide)

    async def load(self) -> Load:
        return await self._engine.load()

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def close(self) -> None:
        await self._engine.close()


async def take_records(replica: EngineReplica) -> list[Record]:
    """What came since the last time."""
    recorder = replica._engine
    assert isinstance(recorder, Recorder)
    records, recorder.records = recorder.records, []
    return records


class RecordingVllm(VllmReplica):
    """vLLM, watched."""

    async def start_engine(self, options: dict[str, Any]) -> tuple[Engine, int, Path | None]:
        engine, context_length, directory = await super().start_engine(options)
        return Recorder(engine), context_length, directory

    async def take_records(self) -> list[Record]:
        return await take_records(self)


class RecordingScripted(ScriptedReplica):
    """The double, watched."""

    async def start_engine(self, options: dict[str, Any]) -> tuple[Engine, int, Path | None]:
        engine, context_length, directory = await super().start_engine(options)
        return Recorder(engine), context_length, directory

    async def take_records(self) -> list[Record]:
        return await take_records(self)
