"""Tool definitions and the choice among them, as clients send them.

Source: spec/protocol.md 2.1, A.5 and A.7 (tool choices); 8.21 for hosted tools: Codex and Cline send some with every
request, so they are dropped, and only a choice that forces one is refused.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from gateway.protocol.deltas import CallKind
from gateway.protocol.errors import ApiError
from gateway.protocol.invalid import missing, one_of, too_long, wrong_type, wrong_value
from gateway.protocol.items import MAX_TEXT_CHARS
from gateway.protocol.tools import Tool, ToolChoice, ToolSet

MAX_NAME_CHARS = 128
MAX_TOOLS = 1024  # upstream's limit is lower, but a client of many MCP servers should not fail on it
_NAME = re.compile(r"[A-Za-z0-9_-]+\Z")
_MODES = ("none", "auto", "required")
_KINDS: dict[str, CallKind] = {"function": "function", "custom": "custom"}
_HOSTED_CHOICES = frozenset(
    {
        "apply_patch",
        "code_interpreter",
        "computer",
        "computer_use",
        "computer_use_preview",
        "file_search",
        "image_generation",
        "local_shell",
        "mcp",
        "programmatic_tool_calling",
        "shell",
        "tool_search",
        "web_search",
        "web_search_2025_08_26",
        "web_search_preview",
        "web_search_preview_2025_03_11",
    }
)


@dataclass(frozen=True, slots=True)
class Definitions:
    """What a `tools` list declares. `echo` is the list for the Response object; it may be shared between requests, so
    nobody changes it."""

    tools: tuple[Tool, ...] = ()
    echo: Sequence[Any] = ()


class ToolMemo:
    """Definitions of lists seen lately, by their exact JSON text.

    Agents send the same 26 kB with every turn. A hit costs about half of reading them again, and turns that share
    one `tools` tuple don't each keep a copy. Values of the caller are never kept when the list is unusually large.
    """

    __slots__ = ("_capacity", "_known", "_max_bytes")

    def __init__(self, capacity: int = 64, max_bytes: int = 262_144) -> None:
        self._capacity = capacity
        self._max_bytes = max_bytes
        self._known: OrderedDict[bytes, Definitions] = OrderedDict()

    def read(self, raw: Any) -> Definitions:
        """As `read_tools`."""
        try:
            key = orjson.dumps(raw)
        except orjson.JSONEncodeError:  # not from `decode_object`
            return read_tools(raw)
        known = self._known.get(key)
        if known is None:
            known = read_tools(raw)
            if len(key) <= self._max_bytes:
                self._known[key] = known
                if len(self._known) > self._capacity:
                    self._known.popitem(last=False)
        else:
            self._known.move_to_end(key)
        return known


def parse_tools(raw: Any, param: str = "tools") -> tuple[Tool, ...]:
    """The callable tools of a list, in order, for `tools` and for an `additional_tools` item."""
    return read_tools(raw, param).tools


def read_tools(raw: Any, param: str = "tools") -> Definitions:
    """Callable tools and echo of a list. Raises `ApiError` with the path of what is wrong."""
    if raw is None:
        return Definitions()
    reader = _Reader(param)
    echo = [reader.read(entry, f"{param}[{index}]") for index, entry in enumerate(_array(raw, param))]
    return Definitions(tuple(reader.tools.values()), echo)


def parse_choice(raw: Any, tools: Sequence[Tool], *, more_to_come: bool = False) -> ToolChoice:
    """`tool_choice`. Names must be among `tools`, and `required` needs one, unless more tools may come with the
    context (`additional_tools` items): then `merge` checks."""
    if raw is None:
        return ToolChoice()
    if isinstance(raw, str):
        if raw not in _MODES:
            raise wrong_value("tool_choice", one_of(_MODES))
        choice = ToolChoice(raw)
    elif isinstance(raw, Mapping):
        choice = _object_choice(raw, tools, more_to_come=more_to_come)
    else:
        raise wrong_type("tool_choice", "a string or an object", raw)
    if choice.mode == "required" and not (tools or more_to_come):
        raise wrong_value("tool_choice", "'required' needs a function or custom tool in 'tools'.")
    return choice


def merge(tools: ToolSet, extra: Iterable[Tool]) -> ToolSet:
    """The set with the tools of `additional_tools` items put in; the latest definition of a name counts. Checks the
    choice against the whole."""
    merged = tools.by_model_name()
    for tool in extra:
        merged[tool.model_name] = tool
    whole = tuple(merged.values())
    choice = tools.choice
    if choice.names:
        choice = replace(choice, names=tuple(_known_name(name, whole) for name in choice.names))
    elif choice.mode == "required" and not whole:
        raise wrong_value("tool_choice", "'required' needs a function or custom tool in 'tools'.")
    return ToolSet(whole, choice, tools.parallel)


class _Reader:
    """Collects the tools of one list; a name may occur once in a namespace."""

    __slots__ = ("_param", "tools")

    def __init__(self, param: str) -> None:
        self._param = param
        self.tools: dict[str, Tool] = {}

    def read(self, raw: Any, param: str) -> Any:
        """Take one entry; returns its echo. Hosted tools are echoed as they came and otherwise dropped."""
        kind = _type_of(raw, param)
        if kind == "function":
            self._add(_function(raw, None, param), param)
            # The Open Responses schema wants all five keys.
            return {"description": None, "parameters": None, "strict": None, **raw}
        if kind == "custom":
            self._add(_custom(raw, None, param), param)
        elif kind == "namespace":
            self._read_namespace(raw, param)
            # OpenAI's type has the description as a string, yet Codex leaves it out.
            return {**raw, "description": raw.get("description") or ""}
        return raw

    def _read_namespace(self, raw: Mapping[str, Any], param: str) -> None:
        namespace = _name(raw, param)
        _optional(raw, "description", str, "a string", param)
        for index, entry in enumerate(_array(raw.get("tools"), f"{param}.tools")):
            inner = f"{param}.tools[{index}]"
            kind = _type_of(entry, inner)
            if kind == "function":
                self._add(_function(entry, namespace, inner), inner)
            elif kind == "custom":
                self._add(_custom(entry, namespace, inner), inner)

    def _add(self, tool: Tool, param: str) -> None:
        name = tool.model_name
        if name in self.tools:
            raise wrong_value(f"{param}.name", "Another tool has this name already.")
        if len(self.tools) >= MAX_TOOLS:
            raise ApiError("array_above_max_length", f"Too many tools: the limit is {MAX_TOOLS}.", self._param)
        self.tools[name] = tool


def _function(raw: Mapping[str, Any], namespace: str | None, param: str) -> Tool:
    return Tool(
        "function",
        _name(raw, param),
        namespace,
        _description(raw, param),
        _parameters(raw.get("parameters"), param),
        bool(_optional(raw, "strict", bool, "a boolean", param)),
    )


def _custom(raw: Mapping[str, Any], namespace: str | None, param: str) -> Tool:
    grammar = _grammar(raw.get("format"), f"{param}.format")
    return Tool("custom", _name(raw, param), namespace, _description(raw, param), grammar=grammar, param=param)


def _parameters(schema: Any, param: str) -> Mapping[str, Any] | None:
    """A function's schema: an object schema, as far as can be told without reading all of it."""
    if schema is None:
        return None
    where = f"{param}.parameters"
    if not isinstance(schema, dict):
        raise wrong_type(where, "an object", schema)
    kind = schema.get("type")
    if kind not in (None, "object") and not (isinstance(kind, list) and "object" in kind):
        raise ApiError("invalid_json_schema", f"Invalid schema for '{where}': its type must be 'object'.", where)
    if not isinstance(schema.get("properties", {}), dict | None):
        raise ApiError("invalid_json_schema", f"Invalid schema for '{where}': 'properties' must be an object.", where)
    return schema


def _grammar(raw: Any, param: str) -> tuple[str, str] | None:
    """The format of a custom tool: None for free text, else (syntax, definition)."""
    if raw is None:
        return None
    kind = _type_of(raw, param)
    if kind == "text":
        return None
    if kind != "grammar":
        raise wrong_value(f"{param}.type", one_of(("text", "grammar")))
    syntax, definition = raw.get("syntax"), raw.get("definition")
    if not isinstance(syntax, str):
        raise wrong_type(f"{param}.syntax", "a string", syntax)
    if syntax not in {"lark", "regex"}:
        raise wrong_value(f"{param}.syntax", one_of(("lark", "regex")))
    if not isinstance(definition, str):
        raise wrong_type(f"{param}.definition", "a string", definition)
    return syntax, definition


def _object_choice(raw: Mapping[str, Any], tools: Sequence[Tool], *, more_to_come: bool) -> ToolChoice:
    """A choice given as an object: one tool by name, or `allowed_tools`."""
    kind = _type_of(raw, "tool_choice")
    if kind == "allowed_tools":
        return _allowed(raw, tools, more_to_come=more_to_come)
    if kind in _KINDS:
        return ToolChoice("required", (_chosen(raw, "tool_choice", tools, more_to_come=more_to_come),))
    if kind in _HOSTED_CHOICES:
        raise _hosted()
    raise wrong_value("tool_choice.type", one_of(("allowed_tools", "function", "custom")))


def _allowed(raw: Mapping[str, Any], tools: Sequence[Tool], *, more_to_come: bool) -> ToolChoice:
    """`allowed_tools`: hosted ones among them are dropped like those of `tools`."""
    mode = raw.get("mode")
    if not isinstance(mode, str):
        raise wrong_type("tool_choice.mode", "a string", mode)
    if mode not in {"auto", "required"}:
        raise wrong_value("tool_choice.mode", one_of(("auto", "required")))
    entries = _array(raw.get("tools"), "tool_choice.tools")
    if not entries:
        raise wrong_value("tool_choice.tools", "Expected at least one tool.")
    names: dict[str, None] = {}
    for index, entry in enumerate(entries):
        param = f"tool_choice.tools[{index}]"
        if _type_of(entry, param) in _KINDS:
            names[_chosen(entry, param, tools, more_to_come=more_to_come)] = None
    if not names:
        if mode == "required":
            raise _hosted()
        return ToolChoice("none")
    return ToolChoice(mode, tuple(names))


def _chosen(raw: Mapping[str, Any], param: str, tools: Sequence[Tool], *, more_to_come: bool) -> str:
    """The model's name of a tool that a choice names. Without a namespace it is the top-level tool of that name, or
    the only one of that name."""
    name = raw.get("name")
    if not isinstance(name, str):
        raise wrong_type(f"{param}.name", "a string", name)
    namespace = _optional(raw, "namespace", str, "a string", param)
    wanted = name if namespace is None else f"{namespace}.{name}"
    known = [tool for tool in tools if tool.kind == raw["type"]]
    return _known_name(wanted, known, more_to_come=more_to_come)


def _known_name(wanted: str, tools: Sequence[Tool], *, more_to_come: bool = False) -> str:
    by_plain_name = []
    for tool in tools:
        if tool.model_name == wanted:
            return wanted
        if tool.name == wanted:
            by_plain_name.append(tool.model_name)
    if len(by_plain_name) == 1:
        return by_plain_name[0]
    if by_plain_name:
        raise wrong_value("tool_choice", "Several namespaces have a tool of this name: give the namespace too.")
    if more_to_come:
        return wanted
    raise wrong_value("tool_choice", "The chosen tool is not in 'tools'.")


def _hosted() -> ApiError:
    message = "Unsupported value for 'tool_choice': hosted tools do not run here. Choose a function or custom tool."
    return ApiError("unsupported_parameter", message, "tool_choice")


def _name(raw: Mapping[str, Any], param: str) -> str:
    name = raw.get("name")
    if not isinstance(name, str):
        raise wrong_type(f"{param}.name", "a string", name)
    if len(name) > MAX_NAME_CHARS:
        raise too_long(f"{param}.name", MAX_NAME_CHARS, len(name))
    if not _NAME.match(name):
        raise wrong_value(f"{param}.name", "Expected a string that matches the pattern ^[a-zA-Z0-9_-]+$.")
    return name


def _description(raw: Mapping[str, Any], param: str) -> str | None:
    text = raw.get("description")
    if text is None:
        return None
    if not isinstance(text, str):
        raise wrong_type(f"{param}.description", "a string", text)
    if len(text) > MAX_TEXT_CHARS:
        raise too_long(f"{param}.description", MAX_TEXT_CHARS, len(text))
    return text


def _optional(raw: Mapping[str, Any], key: str, kind: type, words: str, param: str) -> Any:
    value = raw.get(key)
    if value is not None and not isinstance(value, kind):
        raise wrong_type(f"{param}.{key}", words, value)
    return value


def _type_of(raw: Any, param: str) -> str:
    if not isinstance(raw, dict):
        raise missing(param) if raw is None else wrong_type(param, "an object", raw)
    kind = raw.get("type")
    if not isinstance(kind, str):
        raise wrong_type(f"{param}.type", "a string", kind)
    return kind


def _array(raw: Any, param: str) -> Sequence[Any]:
    if not isinstance(raw, list | tuple):
        raise wrong_type(param, "an array", raw)
    return raw
