"""The create request: validated once, at the edge, into frozen dataclasses that are cheap behind it.

Source: spec/protocol.md 2.1 and A.6 (fields and bounds), A.4 (input items), 3.6 (what the Response object repeats),
6.1 (the two HTTP relatives). Null means absent for every optional field; unknown fields are ignored. What real clients
send beside the published types is in spec/clients.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import orjson

from gateway.protocol.body import Body, Conversation, SchemaFormat, TextConfig, validate_body
from gateway.protocol.errors import ApiError
from gateway.protocol.invalid import missing, path_of, too_long, wrong_type, wrong_value
from gateway.protocol.items import AdditionalTools, Compaction, CompactionTrigger, Item, ItemReference, Message
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tooldefs import ToolMemo, parse_choice, parse_tools, read_tools
from gateway.protocol.tools import Tool, ToolSet

MAX_METADATA = 16
MAX_METADATA_KEY_CHARS = 64
MAX_METADATA_VALUE_CHARS = 512

Transport = Literal["websocket", "http"]


@dataclass(frozen=True, slots=True)
class CreateRequest:
    """One turn as asked for. `generate` is False for a warm-up (4.4). `echo` holds every key of the Response object
    that only repeats the request; parts of it are shared between requests, so nobody changes it.

    `tools` are those of the request's own list: the tools of `additional_tools` items belong to the context and are
    put in with `tooldefs.merge`, which also checks the choice when this request could not."""

    model: str
    input: tuple[Item, ...]
    previous_response_id: str | None
    conversation: str | None
    instructions: str | None
    store: bool
    generate: bool
    stream: bool
    background: bool
    tools: ToolSet
    text: TextFormat
    effort: str | None
    summary: str | None
    max_output_tokens: int | None
    temperature: float
    top_p: float
    top_logprobs: int
    include: frozenset[str]
    metadata: Mapping[str, str]
    compact_threshold: int | None
    truncation: str
    service_tier: str | None
    prompt_cache_key: str | None
    include_obfuscation: bool
    user: str | None
    safety_identifier: str | None
    echo: dict[str, Any]


def parse_create(body: Mapping[str, Any], *, transport: Transport, memo: ToolMemo | None = None) -> CreateRequest:
    """The body of `response.create` or of `POST /responses`. Raises `ApiError`. `memo` saves reading the same tools
    again and again. The lane name of a WebSocket frame is not looked at here."""
    request = _read(body, transport, memo)
    has_context = request.previous_response_id is not None or request.conversation is not None
    if request.generate and not request.input and not has_context:
        raise missing("input")
    return request


def parse_compact(body: Mapping[str, Any]) -> CreateRequest:
    """The body of `POST /responses/compact`. Fields that this endpoint lacks have no effect."""
    request = _read(body, "http", None)
    if not request.input and request.previous_response_id is None:
        raise missing("input")
    return replace(request, generate=True, stream=False, background=False, store=False)


def parse_input_tokens(body: Mapping[str, Any]) -> CreateRequest:
    """The body of `POST /responses/input_tokens`: nothing is generated, and an empty input is fine."""
    return replace(_read(body, "http", None), generate=False, stream=False, background=False, store=False)


def _read(body: Mapping[str, Any], transport: Transport, memo: ToolMemo | None) -> CreateRequest:
    fields = validate_body(body)
    stream, include_obfuscation = _transport_fields(body, transport)
    if fields.background and transport == "websocket":
        message = "Background responses are not supported over WebSocket. Use POST /v1/responses."
        raise ApiError("unsupported_parameter", message, "background")
    if body.get("prompt") is not None:
        message = "This gateway has no prompt store. Send the prompt as 'instructions' or 'input'."
        raise ApiError("unsupported_parameter", message, "prompt")
    conversation = fields.conversation.id if isinstance(fields.conversation, Conversation) else fields.conversation
    if conversation is not None and fields.previous_response_id is not None:
        message = "'previous_response_id' and 'conversation' are mutually exclusive: send one of them."
        raise ApiError("mutually_exclusive_parameters", message, "conversation")
    given = _input(fields.input)
    tools, tools_echo = _tools(body, fields, given, memo)
    text, text_echo = _text(fields.text)
    metadata = _metadata(body.get("metadata"))
    prewarm = fields.prompt_cache_options is not None and fields.prompt_cache_options.prewarm
    return CreateRequest(
        model=fields.model,
        input=given,
        previous_response_id=fields.previous_response_id,
        conversation=conversation,
        instructions=fields.instructions,
        store=fields.store is not False,
        generate=fields.generate is not False and not prewarm,
        stream=stream,
        background=bool(fields.background),
        tools=tools,
        text=text,
        effort=None if fields.reasoning is None else fields.reasoning.effort,
        summary=None if fields.reasoning is None else fields.reasoning.summary,
        max_output_tokens=fields.max_output_tokens,
        temperature=1.0 if fields.temperature is None else fields.temperature,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_logprobs=fields.top_logprobs or 0,
        include=frozenset(fields.include or ()),
        metadata=metadata,
        compact_threshold=_compact_threshold(fields),
        truncation=fields.truncation or "disabled",
        service_tier=fields.service_tier,
        prompt_cache_key=fields.prompt_cache_key,
        include_obfuscation=include_obfuscation,
        user=fields.user,
        safety_identifier=fields.safety_identifier,
        echo=_echo(fields, conversation, tools_echo, body.get("tool_choice"), text_echo, metadata),
    )


def _transport_fields(body: Mapping[str, Any], transport: Transport) -> tuple[bool, bool]:
    """`stream` and `stream_options.include_obfuscation`. On a socket everything streams and both are ignored, whatever
    they hold (8.3); over HTTP there are no lanes."""
    if transport == "websocket":
        return True, False
    if body.get("stream_id") is not None:
        raise ApiError("invalid_stream_id", "'stream_id' is for WebSocket connections only: leave it out.", "stream_id")
    stream = body.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise wrong_type("stream", "a boolean", stream)
    options = body.get("stream_options")
    if options is None:
        return bool(stream), False
    if not isinstance(options, dict):
        raise wrong_type("stream_options", "an object", options)
    obfuscation = options.get("include_obfuscation")
    if obfuscation is not None and not isinstance(obfuscation, bool):
        raise wrong_type("stream_options.include_obfuscation", "a boolean", obfuscation)
    return bool(stream), bool(obfuscation)


def _input(given: str | tuple[Item, ...] | None) -> tuple[Item, ...]:
    """A string is one user message; an empty one is nothing."""
    if not given:
        return ()
    if isinstance(given, str):
        return (Message("user", given),)
    for index, item in enumerate(given[:-1]):
        if isinstance(item, CompactionTrigger):
            raise wrong_value(f"input[{index}]", "A 'compaction_trigger' must be the last input item.")
    return given


def _tools(
    body: Mapping[str, Any], fields: Body, given: tuple[Item, ...], memo: ToolMemo | None
) -> tuple[ToolSet, list[Any]]:
    """The request's own tools, and their echo. The choice may name a tool that only the context has."""
    definitions = read_tools(body.get("tools")) if memo is None else memo.read(body.get("tools"))
    known: list[Tool] = list(definitions.tools)
    more_to_come = fields.previous_response_id is not None or fields.conversation is not None
    for index, item in enumerate(given):
        if isinstance(item, AdditionalTools):
            known += parse_tools(item.tools, f"input[{index}].tools")
        more_to_come = more_to_come or isinstance(item, ItemReference | Compaction)
    choice = parse_choice(body.get("tool_choice"), known, more_to_come=more_to_come)
    return ToolSet(definitions.tools, choice, fields.parallel_tool_calls is not False), list(definitions.echo)


def _text(text: TextConfig | None) -> tuple[TextFormat, dict[str, Any]]:
    """The wanted form of the output, and its echo with `format` always there (3.6)."""
    if text is None:
        return TextFormat(), {"format": {"type": "text"}}
    form = text.format
    verbosity = text.verbosity
    echo: dict[str, Any] = {"format": {"type": "text" if form is None else form.type}}
    if verbosity is not None:
        echo["verbosity"] = verbosity
    if isinstance(form, SchemaFormat):
        try:
            schema = orjson.dumps(form.schema).decode()
        except orjson.JSONEncodeError:  # not from `decode_object`
            raise wrong_value("text.format.schema", "Expected a JSON schema.") from None
        echo["format"] |= {
            "name": form.name,
            "description": form.description,
            "schema": form.schema,
            "strict": bool(form.strict),
        }
        return TextFormat("json_schema", schema, verbosity), echo
    return TextFormat("text" if form is None else form.type, None, verbosity), echo


def _metadata(raw: Any) -> dict[str, str]:
    """At most 16 pairs (2.1). By hand: pydantic would report every bad pair of a huge map."""
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise wrong_type("metadata", "an object", raw)
    if len(raw) > MAX_METADATA:
        raise wrong_value("metadata", f"Expected at most {MAX_METADATA} pairs, but got {len(raw)}.")
    for key, value in raw.items():
        if len(key) > MAX_METADATA_KEY_CHARS:
            raise wrong_value("metadata", f"Expected keys of at most {MAX_METADATA_KEY_CHARS} characters.")
        param = path_of("metadata", key)
        if not isinstance(value, str):
            raise wrong_type(param, "a string", value)
        if len(value) > MAX_METADATA_VALUE_CHARS:
            raise too_long(param, MAX_METADATA_VALUE_CHARS, len(value))
    return raw


def _compact_threshold(fields: Body) -> int | None:
    thresholds = [entry.compact_threshold for entry in fields.context_management or ()]
    return min((threshold for threshold in thresholds if threshold is not None), default=None)


def _echo(
    fields: Body,
    conversation: str | None,
    tools: list[Any],
    tool_choice: Any,
    text: dict[str, Any],
    metadata: dict[str, str],
) -> dict[str, Any]:
    """The keys of the Response object that repeat the request, with the not-null rules of 3.6."""
    reasoning: dict[str, Any] = {"effort": None, "summary": None}
    if (asked := fields.reasoning) is not None:
        reasoning = {"effort": asked.effort, "summary": asked.summary}
        for key in ("context", "mode", "generate_summary"):
            if (value := getattr(asked, key)) is not None:
                reasoning[key] = value
    echo: dict[str, Any] = {
        "background": bool(fields.background),
        "frequency_penalty": 0.0,
        "instructions": fields.instructions,
        "max_output_tokens": fields.max_output_tokens,
        "max_tool_calls": fields.max_tool_calls,
        "metadata": metadata,
        "model": fields.model,
        "parallel_tool_calls": fields.parallel_tool_calls is not False,
        "presence_penalty": 0.0,
        "previous_response_id": fields.previous_response_id,
        "prompt_cache_key": fields.prompt_cache_key,
        "reasoning": reasoning,
        "safety_identifier": fields.safety_identifier,
        "service_tier": "default" if fields.service_tier in {None, "auto"} else fields.service_tier,
        "store": fields.store is not False,
        "temperature": 1.0 if fields.temperature is None else fields.temperature,
        "text": text,
        "tool_choice": "auto" if tool_choice is None else tool_choice,
        "tools": tools,
        "top_logprobs": fields.top_logprobs or 0,
        "top_p": 1.0 if fields.top_p is None else fields.top_p,
        "truncation": fields.truncation or "disabled",
        "user": fields.user,
    }
    if conversation is not None:
        echo["conversation"] = {"id": conversation}
    return echo
