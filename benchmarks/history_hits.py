"""An agent loop on a real engine, and what of its prompts the engine's prefix cache had and could have had."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from actors.engines import Endpoint, EnginePool
from actors.models import Model, ModelTable
from actors.session import Session, SessionActor
from benchmarks.history_formats import TOOL, ForcedChat
from gateway.protocol.requests import parse_create
from inference.engine import Chunk, Engine, Generation, Guide, Load
from inference.formats.chatml import ChatMLOptions
from inference.tokenizer import load_tokenizer, unpack_ids

BLOCK = 32
"""Tokens in a block of the engine's KV cache, as `VllmConfig` sets it on a CPU."""
QUESTIONS = (0, 8, 15)
"""Turns that begin with words of the user, at which the template forgets the thoughts before."""
_TOOLS = [
    {
        "type": "function",
        "name": TOOL,
        "description": "Show a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]


@dataclass(slots=True)
class Served:
    """One turn as the engine saw it, and the types of the items that came of it."""

    prompt: list[int]
    sampled: list[int] = field(default_factory=list)
    cached: int | None = None
    output: tuple[str, ...] = ()


def possible(previous: Served | None, prompt: Sequence[int]) -> int:
    """The most tokens of a prompt that can be cached: all full blocks that it shares with the prompt before and what
    was sampled after it. The id sampled last was never computed with, and a prompt's last id always is."""
    if previous is None:
        return 0
    computed = previous.prompt + previous.sampled[:-1]
    pairs = enumerate(zip(computed, prompt, strict=False))
    shared = next((at for at, (one, other) in pairs if one != other), min(len(computed), len(prompt)))
    return min(shared, len(prompt) - 1) // BLOCK * BLOCK


async def tool_loop(engine: Engine, checkpoint: Path, context_length: int, turns: int = 20) -> list[Served]:
    """An agent's turns, one after the other, each with a thought and several calls whose outputs the next one brings.
    The checkpoint is a ChatML one; its template is taken for one that shows thoughts until the user speaks again."""
    watched = _WatchedEngine(engine)

    async def discover() -> list[Endpoint]:
        return [Endpoint("only", "", 0)]

    async def load() -> Model:
        pool = EnginePool(discover, lambda _: watched, refresh_s=3600)
        await pool.start()
        chat = ForcedChat(load_tokenizer(checkpoint), ChatMLOptions(thinking=True, keeps_round=True))
        return Model("m", chat, context_length, pool)

    actor = SessionActor(ModelTable({"m": load}, {}, 60.0), "00000000")
    actor.models.start()
    try:
        session = actor.open(secrets.token_hex(8))  # a tenant whose prompts the engine has not seen
        response: dict[str, Any] = {"id": None, "output": []}
        for turn in range(turns):
            given: list[dict[str, Any]] = [_result(item, turn) for item in response["output"] if "call_id" in item]
            if turn in QUESTIONS:
                given.append({"role": "user", "content": f"Find the bug number {turn}."})
            response = await _answer(session, given, response["id"])
            watched.seen[-1].output = tuple(item["type"] for item in response["output"])
    finally:
        await actor.close()
    return watched.seen


def _result(call: dict[str, Any], turn: int) -> dict[str, Any]:
    words = f"{json.loads(call['arguments'])['path']}: nothing in turn {turn}."
    return {"type": "function_call_output", "call_id": call["call_id"], "output": words}


async def _answer(session: Session, given: list[dict[str, Any]], previous: str | None) -> dict[str, Any]:
    body = {"model": "m", "store": False, "tools": _TOOLS, "temperature": 1.0, "input": given}
    request = parse_create(body | {"previous_response_id": previous}, transport="websocket")
    last = None
    async with aclosing(session.turn(request, None).run()) as batches:
        async for events in batches:
            last = events[-1]
    assert last is not None
    answer: dict[str, Any] = json.loads(last.data)["response"]
    if answer["status"] != "completed":
        raise RuntimeError(f"a turn ended as {answer['status']}: {answer['error'] or answer['incomplete_details']}")
    return answer


class _WatchedEngine:
    """An engine of somebody else's, which stays open, and what it was asked."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.seen: list[Served] = []

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        served = Served(unpack_ids(generation.prompt))
        self.seen.append(served)
        async for chunk in self._engine.generate(generation):
            served.sampled += chunk.ids
            served.cached = chunk.cached_tokens if served.cached is None else served.cached
            yield chunk

    async def check(self, guide: Guide) -> None:
        await self._engine.check(guide)

    async def load(self) -> Load:
        return await self._engine.load()

    async def check_health(self) -> None:
        await self._engine.check_health()

    async def close(self) -> None:
        """Nothing: it isn't ours."""
