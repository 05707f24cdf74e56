"""Cerebras by token ids: the token cache feeds it as it feeds vLLM, and ids come back.

`POST /v1/completions` takes a prompt of ids and, with `return_raw_tokens`, answers in ids. It knows neither tools nor
stop ids: the model's chat format renders and parses, and sampling ends here, at the first id of `stop_token_ids`. Its
`grammar_root` is not documented well enough to hold anybody to it, so constraints are refused.

Source: cerebras.md; cerebras-cloud-sdk 1.91.0, types/completion_create_params.py and types/completion.py.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from inference.engine import Chunk, Counted, EngineError, Finish, Generation, Guide, Sampling
from inference.tokenizer import unpack_ids
from inference.upstream.admission import Need, need_of
from inference.upstream.bodies import encode
from inference.upstream.dialects import Encoding
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.engines import UpstreamEngine
from inference.upstream.errors import broken_off, filtered, unreadable
from inference.upstream.pool import Warmth
from inference.upstream.usage import Timings, UsageShape, counted

PATH = "completions"
INTEGRATION = {"x-cerebras-3rd-party-integration": "limpet"}
WARMTH = Warmth("tcp_warming")
MAX_TOKENS = 16_384
"""Cerebras reserves what a request may sample at most, so asking for a whole context trips its rate limit at once."""

ENCODING = Encoding("msgpack", gzip_above=8_192)

_USAGE = UsageShape()


class CerebrasEngine(UpstreamEngine):
    """`inference.engine.Engine` for one model. `timings` adds up what Cerebras says its answers took.

    Args:
        endpoint: of `PATH`, with the model as Cerebras calls it.
        max_tokens: most that one answer may sample; a request that wants more is cut there, as by its own limit.
        encoding: of request bodies.
    """

    def __init__(self, endpoint: UpstreamEndpoint, max_tokens: int = MAX_TOKENS, encoding: Encoding = ENCODING) -> None:
        super().__init__(endpoint)
        self._max_tokens = max_tokens
        self._encoding = encoding
        self.timings = Timings()

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. The usage comes with the last chunk, the cached part of the prompt too."""
        sampling = generation.sampling
        if sampling.guide is not None:
            await self.check(sampling.guide)
        if sampling.logprobs is not None:
            raise EngineError("invalid", "This model's upstream gives no log-probabilities by token id.")
        ids = unpack_ids(generation.prompt)
        body = await encode(self._fields(ids, sampling), self._encoding)
        reader = _Reader(sampling.stop_token_ids)
        begun = time.monotonic()
        async with aclosing(self._endpoint.ask(body, self._need(generation))) as batches:
            async for batch in batches:
                if new := reader.read(batch):
                    yield Chunk(new)
                if reader.overrun:
                    break
        last = reader.last()
        self.timings.add(reader.time_info, time.monotonic() - begun)
        yield last

    async def check(self, guide: Guide) -> None:  # noqa: ARG002  none can be held
        """See `Engine.check`."""
        raise EngineError(
            "invalid",
            "This model's upstream can't hold its output to a schema, a grammar or a choice of tools; use tool_choice "
            "auto or none, parallel calls, functions that are not strict, and no text format.",
        )

    def _need(self, generation: Generation) -> Need:
        return need_of(generation, min(generation.sampling.max_tokens, self._max_tokens))

    def _fields(self, ids: list[int], sampling: Sampling) -> dict[str, Any]:
        return {
            "model": self._endpoint.model,
            "prompt": ids,
            "max_tokens": min(sampling.max_tokens, self._max_tokens),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_raw_tokens": True,
        }


class _Reader:
    """Reads one answer's chunks. `overrun`: the model went on behind a stop id, so nothing more is wanted."""

    def __init__(self, stops: Sequence[int]) -> None:
        self._stops = stops
        self._stop_set = frozenset(stops)
        self._stopped = False
        self._said = False
        self.overrun = False
        self.time_info: Any = None
        self._reason: str | None = None
        self._counted: Counted | None = None

    def read(self, chunks: Sequence[Mapping[str, Any]]) -> list[int]:
        """The new ids, up to the stop id. Raises `UpstreamError` for text without ids."""
        out: list[int] = []
        for chunk in chunks:
            if chunk.get("usage"):
                self._counted = counted(chunk, _USAGE)
            self.time_info = chunk.get("time_info") or self.time_info
            choices = chunk.get("choices")
            if not isinstance(choices, list) or not choices or not isinstance(choices[0], dict):
                continue
            choice = choices[0]
            self._reason = choice.get("finish_reason") or self._reason
            tokens = choice.get("tokens")
            if tokens:
                self._take(tokens, out)
            elif choice.get("text") and not self._said:
                raise unreadable()
        return out

    def last(self) -> Chunk:
        """The stream is over. Raises `UpstreamError` if the answer is not.

        An answer that ended by itself ends with a stop id: one that Cerebras did not deliver is put there, the first,
        as only then do parsers know a call to be whole.
        """
        finish: Finish = "stop"
        if not self._stopped:
            if self._reason is None:
                raise broken_off()
            if self._reason == "content_filter":
                raise filtered()
            finish = "length" if self._reason == "length" else "stop"
        missing = list(self._stops[:1]) if finish == "stop" and not self._stopped else []
        cached = None if self._counted is None else self._counted.cached_tokens
        return Chunk(missing, finish, cached, counted=self._counted)

    def _take(self, tokens: Any, out: list[int]) -> None:
        if not isinstance(tokens, list):
            raise unreadable()
        self._said = True
        if self._stopped:
            self.overrun = True
            return
        if self._stop_set.isdisjoint(tokens):
            out += tokens
            return
        at = next(at for at, token in enumerate(tokens) if token in self._stop_set)
        out += tokens[: at + 1]
        self._stopped = True
        self.overrun = at + 1 < len(tokens)
