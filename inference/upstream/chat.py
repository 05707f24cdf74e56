"""Any upstream that speaks OpenAI's chat completions, by the dialect it speaks."""

from __future__ import annotations

from typing import Any

from inference.engine import Generation
from inference.formats.jsontext import UpstreamRequest
from inference.upstream.chat_reader import ChatReader
from inference.upstream.dialects import Dialect
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.engines import TextEngine, without_logprobs

PATH = "chat/completions"


class ChatEngine(TextEngine):
    """`inference.engine.Engine` for one model, for prompts of `MessagesFormat` in the same dialect only."""

    def __init__(self, endpoint: UpstreamEndpoint, dialect: Dialect, max_tokens: int | None = None) -> None:
        super().__init__(endpoint, "messages", dialect.encoding, max_tokens)
        self._dialect = dialect

    def _options(self, generation: Generation) -> dict[str, Any]:
        dialect, sampling = self._dialect, generation.sampling
        options: dict[str, Any] = {
            "model": self._endpoint.model,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
        }
        if (most := self._most(generation)) is not None:
            options[dialect.max_tokens] = most
        if dialect.usage_option:
            options["stream_options"] = {"include_usage": True}
        if dialect.salt is not None and generation.cache_salt is not None:
            options[dialect.salt] = generation.cache_salt
        if sampling.logprobs is not None:
            if not dialect.logprobs:
                raise without_logprobs()
            options |= {"logprobs": True, "top_logprobs": sampling.logprobs}
        return options

    def _reader(self, request: UpstreamRequest) -> ChatReader:
        return ChatReader(self._dialect, request.names, one_call=request.one_call)
