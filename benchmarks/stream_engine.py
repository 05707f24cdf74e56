"""The scripted engine, paced by its prompt, with a record of when it did what."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import cast

from inference.engine import Chunk, Generation, Sampling
from inference.scripted import Ids, Script, ScriptedEngine
from inference.tokenizer import Tokenizer, scripted_tokenizer, unpack_ids

MODEL = "m"
WORDS = "The quick brown fox jumps over the lazy dog and runs on through the woods until night falls. "
_TAIL_BYTES = 4 * 60  # of a prompt: the last user message and what stands around it
_SHORTEST_SLEEP_S = 0.001


@dataclass(slots=True)
class Trace:
    """When a generation's chunks were ready and when its iterator was closed, seconds of CLOCK_MONOTONIC, which all
    processes of a machine share. The first token is due when it is made, so the schedule starts there."""

    made: list[float] = field(default_factory=list)
    closed: float = 0.0


def answer_ids(vocabulary: Tokenizer, count: int) -> list[int]:
    """What the engine answers with: English, one id after the other."""
    ids = unpack_ids(vocabulary.encode(WORDS * 10))
    return (ids * (count // len(ids) + 1))[:count]


def request(vocabulary: Tokenizer, name: str, tokens: int, rate: float) -> Generation:
    """A generation of so many tokens at `rate` a second, 0 for as fast as possible."""
    return Generation(name, MODEL, (vocabulary.encode(ask(tokens, rate)),), Sampling(max_tokens=tokens))


def ask(tokens: int, rate: float) -> str:
    """The user message that gets this answer."""
    return f"Say {tokens} at {rate:.0f}"


class PacedEngine(ScriptedEngine):
    """`Say 200 at 4000`: 200 tokens, each 1/4000 s after the one before, in chunks of one token.

    It sleeps for a millisecond at least: uvloop's timers count in those, and a shorter sleep would be a busy wait. So
    at 4,000 tokens a second it makes four a millisecond, as an engine with speculative decoding does.
    """

    def __init__(self) -> None:
        self._vocabulary = scripted_tokenizer()
        super().__init__(self._vocabulary, sleep=_sleep)
        self.generations = 0
        self.newest = Trace()

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """As the base class, with a script for this prompt."""
        tail = unpack_ids(generation.prompt[-_TAIL_BYTES:])
        said = b"".join(self._vocabulary.token_bytes(token) for token in tail).decode(errors="ignore")
        tokens, rate = re.findall(r"Say (\d+) at (\d+)", said)[-1]
        self.enqueue(Script([Ids(answer_ids(self._vocabulary, int(tokens)))], float(rate)))
        self.generations += 1
        trace = self.newest = Trace()
        clock = time.monotonic
        chunks = cast("AsyncGenerator[Chunk]", super().generate(generation))
        try:
            async with aclosing(chunks):
                async for chunk in chunks:
                    trace.made.append(clock())
                    yield chunk
        finally:
            trace.closed = clock()


async def _sleep(seconds: float) -> None:
    await asyncio.sleep(max(seconds, _SHORTEST_SLEEP_S) if seconds else 0)
