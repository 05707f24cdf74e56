"""One socket's life, scenario by scenario: lanes, errors, controls, the age limit, draining, and each way to end.

Assertions L1-L8, E1, E2, E4-E7, E9 of protocol.md section 10, as far as this machine decides them; each prefix of some
scripted sessions with each way to end, checked against the same five rules.
"""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from gateway.protocol.actions import Action, Cancel, Close, Send, Start
from gateway.protocol.connection import MOVES, Connection, ConnectionLimits, Phase, Step
from gateway.protocol.errors import ApiError
from gateway.protocol.lanes import LaneError, LaneLimits

LIMIT = "websocket_connection_limit_reached"
LIMITS = ConnectionLimits(lifetime_s=60.0, grace_s=10.0, drain_grace_s=5.0)
AGE_CLOSE = Close(1000, "connection age limit reached")
ABSENT = object()


class Socket:
    """A connection with a clock that the test moves. Actions come back short:
    ("start", lane, n), ("error", code, lane), ("send", type), ("cancel", lane), ("close", code)."""

    def __init__(self, limits: ConnectionLimits = LIMITS, **options: Any) -> None:
        self.now = 1000.0
        self.connection = Connection(limits, self.now, **options)
        self.frames: list[dict[str, Any]] = []  # what the client got
        self.log: list[tuple[Any, ...]] = []

    def at(self, seconds: float) -> Socket:
        self.now = 1000.0 + seconds
        return self

    def due(self) -> float | None:
        return self.connection.next_deadline

    def create(self, lane: object = ABSENT, n: int = 0, **more: Any) -> list[tuple[Any, ...]]:
        named = {} if lane is ABSENT else {"stream_id": lane}
        return self.text(json.dumps({"type": "response.create", "model": "m", "n": n, **named, **more}))

    def text(self, text: str | bytes) -> list[tuple[Any, ...]]:
        return self.seen(self.connection.receive_text(text, self.now))

    def event(self, **frame: Any) -> list[tuple[Any, ...]]:
        return self.text(json.dumps(frame))

    def ended(self, lane: str | None = None) -> list[tuple[Any, ...]]:
        return self.seen(self.connection.turn_ended(lane, self.now))

    def tick(self) -> list[tuple[Any, ...]]:
        return self.seen(self.connection.tick(self.now))

    def binary(self) -> list[tuple[Any, ...]]:
        return self.seen(self.connection.receive_binary(self.now))

    def overflow(self) -> list[tuple[Any, ...]]:
        return self.seen(self.connection.overflow(self.now))

    def lost(self) -> list[tuple[Any, ...]]:
        return self.seen(self.connection.lost(self.now))

    def drain(self, code: int = 1012) -> list[tuple[Any, ...]]:
        return self.seen(self.connection.drain(code, "draining", self.now))

    def seen(self, actions: list[Action]) -> list[tuple[Any, ...]]:
        short = [self.shorten(action) for action in actions]
        self.log += short
        return short

    def shorten(self, action: Action) -> tuple[Any, ...]:
        match action:
            case Start(lane, frame):
                return "start", lane, frame["n"]
            case Cancel(lane):
                return "cancel", lane
            case Close(code):
                return "close", code
            case Send(frame):
                self.frames.append(frame)
                if frame["type"] == "error":
                    return "error", frame["error"]["code"], frame.get("stream_id")
                return "send", frame["type"]


def check_error_frame(frame: dict[str, Any]) -> None:
    """E7."""
    assert type(frame["status"]) is int
    assert isinstance(frame["error"], dict)
    assert all(isinstance(frame["error"][key], str) and frame["error"][key] for key in ("type", "code", "message"))
    assert "param" in frame["error"]
    assert "sequence_number" not in frame
    assert frame.get("stream_id", "absent")


# --- the phases -------------------------------------------------------------------------------------------------------


def test_the_phases_move_forward_only() -> None:
    legal = {pair: MOVES[pair] for pair in product(Phase, Step) if pair in MOVES}

    assert legal == {
        (Phase.OPEN, Step.END): Phase.ENDING,
        (Phase.OPEN, Step.CLOSE): Phase.CLOSED,
        (Phase.ENDING, Step.CLOSE): Phase.CLOSED,
    }


def in_phase(phase: Phase) -> Socket:
    """A socket in that phase with one turn running and one queued behind it, where the phase allows."""
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_active=2)))
    socket.create("a", 1)
    socket.create("a", 2)
    if phase is Phase.ENDING:
        socket.at(60).tick()
    if phase is Phase.CLOSED:
        socket.lost()

    assert socket.connection.phase is phase
    return socket


INPUTS: dict[str, Any] = {
    "create": lambda socket: socket.create("b", 3),
    "create on the busy lane": lambda socket: socket.create("a", 3),
    "bad json": lambda socket: socket.text("{"),
    "unknown": lambda socket: socket.event(type="x"),
    "processed": lambda socket: socket.event(type="response.processed"),
    "interrupt": lambda socket: socket.event(type="response.interrupt"),
    "ended": lambda socket: socket.ended("a"),
    "early": lambda socket: socket.tick(),
    "age": lambda socket: socket.at(60).tick(),
    "grace": lambda socket: socket.at(70).tick(),
    "drain": lambda socket: socket.drain(),
    "binary": lambda socket: socket.binary(),
    "overflow": lambda socket: socket.overflow(),
    "lost": lambda socket: socket.lost(),
}
REFUSED_A = ("error", LIMIT, "a")
FINAL = [("error", LIMIT, None), ("close", 1000)]
GRACE_OVER = [("cancel", "a"), REFUSED_A, *FINAL]
OUTCOMES: dict[tuple[str, Phase], tuple[list[tuple[Any, ...]], Phase]] = {
    ("create", Phase.OPEN): ([("start", "b", 3)], Phase.OPEN),
    ("create", Phase.ENDING): ([("error", LIMIT, "b")], Phase.ENDING),
    ("create on the busy lane", Phase.OPEN): ([], Phase.OPEN),
    ("create on the busy lane", Phase.ENDING): ([REFUSED_A], Phase.ENDING),
    ("bad json", Phase.OPEN): ([("error", "invalid_json", None)], Phase.OPEN),
    ("bad json", Phase.ENDING): ([("error", "invalid_json", None)], Phase.ENDING),
    ("unknown", Phase.OPEN): ([("error", "unsupported_event", None)], Phase.OPEN),
    ("unknown", Phase.ENDING): ([("error", "unsupported_event", None)], Phase.ENDING),
    ("processed", Phase.OPEN): ([], Phase.OPEN),
    ("processed", Phase.ENDING): ([], Phase.ENDING),
    ("interrupt", Phase.OPEN): ([("send", "response.interrupt.failed")], Phase.OPEN),
    ("interrupt", Phase.ENDING): ([("send", "response.interrupt.failed")], Phase.ENDING),
    ("ended", Phase.OPEN): ([("start", "a", 2)], Phase.OPEN),
    ("ended", Phase.ENDING): ([REFUSED_A, *FINAL], Phase.CLOSED),
    ("early", Phase.OPEN): ([], Phase.OPEN),
    ("early", Phase.ENDING): ([], Phase.ENDING),
    ("age", Phase.OPEN): ([], Phase.ENDING),
    ("age", Phase.ENDING): ([], Phase.ENDING),
    ("grace", Phase.OPEN): (GRACE_OVER, Phase.CLOSED),
    ("grace", Phase.ENDING): (GRACE_OVER, Phase.CLOSED),
    ("drain", Phase.OPEN): ([], Phase.ENDING),
    ("drain", Phase.ENDING): ([], Phase.ENDING),
    ("binary", Phase.OPEN): ([("cancel", "a"), ("close", 1003)], Phase.CLOSED),
    ("binary", Phase.ENDING): ([("cancel", "a"), ("close", 1003)], Phase.CLOSED),
    ("overflow", Phase.OPEN): ([("cancel", "a"), ("close", 1013)], Phase.CLOSED),
    ("overflow", Phase.ENDING): ([("cancel", "a"), ("close", 1013)], Phase.CLOSED),
    ("lost", Phase.OPEN): ([("cancel", "a")], Phase.CLOSED),
    ("lost", Phase.ENDING): ([("cancel", "a")], Phase.CLOSED),
}
OUTCOMES |= {(name, Phase.CLOSED): ([], Phase.CLOSED) for name in INPUTS}


def test_the_outcomes_cover_every_input_in_every_phase() -> None:
    assert set(OUTCOMES) == set(product(INPUTS, Phase))


@pytest.mark.parametrize(("name", "phase"), OUTCOMES, ids=str)
def test_every_input_in_every_phase(name: str, phase: Phase) -> None:
    socket = in_phase(phase)
    actions, after = OUTCOMES[name, phase]

    assert INPUTS[name](socket) == actions
    assert socket.connection.phase is after
    for frame in socket.frames:
        if frame["type"] == "error":
            check_error_frame(frame)


@pytest.mark.parametrize("phase", Phase)
def test_an_end_without_a_turn_raises_and_changes_nothing(phase: Phase) -> None:
    socket = in_phase(phase)
    before = (socket.connection.phase, socket.connection.running, socket.connection.next_deadline)
    for lane in (None, "never used"):
        with pytest.raises(LaneError):
            socket.ended(lane)

        assert (socket.connection.phase, socket.connection.running, socket.connection.next_deadline) == before


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_l1_lanes_run_side_by_side_and_l2_a_lane_is_first_in_first_out() -> None:
    socket = Socket()

    assert socket.create(n=1) == [("start", None, 1)]
    assert socket.create("a", 2) == [("start", "a", 2)]
    assert socket.create("a", 3) == []
    assert socket.create(n=4) == []
    assert socket.create("a", 5) == []
    assert socket.ended("a") == [("start", "a", 3)]
    assert socket.ended("a") == [("start", "a", 5)]
    assert socket.ended() == [("start", None, 4)]


def test_the_start_holds_the_frame_as_it_came() -> None:
    frame = {"type": "response.create", "stream_id": "a", "input": [], "unknown": {"x": [1]}}
    connection = Connection(LIMITS, 0.0)

    assert connection.receive_text(json.dumps(frame), 1.0) == [Start("a", frame)]


@pytest.mark.parametrize("kind", [str, bytes])
def test_text_may_come_as_bytes(kind: type) -> None:
    text = json.dumps({"type": "response.create", "n": 1, "input": "ünï\U0001f600"}, ensure_ascii=False)

    assert Socket().text(text if kind is str else text.encode()) == [("start", None, 1)]


def test_l5_the_17th_active_turn_waits_until_a_slot_is_free() -> None:
    socket = Socket()
    for n, lane in enumerate([None, *(f"l{n}" for n in range(15))]):
        socket.create(ABSENT if lane is None else lane, n)

    assert len(socket.log) == 16
    assert socket.create("l15", 16) == []
    assert socket.create("l16", 17) == []
    assert socket.ended("l3") == [("start", "l15", 16)]
    assert socket.ended() == [("start", "l16", 17)]


def test_l6_the_33rd_name_is_refused_and_the_32_old_ones_still_work() -> None:
    socket = Socket()
    for n in range(32):
        assert socket.create(f"l{n}", n) == [("start", f"l{n}", n)]
        socket.ended(f"l{n}")

    assert socket.create("l32") == [("error", "websocket_stream_limit_reached", "l32")]
    assert socket.frames[-1]["error"]["param"] == "stream_id"
    check_error_frame(socket.frames[-1])
    for n in range(32):
        assert socket.create(f"l{n}", n) == [("start", f"l{n}", n)]
        socket.ended(f"l{n}")
    assert socket.create(n=99) == [("start", None, 99)]


@pytest.mark.parametrize("value", ["", "x" * 257, "a b", "a/b", "é", 7, None, True, ["a"], {}], ids=repr)
def test_l7_a_bad_id_is_refused_without_an_echo(value: object) -> None:
    socket = Socket()

    assert socket.create(value) == [("error", "invalid_stream_id", None)]
    assert socket.frames[-1]["error"]["param"] == "stream_id"
    check_error_frame(socket.frames[-1])
    assert socket.create("ok", 1) == [("start", "ok", 1)]


def test_l8_an_error_on_one_lane_does_not_disturb_another() -> None:
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_names=1, max_queued=1)))
    socket.create("a", 1)
    socket.create("a", 2)

    assert socket.create("a", 3) == [("error", "websocket_queue_full", "a")]
    assert socket.create("b") == [("error", "websocket_stream_limit_reached", "b")]
    assert socket.ended("a") == [("start", "a", 2)]
    assert socket.create("a", 4) == []
    assert socket.ended("a") == [("start", "a", 4)]


def test_a_full_queue_says_when_to_retry() -> None:
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_queued=0)))
    socket.create()

    assert socket.create() == [("error", "websocket_queue_full", None)]
    assert socket.frames[-1]["status"] == 429
    assert socket.frames[-1]["headers"] == socket.frames[-1]["error"]["headers"] == {"retry-after": "1"}
    check_error_frame(socket.frames[-1])


def test_a_burst_of_1000_creates_and_100_names_stays_bounded() -> None:
    socket = Socket()
    burst = [action for n in range(1000) for action in socket.create(n=n)]

    assert burst == [("start", None, 0), *[("error", "websocket_queue_full", None)] * 935]
    assert [frame["n"] for frame in socket.connection.queued_frames()] == list(range(1, 65))
    names = [action[:2] for n in range(100) for action in socket.create(f"l{n}")]
    assert names == [
        *(("start", f"l{n}") for n in range(15)),
        *[("error", "websocket_queue_full")] * 85,
    ]


@pytest.mark.parametrize(("text", "size"), [("é" * 10, 20), ("e" * 10, 10)])
def test_the_queue_counts_bytes_on_the_wire(text: str, size: int) -> None:
    frame = json.dumps({"type": "response.create", "n": 1, "input": text}, ensure_ascii=False)
    bare = len(json.dumps({"type": "response.create", "n": 1, "input": ""}))
    for room, expected in ((bare + size, []), (bare + size - 1, [("error", "websocket_queue_full", None)])):
        socket = Socket(replace(LIMITS, lanes=LaneLimits(max_queued_bytes=room)))
        socket.create()

        assert socket.text(frame) == expected


def test_one_active_turn_is_enough_for_the_strict_reading() -> None:
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_active=1)))
    socket.create(n=1)
    for n, lane in enumerate(["a", "b", "a"]):
        socket.create(lane, n + 2)

    assert socket.ended() == [("start", "a", 2)]
    assert socket.ended("a") == [("start", "b", 3)]
    assert socket.ended("b") == [("start", "a", 4)]


# --- frames that start nothing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '"response.create"', "1", b"\xff", "{} {}", "data: {}"], ids=repr
)
def test_e5_malformed_json_is_answered_and_the_socket_stays_open(text: str | bytes) -> None:
    socket = Socket()

    assert socket.text(text) == [("error", "invalid_json", None)]
    assert socket.frames[-1]["status"] == 400
    check_error_frame(socket.frames[-1])
    assert socket.create(n=1) == [("start", None, 1)]


UNKNOWN: list[object] = [
    "response.append",
    "response.cancel",
    "session.update",
    "RESPONSE.CREATE",
    "",
    None,
    1,
    [],
    {"a": 1},
]


@pytest.mark.parametrize("kind", UNKNOWN, ids=repr)
def test_e6_an_unknown_type_is_answered_and_the_socket_stays_open(kind: object) -> None:
    socket = Socket()

    assert socket.event(type=kind, stream_id="a") == [("error", "unsupported_event", None)]
    error = socket.frames[-1]["error"]
    assert error["param"] == "type"
    assert ("needs a type" in error["message"]) == (not isinstance(kind, str))
    assert socket.frames[-1]["status"] == 400
    check_error_frame(socket.frames[-1])
    assert socket.create(n=1) == [("start", None, 1)]


def test_e6_a_missing_type_is_answered_and_a_long_one_is_not_repeated() -> None:
    socket = Socket()

    assert socket.event(stream_id="a") == [("error", "unsupported_event", None)]
    assert socket.event(type="secret " * 1000) == [("error", "unsupported_event", None)]
    assert "secret" not in json.dumps(socket.frames)


def test_e6_processed_is_silent() -> None:
    socket = Socket()

    assert socket.event(type="response.processed", response_id="resp_1") == []


@pytest.mark.parametrize(
    "given", ["stop", [{"type": "message", "role": "user", "content": "stop"}]], ids=["text", "items"]
)
def test_e6_steer_of_an_unknown_response_fails_with_its_own_type_and_gives_the_input_back(given: object) -> None:
    socket = Socket()
    socket.create("a")

    socket.event(type="response.steer", previous_response_id="resp_1", input=given)
    message = socket.frames[-1]["error"].pop("message")
    assert message
    assert socket.frames == [
        {
            "type": "response.steer.failed",
            "sequence_number": 0,
            "error": {"type": "invalid_request_error", "code": "response_not_found"},
            "steer": {"previous_response_id": "resp_1", "input": given},
        }
    ]


def test_e6_inject_fails_with_its_own_type_and_gives_the_input_back() -> None:
    socket = Socket()
    items = [{"type": "function_call_output", "call_id": "c", "output": "x"}]

    socket.event(type="response.inject", response_id="resp_1", input=items)
    assert socket.frames[-1]["error"].pop("message")
    assert socket.frames == [
        {
            "type": "response.inject.failed",
            "sequence_number": 0,
            "response_id": "resp_1",
            "error": {"code": "response_not_found"},
            "input": items,
        }
    ]


def test_e6_interrupt_of_an_unknown_response_fails_at_once_and_the_turn_goes_on() -> None:
    socket = Socket()
    socket.create()
    socket.create()

    socket.event(type="response.interrupt", response_id="resp_1", mode="discard_partial_items")
    assert socket.frames[-1]["error"].pop("message")
    assert socket.frames == [
        {
            "type": "response.interrupt.failed",
            "response_id": "resp_1",
            "error": {"code": "response_not_found"},
        }
    ]
    assert socket.connection.running == (None,)


@pytest.mark.parametrize("kind", ["response.steer", "response.inject", "response.interrupt"])
@pytest.mark.parametrize("value", [None, 1, {"a": 1}, True], ids=repr)
def test_a_malformed_control_still_gets_a_well_formed_failure(kind: str, value: object) -> None:
    for fields in ({}, {"previous_response_id": value, "response_id": value, "input": value}):
        socket = Socket()

        assert socket.event(type=kind, **fields) == [("send", f"{kind}.failed")]
        frame = socket.frames[-1]
        subject = frame["steer"] if kind == "response.steer" else frame
        assert subject["previous_response_id" if kind == "response.steer" else "response_id"] == ""
        assert subject.get("input", []) == []


# --- the age limit ----------------------------------------------------------------------------------------------------


def test_e1_an_idle_socket_gets_the_error_then_the_close() -> None:
    socket = Socket()

    assert socket.due() == 1060.0
    assert socket.at(59.999).tick() == []
    assert socket.at(60).tick() == FINAL
    assert socket.frames[-1]["status"] == 400
    assert socket.frames[-1]["error"]["message"].startswith("Responses websocket connection limit reached (1 minutes)")
    check_error_frame(socket.frames[-1])
    assert socket.due() is None
    assert socket.connection.settled


def test_e2_a_running_turn_finishes_in_the_grace() -> None:
    socket = Socket()
    socket.at(58).create(n=1)

    assert socket.at(60).tick() == []
    assert socket.connection.next_deadline == 1070.0
    assert socket.at(62).create("late") == [("error", LIMIT, "late")]
    assert socket.create() == [("error", LIMIT, None)]
    assert socket.create("") == [("error", "invalid_stream_id", None)]
    assert socket.at(65).ended() == FINAL
    assert socket.connection.settled


def test_the_socket_closes_when_the_last_of_its_turns_has_ended() -> None:
    socket = Socket()
    for lane in ("a", "b"):
        socket.create(lane)
    socket.at(60).tick()

    assert socket.at(61).ended("b") == []
    assert socket.at(62).create("b") == [("error", LIMIT, "b")]
    assert socket.at(63).ended("a") == FINAL


def test_when_the_grace_is_over_the_turns_are_stopped_before_the_error_and_the_close() -> None:
    socket = Socket()
    for lane in ("a", "b"):
        socket.create(lane)
    socket.at(60).tick()

    assert socket.at(69.9).tick() == []
    assert socket.at(70).tick() == [("cancel", "a"), ("cancel", "b"), *FINAL]
    assert not socket.connection.settled
    assert socket.connection.running == ("a", "b")
    assert socket.at(71).ended("b") == []
    assert socket.ended("a") == []
    assert socket.connection.settled


def test_queued_turns_are_refused_at_the_limit_but_not_while_their_lane_runs() -> None:
    """An error frame on the lane of a running turn would end that turn for clients that read the lane in order."""
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_active=2)))
    for lane in ("a", "a", "a", "b", "c", "c"):
        socket.create(lane)

    assert socket.at(60).tick() == [("error", LIMIT, "c")] * 2
    assert socket.at(61).ended("a") == [REFUSED_A] * 2
    assert socket.at(62).ended("b") == FINAL


def test_a_lane_keeps_its_refusals_when_the_grace_is_over() -> None:
    socket = Socket()
    for lane in ("a", "a", "b"):
        socket.create(lane)
    socket.at(60).tick()

    assert socket.at(70).tick() == [("cancel", "a"), ("cancel", "b"), REFUSED_A, *FINAL]


def test_the_limit_does_not_wait_for_the_tick() -> None:
    socket = Socket()
    socket.at(58).create(n=1)

    assert socket.at(60).create("b") == [("error", LIMIT, "b")]
    idle = Socket()
    assert idle.at(61).create("b") == FINAL
    late = Socket()
    late.create()
    assert late.at(70).create("b") == [("cancel", None), *FINAL]


def test_a_turn_that_ends_at_the_last_moment_is_not_cancelled() -> None:
    for late in (60, 70, 700):
        socket = Socket()
        socket.create()

        assert socket.at(late).ended() == FINAL


def test_a_turn_that_ends_at_the_limit_starts_no_other() -> None:
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_active=1)))
    for lane in ("a", "a", "b"):
        socket.create(lane)

    assert socket.at(60).ended("a") == [("error", LIMIT, "b"), REFUSED_A, *FINAL]


@pytest.mark.parametrize(("jitter", "due"), [(-20.0, 1040.0), (15.0, 1075.0)])
def test_jitter_moves_the_limit(jitter: float, due: float) -> None:
    assert Socket(jitter_s=jitter).connection.next_deadline == due


@pytest.mark.parametrize("jitter", [-60.0, -61.0, float("inf"), float("nan")])
def test_jitter_must_leave_a_lifetime(jitter: float) -> None:
    with pytest.raises(ValueError, match="jitter"):
        Socket(jitter_s=jitter)


def test_without_a_grace_running_turns_stop_at_the_limit() -> None:
    socket = Socket(replace(LIMITS, grace_s=0.0))
    socket.create()

    assert socket.at(60).tick() == [("cancel", None), *FINAL]


# --- draining and shutdown --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [1001, 1012])
def test_e4_an_idle_socket_closes_at_once_without_a_word(code: int) -> None:
    socket = Socket()

    assert socket.drain(code) == [("close", code)]
    assert socket.connection.settled


def test_a_busy_socket_finishes_what_runs_and_refuses_the_rest() -> None:
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_active=2)))
    for lane in ("a", "a", "b", "c"):
        socket.create(lane)

    assert socket.at(10).drain() == [("error", LIMIT, "c")]
    assert socket.connection.next_deadline == 1015.0
    assert socket.at(11).create("d") == [("error", LIMIT, "d")]
    assert socket.ended("a") == [REFUSED_A]
    assert socket.ended("b") == [("close", 1012)]


def test_turns_that_outlast_the_drain_are_stopped() -> None:
    socket = Socket()
    socket.create("a")
    socket.create("a")
    socket.at(10).drain(1001)

    assert socket.at(15).tick() == [("cancel", "a"), REFUSED_A, ("close", 1001)]
    assert socket.ended("a") == []
    assert socket.connection.settled


def test_without_a_drain_grace_running_turns_stop_at_once() -> None:
    socket = Socket(replace(LIMITS, drain_grace_s=0.0))
    socket.create()

    assert socket.drain() == [("cancel", None), ("close", 1012)]


def test_a_drain_after_the_limit_only_brings_the_end_nearer() -> None:
    socket = Socket()
    socket.create()
    socket.at(60).tick()

    assert socket.at(61).drain() == []
    assert socket.connection.next_deadline == 1066.0
    assert socket.at(66).tick() == [("cancel", None), *FINAL]
    other = Socket()
    other.create()
    other.at(68).drain()
    assert other.connection.next_deadline == 1070.0


def test_the_first_drain_decides_the_code_and_no_drain_lengthens_another() -> None:
    socket = Socket()
    socket.create()
    socket.at(1).drain(1012)

    assert socket.at(3).drain(1001) == []
    assert socket.connection.next_deadline == 1006.0
    assert socket.ended() == [("close", 1012)]


def test_a_drain_that_comes_with_the_limit_does_not_close_twice() -> None:
    assert Socket().at(60).drain() == FINAL


def test_a_bad_drain_code_or_reason_changes_nothing() -> None:
    socket = Socket()
    for code, reason in ((1005, "x"), (1006, "x"), (1015, "x"), (999, "x"), (5000, "x"), (1012, "é" * 62)):
        with pytest.raises(ValueError, match="close"):
            socket.connection.drain(code, reason, socket.now)

        assert socket.connection.phase is Phase.OPEN


# --- other ends -------------------------------------------------------------------------------------------------------


def test_h10_a_binary_frame_closes_with_1003_and_stops_all_turns() -> None:
    socket = Socket()
    for lane in ("a", "b", "a"):
        socket.create(lane)

    assert socket.binary() == [("cancel", "a"), ("cancel", "b"), ("close", 1003)]
    assert list(socket.connection.queued_frames()) == []


def test_a_slow_reader_is_closed_with_1013() -> None:
    socket = Socket()
    socket.create("a")

    assert socket.overflow() == [("cancel", "a"), ("close", 1013)]
    assert Socket().overflow() == [("close", 1013)]


def test_e3_a_lost_client_cancels_every_running_turn_and_the_queue_is_gone() -> None:
    socket = Socket(replace(LIMITS, lanes=LaneLimits(max_active=2)))
    for lane in ("a", "b", "a", "c"):
        socket.create(lane)

    assert socket.lost() == [("cancel", "a"), ("cancel", "b")]
    assert list(socket.connection.queued_frames()) == []
    assert socket.ended("b") == []
    assert socket.ended("a") == []
    assert socket.connection.settled
    assert socket.connection.next_deadline is None


def test_a_lost_client_gets_nothing_even_when_something_was_due() -> None:
    socket = Socket()
    socket.create("a")

    assert socket.at(3600).lost() == [("cancel", "a")]
    assert Socket().at(3600).lost() == []


def test_a_fault_at_the_limit_closes_once() -> None:
    assert Socket().at(60).binary() == FINAL
    assert Socket().at(60).overflow() == FINAL


# --- idleness ---------------------------------------------------------------------------------------------------------


def test_e9_nothing_is_sent_on_an_idle_socket_until_its_limit() -> None:
    socket = Socket()
    socket.create()
    socket.at(1).ended()
    for second in range(1, 60):
        assert socket.at(second).tick() == []
    assert socket.at(60).tick() == FINAL


def test_there_is_no_idle_timeout_by_default() -> None:
    assert ConnectionLimits().idle_timeout_s is None
    assert Connection(ConnectionLimits(), 0.0).next_deadline == 3600.0


def test_an_idle_timeout_closes_without_a_word() -> None:
    socket = Socket(replace(LIMITS, idle_timeout_s=20.0))

    assert socket.connection.next_deadline == 1020.0
    socket.at(10).create()
    assert socket.connection.next_deadline == 1060.0
    assert socket.at(30).tick() == []
    socket.at(35).ended()
    assert socket.connection.next_deadline == 1055.0
    socket.at(36).event(type="response.processed")
    assert socket.connection.next_deadline == 1056.0
    assert socket.at(56).tick() == [("close", 1001)]
    assert socket.frames == []


def test_the_age_limit_goes_before_an_idle_timeout_that_is_due_with_it() -> None:
    assert Socket(replace(LIMITS, idle_timeout_s=60.0)).at(60).tick() == FINAL


# --- values -----------------------------------------------------------------------------------------------------------


WRONG = [
    {"lifetime_s": 0.0},
    {"lifetime_s": float("inf")},
    {"lifetime_s": float("nan")},
    {"grace_s": -1.0},
    {"drain_grace_s": float("inf")},
    {"idle_timeout_s": 0.0},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_limits_check_themselves(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        replace(ConnectionLimits(), **wrong)


def test_the_decoder_can_be_replaced() -> None:
    def decode(text: str | bytes) -> dict[str, Any]:
        if text == "bad":
            raise ApiError("invalid_json", "no")
        return {"type": "response.create", "n": 7}

    socket = Socket(decode=decode)

    assert socket.text("bad") == [("error", "invalid_json", None)]
    assert socket.text("good") == [("start", None, 7)]


# --- each prefix, each end --------------------------------------------------------------------------------------------

# Steps: (second, what, *arguments). Turn numbers are given by the runner.
SESSIONS: dict[str, list[tuple[Any, ...]]] = {
    "agent loop": [
        *((n, what) for n in range(1, 12, 2) for what in ("create", "ended")),
        (12, "event", "response.processed"),
        (13, "create"),
        (58, "ended"),
    ],
    "lanes": [
        (1, "create", "a"),
        (1, "create", "b"),
        (1, "create", "c"),
        (2, "create", "a"),
        (2, "create"),
        (3, "text", "{"),
        (4, "ended", "a"),
        (5, "create", "b"),
        (6, "ended", "c"),
        (7, "event", "response.interrupt"),
        (8, "ended"),
        (9, "create", "d"),
        (10, "ended", "a"),
        (11, "ended", "b"),
    ],
    "the limit comes while lanes are busy": [
        (50, "create", "a"),
        (51, "create", "a"),
        (52, "create", "b"),
        (53, "create", "c"),
        (60, "tick"),
        (61, "create", "c"),
        (62, "ended", "a"),
        (63, "create", "a"),
        (64, "event", "response.steer"),
        (65, "ended", "b"),
    ],
    "more than fits": [
        *((1, "create", name) for name in "aaaaabbbcd"),
        *((n, "ended", name) for n, name in enumerate("abab", 2)),
        *((9, "create", name) for name in "efgh"),
    ],
    "a drain, then the limit": [
        (57, "create", "a"),
        (57, "create", "a"),
        (58, "drain"),
        (60, "tick"),
        (62, "ended", "a"),
    ],
}
ENDS = {
    "lost": [(70, "lost")],
    "binary": [(0, "binary")],
    "slow": [(0, "overflow")],
    "drain": [(0, "drain"), (90, "tick")],
    "age": [(60, "tick"), (70, "tick")],
    "drain cut by loss": [(0, "drain"), (1, "lost")],
}
SMALL = replace(LIMITS, lanes=LaneLimits(max_active=2, max_names=4, max_queued=3))


REFUSALS = {LIMIT, "websocket_queue_full", "websocket_stream_limit_reached"}


class Scripted:
    """Runs steps and keeps count of what the rules speak of."""

    def __init__(self) -> None:
        self.socket = Socket(SMALL)
        self.creates = 0
        self.dropped = 0
        self.after_the_end: list[tuple[Any, ...]] = []

    def step(self, second: float, what: str, *arguments: Any) -> None:
        socket = self.socket.at(max(second, self.socket.now - 1000.0))
        connection = socket.connection
        was_closed = connection.phase is Phase.CLOSED
        if what == "ended" and (arguments[0] if arguments else None) not in connection.running:
            return  # a cut script: that turn never started
        if what in {"binary", "overflow", "lost"}:
            self.dropped += len(list(connection.queued_frames()))
        if what == "create":
            self.creates += not was_closed
            actions = socket.create(arguments[0] if arguments else ABSENT, self.creates)
        elif what == "event":
            actions = socket.event(type=arguments[0])
        else:
            actions = getattr(socket, what)(*arguments)
        if was_closed:
            self.after_the_end += actions

    def check(self) -> None:
        connection, log = self.socket.connection, self.socket.log
        started = [action[1:] for action in log if action[0] == "start"]
        closes = [n for n, action in enumerate(log) if action[0] == "close"]
        final_words = log.count(("close", 1000))
        refused = sum(action[0] == "error" and action[1] in REFUSALS for action in log) - final_words

        # one ending for each create
        assert len(started) + refused + self.dropped == self.creates
        for name in {lane for lane, _ in started}:
            own = [n for lane, n in started if lane == name]
            assert own == sorted(set(own))
        # closed with a named code or lost, and quiet since
        assert connection.phase is Phase.CLOSED
        assert self.after_the_end == []
        assert closes in ([], [len(log) - 1])
        # what still runs was stopped, once
        assert [action[1] for action in log if action[0] == "cancel"] == list(connection.running)
        # nothing leaked
        for lane in connection.running:
            assert self.socket.ended(lane) == []
        assert connection.settled
        assert list(connection.queued_frames()) == []
        # grammar
        for frame in self.socket.frames:
            if frame["type"] == "error":
                check_error_frame(frame)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("name", SESSIONS)
def test_each_prefix_with_each_end(name: str, end: str) -> None:
    script = SESSIONS[name]
    for length in range(len(script) + 1):
        run = Scripted()
        for step in [*script[:length], *ENDS[end]]:
            run.step(*step)
        run.check()


@pytest.mark.parametrize(
    ("message", "closes"), [("x" * 100, False), ("x" * 101, True), ("é" * 50, False), ("é" * 51, True)]
)
def test_a_message_over_the_limit_in_bytes_ends_the_socket_with_1009(message: str, closes: bool) -> None:
    """Assertion H9: Codex and opencode take exactly this code as "send it over HTTP"."""
    connection = Connection(ConnectionLimits(max_message_bytes=100), 0.0)
    actions = connection.receive_text(message, 1.0)

    assert [act.code for act in actions if isinstance(act, Close)] == ([1009] if closes else [])
