"""Tool definitions and choices (spec/protocol.md 2.1, A.5, A.7, 8.21)."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses.tool_param import ToolParam
from pydantic import TypeAdapter

from gateway.protocol.errors import ApiError
from gateway.protocol.tooldefs import MAX_TOOLS, ToolMemo, merge, parse_choice, parse_tools, read_tools
from gateway.protocol.tools import Tool, ToolChoice, ToolSet

OBJECT = {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}
SHELL = {"type": "function", "name": "exec_command", "strict": False, "description": "Run.", "parameters": OBJECT}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edit files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
NOTES = {"type": "custom", "name": "notes"}
# Codex: functions in a namespace without a description
AGENTS = {"type": "namespace", "name": "multi_agent_v1", "tools": [{"type": "function", "name": "spawn"}, NOTES]}
HOSTED: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_preview"},
    {"type": "file_search", "vector_store_ids": ["vs_1"]},
    {"type": "mcp", "server_label": "wiki", "server_url": "https://example.com"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "image_generation"},
    {"type": "computer"},
    {"type": "local_shell"},
    {"type": "shell"},
    {"type": "apply_patch"},
    {"type": "tool_search"},
    {"type": "programmatic_tool_calling"},
]
TOOLS = parse_tools([SHELL, PATCH, AGENTS])


def refused(code: str, param: str, call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ApiError) as caught:
        call(*arguments, **options)
    assert (caught.value.code, caught.value.param) == (code, param)
    return caught.value.message


def test_all_kinds() -> None:
    assert parse_tools([SHELL, {"type": "web_search"}, PATCH, NOTES, AGENTS]) == (
        Tool("function", "exec_command", None, "Run.", OBJECT, False),
        Tool("custom", "apply_patch", None, "Edit files.", grammar=("lark", "start: /.+/")),
        Tool("custom", "notes"),
        Tool("function", "spawn", "multi_agent_v1"),
        Tool("custom", "notes", "multi_agent_v1"),
    )


@pytest.mark.parametrize("raw", [None, [], (), HOSTED])
def test_nothing_callable(raw: Any) -> None:
    assert parse_tools(raw) == ()


@pytest.mark.parametrize("parameters", [None, {}, {"type": None}, {"type": ["object", "null"]}, {"properties": None}])
def test_lenient_parameters(parameters: Any) -> None:
    assert parse_tools([{"type": "function", "name": "f", "parameters": parameters}])[0].parameters == parameters


@pytest.mark.parametrize(("strict", "expected"), [(None, False), (False, False), (True, True)])
def test_strict(strict: Any, expected: bool) -> None:
    assert parse_tools([{"type": "function", "name": "f", "strict": strict}])[0].strict is expected


@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_free_text_custom_tools(form: Any) -> None:
    assert parse_tools([{"type": "custom", "name": "c", "format": form}])[0].grammar is None


def test_echo_has_all_five_keys_of_a_function() -> None:
    echo = read_tools([{"type": "function", "name": "f", "defer_loading": True}, {"type": "web_search"}, AGENTS]).echo
    function = {"type": "function", "name": "f", "description": None, "parameters": None, "strict": None}
    assert list(echo) == [{**function, "defer_loading": True}, {"type": "web_search"}, {**AGENTS, "description": ""}]
    assert read_tools([SHELL, PATCH]).echo == [SHELL, PATCH]


@pytest.mark.parametrize("raw", [SHELL, PATCH, NOTES, {**AGENTS, "description": "Agents."}, *HOSTED])
def test_what_the_sdk_types_allow_is_taken(raw: dict[str, Any]) -> None:
    full = {**raw, "parameters": raw.get("parameters")} if raw["type"] == "function" else raw
    TypeAdapter(ToolParam).validate_python(full)
    parse_tools([full])


@pytest.mark.parametrize(
    ("tools", "code", "param"),
    [
        ({}, "invalid_type", "tools"),
        ("web_search", "invalid_type", "tools"),
        ([3], "invalid_type", "tools[0]"),
        ([None], "missing_required_parameter", "tools[0]"),
        ([{}], "missing_required_parameter", "tools[0].type"),
        ([{"type": 3}], "invalid_type", "tools[0].type"),
        ([{"type": "function"}], "missing_required_parameter", "tools[0].name"),
        ([{"type": "function", "function": {"name": "chat"}}], "missing_required_parameter", "tools[0].name"),
        ([SHELL, {"type": "function", "name": 3}], "invalid_type", "tools[1].name"),
        ([{"type": "function", "name": ""}], "invalid_value", "tools[0].name"),
        ([{"type": "function", "name": "a.b"}], "invalid_value", "tools[0].name"),
        ([{"type": "function", "name": "a\n"}], "invalid_value", "tools[0].name"),
        ([{"type": "function", "name": "é"}], "invalid_value", "tools[0].name"),
        ([{"type": "function", "name": "a" * 129}], "string_above_max_length", "tools[0].name"),
        ([{"type": "function", "name": "a", "description": 1}], "invalid_type", "tools[0].description"),
        ([{"type": "function", "name": "a", "strict": "no"}], "invalid_type", "tools[0].strict"),
        ([{"type": "function", "name": "a", "parameters": []}], "invalid_type", "tools[0].parameters"),
        ([{"type": "function", "name": "a", "parameters": "{}"}], "invalid_type", "tools[0].parameters"),
        (
            [{"type": "function", "name": "a", "parameters": {"type": "string"}}],
            "invalid_json_schema",
            "tools[0].parameters",
        ),
        (
            [{"type": "function", "name": "a", "parameters": {"type": {}}}],
            "invalid_json_schema",
            "tools[0].parameters",
        ),
        (
            [{"type": "function", "name": "a", "parameters": {"type": "object", "properties": []}}],
            "invalid_json_schema",
            "tools[0].parameters",
        ),
        ([{"type": "custom", "name": "c", "format": "text"}], "invalid_type", "tools[0].format"),
        ([{"type": "custom", "name": "c", "format": {"type": "json"}}], "invalid_value", "tools[0].format.type"),
        (
            [{"type": "custom", "name": "c", "format": {"type": "grammar"}}],
            "missing_required_parameter",
            "tools[0].format.syntax",
        ),
        (
            [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "ebnf"}}],
            "invalid_value",
            "tools[0].format.syntax",
        ),
        (
            [{"type": "custom", "name": "c", "format": {"type": "grammar", "syntax": "lark", "definition": 1}}],
            "invalid_type",
            "tools[0].format.definition",
        ),
        ([{"type": "namespace", "tools": []}], "missing_required_parameter", "tools[0].name"),
        ([{"type": "namespace", "name": "n"}], "missing_required_parameter", "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": {}}], "invalid_type", "tools[0].tools"),
        ([{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}], "missing_required_parameter",
         "tools[0].tools[0].name"),
        ([SHELL, PATCH, SHELL], "invalid_value", "tools[2].name"),
        ([SHELL, {"type": "custom", "name": "exec_command"}], "invalid_value", "tools[1].name"),
        ([AGENTS, {"type": "namespace", "name": "multi_agent_v1", "tools": [NOTES]}], "invalid_value",
         "tools[1].tools[0].name"),
        ([{"type": "function", "name": f"f{n}"} for n in range(MAX_TOOLS + 1)], "array_above_max_length", "tools"),
    ],
)  # fmt: skip
def test_refused_definitions(tools: Any, code: str, param: str) -> None:
    refused(code, param, parse_tools, tools)
    refused(code, param, ToolMemo().read, tools)
    refused(code, param.replace("tools", "input[3].tools", 1), parse_tools, tools, "input[3].tools")


def test_the_same_name_in_two_namespaces() -> None:
    other = {"type": "namespace", "name": "other", "tools": [NOTES]}
    assert [tool.model_name for tool in parse_tools([NOTES, AGENTS, other])] == [
        "notes",
        "multi_agent_v1.spawn",
        "multi_agent_v1.notes",
        "other.notes",
    ]


@pytest.mark.parametrize(
    ("raw", "choice"),
    [
        (None, ToolChoice()),
        ("auto", ToolChoice("auto")),
        ("none", ToolChoice("none")),
        ("required", ToolChoice("required")),
        ({"type": "function", "name": "exec_command"}, ToolChoice("required", ("exec_command",))),
        ({"type": "custom", "name": "apply_patch"}, ToolChoice("required", ("apply_patch",))),
        ({"type": "function", "name": "spawn"}, ToolChoice("required", ("multi_agent_v1.spawn",))),
        (
            {"type": "custom", "name": "notes", "namespace": "multi_agent_v1"},
            ToolChoice("required", ("multi_agent_v1.notes",)),
        ),
        (
            {
                "type": "allowed_tools",
                "mode": "auto",
                "tools": [
                    {"type": "function", "name": "exec_command"},
                    {"type": "mcp", "server_label": "wiki"},
                    {"type": "custom", "name": "apply_patch"},
                    {"type": "function", "name": "exec_command"},
                ],
            },
            ToolChoice("auto", ("exec_command", "apply_patch")),
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]},
            ToolChoice("required", ("apply_patch",)),
        ),
        # only hosted tools are allowed, and none of them runs here
        ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "image_generation"}]}, ToolChoice("none")),
    ],
)
def test_choices(raw: Any, choice: ToolChoice) -> None:
    assert parse_choice(raw, TOOLS) == choice


@pytest.mark.parametrize(
    ("raw", "code", "param"),
    [
        (3, "invalid_type", "tool_choice"),
        ([], "invalid_type", "tool_choice"),
        ("any", "invalid_value", "tool_choice"),
        ({}, "missing_required_parameter", "tool_choice.type"),
        ({"type": "auto"}, "invalid_value", "tool_choice.type"),
        ({"type": "function"}, "missing_required_parameter", "tool_choice.name"),
        ({"type": "function", "function": {"name": "f"}}, "missing_required_parameter", "tool_choice.name"),
        ({"type": "function", "name": 3}, "invalid_type", "tool_choice.name"),
        ({"type": "function", "name": "unknown"}, "invalid_value", "tool_choice"),
        ({"type": "function", "name": "apply_patch"}, "invalid_value", "tool_choice"),
        ({"type": "custom", "name": "exec_command"}, "invalid_value", "tool_choice"),
        ({"type": "allowed_tools"}, "missing_required_parameter", "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "none"}, "invalid_value", "tool_choice.mode"),
        ({"type": "allowed_tools", "mode": "auto"}, "missing_required_parameter", "tool_choice.tools"),
        ({"type": "allowed_tools", "mode": "auto", "tools": []}, "invalid_value", "tool_choice.tools"),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function"}]},
            "missing_required_parameter",
            "tool_choice.tools[0].name",
        ),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "unknown"}]},
            "invalid_value",
            "tool_choice",
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "image_generation"}]},
            "unsupported_parameter",
            "tool_choice",
        ),
        *(({**tool}, "unsupported_parameter", "tool_choice") for tool in HOSTED),
    ],
)
def test_refused_choices(raw: Any, code: str, param: str) -> None:
    refused(code, param, parse_choice, raw, TOOLS)


def test_required_needs_a_tool() -> None:
    refused("invalid_value", "tool_choice", parse_choice, "required", ())
    refused("invalid_value", "tool_choice", merge, ToolSet(choice=ToolChoice("required")), ())


def test_a_name_in_two_namespaces_needs_its_namespace() -> None:
    other = {"type": "namespace", "name": "other", "tools": [NOTES]}
    tools = parse_tools([AGENTS, other])
    assert "namespace" in refused(
        "invalid_value", "tool_choice", parse_choice, {"type": "custom", "name": "notes"}, tools
    )
    # the top-level one is meant if there is one
    choice = parse_choice({"type": "custom", "name": "notes"}, parse_tools([AGENTS, other, NOTES]))
    assert choice.names == ("notes",)


def test_a_choice_may_wait_for_the_tools_of_the_context() -> None:
    choice = parse_choice({"type": "function", "name": "spawn"}, (), more_to_come=True)
    waiting = ToolSet(choice=choice)
    whole = merge(waiting, TOOLS)
    assert whole.choice.names == ("multi_agent_v1.spawn",)
    assert [tool.model_name for tool in whole.callable()] == ["multi_agent_v1.spawn"]
    refused("invalid_value", "tool_choice", merge, waiting, ())
    assert merge(ToolSet(choice=parse_choice("required", (), more_to_come=True)), TOOLS).callable() == TOOLS


def test_merge_takes_the_latest_definition() -> None:
    newer = Tool("function", "exec_command", description="Newer.")
    merged = merge(ToolSet(TOOLS, parallel=False), [newer])
    assert merged.tools == (newer, *TOOLS[1:])
    assert not merged.parallel


def test_memo_shares_what_is_the_same() -> None:
    memo = ToolMemo(capacity=2)
    first = memo.read([SHELL, {"type": "web_search"}])
    assert memo.read([dict(SHELL), {"type": "web_search"}]) is first
    # equal for Python, not the same for a model
    assert memo.read([{**SHELL, "parameters": {"default": True}}]) is not memo.read(
        [{**SHELL, "parameters": {"default": 1}}]
    )
    assert memo.read([SHELL, {"type": "web_search"}]) is not first  # two others came between


def test_memo_is_bounded() -> None:
    memo = ToolMemo(max_bytes=100)
    assert memo.read([SHELL]) is not memo.read([SHELL])
    unwritable = [{**NOTES, "description": "\ud800"}]
    assert memo.read(unwritable) == read_tools(unwritable)
