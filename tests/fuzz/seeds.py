"""What fuzzing starts from: every create of the scenarios, and what real clients send (spec/clients.md, protocol.md 2).

`near` makes values that are almost right; hypothesis shrinks what it finds, and a find becomes a line here.
"""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator
from typing import Any

import yaml
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from tests.scenarios.interpreter import FOLDER

LONG = int(os.environ.get("LIMPET_FUZZ_EXAMPLES", "0"))
"""Examples for each target; 0 is the short, repeatable run of the suite."""

fuzzing = settings(
    max_examples=LONG or 200,
    derandomize=not LONG,
    database=None,
    deadline=None,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)

_SCHEMA = {"type": "object", "properties": {"cmd": {"type": "array", "items": {"type": "string"}}}, "required": ["cmd"]}
_CODEX: dict[str, Any] = {
    "type": "response.create",
    "model": "m",
    "instructions": "You are a coding agent.",
    "input": [
        {"type": "message", "role": "developer", "id": "msg_1", "content": [{"type": "input_text", "text": "<env>"}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "fix it"}]},
        {"type": "reasoning", "summary": [], "encrypted_content": "gAAAA", "content": None},
        {"type": "function_call", "call_id": "call_1", "name": "shell", "arguments": '{"cmd":["ls"]}', "id": "fc_1"},
        {"type": "function_call_output", "id": "fco_1", "call_id": "call_1", "output": "a\nb"},
        {"type": "custom_tool_call", "call_id": "call_2", "name": "apply_patch", "input": "*** Begin", "status": None},
        {"type": "custom_tool_call_output", "call_id": "call_2", "output": [{"type": "input_text", "text": "Done"}]},
        {"type": "web_search_call", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hi", "annotations": []}]},
    ],
    "tools": [
        {"type": "function", "name": "shell", "description": "Runs", "strict": False, "parameters": _SCHEMA},
        {
            "type": "custom",
            "name": "apply_patch",
            "format": {"type": "grammar", "syntax": "lark", "definition": "a: b"},
        },
        {"type": "namespace", "name": "mcp__x", "description": "", "tools": [{"type": "function", "name": "look"}]},
        {"type": "web_search", "external_web_access": False},
    ],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0198c0de",
    "text": {"verbosity": "low"},
    "client_metadata": {"x-codex-turn-metadata": "{}"},
}
_LITE: dict[str, Any] = {
    "type": "response.create",
    "model": "m",
    "generate": False,
    "previous_response_id": "resp_1",
    "input": [{"type": "additional_tools", "role": "developer", "id": "at_1", "tools": _CODEX["tools"]}],
}
_OTHERS: list[dict[str, Any]] = [
    {"type": "response.create", "model": "m", "input": [], "previous_response_id": "resp_1", "stream": True},
    {"type": "response.create", "model": "m", "input": [{"type": "compaction_trigger"}], "stream_id": "a.b-c_9"},
    {"type": "response.create", "model": "m", "input": [{"type": "compaction", "encrypted_content": "x"}, {"id": "m"}]},
    {
        "type": "response.create",
        "model": "m",
        "input": [{"role": "user", "content": "hi"}],
        "max_output_tokens": 128000,
    },
    {
        "type": "response.create",
        "model": "m",
        "input": "x",
        "text": {"format": {"type": "json_schema", "name": "n", "schema": _SCHEMA, "strict": True}},
        "tools": _CODEX["tools"],
        "tool_choice": {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "shell"}]},
        "context_management": [{"type": "compaction", "compact_threshold": 1000}],
        "prompt_cache_options": {"mode": "explicit", "ttl": "30m", "prewarm": True},
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_logprobs": 3,
        "conversation": {"id": "conv_1"},
    },
    {"type": "response.steer", "previous_response_id": "resp_1", "input": "stop that"},
    {"type": "response.interrupt", "response_id": "resp_1", "mode": "discard_partial_items"},
    {"type": "response.inject", "response_id": "resp_1", "input": []},
    {"type": "response.processed", "response_id": "resp_1"},
]


def _creates(value: Any) -> Iterator[dict[str, Any]]:
    """The bodies of all turns and frames of a scenario."""
    for step in value:
        body = step.get("turn", step.get("send"))
        if isinstance(body, dict):
            yield {"type": "response.create", "model": "m", **body}
        yield from _creates(step.get("steps", ()))


def frames() -> list[dict[str, Any]]:
    """All seeds."""
    found = [_CODEX, _LITE, *_OTHERS]
    for path in sorted(FOLDER.glob("*.yaml")):
        found += _creates(yaml.safe_load(path.read_text(encoding="utf-8"))["steps"])
    return [frame for frame in found if len(json.dumps(frame)) < 20_000]


_NAMES = ["m", "auto", "none", "required", "message", "user", "input_text", "function", "function_call", "json_schema"]
_ODD = ["", "resp_1", "call_1", "shell", "\ud800", "\x00", "<|im_end|>", "é😀", "x" * 300, "item_reference", "<hosted>"]
_WORDS = st.sampled_from(_NAMES + _ODD)
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 20), st.floats(), _WORDS, st.text(max_size=10)
)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_WORDS, inner, max_size=3), max_leaves=8
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path]
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        found += _places(entry, (*path, key))
    return found


@st.composite
def near(draw: st.DrawFn, seeds: list[dict[str, Any]]) -> dict[str, Any]:
    """A seed with up to four changes at random places."""
    value = copy.deepcopy(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(0, 4))):
        *path, key = draw(st.sampled_from([place for place in _places(value) if place] or [("model",)]))
        holder: Any = value
        for step in path:
            holder = holder[step]
        change = draw(st.sampled_from(["replace", "delete", "double", "add"]))
        if change == "delete":
            del holder[key]
        elif change == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif change == "add" and isinstance(holder, dict):
            holder[draw(_WORDS)] = draw(VALUES)
        else:
            holder[key] = draw(VALUES)
        if not value:
            break
    return value
