"""Conversations: responses, what they continue, and the rules for what may be added to them.

A response is immutable once committed and points at the response it continues, so a conversation is a tree and a
fork costs nothing. `ResponseCache` is the memory of one socket (protocol.md 4.1 and 4.3): the newest responses of
each lane, and whatever running turns have pinned.

Sources: protocol.md 4.2 (call and output rules), design.md section 4 (decisions 3, 4, 5).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeGuard

from actors.tokencache import EMPTY, Tokens
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    AdditionalTools,
    Call,
    CallOutput,
    CompactionTrigger,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    ItemReference,
    Message,
    Reasoning,
    called_name,
    text_of,
)
from gateway.protocol.tooldefs import parse_tools
from gateway.protocol.tools import Tool

Lane = str | None


class Round(NamedTuple):
    """What of a context a template may want rendered again: the ids from position `start`, which are those of the last
    `items` items. It begins with what the model said to the newest user message."""

    start: int
    items: int


class Sent(NamedTuple):
    """The prompt that an engine has seen: head, then the first `ids` ids of the context. `replica` is which one."""

    request_id: str
    head: bytes
    ids: int
    replica: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Response:
    """A committed response: the items this turn added (input, then output) and where the conversation stands after.

    `tools` are those that `additional_tools` items of the context define. `pending` maps the call ids that still wait
    for an output to the name the model called. `preamble` is the text of a leading system or developer message: chat
    formats merge it with instructions and tools, so it is no body item.

    `tokens` are the first `kept` of the parent's and those that this turn added; the ids of its own items start at
    `begins`. `sent` is what an engine knows of them. `size` is about how many bytes the whole context holds.
    """

    id: str
    parent: Response | None
    items: tuple[Item, ...]
    tokens: Tokens
    preamble: str | None
    tools: tuple[Tool, ...]
    pending: Mapping[str, str]
    lane: Lane
    model: str
    store: bool
    kept: int = 0
    begins: int = 0
    round: Round | None = None
    sent: Sent | None = None
    size: int = 0

    def lineage(self) -> Iterator[Response]:
        """This response and all it continues, newest first."""
        node: Response | None = self
        while node is not None:
            yield node
            node = node.parent

    def context(self) -> list[Item]:
        """All items from the start of the conversation, oldest first. O(history): not for a turn's path."""
        turns = list(self.lineage())
        turns.reverse()
        return [item for turn in turns for item in turn.items]

    def latest(self, count: int) -> tuple[Item, ...]:
        """The last `count` items of the context, oldest first. O(count)."""
        found: list[Item] = []
        for turn in self.lineage():
            if len(found) >= count:
                break
            found[:0] = turn.items[-(count - len(found)) :]
        return tuple(found)

    def call(self, call_id: str) -> Call | None:
        """The newest call of the context with this call id."""
        for turn in self.lineage():
            for item in turn.items:
                if isinstance(item, FunctionCall | CustomToolCall) and item.call_id == call_id:
                    return item
        return None


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a request adds to its parent, after the rules.

    `items` are without repeats; `body` is what is rendered behind `tokens`, the ids of the context that stay as they
    are: the new items without the preamble, and at times older ones again. `tools` are those that the whole context
    defines; `pending` are the calls that still wait once these items are in: none. `calls` names those, from before
    `body`, whose outputs are in it; `resumed` are those of them that were cut off, which nobody had to answer. `round`
    is the parent's.
    """

    parent: Response | None
    items: tuple[Item, ...]
    body: tuple[Item, ...]
    preamble: str | None
    tools: tuple[Tool, ...]
    pending: Mapping[str, str]
    tokens: Tokens = EMPTY
    calls: Mapping[str, str] = field(default_factory=dict)
    round: Round | None = None
    resumed: Sequence[Call] = ()


def continue_from(parent: Response | None, items: Sequence[Item]) -> Continuation:
    """Link new items to a parent.

    Repeats of context items are dropped (LiveKit sends the call again beside its output). Raises `ApiError`
    (invalid_function_call_output, invalid_value) and changes nothing: an output without its call, a call without its
    output, an item that reuses an id with other content.
    """
    pending = dict(parent.pending) if parent is not None else {}
    calls = dict(pending)
    resumed: list[Call] = []
    added = _Added(parent)
    for item in items:
        if isinstance(item, ItemReference):
            if added.find(item.id) is None:
                raise ApiError("invalid_value", f"Item with id '{item.id}' not found in the conversation.", "input")
            continue
        awaited = isinstance(item, FunctionCallOutput | CustomToolCallOutput) and item.call_id in pending
        if isinstance(item, CompactionTrigger) or added.repeats(item, awaited=awaited):
            continue
        if is_waiting(item):
            pending[item.call_id] = called_name(item)
        elif isinstance(item, FunctionCallOutput | CustomToolCallOutput) and pending.pop(item.call_id, None) is None:
            resumed.append(_cut_off(item, added))
            calls[item.call_id] = called_name(resumed[-1])
        added.add(item)
    if pending:
        call_id = next(iter(pending))
        raise ApiError("invalid_function_call_output", f"No tool output found for function call {call_id}.", "input")
    kept = tuple(added.items)
    preamble, body = (parent.preamble, kept) if parent is not None and _has_context(parent) else _split_preamble(kept)
    tools = () if parent is None else parent.tools
    for item in kept:
        if isinstance(item, AdditionalTools):
            tools += parse_tools(item.tools, "input")
    if parent is None:
        return Continuation(None, kept, body, preamble, tools, pending)
    return Continuation(parent, kept, body, preamble, tools, pending, parent.tokens, calls, parent.round, resumed)


def is_waiting(item: Item) -> TypeGuard[FunctionCall | CustomToolCall]:
    """Whether this is a call that must be answered: one that was cut off need not be, as nobody can carry it out."""
    return isinstance(item, FunctionCall | CustomToolCall) and item.status != "incomplete"


def _has_context(parent: Response) -> bool:
    """Whether anything precedes the new items. A warm-up with empty input precedes them with nothing."""
    return any(turn.items for turn in parent.lineage())


def _cut_off(item: CallOutput, added: _Added) -> Call:
    """The call that this output answers though it was cut off: it waits for none, but a client may give one."""
    call = added.call(item.call_id)
    if not isinstance(call, FunctionCall | CustomToolCall):
        raise ApiError(
            "invalid_function_call_output",
            f"No tool call found for function call output with call_id {item.call_id}.",
            "input",
        )
    return call


def _split_preamble(items: tuple[Item, ...]) -> tuple[str | None, tuple[Item, ...]]:
    first = items[0] if items else None
    if isinstance(first, Message) and first.role in ("system", "developer"):
        return text_of(first.content), items[1:]
    return None, items


class _Added:
    """The new items so far, with look-up over them and the whole context by item id or call id.

    A turn of an agent loop looks up a few ids: the context is walked for those, newest first, where they mostly are.
    A client that sends a long history with ids looks up thousands: the context is then indexed, once.
    """

    WALKS = 8

    def __init__(self, parent: Response | None) -> None:
        self.items: list[Item] = []
        self._parent = parent
        self._walks = 0
        self._new: _Index = {}
        self._context: _Index | None = None

    def add(self, item: Item) -> None:
        self.items.append(item)
        _index(self._new, item)

    def find(self, item_id: str) -> Item | None:
        """The item with this id."""
        return self._look_up(("id", item_id))

    def call(self, call_id: str) -> Item | None:
        """The call with this call id."""
        return self._look_up((FunctionCall, call_id)) or self._look_up((CustomToolCall, call_id))

    def repeats(self, item: Item, *, awaited: bool = False) -> bool:
        """True when the context already holds this very item. Raises when it holds another under the same id. An output
        that a call has `awaited` can't be in the context, so that this isn't walked for it."""
        call_id = getattr(item, "call_id", None)
        known = None if item.id is None else self._look_up(("id", item.id))
        if known is None and call_id is not None and not awaited:
            known = self._look_up((type(item), call_id))
        if known is None:
            return False
        if _same(known, item):
            return True
        name = f"call_id '{call_id}'" if call_id is not None else f"id '{item.id}'"
        raise ApiError(
            "invalid_value", f"An item with {name} and other content is already in the conversation.", "input"
        )

    def _look_up(self, key: tuple[object, str]) -> Item | None:
        found = self._new.get(key)
        if found is not None or self._parent is None:
            return found
        if self._context is not None:
            return self._context.get(key)
        self._walks += 1
        if self._walks <= self.WALKS:
            return _walk(self._parent, key)
        self._context = {}
        for turn in self._parent.lineage():
            for item in turn.items:
                _index(self._context, item)
        return self._context.get(key)


def _walk(parent: Response, key: tuple[object, str]) -> Item | None:
    kind, name = key
    for turn in parent.lineage():
        for item in turn.items:
            if item.id == name if kind == "id" else type(item) is kind and getattr(item, "call_id", None) == name:
                return item
    return None


_Index = dict[tuple[object, str], Item]


def _index(index: _Index, item: Item) -> None:
    if item.id is not None:
        index.setdefault(("id", item.id), item)
    call_id = getattr(item, "call_id", None)
    if call_id is not None:
        index.setdefault((type(item), call_id), item)


def _same(known: Item, item: Item) -> bool:
    """Whether a client repeats what is known. Of a thought it may have less: its text, or only what is sealed."""
    if isinstance(known, Reasoning) and isinstance(item, Reasoning):
        untold = not (known.content and item.content)
        return known.summary == item.summary and (untold or known.content == item.content)
    return type(known) is type(item) and _content(known) == _content(item)


def _content(item: Item) -> Item:
    """The item without what clients change when they repeat one: its own id and status. Argument text is compared as it
    is: clients echo it."""
    if isinstance(item, Message):
        return replace(item, id=None, status=None, phase=None, content=text_of(item.content))
    if isinstance(item, FunctionCall | CustomToolCall | FunctionCallOutput | CustomToolCallOutput):
        return replace(item, id=None, status=None)
    if isinstance(item, ItemReference):
        return item
    return replace(item, id=None)


class ResponseCache:
    """The responses one socket remembers: per lane the newest `per_lane`, plus those that waiting turns will continue.

    `store: false` responses live here only. Not thread-safe; one event loop owns it.
    """

    __slots__ = ("_by_id", "_lanes", "_per_lane", "_protected")

    def __init__(self, per_lane: int) -> None:
        if per_lane < 1:
            raise ValueError("per_lane must be at least 1: the newest response of a lane is always continuable")
        self._per_lane = per_lane
        self._by_id: dict[str, Response] = {}
        self._lanes: dict[Lane, deque[str]] = {}
        self._protected: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def size(self) -> int:
        """About how many bytes the newest contexts of all lanes hold."""
        return sum(self._by_id[lane[-1]].size for lane in self._lanes.values() if lane)

    def release(self, may_go: Callable[[Response], bool]) -> None:
        """Forget what may go, except what waiting turns will continue."""
        for lane in self._lanes.values():
            for response_id in list(lane):
                if response_id not in self._protected and may_go(self._by_id[response_id]):
                    lane.remove(response_id)
                    del self._by_id[response_id]

    def get(self, response_id: str) -> Response | None:
        """The response, or None when this socket does not (or no longer) know it."""
        return self._by_id.get(response_id)

    def protect(self, response_ids: frozenset[str]) -> None:
        """These parents of waiting turns are kept beyond the bound, until another set is given (protocol.md 8.12)."""
        freed = self._protected - response_ids
        self._protected = response_ids
        for response_id in freed:
            if not any(response_id in lane for lane in self._lanes.values()):
                self._by_id.pop(response_id, None)

    def commit(self, response: Response) -> None:
        """The newest response of its lane. Older ones beyond the bound are forgotten unless protected."""
        lane = self._lanes.setdefault(response.lane, deque())
        self._by_id[response.id] = response
        lane.append(response.id)
        while len(lane) > self._per_lane:
            oldest = lane.popleft()
            if oldest not in self._protected:
                del self._by_id[oldest]

    def evict(self, response_id: str, lane: Lane) -> None:
        """A continuation in `lane` failed: its parent is forgotten if it is of that lane (a failed fork keeps it)."""
        known = self._by_id.get(response_id)
        if known is None or known.lane != lane:
            return
        ids = self._lanes[lane]
        if response_id in ids:
            ids.remove(response_id)
        del self._by_id[response_id]
