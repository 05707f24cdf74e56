"""What stands behind the gateway in a scenario: engines that break or come in several replicas, and formats."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import cache
from typing import Any

from actors.engines import Endpoint, EnginePool
from actors.models import Model
from inference.engine import Chunk, EngineError, Generation
from inference.formats.chatml import ChatMLFormat, ChatMLOptions, chatml_format
from inference.formats.format import Format
from inference.formats.harmony import HarmonyFormat
from inference.scripted import ScriptedEngine
from inference.tokenizer import harmony_tokenizer
from tests.conformance.driver import TOKENIZER


class Broken:
    """An engine that raises something nobody expects, at the given chunk."""

    def __init__(self, inner: ScriptedEngine, message: str, after: int) -> None:
        self._inner, self._message, self._after = inner, message, after

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        count = 0
        async for chunk in self._inner.generate(generation):
            if count == self._after:
                raise RuntimeError(self._message)
            count += 1
            yield chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


class Replicas:
    """Several replicas of one engine. They share its scripts; `served` tells which of them answered."""

    def __init__(self, engine: ScriptedEngine, chat: Format, count: int) -> None:
        self.engine, self.chat = engine, chat
        self.living = [f"replica-{number}" for number in range(count)]
        self.served: list[str] = []

    async def load(self) -> Model:
        """The model of all of them, as an actor loads it."""
        pool = EnginePool(self._discover, lambda at: Replica(self, at.replica), refresh_s=3600, patience_s=0.2)
        await pool.start()
        return Model("m", self.chat, self.engine.context_length, pool)

    async def _discover(self) -> list[Endpoint]:
        return [Endpoint(name, "127.0.0.1", 0) for name in self.living]


class Replica:
    """One of them; `unavailable` once it is gone."""

    def __init__(self, among: Replicas, name: str) -> None:
        self._among, self._name = among, name

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        if self._name not in self._among.living:
            raise EngineError("unavailable", "gone")
        self._among.served.append(self._name)
        async for chunk in self._among.engine.generate(generation):
            yield chunk

    async def close(self) -> None:
        """The others go on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._among.engine, name)


@cache
def chat_format(name: str) -> Format:
    """`plain` ChatML, one that `forgets` thoughts of earlier rounds, or `harmony`."""
    match name:
        case "plain":
            return chatml_format(TOKENIZER)
        case "forgets":
            return ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=True))
        case _:
            return HarmonyFormat(harmony_tokenizer())
