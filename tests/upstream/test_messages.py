"""Prompts as JSON text: in whatever pieces a conversation comes, strict servers take what goes out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.conversation import is_waiting
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
from inference.formats.format import Brief
from inference.formats.jsontext import UpstreamRequest, request_body, wire_name
from inference.formats.messages import MessagesFormat
from inference.upstream.dialects import CEREBRAS, CEREBRAS_GPT_OSS, DIALECTS, GENERIC, OPENAI, VLLM, Dialect
from tests.support.upstreams import CerebrasChatRequest, check_order
from tests.support.upstreams import ChatRequest as StrictChatRequest

SHELL = Tool("function", "shell", None, "Runs it", {"type": "object", "properties": {"c": {"type": "string"}}})
PATCH = Tool("custom", "patch", None, "Patches")
GET = Tool("function", "get", "db")


def messages(form: MessagesFormat, items: Sequence[Item], calls: dict[str, str] | None = None) -> list[Any]:
    text = form.body(items, calls or {})
    assert len(text) % 4 == 0
    found = json.loads(b"[" + text.rstrip(b", ") + b"]")
    assert isinstance(found, list)
    return found


def thought(text: str) -> Reasoning:
    return Reasoning(content=(ReasoningText(text),))


def test_a_conversation() -> None:
    items: list[Item] = [
        Message("user", "What is here?"),
        thought("Look."),
        Message("assistant", (OutputText("I'll look."),)),
        FunctionCall("c1", "shell", '{"c": "ls"}'),
        CustomToolCall("c2", "patch", 'a "b"'),
        FunctionCallOutput("c1", (InputText("4"), InputText("2"))),
        CustomToolCallOutput("c2", ""),
        Message("developer", "Be brief."),
        Message("user", (InputText("And "), InputText("now?"))),
    ]
    said = {
        "role": "assistant",
        "content": "I'll look.",
        "reasoning": "Look.",
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "shell", "arguments": '{"c": "ls"}'}},
            {"id": "c2", "type": "function", "function": {"name": "patch", "arguments": '{"input":"a \\"b\\""}'}},
        ],
    }
    expected = [
        {"role": "user", "content": "What is here?"},
        said,
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "And now?"},
    ]
    assert messages(MessagesFormat(CEREBRAS), items) == expected
    assert messages(MessagesFormat(GENERIC), items)[1] == {key: said[key] for key in said if key != "reasoning"}
    assert messages(MessagesFormat(OPENAI), items)[4] == {"role": "developer", "content": "Be brief."}


def test_the_head_is_one_message() -> None:
    form = MessagesFormat(OPENAI)
    head = form.head(Brief("Rules", "More", ToolSet((SHELL,))))
    assert json.loads(head.rstrip(b", ")) == {"role": "developer", "content": "Rules\n\nMore"}
    assert form.head(Brief()) == b""
    assert json.loads(form.head(Brief(preamble="x")).rstrip(b", "))["content"] == "x"
    assert form.whole(Brief("Rules"), [Message("user", "x")], {}) == form.head(Brief("Rules")) + form.body(
        [Message("user", "x")], {}
    )


TEXT = st.text(max_size=12)
ARGUMENTS = st.one_of(
    st.dictionaries(TEXT, TEXT, max_size=2).map(json.dumps), st.sampled_from(["", '{"a":1}}', "[1]", '"x', "{'a': 1}"])
)


@st.composite
def turns(draw: st.DrawFn) -> list[list[Item]]:
    """A conversation in the pieces it is rendered in: what a client adds, what the model says."""
    pieces: list[list[Item]] = []
    waiting: list[FunctionCall | CustomToolCall] = []
    number = 0
    for _ in range(draw(st.integers(1, 4))):
        given_items: list[Item] = [
            CustomToolCallOutput(call.call_id, draw(TEXT))
            if isinstance(call, CustomToolCall)
            else FunctionCallOutput(call.call_id, draw(TEXT))
            for call in draw(st.permutations(waiting))
        ]
        role = st.sampled_from(["user", "system", "developer", "user"])
        for _ in range(draw(st.integers(0 if given_items else 1, 2))):
            at = draw(st.integers(0, len(given_items)))
            given_items.insert(at, Message(draw(role), draw(TEXT)))  # type: ignore[arg-type]
        pieces.append(given_items)
        waiting = []
        said: list[Item] = []
        for kind in draw(st.lists(st.sampled_from(["text", "thought", "call", "custom", "cut"]), max_size=4)):
            number += 1
            if kind == "text":
                said.append(Message("assistant", draw(st.one_of(TEXT, st.just(())))))
            elif kind == "thought":
                said.append(Reasoning(summary=(SummaryText(draw(TEXT)),)))
            elif kind == "cut":
                said.append(FunctionCall(f"c{number}", "get", '{"a', status="incomplete"))
            elif kind == "call":
                namespace = draw(st.sampled_from([None, "db"]))
                waiting.append(FunctionCall(f"c{number}", "get", draw(ARGUMENTS), namespace=namespace))
                said.append(waiting[-1])
            else:
                waiting.append(CustomToolCall(f"c{number}", "patch", draw(TEXT)))
                said.append(waiting[-1])
        pieces.append(said)
    outputs: list[Item] = [
        CustomToolCallOutput(call.call_id, "x")
        if isinstance(call, CustomToolCall)
        else FunctionCallOutput(call.call_id, "x")
        for call in waiting
    ]
    return [*pieces, [*outputs, Message("user", "go on")]]


@given(turns(), st.sampled_from([CEREBRAS_GPT_OSS, GENERIC]), st.one_of(st.none(), TEXT))
@settings(max_examples=100, deadline=None)
def test_strict_servers_take_every_conversation(pieces: list[list[Item]], dialect: Dialect, rules: str | None) -> None:
    form = MessagesFormat(dialect)
    brief = Brief(rules, tools=ToolSet((SHELL, PATCH, GET)))
    parts, calls = [form.head(brief)], {}
    for piece in pieces:
        parts.append(form.body(piece, calls))
        calls.update({i.call_id: i.name for i in piece if is_waiting(i)})
        for item in piece:
            if isinstance(item, FunctionCallOutput | CustomToolCallOutput):
                del calls[item.call_id]
    opening = form.opening(brief)
    request = opening.parsing
    assert isinstance(request, UpstreamRequest)
    assert all(len(part) % 4 == 0 for part in parts)
    body = request_body("messages", [*parts, opening.ids], request, {"model": "m", "stream": True})
    schema = CerebrasChatRequest if dialect is CEREBRAS_GPT_OSS else StrictChatRequest
    parsed = schema.model_validate_json(body)
    check_order(parsed.messages)
    texts = [item.content for piece in pieces for item in piece if isinstance(item, Message) and item.role == "user"]
    assert sorted(m.content for m in parsed.messages if m.role == "user") == sorted(map(str, texts))


def test_outputs_stand_behind_their_calls() -> None:
    form = MessagesFormat(GENERIC)
    items = [Message("user", "wait"), FunctionCallOutput("c1", "1"), FunctionCallOutput("c2", "2")]
    roles = [message["role"] for message in messages(form, items, {"c1": "f", "c2": "f"})]
    assert roles == ["tool", "tool", "user"]


@pytest.mark.parametrize("arguments", ['{"a":1}}', "[1]", "null", "{'a'", "9" * 5000])
def test_old_arguments_that_are_no_object_are_kept_as_text(arguments: str) -> None:
    (message,) = messages(MessagesFormat(GENERIC), [FunctionCall("c", "f", arguments)])
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"arguments": arguments}


def test_lone_surrogates_and_great_numbers() -> None:
    form = MessagesFormat(GENERIC)
    assert messages(form, [Message("user", "a\ud83d")])[0]["content"] == "a\ufffd"
    huge = Tool("function", "f", None, None, {"type": "object", "properties": {"x": {"maximum": 2**70}}})
    fields = json.loads(form.opening(Brief(tools=ToolSet((huge,)))).parsing.fields)  # type: ignore[union-attr]
    assert fields["tools"][0]["function"]["parameters"]["properties"]["x"]["maximum"] == 2**70


def test_images_where_the_dialect_has_a_place() -> None:
    image = InputImage(image_url="https://x/y.png", detail="low")
    items = [Message("user", (InputText("see"), image))]
    parts = [
        {"type": "text", "text": "see"},
        {"type": "image_url", "image_url": {"url": "https://x/y.png", "detail": "low"}},
    ]
    assert messages(MessagesFormat(VLLM), items) == [{"role": "user", "content": parts}]
    refused: list[tuple[Dialect, Item]] = [
        (CEREBRAS_GPT_OSS, items[0]),
        (VLLM, Message("user", (InputImage(file_id="f"),))),
        (VLLM, Message("user", (image, InputFile(file_id="f")))),
        (VLLM, FunctionCallOutput("c", (image,))),
        (GENERIC, Message("system", (InputFile(file_id="f"),))),
    ]
    for dialect, item in refused:
        with pytest.raises(ApiError) as caught:
            MessagesFormat(dialect).body([item], {"c": "f"})
        assert caught.value.code == "unsupported_parameter"


def fields_of(dialect: Dialect, brief: Brief) -> dict[str, Any]:
    opening = MessagesFormat(dialect).opening(brief)
    assert opening.ids == b""
    assert opening.guide is None
    assert isinstance(opening.parsing, UpstreamRequest)
    found = json.loads(opening.parsing.fields)
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("choice", [ToolChoice("required"), ToolChoice("required", ("shell",))])
def test_a_choice_the_upstream_lacks_is_refused(choice: ToolChoice) -> None:
    with pytest.raises(ApiError) as caught:
        fields_of(CEREBRAS_GPT_OSS, Brief(tools=ToolSet((SHELL, PATCH), choice)))
    assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tool_choice")
    assert "auto or none" in caught.value.message


@pytest.mark.parametrize(
    ("choice", "offered", "expected"),
    [
        (ToolChoice("auto"), ["shell", "patch"], "auto"),
        (ToolChoice("none"), ["shell", "patch"], "none"),
        (ToolChoice("required"), ["shell", "patch"], "required"),
        (ToolChoice("required", ("patch",)), ["shell", "patch"], {"type": "function", "function": {"name": "patch"}}),
        (ToolChoice("auto", ("patch",)), ["patch"], "auto"),
    ],
)
def test_choices(choice: ToolChoice, offered: list[str], expected: Any) -> None:
    fields = fields_of(VLLM, Brief(tools=ToolSet((SHELL, PATCH), choice)))
    assert [tool["function"]["name"] for tool in fields["tools"]] == offered
    assert fields["tool_choice"] == expected
    StrictChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": ""}], **fields})


def test_a_call_of_nothing_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        fields_of(VLLM, Brief(tools=ToolSet((SHELL,), ToolChoice("required", ("gone",)))))
    assert (caught.value.code, caught.value.param) == ("invalid_value", "tool_choice")


def test_no_tools_no_choice() -> None:
    assert fields_of(CEREBRAS, Brief()) == {}
    assert fields_of(CEREBRAS, Brief(tools=ToolSet(parallel=False))) == {}


def test_one_call_at_a_time_is_asked_for_and_held() -> None:
    brief = Brief(tools=ToolSet((SHELL,), parallel=False))
    assert fields_of(CEREBRAS, brief)["parallel_tool_calls"] is False
    assert "parallel_tool_calls" not in fields_of(GENERIC, brief)
    for dialect in DIALECTS.values():
        assert MessagesFormat(dialect).opening(brief).parsing.one_call  # type: ignore[union-attr]


def test_names_fit_and_are_mapped_back() -> None:
    request = MessagesFormat(CEREBRAS).opening(Brief(tools=ToolSet((GET, SHELL)))).parsing
    assert isinstance(request, UpstreamRequest)
    name = json.loads(request.fields)["tools"][0]["function"]["name"]
    assert request.names == {name: "db.get"}
    (message,) = messages(MessagesFormat(CEREBRAS), [FunctionCall("c", "get", "{}", namespace="db")])
    assert message["tool_calls"][0]["function"]["name"] == name


@given(st.lists(st.text(min_size=1, max_size=128), min_size=2, max_size=2, unique=True))
def test_names_stay_apart(names: list[str]) -> None:
    first, second = map(wire_name, names)
    assert first != second
    for name in (first, second):
        assert len(name) <= 64
        assert name.isascii()
        assert name.replace("_", "").replace("-", "").isalnum() or not name.strip("_-")


CLOSED = {
    "type": "object",
    "properties": {
        "a": {"type": "array", "items": {"type": "object", "properties": {}, "additionalProperties": False}}
    },
    "required": ["a"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("schema", "strict"),
    [
        (CLOSED, True),
        ({**CLOSED, "required": []}, False),
        ({**CLOSED, "additionalProperties": True}, False),
        ({"type": "object"}, False),
        ({**CLOSED, "properties": {"a": {"type": "object"}}}, False),
    ],
)
def test_schemas_hold_where_they_can(schema: dict[str, Any], strict: bool) -> None:
    fields = fields_of(CEREBRAS, Brief(text=TextFormat("json_schema", json.dumps(schema))))
    form = {"name": "response", "schema": schema, "strict": strict}
    assert fields == {"response_format": {"type": "json_schema", "json_schema": form}}
    fields = fields_of(GENERIC, Brief(text=TextFormat("json_schema", json.dumps(schema))))
    assert fields["response_format"]["json_schema"] == {"name": "response", "schema": schema}


@pytest.mark.parametrize("schema", ["{", '{"type": "thing"}', "7"])
def test_broken_schemas_are_refused(schema: str) -> None:
    with pytest.raises(ApiError) as caught:
        fields_of(CEREBRAS, Brief(text=TextFormat("json_schema", schema)))
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", "text.format.schema")


def test_formats_a_dialect_lacks_are_refused() -> None:
    bare = Dialect("bare", formats=frozenset({"json_object"}), format_beside_tools=False)
    assert fields_of(bare, Brief(text=TextFormat("json_object"))) == {"response_format": {"type": "json_object"}}
    with pytest.raises(ApiError, match="json_schema"):
        fields_of(bare, Brief(text=TextFormat("json_schema", "{}")))
    with pytest.raises(ApiError, match="beside tools"):
        fields_of(bare, Brief(tools=ToolSet((SHELL,)), text=TextFormat("json_object")))


@pytest.mark.parametrize(
    ("dialect", "effort", "sent"),
    [
        (CEREBRAS, "none", "none"),
        (CEREBRAS_GPT_OSS, "none", None),
        (CEREBRAS_GPT_OSS, "minimal", "low"),
        (CEREBRAS, "xhigh", "high"),
        (OPENAI, "xhigh", "xhigh"),
        (GENERIC, "high", None),
        (CEREBRAS, None, None),
    ],
)
def test_efforts(dialect: Dialect, effort: str | None, sent: str | None) -> None:
    assert fields_of(dialect, Brief(effort=effort)).get("reasoning_effort") == sent


def test_strict_functions_where_known() -> None:
    strict = Tool("function", "f", None, None, CLOSED, strict=True)
    assert fields_of(CEREBRAS, Brief(tools=ToolSet((strict,))))["tools"][0]["function"]["strict"] is True
    assert "strict" not in fields_of(GENERIC, Brief(tools=ToolSet((strict,))))["tools"][0]["function"]


def test_a_broken_grammar_is_refused() -> None:
    broken = Tool("custom", "patch", grammar=("lark", "start: ("))
    with pytest.raises(ApiError):
        fields_of(VLLM, Brief(tools=ToolSet((broken,))))
