"""Constraints on a model's output: xgrammar structural tags for tool calls, JSON schemas for text.

What a call looks like is the format's business (`CallLayout`); what must hold is the same for all of them.

Bounded for weak models: one white-space character at most between JSON tokens, a limit on forced calls, the layout of
a call fixed. Strings and numbers are as free as their schema leaves them; `max_tokens` bounds those.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import orjson

from gateway.protocol.errors import ApiError
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolSet
from inference.ebnf import GrammarError
from inference.engine import Guide
from inference.formats.toolcalls import INPUT_KEY
from inference.larkgrammar import grammar_ebnf

MAX_FORCED_CALLS = 16
MAX_SCHEMA_DEPTH = 64  # of objects and lists; vLLM refuses deeper ones

_SCHEMA_PARAM = "text.format.schema"
_ANY_OBJECT = '{"type": "object"}'
_REMEMBERED_CHARS = 32_768  # 16 MiB of them at most
_TYPES = {"string", "number", "integer", "boolean", "object", "array", "null"}
_SUBSCHEMAS = (
    "items", "additionalProperties", "not", "if", "then", "else", "contains", "propertyNames",
    "unevaluatedItems", "unevaluatedProperties", "additionalItems",
)  # fmt: skip
_SCHEMA_MAPS = ("properties", "$defs", "definitions", "patternProperties", "dependentSchemas")
_SCHEMA_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_COUNTS = (
    "minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties", "minContains", "maxContains",
)  # fmt: skip
_NUMBERS = ("minimum", "maximum")
_BOUNDS = (
    ("minLength", "maxLength"), ("minItems", "maxItems"), ("minProperties", "maxProperties"),
    ("minContains", "maxContains"), ("minimum", "maximum"),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class CallLayout:
    """What a call looks like in a model's output: `begin(tool)`, the arguments as JSON, `end`.

    `trigger` is what every `begin` starts with and nothing else does; `between` stands between two calls. `lead` is
    what a model mostly writes between a begin that the prompt already contains and the arguments. With `raw_end`, the
    input of a custom tool stands as it is between its begin and `raw_end`, held to the tool's grammar; without, it is
    JSON like other arguments, which can't be held to one. `thought`: what a thought ahead of all else is between; the
    first is empty where the prompt has begun it. What it says of calls is no call.
    """

    trigger: str
    begin: Callable[[Tool], str]
    end: str
    between: str = ""
    lead: str = ""
    raw_end: str | None = None
    thought: tuple[str, str] | None = None

    def is_raw(self, tool: Tool) -> bool:
        """Whether the tool's input stands as it is."""
        return tool.kind == "custom" and self.raw_end is not None


def parameters(tool: Tool) -> Mapping[str, Any]:
    """The JSON schema of a tool's arguments, as the model is told it."""
    if tool.kind == "custom":
        text = {INPUT_KEY: {"type": "string"}}
        return {"type": "object", "properties": text, "required": [INPUT_KEY], "additionalProperties": False}
    return tool.parameters if tool.parameters is not None else {"type": "object", "properties": {}}


def forced_tool(tools: ToolSet) -> Tool | None:
    """The one function the model must call, if the choice comes down to that. Raises `ApiError` if the choice asks for
    a call and leaves nothing to call."""
    if tools.choice.mode != "required":
        return None
    left = tools.callable()
    if not left:
        raise ApiError("invalid_value", "tool_choice asks for a call of a tool that is not among tools", "tool_choice")
    return left[0] if len(left) == 1 and (tools.choice.names or not tools.parallel) else None


def output_guide(tools: ToolSet, text: TextFormat, layout: CallLayout) -> tuple[Guide | None, bool]:
    """(the constraint that a request asks for, whether it leaves room for free text and reasoning first).

    Raises:
        ApiError: a schema that is none (invalid_json_schema), a grammar that is broken (invalid_value) or can't be held
            to (unsupported_parameter), or a choice that leaves nothing to call.
    """
    check_grammars(tools)
    schema = text_schema(text)
    if (tool := forced_tool(tools)) is not None:
        if layout.is_raw(tool):
            return structural_tag(sequence(_input(tool, layout), const(layout.raw_end or ""))), False
        # The call's start is in the prompt; what follows is left to the model, whose tokens mostly begin with a space.
        lead = [const(layout.lead)] if layout.lead else []
        return structural_tag(sequence(*lead, arguments(tool, True), const(layout.end))), False
    left = tools.callable()
    if tools.choice.mode == "required":
        return structural_tag(_calls(left, tools.parallel, layout)), False
    if schema is not None:
        if not left:
            return Guide("json", schema), False
        return structural_tag(any_of([_calls(left, tools.parallel, layout), json_schema(schema)])), False
    exact = any(tool.strict or (tool.grammar is not None and layout.is_raw(tool)) for tool in left)
    if left and (tools.choice.names or not tools.parallel or exact):
        tags = ", ".join(_call(tool, tool.strict, layout) for tool in left)
        once = "false" if tools.parallel else "true"
        form = (
            f'"triggered_tags", "triggers": [{printed(layout.trigger)}], "tags": [{tags}], "stop_after_first": {once}'
        )
        return structural_tag(_thinking(f'{{"type": {form}}}', layout)), True
    return None, True


def check_grammars(tools: ToolSet) -> None:
    """Raises `ApiError` (invalid_value, unsupported_parameter) for a custom tool's grammar that is broken or that no
    engine could hold."""
    for i, tool in enumerate(tools.tools):
        if tool.grammar is not None:
            try:
                grammar_ebnf(*tool.grammar)
            except GrammarError as error:
                message = f"the format of the custom tool '{tool.model_name}': {error.message}"
                raise ApiError(error.code, message, f"{tool.param or f'tools[{i}]'}.format.definition") from None


def check_schema(schema: Any, param: str) -> None:
    """Raises `ApiError("invalid_json_schema", …, param)` for what is no JSON schema. Looks at the form of the common
    keywords; what only one engine can't do is left to that engine."""
    if _too_deep(schema):
        raise ApiError("invalid_json_schema", f"the schema is nested deeper than {MAX_SCHEMA_DEPTH} levels", param)
    stack: list[tuple[Any, str]] = [(schema, "")]
    while stack:
        node, path = stack.pop()
        if isinstance(node, bool) and path:
            continue
        if (problem := _problem(node, schema)) is not None:
            raise ApiError("invalid_json_schema", f"the schema{' at ' + path if path else ''} {problem}", param)
        stack.extend((child, f"{path}/{key}") for key, child in _children(node))


def _too_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_SCHEMA_DEPTH):
        level = [child for node in level for child in _inner(node) if isinstance(child, Mapping | list)]
        if not level:
            return False
    return True


def _inner(node: Any) -> Iterable[Any]:
    if isinstance(node, Mapping):
        return node.values()
    return node if isinstance(node, list) else ()


def _children(node: Mapping[str, Any]) -> list[tuple[str, Any]]:
    found = [(key, node[key]) for key in _SUBSCHEMAS if key in node]
    for key in _SCHEMA_MAPS:
        found += [(f"{key}/{name}", child) for name, child in node.get(key, {}).items()]
    for key in _SCHEMA_LISTS:
        found += [(f"{key}/{i}", child) for i, child in enumerate(node.get(key, ()))]
    return found


def _problem(node: Any, root: Any) -> str | None:
    """What is wrong with one level of a schema."""
    if not isinstance(node, Mapping):
        return "must be an object"
    if "type" in node:
        types = [node["type"]] if isinstance(node["type"], str) else _strings(node["type"])
        if not types or not set(types) <= _TYPES:
            return "has an unknown type"
    if "$ref" in node:
        target = _target(node["$ref"], root)
        if target is None:
            return "has a '$ref' that points at nothing inside the schema"
        if _circles(target, root):
            return "has a '$ref' that leads only to itself"
    for keys, holds, text in _CHECKS:
        for key in keys:
            if key in node and not holds(node[key]):
                return f"has a {key!r} that must be {text}"
    return _contradiction(node)


def _contradiction(node: Mapping[str, Any]) -> str | None:
    """Keywords, each sound, that nothing can satisfy together."""
    for least, most in _BOUNDS:
        if least in node and most in node and node[least] > node[most]:
            return f"has a {least!r} above its {most!r}"
    if node.get("additionalProperties") is False and "patternProperties" not in node:
        missing = [name for name in node.get("required", ()) if name not in node.get("properties", {})]
        if missing and not any(key in node for key in (*_SCHEMA_LISTS, "$ref", "if")):
            return "requires a property that 'additionalProperties' forbids"
    return None


def _strings(value: Any) -> list[str] | None:
    return value if isinstance(value, list) and all(isinstance(entry, str) for entry in value) else None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return _is_number(value) and value >= 0 and value == int(value)


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_CHECKS: tuple[tuple[Sequence[str], Callable[[Any], bool], str], ...] = (
    (_SCHEMA_MAPS, lambda value: isinstance(value, Mapping), "an object"),
    (_SCHEMA_LISTS, _is_list, "a list that is not empty"),
    (("enum",), _is_list, "a list that is not empty"),
    (("required",), lambda value: _strings(value) is not None, "a list of strings"),
    (_COUNTS, _is_count, "a count"),
    (_NUMBERS, _is_number, "a number"),
    # booleans in the fourth draft
    (("exclusiveMinimum", "exclusiveMaximum"), lambda value: _is_number(value) or isinstance(value, bool), "a number"),
    (("multipleOf",), lambda value: _is_number(value) and value > 0, "a number above 0"),
    (("uniqueItems",), lambda value: isinstance(value, bool), "a boolean"),
    (("pattern", "format", "title", "description", "$id", "$schema"), lambda value: isinstance(value, str), "a string"),
)


def _circles(node: Any, root: Any) -> bool:
    """Whether references lead from one to the next without an end."""
    for _ in range(MAX_SCHEMA_DEPTH):
        if not isinstance(node, Mapping) or "$ref" not in node:
            return False
        node = _target(node["$ref"], root)
    return True


def _target(reference: Any, root: Any) -> Any:
    """What a local reference leads to, None for nothing. Nothing is ever fetched."""
    if not isinstance(reference, str) or not re.match(r"#(/|$)", reference):
        return None
    node = root
    for step in reference[2:].split("/") if len(reference) > 2 else ():
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdigit() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, Mapping) and key in node:
            node = node[key]
        else:
            return None
    return node


def text_schema(text: TextFormat) -> str | None:
    """The schema of the visible text; None for free text."""
    if text.type == "text":
        return None
    if text.type == "json_object":
        return _ANY_OBJECT
    return _checked(text.schema or "", _SCHEMA_PARAM)


def _checked(schema: str, param: str) -> str:
    """The schema, if it is one. Clients send the same ones turn after turn, so what was found sound is remembered."""
    if len(schema) > _REMEMBERED_CHARS:
        return _check_text(schema, param)
    return _check_once(schema, param)


def _check_text(schema: str, param: str) -> str:
    try:
        parsed = json.loads(schema)
    except (ValueError, RecursionError):
        raise ApiError("invalid_json_schema", "the schema is not JSON", param) from None
    check_schema(parsed, param)
    return schema


_check_once = lru_cache(maxsize=512)(_check_text)


# Structural tags, put together as JSON text: parsing and printing fifty schemas a turn would take milliseconds.


def structural_tag(form: str) -> Guide:
    """The constraint of a format element."""
    return Guide("structural_tag", f'{{"type": "structural_tag", "format": {form}}}')


def const(value: str) -> str:
    """This text and no other."""
    return f'{{"type": "const_string", "value": {printed(value)}}}'


def sequence(*elements: str) -> str:
    """One element after the other."""
    return f'{{"type": "sequence", "elements": [{", ".join(elements)}]}}'


def any_of(elements: Iterable[str]) -> str:
    """One of the elements."""
    return f'{{"type": "or", "elements": [{", ".join(elements)}]}}'


def json_schema(schema: str) -> str:
    """JSON of this schema."""
    # 1 is xgrammar's minimum; unlimited white space is where small models get lost.
    return f'{{"type": "json_schema", "json_schema": {schema}, "max_whitespace_cnt": 1}}'


def arguments(tool: Tool, exact: bool) -> str:
    """Arguments of a call: of the tool's schema if `exact`, else any object."""
    if not exact and tool.kind == "function":
        return json_schema(_ANY_OBJECT)
    return json_schema(_checked(printed(parameters(tool)), "tools"))


def _thinking(form: str, layout: CallLayout) -> str:
    """The form, behind a thought if the model has one."""
    if layout.thought is None:
        return form
    begin, end = layout.thought
    thought = sequence(const(begin), f'{{"type": "any_text", "excludes": [{printed(end)}]}}', const(end))
    return sequence(f'{{"type": "optional", "content": {thought}}}', form)


def _input(tool: Tool, layout: CallLayout) -> str:
    """Input of a custom tool that stands as it is."""
    if tool.grammar is None:
        return f'{{"type": "any_text", "excludes": [{printed(layout.raw_end)}]}}'
    return f'{{"type": "grammar", "grammar": {printed(grammar_ebnf(*tool.grammar))}}}'


def _call(tool: Tool, exact: bool, layout: CallLayout) -> str:
    if layout.is_raw(tool):
        begin, end = printed(layout.begin(tool)), printed(layout.raw_end)
        return f'{{"type": "tag", "begin": {begin}, "content": {_input(tool, layout)}, "end": {end}}}'
    begin, end = printed(layout.begin(tool) + layout.lead), printed(layout.end)
    return f'{{"type": "tag", "begin": {begin}, "content": {arguments(tool, exact)}, "end": {end}}}'


def _calls(tools: Sequence[Tool], parallel: bool, layout: CallLayout) -> str:
    """One call, or up to `MAX_FORCED_CALLS` with what the format puts between them."""
    call = any_of(_call(tool, True, layout) for tool in tools)
    if not parallel:
        return call
    more = sequence(const(layout.between), call) if layout.between else call
    return sequence(call, f'{{"type": "repeat", "min": 0, "max": {MAX_FORCED_CALLS - 1}, "content": {more}}}')


def printed(value: Any) -> str:
    """As JSON text."""
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # integers above 64 bits, lone surrogates
        return json.dumps(value)
