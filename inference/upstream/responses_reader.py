"""Events of a Responses stream as deltas. Pure.

Deltas know one open item at a time, and events name theirs: what comes of a later item is held back until those before
it are done. Servers differ in what they stream; what an item's `done` event has and nothing was streamed of is taken
from there, and the whole output from the terminal event if there were no items at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import orjson

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallKind,
    CallStart,
    Delta,
    MessageStart,
    Phase,
    ReasoningDelta,
    ReasoningEnd,
    RefusalDelta,
    SummaryDelta,
    TextDelta,
)
from inference.engine import Counted, Finish
from inference.upstream.errors import broken_off, failure, filtered
from inference.upstream.fields import logprobs_in, objects_in, text_in
from inference.upstream.usage import UsageShape, counted

USAGE = UsageShape(
    input=(("usage", "input_tokens"),),
    output=(("usage", "output_tokens"),),
    cached=(("usage", "input_tokens_details", "cached_tokens"),),
    reasoning=(("usage", "output_tokens_details", "reasoning_tokens"),),
)
CALLS: Mapping[str, tuple[CallKind, str]] = {
    "function_call": ("function", "arguments"),
    "custom_tool_call": ("custom", "input"),
}
"""Items that are calls: their kind, and the field of what the tool is given."""
GROWING: Mapping[str, str] = {
    "response.output_text.delta": "message",
    "response.refusal.delta": "message",
    "response.reasoning_text.delta": "reasoning",
    "response.reasoning_summary_text.delta": "reasoning",
    "response.function_call_arguments.delta": "function_call",
    "response.custom_tool_call_input.delta": "custom_tool_call",
}
"""Events that bring text, and the type of the item that it belongs to."""
TERMINALS = frozenset({"response.completed", "response.incomplete", "response.failed"})
_PHASES = (None, "commentary", "final_answer")


@dataclass(slots=True)
class _Item:
    type: str
    begun: bool = False  # a call whose start is among the deltas
    done: bool = False
    cut: bool = False  # a call that its server calls incomplete
    streamed: bool = False
    given: list[str] = field(default_factory=list)  # what a call's tool is given
    deltas: list[Delta] = field(default_factory=list)

    def is_whole(self) -> bool:
        """Whether a call can be carried out. Servers say so of functions whose arguments were cut off, too (vLLM)."""
        if self.cut or self.type != "function_call":
            return not self.cut
        try:
            orjson.loads("".join(self.given) or "{}")
        except orjson.JSONDecodeError:
            return False
        return True


class ResponsesReader:
    """Reads one answer (`inference.upstream.engines.AnswerReader`). `origin` is who gives it; `names` maps tools as the
    upstream knows them to `Tool.model_name` where those differ; with `one_call` a second call is never begun."""

    def __init__(self, origin: str, names: Mapping[str, str], *, one_call: bool = False) -> None:
        self._origin = origin
        self._names = names
        self._one_call = one_call
        self._items: dict[int, _Item] = {}
        self._queue: list[_Item] = []  # those whose deltas are not all passed on, the first one growing
        self._newest = -1
        self._called = False
        self._kind = ""  # of the terminal event
        self._response: Mapping[str, Any] = {}
        self.full = False
        self.counted: Counted | None = None

    @property
    def ended(self) -> bool:
        """See `Progress`."""
        return self._kind != ""

    @property
    def thinking(self) -> bool:
        """See `Progress`: nothing but thoughts is being said."""
        return not any(item.begun or item.streamed for item in self._queue if item.type != "reasoning")

    def read(self, chunks: Sequence[Mapping[str, Any]]) -> list[Delta]:
        """The deltas of these events. Raises `UpstreamError` for an answer that failed."""
        for event in chunks:
            kind = event.get("type")
            if not isinstance(kind, str) or self._kind:
                continue
            if kind in GROWING:
                self._grow(kind, event)
            elif kind == "response.output_item.added":
                self._add(event, event.get("item"))
            elif kind == "response.output_item.done":
                self._end(event, event.get("item"))
            elif kind in TERMINALS:
                self._finish(kind, event.get("response"))
        return self._passed_on()

    def finish(self) -> tuple[list[Delta], Finish]:
        """See `AnswerReader`."""
        if self.full:
            return [], "stop"
        if not self._kind:
            raise broken_off()
        details = self._response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        if reason == "content_filter":
            raise filtered()
        ends = {self._kind.removeprefix("response."), text_in(self._response.get("status"))} - {"completed", ""}
        if reason not in (None, "max_output_tokens") or ends - {"incomplete"}:
            raise broken_off()
        cut = reason is not None or bool(ends)
        last = self._queue[-1] if self._queue else None
        for item in self._queue:  # those whose end the server has left out
            item.done = True
        out = self._passed_on()
        if last is not None and last.begun and self._queue and not (cut or last.cut):
            out.append(CallEnd())  # whatever its arguments look like: that is how the model wrote them
        return out, "length" if cut else "stop"

    def _finish(self, kind: str, response: Any) -> None:
        """The terminal event and its response."""
        self._kind = kind
        self._response = response if isinstance(response, dict) else {}
        self.counted = counted(self._response, USAGE)
        if kind == "response.failed" or self._response.get("status") == "failed":
            raise failure(self._response.get("error"))
        if not self._items:
            for item in objects_in(self._response.get("output")):
                self._end({}, item)

    def _grow(self, kind: str, event: Mapping[str, Any]) -> None:
        item = self._item_of(event)
        if item is not None and item.done and "output_index" in event:
            return  # it was said whole
        if item is None or item.done or item.type != GROWING[kind]:
            item = self._add(event, {"type": GROWING[kind]})
        text = text_in(event.get("delta"))
        if item is None or not text or (item.type in CALLS and not item.begun):
            return  # a call whose name has not come comes whole, with its end
        item.streamed = True
        match kind:
            case "response.output_text.delta":
                item.deltas.append(TextDelta(text, logprobs_in(event.get("logprobs"))))
            case "response.refusal.delta":
                item.deltas.append(RefusalDelta(text))
            case "response.reasoning_text.delta":
                item.deltas.append(ReasoningDelta(text))
            case "response.reasoning_summary_text.delta":
                part = event.get("summary_index")
                item.deltas.append(SummaryDelta(text, part if isinstance(part, int) else 0))
            case _:
                item.given.append(text)
                item.deltas.append(CallDelta(text))

    def _item_of(self, event: Mapping[str, Any]) -> _Item | None:
        index = event.get("output_index")
        return self._items.get(index if isinstance(index, int) else self._newest)

    def _add(self, event: Mapping[str, Any], given: Any) -> _Item | None:
        """A new item; None once no more are wanted."""
        fields = given if isinstance(given, dict) else {}
        item = _Item(str(fields.get("type")))
        if item.type in CALLS and self._one_call and self._called:
            self.full = True
        if self.full:
            return None
        index = event.get("output_index")
        self._newest = index if isinstance(index, int) else self._newest + 1
        self._items[self._newest] = item
        self._queue.append(item)
        if item.type == "message":
            phase = fields.get("phase")
            item.deltas.append(MessageStart(cast("Phase | None", phase) if phase in _PHASES else None))
        elif item.type in CALLS:
            self._called = True
            self._begin_call(item, fields)
        return item

    def _begin_call(self, item: _Item, fields: Mapping[str, Any]) -> None:
        """The start of a call, once its name is known."""
        if not item.begun and (name := text_in(fields.get("name"))):
            item.begun = True
            item.deltas.append(CallStart(CALLS[item.type][0], self._names.get(name, name)))

    def _end(self, event: Mapping[str, Any], given: Any) -> None:
        """An item is done: what was not streamed of it. A call's end is told when it is certain (`_passed_on`)."""
        fields = given if isinstance(given, dict) else {}
        item = self._item_of(event)
        if item is not None and item.done and "output_index" in event:
            return
        if item is None or item.done:
            item = self._add(event, fields)
        if item is None:
            return
        item.done = True
        if item.type in CALLS:
            self._end_call(item, fields)
        elif not item.streamed:
            item.deltas += _whole(item.type, fields)
        if item.type == "reasoning" and (blob := text_in(fields.get("encrypted_content"))):
            item.deltas.append(ReasoningEnd(f"{self._origin}\n{blob}"))

    def _end_call(self, item: _Item, fields: Mapping[str, Any]) -> None:
        self._begin_call(item, fields)
        kind, name = CALLS[item.type]
        item.cut = fields.get("status") == "incomplete"
        if item.begun and not item.streamed:  # nobody can be told of a call without a name
            given = text_in(fields.get(name)) or ("{}" if kind == "function" and not item.cut else "")
            item.given.append(given)
            item.deltas += [CallDelta(given)] if given else []

    def _passed_on(self) -> list[Delta]:
        """What may be told. Stays in the queue: the newest call, if it looks as if it was cut off, which only what
        follows can tell."""
        out: list[Delta] = []
        while self._queue:
            first = self._queue[0]
            if first.deltas:
                out += first.deltas
                first.deltas = []
            if not first.done or (first.begun and len(self._queue) == 1 and not first.is_whole()):
                break
            if first.begun:
                out.append(CallEnd())
            self._queue.pop(0)
        return out


def _whole(kind: str, fields: Mapping[str, Any]) -> list[Delta]:
    """The deltas of a message or a thought that was not streamed."""
    out: list[Delta] = []
    parts = objects_in(fields.get("content"))
    if kind == "message":
        for part in parts:
            if text := text_in(part.get("text")):
                out.append(TextDelta(text, logprobs_in(part.get("logprobs"))))
            if refused := text_in(part.get("refusal")):
                out.append(RefusalDelta(refused))
    elif kind == "reasoning":
        out += [ReasoningDelta(text) for part in parts if (text := text_in(part.get("text")))]
        texts = [text_in(part.get("text")) for part in objects_in(fields.get("summary"))]
        out += [SummaryDelta(text, at) for at, text in enumerate(texts) if text and not parts]
    return out
