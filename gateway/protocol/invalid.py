"""Refusals of a request's fields, in OpenAI's manner: what was expected and what kind of thing came, never the thing.

Source: spec/protocol.md section 5.2 for the codes; `param` is a path such as `input[0].content[1].text`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gateway.protocol.decode import kind_of
from gateway.protocol.errors import ApiError

_PLAIN_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}\Z")
_EXPECTED = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "a boolean",
    "tuple_type": "an array",
    "dict_type": "an object",
    "dataclass_type": "an object",
    "model_attributes_type": "an object",
}
_NO_VARIANT = frozenset({"union_tag_invalid", "union_tag_not_found", "model_attributes_type"})


def missing(param: str) -> ApiError:
    """A required field is absent or null."""
    return ApiError("missing_required_parameter", f"Missing required parameter: '{param}'.", param)


def wrong_type(param: str, expected: str, value: Any) -> ApiError:
    """`expected` in words: "a string". A null counts as absent."""
    if value is None:
        return missing(param)
    message = f"Invalid type for '{param}': expected {expected}, but got {kind_of(value)} instead."
    return ApiError("invalid_type", message, param)


def wrong_value(param: str, why: str) -> ApiError:
    """`why` is a sentence that says what would be right."""
    return ApiError("invalid_value", f"Invalid value for '{param}'. {why}", param)


def too_long(param: str, limit: int, length: int) -> ApiError:
    """A string above its limit."""
    message = (
        f"Invalid '{param}': string too long. Expected a string with maximum length {limit}, "
        f"but got a string with length {length} instead."
    )
    return ApiError("string_above_max_length", message, param)


def one_of(values: Collection[str]) -> str:
    """The sentence for a closed set of strings."""
    return "Supported values are: " + ", ".join(f"'{value}'" for value in values) + "."


def from_validation(fault: ValidationError, tags: Collection[str]) -> ApiError:
    """One refusal for what pydantic found, its first finding. `tags` are the union tags that pydantic puts into its
    paths behind an index; those in angle brackets are tags anywhere, and what follows `format` is always one."""
    detail = fault.errors(include_url=False)[0]
    param = _path(detail["loc"], tags)
    kind, value, context = detail["type"], detail["input"], detail.get("ctx", {})
    if kind in _NO_VARIANT:
        return _no_variant(param, value, context)
    if kind == "missing" or (value is None and kind.endswith(("_type", "_error"))):
        return missing(param)
    if kind in _EXPECTED:
        array_only = detail["loc"][-1:] != ("<array>",)
        return wrong_type(param, _EXPECTED[kind] if array_only else "a string or an array", value)
    return _bound(detail, param)


def path_of(parent: str, key: str) -> str:
    """The path of a key that the client made up: named only if it is short and plain."""
    return f"{parent}.{key}" if _PLAIN_KEY.match(key) else parent


def _bound(detail: ErrorDetails, param: str) -> ApiError:
    """A value of the right type that is outside its bounds."""
    value, context = detail["input"], detail.get("ctx", {})
    match detail["type"]:
        case "string_too_long":
            return too_long(param, context["max_length"], len(value))
        case "greater_than_equal":
            return _out_of_range(param, "minimum", context["ge"])
        case "less_than_equal":
            return _out_of_range(param, "maximum", context["le"])
        case "literal_error" if not isinstance(value, str):
            return wrong_type(param, "a string", value)
        case "literal_error":
            return wrong_value(param, f"Supported values are: {context['expected']}.")
        case "string_too_short":
            why = f"Expected a string with minimum length {context['min_length']}."
        case "string_pattern_mismatch":
            why = f"Expected a string that matches the pattern {context['pattern']}."
        case _:
            why = "See the API reference for what is allowed here."
    return wrong_value(param, why)


def _out_of_range(param: str, end: str, limit: Any) -> ApiError:
    """A number beyond its limit. Upstream has codes for integers only in our table (section 5.2)."""
    message = f"Invalid '{param}': expected a value with {end} {limit}."
    if isinstance(limit, float):
        return ApiError("invalid_value", message, param)
    return ApiError("integer_below_min_value" if end == "minimum" else "integer_above_max_value", message, param)


def _no_variant(param: str, value: Any, context: dict[str, Any]) -> ApiError:
    """An object whose `type` chooses no variant of a union, or no object at all."""
    if not isinstance(value, dict):
        return wrong_type(param, "an object", value)
    where = f"{param}.type"
    if not isinstance(tag := value.get("type"), str):
        return wrong_type(where, "a string", tag)
    tags = [name for name in str(context.get("expected_tags", "")).split(", ") if not name.startswith("'<")]
    return wrong_value(where, f"Supported values are: {', '.join(tags)}.")


def _path(location: Sequence[str | int], tags: Collection[str]) -> str:
    path = ""
    before: str | int = ""
    for step in location:
        if isinstance(step, int):
            path += f"[{step}]"
        elif not (step.startswith("<") or before == "format" or (isinstance(before, int) and step in tags)):
            path += f".{step}" if path else step
        before = step
    return path
