"""What the scripted engine says to a prompt without STEPS: enough to satisfy a client that tries tools or formats.

Values are the smallest that their JSON schema allows, as far as the common keywords go; no model is behind them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from inference.formats.chatml import raw_begin
from inference.formats.toolcalls import CLOSE, OPEN

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+|\d+")
_SHORTEST_WORD = 4  # get_weather is about the weather
_DEEPEST = 16


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool as the prompt shows it; a freeform tool has no parameters."""

    name: str
    parameters: Mapping[str, Any] | None


def offered_tools(system: str) -> tuple[Offered, ...]:
    """The tools that the text of a system turn shows; what is no tool is passed over."""
    _, _, block = system.rpartition("<tools>\n")
    lines, found, _ = block.partition("\n</tools>")
    offered = []
    for line in lines.split("\n") if found else ():
        try:
            function = json.loads(line)["function"]
            offered.append(Offered(str(function["name"]), function.get("parameters")))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            continue
    return tuple(offered)


def asked_for(tools: Sequence[Offered], text: str) -> Offered | None:
    """The first tool whose name's longer words all stand in the text."""
    said = {word.lower() for word in _WORD.findall(text)}
    for tool in tools:
        words = {word.lower() for word in _WORD.findall(tool.name) if len(word) >= _SHORTEST_WORD}
        if words and words <= said:
            return tool
    return None


def call_text(tool: Offered) -> str:
    """A whole call in Hermes markup; a freeform tool's is in the form that its description shows."""
    if tool.parameters is None:
        return f"{raw_begin(tool.name)}x\n{CLOSE}"
    arguments = json.dumps(smallest(tool.parameters), ensure_ascii=False)
    return f'{OPEN}\n{{"name": {json.dumps(tool.name, ensure_ascii=False)}, "arguments": {arguments}}}\n{CLOSE}'


def smallest(schema: Any) -> Any:
    """A small value of a JSON schema."""
    return _smallest(schema, schema, _DEEPEST)


def _smallest(schema: Any, root: Any, depth: int) -> Any:
    if not isinstance(schema, Mapping) or not depth:
        return {}
    for key in ("const", "default"):
        if key in schema:
            return schema[key]
    for key in ("enum", "examples"):
        if schema.get(key):
            return schema[key][0]
    if isinstance(reference := schema.get("$ref"), str):
        return _smallest(_resolve(reference, root), root, depth - 1)
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _smallest(schema[key][0], root, depth - 1)
    kind = schema.get("type", "object" if "properties" in schema else "string")
    return _of_type(kind[0] if isinstance(kind, list) and kind else kind, schema, root, depth)


def _of_type(kind: Any, schema: Mapping[str, Any], root: Any, depth: int) -> Any:
    match kind:
        case "object":
            properties = schema.get("properties", {})
            return {name: _smallest(properties.get(name), root, depth - 1) for name in schema.get("required", ())}
        case "array":
            return [_smallest(schema.get("items"), root, depth - 1)] * min(schema.get("minItems", 0), _DEEPEST)
        case "integer" | "number":
            return schema.get("minimum", 0)
        case "boolean":
            return False
        case "null":
            return None
        case _:
            return "x" * max(1, min(schema.get("minLength", 1), 1024))


def _resolve(reference: str, root: Any) -> Any:
    node = root
    for step in reference.removeprefix("#").strip("/").split("/"):
        if step:
            node = node.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(node, Mapping) else None
    return node
