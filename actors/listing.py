"""Items as the list endpoints show them, and one page of a list.

Inside, an item looks as the client sent it; listed, it always has an id, a status where the published type wants one,
and its text in parts (protocol.md 6.1, A.3, A.7 `ResponseItemList`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal

from gateway.protocol.errors import ApiError
from gateway.protocol.items import Item, to_json

DEFAULT_LIMIT = 20
MAX_LIMIT = 100

_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
    "additional_tools": "at",
}
_WITH_STATUS = frozenset({"message", "function_call", "function_call_output", "custom_tool_call_output"})


@dataclass(frozen=True, slots=True)
class Page:
    """Which part of a list is wanted. `after` is the id of the last item that the client has."""

    limit: int = DEFAULT_LIMIT
    order: Literal["asc", "desc"] = "desc"
    after: str | None = None


def prefix_of(item: Item) -> str:
    """What the id of such an item begins with."""
    return _PREFIXES.get(item.type, "item")


def with_id(item: Item, item_id: str) -> Item:
    """The item under this id if it has none of its own."""
    return item if item.id is not None else replace(item, id=item_id)


def derived_id(item: Item, added_by: str, index: int) -> str:
    """An id for an item that was sent without one: the same at every look, without being kept anywhere."""
    digest = hashlib.blake2b(f"{added_by}/{index}".encode(), digest_size=16).hexdigest()
    return f"{prefix_of(item)}_{digest}"


def listed(item_id: str, item: Item) -> dict[str, Any]:
    """An item's wire form in a list."""
    shown: dict[str, Any] = {**to_json(item), "id": item_id}
    if item.type in _WITH_STATUS:
        shown.setdefault("status", "completed")
    if item.type == "message":
        shown["content"] = _parts(shown["role"], shown["content"])
    return shown


def page_of(entries: Sequence[tuple[str, Item]], page: Page) -> dict[str, Any]:
    """One page of these (id, item) pairs, which are oldest first. Raises `ApiError` for an unknown `after`."""
    ordered = list(entries) if page.order == "asc" else list(reversed(entries))
    start = 0
    if page.after is not None:
        known = next((index for index, entry in enumerate(ordered) if entry[0] == page.after), None)
        if known is None:
            raise ApiError("invalid_value", f"There is no item with id '{page.after[:128]}' in this list.", "after")
        start = known + 1
    return list_object(ordered[start : start + page.limit], more=len(ordered) > start + page.limit)


def list_object(entries: Sequence[tuple[str, Item]], *, more: bool = False) -> dict[str, Any]:
    """A list as it is answered. The SDK's type has no null for the ids of an empty one."""
    return {
        "object": "list",
        "data": [listed(*entry) for entry in entries],
        "first_id": entries[0][0] if entries else "",
        "last_id": entries[-1][0] if entries else "",
        "has_more": more,
    }


def size_of(value: Any) -> int:
    """About how many bytes an item holds on to: its text. For bounds on memory."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(size_of(entry) for entry in value.values()) + 64 * len(value)
    if isinstance(value, tuple | list):
        return sum(map(size_of, value))
    if is_dataclass(value):
        return 64 + sum(size_of(getattr(value, field.name)) for field in fields(value))
    return 0


def _parts(role: str, content: Any) -> list[Any]:
    if isinstance(content, str):
        if role == "assistant":
            return [{"type": "output_text", "text": content, "annotations": []}]
        return [{"type": "input_text", "text": content}]
    return [{"detail": "auto", **part} if part.get("type") == "input_image" else part for part in content]
