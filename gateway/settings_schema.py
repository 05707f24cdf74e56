"""Reads the settings model: which keys there are, what each accepts, and `docs/settings.md`."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

Key = tuple[str | int, ...]
INTRODUCTION = """\
A YAML file (`--config FILE` or `LIMPET_CONFIG`), environment variables, and options of the command line; the later ones
win. Write a key such as `server.port` as `server: {port: 8000}` in the file and as `LIMPET_SERVER__PORT` in the
environment, where lists and mappings are JSON or YAML text and a list of words may be separated by commas. A wrong or
unknown key stops the start and is named.""".splitlines()


def model_of(annotation: Any) -> type[BaseModel] | None:
    """The section inside an annotation: itself, or what a tuple of them holds."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) is tuple:
        return model_of(get_args(annotation)[0])
    return None


def keys_of(model: type[BaseModel], prefix: Key = ()) -> Iterator[Key]:
    """Every key that holds a value, sections left out; an item of a list is `*`."""
    for name, field in model.model_fields.items():
        inner = model_of(field.annotation)
        if inner is None:
            yield (*prefix, name)
        else:
            listed: Key = ("*",) if get_origin(field.annotation) is tuple else ()
            yield from keys_of(inner, (*prefix, name, *listed))


def field_at(model: type[BaseModel], key: Key) -> FieldInfo | None:
    """The field of a key, None if there is none. Positions in lists count as `*` does."""
    field: FieldInfo | None = None
    inner: type[BaseModel] | None = model
    for part in key:
        if isinstance(part, int) or part == "*":
            continue
        field = inner.model_fields.get(part) if inner is not None else None
        if field is None:
            return None
        inner = model_of(field.annotation)
    return field


def section_at(model: type[BaseModel], key: Key) -> type[BaseModel] | None:
    """The section that a key names; the whole model for the empty key."""
    if not key:
        return model
    field = field_at(model, key)
    return None if field is None else model_of(field.annotation)


def accepts_none(field: FieldInfo) -> bool:
    """Whether None is a value of the field."""
    annotation = field.annotation
    return get_origin(annotation) in {Union, types.UnionType} and type(None) in get_args(annotation)


def container_of(field: FieldInfo) -> Literal["words", "structure"] | None:
    """What an environment variable's text must be taken apart into."""
    annotation = field.annotation
    if get_origin(annotation) is tuple:
        return "words" if model_of(annotation) is None else "structure"
    if get_origin(annotation) is dict or model_of(annotation) is not None:
        return "structure"
    return None


def allowed_at(model: type[BaseModel], key: Key) -> str:
    """What the key accepts, in words."""
    schema = _schema(model)
    node: dict[str, Any] = schema
    for part in key:
        node = _resolved(node, schema)
        inner = node.get("items") if isinstance(part, int) or part == "*" else node.get("properties", {}).get(part)
        if not isinstance(inner, dict):
            break
        node = inner
    return _words(node, schema)


@functools.cache
def _schema(model: type[BaseModel]) -> dict[str, Any]:
    return model.model_json_schema()


def _resolved(node: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    if "$ref" in node:
        name = node["$ref"].rsplit("/", 1)[1]
        target: dict[str, Any] = schema["$defs"][name]
        return target
    return node


def _words(node: dict[str, Any], schema: dict[str, Any]) -> str:
    node = _resolved(node, schema)
    if "anyOf" in node:
        return " or ".join(_words(part, schema) for part in node["anyOf"])
    if "enum" in node:
        return "one of " + ", ".join(map(str, node["enum"]))
    kind = node.get("type")
    if kind in {"integer", "number"}:
        return f"{'an integer' if kind == 'integer' else 'a number'}{_bounds(node)}"
    if kind == "string":
        return _text_words(node)
    if kind == "array":
        return "a list, each item " + _words(node.get("items", {}), schema)
    if kind == "object" and node.get("properties"):
        return "a mapping with the keys " + ", ".join(node["properties"])
    plain = {"object": "a mapping", "boolean": "true or false", "null": "null"}
    return plain.get(str(kind), "anything")


def _bounds(node: dict[str, Any]) -> str:
    low, high = node.get("minimum"), node.get("maximum")
    above, below = node.get("exclusiveMinimum"), node.get("exclusiveMaximum")
    start = f"from {low:g}" if low is not None else f"above {above:g}" if above is not None else ""
    if low is not None and high is None and below is None:
        start = f"of at least {low:,}".replace(",", "")
    end = f"to {high:,}".replace(",", "") if high is not None else f"below {below:g}" if below is not None else ""
    if end and above is not None:
        end = end.replace("to ", "up to ")
    return "".join(f" {part}" for part in (start, end) if part)


def _text_words(node: dict[str, Any]) -> str:
    if node.get("format") == "path":
        return "a path"
    low, high = node.get("minLength"), node.get("maxLength")
    length = f" of {low} to {high} characters" if low and high else ", not empty" if low else ""
    pattern = f" matching {node['pattern']}" if "pattern" in node else ""
    return f"a text{length}{pattern}"


def markdown(model: type[BaseModel]) -> str:
    """`docs/settings.md`: a table for each section."""
    lines = [
        "# Settings",
        "",
        "<!-- Generated by `limpet settings --markdown` from gateway/settings.py; a test keeps it equal. -->",
        "",
        *INTRODUCTION,
    ]
    sections = [(name, model_of(field.annotation)) for name, field in model.model_fields.items()]
    for name, section in sections:
        if section is not None:
            field = model.model_fields[name]
            listed = get_origin(field.annotation) is tuple
            lines += [
                "",
                f"## {name}",
                "",
                *_intro(field, listed=listed),
                *_table(model, (name, "*") if listed else (name,)),
            ]
    lines += ["", "## Top level", "", *_table(model, (), only=[name for name, section in sections if section is None])]
    return "\n".join(lines) + "\n"


def _intro(field: FieldInfo, *, listed: bool) -> list[str]:
    text = field.description or ""
    return [f"{text} A list: each item has these keys." if listed else text, ""]


def _table(model: type[BaseModel], section: Key, only: list[str] | None = None) -> list[str]:
    rows = ["| key | default | allowed | what and why |", "|---|---|---|---|"]
    for key in keys_of(model):
        if key[: len(section)] != section or (only is not None and key[0] not in only):
            continue
        field = field_at(model, key)
        if field is None:  # cannot be: the key came from the model
            continue
        name = ".".join(str(part) for part in key if part != "*")
        default = "required" if field.is_required() else f"`{_default(field)}`"
        cells = [f"`{name}`", default, allowed_at(model, key), field.description or ""]
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return rows


def _default(field: FieldInfo) -> str:
    value = field.get_default(call_default_factory=True, validated_data={})
    return json.dumps(list(value) if isinstance(value, tuple) else value, default=str)
