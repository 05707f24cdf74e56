"""What a compaction item stands for, and contexts that start at one (protocol.md 4.6).

The item is opaque to clients and complete in itself: sealed in it are the summary and all that must survive to the
letter. It is rendered as the summary, then the kept items. docs/decisions/0005-compaction.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import orjson
from pydantic import Discriminator, TypeAdapter, ValidationError

from actors.conversation import Continuation, Response, continue_from
from actors.reasoning import opened
from actors.tokencache import EMPTY
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    OURS,
    Compaction,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
    text_of,
)
from gateway.protocol.tools import Tool

if TYPE_CHECKING:
    from actors.session import Session

HEADLINE = "Summary of the conversation so far (what came before it is no longer shown):\n\n"

Kept = Message | FunctionCall | FunctionCallOutput | CustomToolCall | CustomToolCallOutput | Reasoning
"""Items that are rendered as themselves."""


@dataclass(frozen=True, slots=True)
class Window:
    """What a compaction item stands for.

    `kept` are items that stay as they were; `preamble` and `tools` are as in `Continuation`. `alone`: nothing in front
    of the item counts, as in automatic compaction, where a client may send it or not. Otherwise its user, system and
    developer messages do, as they were left there on purpose (the window of `POST /responses/compact`; Codex).
    """

    summary: str
    kept: tuple[Annotated[Kept, Discriminator("type")], ...]
    preamble: str | None
    tools: tuple[Tool, ...]
    alone: bool

    def sealed(self, session: Session) -> str:
        """As `encrypted_content`, for this session's tenant."""
        return session.actor.sealer.seal("compaction", session.tenant, orjson.dumps(self))


_WINDOW = TypeAdapter(Window)


def linked(session: Session, parent: Response | None, items: Sequence[Item], given: Sequence[Item]) -> Continuation:
    """New items linked to a parent, with sealed reasoning opened; the context starts at the last compaction item among
    them, if there is one. `given` is the request's input, for what is said about it. Raises `ApiError`.

    A compaction that does not open is refused: it is the conversation, without which the answer would be about nothing.
    """
    link = continue_from(parent, opened(session, items))
    at = _last_compaction(link.items)
    if at is None:
        return link
    item = link.items[at]
    window = _open(session, item)
    if window is None:
        session.actor.counters.unopened_blobs += 1
        places = (f"input[{n}].encrypted_content" for n, each in enumerate(given) if _same_blob(each, item))
        raise ApiError(
            "invalid_encrypted_content",
            "This compaction item cannot be read here: it was changed, or made by another gateway or for another API "
            "key, or its key is gone. Send the conversation's items instead.",
            next(places, "input"),
        )
    return _start_at(link, link.items, at, window)


def restarted(link: Continuation, item: Compaction, window: Window) -> Continuation:
    """The same context, starting at an item that was just made of it."""
    return _start_at(link, (*link.items, item), len(link.items), window)


def effective_items(session: Session, link: Continuation) -> list[Kept]:
    """All items of the context that are rendered as themselves, oldest first. O(history), as is what follows it."""
    items = [*(() if link.parent is None else link.parent.context()), *link.items]
    at = _last_compaction(items)
    if at is not None and (window := _open(session, items[at])) is not None:
        items = [*in_front(items[:at], window), *window.kept, *items[at + 1 :]]
    return [item for item in items if isinstance(item, Kept)]


def whole_body(session: Session, link: Continuation) -> tuple[Item, ...]:
    """The body items of the whole context, for templates that are rendered whole. O(history)."""
    if link.parent is None:
        return link.body
    items = (*link.parent.context(), *link.items)
    at = _last_compaction(items)
    start = continue_from(None, ()) if at is None else link
    window = None if at is None else _open(session, items[at])
    if at is not None and window is not None:
        return _start_at(replace(start, items=items, body=items), items, at, window).body
    return items[1:] if is_preamble(items[0]) else items


def in_front(items: Sequence[Item], window: Window) -> list[Message]:
    """What counts of the items in front of a compaction. The last user message is kept inside; if it is here as well,
    it is not said twice."""
    if window.alone:
        return []
    found, kept = messages_of(items), window.kept[0] if window.kept else None
    if isinstance(kept, Message):
        for at in reversed(range(len(found))):
            if found[at].role == kept.role and text_of(found[at].content) == text_of(kept.content):
                del found[at]
                break
    return found


def messages_of(items: Sequence[Item]) -> list[Message]:
    """The messages that no model wrote."""
    return [item for item in items if isinstance(item, Message) and item.role != "assistant"]


def is_preamble(item: Item) -> bool:
    """Whether the item would be one at the start of a conversation."""
    return isinstance(item, Message) and item.role in {"system", "developer"}


def _start_at(link: Continuation, items: Sequence[Item], at: int, window: Window) -> Continuation:
    """`link` with a context that starts at the compaction `items[at]`, whose window this is."""
    preamble, before = window.preamble, []
    if not window.alone:
        # A chain that already began with a compaction began anew with these items.
        fresh = _last_compaction(link.items) is not None
        leading = (fresh and is_preamble(items[0])) or (not fresh and len(link.body) < len(link.items))
        if leading and isinstance(first := items[0], Message):
            preamble = text_of(first.content)
        before = in_front(items[leading:at], window)
    summary = Message("user", HEADLINE + window.summary)
    body = (*before, summary, *window.kept, *items[at + 1 :])
    tools = (*(tool for tool in window.tools if tool not in link.tools), *link.tools)
    return replace(link, parent=None, body=body, preamble=preamble, tools=tools, tokens=EMPTY, calls={}, round=None)


def _open(session: Session, item: Item) -> Window | None:
    assert isinstance(item, Compaction)
    content = session.actor.sealer.open("compaction", session.tenant, item.encrypted_content)
    if content is None:
        return None
    try:
        return _WINDOW.validate_json(content, context=OURS)
    except ValidationError:  # of a later version
        return None


def _same_blob(one: Item, other: Item) -> bool:
    return (
        isinstance(one, Compaction)
        and isinstance(other, Compaction)
        and one.encrypted_content == other.encrypted_content
    )


def _last_compaction(items: Sequence[Item]) -> int | None:
    return next((at for at in reversed(range(len(items))) if isinstance(items[at], Compaction)), None)
