"""Responses as an upstream's API, end to end: items through the format and the engine to a strict server, and its
events back."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Delta,
    MessageStart,
    ReasoningDelta,
    ReasoningEnd,
    SummaryDelta,
    TextDelta,
)
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    InputText,
    Item,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    SummaryText,
)
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.engine import Chunk, Counted, Generation, Sampling
from inference.formats.format import Brief
from inference.formats.jsontext import UpstreamRequest
from inference.formats.responses import ResponsesFormat
from inference.upstream.dialects import (
    RESPONSES_GENERIC,
    RESPONSES_LIMPET,
    RESPONSES_OPENAI,
    RESPONSES_VLLM,
    ResponsesDialect,
)
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.errors import UpstreamError
from inference.upstream.pool import Deadlines, UpstreamPool
from inference.upstream.responses import PATH, ResponsesEngine
from tests.support.responses_upstream import (
    SEALED,
    call,
    joined,
    message,
    responses_upstream,
    streamed,
    thought,
    used,
)
from tests.support.upstreams import KEY, MODEL, Pause, Stall, Upstream, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

ORIGIN = f"api.example {MODEL}"
SHELL = Tool("function", "shell", None, "Runs it", {"type": "object", "properties": {"c": {"type": "string"}}})
GET = Tool("function", "get", "db")
PATCH = Tool("custom", "patch", None, "Changes files", grammar=("regex", "[a-z]+"))
TOOLS = ToolSet((SHELL, GET, PATCH))
QUESTION: tuple[Item, ...] = (Message("user", "What is here?"),)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Upstream]:
    async with serving(responses_upstream()) as found:
        yield found


@pytest.fixture
def upstream(server: Upstream) -> Upstream:
    server.reset()
    return server


def make(
    upstream: Upstream,
    dialect: ResponsesDialect = RESPONSES_OPENAI,
    deadlines: Deadlines | None = None,
    **options: Any,
) -> ResponsesEngine:
    pool = UpstreamPool(upstream.base_url, KEY, deadlines=deadlines)
    return ResponsesEngine(UpstreamEndpoint(pool, MODEL, PATH), dialect, ORIGIN, **options)


def generation(
    *pieces: Sequence[Item], brief: Brief | None = None, dialect: ResponsesDialect = RESPONSES_OPENAI, **more: Any
) -> Generation:
    form = ResponsesFormat(dialect, ORIGIN)
    brief = brief or Brief("Rules")
    opening = form.opening(brief)
    parts = [form.head(brief), *(form.body(piece, {}) for piece in pieces), opening.ids]
    sampling = Sampling(more.pop("max_tokens", 50), more.pop("temperature", 1.0), 1.0, (), more.pop("logprobs", None))
    return Generation("r1", "alias", parts, sampling, parsing=opening.parsing, **more)


async def collect(engine: ResponsesEngine, request: Generation) -> list[Chunk]:
    try:
        async with aclosing(engine.generate(request)) as chunks:
            return [chunk async for chunk in chunks]
    finally:
        await engine.close()


def told(chunks: Sequence[Chunk]) -> list[Delta]:
    """All deltas, those that belong together as one."""
    return joined(delta for chunk in chunks for delta in chunk.deltas or ())


async def test_a_turn_with_thoughts_and_calls(upstream: Upstream) -> None:
    output = [
        thought("Looking around.", "Then more."),
        message("I'll look.", phase="commentary"),
        call("shell", '{"c": "ls"}', "u1"),
        call("patch", "abc", "u2", "custom_tool_call"),
    ]
    upstream.answer(*streamed(output, usage=used(90, 12, 64, 3)), done=False)
    brief = Brief("Rules", tools=TOOLS, effort="low", summary="auto", text=TextFormat(verbosity="low"))
    chunks = await collect(make(upstream), generation(QUESTION, brief=brief))
    assert told(chunks) == [
        SummaryDelta("Looking around."),
        SummaryDelta("Then more.", 1),
        ReasoningEnd(f"{ORIGIN}\n{SEALED}1"),
        MessageStart("commentary"),
        TextDelta("I'll look."),
        CallStart("function", "shell"),
        CallDelta('{"c": "ls"}'),
        CallEnd(),
        CallStart("custom", "patch"),
        CallDelta("abc"),
        CallEnd(),
    ]
    assert len([chunk for chunk in chunks if chunk.deltas]) > 10  # passed on as they came
    assert (chunks[-1].finish, chunks[-1].counted) == ("stop", Counted(90, 12, 64, 3))
    (seen,) = upstream.requests
    get = {"type": "object", "properties": {}}
    wire = seen.fields["tools"][1]["name"]
    assert seen.fields == {
        "model": MODEL,
        "input": [
            {"type": "message", "role": "developer", "content": "Rules"},
            {"type": "message", "role": "user", "content": "What is here?"},
        ],
        "max_output_tokens": 50,
        "stream": True,
        "store": False,
        "include": ["reasoning.encrypted_content"],
        "tools": [
            {"type": "function", "name": "shell", "description": "Runs it", "parameters": SHELL.parameters,
             "strict": False},
            {"type": "function", "name": wire, "parameters": get, "strict": False},
            {"type": "custom", "name": "patch", "description": "Changes files",
             "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}},
        ],
        "tool_choice": "auto",
        "parallel_tool_calls": True,
        "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"},
    }  # fmt: skip


async def test_what_was_said_goes_back_and_sealed_thoughts_only_to_whom_they_are_from(upstream: Upstream) -> None:
    said: tuple[Item, ...] = (
        Reasoning(summary=(SummaryText("Looking."),), foreign=f"{ORIGIN}\n{SEALED}1"),
        Reasoning(content=(ReasoningText("secret of another model"),)),
        Reasoning(foreign=f"elsewhere m\n{SEALED}2"),
        Message("assistant", (OutputText("I'll look."),), phase="commentary"),
        Message("assistant", ""),
        FunctionCall("c1", "get", "{}", namespace="db"),
        CustomToolCall("c2", "patch", "abc"),
    )
    picture = (InputText("see"), InputImage(image_url="data:image/png;base64,AA=="))
    added: tuple[Item, ...] = (
        CustomToolCallOutput("c2", "done"),
        FunctionCallOutput("c1", picture),
        Message("user", (InputText("And"), InputFile(file_data="data:;base64,AA==", filename="x.pdf"))),
    )
    upstream.answer(*streamed([message("One file.")]))
    chunks = await collect(make(upstream), generation(QUESTION, said, added, brief=Brief(tools=TOOLS)))
    assert told(chunks) == [MessageStart(), TextDelta("One file.")]
    given = upstream.requests[0].fields["input"]
    name = upstream.requests[0].fields["tools"][1]["name"]
    assert given[1:] == [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Looking."}],
         "encrypted_content": SEALED + "1"},
        {"type": "message", "role": "assistant", "content": "I'll look.", "phase": "commentary"},
        {"type": "function_call", "call_id": "c1", "name": name, "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "abc"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
        {"type": "function_call_output", "call_id": "c1", "output": [
            {"type": "input_text", "text": "see"},
            {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"},
        ]},
        {"type": "message", "role": "user", "content": [
            {"type": "input_text", "text": "And"},
            {"type": "input_file", "file_data": "data:;base64,AA==", "filename": "x.pdf"},
        ]},
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("part", "dialect"),
    [
        (InputImage(image_url="data:x"), RESPONSES_GENERIC),
        (InputFile(file_url="http://x"), RESPONSES_VLLM),
        (InputImage(file_id="f"), RESPONSES_OPENAI),
        (InputFile(file_id="f"), RESPONSES_LIMPET),
    ],
)
async def test_what_the_dialect_has_no_place_for_is_refused(part: Any, dialect: ResponsesDialect) -> None:
    with pytest.raises(ApiError) as refused:
        ResponsesFormat(dialect, ORIGIN).body((Message("user", (part,)),), {})
    assert refused.value.code == "unsupported_parameter"


@pytest.mark.parametrize(
    ("choice", "sent", "offered"),
    [
        (ToolChoice("none"), "none", 3),
        (ToolChoice("required"), "required", 3),
        (ToolChoice("required", ("shell",)), {"type": "function", "name": "shell"}, 3),
        (ToolChoice("required", ("patch",)), {"type": "custom", "name": "patch"}, 3),
        (
            ToolChoice("auto", ("shell", "patch")),
            {"type": "allowed_tools", "mode": "auto",
             "tools": [{"type": "function", "name": "shell"}, {"type": "custom", "name": "patch"}]},
            3,
        ),
    ],
)  # fmt: skip
async def test_choices_of_tools(upstream: Upstream, choice: ToolChoice, sent: Any, offered: int) -> None:
    upstream.answer(*streamed([message("x")]))
    await collect(make(upstream), generation(QUESTION, brief=Brief(tools=ToolSet(TOOLS.tools, choice))))
    fields = upstream.requests[0].fields
    assert (fields["tool_choice"], len(fields["tools"])) == (sent, offered)


async def test_a_server_without_freeform_tools_and_narrowed_choices() -> None:
    form = ResponsesFormat(RESPONSES_GENERIC, ORIGIN)
    opening = form.opening(Brief(tools=ToolSet(TOOLS.tools, ToolChoice("auto", ("shell", "patch")))))
    assert isinstance(opening.parsing, UpstreamRequest)
    fields = json.loads(opening.parsing.fields)
    assert [(tool["type"], tool["name"]) for tool in fields["tools"]] == [("function", "shell"), ("function", "patch")]
    assert fields["tool_choice"] == "auto"
    body = form.body((CustomToolCall("c", "patch", "abc"), CustomToolCallOutput("c", "done")), {})
    first, second = json.loads(b"[" + body.rstrip(b", ") + b"]")
    assert (first["type"], json.loads(first["arguments"])) == ("function_call", {"input": "abc"})
    assert second["type"] == "function_call_output"


async def test_formats_of_the_text(upstream: Upstream) -> None:
    closed = {
        "type": "object",
        "properties": {"a": {"type": "string"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    for schema, strict in ((closed, True), ({"type": "object"}, False)):
        upstream.reset()
        upstream.answer(*streamed([message("{}")]))
        brief = Brief(text=TextFormat("json_schema", json.dumps(schema)))
        await collect(make(upstream), generation(QUESTION, brief=brief))
        form = upstream.requests[0].fields["text"]["format"]
        assert (form["type"], form["schema"], form["strict"]) == ("json_schema", schema, strict)


async def test_log_probabilities_and_sampling(upstream: Upstream) -> None:
    events = streamed([message("Hi!")])
    delta = next(event for event in events if event["type"] == "response.output_text.delta")
    delta["logprobs"] = [{"token": "Hi!", "logprob": -0.25, "top_logprobs": [{"token": "Hi!", "logprob": -0.25}]}]
    upstream.answer(*events)
    chunks = await collect(make(upstream), generation(QUESTION, logprobs=2))
    (text,) = (each for each in told(chunks) if isinstance(each, TextDelta))
    assert [(found.token, found.logprob, found.top) for found in text.logprobs] == [(b"Hi!", -0.25, ((b"Hi!", -0.25),))]
    fields = upstream.requests[0].fields
    assert (fields["top_logprobs"], fields["include"][-1]) == (2, "message.output_text.logprobs")
    options = make(upstream, RESPONSES_VLLM)._options(generation(QUESTION, temperature=0.5, cache_salt="t"))
    assert (options["temperature"], options["top_p"], options["cache_salt"]) == (0.5, 1.0, "t")
    assert "temperature" not in make(upstream)._options(generation(QUESTION, cache_salt="t"))
    assert make(upstream)._options(generation(QUESTION, temperature=0.5))["temperature"] == 0.5


@pytest.mark.parametrize("status", ["incomplete", "completed"])
async def test_an_answer_that_was_cut_off(upstream: Upstream, status: str) -> None:
    """vLLM says `response.completed` of such ones, too."""
    cut = {**call("shell", '{"c": "l'), "status": "incomplete"}
    details = {"reason": "max_output_tokens"}
    upstream.answer(*streamed([message("Well"), cut], status, incomplete_details=details))
    chunks = await collect(make(upstream), generation(QUESTION, brief=Brief(tools=TOOLS), max_tokens=3))
    assert told(chunks)[-2:] == [CallStart("function", "shell"), CallDelta('{"c": "l')]
    assert chunks[-1].finish == "length"
    assert upstream.requests[0].fields["max_output_tokens"] == 16  # the API takes no less


@pytest.mark.parametrize(
    ("event", "fault", "code"),
    [
        ({"type": "error", "code": "rate_limit_exceeded", "message": "in /srv"}, "overloaded", "rate_limit_exceeded"),
        ({"type": "error", "status": 503, "error": {"message": "in /srv"}}, "overloaded", "engine_overloaded"),
        ({"type": "error", "code": "whatever", "message": "in /srv"}, "unavailable", "server_error"),
        ("server_error", "unavailable", "server_error"),
        ("rate_limit_exceeded", "overloaded", "rate_limit_exceeded"),
        ("insufficient_quota", "unavailable", "insufficient_quota"),
        ("invalid_prompt", "invalid", "invalid_prompt"),
        ("context_length_exceeded", "invalid", "context_length_exceeded"),
        ("server_is_overloaded", "overloaded", "engine_overloaded"),
        ("image_too_large", "invalid", "invalid_prompt"),
        ("failed_to_download_image", "invalid", "invalid_prompt"),
        ("misalignment_policy_violation", "invalid", "invalid_prompt"),
        ("vector_store_timeout", "unavailable", "server_error"),
    ],
)  # fmt: skip
async def test_answers_that_fail(upstream: Upstream, event: Any, fault: str, code: str) -> None:
    begun = streamed([message("Well")])[:-1]
    failed = streamed([], "failed", error={"code": "server_error", "message": "in /srv"})[-1]
    if isinstance(event, str):
        failed["response"]["error"]["code"] = event  # more than the SDK's types know
    upstream.answer(*begun, failed if isinstance(event, str) else event, done=False)
    with pytest.raises(UpstreamError) as caught:
        await collect(make(upstream), generation(QUESTION))
    assert (caught.value.fault, caught.value.code) == (fault, code)
    assert "srv" not in caught.value.message


@pytest.mark.parametrize("reason", ["content_filter", "something_new"])
async def test_answers_that_somebody_else_ended(upstream: Upstream, reason: str) -> None:
    events = streamed([message("Well")], "incomplete", incomplete_details={"reason": "content_filter"})
    events[-1]["response"]["incomplete_details"]["reason"] = reason
    upstream.answer(*events)
    with pytest.raises(UpstreamError):
        await collect(make(upstream), generation(QUESTION))


async def test_the_terminal_event_is_the_end_and_its_connection_is_used_again(upstream: Upstream) -> None:
    engine = make(upstream)
    for _ in range(3):
        upstream.answer(*streamed([message("x")]), done=False)
        async with aclosing(engine.generate(generation(QUESTION))) as chunks:
            assert [chunk async for chunk in chunks][-1].finish == "stop"
    assert len(upstream.connections) == 1
    upstream.answer(*streamed([message("x")]), Stall())  # nor is its silence a fault
    async with aclosing(engine.generate(generation(QUESTION))) as chunks:
        found = await asyncio.wait_for(anext(aiter_last(chunks)), 30)
    assert found.finish == "stop"
    await engine.close()


async def aiter_last(chunks: AsyncIterator[Chunk]) -> AsyncIterator[Chunk]:
    last = None
    async for chunk in chunks:
        last = chunk
    assert last is not None
    yield last


async def test_thoughts_that_cannot_be_opened_any_more_are_left_out(upstream: Upstream) -> None:
    """Their organization is another key's, or the upstream has replaced its own key. Before, and inside an answer."""
    thoughts = tuple(Reasoning(foreign=f"{ORIGIN}\n{SEALED}{n}") for n in range(2))
    said = (*thoughts, Message("assistant", "Hm."))
    code = "invalid_encrypted_content"
    failed = streamed([], "failed", error={"code": "server_error", "message": "x"})
    failed[-1]["response"]["error"]["code"] = code
    for refusal in ({"status": 400, "body": {"error": {"code": code, "message": "x"}}}, {"steps": failed}):
        upstream.reset()
        upstream.answer(*refusal.pop("steps", ()), **refusal)
        upstream.answer(*streamed([message("Yes.")]))
        chunks = await collect(make(upstream), generation(QUESTION, said, (Message("user", "b"),)))
        assert told(chunks) == [MessageStart(), TextDelta("Yes.")]
        first, second = (seen.fields["input"] for seen in upstream.requests)
        assert [item for item in first if item["type"] != "reasoning"] == second
        assert len(first) == len(second) + 2
    upstream.reset()
    upstream.answer(status=400, body={"error": {"code": code, "message": "x"}})
    with pytest.raises(UpstreamError):  # with nothing to leave out
        await collect(make(upstream), generation(QUESTION))


async def test_thinking_may_take_long_and_words_may_not(upstream: Upstream) -> None:
    events = streamed([thought("Sum."), message("Well, well.")])
    at = next(n for n, event in enumerate(events) if event["type"].endswith("summary_text.done"))
    speaking = next(n for n, event in enumerate(events) if event["type"].endswith("output_text.delta")) + 1
    patient = Deadlines(first_event_s=10, idle_s=0.6, thinking_s=10)
    upstream.answer(*events[:2], Pause(0.8), *events[2:at], Pause(0.8), *events[at:])
    assert len(told(await collect(make(upstream, deadlines=patient), generation(QUESTION)))) == 4
    upstream.answer(*events[:speaking], Pause(4), *events[speaking:])
    with pytest.raises(UpstreamError):
        await collect(make(upstream, deadlines=patient), generation(QUESTION))
    hasty = Deadlines(first_event_s=5, idle_s=5, thinking_s=0.2)
    upstream.answer(*events[:2], Stall())
    with pytest.raises(UpstreamError):
        await collect(make(upstream, deadlines=hasty), generation(QUESTION))


async def test_a_limit_that_only_a_failed_answer_tells_is_kept(upstream: Upstream) -> None:
    engine = make(upstream)
    failed = streamed([], "failed", error={"code": "rate_limit_exceeded", "message": "x"})
    upstream.answer(*failed)
    with pytest.raises(UpstreamError):
        async with aclosing(engine.generate(generation(QUESTION))) as chunks:
            assert [chunk async for chunk in chunks]
    refusal = engine.refusal(generation(QUESTION))
    assert refusal is not None
    assert refusal.code == "rate_limit_exceeded"
    await engine.close()


async def test_without_a_wish_no_bound_is_sent(upstream: Upstream) -> None:
    asked = generation(QUESTION)
    free = replace(asked, sampling=replace(asked.sampling, bounded=False))
    assert "max_output_tokens" not in make(upstream)._options(free)
    assert make(upstream, max_tokens=20)._options(free)["max_output_tokens"] == 20
    huge = replace(free, sampling=replace(free.sampling, max_tokens=400_000))
    assert make(upstream)._need(huge).total < 2_000  # which no limit has to have room for


async def test_a_second_call_ends_an_answer_of_one(upstream: Upstream) -> None:
    events = streamed([call("shell", "{}", "a"), call("shell", "{}", "b")])
    upstream.answer(*events[:-2], Stall())
    brief = Brief(tools=ToolSet((SHELL,), parallel=False))
    chunks = await asyncio.wait_for(collect(make(upstream), generation(QUESTION, brief=brief)), 30)
    assert told(chunks) == [CallStart("function", "shell"), CallDelta("{}"), CallEnd()]
    assert upstream.requests[0].fields["parallel_tool_calls"] is False
    await asyncio.wait_for(upstream.aborted.wait(), 30)


async def test_raw_thoughts(upstream: Upstream) -> None:
    upstream.answer(*streamed([thought(sealed=None, text="Look."), message("x")]))
    chunks = await collect(make(upstream, RESPONSES_OPENAI), generation(QUESTION))
    assert told(chunks) == [ReasoningDelta("Look."), MessageStart(), TextDelta("x")]
    form = ResponsesFormat(RESPONSES_VLLM, ORIGIN)
    body = form.body((Reasoning(content=(ReasoningText("Look."),), foreign=f"{ORIGIN}\nx"),), {})
    assert json.loads(body.rstrip(b", ")) == {
        "type": "reasoning",
        "id": "rs_0",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Look."}],
    }
