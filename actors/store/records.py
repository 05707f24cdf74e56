"""Stored values as bytes: items, turns, Response objects. Pure.

MessagePack with fields by position. The layouts below are what is on people's disks: a new field goes to the end of its
layout (absent ones read as None, which such a field must allow), and none is ever taken away or moved.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import msgspec
import orjson

from actors.conversation import Response, Round
from actors.tokencache import EMPTY
from gateway.protocol.items import (
    AdditionalTools,
    Compaction,
    CompactionTrigger,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    InputText,
    Item,
    ItemReference,
    Message,
    Opaque,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)
from gateway.protocol.tools import Tool

SHARED_CHARS = 512
"""Values of a request's echo from this length on are kept once for all responses that repeat them."""

LAYOUTS: Mapping[type, tuple[int, tuple[str, ...]]] = {
    Message: (0, ("role", "content", "id", "status", "phase")),
    FunctionCall: (1, ("call_id", "name", "arguments", "id", "status", "namespace")),
    FunctionCallOutput: (2, ("call_id", "output", "id", "status")),
    CustomToolCall: (3, ("call_id", "name", "input", "id", "status", "namespace")),
    CustomToolCallOutput: (4, ("call_id", "output", "id", "status")),
    Reasoning: (5, ("id", "summary", "content", "encrypted_content", "status", "foreign")),
    Compaction: (6, ("encrypted_content", "id")),
    CompactionTrigger: (7, ("id",)),
    ItemReference: (8, ("id",)),
    AdditionalTools: (9, ("tools", "role", "id")),
    Opaque: (10, ("type", "raw", "id")),
    InputText: (20, ("text",)),
    InputImage: (21, ("image_url", "file_id", "detail")),
    InputFile: (22, ("file_id", "file_url", "file_data", "filename")),
    OutputText: (23, ("text", "annotations", "logprobs")),
    Refusal: (24, ("refusal",)),
    ReasoningText: (25, ("text",)),
    SummaryText: (26, ("text",)),
}
"""Number and fields of each type of item and part; `type` only where it isn't the same for all."""

_PARTS = frozenset({"content", "output", "summary"})
_JSON_TUPLES = frozenset({"annotations", "logprobs", "tools"})

_EXT_TEXT, _EXT_INTEGER, _EXT_MAP = 1, 2, 3


def dump(value: Any) -> bytes:
    """Bytes of None, booleans, numbers, texts, bytes, lists and maps. All of them come back exactly, lone surrogates
    and integers of any size too."""
    try:
        return _ENCODER.encode(value)
    except (UnicodeEncodeError, OverflowError):
        return _ENCODER.encode(_extended(value))


def parse(data: bytes) -> Any:
    """The inverse of `dump`, with lists for tuples. Raises ValueError for what `dump` never writes."""
    return _DECODER.decode(data)


def items_to_lists(items: Sequence[Item]) -> list[Any]:
    """For `dump`."""
    return [_to_list(item) for item in items]


def items_from_lists(raw: Sequence[Any]) -> tuple[Item, ...]:
    """The inverse of `items_to_lists`."""
    return tuple(_from_list(entry) for entry in raw)


def turn_to_list(turn: Response) -> list[Any]:
    """What a turn adds to its parent, for `dump`. A preamble that is the parent's is written as True, and of the tools
    only those behind the parent's. `sent` is left out: no engine but the one it names knows that prompt."""
    parent = turn.parent
    inherited = 0 if parent is None else _shared_tools(parent.tools, turn.tools)
    same = parent is not None and parent.preamble == turn.preamble
    return [
        turn.id,
        items_to_lists(turn.items),
        turn.tokens.tail(turn.kept),
        turn.kept,
        turn.begins,
        None if turn.round is None else list(turn.round),
        True if same else turn.preamble,
        inherited,
        [_tool_to_list(tool) for tool in turn.tools[inherited:]],
        dict(turn.pending),
        turn.lane,
        turn.model,
        turn.store,
    ]


def turn_from_list(raw: Sequence[Any], parent: Response | None) -> Response:
    """The inverse of `turn_to_list`, behind the turn that it continues. Raises ValueError when that is another."""
    turn_id, items, ids, kept, begins, forgotten, preamble, inherited, tools, pending, lane, model, store = raw[:13]
    if parent is None and (inherited or kept or preamble is True):
        raise ValueError("a turn without the one that it continues")
    before = EMPTY if parent is None else parent.tokens.cut(kept)
    old = () if parent is None else parent.tools[:inherited]
    if len(old) == inherited and not tools and parent is not None and len(parent.tools) == inherited:
        known = parent.tools
    else:
        known = (*old, *(_tool_from_list(tool) for tool in tools))
    return Response(
        turn_id,
        parent,
        items_from_lists(items),
        before.extend(ids),
        parent.preamble if parent is not None and preamble is True else preamble,
        known,
        pending,
        lane,
        model,
        store,
        kept,
        begins,
        None if forgotten is None else Round(*forgotten),
    )


@dataclass(frozen=True, slots=True)
class SplitBody:
    """A Response object's text in two: `pieces` are texts of its own and, as numbers, how many characters to take next
    from `shared`, the long values that other responses repeat."""

    pieces: list[str | int]
    shared: str


class EchoTexts:
    """JSON texts of long lists that requests repeat. Agents send the same tools with every turn, and their echoes share
    the entries (`gateway.protocol.tooldefs.ToolMemo`), so a list is known by these; nobody changes them."""

    __slots__ = ("_known",)

    CAPACITY = 64

    def __init__(self) -> None:
        self._known: dict[tuple[int, ...], tuple[tuple[Any, ...], str]] = {}

    def text(self, value: Any) -> str:
        """The value as orjson writes it."""
        if type(value) is not list or len(value) < 2:
            return orjson.dumps(value).decode()
        key = tuple(map(id, value))
        found = self._known.get(key)
        if found is None:
            found = tuple(value), orjson.dumps(value).decode()
            if len(found[1]) < SHARED_CHARS:
                return found[1]
            # Several threads may be here: each step is whole in itself. Held entries keep their ids.
            if len(self._known) >= self.CAPACITY:
                self._known.clear()
            self._known[key] = found
        return found[1]


def split_body(own: str, echo: Mapping[str, Any] | None, texts: EchoTexts) -> SplitBody:
    """Of the text that `StoredResponse.body` gives, without making it."""
    if echo is None:
        return SplitBody([own], "")
    pieces: list[str | int] = []
    shared: list[str] = []
    literal = own
    short: dict[str, Any] = {}
    for key, value in echo.items():
        if isinstance(value, list | dict) or (isinstance(value, str) and len(value) >= SHARED_CHARS):
            text = texts.text(value)
            if len(text) >= SHARED_CHARS:
                shared.append(text)
                pieces += (f"{literal}{_members(short)},{orjson.dumps(key).decode()}:", len(text))
                literal, short = "", {}
                continue
        short[key] = value
    pieces.append(f"{literal}{_members(short)}}}")
    return SplitBody(pieces, "".join(shared))


def _members(values: Mapping[str, Any]) -> str:
    """As they stand behind other members of an object."""
    return f",{orjson.dumps(values).decode()[1:-1]}" if values else ""


def join_body(split: SplitBody) -> str:
    """The whole text again."""
    start, found = 0, []
    for piece in split.pieces:
        if isinstance(piece, str):
            found.append(piece)
        else:
            found.append(split.shared[start : start + piece])
            start += piece
    return "".join(found)


def _to_list(value: Any) -> list[Any]:
    number, names = LAYOUTS[type(value)]
    found: list[Any] = [number]
    for name in names:
        entry = getattr(value, name)
        if type(entry) is tuple:
            entry = [_to_list(part) for part in entry] if name in _PARTS else list(entry)
        found.append(entry)
    while found[-1] is None:
        found.pop()
    return found


def _from_list(raw: Sequence[Any]) -> Any:
    kind, blank, places = _BY_NUMBER[raw[0]]
    arguments = blank.copy()
    for (position, is_parts, is_json), entry in zip(places, raw[1:], strict=False):
        if type(entry) is list:
            if is_parts:
                entry = tuple([_from_list(part) for part in entry])  # noqa: PLW2901
            elif is_json:
                entry = tuple(entry)  # noqa: PLW2901
        arguments[position] = entry
    return kind(*arguments)


def _places(kind: type, names: Sequence[str]) -> tuple[type, list[Any], list[tuple[int, bool, bool]]]:
    """How to make one of this type from a list: the arguments without the fields of its layout, and where each of those
    goes."""
    known = fields(kind)
    order = [each.name for each in known]
    blank = [None if each.name in names else each.default for each in known]
    return kind, blank, [(order.index(name), name in _PARTS, name in _JSON_TUPLES) for name in names]


def _tool_to_list(tool: Tool) -> list[Any]:
    grammar = None if tool.grammar is None else list(tool.grammar)
    return [tool.kind, tool.name, tool.namespace, tool.description, tool.parameters, tool.strict, grammar]


def _tool_from_list(raw: Sequence[Any]) -> Tool:
    kind, name, namespace, description, parameters, strict, grammar = raw[:7]
    return Tool(
        kind, name, namespace, description, parameters, strict, None if grammar is None else (grammar[0], grammar[1])
    )


def _shared_tools(before: tuple[Tool, ...], now: tuple[Tool, ...]) -> int:
    """How many of the first tools are the same."""
    if before is now:
        return len(before)
    count = 0
    for old, new in zip(before, now, strict=False):
        if old is not new and old != new:
            break
        count += 1
    return count


def _extended(value: Any) -> Any:
    """The value with what MessagePack can't hold put into extension types."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return msgspec.msgpack.Ext(_EXT_TEXT, value.encode(errors="surrogatepass"))
        return value
    if isinstance(value, int) and not isinstance(value, bool) and not -(1 << 63) <= value < 1 << 64:
        return msgspec.msgpack.Ext(_EXT_INTEGER, str(value).encode())
    if isinstance(value, Mapping):
        pairs = [[_extended(key), _extended(entry)] for key, entry in value.items()]
        return msgspec.msgpack.Ext(_EXT_MAP, _ENCODER.encode(pairs))
    if isinstance(value, list | tuple):
        return [_extended(entry) for entry in value]
    return value


def _from_extension(code: int, data: memoryview) -> Any:
    raw = bytes(data)
    if code == _EXT_TEXT:
        return raw.decode(errors="surrogatepass")
    if code == _EXT_INTEGER:
        return int(raw)
    if code == _EXT_MAP:
        return dict(_DECODER.decode(raw))
    raise ValueError(f"unknown extension {code}")


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(ext_hook=_from_extension)
_BY_NUMBER = {number: _places(kind, names) for kind, (number, names) in LAYOUTS.items()}
