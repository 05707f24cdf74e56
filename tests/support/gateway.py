"""A whole gateway in the test's own loop: real uvicorn, real sockets, real session actor; only the engine is given."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

import uvicorn
from websockets.asyncio.client import ClientConnection, connect

from actors.engines import Endpoint, EnginePool
from actors.models import ANY_NAME, Loader, Model, ModelTable
from actors.session import SessionActor
from gateway.asgi import build_asgi, uvicorn_options
from gateway.gateway import Gateway
from gateway.settings import Settings
from inference.engine import Engine
from inference.formats.chatml import chatml_format
from inference.formats.format import Format
from inference.tokenizer import scripted_tokenizer

OWNER = "0123abcd"
TERMINALS = ("response.completed", "response.incomplete", "response.failed", "error")


class Running:
    """Where the gateway listens, and its insides for assertions."""

    def __init__(self, port: int, gateway: Gateway, engine: Engine) -> None:
        self.port = port
        self.gateway = gateway
        self.engine = engine

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/responses"

    def connect(self, **options: Any) -> connect:
        return connect(self.ws, max_size=None, **options)


@cache
def _chat() -> Format:
    """Read once: the vocabulary takes half a second."""
    return chatml_format(scripted_tokenizer())


@asynccontextmanager
async def gateway(
    engine: Engine,
    settings: Mapping[str, Any] | None = None,
    models: Sequence[str] | None = None,
    context_length: int = 1_000_000,
    formats: Mapping[str, Format] | None = None,
    loaders: Mapping[str, Loader] | None = None,
    fallback: str | None = None,
) -> AsyncIterator[Running]:
    """Serve `engine` under the given model names, by default any, until the block ends; all is then closed. `loaders`
    add models of their own; `fallback` is one of these."""
    names, aliases = (models, {}) if models is not None else (("m",), {ANY_NAME: "m"})

    async def discover() -> list[Endpoint]:
        return [Endpoint("only", "127.0.0.1", 0)]

    def loader(name: str) -> Loader:
        async def load() -> Model:
            pool = EnginePool(discover, lambda _: engine, refresh_s=3600, patience_s=0)
            await pool.start()
            return Model(name, (formats or {}).get(name) or _chat(), context_length, pool, fallback=fallback)

        return load

    configured = Settings.model_validate(settings or {})
    table = ModelTable({**{name: loader(name) for name in names}, **(loaders or {})}, aliases, 5.0)
    actor = SessionActor(table, OWNER, configured.limits.kept_responses_per_lane)
    actor.models.start()
    edge = Gateway(configured, actor)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(build_asgi(edge), log_level="warning", lifespan="off", **uvicorn_options(configured))
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve([listener]))
        while not server.started:  # noqa: ASYNC110 - uvicorn offers nothing to wait for
            await asyncio.sleep(0.005)
        try:
            yield Running(listener.getsockname()[1], edge, engine)
        finally:
            await edge.drain(1001, "test over")
            server.should_exit = True
            await serving
            await actor.close()


async def create(ws: ClientConnection, **body: Any) -> None:
    """Send one `response.create`."""
    await ws.send(json.dumps({"type": "response.create", "model": "m", "store": False, **body}))


async def receive(ws: ClientConnection) -> dict[str, Any]:
    """The next event, within a bound."""
    message = await asyncio.wait_for(ws.recv(), 30)
    assert isinstance(message, str)
    event: dict[str, Any] = json.loads(message)
    return event


async def until_terminal(ws: ClientConnection) -> list[dict[str, Any]]:
    """All events up to and with the next terminal one."""
    events = [await receive(ws)]
    while events[-1]["type"] not in TERMINALS:
        events.append(await receive(ws))
    return events


async def turn(ws: ClientConnection, **body: Any) -> list[dict[str, Any]]:
    """Create, and all its events."""
    await create(ws, **body)
    return await until_terminal(ws)


def text(events: Sequence[Mapping[str, Any]]) -> str:
    """The visible text that was streamed."""
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
