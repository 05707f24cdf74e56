"""How a session actor gets hold of a model: its tokenizer from an engine replica, its engines over the token link."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from ray.serve.handle import DeploymentHandle

from actors.engines import Endpoint, EnginePool
from actors.models import Loader, Model
from actors.retrying import Hedging
from gateway.settings import ModelSettings
from inference.engine import EngineError
from inference.formats.chatml import ChatMLFormat, ChatMLOptions
from inference.formats.choice import choose_format
from inference.formats.format import Format
from inference.link import LinkEngine
from inference.replica import ReplicaInfo
from inference.tokenizer import scripted_tokenizer
from inference.upstream.opening import UpstreamConfig, upstream_engines, upstream_format
from inference.upstream.pool import Deadlines

_API: Mapping[str, Literal["ids", "chat", "responses"]] = {"cerebras": "ids", "chat": "chat", "responses": "responses"}
REPLICA_TIMEOUT_S = 10.0
ENGINE_PATIENCE_S = 60.0
"""How long a turn waits while no engine takes it, seconds; with another model to fall back on it waits less."""
FALLBACK_PATIENCE_S = 1.0


def model_loader(model: ModelSettings, handle: DeploymentHandle[Any], token: str) -> Loader:
    """A loader that raises `EngineError` until a replica of the engine runs. Once it has succeeded, further calls get
    the same model."""
    contexts: dict[str, int] = {}
    loaded: list[Model] = []
    loading = asyncio.Lock()

    async def discover() -> Sequence[Endpoint]:
        answers: list[Any] = await handle.broadcast("info").results_async(
            timeout_s=REPLICA_TIMEOUT_S, return_exceptions=True
        )
        found = [answer for answer in answers if isinstance(answer, ReplicaInfo)]
        contexts.update((info.replica, info.context_length) for info in found)
        return [Endpoint(info.replica, info.host, info.port, info.draining, info.load, info.waiting) for info in found]

    async def load() -> Model:
        pool = EnginePool(
            discover,
            lambda endpoint: LinkEngine((endpoint.host, endpoint.port), token),
            patience_s=_patience(model),
            hedging=_hedging(model),
        )
        try:
            await pool.start()
            files = await asyncio.wait_for(handle.tokenizer_files.remote(), REPLICA_TIMEOUT_S)
            chat = await asyncio.to_thread(_chat_format, files, model)
        except BaseException as error:
            await pool.close()
            if isinstance(error, EngineError) or not isinstance(error, Exception):
                raise
            raise EngineError("unavailable", f"no tokenizer from the engine: {type(error).__name__}") from error
        return Model(model.name, chat, min(contexts.values()), pool, fallback=model.fallback)

    async def load_once() -> Model:
        async with loading:
            if not loaded:
                loaded.append(await load())
            return loaded[0]

    return load_once


def lora_loader(base: Loader, name: str) -> Loader:
    """A loader of a LoRA on a model that `model_loader` made a loader for: it shares that model's engines and format,
    and has `name` of its own, by which the engine chooses the adapter."""

    async def load() -> Model:
        return replace(await base(), name=name)

    return load


def upstream_loader(model: ModelSettings) -> Loader:
    """A loader for a model that somebody else runs. Raises `EngineError` until one of its endpoints has it."""
    settings = model.upstream
    config = UpstreamConfig(
        _API[model.engine],
        settings.url,
        settings.model or model.name,
        settings.keys,
        settings.dialect,
        model.format,
        model.path,
        settings.max_output_tokens,
        Deadlines(first_event_s=settings.first_event_s, idle_s=settings.idle_s, thinking_s=settings.thinking_s),
        settings.connections,
    )

    async def load() -> Model:
        engines = upstream_engines(config)
        outcomes = await asyncio.gather(*(engine.start() for engine in engines.values()), return_exceptions=True)
        faults = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        if len(faults) == len(engines):
            await asyncio.gather(*(engine.close() for engine in engines.values()), return_exceptions=True)
            raise faults[0]

        async def discover() -> Sequence[Endpoint]:
            return [Endpoint(name, name, 0) for name in engines]

        pool = EnginePool(
            discover, lambda endpoint: engines[endpoint.replica], patience_s=_patience(model), hedging=_hedging(model)
        )
        await pool.start()
        chat = await asyncio.to_thread(upstream_format, config)
        assert model.context_length is not None
        return Model(
            model.name, chat, model.context_length, pool, config.max_output_tokens, model.fallback, primes=False
        )

    return load


def _hedging(model: ModelSettings) -> Hedging | None:
    return Hedging() if model.hedge else None


def _patience(model: ModelSettings) -> float:
    return ENGINE_PATIENCE_S if model.fallback is None else FALLBACK_PATIENCE_S


def _chat_format(files: dict[str, bytes], model: ModelSettings) -> Format:
    if not files:
        return ChatMLFormat(scripted_tokenizer(), ChatMLOptions(names_media=True))
    with tempfile.TemporaryDirectory(prefix="limpet-tokenizer-") as name:
        for file, content in files.items():
            (Path(name) / file).write_bytes(content)
        parses = model.vllm.tool_parser is not None or model.vllm.reasoning_parser is not None
        return choose_format(Path(name), model.format, parses)
