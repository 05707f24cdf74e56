"""Query strings of the GET endpoints (protocol.md 6.1, A.7 `InputItemLists`). Unknown parameters are ignored, and so
are the values of `include`: everything that is kept is shown."""

from __future__ import annotations

from collections.abc import Mapping

from actors.listing import DEFAULT_LIMIT, MAX_LIMIT, Page
from gateway.protocol.errors import ApiError
from gateway.protocol.invalid import one_of, wrong_value

_ORDERS = ("asc", "desc")
_MAX_SEQUENCE = 1 << 53


def page(query: Mapping[str, str]) -> Page:
    """`limit`, `order` and `after`. Raises `ApiError`."""
    limit = _integer(query, "limit")
    if limit is not None and limit < 1:
        raise ApiError("integer_below_min_value", "Invalid 'limit': expected a value with minimum 1.", "limit")
    if limit is not None and limit > MAX_LIMIT:
        message = f"Invalid 'limit': expected a value with maximum {MAX_LIMIT}."
        raise ApiError("integer_above_max_value", message, "limit")
    order = query.get("order") or "desc"
    if order not in _ORDERS:
        raise wrong_value("order", one_of(_ORDERS))
    return Page(
        DEFAULT_LIMIT if limit is None else limit, "asc" if order == "asc" else "desc", query.get("after") or None
    )


def stream(query: Mapping[str, str]) -> bool:
    """Whether events are wanted. Raises `ApiError`."""
    value = (query.get("stream") or "false").lower()
    if value not in ("true", "false", "1", "0"):
        raise ApiError("invalid_type", "Invalid type for 'stream': expected a boolean.", "stream")
    return value in ("true", "1")


def starting_after(query: Mapping[str, str]) -> int:
    """The sequence number of the last event that the client has; -1 without one. Raises `ApiError`."""
    after = _integer(query, "starting_after")
    if after is None:
        return -1
    if after < 0:
        message = "Invalid 'starting_after': expected a value with minimum 0."
        raise ApiError("integer_below_min_value", message, "starting_after")
    return min(after, _MAX_SEQUENCE)


def _integer(query: Mapping[str, str], name: str) -> int | None:
    value = query.get(name)
    if not value:
        return None
    digits = value.removeprefix("-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 20):
        raise ApiError("invalid_type", f"Invalid type for '{name}': expected an integer.", name)
    return int(value)
