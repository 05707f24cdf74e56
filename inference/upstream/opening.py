"""An upstream model as engines and a chat format: one engine for each key, all with the same format."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from inference.formats.choice import Wanted, choose_format
from inference.formats.format import Format
from inference.formats.harmony import harmony_format
from inference.formats.messages import MessagesFormat
from inference.formats.responses import ResponsesFormat
from inference.tokenizer import harmony_tokenizer
from inference.upstream import cerebras, chat, responses
from inference.upstream.cerebras import CerebrasEngine
from inference.upstream.chat import ChatEngine
from inference.upstream.dialects import DIALECTS, RESPONSES_DIALECTS
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.engines import UpstreamEngine
from inference.upstream.pool import Deadlines, UpstreamPool
from inference.upstream.responses import ResponsesEngine


@dataclass(frozen=True, slots=True)
class UpstreamConfig:
    """`api`: ids for Cerebras' completions; chat for chat completions and responses for Responses, in a `dialect`.
    `model` is the upstream's name of it; `keys` may be empty. `path` is a folder with the tokenizer of a model by ids,
    None for Harmony's."""

    api: Literal["ids", "chat", "responses"]
    url: str
    model: str
    keys: Sequence[str]
    dialect: str
    format: Wanted
    path: str | None
    max_output_tokens: int | None
    deadlines: Deadlines
    connections: int

    @property
    def origin(self) -> str:
        """Whose answers these are, as only they can open what they have sealed."""
        url = urlsplit(self.url)
        return f"{url.hostname}:{url.port or ''}{url.path.rstrip('/')} {self.model}"


def upstream_engines(config: UpstreamConfig) -> dict[str, UpstreamEngine]:
    """The engines by name, not started. Limits are per key, so each key is an engine with its own."""
    host = urlsplit(config.url).netloc
    return {f"{host}#{number}": _engine(config, key) for number, key in enumerate(config.keys or (None,))}


def upstream_format(config: UpstreamConfig) -> Format:
    """Blocks while a vocabulary is read. Raises `VocabularyError`."""
    if config.api == "chat":
        return MessagesFormat(DIALECTS[config.dialect])
    if config.api == "responses":
        return ResponsesFormat(RESPONSES_DIALECTS[config.dialect], config.origin)
    return (
        harmony_format(harmony_tokenizer()) if config.path is None else choose_format(Path(config.path), config.format)
    )


def _engine(config: UpstreamConfig, key: str | None) -> UpstreamEngine:
    ours = config.api == "ids" or config.dialect.startswith("cerebras")
    pool = UpstreamPool(
        config.url,
        key,
        headers=cerebras.INTEGRATION if ours else None,
        deadlines=config.deadlines,
        warmth=cerebras.WARMTH if ours else None,
        connections=config.connections,
    )
    if config.api == "ids":
        endpoint = UpstreamEndpoint(pool, config.model, cerebras.PATH)
        return CerebrasEngine(endpoint, config.max_output_tokens or cerebras.MAX_TOKENS)
    if config.api == "responses":
        endpoint = UpstreamEndpoint(pool, config.model, responses.PATH)
        dialect = RESPONSES_DIALECTS[config.dialect]
        return ResponsesEngine(endpoint, dialect, config.origin, config.max_output_tokens)
    endpoint = UpstreamEndpoint(pool, config.model, chat.PATH)
    most = config.max_output_tokens or (cerebras.MAX_TOKENS if ours else None)
    return ChatEngine(endpoint, DIALECTS[config.dialect], most)
