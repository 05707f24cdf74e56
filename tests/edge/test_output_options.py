"""Log-probabilities, output that the engine takes apart, and formats that the engine refuses beforehand."""

from __future__ import annotations

import math
from typing import Any

import httpx
import orjson
import pytest
from openai.types.responses import ResponseOutputMessage
from openai.types.responses.response_output_text import Logprob

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, ReasoningDelta, TextDelta
from inference.engine import Chunk, EngineError, Parsing, TokenLogprob
from inference.formats.chatml import ChatMLFormat, ChatMLOptions
from inference.formats.format import Brief, Opening
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.engines import PlannedEngine
from tests.support.gateway import gateway, turn
from tests.support.sdk import EventChecker

TOKENIZER = scripted_tokenizer()
END = TOKENIZER.special("<|im_end|>")
INCLUDE = ["message.output_text.logprobs"]
SCHEMA = {"type": "json_schema", "name": "n", "schema": {"type": "object", "properties": {"a": {"type": "string"}}}}


def scored(text: str, per_chunk: int = 1, top: int = 2) -> PlannedEngine:
    """Says this, each token with a log-probability that is its place, and an alternative that is impossible."""
    ids = [*unpack_ids(TOKENIZER.encode(text)), END]
    entries = [
        TokenLogprob(token, -float(at), ((token, -float(at)), (END, -math.inf))[:top]) for at, token in enumerate(ids)
    ]
    chunks = [
        Chunk(ids[at : at + per_chunk], None, 0, entries[at : at + per_chunk]) for at in range(0, len(ids), per_chunk)
    ]
    chunks[-1].finish = "stop"
    return PlannedEngine(chunks)


@pytest.mark.parametrize("per_chunk", [1, 3, 100])
async def test_text_has_the_log_probabilities_of_its_tokens(per_chunk: int) -> None:
    said = "Grüße aus Zürich 🧀 heute"
    async with gateway(scored(said, per_chunk)) as running, running.connect() as ws:
        events = await turn(ws, input="Hi.", include=INCLUDE, top_logprobs=2)
    checker = EventChecker()
    for event in events:
        checker.feed(event)
    message = ResponseOutputMessage.model_validate(events[-1]["response"]["output"][0], strict=True)
    found: list[Logprob] = message.content[0].logprobs  # type: ignore[union-attr,assignment]
    tokens = unpack_ids(TOKENIZER.encode(said))
    assert b"".join(bytes(each.bytes) for each in found) == said.encode()
    assert [each.logprob for each in found] == [-float(at) for at in range(len(tokens))]
    assert [each.top_logprobs[0].bytes for each in found] == [each.bytes for each in found]
    assert {each.top_logprobs[1].logprob for each in found} == {-9999.0}  # JSON has no infinity
    streamed = [
        entry for event in events if event["type"] == "response.output_text.delta" for entry in event["logprobs"]
    ]
    assert [entry["logprob"] for entry in streamed] == [each.logprob for each in found]
    done = next(event for event in events if event["type"] == "response.output_text.done")
    assert done["logprobs"] == streamed


async def test_thoughts_and_calls_have_none() -> None:
    form = ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=True))
    said = '<think>\nhm\n</think>\n\nWell.\n<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    tools = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
    async with gateway(scored(said), models=("m",), formats={"m": form}) as running, running.connect() as ws:
        events = await turn(ws, input="Hi.", include=INCLUDE, tools=tools)
    output = events[-1]["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    assert "".join(entry["token"] for entry in output[1]["content"][0]["logprobs"]).strip() == "Well."


async def test_the_engine_is_asked_for_as_many_alternatives_as_the_client_wants() -> None:
    engine = scored("Hi.")
    async with gateway(engine) as running, running.connect() as ws:
        await turn(ws, input="Hi.")
        await turn(ws, input="Hi.", include=INCLUDE)
        await turn(ws, input="Hi.", top_logprobs=5)
    assert [generation.sampling.logprobs for generation in engine.seen] == [None, 0, 5]


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        ({"text": {"format": SCHEMA}}, "invalid_json_schema", "text.format.schema"),
        (
            {"tools": [{"type": "function", "name": "f", "strict": True, "parameters": {"type": "object"}}]},
            "invalid_value",
            "tools",
        ),
    ],
)
async def test_a_format_that_the_engine_cannot_hold_is_a_400_before_anything(
    asked: dict[str, Any], code: str, param: str
) -> None:
    engine = scored("{}")
    engine.refusal = EngineError("invalid", "the grammar has no start")
    async with gateway(engine) as running, running.connect() as ws:
        (refused,) = await turn(ws, input="Hi.", **asked)
        async with httpx.AsyncClient(base_url=running.http) as client:
            answer = await client.post("/responses", json={"model": "m", "input": "Hi.", **asked})
        assert (refused["status"], refused["error"]["code"], refused["error"]["param"]) == (400, code, param)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, code)
        assert "no start" in refused["error"]["message"]
        assert not engine.seen
        engine.refusal = None
        assert (await turn(ws, input="Hi.", **asked))[-1]["type"] == "response.completed"


async def test_the_engine_is_asked_once_about_each_format() -> None:
    engine = scored("{}")
    async with gateway(engine) as running, running.connect() as ws:
        for _ in range(3):
            await turn(ws, input="Hi.", text={"format": SCHEMA})
        await turn(ws, input="Hi.", text={"format": {"type": "json_object"}})
        await turn(ws, input="Hi.")
        assert running.gateway.actor.counters.guides_checked == 2
    assert len(engine.checked) == 2


class ParsedByEngine(ChatMLFormat):
    """A model whose output vLLM's own parsers take apart."""

    def opening(self, brief: Brief) -> Opening:
        found = super().opening(brief)
        return Opening(found.ids, "", None, Parsing(orjson.dumps([t.model_name for t in brief.tools.tools]).decode()))


async def test_deltas_of_the_engine_are_passed_on_under_the_clients_names() -> None:
    tools: list[dict[str, Any]] = [
        {"type": "custom", "name": "patch"},
        {"type": "namespace", "name": "docs", "description": "", "tools": [{"type": "function", "name": "find"}]},
    ]
    plan = [
        Chunk([1, 2], None, 0, None, [ReasoningDelta("hm")]),
        Chunk([3], None, None, None, [TextDelta("Well.")]),
        Chunk(
            [4], None, None, None, [CallStart("function", "docs.find"), CallDelta('{"q":'), CallDelta(" 1}"), CallEnd()]
        ),
        Chunk([5], None, None, None, [CallStart("function", "patch"), CallDelta('{"inp')]),
        Chunk([6], None, None, None, [CallDelta('ut": "a\\n'), CallDelta('b"}'), CallEnd()]),
        Chunk([END], "stop", None, None, []),
    ]
    engine = PlannedEngine(plan)
    formats = {"m": ParsedByEngine(TOKENIZER)}
    async with gateway(engine, models=("m",), formats=formats) as running, running.connect() as ws:
        events = await turn(ws, input="Hi.", tools=tools)
    response = events[-1]["response"]
    thought, said, find, patch = response["output"]
    assert (thought["content"][0]["text"], said["content"][0]["text"]) == ("hm", "Well.")
    assert (find["type"], find["name"], find["namespace"], find["arguments"]) == (
        "function_call",
        "find",
        "docs",
        '{"q": 1}',
    )
    assert (patch["type"], patch["name"], patch["input"]) == ("custom_tool_call", "patch", "a\nb")
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
    assert orjson.loads(engine.seen[0].parsing.tools) == ["patch", "docs.find"]  # type: ignore[union-attr]
