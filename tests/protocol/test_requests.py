"""The create request (spec/protocol.md 2.1, 3.6, A.6; spec/clients.md for what real clients send)."""

from __future__ import annotations

import contextlib
import copy
from dataclasses import fields
from typing import Any, Literal

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response
from openai.types.responses.response_create_params import ResponseCreateParamsNonStreaming
from pydantic import TypeAdapter

from gateway.protocol.decode import decode_object
from gateway.protocol.errors import ApiError
from gateway.protocol.items import MAX_TEXT_CHARS, AdditionalTools, FunctionCallOutput, Message
from gateway.protocol.requests import (
    CreateRequest,
    parse_compact,
    parse_create,
    parse_input_tokens,
)
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tooldefs import ToolMemo
from gateway.protocol.tools import ToolChoice

SDK_BODY: TypeAdapter[Any] = TypeAdapter(ResponseCreateParamsNonStreaming)
FUNCTION = {
    "type": "function",
    "name": "exec_command",
    "strict": False,
    "description": "Run a command.",
    "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]},
}
NAMESPACE = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn"}]}
SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}

# Frames of the shape that real clients send (shared/captures), cut short.
CODEX_PREWARM: dict[str, Any] = {
    "type": "response.create",
    "model": "m",
    "stream": True,
    "input": [
        {"type": "message", "id": "msg_1", "role": "developer", "content": [{"type": "input_text", "text": "x"}]}
    ],
    "tools": [FUNCTION, NAMESPACE, {"type": "web_search", "external_web_access": False}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "5f0c",
    "generate": False,
    "client_metadata": {"thread_id": "5f0c", "x-codex-turn-metadata": "{}"},
}
CODEX_TURN: dict[str, Any] = {
    **{key: value for key, value in CODEX_PREWARM.items() if key != "generate"},
    "previous_response_id": "resp_1",
    "input": [
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "ok"},
        {
            "type": "function_call_output",
            "id": "fco_2",
            "call_id": "call_2",
            "output": [{"type": "input_text", "text": "ok"}],
            "internal_chat_message_metadata_passthrough": {"turn_id": "t"},
        },
    ],
}
CODEX_LITE: dict[str, Any] = {
    "type": "response.create",
    "model": "m",
    "stream": True,
    "previous_response_id": "resp_1",
    "input": [
        {
            "type": "additional_tools",
            "id": "at_1",
            "role": "developer",
            "tools": [
                {
                    "type": "namespace",
                    "name": "functions",
                    "tools": [
                        {
                            "type": "custom",
                            "name": "exec",
                            "description": "Code.",
                            "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
                        }
                    ],
                }
            ],
        },
        {"type": "message", "id": "msg_2", "role": "user", "content": [{"type": "input_text", "text": "go"}]},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": "low", "context": "all_turns"},
    "store": False,
    "text": {"verbosity": "low"},
    "client_metadata": {"ws_request_header_x_openai_internal_codex_responses_lite": "true"},
}
COPILOT: dict[str, Any] = {
    "type": "response.create",
    "model": "m",
    "instructions": "You are an agent.",
    "input": [{"type": "function_call_output", "call_id": "call_1", "output": "ok"}],
    "previous_response_id": "resp_1",
    "tools": [FUNCTION, {"type": "custom", "name": "apply_patch", "description": "Edit."}],
    "reasoning": {"effort": "medium", "summary": "detailed"},
    "max_output_tokens": 128_000,
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "parallel_tool_calls": True,
}
AGENTS: dict[str, Any] = {
    "type": "response.create",
    "model": "m",
    "instructions": None,
    "input": [
        {"role": "user", "content": "hello"},
        {
            "id": "fc_1",
            "type": "function_call",
            "name": "f",
            "call_id": "c_1",
            "arguments": "{}",
            "status": "completed",
        },
        {"type": "function_call_output", "call_id": "c_1", "output": "ok"},
    ],
    "include": [],
    "tools": [{**FUNCTION, "strict": None}],
    "stream": True,
    "store": False,
    "temperature": None,
    "metadata": None,
    "text": None,
}
LIVEKIT: dict[str, Any] = {
    "type": "response.create",
    "model": "m",
    "previous_response_id": "resp_1",
    "input": [
        {"type": "function_call", "call_id": "c_1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c_1", "output": "ok"},
    ],
    "tools": [{"type": "function", "name": "f", "parameters": SCHEMA}],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
}
CLINE: dict[str, Any] = {
    "model": "m",
    "input": [{"role": "developer", "content": "You are."}],
    "include": ["web_search_call.action.sources"],
    "truncation": "auto",
    "tools": [{"type": "web_search"}, {"type": "image_generation"}, FUNCTION],
    "stream": True,
}
FULL: dict[str, Any] = {
    "model": "m",
    "input": "hello",
    "instructions": "Be brief.",
    "conversation": {"id": "conv_1"},
    "store": True,
    "background": False,
    "metadata": {"a": "1"},
    "tools": [FUNCTION],
    "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "exec_command"}]},
    "parallel_tool_calls": False,
    "max_output_tokens": 16,
    "max_tool_calls": 3,
    "reasoning": {"effort": "high", "summary": "concise", "context": "auto", "mode": "pro"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}, "verbosity": "high"},
    "include": ["reasoning.encrypted_content", "message.output_text.logprobs"],
    "context_management": [{"type": "compaction", "compact_threshold": 1000}],
    "truncation": "auto",
    "service_tier": "priority",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "explicit", "ttl": "12h"},
    "prompt_cache_retention": "24h",
    "temperature": 0,
    "top_p": 0.5,
    "top_logprobs": 20,
    "user": "u",
    "safety_identifier": "s",
    "moderation": {"model": "omni-moderation-latest"},
    "access_programs": {"cyber": "standard"},
}
CLIENTS = {
    "codex prewarm": CODEX_PREWARM,
    "codex turn": CODEX_TURN,
    "codex lite": CODEX_LITE,
    "copilot": COPILOT,
    "agents": AGENTS,
    "livekit": LIVEKIT,
    "cline": CLINE,
    "full": FULL,
}


def ws(**body: Any) -> CreateRequest:
    return parse_create({"type": "response.create", "model": "m", "input": "hi", **body}, transport="websocket")


def http(**body: Any) -> CreateRequest:
    return parse_create({"model": "m", "input": "hi", **body}, transport="http")


def refusal(body: dict[str, Any], transport: Literal["websocket", "http"] = "websocket") -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse_create(body, transport=transport)
    return caught.value


# --- what is read --------------------------------------------------------------------------------------------------


def test_defaults() -> None:
    request = ws()
    assert request.input == (Message("user", "hi"),)
    assert (request.store, request.generate, request.background, request.stream) == (True, True, False, True)
    assert (request.temperature, request.top_p, request.top_logprobs) == (1.0, 1.0, 0)
    assert (request.truncation, request.service_tier, request.compact_threshold) == ("disabled", None, None)
    assert (request.text, request.include, request.metadata) == (TextFormat(), frozenset(), {})
    assert (request.tools.tools, request.tools.choice, request.tools.parallel) == ((), ToolChoice(), True)


def test_null_is_absent_for_every_optional_field() -> None:
    known = {field.name for field in fields(CreateRequest)} | set(FULL) | {"stream_options", "stream_id", "prompt"}
    nulls = dict.fromkeys(known - {"model", "input", "echo"})
    assert ws(**nulls) == ws()
    assert http(**nulls) == http()


def test_every_field() -> None:
    request = parse_create(FULL, transport="http")
    assert request.conversation == "conv_1"
    assert request.tools.choice == ToolChoice("auto", ("exec_command",))
    assert not request.tools.parallel
    assert request.text == TextFormat("json_schema", orjson.dumps(SCHEMA).decode(), "high")
    assert request.effort == "high"
    assert (request.max_output_tokens, request.temperature, request.top_p, request.top_logprobs) == (16, 0.0, 0.5, 20)
    assert isinstance(request.temperature, float)
    assert request.include == {"reasoning.encrypted_content", "message.output_text.logprobs"}
    assert (request.metadata, request.compact_threshold, request.truncation) == ({"a": "1"}, 1000, "auto")
    assert (request.service_tier, request.prompt_cache_key) == ("priority", "k")
    assert (request.user, request.safety_identifier, request.instructions) == ("u", "s", "Be brief.")


@pytest.mark.parametrize("body", CLIENTS.values(), ids=CLIENTS)
def test_clients(body: dict[str, Any]) -> None:
    before = copy.deepcopy(body)
    over_http = {**body, "stream": None}
    for transport, sent in (("websocket", body), ("http", over_http)):
        assert parse_create(sent, transport=transport).input  # type: ignore[arg-type]
    assert body == before


@pytest.mark.parametrize("body", [COPILOT, CLINE, FULL, {**AGENTS, "text": {}}], ids=["copilot", "cline", "full", "a"])
def test_the_sdk_types_allow_the_samples(body: dict[str, Any]) -> None:
    SDK_BODY.validate_python({**body, "stream": False})


def test_codex() -> None:
    prewarm = parse_create(CODEX_PREWARM, transport="websocket")
    assert not prewarm.generate
    assert [tool.model_name for tool in prewarm.tools.tools] == ["exec_command", "agents.spawn"]
    turn = parse_create(CODEX_TURN, transport="websocket")
    assert turn.generate
    assert turn.previous_response_id == "resp_1"
    assert [type(item) for item in turn.input] == [FunctionCallOutput, FunctionCallOutput]
    lite = parse_create(CODEX_LITE, transport="websocket")
    assert isinstance(lite.input[0], AdditionalTools)
    assert lite.tools.tools == ()
    assert lite.effort == "low"


@pytest.mark.parametrize("given", [[], "", None])
@pytest.mark.parametrize(
    "extra",
    [
        {"previous_response_id": "resp_1"},
        {"conversation": "conv_1"},
        {"generate": False},
        {"prompt_cache_options": {"prewarm": True}},
    ],
)
def test_no_input_is_fine_when_there_is_something_to_continue_or_to_warm(given: Any, extra: dict[str, Any]) -> None:
    assert ws(input=given, **extra).input == ()


def test_warm_up() -> None:
    assert not ws(generate=False).generate
    assert not ws(prompt_cache_options={"prewarm": True}).generate
    assert not ws(generate=True, prompt_cache_options={"prewarm": True}).generate
    assert ws(prompt_cache_options={"prewarm": False}).generate


@pytest.mark.parametrize("value", [True, False, 3, "yes", {"a": 1}])
def test_stream_has_no_meaning_on_a_socket(value: Any) -> None:
    assert ws(stream=value, stream_options=value) == ws()


def test_stream_over_http() -> None:
    assert not http().stream
    assert http(stream=True).stream
    assert not http(stream=True).include_obfuscation
    assert http(stream=True, stream_options={"include_obfuscation": True}).include_obfuscation


def test_background() -> None:
    assert not ws(background=False).background
    assert http(background=True).background


def test_conversation_forms() -> None:
    assert ws(conversation="conv_1").conversation == ws(conversation={"id": "conv_1"}).conversation == "conv_1"
    assert ws(conversation="conv_1").echo["conversation"] == {"id": "conv_1"}
    assert "conversation" not in ws().echo


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({}, TextFormat()),
        ({"format": None}, TextFormat()),
        ({"format": {"type": "text"}}, TextFormat()),
        ({"format": {"type": "json_object"}}, TextFormat("json_object")),
        (
            {"format": {"type": "json_schema", "name": "n", "schema": {}, "strict": None}},
            TextFormat("json_schema", "{}"),
        ),
    ],
)
def test_text(text: Any, expected: TextFormat) -> None:
    assert ws(text=text).text == expected
    assert ws(text=text).echo["text"]["format"]["type"] == expected.type


def test_unknown_fields_are_ignored() -> None:
    assert ws(client_metadata=3, personality="kind", image={"a": 1}, wholly_new=[{}]) == ws()


def test_a_choice_may_name_a_tool_of_the_context() -> None:
    choice = {"type": "custom", "name": "exec"}
    assert parse_create({**CODEX_LITE, "tool_choice": choice}, transport="websocket").tools.choice.names == (
        "functions.exec",
    )
    later = {"type": "function", "name": "exec"}
    assert ws(previous_response_id="resp_1", tool_choice=later).tools.choice.names == ("exec",)
    assert ws(previous_response_id="resp_1", tool_choice="required").tools.choice.mode == "required"
    assert refusal({"model": "m", "input": "x", "tool_choice": later}).param == "tool_choice"


def test_memo_changes_nothing() -> None:
    memo = ToolMemo()
    for body in CLIENTS.values():
        plain = parse_create(body, transport="websocket")
        first = parse_create(body, transport="websocket", memo=memo)
        again = parse_create(copy.deepcopy(body), transport="websocket", memo=memo)
        assert plain == first == again
        assert first.tools.tools is again.tools.tools


# --- the echo ------------------------------------------------------------------------------------------------------

NEVER_NULL = {
    "background",
    "frequency_penalty",
    "metadata",
    "model",
    "parallel_tool_calls",
    "presence_penalty",
    "reasoning",
    "service_tier",
    "store",
    "temperature",
    "text",
    "tool_choice",
    "tools",
    "top_logprobs",
    "top_p",
    "truncation",
}


@pytest.mark.parametrize("body", CLIENTS.values(), ids=CLIENTS)
def test_echo_completes_to_a_valid_response(body: dict[str, Any]) -> None:
    echo = parse_create({**body, "stream": None}, transport="http").echo
    own = {"id": "resp_1", "object": "response", "created_at": 1, "output": [], "status": "in_progress"}
    nulls = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
    assert not own.keys() & echo.keys()
    Response.model_validate({**own, **nulls, **decode_object(orjson.dumps(echo))}, strict=True)
    assert {key for key in echo if echo[key] is not None} >= NEVER_NULL
    assert {"effort", "summary"} <= echo["reasoning"].keys()
    assert "format" in echo["text"]


def test_echo_of_defaults() -> None:
    assert ws().echo == {
        "background": False,
        "frequency_penalty": 0.0,
        "instructions": None,
        "max_output_tokens": None,
        "max_tool_calls": None,
        "metadata": {},
        "model": "m",
        "parallel_tool_calls": True,
        "presence_penalty": 0.0,
        "previous_response_id": None,
        "prompt_cache_key": None,
        "reasoning": {"effort": None, "summary": None},
        "safety_identifier": None,
        "service_tier": "default",
        "store": True,
        "temperature": 1.0,
        "text": {"format": {"type": "text"}},
        "tool_choice": "auto",
        "tools": [],
        "top_logprobs": 0,
        "top_p": 1.0,
        "truncation": "disabled",
        "user": None,
    }


def test_echo_repeats_what_was_asked() -> None:
    echo = parse_create(FULL, transport="http").echo
    repeated = set(FULL) & set(echo) - {"conversation", "text", "reasoning"}
    assert {key: echo[key] for key in repeated} == {key: FULL[key] for key in repeated}
    assert echo["reasoning"] == FULL["reasoning"]
    assert echo["text"] == {
        "format": {"type": "json_schema", "name": "n", "description": None, "schema": SCHEMA, "strict": True},
        "verbosity": "high",
    }
    assert ws(service_tier="auto").echo["service_tier"] == "default"


# --- what is refused -----------------------------------------------------------------------------------------------

REFUSED: list[tuple[str, Any, str, str]] = [
    ("model", None, "missing_required_parameter", "model"),
    ("model", "", "invalid_value", "model"),
    ("model", 3, "invalid_type", "model"),
    ("input", 3, "invalid_type", "input"),
    ("input", {}, "invalid_type", "input"),
    ("input", [], "missing_required_parameter", "input"),
    ("input", "", "missing_required_parameter", "input"),
    ("input", None, "missing_required_parameter", "input"),
    ("input", "x" * (MAX_TEXT_CHARS + 1), "string_above_max_length", "input"),
    ("input", [{"type": "nothing"}], "invalid_value", "input[0].type"),
    ("previous_response_id", 3, "invalid_type", "previous_response_id"),
    ("previous_response_id", "", "invalid_value", "previous_response_id"),
    ("conversation", 3, "invalid_type", "conversation"),
    ("conversation", {}, "missing_required_parameter", "conversation.id"),
    ("conversation", {"id": 3}, "invalid_type", "conversation.id"),
    ("instructions", ["x"], "invalid_type", "instructions"),
    ("instructions", "x" * (MAX_TEXT_CHARS + 1), "string_above_max_length", "instructions"),
    ("store", "false", "invalid_type", "store"),
    ("store", 0, "invalid_type", "store"),
    ("generate", "no", "invalid_type", "generate"),
    ("background", 1, "invalid_type", "background"),
    ("parallel_tool_calls", "true", "invalid_type", "parallel_tool_calls"),
    ("tools", {}, "invalid_type", "tools"),
    ("tools", [{"type": "function"}], "missing_required_parameter", "tools[0].name"),
    ("tool_choice", "any", "invalid_value", "tool_choice"),
    ("tool_choice", "required", "invalid_value", "tool_choice"),
    ("tool_choice", {"type": "web_search_preview"}, "unsupported_parameter", "tool_choice"),
    ("text", "json", "invalid_type", "text"),
    ("text", {"format": "json"}, "invalid_type", "text.format"),
    ("text", {"format": {}}, "missing_required_parameter", "text.format.type"),
    ("text", {"format": {"type": "xml"}}, "invalid_value", "text.format.type"),
    ("text", {"format": {"type": "json_schema", "schema": {}}}, "missing_required_parameter", "text.format.name"),
    ("text", {"format": {"type": "json_schema", "name": "n"}}, "missing_required_parameter", "text.format.schema"),
    (
        "text",
        {"format": {"type": "json_schema", "name": "a b", "schema": {}}},
        "invalid_value",
        "text.format.name",
    ),
    (
        "text",
        {"format": {"type": "json_schema", "name": "n" * 65, "schema": {}}},
        "string_above_max_length",
        "text.format.name",
    ),
    ("text", {"format": {"type": "json_schema", "name": "n", "schema": []}}, "invalid_type", "text.format.schema"),
    ("text", {"verbosity": "loud"}, "invalid_value", "text.verbosity"),
    ("reasoning", "high", "invalid_type", "reasoning"),
    ("reasoning", {"effort": "heroic"}, "invalid_value", "reasoning.effort"),
    ("reasoning", {"effort": 3}, "invalid_type", "reasoning.effort"),
    ("reasoning", {"summary": "long"}, "invalid_value", "reasoning.summary"),
    ("reasoning", {"context": "none"}, "invalid_value", "reasoning.context"),
    ("max_output_tokens", 15, "integer_below_min_value", "max_output_tokens"),
    ("max_output_tokens", 16.5, "invalid_type", "max_output_tokens"),
    ("max_output_tokens", "16", "invalid_type", "max_output_tokens"),
    ("max_output_tokens", True, "invalid_type", "max_output_tokens"),
    ("max_output_tokens", 1e30, "invalid_type", "max_output_tokens"),
    ("max_tool_calls", 0, "integer_below_min_value", "max_tool_calls"),
    ("temperature", -0.1, "invalid_value", "temperature"),
    ("temperature", 2.1, "invalid_value", "temperature"),
    ("temperature", "1", "invalid_type", "temperature"),
    ("temperature", True, "invalid_type", "temperature"),
    ("top_p", 1.1, "invalid_value", "top_p"),
    ("top_p", -1, "invalid_value", "top_p"),
    ("top_logprobs", -1, "integer_below_min_value", "top_logprobs"),
    ("top_logprobs", 21, "integer_above_max_value", "top_logprobs"),
    ("include", "reasoning.encrypted_content", "invalid_type", "include"),
    ("include", ["reasoning.encrypted_content", "everything"], "invalid_value", "include[1]"),
    ("include", [3], "invalid_type", "include[0]"),
    ("metadata", [], "invalid_type", "metadata"),
    ("metadata", {str(n): "" for n in range(17)}, "invalid_value", "metadata"),
    ("metadata", {"k" * 65: ""}, "invalid_value", "metadata"),
    ("metadata", {"k": "v" * 513}, "string_above_max_length", "metadata.k"),
    ("metadata", {"k": 3}, "invalid_type", "metadata.k"),
    ("metadata", {"a secret": 3}, "invalid_type", "metadata"),
    ("context_management", {}, "invalid_type", "context_management"),
    ("context_management", [{}], "missing_required_parameter", "context_management[0].type"),
    ("context_management", [{"type": "forget"}], "invalid_value", "context_management[0].type"),
    (
        "context_management",
        [{"type": "compaction", "compact_threshold": 999}],
        "integer_below_min_value",
        "context_management[0].compact_threshold",
    ),
    ("truncation", "never", "invalid_value", "truncation"),
    ("service_tier", "express", "invalid_value", "service_tier"),
    ("prompt_cache_key", "k" * 65, "string_above_max_length", "prompt_cache_key"),
    ("prompt_cache_options", {"prewarm": 1}, "invalid_type", "prompt_cache_options.prewarm"),
    ("prompt_cache_options", {"ttl": "1h"}, "invalid_value", "prompt_cache_options.ttl"),
    ("prompt_cache_retention", "1h", "invalid_value", "prompt_cache_retention"),
    ("prompt", {"id": "pmpt_1"}, "unsupported_parameter", "prompt"),
    ("safety_identifier", "s" * 129, "string_above_max_length", "safety_identifier"),
    ("user", 3, "invalid_type", "user"),
]


@pytest.mark.parametrize(("field", "value", "code", "param"), REFUSED, ids=[f"{r[0]}-{r[2]}" for r in REFUSED])
@pytest.mark.parametrize("transport", ["websocket", "http"])
def test_refused(field: str, value: Any, code: str, param: str, transport: Any) -> None:
    error = refusal({"model": "m", "input": "hi", field: value}, transport)
    assert (error.code, error.param) == (code, param)
    assert error.status == 400
    assert len(error.message) < 600


@pytest.mark.parametrize(
    ("field", "value", "code", "param"),
    [
        ("stream_id", "main", "invalid_stream_id", "stream_id"),
        ("stream", "true", "invalid_type", "stream"),
        ("stream", 1, "invalid_type", "stream"),
        ("stream_options", [], "invalid_type", "stream_options"),
        ("stream_options", {"include_obfuscation": 1}, "invalid_type", "stream_options.include_obfuscation"),
    ],
)
def test_refused_over_http_only(field: str, value: Any, code: str, param: str) -> None:
    error = refusal({"model": "m", "input": "hi", field: value}, "http")
    assert (error.code, error.param) == (code, param)
    ws(**{field: value})


def test_refused_over_websocket_only() -> None:
    error = refusal({"model": "m", "input": "hi", "background": True})
    assert (error.code, error.param) == ("unsupported_parameter", "background")


def test_two_ways_to_continue() -> None:
    error = refusal({"model": "m", "input": "hi", "previous_response_id": "resp_1", "conversation": "conv_1"})
    assert (error.code, error.param) == ("mutually_exclusive_parameters", "conversation")


def test_messages_say_what_was_expected_and_what_kind_came() -> None:
    def message(**body: Any) -> str:
        return refusal({"model": "m", "input": "hi", **body}).message

    bad = [{"role": "user", "content": [{"type": "input_text", "text": ["my secret"]}]}]
    assert message(input=bad) == (
        "Invalid type for 'input[0].content[0].text': expected a string, but got an array instead."
    )
    assert message(model=None) == "Missing required parameter: 'model'."
    assert message(max_output_tokens=3) == "Invalid 'max_output_tokens': expected a value with minimum 16."
    assert message(truncation="x") == "Invalid value for 'truncation'. Supported values are: 'auto' or 'disabled'."
    assert message(prompt_cache_key="k" * 65) == (
        "Invalid 'prompt_cache_key': string too long. Expected a string with maximum length 64, "
        "but got a string with length 65 instead."
    )


SECRET = "s3cret"


@pytest.mark.parametrize(
    "value",
    [SECRET, {SECRET: SECRET}, [SECRET], {"type": SECRET}, [{"type": SECRET, "role": SECRET, "name": SECRET}]],
)
@pytest.mark.parametrize("field", sorted({row[0] for row in REFUSED} - {"metadata"}))
def test_a_message_never_quotes_the_client(field: str, value: Any) -> None:
    with contextlib.suppress(ApiError):
        ws(**{field: value})
        return
    assert SECRET not in str(refusal({"model": "m", "input": "hi", field: value}).body())


def test_a_million_bad_items_make_one_finding() -> None:
    assert refusal({"model": "m", "input": [{}] * 1_000_000}).param == "input[0].type"
    many = [{"role": "user", "content": [{"type": "input_text"}] * 1_000_000}]
    assert refusal({"model": "m", "input": many}).param == "input[0].content[0].text"


# --- the two relatives ---------------------------------------------------------------------------------------------


def test_compact() -> None:
    request = parse_compact({"model": "m", "input": [{"role": "user", "content": "hi"}], "instructions": "Shorten."})
    assert request.input == (Message("user", "hi"),)
    assert request.instructions == "Shorten."
    assert parse_compact({"model": "m", "previous_response_id": "resp_1"}).input == ()
    for body, param in (({"input": "x"}, "model"), ({"model": "m"}, "input")):
        with pytest.raises(ApiError) as caught:
            parse_compact(body)
        assert (caught.value.code, caught.value.param) == ("missing_required_parameter", param)


def test_input_tokens() -> None:
    request = parse_input_tokens({"model": "m", "input": "hi", "tools": [FUNCTION], "personality": "friendly"})
    assert not request.generate
    assert [tool.name for tool in request.tools.tools] == ["exec_command"]
    assert parse_input_tokens({"model": "m"}).input == ()


# --- anything at all -----------------------------------------------------------------------------------------------

KEYS = sorted({row[0] for row in REFUSED} | {"type", "id", "role", "content", "name", "call_id", "format", "mode"})
TAGS = (
    "message function_call function_call_output reasoning additional_tools input_text summary_text <hosted> <array> "
    "function custom namespace json_schema allowed_tools grammar output tools user auto required"
)
WORDS = [*KEYS, *TAGS.split()]
SCALARS = (
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.text(max_size=5) | st.sampled_from(WORDS)
)
ANY = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=5), inner, max_size=5)
    ),
    max_leaves=30,
)


@settings(max_examples=200)
@given(st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), ANY), st.sampled_from(["websocket", "http"]))
def test_any_object_is_a_request_or_a_refusal(body: dict[str, Any], transport: Any) -> None:
    with contextlib.suppress(ApiError):
        parse_create({"model": "m", "input": "hi", **body}, transport=transport, memo=ToolMemo())


@settings(max_examples=200)
@given(st.data())
def test_a_damaged_real_frame_is_a_request_or_a_refusal(data: st.DataObject) -> None:
    body = copy.deepcopy(data.draw(st.sampled_from(list(CLIENTS.values()))))
    for _ in range(data.draw(st.integers(1, 3))):
        place: Any = body
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            inner = place[key]
            if not (isinstance(inner, dict | list) and inner) or data.draw(st.booleans()):
                place[key] = data.draw(ANY)
                break
            place = inner
    with contextlib.suppress(ApiError):
        request = parse_create(body, transport="websocket")
        assert request.echo.keys() >= NEVER_NULL
