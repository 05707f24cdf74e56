"""A model whose template can't be rendered in pieces: everything works, at the price of rendering it all each turn."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from actors.window import HEADLINE
from inference.detokenizer import Detokenizer
from inference.engine import Chunk
from inference.formats.template import TemplateFormat, template_format
from inference.tokenizer import unpack_ids
from tests.support import template_families as families
from tests.support.engines import PlannedEngine
from tests.support.gateway import create, gateway, receive, turn, until_terminal
from tests.support.plans import Gate, Plans

TOOLS = [{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}]


@cache
def form() -> TemplateFormat:
    with TemporaryDirectory() as folder:
        return template_format(families.write_model(Path(folder), families.NASTY["tools at the end"]))


def says(text: str, *, stop: bool = True) -> list[Any]:
    chunks = [Chunk([token], cached_tokens=0) for token in unpack_ids(form().tokenizer.encode(text))]
    return [*chunks, Chunk([form().stop_ids[0]], finish="stop")] if stop else chunks


def shown(prompt: bytes) -> str:
    tokenizer = form().tokenizer
    detokenizer = Detokenizer(tokenizer, set(range(tokenizer.vocab_size)))
    return "".join(detokenizer.step(token) or "" for token in unpack_ids(prompt))


async def test_each_turn_is_rendered_whole_and_the_tools_move() -> None:
    assert not form().appendable
    engine = PlannedEngine(says("Fine."))
    async with gateway(engine, models=("m",), formats={"m": form()}) as running, running.connect() as ws:
        first = (await turn(ws, input="one", tools=TOOLS))[-1]["response"]
        second = (await turn(ws, input="two", tools=TOOLS, previous_response_id=first["id"]))[-1]["response"]
        assert running.gateway.actor.counters.whole_renders == 2
    one, two = (shown(generation.prompt) for generation in engine.seen)
    assert [prompt.count("get_weather") for prompt in (one, two)] == [2, 2]  # in front and at the end
    assert two.index("get_weather") < two.index("Fine.") < two.index("two") < two.rindex("get_weather")
    assert second["usage"]["input_tokens"] == len(engine.seen[1].prompt) // 4


async def test_an_interrupted_turn_is_continued() -> None:
    engine = Plans([*says("Long ago", stop=False), Gate()], says("Fine."))
    async with gateway(engine, models=("m",), formats={"m": form()}) as running, running.connect() as ws:
        await create(ws, input="one")
        event = await receive(ws)
        response = event["response"]["id"]
        while event["type"] != "response.output_text.delta":
            event = await receive(ws)
        await ws.send(json.dumps({"type": "response.interrupt", "response_id": response}))
        cut = (await until_terminal(ws))[-1]["response"]
        assert cut["incomplete_details"] == {"reason": "interrupted"}
        end = (await turn(ws, input="two", previous_response_id=cut["id"]))[-1]
        assert end["type"] == "response.completed"
    assert "one" in shown(engine.seen[-1].prompt)


async def test_a_conversation_is_compacted_and_goes_on() -> None:
    engine = Plans(says("Fine."), says("They said one."), says("Good."))
    async with gateway(engine, models=("m",), formats={"m": form()}) as running, running.connect() as ws:
        first = (await turn(ws, input="one"))[-1]["response"]
        compacted = (await turn(ws, input=[{"type": "compaction_trigger"}], previous_response_id=first["id"]))[-1]
        assert compacted["response"]["output"][0]["type"] == "compaction"
        await turn(ws, input="two", previous_response_id=compacted["response"]["id"])
    last = shown(engine.seen[-1].prompt)
    assert f"{HEADLINE}They said one." in last
    assert last.index(HEADLINE) < last.index("two")


async def test_the_oldest_of_it_is_dropped_when_asked_for() -> None:
    engine = PlannedEngine(says("Fine."))
    async with (
        gateway(engine, models=("m",), formats={"m": form()}, context_length=600) as running,
        running.connect() as ws,
    ):
        parent: dict[str, Any] = {}
        for number in range(6):
            words = f"turn {number}: " + "word " * 40
            end = (await turn(ws, input=words, truncation="auto", **parent))[-1]
            assert end["type"] == "response.completed"
            parent = {"previous_response_id": end["response"]["id"]}
    last = shown(engine.seen[-1].prompt)
    assert len(engine.seen[-1].prompt) // 4 < 600
    assert "turn 5:" in last
    assert "turn 0:" not in last
