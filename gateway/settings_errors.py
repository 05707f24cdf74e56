"""What is said about a wrong setting: its key, where it came from, what was found, what is allowed."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from gateway.settings_schema import Key, allowed_at, field_at, keys_of, section_at

if TYPE_CHECKING:
    from gateway.settings_sources import Source

PREFIX = "LIMPET_"
FOUND_MAX = 120
DEFAULT = "default"
_SECRET = re.compile(r"keys?|.*_keys?")
"""Names of settings whose values are not shown."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One wrong setting."""

    key: str
    origin: str
    found: str
    allowed: str
    hint: str | None = None

    @classmethod
    def of(cls, key: str, sources: Sequence[Source], *, found: str, allowed: str) -> Self:
        """A problem whose origin is looked up."""
        return cls(key, _origin(sources, tuple(key.split("."))), found, allowed)

    def __str__(self) -> str:
        lines = [self.key, f"  from:    {self.origin}", f"  found:   {self.found}", f"  allowed: {self.allowed}"]
        if self.hint:
            lines.append(f"  hint:    {self.hint}")
        return "\n".join(lines)


class SettingsError(Exception):
    """The settings cannot be used. The message names every wrong key."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "wrong setting:" if count == 1 else f"{count} wrong settings:"
        super().__init__("\n".join([head, *(str(problem) for problem in self.problems)]))


def problems_of(
    error: ValidationError, model: type[BaseModel], values: Mapping[str, Any], sources: Sequence[Source]
) -> list[Problem]:
    """Pydantic's errors in our words."""
    return [_problem(detail, model, values, sources) for detail in error.errors(include_url=False)]


def _problem(
    detail: ErrorDetails, model: type[BaseModel], values: Mapping[str, Any], sources: Sequence[Source]
) -> Problem:
    context = detail.get("ctx", {})
    key = (*detail["loc"], *_parts(context.get("key", "")))
    name, origin = _dotted(key), _origin(sources, key)
    if detail["type"] == "extra_forbidden":
        found = "an unknown setting"  # its value may be a secret of whatever name
        section = section_at(model, key[:-1])
        allowed = "no other keys than " + ", ".join(section.model_fields) if section else "no such key"
        return Problem(name, origin, found, allowed, _did_you_mean(model, key, origin))
    if detail["type"] == "missing":
        return Problem(name, origin, "nothing", f"{allowed_at(model, key)} (required)")
    if detail["type"] == "conflict":
        if origin == DEFAULT and context.get("beside"):
            origin = f"default, beside {context['beside']} from {_origin(sources, _parts(context['beside']))}"
        return Problem(name, origin, _shown(key, _looked_up(values, model, key)), detail["msg"])
    section = section_at(model, tuple(part for part in key if not isinstance(part, int)))
    found = _kind(detail["input"]) if section is not None else _shown(key, detail["input"])
    return Problem(name, origin, found, _with_default(model, key))


def _kind(value: Any) -> str:
    """What stands where a section belongs; it may be anything, a secret too."""
    names = {str: "a text", list: "a list", dict: "a section", bool: "a boolean", type(None): "nothing"}
    return names.get(type(value), "a number")


def _parts(text: str) -> Key:
    return tuple(int(part) if part.isdigit() else part for part in text.split(".")) if text else ()


def _dotted(key: Key) -> str:
    return ".".join(map(str, key)) or "settings"


def _with_default(model: type[BaseModel], key: Key) -> str:
    field = field_at(model, key)
    allowed = allowed_at(model, key)
    default = None if field is None or field.is_required() or isinstance(key[-1], int) else field.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool)
    return f"{allowed} (default {default})" if plain else allowed


def _looked_up(values: Mapping[str, Any], model: type[BaseModel], key: Key) -> Any:
    """What was given for the key, or its default."""
    value: Any = values
    for part in key:
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            field = field_at(model, key)
            return None if field is None else field.get_default(call_default_factory=True, validated_data={})
    return value


def _shown(key: Key, value: Any) -> str:
    """The value for a message, without secrets; whole sections may hold some."""
    if any(_SECRET.fullmatch(str(part).replace("-", "_")) for part in key):
        return f"{len(value)} keys" if isinstance(value, list | tuple) else "a value that is not shown"
    if isinstance(value, Mapping):
        return "a section"
    if isinstance(value, list | tuple) and any(isinstance(each, Mapping | list | tuple) for each in value):
        return f"a list of {len(value)}"
    if key and key[-1] == "url":
        return _without_secrets(value)
    try:
        text = json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= FOUND_MAX else text[: FOUND_MAX - 1] + "…"


def _without_secrets(url: Any) -> str:
    """The part of an address that is safe to show. Passwords may hold any character, so what follows is cut off."""
    found = re.match(r"[A-Za-z][A-Za-z0-9+.-]*:/{0,2}", str(url))
    return f"{found[0]}…" if found else "a value that is not shown"


def _did_you_mean(model: type[BaseModel], key: Key, origin: str) -> str | None:
    """The most similar key: of the same section first, then of any. As a variable's name if it came from one."""
    word = str(key[-1])
    section = section_at(model, key[:-1])
    leaves = {str(other[-1]): other for other in reversed(list(keys_of(model)))}
    if near := difflib.get_close_matches(word, list(section.model_fields) if section else [], n=1, cutoff=0.6):
        meant = (*key[:-1], near[0])
    elif near := difflib.get_close_matches(word, list(leaves), n=1, cutoff=0.75):
        meant = leaves[near[0]]
    else:
        return None
    if origin.startswith(PREFIX) and "*" not in meant:
        rest = origin.removeprefix(PREFIX).split("__")[len(key) :]  # a wrong section in a longer name
        return f"did you mean {PREFIX}{'__'.join([*map(str, meant), *rest]).upper()}?"
    return f"did you mean {_dotted(meant).replace('.*', '[]')}?"


def _origin(sources: Sequence[Source], key: Key) -> str:
    """The place of the value that won, `default` when nobody gave one."""
    for source in reversed(sources):
        value: Any = source.values
        for part in key:
            try:
                value = value[part]
            except (KeyError, IndexError, TypeError):
                break
        else:
            return source.origin(key)
    return DEFAULT
