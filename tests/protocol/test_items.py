"""Input items: each type of spec/protocol.md A.4 goes in and comes out with the fields we keep."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam
from pydantic import TypeAdapter

from gateway.protocol import items
from gateway.protocol.body import HOSTED_ITEMS
from gateway.protocol.errors import ApiError
from gateway.protocol.items import to_json
from gateway.protocol.requests import parse_create

SDK_ITEM: TypeAdapter[Any] = TypeAdapter(ResponseInputItemParam)
TEXT = {"type": "input_text", "text": "hello"}
IMAGE = {"type": "input_image", "image_url": "data:image/png;base64,AA==", "detail": "auto"}
FILE = {"type": "input_file", "file_data": "data:text/plain;base64,AA==", "filename": "a.txt"}
OUTPUT_TEXT = {"type": "output_text", "text": "done", "annotations": []}

OURS: list[dict[str, Any]] = [
    {"type": "message", "role": "user", "content": "hello"},
    {"type": "message", "role": "system", "content": [TEXT]},
    {"type": "message", "role": "developer", "content": [TEXT, TEXT], "status": "completed"},
    {"type": "message", "role": "user", "content": [TEXT, IMAGE, FILE]},
    {"type": "message", "role": "assistant", "content": "working on it", "phase": "commentary"},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "incomplete",
        "phase": "final_answer",
        "content": [OUTPUT_TEXT, {"type": "refusal", "refusal": "no"}],
    },
    {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"cmd":"ls"}'},
    {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "call_1",
        "name": "spawn",
        "namespace": "agents",
        "arguments": "",
        "status": "completed",
    },
    {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "ok", "status": "completed"},
    {"type": "function_call_output", "call_id": "call_1", "output": [TEXT, IMAGE, FILE]},
    {"type": "function_call_output", "call_id": "call_1", "output": ""},
    {"type": "custom_tool_call", "id": "ctc_1", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin"},
    {"type": "custom_tool_call", "call_id": "call_2", "name": "exec", "namespace": "functions", "input": ""},
    {"type": "custom_tool_call_output", "call_id": "call_2", "output": "Done!"},
    {"type": "custom_tool_call_output", "id": "ctco_1", "call_id": "call_2", "output": [TEXT]},
    {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": "thought"}],
        "content": [{"type": "reasoning_text", "text": "hm"}],
        "encrypted_content": "AAAA",
        "status": "completed",
    },
    {"type": "reasoning", "id": "rs_2", "summary": []},
    {"type": "compaction", "id": "cmp_1", "encrypted_content": "AAAA"},
    {"type": "compaction_trigger", "id": "ct_1"},
    {"type": "compaction_trigger"},
    {"type": "item_reference", "id": "msg_1"},
    {"type": "additional_tools", "id": "at_1", "role": "developer", "tools": [{"type": "custom", "name": "exec"}]},
]
HOSTED: list[dict[str, Any]] = [
    {"type": "file_search_call", "id": "fs_1", "queries": ["q"], "status": "completed", "results": None},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {
        "type": "computer_call",
        "id": "cu_1",
        "call_id": "call_3",
        "pending_safety_checks": [],
        "status": "completed",
        "action": {"type": "screenshot"},
    },
    {
        "type": "computer_call_output",
        "call_id": "call_3",
        "output": {"type": "computer_screenshot", "image_url": "data:image/png;base64,AA=="},
    },
    {"type": "tool_search_call", "arguments": {"query": "q"}, "call_id": None, "execution": "client"},
    {"type": "tool_search_output", "call_id": "call_4", "tools": [{"type": "custom", "name": "c"}]},
    {"type": "configuration_update", "reasoning": {"effort": "high"}},
    {"type": "image_generation_call", "id": "ig_1", "result": None, "status": "completed"},
    {
        "type": "code_interpreter_call",
        "id": "ci_1",
        "code": "1+1",
        "container_id": "c_1",
        "outputs": None,
        "status": "completed",
    },
    {
        "type": "local_shell_call",
        "id": "ls_1",
        "call_id": "call_5",
        "action": {"type": "exec", "command": ["ls"], "env": {}},
        "status": "completed",
    },
    {"type": "local_shell_call_output", "id": "ls_1", "output": "ok"},
    {"type": "shell_call", "call_id": "call_6", "action": {"commands": ["ls"]}, "status": None},
    {
        "type": "shell_call_output",
        "call_id": "call_6",
        "output": [{"stdout": "a", "stderr": "", "outcome": {"type": "exit", "exit_code": 0}}],
    },
    {
        "type": "apply_patch_call",
        "call_id": "call_7",
        "operation": {"type": "delete_file", "path": "a"},
        "status": "completed",
    },
    {"type": "apply_patch_call_output", "call_id": "call_7", "status": "completed", "output": "Done!"},
    {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "wiki", "tools": []},
    {"type": "mcp_approval_request", "id": "mcpr_1", "arguments": "{}", "name": "read", "server_label": "wiki"},
    {"type": "mcp_approval_response", "approval_request_id": "mcpr_1", "approve": True},
    {"type": "mcp_call", "id": "mcp_1", "arguments": "{}", "name": "read", "server_label": "wiki"},
    {"type": "program", "id": "pr_1", "call_id": "call_8", "code": "pass", "fingerprint": "f"},
    {"type": "program_output", "id": "po_1", "call_id": "call_8", "result": "1", "status": "completed"},
]


def parse(*given: Any) -> tuple[items.Item, ...]:
    return parse_create({"model": "m", "input": list(given)}, transport="websocket").input


def name(item: Mapping[str, Any]) -> str:
    return str(item.get("type"))


@pytest.mark.parametrize("item", [*OURS, *HOSTED], ids=name)
def test_the_sdk_types_know_it_and_it_round_trips(item: dict[str, Any]) -> None:
    SDK_ITEM.validate_python(item)
    assert to_json(parse(item)) == [item]


@pytest.mark.parametrize("item", HOSTED, ids=name)
def test_hosted_items_are_carried_as_they_came(item: dict[str, Any]) -> None:
    assert parse(item) == (items.Opaque(item["type"], item, item.get("id")),)


def test_every_hosted_type_is_tried() -> None:
    assert {item["type"] for item in HOSTED} == HOSTED_ITEMS


@pytest.mark.parametrize("item", OURS, ids=name)
def test_nulls_and_unknown_fields_are_as_good_as_absent(item: dict[str, Any]) -> None:
    codex = {"internal_chat_message_metadata_passthrough": {"a": [1]}, "async": False, "caller": None}
    nulls = dict.fromkeys(("id", "status", "phase", "namespace", "encrypted_content"))
    assert parse({**codex, **nulls, **item}) == parse(item)


@pytest.mark.parametrize(
    ("sent", "kept"),
    [
        # agents SDK, LiveKit, Pipecat: no type
        ({"role": "user", "content": "hi"}, {"type": "message", "role": "user", "content": "hi"}),
        ({"type": None, "role": "user", "content": "hi"}, {"type": "message", "role": "user", "content": "hi"}),
        ({"id": "rs_1"}, {"type": "item_reference", "id": "rs_1"}),
        ({"type": None, "id": "rs_1"}, {"type": "item_reference", "id": "rs_1"}),
        ({"type": "reasoning"}, {"type": "reasoning", "summary": []}),
        ({"type": "reasoning", "summary": None, "content": None}, {"type": "reasoning", "summary": []}),
        ({"type": "additional_tools", "tools": []}, {"type": "additional_tools", "role": "developer", "tools": []}),
        # our own output, replayed by a client that fills in what it lacks
        (
            {"role": "assistant", "content": [{"type": "output_text", "text": "a", "annotations": None}]},
            {
                "type": "message",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "a", "annotations": []}],
            },
        ),
        # a name that no definition could have
        (
            {"type": "function_call", "call_id": "c", "name": "my tool.v2", "arguments": "{}"},
            {"type": "function_call", "call_id": "c", "name": "my tool.v2", "arguments": "{}"},
        ),
    ],
)
def test_lenient_forms(sent: dict[str, Any], kept: dict[str, Any]) -> None:
    assert to_json(parse(sent)) == [kept]


LONG = "x" * (items.MAX_TEXT_CHARS + 1)
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}


@pytest.mark.parametrize(
    ("item", "code", "param"),
    [
        (3, "invalid_type", ""),
        ("text", "invalid_type", ""),
        (None, "missing_required_parameter", ""),
        ({}, "missing_required_parameter", ".type"),
        ({"content": "hi"}, "missing_required_parameter", ".type"),
        ({"type": 3}, "invalid_type", ".type"),
        ({"type": "telepathy"}, "invalid_value", ".type"),
        ({"type": "<hosted>"}, "invalid_value", ".type"),
        ({"type": "message", "content": "hi"}, "missing_required_parameter", ".role"),
        ({"role": "tool", "content": "hi"}, "invalid_value", ".role"),
        ({"role": 3, "content": "hi"}, "invalid_type", ".role"),
        ({"role": "user"}, "missing_required_parameter", ".content"),
        ({"role": "user", "content": None}, "missing_required_parameter", ".content"),
        ({"role": "user", "content": 3}, "invalid_type", ".content"),
        ({"role": "user", "content": {}}, "invalid_type", ".content"),
        ({"role": "user", "content": ["hi"]}, "invalid_type", ".content[0]"),
        ({"role": "user", "content": [{}]}, "missing_required_parameter", ".content[0].type"),
        ({"role": "user", "content": [{"type": "text", "text": "hi"}]}, "invalid_value", ".content[0].type"),
        ({"role": "user", "content": [TEXT, {**TEXT, "text": 3}]}, "invalid_type", ".content[1].text"),
        (
            {"role": "user", "content": [{"type": "input_text"}]},
            "missing_required_parameter",
            ".content[0].text",
        ),
        (
            {"role": "user", "content": [{"type": "refusal", "refusal": 3}]},
            "invalid_type",
            ".content[0].refusal",
        ),
        ({"role": "user", "content": LONG}, "string_above_max_length", ".content"),
        ({"role": "user", "content": [{**TEXT, "text": LONG}]}, "string_above_max_length", ".content[0].text"),
        ({"role": "user", "content": "", "status": "done"}, "invalid_value", ".status"),
        ({"role": "user", "content": "", "id": 3}, "invalid_type", ".id"),
        ({**CALL, "call_id": ""}, "invalid_value", ".call_id"),
        ({**CALL, "call_id": "c" * 65}, "string_above_max_length", ".call_id"),
        ({**CALL, "call_id": 3}, "invalid_type", ".call_id"),
        ({**CALL, "name": ""}, "invalid_value", ".name"),
        ({**CALL, "name": "f" * 129}, "string_above_max_length", ".name"),
        ({**CALL, "arguments": {}}, "invalid_type", ".arguments"),
        ({"type": "function_call_output", "call_id": "c"}, "missing_required_parameter", ".output"),
        ({"type": "function_call_output", "output": ""}, "missing_required_parameter", ".call_id"),
        ({"type": "function_call_output", "call_id": "c", "output": LONG}, "string_above_max_length", ".output"),
        ({"type": "function_call_output", "call_id": "c", "output": 3}, "invalid_type", ".output"),
        (
            {"type": "function_call_output", "call_id": "c", "output": [{"type": "refusal", "refusal": ""}]},
            "invalid_value",
            ".output[0].type",
        ),
        (
            {"type": "custom_tool_call_output", "call_id": "c", "output": [TEXT, {**IMAGE, "image_url": 3}]},
            "invalid_type",
            ".output[1].image_url",
        ),
        ({"type": "reasoning", "summary": [{"text": 3}]}, "invalid_type", ".summary[0].text"),
        ({"type": "reasoning", "content": [{}]}, "missing_required_parameter", ".content[0].text"),
        ({"type": "reasoning", "summary": "short"}, "invalid_type", ".summary"),
        ({"type": "compaction"}, "missing_required_parameter", ".encrypted_content"),
        ({"type": "item_reference"}, "missing_required_parameter", ".id"),
        ({"type": "additional_tools", "tools": {}}, "invalid_type", ".tools"),
        ({"type": "additional_tools", "tools": [{"type": "custom"}]}, "missing_required_parameter", ".tools[0].name"),
        ({"type": "web_search_call", "id": 3}, "invalid_type", ".id"),
    ],
)
def test_refused_items(item: Any, code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse(OURS[0], item)
    assert (caught.value.code, caught.value.param) == (code, f"input[1]{param}")


@pytest.mark.parametrize(
    ("part", "param"),
    [
        ({"type": "input_image", "image_url": "x" * (items.MAX_IMAGE_URL_CHARS + 1)}, "image_url"),
        ({"type": "input_file", "file_data": "x" * (items.MAX_FILE_DATA_CHARS + 1)}, "file_data"),
    ],
)
def test_bounds_of_big_parts(part: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as caught:
        parse({"role": "user", "content": [part]})
    assert (caught.value.code, caught.value.param) == ("string_above_max_length", f"input[0].content[0].{param}")
    assert len(caught.value.message) < 200


def test_compaction_trigger_is_last() -> None:
    parse(OURS[0], {"type": "compaction_trigger"})
    with pytest.raises(ApiError) as caught:
        parse({"type": "compaction_trigger"}, OURS[0])
    assert (caught.value.code, caught.value.param) == ("invalid_value", "input[0]")


def test_text_of() -> None:
    (message,) = parse({"role": "user", "content": [TEXT, IMAGE, {"type": "refusal", "refusal": "!"}]})
    assert isinstance(message, items.Message)
    assert items.text_of(message.content) == "hello!"
    assert items.text_of("plain") == "plain"
