"""One model at one upstream: what all kinds of engine ask. Admission, errors in the stream, health."""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson

from inference.engine import EngineError, Load
from inference.upstream.admission import Admission, Need
from inference.upstream.bodies import Body
from inference.upstream.errors import UpstreamError, stream_error, unreadable
from inference.upstream.pool import STEADY, Progress, UpstreamPool

log = logging.getLogger(__name__)

MODELS_TIMEOUT_S = 10.0


class UpstreamEndpoint:
    """Asks for answers of `model`, as the upstream calls it, at `path`.

    Limits are per organization and model, so endpoints that share a key and a model should share `admission`.
    """

    def __init__(self, pool: UpstreamPool, model: str, path: str, admission: Admission | None = None) -> None:
        self.pool = pool
        self.model = model
        self.admission = admission or Admission()
        self._path = path
        self._running = 0

    async def start(self) -> None:
        """Open connections and look whether the model is there. Raises `EngineError`."""
        await self.pool.start()
        names = await self.models()
        if self.model not in names:
            offered = ", ".join(names[:20]) or "none"
            raise EngineError("unavailable", f"The upstream has no model {self.model}; it has {offered}.")

    async def models(self) -> list[str]:
        """The models that the upstream lists. Raises `EngineError`."""
        found = await self.pool.get("models", MODELS_TIMEOUT_S)
        entries = found.get("data") if isinstance(found, dict) else found
        if not isinstance(entries, list):
            raise unreadable()
        return [entry["id"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("id"), str)]

    async def check_health(self) -> None:
        """Raises `EngineError` when the upstream does not answer."""
        await self.models()

    def load(self) -> Load:
        """What runs here; what waits there is not known."""
        return Load(self._running, 0)

    def refusal(self, need: Need) -> UpstreamError | None:
        """Why the upstream would refuse this now; None if it is worth asking."""
        wait = self.admission.wait(need, time.monotonic())
        if wait <= 0:
            return None
        message = f"The upstream's rate limit leaves no room for this request; try again in {math.ceil(wait)} s."
        return UpstreamError("overloaded", "rate_limit_exceeded", message, wait)

    def failed(self, error: UpstreamError) -> None:
        """Take notice of a refusal, which may also be inside an answer."""
        if error.status == 429:
            self.admission.refused(error.retry_after_s, time.monotonic())

    async def ask(
        self, body: Body, need: Need, progress: Progress = STEADY
    ) -> AsyncGenerator[list[Mapping[str, Any]], None]:
        """The chunks of one answer, those together that came together. Raises `UpstreamError`, also for a chunk that is
        an error; what came with it and before it has been yielded. `progress` is as in `UpstreamPool.events`."""
        admission = self.admission
        if (refused := self.refusal(need)) is not None:
            raise refused
        ticket = admission.reserve(need)

        def observe(_status: int, headers: Mapping[str, str]) -> None:
            admission.observe(headers, time.monotonic(), time.time())
            admission.release(ticket)

        self._running += 1
        try:
            async with aclosing(self.pool.events(self._path, body, observe, progress)) as batches:
                async for batch in batches:
                    chunks, error = _parsed(batch)
                    if chunks:
                        yield chunks
                    if error is not None:
                        raise error
        except UpstreamError as error:
            self.failed(error)
            raise
        finally:
            self._running -= 1
            admission.release(ticket)


def _parsed(batch: list[bytes]) -> tuple[list[Mapping[str, Any]], UpstreamError | None]:
    """The chunks up to the first error, and that."""
    chunks: list[Mapping[str, Any]] = []
    for data in batch:
        try:
            chunk = _loads(data)
        except ValueError:
            return chunks, unreadable()
        if not isinstance(chunk, dict):
            return chunks, unreadable()
        if (found := stream_error(chunk, time.time())) is not None:
            error, detail = found
            log.warning("an upstream broke off with an error (code %s, type %s)", detail.code, detail.type)
            return chunks, error
        chunks.append(chunk)
    return chunks, None


def _loads(data: bytes) -> Any:
    """JSON, with lone surrogates too: servers that cut text by UTF-16 units send such."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return json.loads(data)
