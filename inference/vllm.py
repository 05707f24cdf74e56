"""vLLM as an engine: `AsyncLLM` with token ids in and out.

vLLM is imported when an engine starts, never before: the import takes 15 s of CPU, and what it reads from the
environment must be set by then. Its own detokenizer is off, as it decodes the whole prompt at the first output token
(96 ms of event loop at 64k ids, spec/vllm.md 3); stop strings are the caller's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from inference.engine import Chunk, EngineError, Generation, Guide, Load
from inference.tokenizer import load_tokenizer, unpack_ids
from inference.vllmguides import GuideCompiler
from inference.vllmloras import load_adapters
from inference.vllmparsers import EngineParsers, OutputReader
from inference.vllmrequests import engine_prompt, finish_of, logprobs_of, sampling_params, translated
from inference.vllmstart import Started, VllmConfig, build_engine, checkpoint_folder, root_cause

__all__ = ["VllmConfig", "VllmEngine"]

log = logging.getLogger(__name__)

CLOSE_S = 15.0
"""Longest time `close` takes, seconds. vLLM's own shutdown takes about five."""
ANSWER_S = 30.0
"""How long a core that has just come up may take for its first answer, seconds."""


class _Stats:
    """A stat logger for vLLM: keeps the scheduler's last figures."""

    def __init__(self) -> None:
        self.waiting = 0
        self.kv_usage = 0.0

    def __call__(self, *_: Any, **__: Any) -> _Stats:
        """As the factory that vLLM calls for every engine core; here there is one."""
        return self

    def record(self, scheduler_stats: Any, *_: Any, **__: Any) -> None:
        if scheduler_stats is not None:
            self.waiting = scheduler_stats.num_waiting_reqs + scheduler_stats.num_skipped_waiting_reqs
            self.kv_usage = float(scheduler_stats.kv_cache_usage)

    def log_engine_initialized(self) -> None:
        pass

    def log(self) -> None:
        pass

    def record_sleep_state(self, *_: Any, **__: Any) -> None:
        pass


class VllmEngine:
    """Implements `inference.engine.Engine`. Made by `start`; belongs to the event loop that started it.

    The model's own end-of-sequence ids end sampling too, besides those of the request, and are delivered likewise. A
    generation whose `model` names one of `VllmConfig.loras` gets that adapter, any other the model as it is.
    """

    def __init__(self, started: Started, stats: _Stats, config: VllmConfig) -> None:
        self._engine = engine = started.engine
        self._loras = started.loras
        self._config = config
        self._parsers: EngineParsers | None = None
        self._guides = GuideCompiler(engine.vllm_config, engine.tokenizer)
        self._guide_thread = ThreadPoolExecutor(1, thread_name_prefix="guides")
        self._stats = stats
        self._serial = 0
        self._running: set[str] = set()
        self._closing: asyncio.Task[None] | None = None
        self.context_length: int = engine.model_config.max_model_len
        """Longest prompt plus answer, tokens."""
        self.directory = checkpoint_folder(started.model)
        """Where the checkpoint's files lie; None for a hub id that is not in the local cache."""

    @classmethod
    async def start(cls, config: VllmConfig) -> VllmEngine:
        """Takes 40 s for a small model on a CPU, minutes on a GPU; no deadline, as big checkpoints load for long. The
        core is a spawned process, so a script that calls this needs `if __name__ == "__main__"`.

        Raises `EngineError("unavailable", …)` with the cause in one line. When cancelled, what was started is shut
        down as soon as it is up."""
        stats = _Stats()
        # Not the future's result: somewhere in vLLM's imports an exception is kept whose frames hold the future.
        made: list[Started] = []
        building = asyncio.get_running_loop().run_in_executor(None, build_engine, config, stats, made)
        try:
            await asyncio.shield(building)
        except asyncio.CancelledError:
            building.add_done_callback(lambda _: _discard(made))
            raise
        built = made.pop()
        up = False
        try:
            # The first question to the core starts the task that notices its death, and proves that it lives.
            async with asyncio.timeout(ANSWER_S):
                await built.engine.get_supported_tasks()
            await load_adapters(built.engine, built.loras)
            started = cls(built, stats, config)
            if config.tool_parser is not None or config.reasoning_parser is not None:
                await started._load_parsers()  # so that a parser that can't work is known now
            up = True
        except EngineError:
            raise
        except Exception as problem:
            raise EngineError("unavailable", f"vLLM did not come up: {root_cause(problem)}") from problem
        finally:
            if not up:
                _discard([built])
        return started

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """See `Engine.generate`."""
        if self._closing is not None:
            raise EngineError("unavailable", "The engine is closed.")
        count = generation.prompt_tokens
        if count >= self.context_length:
            limit = self.context_length
            raise EngineError("invalid", f"The prompt has {count} tokens; the model takes fewer than {limit}.")
        ids = unpack_ids(generation.prompt)
        reader = await self._reader(generation, ids)
        self._serial += 1
        name = f"{generation.request_id}-{self._serial}"  # vLLM aborts by name, and clients' names may repeat
        self._running.add(name)
        finished = False
        first = True
        failure: EngineError | None = None
        stream: Any = None
        try:
            stream = self._engine.generate(
                engine_prompt(generation, ids),
                sampling_params(generation),
                name,
                lora_request=self._loras.get(generation.model),
                priority=generation.priority,
            )
            async for output in stream:
                completion = output.outputs[0]
                chunk = Chunk(list(completion.token_ids), finish_of(completion.finish_reason))
                finished = chunk.finish is not None
                chunk.cached_tokens = output.num_cached_tokens if first else None
                chunk.logprobs = logprobs_of(completion, generation)
                if reader is not None:
                    stopped = completion.finish_reason == "stop"
                    chunk.deltas = reader.feed(chunk.ids, finished=finished, stopped=stopped)
                first = False
                yield chunk
        except Exception as problem:  # noqa: BLE001  the interface knows one exception
            failure = translated(problem, generation.sampling.guide)
        finally:
            self._running.discard(name)
            if not finished:
                await self._abort(stream, name)
        if failure is not None:
            # Not chained to vLLM's own: its messages may hold parts of the prompt, and chains end up in logs.
            raise failure

    async def check(self, guide: Guide) -> None:
        """See `Engine.check`. Compiles the guide in this process, one at a time, in a thread."""
        if self._closing is not None:
            raise EngineError("unavailable", "The engine is closed.")
        loop = asyncio.get_running_loop()
        try:
            failure = await loop.run_in_executor(self._guide_thread, self._guides.problem, guide)
        except RuntimeError:  # the thread was stopped meanwhile
            raise EngineError("unavailable", "The engine is closed.") from None
        if failure is not None:
            raise failure

    async def load(self) -> Load:
        """What runs is counted here; what of it waits, and the cache's fill, is as of the scheduler's last step."""
        count = len(self._running)
        if not count:
            return Load(0, 0)
        waiting = min(self._stats.waiting, count)
        return Load(count - waiting, waiting, self._stats.kv_usage)

    async def check_health(self) -> None:
        """Raises `EngineError("unavailable", …)` once the engine core has died or `close` was called."""
        if self._closing is not None:
            raise EngineError("unavailable", "The engine is closed.")
        try:
            await self._engine.check_health()
        except Exception as problem:
            raise EngineError("unavailable", f"The engine is dead: {type(problem).__name__}.") from problem

    async def close(self) -> None:
        """Aborts what runs, then shuts vLLM down, within `CLOSE_S`. Idempotent."""
        if self._closing is None:
            self._closing = asyncio.create_task(self._shut_down())
        try:
            async with asyncio.timeout(CLOSE_S):
                await asyncio.shield(self._closing)
        except TimeoutError:
            log.warning("vLLM did not shut down in %.0f s", CLOSE_S)

    async def _reader(self, generation: Generation, ids: list[int]) -> OutputReader | None:
        """What takes the output apart, if the generation asks for that."""
        if generation.parsing is None:
            return None
        parsers = self._parsers or await self._load_parsers()
        return parsers.begin(generation.parsing, ids)

    async def _load_parsers(self) -> EngineParsers:
        if self.directory is None:
            raise EngineError("unavailable", "The checkpoint's tokenizer is not on this machine.")
        self._parsers = parsers = await asyncio.to_thread(self._make_parsers, self.directory)
        return parsers

    def _make_parsers(self, directory: Path) -> EngineParsers:
        config, engine = self._config, self._engine
        tokenizer = load_tokenizer(directory)
        return EngineParsers(
            config.tool_parser, config.reasoning_parser, engine.get_tokenizer(), tokenizer, engine.model_config
        )

    async def _shut_down(self) -> None:
        engine = self._engine
        self._guide_thread.shutdown(wait=False, cancel_futures=True)
        try:
            await engine.abort(list(self._running))
        except Exception as problem:  # noqa: BLE001  a dead engine has nothing to abort
            log.info("nothing aborted in vLLM: %s", type(problem).__name__)
        try:
            await asyncio.to_thread(engine.shutdown)
        except Exception as problem:  # noqa: BLE001  it is over either way
            log.warning("vLLM's shutdown failed: %s", type(problem).__name__)
        self._engine = None  # else its destructor runs at interpreter exit, when half of what it needs is gone

    async def _abort(self, stream: Any, name: str) -> None:
        with suppress(Exception):  # a dead engine can't be told
            if stream is not None:
                await stream.aclose()
            # When cancelled while the request was being handed to the core, vLLM's generator doesn't know of it yet.
            await self._engine.abort(name)


def _discard(made: list[Started]) -> None:
    """Shuts down an engine that came up after nobody wanted it any more."""
    if made:
        asyncio.get_running_loop().run_in_executor(None, made.pop().engine.shutdown)
