"""Engines that say something else each time, and what a client must see of it whatever it does meanwhile."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed

from inference.detokenizer import Detokenizer
from inference.engine import Chunk, EngineError, Generation
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.engines import PlannedEngine
from tests.support.gateway import TERMINALS, Running, receive

TOKENIZER = scripted_tokenizer()
END = TOKENIZER.special("<|im_end|>")
SILENCE = 60.0
"""Longer than any test: the model says nothing more until it is stopped."""
FUNCTION = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'


class Gate(asyncio.Event):
    """The model goes on when the test opens it."""


Step = Chunk | EngineError | Gate | float


def ids_of(text: str) -> list[int]:
    """Sampled ids of a text; markup is a control token where the vocabulary has it as one."""
    ids: list[int] = []
    for piece in filter(None, re.split(r"(</?tool_call>)", text)):
        known = piece.startswith(("<tool_call", "</tool_call")) and TOKENIZER.has_special(piece)
        ids += [TOKENIZER.special(piece)] if known else unpack_ids(TOKENIZER.encode(piece))
    return ids


def plan(*parts: str | Step, end: bool = True) -> list[Step]:
    """Texts, token by token, with pauses and faults between; then a proper end."""
    steps: list[Step] = []
    for part in parts:
        steps += [Chunk([token], cached_tokens=0) for token in ids_of(part)] if isinstance(part, str) else [part]
    return [*steps, Chunk([END], finish="stop")] if end else steps


class Plans(PlannedEngine):
    """The first generation plays the first plan, and so on; the last one is played again and again."""

    def __init__(self, *plans: Sequence[Step]) -> None:
        super().__init__(())
        self.plans = list(plans)
        self.running = 0

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        self.plan = self.plans.pop(0) if len(self.plans) > 1 else self.plans[0]  # type: ignore[assignment]
        self.running += 1
        try:
            async with aclosing(super().generate(generation)) as chunks:
                async for chunk in chunks:
                    if isinstance(chunk, Gate):
                        await asyncio.wait_for(chunk.wait(), 20)
                    else:
                        yield chunk
        finally:
            self.running -= 1


def words(prompt: bytes) -> str:
    """A prompt as text, control tokens by their names: sampled ids need not be those of the same text rendered."""
    detokenizer = Detokenizer(TOKENIZER, {TOKENIZER.special(name) for name in ("<|im_start|>", "<|im_end|>")})
    return "".join(detokenizer.step(token) for token in unpack_ids(prompt))


async def until(ws: ClientConnection, *kinds: str) -> list[dict[str, Any]]:
    """Events up to the first of these kinds (without `response.`)."""
    events = [await receive(ws)]
    while events[-1]["type"].removeprefix("response.") not in kinds:
        events.append(await receive(ws))
    return events


async def until_closed(ws: ClientConnection, code: int) -> list[dict[str, Any]]:
    """Events up to the close, which has this code."""
    events: list[dict[str, Any]] = []
    with suppress(ConnectionClosed):
        while True:
            events.append(await receive(ws))
    assert ws.close_code == code
    return events


def types(events: Sequence[dict[str, Any]]) -> list[str]:
    """Their types, without `response.` and without the steps of an item's text."""
    small = re.compile(r"content_part|\.delta$|_text\.done|arguments\.done|in_progress")
    return [event["type"].removeprefix("response.") for event in events if not small.search(event["type"])]


def check_response(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One whole response: numbers without a gap, items that are opened and closed in order, one terminal event whose
    output is what was finished. Returns the terminal's response."""
    assert events[0]["type"] == "response.created"
    numbered = [event["sequence_number"] for event in events if event["type"] != "response.interrupt.failed"]
    assert numbered == list(range(len(numbered)))
    ends = [n for n, event in enumerate(events) if event["type"] in TERMINALS]
    behind = {event["type"] for event in events[ends[0] + 1 :]} if ends else set()
    assert len(ends) == 1
    steers = {f"response.steer.{kind}" for kind in ("accepted", "pending", "failed")}
    assert behind <= steers | {"response.interrupt.failed"}  # what is asked too late is refused wherever that falls
    opened: list[int] = []
    done: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert not opened
            opened = [event["output_index"]]
        elif kind in ("response.output_item.done", "response.output_item.interrupted"):
            assert opened == [event["output_index"]]
            opened = []
            if kind.endswith("done"):
                done.append(event["item"])
    response: dict[str, Any] = events[ends[0]]["response"]
    if response["status"] != "failed":
        assert not opened
        assert response["output"] == done
        assert response["usage"]["total_tokens"] >= response["usage"]["output_tokens"]
    return response


async def settled(running: Running, engine: Plans, sockets: int = 0) -> None:
    """Nothing generates and no turn runs; so many sockets are open."""
    for _ in range(200):
        turns = sum(len(socket._turns) for socket in running.gateway.sockets)
        if not engine.running and not turns and len(running.gateway.sockets) == sockets:
            break
        await asyncio.sleep(0.01)
    assert engine.running == 0
    assert len(running.gateway.sockets) == sockets
    assert all(not socket._turns for socket in running.gateway.sockets)
    names = {task.get_name() for task in asyncio.all_tasks()}
    assert "turn-events" not in names
