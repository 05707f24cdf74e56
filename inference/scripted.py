"""An engine without a model: a public double that answers by a script. Never the default.

It gets prompt ids and gives sampled ids like a real engine: it honours stop ids, `max_tokens` and the context length,
reports the load, simulates prefix caching, paces its tokens, and fails when told to. It ignores temperature and model
names. An output that it is to take apart itself it reads as ChatML with Hermes calls. By default it follows the STEPS
rule (`inference.steps`), which is enough to lead real agents through tool loops and respects guides roughly; what a
script says is said under any guide.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Literal

from gateway.protocol.tools import Tool, ToolSet
from inference.engine import Chunk, EngineError, EngineFault, Finish, Generation, Guide, Load, TokenLogprob
from inference.formats.chatml_parser import ChatMLParser
from inference.steps import CALL_CLOSE, CALL_OPEN, PromptReader
from inference.tokenizer import Tokenizer, unpack_ids

RECEIVED_KEPT = 256
_BLOCKS_KEPT = 65_536  # of the simulated prefix cache: a million tokens
_BEATS_PER_TURN = 16  # chunks in a row without giving the event loop a turn
_LONGEST_SLEEP_S = 0.25  # so that `close` is noticed


@dataclass(frozen=True, slots=True)
class Say:
    """Text. Markup such as `<tool_call>` becomes a control token where the vocabulary has one, as a model would."""

    text: str


@dataclass(frozen=True, slots=True)
class Ids:
    """Ids as they are, control tokens included."""

    ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class Stall:
    """A pause, seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Fault:
    """Fails with this `EngineError`."""

    fault: EngineFault
    message: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Ends as if the engine had died: `EngineError("unavailable", …)`."""


@dataclass(frozen=True, slots=True)
class Echo:
    """Says what the prompt was: its count of ids and a digest of them, or the last user message's text."""

    what: Literal["digest", "user"] = "digest"


@dataclass(frozen=True, slots=True)
class FollowSteps:
    """Follows the STEPS rule of `inference.steps`."""


Step = Say | Ids | Stall | Fault | Drop | Echo | FollowSteps


@dataclass(frozen=True, slots=True)
class Script:
    """Steps, played in order for each generation. `tokens_per_second` 0 is as fast as possible, None the engine's own.

    The answer ends with a stop id of the request, if it has any."""

    steps: Sequence[Step] = (FollowSteps(),)
    tokens_per_second: float | None = None
    tokens_per_chunk: int = 1


_Beat = list[int] | Stall | Fault | Drop


class PrefixCache:
    """Which prompts' blocks were served, least recently used ones forgotten first."""

    def __init__(self, block_size: int = 16, blocks: int = _BLOCKS_KEPT) -> None:
        self._block_size = block_size
        self._blocks = blocks
        self._known: dict[int, None] = {}

    def serve(self, prompt: bytes, salt: str | None) -> int:
        """How many of the prompt's tokens were there; the prompt's full blocks are from now on. As in vLLM the last
        token is never cached, as something must be computed."""
        size = 4 * self._block_size
        keys: list[int] = []
        key = hash(salt)
        for start in range(0, len(prompt) // size * size, size):
            key = hash((key, prompt[start : start + size]))
            keys.append(key)
        known = self._known
        found = next((n for n, key in enumerate(keys) if key not in known), len(keys))
        for key in reversed(keys):  # the start of a prompt must outlive its end
            known.pop(key, None)
            known[key] = None
        while len(known) > self._blocks:
            del known[next(iter(known))]
        return min(found, (len(prompt) // 4 - 1) // self._block_size) * self._block_size


class ScriptedEngine:
    """Implements `inference.engine.Engine`.

    Args:
        tokenizer: the vocabulary prompts and answers are in.
        script: what to answer; may be replaced at any time. `enqueue` adds scripts that are used once, first.
        tokens_per_second: pace of scripts that name none; 0 is as fast as possible.
        time_to_first_token_s: pause before every answer, seconds.
        max_running: generations at once; further ones wait.
        context_length: longest prompt plus answer, tokens; a longer prompt is `invalid`, a longer answer cut.
        clock: seconds that only grow.
        sleep: waits for so many seconds of `clock`.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        script: Script | None = None,
        *,
        tokens_per_second: float = 0.0,
        time_to_first_token_s: float = 0.0,
        max_running: int = 256,
        context_length: int = 1_000_000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.script = script or Script()
        self.received: deque[Generation] = deque(maxlen=RECEIVED_KEPT)
        self.aborted = 0
        """Generations that were closed before they ended."""
        self.illness: EngineError | None = None
        """What `check_health` raises."""
        self.refusal: EngineError | None = None
        """What `check` raises for every guide."""
        self.context_length = context_length
        self._queued: deque[Script] = deque()
        self._tokenizer = tokenizer
        self._tokens_per_second = tokens_per_second
        self._first_token_s = time_to_first_token_s
        self._cache = PrefixCache()
        self._slots = asyncio.Semaphore(max_running)
        self._running = self._waiting = 0
        self._clock, self._sleep = clock, sleep
        self._closed = False
        self._reader: PromptReader | None = None
        markup = (CALL_OPEN, CALL_CLOSE, "<think>", "</think>")
        self._controls = {name: tokenizer.special(name) for name in markup if tokenizer.has_special(name)}
        self._markup = re.compile(f"({'|'.join(map(re.escape, self._controls))})") if self._controls else None

    def enqueue(self, *scripts: Script) -> None:
        """Scripts for the next generations, one each."""
        self._queued.extend(scripts)

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        self.received.append(generation)
        script = self._queued.popleft() if self._queued else self.script
        self._check(generation)
        parser = self._parser(generation)
        finished = False
        await self._take_slot()
        try:
            beats, finish = self._beats(script, generation)
            cached: int | None = self._cache.serve(generation.prompt, generation.cache_salt)
            rate = self._tokens_per_second if script.tokens_per_second is None else script.tokens_per_second
            # The schedule is absolute: a late wake-up doesn't move what comes after it.
            origin, sent, in_a_row = self._clock() + self._first_token_s, 0, 0
            await self._until(origin)
            for left, beat in zip(range(len(beats) - 1, -1, -1), beats, strict=True):
                if isinstance(beat, Stall):
                    origin = (origin if rate else self._clock()) + beat.seconds
                elif not isinstance(beat, list):
                    finished = True
                    raise _failure(beat)
                else:
                    sent += len(beat)
                in_a_row += 1
                due = origin + max(sent - 1, 0) / rate if rate else origin
                if await self._until(due):
                    in_a_row = 0
                elif in_a_row >= _BEATS_PER_TURN:
                    in_a_row = 0
                    await self._sleep(0)
                if isinstance(beat, list):
                    finished = not left
                    yield _chunk(beat, None if left else finish, cached, generation, parser)
                    cached = None
            if not finished:  # nothing to say, or a pause at the end
                finished = True
                yield _chunk([], finish, cached, generation, parser)
        finally:
            self._running -= 1
            self._slots.release()
            self.aborted += not finished

    async def check(self, guide: Guide) -> None:
        """See `Engine.check`: looks at a guide's form, not at what it means."""
        if self.refusal is not None:
            raise self.refusal
        if (problem := _guide_problem(guide)) is not None:
            raise EngineError("invalid", f"The engine can't use this {guide.kind} constraint: {problem}")

    async def load(self) -> Load:
        """See `Engine.load`; `kv_usage` is always 0."""
        return Load(self._running, self._waiting)

    async def check_health(self) -> None:
        """Raises `illness`, if a test has set it."""
        if self._closed:
            raise _closed()
        if self.illness is not None:
            raise self.illness

    async def close(self) -> None:
        """What runs ends with `unavailable` when it next wakes, at most a quarter of a second later."""
        self._closed = True

    def _check(self, generation: Generation) -> None:
        if self._closed:
            raise _closed()
        count, rest = divmod(sum(map(len, generation.parts)), 4)
        if rest or not count:
            raise EngineError("invalid", "The prompt is empty or no list of ids.")
        if count >= self.context_length:
            raise EngineError(
                "invalid", f"The prompt has {count} tokens; the model takes fewer than {self.context_length}."
            )
        if generation.sampling.max_tokens < 1:
            raise EngineError("invalid", "max_tokens must be at least 1.")

    def _parser(self, generation: Generation) -> ChatMLParser | None:
        if generation.parsing is None:
            return None
        try:
            names = [str(tool["function"]["name"]) for tool in json.loads(generation.parsing.tools)]
        except (ValueError, TypeError, KeyError):
            raise EngineError("invalid", "The engine's parser can't read these tools.") from None
        tools = ToolSet(tuple(Tool("function", name) for name in names))
        return ChatMLParser(self._tokenizer, tools, thinking=True)

    async def _take_slot(self) -> None:
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._running += 1

    async def _until(self, due: float) -> bool:
        """Waits until then; whether there was anything to wait for."""
        waited = False
        while (left := due - self._clock()) > 0:
            waited = True
            await self._sleep(min(left, _LONGEST_SLEEP_S))
            if self._closed:
                raise _closed()
        return waited

    def _beats(self, script: Script, generation: Generation) -> tuple[list[_Beat], Finish]:
        """Everything the answer will be, in chunks, up to where the request ends it."""
        sampling = generation.sampling
        stops = frozenset(sampling.stop_token_ids)
        room = min(sampling.max_tokens, self.context_length - generation.prompt_tokens)
        beats: list[_Beat] = []
        for step in script.steps:
            if isinstance(step, Stall | Fault | Drop):
                beats.append(step)
                continue
            ids = self._ids(step, generation)
            stopped = next((n for n, token in enumerate(ids, 1) if token in stops), None)
            cut = min(room, len(ids) if stopped is None else stopped)
            beats += [ids[n : min(n + script.tokens_per_chunk, cut)] for n in range(0, cut, script.tokens_per_chunk)]
            room -= cut
            if stopped is not None and cut == stopped:
                return beats, "stop"
            if not room:
                return beats, "length"
        if stops:
            beats.append([sampling.stop_token_ids[0]])
        return beats, "stop"

    def _ids(self, step: Say | Ids | Echo | FollowSteps, generation: Generation) -> list[int]:
        prompt = generation.prompt
        if isinstance(step, Ids):
            return list(step.ids)
        if isinstance(step, Say):
            return self._encode(step.text)
        if isinstance(step, Echo) and step.what == "digest":
            return self._encode(f"ECHO {len(prompt) // 4} {sha256(prompt).hexdigest()[:16]}")
        if self._reader is None:
            self._reader = PromptReader(self._tokenizer)
        if isinstance(step, Echo):
            return self._encode(self._reader.last_user_text(prompt))
        return self._encode(self._reader.answer(prompt, generation.sampling.guide))

    def _encode(self, text: str) -> list[int]:
        pieces = self._markup.split(text) if self._markup is not None else [text]
        ids: list[int] = []
        for piece in filter(None, pieces):
            control = self._controls.get(piece)
            ids += unpack_ids(self._tokenizer.encode(piece)) if control is None else [control]
        return ids


def _failure(beat: Fault | Drop) -> EngineError:
    return (
        EngineError("unavailable", "The engine died.")
        if isinstance(beat, Drop)
        else EngineError(beat.fault, beat.message)
    )


def _closed() -> EngineError:
    return EngineError("unavailable", "The engine is closed.")


def _guide_problem(guide: Guide) -> str | None:
    """What is wrong with the form of a guide."""
    if guide.kind == "grammar":
        return None if guide.value.strip() else "it is empty"
    try:
        if guide.kind == "regex":
            re.compile(guide.value)
            return None
        parsed = json.loads(guide.value)
    except (re.error, ValueError, RecursionError) as problem:
        return "it is no regular expression" if isinstance(problem, re.error) else "it is not JSON"
    if guide.kind == "json" and isinstance(parsed, bool):
        return None
    return None if isinstance(parsed, dict) else "it is no JSON object"


def _chunk(
    ids: list[int], finish: Finish | None, cached: int | None, generation: Generation, parser: ChatMLParser | None
) -> Chunk:
    chunk = Chunk(ids, finish, cached)
    wanted = generation.sampling.logprobs
    if wanted is not None and ids:  # a script is certain of what it says
        chunk.logprobs = [TokenLogprob(token, 0.0, ((token, 0.0),) if wanted else ()) for token in ids]
    if parser is not None:
        chunk.deltas = parser.feed(ids)
        if finish is not None:
            chunk.deltas += parser.finish()
    return chunk
