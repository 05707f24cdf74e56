"""Session actors without a gateway, alone or as peers that pickle what they ask each other."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from functools import cache
from typing import Any

from actors.engines import Endpoint, EnginePool
from actors.models import ANY_NAME, Model, ModelTable
from actors.session import SessionActor
from gateway.protocol.requests import CreateRequest, parse_create
from inference.engine import Chunk, Engine
from inference.formats.chatml import chatml_format
from inference.formats.format import Format
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.engines import PlannedEngine

TENANT = "t"


@cache
def chat() -> Format:
    """Read once: the vocabulary takes half a second."""
    return chatml_format(scripted_tokenizer())


def says(words: str, pause: float | None = None) -> PlannedEngine:
    """An engine that answers this, with a pause after each token."""
    tokenizer = scripted_tokenizer()
    plan: list[Any] = []
    for token in unpack_ids(tokenizer.encode(words)):
        plan.append(Chunk([token], cached_tokens=0))
        if pause is not None:
            plan.append(pause)
    return PlannedEngine([*plan, Chunk([tokenizer.special("<|im_end|>")], finish="stop")])


def asked(text: str = "hi", **fields: Any) -> CreateRequest:
    """A request over HTTP."""
    body: Mapping[str, Any] = {"model": "m", "input": text, **fields}
    return parse_create(body, transport="http")


@asynccontextmanager
async def actor(engine: Engine, owner: str = "0123abcd", **options: Any) -> AsyncIterator[SessionActor]:
    """One actor in front of this engine, until the block ends."""

    async def discover() -> list[Endpoint]:
        return [Endpoint("only", "127.0.0.1", 0)]

    async def load() -> Model:
        pool = EnginePool(discover, lambda _: engine, refresh_s=3600, patience_s=0)
        await pool.start()
        return Model("m", chat(), 100_000, pool)

    made = SessionActor(ModelTable({"m": load}, {ANY_NAME: "m"}, 5.0), owner, **options)
    made.models.start()
    try:
        yield made
    finally:
        await made.close()


class Network:
    """The peers of each actor are all of them. What travels is pickled, as Ray does."""

    def __init__(self) -> None:
        self.actors: list[SessionActor] = []
        self.asked: list[str] = []

    async def ask(self, operation: str, args: tuple[Any, ...]) -> list[Any]:
        self.asked.append(operation)
        sent = pickle.dumps(args)
        answers = await asyncio.gather(
            *(each.peers.answer(operation, pickle.loads(sent)) for each in self.actors), return_exceptions=True
        )
        return [pickle.loads(pickle.dumps(answer)) for answer in answers]


@asynccontextmanager
async def two_actors(engine: Engine, **options: Any) -> AsyncIterator[tuple[SessionActor, SessionActor, Network]]:
    """Two actors that are peers, in front of one engine."""
    network = Network()
    async with (
        actor(engine, "aaaaaaaa", peers=network, **options) as one,
        actor(engine, "bbbbbbbb", peers=network, **options) as two,
    ):
        network.actors = [one, two]
        yield one, two, network


async def run_turn(actor: SessionActor, request: CreateRequest, tenant: str = TENANT) -> dict[str, Any]:
    """One turn to its end; its Response object."""
    import json

    last = None
    async for events in actor.open(tenant).turn(request, None).run():
        last = events[-1]
    assert last is not None
    found: dict[str, Any] = json.loads(last.data)["response"]
    return found
