"""Any sequence of inputs against a small model of one socket, action by action, and the promises checked on their own.

The model keeps flat lists and knows neither lanes' states nor phases; it is meant to be read and believed.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway.protocol.actions import Action, Cancel, Close, Send, Start
from gateway.protocol.connection import Connection, ConnectionLimits
from gateway.protocol.lanes import LaneLimits

ACTIVE, NAMES, QUEUED, QUEUED_BYTES = 2, 3, 4, 500  # two queued turns of 200 and 300 bytes fit exactly
LIFE, GRACE, DRAIN_GRACE, IDLE = 100, 20, 10, 45
LIMITS = ConnectionLimits(
    lifetime_s=LIFE,
    grace_s=GRACE,
    drain_grace_s=DRAIN_GRACE,
    idle_timeout_s=IDLE,
    lanes=LaneLimits(ACTIVE, NAMES, QUEUED, QUEUED_BYTES),
)
LIMIT, FULL, STREAMS = "websocket_connection_limit_reached", "websocket_queue_full", "websocket_stream_limit_reached"
Short = tuple[Any, ...]


class Model:
    """One socket, written for the reader. Each method returns what must come out."""

    def __init__(self) -> None:
        self.running: list[str | None] = []
        self.queue: list[tuple[str | None, int, int]] = []  # (lane, turn, size), in order of arrival
        self.line: list[str | None] = []  # lanes with queued turns and none running, longest waiting first
        self.names: set[str | None] = set()
        self.closed = False
        self.end: tuple[int, list[Short]] | None = None  # no more creates; (deadline, last words)
        self.idle_since = 0

    def is_closed(self) -> bool:
        return self.closed

    def create(self, lane: str | None, turn: int, size: int) -> list[Short]:
        if self.end:
            return [("error", LIMIT, lane)]
        if lane is not None and lane not in self.names and len(self.names) == NAMES:
            return [("error", STREAMS, lane)]
        must_wait = lane in self.running or len(self.running) == ACTIVE
        held = sum(queued for _, _, queued in self.queue)
        if must_wait and (len(self.queue) == QUEUED or held + size > QUEUED_BYTES):
            return [("error", FULL, lane)]
        self.names |= {lane} - {None}
        self.queue.append((lane, turn, size))
        self.stand_in_line(lane)
        return self.start()

    def stand_in_line(self, lane: str | None) -> None:
        has_queued = any(queued[0] == lane for queued in self.queue)
        if has_queued and lane not in self.running and lane not in self.line:
            self.line.append(lane)

    def start(self) -> list[Short]:
        started: list[Short] = []
        while self.line and len(self.running) < ACTIVE:
            lane = self.line.pop(0)
            first = next(queued for queued in self.queue if queued[0] == lane)
            self.queue.remove(first)
            self.running.append(lane)
            started.append(("start", lane, first[1]))
        return started

    def refuse(self, lanes: list[str | None]) -> list[Short]:
        refused = [lane for name in lanes for lane, _, _ in self.queue if lane == name]
        self.queue = [queued for queued in self.queue if queued[0] not in lanes]
        self.line = [lane for lane in self.line if lane not in lanes]
        return [("error", LIMIT, lane) for lane in refused]

    def close(self, *last: Short) -> list[Short]:
        self.closed, self.queue, self.line = True, [], []
        return [*(("cancel", lane) for lane in self.running), *last]

    def finish(self) -> list[Short]:
        assert self.end
        refused = self.refuse([*self.line, *self.running])
        return self.close(*refused, *self.end[1])

    def stop_admitting(self, deadline: int, *last: Short) -> list[Short]:
        self.end = (deadline, list(last))
        return self.refuse(list(self.line)) if self.running else self.finish()

    def turn_ended(self, lane: str | None, now: int) -> list[Short]:
        self.running.remove(lane)
        if self.is_closed():
            return []
        self.stand_in_line(lane)
        self.idle_since = now
        out = self.due(now)
        if self.is_closed():
            return out
        if not self.end:
            return out + self.start()
        out += self.refuse(list(self.line))
        return out if self.running else out + self.finish()

    def due(self, now: int) -> list[Short]:
        if self.is_closed():
            return []
        out = []
        idle = not self.running and not self.queue
        if not self.end and idle and self.idle_since + IDLE <= now and self.idle_since + IDLE < LIFE:
            return self.close(("close", 1001))
        if not self.end and now >= LIFE:
            out = self.stop_admitting(LIFE + GRACE, ("error", LIMIT, None), ("close", 1000))
        if self.end and not self.is_closed() and now >= self.end[0]:
            out += self.finish()
        return out

    def drain(self, code: int, now: int) -> list[Short]:
        out = self.due(now)
        if self.is_closed():
            return out
        if not self.end:
            return out + self.stop_admitting(now + DRAIN_GRACE, ("close", code))
        self.end = (min(self.end[0], now + DRAIN_GRACE), self.end[1])
        return out

    def deadline(self) -> int | None:
        if self.is_closed():
            return None
        if self.end:
            return self.end[0]
        return LIFE if self.running or self.queue else min(LIFE, self.idle_since + IDLE)


def shorten(action: Action) -> Short:
    match action:
        case Start(lane, frame):
            return "start", lane, frame["n"]
        case Cancel(lane):
            return "cancel", lane
        case Close(code):
            return "close", code
        case Send(frame):
            if frame["type"] != "error":
                return "send", frame["type"]
            assert type(frame["status"]) is int
            return "error", frame["error"]["code"], frame.get("stream_id")


LANES = st.sampled_from([None, None, "a", "a", "b", "c", "d", "e"])


def create_text(turn: int, lane: str | None, size: int, fill: str) -> str:
    """A create of exactly that many bytes (an odd byte out is a blank at the end)."""
    frame = {"type": "response.create", "n": turn, "input": ""} | ({} if lane is None else {"stream_id": lane})
    room = size - len(json.dumps(frame))
    frame["input"] = fill * (room // len(fill.encode()))
    text = json.dumps(frame, ensure_ascii=False)
    return text + " " * (size - len(text.encode()))


class SocketMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.connection = Connection(LIMITS, 0.0)
        self.model = Model()
        self.now = 0
        self.turns = 0
        self.submitted: dict[int, str | None] = {}
        self.log: list[Short] = []
        self.over = False  # closed or lost
        self.passed: dict[str | None, Counter[str | None]] = {}  # waiting lane -> who started meanwhile

    def got(self, actions: list[Action], expected: list[Short]) -> None:
        short = [shorten(action) for action in actions]

        assert short == expected
        if self.over:
            assert short == []
        self.log += short
        for action in short:
            if action[0] == "start":
                self.passed.pop(action[1], None)
                for others in self.passed.values():
                    others[action[1]] += 1
        self.over |= any(action[0] == "close" for action in short)

    @rule(seconds=st.sampled_from([0, 1, 3, 9, 10, 11, 20, 44, 45, 60]))
    def time_passes(self, seconds: int) -> None:
        """Without a tick: the next input has to notice."""
        self.now += seconds

    @rule()
    def tick(self) -> None:
        self.got(self.connection.tick(self.now), self.model.due(self.now))

    @rule()
    def time_comes(self) -> None:
        """What the shell does: sleep until the deadline, then tick."""
        deadline = self.connection.next_deadline
        if deadline is not None:
            self.now = max(self.now, int(deadline))
            self.got(self.connection.tick(self.now), self.model.due(self.now))

    def receive(self, text: str | bytes, expected: list[Short]) -> None:
        self.got(self.connection.receive_text(text, self.now), expected)

    def noticed(self) -> list[Short]:
        """What the model lets out before it looks at a frame."""
        out = self.model.due(self.now)
        self.model.idle_since = self.now
        return out

    @rule(lane=LANES, size=st.sampled_from([100, 100, 200, 300, 501]), fill=st.sampled_from("eé"))
    def create(self, lane: str | None, size: int, fill: str) -> None:
        self.turns += 1
        text = create_text(self.turns, lane, size, fill)
        before = self.noticed()
        if self.model.closed:
            self.receive(text, before)
        else:
            self.submitted[self.turns] = lane
            self.receive(text, before + self.model.create(lane, self.turns, size))

    @rule(lanes=st.lists(LANES, min_size=2, max_size=8))
    def burst(self, lanes: list[str | None]) -> None:
        for lane in lanes:
            self.create(lane, 100, "e")

    @rule(
        case=st.sampled_from(
            [
                ('{"type":"response.create","stream_id":""}', [("error", "invalid_stream_id", None)]),
                ('{"type":"response.create","stream_id":null}', [("error", "invalid_stream_id", None)]),
                ('{"type":"nope","stream_id":"a"}', [("error", "unsupported_event", None)]),
                ('{"type":"response.cancel"}', [("error", "unsupported_event", None)]),
                ("[", [("error", "invalid_json", None)]),
                (b"\xff", [("error", "invalid_json", None)]),
                ('{"type":"response.processed"}', []),
                ('{"type":"response.steer"}', [("send", "response.steer.failed")]),
                ('{"type":"response.inject"}', [("send", "response.inject.failed")]),
                ('{"type":"response.interrupt"}', [("send", "response.interrupt.failed")]),
            ]
        )
    )
    def other_frame(self, case: tuple[str | bytes, list[Short]]) -> None:
        text, answer = case
        before = self.noticed()
        self.receive(text, before if self.model.closed else before + answer)

    @precondition(lambda self: self.model.running)
    @rule(data=st.data())
    def turn_ends(self, data: st.DataObject) -> None:
        lane = data.draw(st.sampled_from(self.model.running))
        self.got(self.connection.turn_ended(lane, self.now), self.model.turn_ended(lane, self.now))

    @precondition(lambda self: self.model.running)
    @rule(data=st.data(), late=st.sampled_from([0, 0, 1, 500]))
    def turn_ends_late(self, data: st.DataObject, late: int) -> None:
        """At the deadline or after it, and before the tick."""
        self.now = max(self.now, int(self.connection.next_deadline or 0)) + late
        self.turn_ends(data)

    @precondition(lambda self: self.turns > 6)
    @rule(code=st.sampled_from([1001, 1012]), again=st.sampled_from([None, 0, 5, 10]))
    def drain(self, code: int, again: int | None) -> None:
        self.got(self.connection.drain(code, "going away", self.now), self.model.drain(code, self.now))
        if again is not None:
            self.now += again
            self.drain(2013 - code, None)

    @precondition(lambda self: self.turns > 20)
    @rule(binary=st.booleans())
    def fault(self, binary: bool) -> None:
        actions = self.connection.receive_binary(self.now) if binary else self.connection.overflow(self.now)
        expected = self.model.due(self.now)
        if not self.model.closed:
            expected += self.model.close(("close", 1003 if binary else 1013))
        self.got(actions, expected)

    @precondition(lambda self: self.turns > 20)
    @rule()
    def lost(self) -> None:
        self.got(self.connection.lost(self.now), [] if self.model.closed else self.model.close())
        self.over = True

    @invariant()
    def the_same_as_the_model(self) -> None:
        assert list(self.connection.running) == self.model.running
        assert Counter(frame["n"] for frame in self.connection.queued_frames()) == Counter(
            turn for _, turn, _ in self.model.queue
        )
        assert self.connection.next_deadline == self.model.deadline()
        assert self.connection.settled == (self.model.closed and not self.model.running)

    @invariant()
    def bounds(self) -> None:
        frames = list(self.connection.queued_frames())

        assert len(self.connection.running) <= ACTIVE
        assert len(set(self.connection.running)) == len(self.connection.running)
        assert len(frames) <= QUEUED
        assert sum(len(json.dumps(frame, ensure_ascii=False).encode()) for frame in frames) <= QUEUED_BYTES
        assert len({action[1] for action in self.log if action[0] == "start"} - {None}) <= NAMES

    @invariant()
    def no_lane_is_starved(self) -> None:
        """A slot is never free while a turn waits for one, and nobody passes a waiting lane twice."""
        running = self.connection.running
        waiting = {frame.get("stream_id") for frame in self.connection.queued_frames()} - set(running)
        if waiting:
            assert len(running) == ACTIVE
        self.passed = {lane: self.passed.get(lane, Counter()) for lane in waiting}
        for others in self.passed.values():
            assert max(others.values(), default=0) <= 1

    @invariant()
    def each_lane_is_first_in_first_out(self) -> None:
        own: dict[str | None, list[int]] = {}
        for action in self.log:
            if action[0] == "start":
                own.setdefault(action[1], []).append(action[2])
        for lane, turns in own.items():
            assert all(earlier < later for earlier, later in pairwise(turns))
            assert all(self.submitted[turn] == lane for turn in turns)

    def teardown(self) -> None:
        """Whatever happened, the accounts can be settled."""
        self.got(self.connection.lost(self.now), [] if self.model.closed else self.model.close())
        self.over = True
        for lane in self.connection.running:
            self.got(self.connection.turn_ended(lane, self.now), self.model.turn_ended(lane, self.now))

        assert self.connection.settled
        assert list(self.connection.queued_frames()) == []
        assert [action[0] for action in self.log].count("close") <= 1
        kinds = [action[0] for action in self.log]
        if "close" in kinds:
            assert kinds.index("close") == len(kinds) - 1


SocketMachine.TestCase.settings = settings(max_examples=300, stateful_step_count=60, deadline=None)
TestSocketMachine = SocketMachine.TestCase
