"""Chat completions end to end: items through the format and the engine to a strict server, and its chunks back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, ReasoningDelta, TextDelta
from gateway.protocol.items import FunctionCall, FunctionCallOutput, Item, Message, OutputText, Reasoning, ReasoningText
from gateway.protocol.tools import Tool, ToolSet
from inference.engine import Chunk, Counted, EngineError, Generation, Guide, Sampling
from inference.formats.format import Brief
from inference.formats.messages import MessagesFormat
from inference.upstream.cerebras import INTEGRATION
from inference.upstream.chat import PATH, ChatEngine
from inference.upstream.dialects import CEREBRAS_GPT_OSS, GENERIC, VLLM, Dialect
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.errors import UpstreamError
from inference.upstream.pool import UpstreamPool
from tests.support.upstreams import (
    KEY,
    MODEL,
    Stall,
    Upstream,
    call,
    cerebras_upstream,
    chat,
    openai_upstream,
    serving,
    usage,
)

SHELL = Tool("function", "shell", None, "Runs it", {"type": "object", "properties": {"c": {"type": "string"}}})
QUESTION: tuple[Item, ...] = (Message("user", "What is here?"),)


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers() -> AsyncIterator[tuple[Upstream, Upstream]]:
    async with serving(cerebras_upstream()) as first, serving(openai_upstream()) as second:
        yield first, second


@pytest.fixture
def cerebras(servers: tuple[Upstream, Upstream]) -> Upstream:
    servers[0].reset()
    return servers[0]


@pytest.fixture
def generic(servers: tuple[Upstream, Upstream]) -> Upstream:
    servers[1].reset()
    return servers[1]


def make(upstream: Upstream, dialect: Dialect, **options: Any) -> ChatEngine:
    pool = UpstreamPool(upstream.base_url, KEY, headers=INTEGRATION)
    return ChatEngine(UpstreamEndpoint(pool, MODEL, PATH), dialect, **options)


def generation(dialect: Dialect, *pieces: Sequence[Item], brief: Brief | None = None, **more: Any) -> Generation:
    form = MessagesFormat(dialect)
    brief = brief or Brief("Rules")
    opening = form.opening(brief)
    parts = [form.head(brief), *(form.body(piece, {"c1": "shell"}) for piece in pieces), opening.ids]
    sampling = Sampling(more.pop("max_tokens", 50), 0.7, 0.9, form.stop_ids, more.pop("logprobs", None))
    return Generation("r1", "alias", parts, sampling, parsing=opening.parsing, **more)


async def collect(engine: ChatEngine, request: Generation) -> list[Chunk]:
    try:
        async with aclosing(engine.generate(request)) as chunks:
            return [chunk async for chunk in chunks]
    finally:
        await engine.close()


def deltas(chunks: Sequence[Chunk]) -> list[Delta]:
    return [delta for chunk in chunks for delta in chunk.deltas or ()]


async def test_a_turn_with_thoughts_and_a_call(cerebras: Upstream) -> None:
    cerebras.answer(
        chat({"role": "assistant", "content": ""}),
        chat({"reasoning": "Look."}),
        chat({"content": "I'll look."}),
        chat(call(0, '{"c": "ls', name="shell", call_id="u1")),
        chat(call(0, '"}')),
        chat(finish="tool_calls", usage=usage(90, 12, 64, 3)),
    )
    brief = Brief("Rules", tools=ToolSet((SHELL,)), effort="low")
    chunks = await collect(make(cerebras, CEREBRAS_GPT_OSS), generation(CEREBRAS_GPT_OSS, QUESTION, brief=brief))
    assert deltas(chunks) == [
        ReasoningDelta("Look."),
        TextDelta("I'll look."),
        CallStart("function", "shell"),
        CallDelta('{"c": "ls'),
        CallDelta('"}'),
        CallEnd(),
    ]
    assert all(chunk.ids == [] for chunk in chunks)
    assert (chunks[-1].finish, chunks[-1].counted) == ("stop", Counted(90, 12, 64, 3))
    (seen,) = cerebras.requests
    function = {"name": "shell", "description": "Runs it", "parameters": SHELL.parameters}
    assert seen.fields == {
        "model": MODEL,
        "messages": [{"role": "system", "content": "Rules"}, {"role": "user", "content": "What is here?"}],
        "max_completion_tokens": 50,
        "temperature": 0.7,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "tools": [{"type": "function", "function": function}],
        "tool_choice": "auto",
        "reasoning_effort": "low",
    }


async def test_two_chained_turns_send_thoughts_by_their_name(cerebras: Upstream) -> None:
    # bugs.md O-87: the server refuses `reasoning_content`, so every second turn failed.
    said: tuple[Item, ...] = (
        Reasoning(content=(ReasoningText("Look."),)),
        Message("assistant", (OutputText("I'll look."),)),
        FunctionCall("c1", "shell", '{"c": "ls"}'),
    )
    added: tuple[Item, ...] = (FunctionCallOutput("c1", "a.txt"), Message("user", "And?"))
    brief = Brief("Rules", tools=ToolSet((SHELL,)))
    cerebras.answer(chat({"content": "One file."}, "stop"))
    chunks = await collect(
        make(cerebras, CEREBRAS_GPT_OSS), generation(CEREBRAS_GPT_OSS, QUESTION, said, added, brief=brief)
    )
    assert deltas(chunks) == [TextDelta("One file.")]
    assert cerebras.requests[0].fields["messages"][2]["reasoning"] == "Look."
    wrong = make(cerebras, VLLM)
    dialect = Dialect("wrong", reasoning_in="reasoning_content", max_tokens="max_completion_tokens")
    with pytest.raises(UpstreamError):
        await collect(wrong, generation(dialect, QUESTION, said, added, brief=brief))
    assert "reasoning_content" in cerebras.refused[0]  # the double is as strict as the rule says


async def test_the_least_common_server(generic: Upstream) -> None:
    said = (Reasoning(content=(ReasoningText("hm"),)), FunctionCall("c1", "shell", '{"c": "ls"}'))
    generic.answer(chat({"reasoning_content": "hm"}), chat({"content": "x"}), chat(finish="length"))
    brief = Brief("Rules", tools=ToolSet((SHELL,), parallel=False), effort="high")
    request = generation(GENERIC, QUESTION, said, (FunctionCallOutput("c1", ""),), brief=brief)
    chunks = await collect(make(generic, GENERIC), request)
    assert deltas(chunks) == [ReasoningDelta("hm"), TextDelta("x")]
    assert (chunks[-1].finish, chunks[-1].counted) == ("length", None)
    assert generic.refused == []


async def test_a_second_call_ends_an_answer_of_one(generic: Upstream) -> None:
    generic.answer(
        chat(call(0, "{}", name="shell", call_id="a")), chat(call(1, "{}", name="shell", call_id="b")), Stall()
    )
    brief = Brief(tools=ToolSet((SHELL,), parallel=False))
    chunks = await asyncio.wait_for(collect(make(generic, GENERIC), generation(GENERIC, QUESTION, brief=brief)), 30)
    assert deltas(chunks) == [CallStart("function", "shell"), CallDelta("{}"), CallEnd()]
    assert chunks[-1].finish == "stop"
    await asyncio.wait_for(generic.aborted.wait(), 30)


async def test_log_probabilities(generic: Upstream) -> None:
    chunk = chat({"content": "x"}, "stop")
    entry = {"token": "x", "logprob": -0.25, "bytes": [120], "top_logprobs": []}
    chunk["choices"][0]["logprobs"] = {"content": [entry]}
    generic.answer(chunk)
    chunks = await collect(make(generic, GENERIC), generation(GENERIC, QUESTION, logprobs=2))
    (delta,) = deltas(chunks)
    assert isinstance(delta, TextDelta)
    assert [(found.token, found.logprob) for found in delta.logprobs] == [(b"x", -0.25)]
    assert (generic.requests[0].fields["logprobs"], generic.requests[0].fields["top_logprobs"]) == (True, 2)
    with pytest.raises(UpstreamError) as caught:
        await collect(make(generic, Dialect("none", logprobs=False)), generation(GENERIC, QUESTION, logprobs=0))
    assert caught.value.code == "unsupported_parameter"


async def test_the_cap_holds(generic: Upstream) -> None:
    generic.answer(chat({"content": "x"}, "length"))
    await collect(make(generic, GENERIC, max_tokens=20), generation(GENERIC, QUESTION, max_tokens=90_000))
    assert generic.requests[0].fields["max_tokens"] == 20


async def test_tools_count_for_the_rate_limit(generic: Upstream) -> None:
    limits = {"limit": "60000", "remaining": "1000", "reset": "60"}
    headers = {f"x-ratelimit-{name}-tokens-minute": value for name, value in limits.items()}
    engine = make(generic, GENERIC)
    generic.answer(chat({"content": "x"}, "stop"), headers=headers)
    async with aclosing(engine.generate(generation(GENERIC, QUESTION))) as chunks:
        assert [chunk async for chunk in chunks]
    assert engine.refusal(generation(GENERIC, QUESTION)) is None
    long = Tool("function", "shell", None, "Runs it. " * 1000)
    refusal = engine.refusal(generation(GENERIC, QUESTION, brief=Brief(tools=ToolSet((long,)))))
    assert refusal is not None
    assert refusal.code == "rate_limit_exceeded"
    await engine.close()


async def test_a_guide_has_no_place(generic: Upstream) -> None:
    engine = make(generic, GENERIC)
    with pytest.raises(EngineError):
        await engine.check(Guide("json", "{}"))
    await engine.close()


async def test_large_requests_are_compressed_where_that_is_known(cerebras: Upstream, generic: Upstream) -> None:
    items = (Message("user", "A long story. " * 10_000),)
    for upstream, dialect in ((cerebras, CEREBRAS_GPT_OSS), (generic, GENERIC)):
        upstream.answer(chat({"content": "x"}, "stop"))
        await collect(make(upstream, dialect), generation(dialect, items))
        (seen,) = upstream.requests
        assert seen.fields["messages"][1]["content"] == items[0].content
        assert ("content-encoding" in seen.headers) == (upstream is cerebras)
    assert cerebras.requests[0].size * 20 < generic.requests[0].size
