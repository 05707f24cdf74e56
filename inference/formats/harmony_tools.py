"""Tools as gpt-oss is shown them: TypeScript types in a namespace, comments for what a type can't say.

The model was trained on the output of OpenAI's renderer, so that output is what counts, its quirks included (the tests
compare with it): `anyOf` and `$ref` are `any`, the second line of a property's description gets no comment mark. Only
what is nested deeper than `MAX_SCHEMA_DEPTH` differs: here it is `any`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from gateway.protocol.tools import Tool
from inference.formats.guides import MAX_SCHEMA_DEPTH

FUNCTIONS = "functions"
"""The namespace of tools that have none of their own."""

_LINE_END = re.compile(r"\r?\n")
_PLAIN_TYPES = {"string": "string", "number": "number", "integer": "number", "boolean": "boolean"}
_FREEFORM = "The input is plain text, not JSON."
_FREEFORM_TYPE: Mapping[str, Any] = {"type": "string"}


def recipient(model_name: str) -> str:
    """Whom a message calls, by `Tool.model_name`: a name without namespace is one of `functions`."""
    return model_name if "." in model_name else f"{FUNCTIONS}.{model_name}"


def namespaces(tools: Iterable[Tool]) -> dict[str, list[Tool]]:
    """The tools by namespace, the namespaces in the order of their names."""
    found: dict[str, list[Tool]] = {}
    for tool in tools:
        found.setdefault(tool.namespace or FUNCTIONS, []).append(tool)
    return dict(sorted(found.items()))


def tools_section(tools: Sequence[Tool]) -> str:
    """The section `# Tools` of a developer message."""
    sections = ["# Tools"]
    for name, members in namespaces(tools).items():
        lines = [f"## {name}\n", f"namespace {name} {{\n"]
        for tool in members:
            lines += [f"// {line}" for line in _lines(_description(tool))]
            schema = _FREEFORM_TYPE if tool.kind == "custom" else tool.parameters
            taken = "" if schema is None else f"_: {_type(schema, '', MAX_SCHEMA_DEPTH)}"
            lines.append(f"type {tool.name} = ({taken}) => any;\n")
        lines.append(f"}} // namespace {name}")
        sections.append("\n".join(lines))
    return "\n\n".join(sections)


def _description(tool: Tool) -> str:
    if tool.kind == "function":
        return tool.description or ""
    parts = [tool.description, _FREEFORM]
    if tool.grammar is not None:
        syntax, definition = tool.grammar
        parts.append(f"It must match this {syntax} grammar:\n{definition}")
    return "\n".join(part for part in parts if part)


def _lines(text: str) -> list[str]:
    """The lines of a text; a line end at its end begins no further one."""
    lines = _LINE_END.split(text)
    return lines if lines[-1] else lines[:-1]


def _type(schema: Any, indent: str, depth: int) -> str:
    """A JSON schema as a type. `indent` is what the lines of an object's or a choice's members begin with."""
    if not isinstance(schema, Mapping) or depth == 0:
        return "any"
    if isinstance(variants := schema.get("oneOf"), list):
        return "".join(f"\n{indent} | {_variant(variant, indent, depth)}" for variant in variants)
    kind = schema.get("type")
    if isinstance(kind, list):
        names = [_PLAIN_TYPES.get(name, name) for name in kind if isinstance(name, str)]
        return " | ".join(names) or "any"
    if kind == "object":
        return _object(schema, indent, depth)
    if kind == "array":
        return f"{_type(schema['items'], indent, depth - 1)}[]" if "items" in schema else "Array<any>"
    if kind == "string" and (values := _strings(schema.get("enum"))):
        return " | ".join(f'"{value}"' for value in values)
    return _PLAIN_TYPES.get(kind, "any") if isinstance(kind, str) else "any"


def _variant(variant: Any, indent: str, depth: int) -> str:
    """One of several types, with its comments behind it."""
    name = _nullable(variant, _type(variant, indent + "   ", depth - 1))
    return name + _behind([*_texts(variant, "description"), *_default(variant, quoted=True)])


def _object(schema: Mapping[str, Any], indent: str, depth: int) -> str:
    lines = [f"{indent}// {text}\n" for text in _texts(schema, "description")] + ["{\n"]
    properties = schema.get("properties")
    required = set(_strings(schema.get("required")))
    for key, value in properties.items() if isinstance(properties, Mapping) else ():
        lines += _comments(value, indent)
        mark = "" if key in required else "?"
        if isinstance(value, Mapping) and isinstance(value.get("oneOf"), list):
            lines += _choice(key + mark, value, indent, depth)
            continue
        name = _nullable(value, _type(value, indent + "    ", depth - 1))
        behind = [] if isinstance(value, Mapping) and "oneOf" in value else _default(value)
        lines.append(f"{indent}{key}{mark}: {name},{_behind(behind)}\n")
    return "".join(lines) + f"{indent}}}"


def _comments(value: Any, indent: str) -> list[str]:
    """What stands above a property."""
    lines = [f"{indent}// {title}\n{indent}//\n" for title in _texts(value, "title")]
    if isinstance(value, Mapping) and "oneOf" not in value:
        lines += [f"{indent}// {text}\n" for text in _texts(value, "description")]
    examples = value.get("examples") if isinstance(value, Mapping) else None
    if isinstance(examples, list) and examples:
        lines.append(f"{indent}// Examples:\n")
        lines += [f'{indent}// - "{example}"\n' for example in _strings(examples)]
    return lines


def _choice(name: str, value: Mapping[str, Any], indent: str, depth: int) -> list[str]:
    """A property of one of several types, one a line. A description that is the first one's too stands only there."""
    variants = value["oneOf"]
    own = _texts(value, "description")
    above = own if not variants or own != _texts(variants[0], "description") else []
    lines = [f"{indent}// {text}\n" for text in [*above, *_default(value)]]
    lines.append(f"{indent}{name}:\n")
    for i, variant in enumerate(variants):
        type_name = _nullable(variant, _type(variant, indent + "   ", depth - 1))
        said = [] if i == 0 and above else [text for text in _texts(variant, "description") if [text] != own]
        lines.append(f"{indent} | {type_name}{_behind([*said, *_default(variant)])}\n")
    return [*lines, f"{indent},\n"]


def _texts(schema: Any, key: str) -> list[str]:
    """The text under a key, if there is one."""
    text = schema.get(key) if isinstance(schema, Mapping) else None
    return [text] if isinstance(text, str) else []


def _strings(value: Any) -> list[str]:
    return [entry for entry in value if isinstance(entry, str)] if isinstance(value, list) else []


def _nullable(schema: Any, name: str) -> str:
    also_null = isinstance(schema, Mapping) and schema.get("nullable") is True and "null" not in name
    return f"{name} | null" if also_null else name


def _default(schema: Any, *, quoted: bool = False) -> list[str]:
    """The comment on a default. A string is in quotes, except that of an enumeration where it is not `quoted`."""
    if not isinstance(schema, Mapping) or "default" not in schema:
        return []
    value = schema["default"]
    enumerated = isinstance(schema.get("enum"), list) and schema["enum"]
    if not isinstance(value, str) or (enumerated and quoted):
        return [f"default: {_json(value)}"]
    return [f"default: {value}" if enumerated else f'default: "{value}"']


def _behind(comments: Sequence[str]) -> str:
    return f" // {' '.join(comments)}" if comments else ""


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value).decode()
    except TypeError:  # integers above 64 bits, lone surrogates
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
