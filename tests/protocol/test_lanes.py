"""The lane machine by itself: the table, the limits, fairness, and what an illegal or refused move leaves behind."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from gateway.protocol.errors import ApiError
from gateway.protocol.lanes import ABSENT, TABLE, Event, LaneError, LaneLimits, Lanes, State, _Lane, check_stream_id

ILLEGAL = None
EXPECTED = {
    (State.IDLE, Event.SUBMIT): State.WAITING,
    (State.IDLE, Event.SLOT_FREE): ILLEGAL,
    (State.IDLE, Event.TURN_ENDED): ILLEGAL,
    (State.IDLE, Event.TURN_ENDED_MORE): ILLEGAL,
    (State.IDLE, Event.DROP): ILLEGAL,
    (State.WAITING, Event.SUBMIT): State.WAITING,
    (State.WAITING, Event.SLOT_FREE): State.RUNNING,
    (State.WAITING, Event.TURN_ENDED): ILLEGAL,
    (State.WAITING, Event.TURN_ENDED_MORE): ILLEGAL,
    (State.WAITING, Event.DROP): State.IDLE,
    (State.RUNNING, Event.SUBMIT): State.RUNNING,
    (State.RUNNING, Event.SLOT_FREE): ILLEGAL,
    (State.RUNNING, Event.TURN_ENDED): State.IDLE,
    (State.RUNNING, Event.TURN_ENDED_MORE): State.WAITING,
    (State.RUNNING, Event.DROP): State.RUNNING,
}


def frame(n: int) -> dict[str, Any]:
    return {"n": n}


def numbers(started: list[tuple[str | None, dict[str, Any]]]) -> list[tuple[str | None, int]]:
    return [(name, turn["n"]) for name, turn in started]


def submit(lanes: Lanes, name: str | None, n: int = 0, size: int = 1) -> list[tuple[str | None, int]]:
    lanes.submit(name, frame(n), size)
    return numbers(lanes.start_ready())


def snapshot(lanes: Lanes) -> object:
    frames = [turn["n"] for turn in lanes.queued_frames()]
    states = [(name, lanes.state_of(name)) for name in (None, "a", "b", "c", "d")]
    return lanes.running, lanes.waiting, lanes.queued, lanes.queued_bytes, lanes.names, lanes.idle, frames, states


def in_state(state: State) -> Lanes:
    lanes = Lanes(LaneLimits(max_active=1))
    if state is State.WAITING:
        submit(lanes, "other")
    if state is not State.IDLE:
        submit(lanes, "a", 1)

    assert state is lanes.state_of("a")
    return lanes


def test_the_expectation_covers_every_pair() -> None:
    assert set(EXPECTED) == set(product(State, Event))


@pytest.mark.parametrize(("state", "event"), EXPECTED, ids=lambda value: value.name)
def test_every_pair(state: State, event: Event) -> None:
    lanes = in_state(state)
    lane = lanes._lanes.setdefault("a", _Lane())
    before = snapshot(lanes)
    expected = EXPECTED[state, event]
    if expected is ILLEGAL:
        with pytest.raises(LaneError, match=f"'a' is {state.name}: expected .*, got {event.name}"):
            lanes._move("a", lane, event)

        assert before == snapshot(lanes)
        assert (state, event) not in TABLE
    else:
        lanes._move("a", lane, event)

        assert expected is lanes.state_of("a")
        assert (expected is State.RUNNING) == ("a" in lanes.running)
        assert (expected is State.WAITING) == ("a" in lanes.waiting)


@pytest.mark.parametrize("state", [State.IDLE, State.WAITING])
def test_an_end_without_a_turn_raises_and_changes_nothing(state: State) -> None:
    lanes = in_state(state)
    before = snapshot(lanes)
    for name in ("a", "never used"):
        with pytest.raises(LaneError):
            lanes.turn_ended(name)

        assert before == snapshot(lanes)


def test_a_lane_is_first_in_first_out_and_never_overlaps() -> None:
    lanes = Lanes(LaneLimits())

    assert submit(lanes, None, 1) == [(None, 1)]
    assert submit(lanes, None, 2) == []
    assert submit(lanes, None, 3) == []
    for n in (2, 3):
        lanes.turn_ended(None)
        assert [(None, n)] == numbers(lanes.start_ready())
    lanes.turn_ended(None)
    assert lanes.start_ready() == []
    assert lanes.idle


def test_lanes_run_side_by_side_up_to_16_default_included() -> None:
    lanes = Lanes(LaneLimits())
    names = [None, *(f"lane-{n}" for n in range(15))]
    for name in names:
        assert [(name, 0)] == submit(lanes, name)

    assert submit(lanes, "seventeenth", 17) == []
    assert lanes.waiting == ("seventeenth",)
    lanes.turn_ended("lane-3")
    assert numbers(lanes.start_ready()) == [("seventeenth", 17)]
    assert len(lanes.running) == 16


def test_the_longest_waiting_lane_goes_first_and_a_busy_lane_stands_behind_it() -> None:
    lanes = Lanes(LaneLimits(max_active=1))
    submit(lanes, "a", 1)
    for n, name in enumerate(["a", "a", "b", "c", "b"]):
        submit(lanes, name, n + 2)
    order = []
    while lanes.running:
        lanes.turn_ended(lanes.running[0])
        order += numbers(lanes.start_ready())

    # `a` has two turns queued before the others came, and still each lane gets its turn in between
    assert order == [("b", 4), ("c", 5), ("a", 2), ("b", 6), ("a", 3)]


def test_32_names_and_they_stay_usable() -> None:
    lanes = Lanes(LaneLimits())
    for n in range(32):
        submit(lanes, f"lane-{n}")
        lanes.turn_ended(f"lane-{n}")
    before = snapshot(lanes)
    with pytest.raises(ApiError) as refused:
        lanes.submit("lane-32", frame(0), 1)

    assert (
        refused.value.code,
        refused.value.param,
        refused.value.status,
    ) == ("websocket_stream_limit_reached", "stream_id", 400)
    assert before == snapshot(lanes)
    for name in [None, *(f"lane-{n}" for n in range(15))]:
        assert [(name, 0)] == submit(lanes, name)


def test_a_bounded_number_of_turns_waits_on_the_socket() -> None:
    lanes = Lanes(LaneLimits())
    submit(lanes, "a")
    submit(lanes, "b")
    for n in range(64):
        submit(lanes, "ab"[n % 2])
    before = snapshot(lanes)
    for name in ("a", "b"):
        with pytest.raises(ApiError) as refused:
            lanes.submit(name, frame(0), 1)

        assert (
            refused.value.code,
            refused.value.param,
            refused.value.status,
            refused.value.retry_after_s,
        ) == ("websocket_queue_full", None, 429, 1)
        assert before == snapshot(lanes)
    assert submit(lanes, "c", 7) == [("c", 7)]  # what starts at once doesn't queue
    lanes.turn_ended("a")
    lanes.start_ready()
    submit(lanes, "a")
    assert lanes.queued == 64


@pytest.mark.parametrize(("size", "fits"), [(60, True), (61, False)])
def test_a_bounded_number_of_bytes_waits(size: int, fits: bool) -> None:
    lanes = Lanes(LaneLimits(max_queued_bytes=100))
    submit(lanes, "a", size=1000)  # runs, so it doesn't count
    submit(lanes, "a", size=40)
    if fits:
        submit(lanes, "a", size=size)
        assert lanes.queued_bytes == 100
        lanes.turn_ended("a")
        lanes.start_ready()
        assert lanes.queued_bytes == 60
    else:
        with pytest.raises(ApiError, match="100 bytes"):
            lanes.submit("a", frame(0), size)
        assert lanes.queued_bytes == 40


def test_the_default_queue_holds_one_frame_of_the_largest_size() -> None:
    assert LaneLimits().max_queued_bytes == 2 * 16 * 1024 * 1024


def test_a_refused_create_does_not_use_up_a_name() -> None:
    lanes = Lanes(LaneLimits(max_active=1, max_names=1, max_queued=0))
    submit(lanes, None)
    with pytest.raises(ApiError, match="queued"):
        lanes.submit("a", frame(0), 1)

    assert lanes.names == 0
    lanes.turn_ended(None)
    assert submit(lanes, "b") == [("b", 0)]


def test_turns_that_were_not_started_yet_count_as_soon_as_the_slots_are_spoken_for() -> None:
    lanes = Lanes(LaneLimits(max_active=1, max_queued=1))
    lanes.submit("a", frame(1), 1)
    with pytest.raises(ApiError):
        lanes.submit("b", frame(2), 1)

    assert numbers(lanes.start_ready()) == [("a", 1)]


def test_drop_waiting_leaves_the_queue_behind_a_running_turn() -> None:
    lanes = Lanes(LaneLimits(max_active=1))
    for n, name in enumerate(["a", "a", "b", None, "b"]):
        submit(lanes, name, n)

    assert lanes.drop_waiting() == ["b", "b", None]
    assert (lanes.running, lanes.waiting, lanes.queued, lanes.queued_bytes) == (("a",), (), 1, 1)
    lanes.turn_ended("a")
    assert numbers(lanes.start_ready()) == [("a", 1)]


def test_drop_queued_leaves_only_what_runs() -> None:
    lanes = Lanes(LaneLimits(max_active=1))
    for n, name in enumerate(["a", "a", "b", None, "b"]):
        submit(lanes, name, n)

    assert lanes.drop_queued() == ["b", "b", None, "a"]
    assert (lanes.running, lanes.waiting, lanes.queued, lanes.queued_bytes) == (("a",), (), 0, 0)
    assert lanes.drop_queued() == []
    lanes.turn_ended("a")
    assert lanes.idle


def test_queued_frames_are_the_ones_that_wait() -> None:
    lanes = Lanes(LaneLimits(max_active=1))
    for n, name in enumerate(["a", "a", "b"]):
        submit(lanes, name, n)

    assert [turn["n"] for turn in lanes.queued_frames()] == [1, 2]


@pytest.mark.parametrize("name", ["a", "Z", "0", "_", ".", "-", "agent.1_b-C", "x" * 256])
def test_good_stream_ids(name: str) -> None:
    assert name == check_stream_id(name)


def test_an_absent_stream_id_is_the_default_lane() -> None:
    assert check_stream_id() is None
    assert check_stream_id(ABSENT) is None


BAD: list[object] = [
    "",
    None,
    0,
    1,
    True,
    1.5,
    [],
    {},
    ["a"],
    "x" * 257,
    "a b",
    "a\n",
    "\n",
    "é",
    "\u0661",
    "a/b",
    "a:b",
    "a\x00",
    b"a",
]


@pytest.mark.parametrize("value", BAD, ids=repr)
def test_bad_stream_ids(value: object) -> None:
    with pytest.raises(ApiError) as refused:
        check_stream_id(value)

    assert (refused.value.code, refused.value.param, refused.value.status) == ("invalid_stream_id", "stream_id", 400)


@pytest.mark.parametrize("wrong", [{"max_active": 0}, {"max_names": -1}, {"max_queued": -1}, {"max_queued_bytes": -1}])
def test_limits_check_themselves(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least one slot"):
        LaneLimits(**wrong)
