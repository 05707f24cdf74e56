"""What engines at an upstream have in common: all of them, and those whose prompt is JSON text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from gateway.protocol.deltas import Delta
from inference.engine import Chunk, Counted, EngineError, Finish, Generation, Guide, Load
from inference.formats.jsontext import UpstreamRequest, request_body
from inference.upstream.admission import Need, need_of
from inference.upstream.bodies import Body, compress
from inference.upstream.dialects import Encoding
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.errors import UpstreamError
from inference.upstream.pool import Progress

USUAL_TOKENS = 1024
"""Of an answer without a bound: nothing is reserved for it there, so to count all that it could have would only keep
requests waiting for a whole rate limit."""


class UpstreamEngine(ABC):
    """`inference.engine.Engine` for one model at one endpoint."""

    def __init__(self, endpoint: UpstreamEndpoint) -> None:
        self._endpoint = endpoint

    async def start(self) -> None:
        """Open connections and look whether the model is there. Raises `EngineError`."""
        await self._endpoint.start()

    @abstractmethod
    def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. The usage comes with the last chunk, the cached part of the prompt too."""

    def refusal(self, generation: Generation) -> UpstreamError | None:
        """Why this would be refused now, as far as is known here: to be told before a response is created."""
        return self._endpoint.refusal(self._need(generation))

    async def check(self, guide: Guide) -> None:  # noqa: ARG002  none is ever made
        """See `Engine.check`. What an upstream that renders itself holds its output to is part of the request."""
        raise EngineError("invalid", "This model's upstream takes no constraint of the gateway's making.")

    async def load(self) -> Load:
        return self._endpoint.load()

    async def check_health(self) -> None:
        await self._endpoint.check_health()

    async def close(self) -> None:
        await self._endpoint.pool.close()

    @abstractmethod
    def _need(self, generation: Generation) -> Need:
        """What the upstream's rate limits will take it to cost."""


class AnswerReader(Progress, Protocol):
    """Reads the events of one answer."""

    counted: Counted | None

    @property
    def full(self) -> bool:
        """Nothing more is wanted: the request is to be aborted."""
        ...

    def read(self, chunks: Sequence[Mapping[str, Any]]) -> list[Delta]:
        """The deltas of these events. Raises `UpstreamError`."""
        ...

    def finish(self) -> tuple[list[Delta], Finish]:
        """The stream is over: what was held back, and how the answer ended. Raises `UpstreamError` if it did not."""
        ...


class TextEngine(UpstreamEngine):
    """For prompts of one of `inference.formats.jsontext`'s formats: the objects of the token cache go out as they are,
    without being parsed again. The upstream renders, parses and counts; its output comes as deltas.

    Args:
        endpoint: with the model as the upstream calls it.
        prompt: the field of a request that the prompt is.
        encoding: of request bodies.
        max_tokens: most that one answer may have; None leaves it to each request and the model's context.
    """

    def __init__(self, endpoint: UpstreamEndpoint, prompt: str, encoding: Encoding, max_tokens: int | None) -> None:
        super().__init__(endpoint)
        self._prompt = prompt
        self._encoding = encoding
        self._max_tokens = max_tokens

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """See `Engine.generate`. No ids: deltas in each chunk, the usage in the last, if the upstream gives it."""
        request = upstream_request(generation)
        again: Generation | None = generation
        while again is not None:
            reader, started = self._reader(request), False
            body = await self._body(again, request)
            try:
                async with aclosing(self._endpoint.ask(body, self._need(again), reader)) as batches:
                    async for batch in batches:
                        if deltas := reader.read(batch):
                            started = True
                            yield Chunk([], deltas=deltas)
                        if reader.full:
                            break
                deltas, finish = reader.finish()
            except UpstreamError as error:
                self._endpoint.failed(error)  # of what only the reader has seen, too
                again = None if started else self._amended(again, error)
                if again is None:
                    raise
                continue
            usage = reader.counted
            yield Chunk([], finish, None if usage is None else usage.cached_tokens, deltas=deltas, counted=usage)
            return

    def _amended(self, generation: Generation, error: UpstreamError) -> Generation | None:  # noqa: ARG002
        """What to ask instead, where only a part of it was refused."""
        return None

    async def _body(self, generation: Generation, request: UpstreamRequest) -> Body:
        content = request_body(self._prompt, generation.parts, request, self._options(generation))
        return await compress(content, "application/json", self._encoding)

    @abstractmethod
    def _options(self, generation: Generation) -> dict[str, Any]:
        """The fields of the request that are neither its prompt nor its `UpstreamRequest`. Raises `UpstreamError`."""

    @abstractmethod
    def _reader(self, request: UpstreamRequest) -> AnswerReader:
        """For one answer."""

    def _most(self, generation: Generation) -> int | None:
        """The bound on the answer that is sent: None if nobody asked for one, as servers know best what they can."""
        sampling = generation.sampling
        if self._max_tokens is not None:
            return min(sampling.max_tokens, self._max_tokens)
        return sampling.max_tokens if sampling.bounded else None

    def _need(self, generation: Generation) -> Need:
        return need_of(
            generation, self._most(generation) or USUAL_TOKENS, len(upstream_request(generation).fields) // 4
        )


def upstream_request(generation: Generation) -> UpstreamRequest:
    """What the generation's format has put beside the prompt."""
    if not isinstance(generation.parsing, UpstreamRequest):
        raise TypeError("this upstream takes prompts of JSON text only")
    return generation.parsing


def without_logprobs() -> UpstreamError:
    """The refusal of log-probabilities where an upstream has none."""
    return UpstreamError("invalid", "unsupported_parameter", "This model's upstream gives no log-probabilities.")
