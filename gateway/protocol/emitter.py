r"""Deltas in, events out: the event grammar of one response (protocol.md 3), as a table.

The emitter is the only place that hands out item ids, output indices and sequence numbers, and the only source of
the finished items: what is streamed and what the terminal event repeats are the same values, never parsed twice.

An output item is open in one of four states; a delta of another kind closes it and opens the next:

    state \\ delta   text        refusal     reasoning   summary     call start  call delta  call end
    NONE            open        open        open        open        open        illegal     illegal
    TEXT            append      switch      switch      switch      switch      illegal     illegal
    REFUSAL         switch      append      switch      switch      switch      illegal     illegal
    REASONING       switch      switch      append      switch      switch      illegal     illegal
    SUMMARY         switch      switch      switch      append      switch      illegal     illegal
    CALL            illegal     illegal     illegal     illegal     illegal     append      close

The start of a message closes what is open, except a call, where it is illegal; text that follows opens another item.
The end of a thought closes REASONING or SUMMARY; anywhere else but in a call it is a thought of its own without text.

A compaction is the gateway's own and stands between items: its start opens it in NONE; in COMPACTION its beats append
and its end closes; any other pair with one of these is illegal. Cut short it leaves no item: there is nothing to keep.

Events leave as JSON text, built by concatenation: a text delta costs about a microsecond and one string.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum, auto
from json.encoder import encode_basestring as quote
from typing import Any, NamedTuple

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
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
from gateway.protocol.ids import IdSource
from gateway.protocol.items import Item
from gateway.protocol.open_items import (
    CompactionBeat,
    CompactionEnd,
    CompactionStart,
    CompactionStep,
    OpenCall,
    OpenCompaction,
    OpenItem,
    OpenReasoning,
    OpenRefusal,
    OpenSummary,
    OpenText,
    Seal,
)
from gateway.protocol.response import ResponseObject, Usage


class Event(NamedTuple):
    """One server event: its `type` and the whole JSON object, as it goes into a text frame or an SSE data line."""

    type: str
    data: str


class State(Enum):
    """What is open."""

    NONE = auto()
    TEXT = auto()
    REFUSAL = auto()
    REASONING = auto()
    SUMMARY = auto()
    CALL = auto()
    COMPACTION = auto()
    ENDED = auto()


class Step(Enum):
    """What a delta does."""

    OPEN = auto()
    APPEND = auto()
    SWITCH = auto()
    CLOSE = auto()
    MARK = auto()


_SPOKEN: dict[type, State] = {
    TextDelta: State.TEXT,
    RefusalDelta: State.REFUSAL,
    ReasoningDelta: State.REASONING,
    SummaryDelta: State.SUMMARY,
    CallStart: State.CALL,
}
_OPENS = {**_SPOKEN, ReasoningEnd: State.SUMMARY, CompactionStart: State.COMPACTION}
_PLAIN = (State.TEXT, State.REFUSAL, State.REASONING, State.SUMMARY)

GRAMMAR: dict[tuple[State, type], Step] = {
    **{(State.NONE, kind): Step.OPEN for kind in _SPOKEN},
    **{(state, kind): Step.APPEND if _SPOKEN[kind] is state else Step.SWITCH for state in _PLAIN for kind in _SPOKEN},
    **{(state, MessageStart): Step.MARK for state in (State.NONE, *_PLAIN)},
    (State.NONE, ReasoningEnd): Step.OPEN,
    (State.TEXT, ReasoningEnd): Step.SWITCH,
    (State.REFUSAL, ReasoningEnd): Step.SWITCH,
    (State.REASONING, ReasoningEnd): Step.CLOSE,
    (State.SUMMARY, ReasoningEnd): Step.CLOSE,
    (State.CALL, CallDelta): Step.APPEND,
    (State.CALL, CallEnd): Step.CLOSE,
    (State.NONE, CompactionStart): Step.OPEN,
    (State.COMPACTION, CompactionBeat): Step.APPEND,
    (State.COMPACTION, CompactionEnd): Step.CLOSE,
}


class IllegalDelta(RuntimeError):
    """A parser broke the grammar of deltas: a fault of ours, not the client's. The emitter is unchanged."""


class Emitter:
    """The event stream of one response.

    Call order: `start`, then `feed` any number of times, then exactly one of `complete`, `incomplete`, `fail`.
    `keepalive` may come between. After the end everything raises. `seal` makes the `encrypted_content` of a reasoning
    item, for requests that include it.
    """

    __slots__ = ("_ids", "_index", "_lane", "_open", "_phase", "_seal", "_sequence", "_state", "output", "response")

    def __init__(
        self, response: ResponseObject, ids: IdSource, stream_id: str | None, seal: Seal | None = None
    ) -> None:
        self.response = response
        self.output: list[Item] = []
        self._ids = ids
        self._index = 0
        self._seal = seal
        self._sequence = 0
        self._state = State.NONE
        self._open: OpenItem | None = None
        self._phase: Phase | None = None
        # Events of a named lane say so; events of the default lane carry no stream_id at all (protocol.md A.1).
        self._lane = "" if stream_id is None else f'"stream_id":{quote(stream_id)},'

    @property
    def ended(self) -> bool:
        """Whether the terminal event exists."""
        return self._state is State.ENDED

    def start(self) -> list[Event]:
        """`response.created` and `response.in_progress`."""
        body = self.response.render("in_progress")
        return [
            self._event("response.created", f'"response":{body}'),
            self._event("response.in_progress", f'"response":{body}'),
        ]

    def feed(self, deltas: Iterable[Delta | CompactionStep]) -> list[Event]:
        """The events that these deltas cause. Raises `IllegalDelta`, leaving later deltas unread."""
        events: list[Event] = []
        for delta in deltas:
            self._feed_one(delta, events)
        return events

    def keepalive(self) -> Event:
        """A sign of life in a silent turn; it consumes a sequence number (protocol.md 3.2). A compaction has an event
        of its own for that, which is in the published schema."""
        self._require_running()
        if self._state is State.COMPACTION:
            return self.feed((CompactionBeat(),))[0]
        return self._event("keepalive", "")

    def complete(self, usage: Usage, now: int) -> list[Event]:
        """Close what is open and end with `response.completed`."""
        return self._end("completed", usage=usage, completed_at=now)

    def incomplete(self, reason: str, usage: Usage) -> list[Event]:
        """Close what is open as incomplete and end with `response.incomplete`."""
        return self._end("incomplete", usage=usage, reason=reason)

    def fail(self, code: str, message: str, usage: Usage | None = None) -> list[Event]:
        """End with `response.failed`. What was open stays open: its text is not an answer (design decision 9)."""
        self._require_running()
        self._open, self._state = None, State.NONE
        return self._end("failed", usage=usage, error={"code": code, "message": message})

    def _feed_one(self, delta: Delta | CompactionStep, events: list[Event]) -> None:
        kind = type(delta)
        step = GRAMMAR.get((self._state, kind))
        if step is None:
            raise IllegalDelta(f"{kind.__name__} in state {self._state.name}")
        if type(delta) is MessageStart:
            self._close("completed", events)
            self._phase = delta.phase
            return
        if type(delta) is ReasoningEnd:
            self._end_thought(delta, step, events)
            return
        if step is Step.SWITCH or step is Step.CLOSE:
            if isinstance(self._open, OpenCompaction):
                self._open.content = delta.encrypted_content  # type: ignore[union-attr]
            self._close("completed", events)
        if step is Step.OPEN or step is Step.SWITCH:
            self._open_item(delta, events)
        if step is not Step.CLOSE and kind is not CallStart and kind is not CompactionStart:
            assert self._open is not None
            if type(delta) is TextDelta and delta.logprobs and isinstance(self._open, OpenText):
                name, fields = self._open.append_scored(delta)
            elif type(delta) is SummaryDelta and isinstance(self._open, OpenSummary):
                events.extend(self._event(*each) for each in self._open.turn_to(delta.part))
                name, fields = self._open.append(delta.text)
            else:
                name, fields = self._open.append(delta.text)  # type: ignore[union-attr]
            events.append(self._event(name, fields))

    def _end_thought(self, delta: ReasoningEnd, step: Step, events: list[Event]) -> None:
        if step is not Step.CLOSE:
            self._close("completed", events)
            self._open_item(delta, events)
        assert isinstance(self._open, OpenReasoning | OpenSummary)
        self._open.foreign = delta.foreign
        self._close("completed", events)

    def _open_item(self, delta: Delta | CompactionStep, events: list[Event]) -> None:
        index = self._index
        item: OpenItem
        if isinstance(delta, TextDelta):
            item = OpenText(self._ids.item("msg"), index, self._phase)
        elif isinstance(delta, RefusalDelta):
            item = OpenRefusal(self._ids.item("msg"), index)
        elif isinstance(delta, ReasoningDelta):
            item = OpenReasoning(self._ids.item("rs"), index, self._seal)
        elif isinstance(delta, SummaryDelta | ReasoningEnd):
            item = OpenSummary(self._ids.item("rs"), index, self._seal)
        elif isinstance(delta, CallStart):
            prefix = "fc" if delta.kind == "function" else "ctc"
            item = OpenCall(self._ids.item(prefix), index, self._ids.item("call"), delta)
        else:  # a compaction's start, which is no model's delta
            item = OpenCompaction(self._ids.item("cmp"), index)
        self._index += 1
        self._open, self._state = item, _OPENS[type(delta)]
        events.extend(self._event(name, fields) for name, fields in item.begin())

    def _close(self, status: str, events: list[Event]) -> None:
        if self._open is not None:
            item, parts = self._open.finish(status)
            events.extend(self._event(name, fields) for name, fields in parts)
            self.output.append(item)
            self._open, self._state, self._phase = None, State.NONE, None

    def _end(
        self,
        status: str,
        usage: Usage | None,
        completed_at: int | None = None,
        reason: str | None = None,
        error: dict[str, Any] | None = None,
    ) -> list[Event]:
        self._require_running()
        events: list[Event] = []
        if self._state is State.COMPACTION:
            if status == "completed":
                raise IllegalDelta("a compaction is open")
            self._open, self._state = None, State.NONE
        # A call without its CallEnd was cut off, whatever the terminal says.
        self._close("incomplete" if status == "incomplete" or self._state is State.CALL else "completed", events)
        body = self.response.render(
            status, output=self.output, usage=usage, completed_at=completed_at, reason=reason, error=error
        )
        events.append(self._event(f"response.{status}", f'"response":{body}'))
        self._state = State.ENDED
        return events

    def _require_running(self) -> None:
        if self._state is State.ENDED:
            raise IllegalDelta("the response has ended")

    def _event(self, name: str, fields: str) -> Event:
        sequence = self._sequence
        self._sequence = sequence + 1
        comma = "," if fields else ""
        return Event(name, f'{{"type":"{name}",{self._lane}"sequence_number":{sequence}{comma}{fields}}}')
