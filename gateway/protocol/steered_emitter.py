"""An emitter whose response can be steered, interrupted, and talked about while it runs (protocol.md 3.2, 3.8)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import orjson

from gateway.protocol.deltas import Delta
from gateway.protocol.emitter import GRAMMAR, Emitter, Event, State, Step
from gateway.protocol.ids import IdSource
from gateway.protocol.items import CustomToolCall, FunctionCall, Item
from gateway.protocol.open_items import CompactionStep, Seal
from gateway.protocol.response import ResponseObject, Usage
from gateway.protocol.steer_table import Ending


def required_input(output: Iterable[Item]) -> tuple[dict[str, Any], ...]:
    """The stubs of the outputs that these items' calls wait for, as `response.steer.pending` lists them."""
    stubs: list[dict[str, Any]] = []
    for item in output:
        if isinstance(item, FunctionCall):
            stubs.append({"type": "function_call_output", "call_id": item.call_id, "name": item.name})
        elif isinstance(item, CustomToolCall):
            stubs.append({"type": "custom_tool_call_output", "call_id": item.call_id})
    return tuple(stubs)


def _has_call(output: Sequence[Item]) -> bool:
    return any(isinstance(item, FunctionCall | CustomToolCall) for item in output)


class SteeredEmitter(Emitter):
    """As `Emitter`. `ending` tells how the response ended, once its terminal event exists.

    A safe boundary is where no item is open, or the next delta opens another one, and no call of this response waits
    for its output: a response with a call goes on to its own end, since only the client can continue it.

    `answered` is how many items of a rollout's output precede what its client appended last: their calls wait no more.
    """

    __slots__ = ("_added", "answered", "ending")

    def __init__(
        self, response: ResponseObject, ids: IdSource, stream_id: str | None, seal: Seal | None = None
    ) -> None:
        super().__init__(response, ids, stream_id, seal)
        self.ending: Ending | None = None
        self._added: Event | None = None
        self.answered = 0

    @property
    def at_boundary(self) -> bool:
        """Whether the response may end as steered here and now."""
        return self._state is State.NONE and not _has_call(self.output)

    def control(self, kind: str, fields: Mapping[str, Any]) -> Event:
        """An event about the running response. It is numbered now, so it must go out before what `feed` makes next."""
        self._require_running()
        return self._event(kind, orjson.dumps(fields).decode()[1:-1])

    def feed_to_boundary(self, deltas: Iterable[Delta]) -> tuple[list[Event], bool]:
        """As `feed`, up to the next safe boundary: its events, and whether the boundary is reached. Deltas behind it
        are thrown away."""
        events: list[Event] = []
        for delta in deltas:
            opens = GRAMMAR.get((self._state, type(delta))) in {Step.OPEN, Step.SWITCH}
            if opens and not _has_call(self.output):
                self._close("completed", events)
                return events, True
            self._feed_one(delta, events)
        return events, False

    def withdraw(self) -> list[Event]:
        """Discard the open item, if there is one, and say so; what was streamed of it is no output."""
        if self._open is None or self._added is None:
            return []
        self._open, self._state = None, State.NONE
        added = orjson.loads(self._added.data)
        where = {
            "response_id": self.response.id,
            "item_id": added["item"]["id"],
            "output_index": added["output_index"],
        }
        return [self.control("response.output_item.interrupted", where)]

    def settle(self) -> list[Event]:
        """Close what is open, as at the end, while the response goes on: a rollout whose model has stopped."""
        events: list[Event] = []
        self._close("incomplete" if self._state is State.CALL else "completed", events)
        return events

    def complete(self, usage: Usage, now: int) -> list[Event]:
        events = super().complete(usage, now)
        self._ended("completed")
        return events

    def incomplete(self, reason: str, usage: Usage) -> list[Event]:
        events = super().incomplete(reason, usage)
        self._ended("incomplete", reason)
        return events

    def fail(self, code: str, message: str, usage: Usage | None = None) -> list[Event]:
        events = super().fail(code, message, usage)
        self._ended("failed")
        return events

    def _ended(self, status: str, reason: str | None = None) -> None:
        self.ending = Ending(status, reason, required_input(self.output[self.answered :]), self._sequence)

    def _open_item(self, delta: Delta | CompactionStep, events: list[Event]) -> None:
        first = len(events)
        super()._open_item(delta, events)
        self._added = events[first]
