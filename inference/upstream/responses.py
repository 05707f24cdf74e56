"""Any upstream that speaks the Responses API over HTTP, by the dialect it speaks. It stores nothing."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import orjson

from inference.engine import Generation
from inference.formats.jsontext import UpstreamRequest, run_of
from inference.upstream.dialects import ResponsesDialect
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.engines import TextEngine
from inference.upstream.errors import UpstreamError
from inference.upstream.responses_reader import ResponsesReader

log = logging.getLogger(__name__)

PATH = "responses"
UNOPENED = "invalid_encrypted_content"
LEAST_TOKENS = 16
"""The API's own minimum of `max_output_tokens`."""


class ResponsesEngine(TextEngine):
    """`inference.engine.Engine` for one model, for prompts of `ResponsesFormat` in the same dialect and of the same
    `origin` only."""

    def __init__(
        self, endpoint: UpstreamEndpoint, dialect: ResponsesDialect, origin: str, max_tokens: int | None = None
    ) -> None:
        super().__init__(endpoint, "input", dialect.encoding, max_tokens)
        self._dialect = dialect
        self._origin = origin

    def _options(self, generation: Generation) -> dict[str, Any]:
        dialect, sampling = self._dialect, generation.sampling
        options: dict[str, Any] = {"model": self._endpoint.model, "stream": True, "store": False}
        if (most := self._most(generation)) is not None:
            options["max_output_tokens"] = max(most, LEAST_TOKENS)
        wishes = {"temperature": sampling.temperature, "top_p": sampling.top_p}
        options |= {name: value for name, value in wishes.items() if dialect.defaults or value != 1}
        include = ["reasoning.encrypted_content"] if dialect.thoughts == "sealed" else []
        if sampling.logprobs is not None:
            include.append("message.output_text.logprobs")
            options["top_logprobs"] = sampling.logprobs
        if include:
            options["include"] = include
        if dialect.salt is not None and generation.cache_salt is not None:
            options[dialect.salt] = generation.cache_salt
        return options

    def _amended(self, generation: Generation, error: UpstreamError) -> Generation | None:
        """Without the thoughts that were sealed there, if it can't open them any more: another organization's key, or
        one of its own that is gone. The answer may be worse; without it the conversation could not go on at all."""
        if error.word != UNOPENED:
            return None
        items = orjson.loads(b"[" + generation.prompt.rstrip(b", ") + b"]")
        kept = [item for item in items if "encrypted_content" not in item]
        if len(kept) == len(items):
            return None
        log.warning("an upstream could not open %d thoughts of its own: asked again without", len(items) - len(kept))
        return replace(generation, parts=(run_of(kept),), known=None)

    def _reader(self, request: UpstreamRequest) -> ResponsesReader:
        return ResponsesReader(self._origin, request.names, one_call=request.one_call)
