"""The models an actor can serve, resolved once and reused while it lives.

A model is its chat format (bound to its tokenizer), its limits and the engines behind it. Loading one may take seconds
(the tokenizer comes from an engine replica that may still be starting), so it happens in the background and a turn
waits for it with a deadline.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from actors.engines import EnginePool
from gateway.protocol.errors import ApiError
from inference.engine import EngineError
from inference.formats.format import Format

log = logging.getLogger(__name__)

ANY_NAME = "*"


@dataclass(frozen=True, slots=True)
class Model:
    """One servable model. `context_length` counts prompt and output tokens; `max_output_tokens` caps one response
    (None: only the context does). `fallback` is the model that answers when no engine of this one can. `primes`: a
    warm-up has the engine compute its prefix, which upstreams would charge for."""

    name: str
    format: Format
    context_length: int
    engines: EnginePool
    max_output_tokens: int | None = None
    fallback: str | None = None
    primes: bool = True


Loader = Callable[[], Awaitable[Model]]


class ModelTable:
    """Models by name and alias; an alias `ANY_NAME` is what every unknown name means.

    `patience_s` bounds how long a turn waits for a model that is still loading.
    """

    def __init__(self, loaders: Mapping[str, Loader], aliases: Mapping[str, str], patience_s: float) -> None:
        self._loaders = dict(loaders)
        self._aliases = dict(aliases)
        self._patience_s = patience_s
        self._loading: dict[str, asyncio.Task[Model]] = {}
        self._ready: dict[str, Model] = {}

    def start(self) -> None:
        """Begin to load every model. Call from the event loop that will use them."""
        for name, loader in self._loaders.items():
            self._loading[name] = asyncio.create_task(self._load(name, loader), name=f"load-model-{name}")

    async def close(self) -> None:
        """Stop loading and let go of the engines."""
        for task in self._loading.values():
            task.cancel()
        await asyncio.gather(*self._loading.values(), return_exceptions=True)
        for model in self._ready.values():
            await model.engines.close()

    def loaded(self) -> dict[str, Model]:
        """The models that are there, by their own names."""
        return dict(self._ready)

    def names(self) -> list[str]:
        """Model names for `GET /models`; the wildcard is not a name."""
        return [name for name in (*self._loaders, *self._aliases) if name != ANY_NAME]

    def knows(self, name: str) -> bool:
        """Whether a request for this name can be served."""
        return name in self._loaders or name in self._aliases or ANY_NAME in self._aliases

    @property
    def ready(self) -> bool:
        """Every model is loaded and has an engine that takes turns."""
        return len(self._ready) == len(self._loaders) and all(model.engines.usable for model in self._ready.values())

    async def resolve(self, name: str) -> Model:
        """The model behind a name. Raises `ApiError`: model_not_found, or engine_unavailable while it is loading."""
        key = name if name in self._loaders else self._aliases.get(name) or self._aliases.get(ANY_NAME, name)
        ready = self._ready.get(key)
        if ready is not None:
            return ready
        if key not in self._loaders:
            offered = ", ".join(sorted(self.names())) or "none"
            raise ApiError("model_not_found", f"The model '{name}' does not exist. Models here: {offered}.", "model")
        try:
            async with asyncio.timeout(self._patience_s):
                return await asyncio.shield(self._loading[key])
        except TimeoutError:
            raise ApiError(
                "engine_unavailable", f"The model '{name}' is still loading; try again shortly.", "model", 5
            ) from None

    async def _load(self, name: str, loader: Loader) -> Model:
        delay = 0.5
        while True:
            try:
                model = await loader()
            except EngineError as error:
                log.info("model %s is not ready: %s", name, error.message)
            except Exception:
                log.exception("loading model %s failed; trying again", name)
            else:
                self._ready[name] = model
                return model
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)
