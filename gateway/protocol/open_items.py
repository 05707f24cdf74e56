"""Output items while they are being written: the item-specific event sequences of protocol.md 3.3.

Each class knows how its item begins, grows and ends, and yields events as (type, JSON fields without the braces).
The fields that repeat in every delta of an item are encoded once, when the item opens.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from json.encoder import encode_basestring as quote
from typing import Any, Protocol

import orjson

from gateway.protocol.deltas import CallStart, Logprob, Phase, TextDelta
from gateway.protocol.items import (
    Compaction,
    CustomToolCall,
    FunctionCall,
    Item,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    Status,
    SummaryText,
    to_json,
)

Fields = tuple[str, str]
Seal = Callable[[str, str | None], str]
"""Makes `encrypted_content` from a thought's text and what its upstream wants back, if anything."""

LEAST_LOGPROB = -9999.0


@dataclass(frozen=True, slots=True)
class CompactionStart:
    """The context is being compacted."""


@dataclass(frozen=True, slots=True)
class CompactionBeat:
    """It still is: a sign of life, without content."""

    text: str = ""


@dataclass(frozen=True, slots=True)
class CompactionEnd:
    """It is done; this is the sealed window."""

    encrypted_content: str


CompactionStep = CompactionStart | CompactionBeat | CompactionEnd


class OpenItem(Protocol):
    """An item that is being written."""

    def begin(self) -> list[Fields]:
        """`output_item.added`, and what precedes the first delta."""
        ...

    def append(self, text: str) -> Fields:
        """One delta event."""
        ...

    def finish(self, status: str) -> tuple[Item, list[Fields]]:
        """The finished item and its closing events, `output_item.done` last."""
        ...


def item_json(item: Item) -> str:
    """An item as JSON text."""
    return orjson.dumps(to_json(item)).decode()


def _status(status: str) -> Status:
    return "incomplete" if status == "incomplete" else "completed"


class _Part:
    """An item with one streamed content part."""

    __slots__ = ("_delta_fields", "_id", "_index", "_pieces", "_where")
    delta_event = ""
    done_event = ""

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = f'"output_index":{index}'
        self._where = f'"item_id":{quote(item_id)},{self._index},"content_index":0'
        self._pieces: list[str] = []
        self._delta_fields = f'{self._where},"delta":'

    def append(self, text: str) -> Fields:
        self._pieces.append(text)
        return self.delta_event, f"{self._delta_fields}{quote(text)}"

    def _begin(self, item: str, part: str) -> list[Fields]:
        return [
            ("response.output_item.added", f'{self._index},"item":{item}'),
            ("response.content_part.added", f'{self._where},"part":{part}'),
        ]

    def _finish(self, done_fields: str, part: str, item: Item) -> tuple[Item, list[Fields]]:
        return item, [
            (self.done_event, f"{self._where},{done_fields}"),
            ("response.content_part.done", f'{self._where},"part":{part}'),
            ("response.output_item.done", f'{self._index},"item":{item_json(item)}'),
        ]


class OpenText(_Part):
    """An assistant message of text, with log-probabilities where its deltas bring them."""

    __slots__ = ("_logprobs", "_phase")
    delta_event = "response.output_text.delta"
    done_event = "response.output_text.done"

    def __init__(self, item_id: str, index: int, phase: Phase | None = None) -> None:
        super().__init__(item_id, index)
        # The SDK's types require `logprobs` on every text delta (protocol.md A.1).
        self._delta_fields = f'{self._where},"logprobs":[],"delta":'
        self._logprobs: list[Logprob] = []
        self._phase = phase

    def begin(self) -> list[Fields]:
        phase = "" if self._phase is None else f',"phase":"{self._phase}"'
        return self._begin(
            f'{{"id":{quote(self._id)},"type":"message","status":"in_progress","role":"assistant","content":[]{phase}}}',
            '{"type":"output_text","text":"","annotations":[],"logprobs":[]}',
        )

    def append_scored(self, delta: TextDelta) -> Fields:
        """One delta event with the log-probabilities of its tokens."""
        self._pieces.append(delta.text)
        self._logprobs += delta.logprobs
        scored = orjson.dumps([_scored(each) for each in delta.logprobs]).decode()
        return self.delta_event, f'{self._where},"logprobs":{scored},"delta":{quote(delta.text)}'

    def finish(self, status: str) -> tuple[Item, list[Fields]]:
        text = "".join(self._pieces)
        part = OutputText(text, logprobs=tuple(_scored(each, with_bytes=True) for each in self._logprobs))
        item = Message("assistant", (part,), id=self._id, status=_status(status), phase=self._phase)
        scored = orjson.dumps([_scored(each) for each in self._logprobs]).decode()
        return self._finish(f'"text":{quote(text)},"logprobs":{scored}', orjson.dumps(to_json(part)).decode(), item)


def _scored(entry: Logprob, *, with_bytes: bool = False) -> dict[str, Any]:
    """The wire form of one token's log-probability: events say the token as text, items its bytes too (protocol.md
    A.7)."""
    return {
        **_token(entry.token, entry.logprob, with_bytes),
        "top_logprobs": [_token(token, logprob, with_bytes) for token, logprob in entry.top],
    }


def _token(token: bytes, logprob: float, with_bytes: bool) -> dict[str, Any]:
    # JSON has no infinity; OpenAI's own value for "as good as impossible" is -9999.
    fields: dict[str, Any] = {"token": token.decode(errors="replace"), "logprob": max(logprob, LEAST_LOGPROB)}
    return {**fields, "bytes": list(token)} if with_bytes else fields


class OpenRefusal(_Part):
    """An assistant message that refuses."""

    __slots__ = ()
    delta_event = "response.refusal.delta"
    done_event = "response.refusal.done"

    def begin(self) -> list[Fields]:
        return self._begin(
            f'{{"id":{quote(self._id)},"type":"message","status":"in_progress","role":"assistant","content":[]}}',
            '{"type":"refusal","refusal":""}',
        )

    def finish(self, status: str) -> tuple[Item, list[Fields]]:
        text = "".join(self._pieces)
        part = Refusal(text)
        item = Message("assistant", (part,), id=self._id, status=_status(status))
        return self._finish(f'"refusal":{quote(text)}', orjson.dumps(to_json(part)).decode(), item)


class OpenReasoning(_Part):
    """Raw reasoning of an open-weight model, under OpenAI's event names (protocol.md 8.7). There is no summary: no open
    model writes one. `encrypted_content` exists once the text does (3.3)."""

    __slots__ = ("_seal", "foreign")
    delta_event = "response.reasoning_text.delta"
    done_event = "response.reasoning_text.done"

    def __init__(self, item_id: str, index: int, seal: Seal | None = None) -> None:
        super().__init__(item_id, index)
        self._seal = seal
        self.foreign: str | None = None

    def begin(self) -> list[Fields]:
        return self._begin(_reasoning_begun(self._id), '{"type":"reasoning_text","text":""}')

    def finish(self, status: str) -> tuple[Item, list[Fields]]:
        text = "".join(self._pieces)
        part = ReasoningText(text)
        sealed = None if self._seal is None else self._seal(text, self.foreign)
        item = Reasoning(
            id=self._id, content=(part,), encrypted_content=sealed, status=_status(status), foreign=self.foreign
        )
        return self._finish(f'"text":{quote(text)}', orjson.dumps(to_json(part)).decode(), item)


class OpenSummary:
    """Reasoning that its upstream only sums up, in parts, or does not show at all."""

    __slots__ = ("_id", "_index", "_part", "_parts", "_pieces", "_seal", "_where", "foreign")

    def __init__(self, item_id: str, index: int, seal: Seal | None = None) -> None:
        self._id = item_id
        self._index = f'"output_index":{index}'
        self._where = ""
        self._part: int | None = None
        self._parts: list[SummaryText] = []
        self._pieces: list[str] = []
        self._seal = seal
        self.foreign: str | None = None

    def begin(self) -> list[Fields]:
        return [("response.output_item.added", f'{self._index},"item":{_reasoning_begun(self._id)}')]

    def turn_to(self, part: int) -> list[Fields]:
        """What precedes the next delta if that is of this part: nothing, or the last part's end and a new beginning."""
        if part == self._part:
            return []
        events = self._end_part()
        self._part, self._pieces = part, []
        self._where = f'"item_id":{quote(self._id)},{self._index},"summary_index":{len(self._parts)}'
        added = f'{self._where},"part":{{"type":"summary_text","text":""}}'
        return [*events, ("response.reasoning_summary_part.added", added)]

    def append(self, text: str) -> Fields:
        self._pieces.append(text)
        return "response.reasoning_summary_text.delta", f'{self._where},"delta":{quote(text)}'

    def finish(self, status: str) -> tuple[Item, list[Fields]]:
        events = self._end_part()
        # Clients carry a summary in the open. Without anything else to carry, it is all there is of the thought.
        text = "" if self.foreign is not None else "\n\n".join(part.text for part in self._parts)
        sealed = None if self._seal is None else self._seal(text, self.foreign)
        item = Reasoning(
            id=self._id,
            summary=tuple(self._parts),
            encrypted_content=sealed,
            status=_status(status),
            foreign=self.foreign,
        )
        return item, [*events, ("response.output_item.done", f'{self._index},"item":{item_json(item)}')]

    def _end_part(self) -> list[Fields]:
        if self._part is None:
            return []
        part = SummaryText("".join(self._pieces))
        self._parts.append(part)
        whole = orjson.dumps(to_json(part)).decode()
        return [
            ("response.reasoning_summary_text.done", f'{self._where},"text":{quote(part.text)}'),
            ("response.reasoning_summary_part.done", f'{self._where},"part":{whole}'),
        ]


def _reasoning_begun(item_id: str) -> str:
    return f'{{"id":{quote(item_id)},"type":"reasoning","status":"in_progress","summary":[]}}'


class OpenCall:
    """A function call or a custom tool call."""

    __slots__ = ("_call_id", "_delta_event", "_delta_fields", "_id", "_index", "_pieces", "_start", "_where")

    def __init__(self, item_id: str, index: int, call_id: str, start: CallStart) -> None:
        self._id = item_id
        self._call_id = call_id
        self._start = start
        self._index = f'"output_index":{index}'
        self._where = f'"item_id":{quote(item_id)},{self._index}'
        self._delta_fields = f'{self._where},"delta":'
        self._pieces: list[str] = []
        function = start.kind == "function"
        self._delta_event = (
            "response.function_call_arguments.delta" if function else "response.custom_tool_call_input.delta"
        )

    def begin(self) -> list[Fields]:
        item = item_json(self._item("", "in_progress"))
        return [("response.output_item.added", f'{self._index},"item":{item}')]

    def append(self, text: str) -> Fields:
        self._pieces.append(text)
        return self._delta_event, f"{self._delta_fields}{quote(text)}"

    def finish(self, status: str) -> tuple[Item, list[Fields]]:
        text = "".join(self._pieces)
        item = self._item(text, _status(status))
        if self._start.kind == "function":
            # `name` is in the SDK's newer event types and harmless to older ones.
            done = (
                "response.function_call_arguments.done",
                f'{self._where},"arguments":{quote(text)},"name":{quote(self._start.name)}',
            )
        else:
            done = ("response.custom_tool_call_input.done", f'{self._where},"input":{quote(text)}')
        return item, [done, ("response.output_item.done", f'{self._index},"item":{item_json(item)}')]

    def _item(self, text: str, status: Status) -> FunctionCall | CustomToolCall:
        start = self._start
        if start.kind == "function":
            return FunctionCall(self._call_id, start.name, text, id=self._id, namespace=start.namespace, status=status)
        return CustomToolCall(self._call_id, start.name, text, id=self._id, namespace=start.namespace, status=status)


class OpenCompaction:
    """A compaction: added, any number of signs of life, done (protocol.md 3.3). `content` is set before it finishes."""

    __slots__ = ("_id", "_index", "_where", "content")

    def __init__(self, item_id: str, index: int) -> None:
        self._id = item_id
        self._index = f'"output_index":{index}'
        self._where = f'"item_id":{quote(item_id)},{self._index}'
        self.content = ""

    def begin(self) -> list[Fields]:
        # `encrypted_content` is required in the item's type, so it is empty rather than left out.
        return [("response.output_item.added", f'{self._index},"item":{item_json(self._item())}')]

    def append(self, text: str) -> Fields:  # noqa: ARG002 - a beat has none
        return "response.compaction.compacting", self._where

    def finish(self, status: str) -> tuple[Item, list[Fields]]:  # noqa: ARG002 - the item has no status
        item = self._item()
        return item, [("response.output_item.done", f'{self._index},"item":{item_json(item)}')]

    def _item(self) -> Compaction:
        return Compaction(self.content, id=self._id)
