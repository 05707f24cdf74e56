"""Steers and interrupts, decided without I/O: the tables, every stage with every frame, and the sequences of 3.8.

What a frame must look like is the official SDK's types where it has them, and protocol.md 3.8 where it has none.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
from openai.types.responses import ResponseSteerAcceptedEvent, ResponseSteerFailedEvent, ResponseSteerPendingEvent

from gateway.protocol.actions import Start
from gateway.protocol.controls import objection_to
from gateway.protocol.lanes import LaneLimits
from gateway.protocol.steer_table import ACCEPT, ANSWERS, MOVES, Ending, Event, Stage, Verb
from gateway.protocol.steering import PAST_KEPT, Steering, SteeringError, SteerLimits
from tests.support.steering import LIMITS, Short, SteeredSocket, call

SDK = {
    "response.steer.accepted": ResponseSteerAcceptedEvent,
    "response.steer.pending": ResponseSteerPendingEvent,
    "response.steer.failed": ResponseSteerFailedEvent,
}
NOT_FOUND, DONE, GONE = "response_not_found", "response_already_completed", "response_not_active"
CREATION = "successor_creation_failed"


def check(frames: list[dict[str, Any]]) -> None:
    """Every frame as its client reads it."""
    for frame in frames:
        kind = frame["type"]
        if kind in SDK:
            SDK[kind].model_validate(frame, strict=True)
        elif kind == "response.append.failed":
            assert frame.keys() - {"stream_id"} == {"type", "response_id", "error"}
            assert frame["error"].keys() == {"type", "code", "message", "param"}
        elif kind == "response.interrupt.failed":
            assert frame.keys() - {"stream_id"} == {"type", "response_id", "error"}
            assert frame["error"].keys() == {"code", "message"}
        else:
            assert kind in {"response.interrupt.accepted", "error"}
        assert "stream_id" not in frame or isinstance(frame["stream_id"], str)


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def output(call_id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": "1"}


# --- the tables -------------------------------------------------------------------------------------------------------


def test_there_is_an_answer_to_every_frame_in_every_stage() -> None:
    assert set(ANSWERS) == set(product(Stage, Verb))
    assert {pair for pair, answer in ANSWERS.items() if answer == ACCEPT} == {
        (Stage.RUNNING, Verb.STEER),
        (Stage.RUNNING, Verb.INTERRUPT),
        (Stage.WAITING, Verb.STEER),
    }


def machine(stage: Stage) -> Steering:
    """With one response in that stage, and its turn still running."""
    steering = Steering(SteerLimits(), lambda: "steer_1")
    steering.starting(None, {"input": "x"})
    steering.started(None, "r")
    endings = {
        Stage.WAITING: Ending("completed", None, (call("c"),), 5),
        Stage.COMPLETED: Ending("completed", None, (), 5),
        Stage.ENDED: Ending("failed", None, (), 5),
    }
    if stage is Stage.INTERRUPTED:
        steering.interrupt({"response_id": "r"})
    elif stage in endings:
        steering.over(None, endings[stage])
    return steering


@pytest.mark.parametrize(("stage", "event"), list(product(Stage, Event)), ids=str)
def test_every_event_in_every_stage(stage: Stage, event: Event) -> None:
    steering = machine(stage)
    target = steering._targets["r"]
    assert target.stage is stage
    after = MOVES.get((stage, event))
    if after is None:
        with pytest.raises(SteeringError, match=event.name):
            steering._move(target, event)
        after = stage
    else:
        steering._move(target, event)

    assert target.stage is after


@pytest.mark.parametrize(
    ("status", "reason", "calls", "event"),
    [
        ("completed", None, (), Event.COMPLETES),
        ("completed", None, (call("c"),), Event.WAITS),
        ("incomplete", "max_output_tokens", (), Event.ENDS),
        ("incomplete", "steered", (), Event.ENDS),
        ("incomplete", "interrupted", (call("c"),), Event.WAITS),
        ("failed", None, (call("c"),), Event.ENDS),
    ],
)
def test_what_an_ending_means(status: str, reason: str | None, calls: Any, event: Event) -> None:
    assert Ending(status, reason, calls, 0).event is event


def test_a_terminal_event_without_a_response_or_a_second_one_is_a_fault_of_ours() -> None:
    steering = machine(Stage.COMPLETED)
    with pytest.raises(SteeringError):
        steering.over(None, Ending("completed", None, (), 5))
    steering.ended(None, [], admitting=True)
    with pytest.raises(SteeringError):
        steering.over(None, Ending("completed", None, (), 5))


# --- every stage, every frame -----------------------------------------------------------------------------------------


def in_stage(stage: str, lane: str | None) -> tuple[SteeredSocket, str]:
    """A socket and the id of a response in that stage; "late" ones have their terminal event, but it is not out."""
    socket = SteeredSocket()
    if stage == "unknown":
        return socket, "resp_0"
    response = socket.begin(lane)
    status, reason, *calls = {
        "waiting": ("completed", None, call("c")),
        "completed": ("completed", None),
        "failed": ("failed", None),
        "cut": ("incomplete", "max_output_tokens"),
    }.get(stage.removeprefix("late "), ("", None))
    if stage == "interrupted":
        socket.interrupt(response)
    elif stage == "past":
        socket.finish(lane)
        socket.begin(lane)
    elif stage.startswith("late "):
        socket.end(lane, status, reason, *calls)
    elif stage != "running":
        socket.finish(lane, status, reason, *calls)
    socket.frames.clear()
    return socket, response


STEERS: dict[str, tuple[list[Short], str | None]] = {
    "running": ([("steer.accepted",), ("steer", "a")], None),
    "interrupted": ([("steer.failed",)], GONE),
    "late waiting": ([], None),
    "late completed": ([], DONE),
    "late failed": ([], GONE),
    "late cut": ([], GONE),
    "waiting": ([("steer.accepted",), ("steer.pending",)], None),
    "completed": ([("steer.failed",)], DONE),
    "failed": ([("steer.failed",)], GONE),
    "cut": ([("steer.failed",)], GONE),
    "past": ([("steer.failed",)], DONE),
    "unknown": ([("steer.failed",)], NOT_FOUND),
}


@pytest.mark.parametrize("stage", STEERS)
@pytest.mark.parametrize("lane", [None, "a"])
def test_a_steer_in_every_stage(stage: str, lane: str | None) -> None:
    expected, code = STEERS[stage]
    socket, response = in_stage(stage, lane)

    assert socket.steer(response, "go left") == [(what, *(lane for _ in rest)) for what, *rest in expected]
    if stage.startswith("late "):
        # what is said about a response whose end is on its way comes behind it
        pending = [("steer.pending",)] if code is None else []
        assert socket.ended(lane) == [("steer.failed" if code else "steer.accepted",), *pending]
    check(socket.frames)
    frame = socket.frames[0]
    assert frame.get("stream_id") == (None if stage == "unknown" else lane)
    if code is not None:
        assert (frame["error"]["code"], frame["error"]["type"]) == (code, "invalid_request_error")
        assert frame["steer"] == {"previous_response_id": response, "input": "go left"}
    else:
        assert frame["steer"].keys() == {"id", "previous_response_id"}


INTERRUPTS = {
    "running": ACCEPT,
    "interrupted": GONE,
    "late waiting": DONE,
    "late completed": DONE,
    "late failed": GONE,
    "late cut": GONE,
    "waiting": DONE,
    "completed": DONE,
    "failed": GONE,
    "cut": GONE,
    "past": DONE,
    "unknown": NOT_FOUND,
}


@pytest.mark.parametrize("stage", INTERRUPTS)
@pytest.mark.parametrize("lane", [None, "a"])
def test_an_interrupt_in_every_stage(stage: str, lane: str | None) -> None:
    socket, response = in_stage(stage, lane)
    seen = socket.interrupt(response, mode="discard_partial_items")

    check(socket.frames)
    if INTERRUPTS[stage] == ACCEPT:
        assert seen == [("interrupt.accepted",), ("interrupt", lane)]
        assert socket.last == {
            "type": "response.interrupt.accepted",
            **({} if lane is None else {"stream_id": lane}),
            "response_id": response,
            "sequence_number": 2,
        }
    else:
        assert seen == [("interrupt.failed",)]
        assert (socket.last["response_id"], socket.last["error"]["code"]) == (response, INTERRUPTS[stage])


@pytest.mark.parametrize("mode", ["keep_partial_items", "", None, 1, ["discard_partial_items"]], ids=repr)
def test_an_unknown_mode_of_interrupt_leaves_the_response_running(mode: object) -> None:
    socket, response = in_stage("running", None)

    assert socket.interrupt(response, mode=mode) == [("interrupt.failed",)]
    assert socket.last["error"]["code"] == "interrupt_not_supported"
    assert socket.interrupt(response) == [("interrupt.accepted",), ("interrupt", None)]


def test_control_frames_pass_the_queue_of_their_lane() -> None:
    socket = SteeredSocket()
    response = socket.begin("a", n=1)
    socket.create("a", n=2)
    socket.create("a", n=3)

    assert socket.interrupt(response) == [("interrupt.accepted",), ("interrupt", "a")]
    assert socket.finish("a", "incomplete", "interrupted") == [("start", "a", 2, False)]


# --- the successor ----------------------------------------------------------------------------------------------------

SETTINGS: dict[str, Any] = {
    "instructions": "Be brief.",
    "tools": [{"type": "function", "name": "f"}],
    "tool_choice": "auto",
    "max_output_tokens": 99,
    "store": False,
    "metadata": {"k": "v"},
    "unknown": [1],
}


@pytest.mark.parametrize(
    ("status", "reason"), [("incomplete", "steered"), ("completed", None), ("incomplete", "max_output_tokens")]
)
def test_the_successor_starts_by_itself_before_anything_queued_and_inherits_all_settings(
    status: str, reason: str | None
) -> None:
    socket = SteeredSocket()
    response = socket.begin("a", n=1, input="one", previous_response_id="resp_old", **SETTINGS)
    socket.create("a", n=2)
    socket.steer(response, "go left")

    assert socket.finish("a", status, reason) == [("start", "a", 1, True)]
    assert socket.starts[-1].frame == {
        "type": "response.create",
        "model": "m",
        "n": 1,
        "stream_id": "a",
        **SETTINGS,
        "previous_response_id": response,
        "input": [user("go left")],
    }
    successor = socket.created("a")
    assert socket.finish("a") == [("start", "a", 2, False)]
    assert socket.steer(successor) == [("steer.failed",)]
    check(socket.frames)


def test_several_steers_go_into_one_successor_in_their_order() -> None:
    socket, response = in_stage("running", None)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": "two"}]}, user("three")]
    for given in ("one", parts, "four"):
        socket.steer(response, given)

    socket.finish(None, "incomplete", "steered")
    assert socket.starts[-1].frame["input"] == [user("one"), *parts, user("four")]
    assert [frame["sequence_number"] for frame in socket.frames] == [2, 3, 4]
    assert len({frame["steer"]["id"] for frame in socket.frames}) == 3


def test_a_successor_can_be_steered_again() -> None:
    socket, response = in_stage("running", None)
    socket.steer(response, "one")
    socket.finish(None, "incomplete", "steered")
    second = socket.created()
    socket.steer(second, "two")

    assert socket.finish(None, "incomplete", "steered") == [("start", None, 0, True)]
    assert socket.starts[-1].frame["previous_response_id"] == second
    assert socket.starts[-1].frame["input"] == [user("two")]


def test_a_successor_keeps_the_slot_of_its_lane() -> None:
    socket = SteeredSocket(lanes=LaneLimits(max_active=1))
    response = socket.begin("a")
    assert socket.create("b", n=2) == []
    socket.steer(response)

    assert socket.finish("a", "incomplete", "steered") == [("start", "a", 0, True)]
    socket.created("a")
    assert socket.finish("a") == [("start", "b", 2, False)]


@pytest.mark.parametrize(("status", "reason"), [("failed", None), ("incomplete", "interrupted")])
def test_without_a_response_to_go_on_from_the_input_is_given_back(status: str, reason: str | None) -> None:
    socket, response = in_stage("running", "a")
    socket.steer(response, "one")
    socket.steer(response, [user("two")])
    ids = [frame["steer"]["id"] for frame in socket.frames]
    socket.frames.clear()

    assert socket.finish("a", status, reason) == [("steer.failed",)] * 2
    check(socket.frames)
    assert [frame["steer"] for frame in socket.frames] == [
        {"id": ids[0], "previous_response_id": response, "input": "one"},
        {"id": ids[1], "previous_response_id": response, "input": [user("two")]},
    ]
    assert {frame["error"]["code"] for frame in socket.frames} == {GONE}
    # created 0, in_progress 1, two accepted 2 and 3, terminal 4
    assert [frame["sequence_number"] for frame in socket.frames] == [5, 6]
    assert {frame["stream_id"] for frame in socket.frames} == {"a"}


def test_a_turn_that_ends_without_a_terminal_event_gives_the_input_back() -> None:
    socket, response = in_stage("running", None)
    socket.steer(response)

    assert socket.ended() == [("steer.failed",)]
    assert socket.steer(response) == [("steer.failed",)]
    assert socket.last["error"]["code"] == GONE


def test_a_successor_that_is_refused_gives_the_input_back_with_its_id() -> None:
    socket, response = in_stage("running", None)
    socket.steer(response, "one")
    socket.create(n=2)
    socket.finish()
    accepted = socket.frames.pop()

    assert socket.ended(None, "The context is full.") == [("steer.failed",), ("start", None, 2, False)]
    check(socket.frames)
    assert socket.last["error"] == {
        "type": "invalid_request_error",
        "code": CREATION,
        "message": "The context is full.",
    }
    assert socket.last["steer"] == {**accepted["steer"], "input": "one"}
    assert socket.last["sequence_number"] == 4


def test_once_the_successor_is_created_nothing_is_given_back() -> None:
    socket, response = in_stage("running", None)
    socket.steer(response)
    socket.finish()
    socket.created()

    assert socket.late == []
    assert socket.finish(None, "failed") == []
    assert socket.connection._steering.owned == 0


# --- waiting for tool outputs -----------------------------------------------------------------------------------------


def test_a_response_that_waits_for_outputs_says_so_once_for_each_steer() -> None:
    socket, response = in_stage("running", "a")
    socket.steer(response, "one")
    socket.steer(response, "two")
    custom = {"type": "custom_tool_call_output", "call_id": "c2"}

    assert socket.finish("a", "completed", None, call("c1"), custom) == [("steer.pending",)] * 2
    assert socket.steer(response, "three") == [("steer.accepted",), ("steer.pending",)]
    check(socket.frames)
    pending = [frame for frame in socket.frames if frame["type"] == "response.steer.pending"]
    assert [frame["steer"]["id"] for frame in pending] == sorted({frame["steer"]["id"] for frame in pending})
    for frame in pending:
        assert frame["reason"] == "waiting_for_required_input"
        assert frame["required_input"] == [call("c1"), custom]
    # two accepted, the terminal event (4), two pending, then accepted and pending again
    assert [frame["sequence_number"] for frame in socket.frames] == [2, 3, 5, 6, 7, 8]


@pytest.mark.parametrize(
    ("own", "after"),
    [
        ([output("c")], [output("c")]),
        ([output("c"), user("and?")], [output("c"), user("and?")]),
        ("and?", [user("and?")]),
        ("", []),
        (None, []),
        ([], []),
    ],
    ids=repr,
)
def test_the_clients_create_gets_the_steers_in_front_of_its_input(own: object, after: list[Any]) -> None:
    socket, response = in_stage("running", None)
    socket.steer(response, "one")
    socket.steer(response, "two")
    socket.finish(None, "completed", None, call("c"))

    assert socket.create(n=7, previous_response_id=response, input=own, instructions="x") == [("start", None, 7, False)]
    assert socket.starts[-1].frame["input"] == [user("one"), user("two"), *after]
    assert socket.starts[-1].frame["instructions"] == "x"
    socket.created()
    assert socket.late == []
    assert socket.connection._steering.owned == 0


@pytest.mark.parametrize("early", [True, False])
def test_a_create_that_comes_before_pending_makes_it_needless(early: bool) -> None:
    """Queued before or after the steer, while the response runs."""
    socket, response = in_stage("running", "a")
    if early:
        socket.create("a", n=2, previous_response_id=response, input=[output("c")])
    socket.steer(response, "one")
    if not early:
        socket.create("a", n=2, previous_response_id=response, input=[output("c")])

    assert socket.finish("a", "completed", None, call("c")) == [("start", "a", 2, False)]
    assert socket.starts[-1].frame["input"] == [user("one"), output("c")]


def test_a_steer_between_the_end_and_a_create_that_waits_for_a_slot() -> None:
    socket = SteeredSocket(lanes=LaneLimits(max_active=1))
    response = socket.begin("a")
    socket.create("b", n=2)
    socket.finish("a", "completed", None, call("c"))
    socket.create("a", n=3, previous_response_id=response, input=[output("c")])

    assert socket.steer(response, "one") == [("steer.accepted",)]
    assert socket.ended("b") == [("start", "a", 3, False)]
    assert socket.starts[-1].frame["input"] == [user("one"), output("c")]


def test_a_create_on_another_lane_takes_no_steer() -> None:
    socket, response = in_stage("running", "a")
    socket.steer(response)
    socket.finish("a", "completed", None, call("c"))

    assert socket.create("b", previous_response_id=response, input=[output("c")]) == [("start", "b", 0, False)]
    assert socket.starts[-1].frame["input"] == [output("c")]
    socket.created("b")
    assert socket.late == []
    assert socket.connection._steering.owned == 1


def test_a_create_on_another_lane_does_not_make_pending_needless() -> None:
    socket, response = in_stage("running", "a")
    socket.begin("b")
    socket.create("b", n=2, previous_response_id=response, input=[output("c")])
    socket.steer(response)

    assert socket.finish("a", "completed", None, call("c")) == [("steer.pending",)]


def test_a_create_with_a_wrong_input_stays_wrong_and_the_steer_comes_back() -> None:
    socket, response = in_stage("waiting", None)
    socket.steer(response, "one")

    socket.create(previous_response_id=response, input=5)
    assert socket.starts[-1].frame["input"] == 5
    assert socket.ended(None, "Invalid type for 'input'.") == [("steer.failed",)]
    assert socket.last["error"]["code"] == CREATION


def test_another_response_on_the_lane_gives_the_input_back() -> None:
    socket, response = in_stage("waiting", "a")
    socket.steer(response, "one")
    socket.frames.clear()
    other = socket.begin("a")

    assert socket.late == [("steer.failed",)]
    check(socket.frames)
    assert socket.last["error"]["code"] == GONE
    assert socket.last["steer"]["input"] == "one"
    assert socket.steer(response) == [("steer.failed",)]
    assert socket.last["error"]["code"] == DONE
    assert socket.steer(other) == [("steer.accepted",), ("steer", "a")]


def test_a_refused_turn_on_the_lane_leaves_the_response_waiting() -> None:
    socket, response = in_stage("waiting", None)
    socket.steer(response, "one")
    socket.create(input="other")

    assert socket.ended(None, "no") == []
    socket.create(previous_response_id=response, input=[output("c")])
    assert socket.starts[-1].frame["input"] == [user("one"), output("c")]


def test_a_steer_while_the_continuation_is_starting_comes_too_late() -> None:
    socket, response = in_stage("waiting", None)
    socket.create(previous_response_id=response, input=[output("c")])

    assert socket.steer(response) == [("steer.failed",)]
    assert socket.last["error"]["code"] == DONE


def test_an_interrupted_response_with_calls_can_be_steered_afterwards() -> None:
    socket, response = in_stage("running", None)
    socket.interrupt(response)
    socket.finish(None, "incomplete", "interrupted", call("c"))

    assert socket.steer(response) == [("steer.accepted",), ("steer.pending",)]


# --- what is refused --------------------------------------------------------------------------------------------------

WRONG: dict[str, dict[str, Any]] = {
    "stream_id": {"stream_id": "a"},
    "another key": {"metadata": {}},
    "no input": {"input": None},
    "number": {"input": 5},
    "empty text": {"input": ""},
    "empty list": {"input": []},
    "no object": {"input": ["x"]},
    "assistant": {"input": [{"role": "assistant", "content": "x"}]},
    "developer": {"input": [{"role": "developer", "content": "x"}]},
    "no role": {"input": [{"content": "x"}]},
    "no content": {"input": [{"role": "user"}]},
    "output": {"input": [output("c")]},
    "message key": {"input": [{"role": "user", "content": "x", "id": "msg_1"}]},
    "part": {"input": [{"role": "user", "content": [{"type": "output_text", "text": "x"}]}]},
    "part text": {"input": [{"role": "user", "content": [{"type": "input_text"}]}]},
    "part kind": {"input": [{"role": "user", "content": ["x"]}]},
    "one of two": {"input": [{"role": "user", "content": "x"}, {"role": "system", "content": "x"}]},
    "too long": {"input": "x" * 10_485_761},
}


@pytest.mark.parametrize("name", WRONG)
def test_only_user_messages_and_the_three_keys_are_taken(name: str) -> None:
    socket, response = in_stage("running", "a")

    assert socket.steer(response, **{"given": "x", **WRONG[name]}) == [("steer.failed",)]
    frame = socket.last
    assert frame["error"]["code"] == "invalid_input"
    assert "id" not in frame["steer"]
    given = WRONG[name].get("input", "x")
    if isinstance(given, list):
        given = [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in given]
    assert frame["steer"]["input"] == (given if isinstance(given, str | list) else [])
    assert (frame["stream_id"], frame["sequence_number"]) == ("a", 2)
    assert socket.connection._steering.owned == 0
    assert socket.finish("a") == []


@pytest.mark.parametrize("target", [None, 5, [], {}], ids=repr)
def test_a_steer_without_a_target_is_invalid(target: object) -> None:
    socket, _ = in_stage("running", "a")

    assert socket.steer(target) == [("steer.failed",)]
    check(socket.frames)
    assert socket.last["error"]["code"] == "invalid_input"
    assert socket.last["steer"]["previous_response_id"] == ""


UNSUPPORTED: list[dict[str, Any]] = [
    {"conversation": "conv_1"},
    {"conversation": {"id": "conv_1"}},
    {"context_management": [{"type": "compaction", "compact_threshold": 2000}]},
    {"generate": False},
    {"prompt_cache_options": {"prewarm": True}},
    {"input": [user("x"), {"type": "compaction_trigger"}]},
]


@pytest.mark.parametrize("more", UNSUPPORTED, ids=str)
def test_what_cannot_be_steered_can_still_be_interrupted(more: dict[str, Any]) -> None:
    socket = SteeredSocket()
    response = socket.begin(**more)

    assert socket.steer(response) == [("steer.failed",)]
    check(socket.frames)
    assert socket.last["error"]["code"] == "steering_not_supported"
    assert socket.interrupt(response) == [("interrupt.accepted",), ("interrupt", None)]


@pytest.mark.parametrize("more", [{}, {"conversation": None}, {"context_management": []}, {"generate": True}], ids=str)
def test_what_can_be_steered(more: dict[str, Any]) -> None:
    assert objection_to({"input": "x", **more}) is None


def test_steers_of_one_response_are_bounded() -> None:
    socket = SteeredSocket(pending_steers=3)
    response = socket.begin()
    for _ in range(3):
        socket.steer(response)
    socket.frames.clear()

    assert socket.steer(response, "more") == [("steer.failed",)]
    check(socket.frames)
    assert socket.last["error"]["code"] == "too_many_pending_steers"
    socket.finish()
    successor = socket.created()
    assert socket.steer(successor) == [("steer.accepted",), ("steer", None)]


def test_the_bytes_of_all_steers_are_bounded() -> None:
    socket = SteeredSocket(lanes=replace(LIMITS.lanes, max_queued_bytes=1000))
    first, second = socket.begin("a"), socket.begin("b")
    socket.steer(first, "x" * 800)

    assert socket.steer(second, "x" * 200) == [("steer.failed",)]
    assert socket.last["error"]["code"] == "too_many_pending_steers"
    socket.finish("a", "failed")
    assert socket.steer(second, "x" * 200) == [("steer.accepted",), ("steer", "b")]


def test_responses_of_the_past_are_forgotten_in_the_end() -> None:
    socket = SteeredSocket()
    first = socket.begin()
    for _ in range(PAST_KEPT + 1):
        socket.finish()
        socket.begin()

    assert socket.interrupt(first) == [("interrupt.failed",)]
    assert socket.last["error"]["code"] == NOT_FOUND
    assert len(socket.connection._steering._targets) == 1


# --- the end of the socket --------------------------------------------------------------------------------------------


def test_a_draining_socket_starts_no_successor_and_takes_no_steer() -> None:
    socket, response = in_stage("running", None)
    socket.steer(response, "one")
    assert socket.seen(socket.connection.drain(1012, "x", socket.now)) == []

    assert socket.steer(response, "two") == [("steer.failed",)]
    assert socket.last["error"]["code"] == CREATION
    assert socket.finish() == [("steer.failed",), ("close", 1012)]
    check(socket.frames)
    assert socket.last["error"]["code"] == CREATION
    assert socket.last["steer"]["input"] == "one"


def test_a_draining_socket_can_still_be_interrupted() -> None:
    socket, response = in_stage("running", None)
    socket.connection.drain(1012, "x", socket.now)

    assert socket.interrupt(response) == [("interrupt.accepted",), ("interrupt", None)]
    assert socket.finish(None, "incomplete", "interrupted") == [("close", 1012)]


def test_at_the_age_limit_no_successor_starts() -> None:
    socket, response = in_stage("running", None)
    socket.steer(response)
    socket.now = 1000.0

    assert socket.finish() == [
        ("steer.failed",),
        ("error", "websocket_connection_limit_reached"),
        ("close", 1000),
    ]


def test_steers_that_wait_die_with_the_socket() -> None:
    socket, response = in_stage("running", None)
    socket.steer(response)

    assert socket.seen(socket.connection.lost(socket.now)) == [("cancel", None)]
    socket.end(None, "failed")
    assert socket.ended() == []
    assert socket.steer(response) == []
    assert socket.connection.settled


def test_a_turn_that_starts_after_the_loss_is_counted_and_nothing_said() -> None:
    socket = SteeredSocket()
    response = socket.begin("a")
    socket.steer(response)
    socket.finish("a", "completed", None, call("c"))
    socket.create("a", input="other")
    socket.connection.lost(socket.now)
    socket.created("a")

    assert socket.late == []
    assert socket.finish("a") == []
    assert socket.connection.settled


def test_the_start_of_a_successor_is_marked() -> None:
    assert Start(None, {}).automatic is False


# --- rollouts: an extension (docs/rollout-extension.md) ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "reason", "calls", "code"),
    [
        ("completed", None, (call("c"),), DONE),
        ("completed", None, (), DONE),
        ("incomplete", "max_output_tokens", (), GONE),
        ("failed", None, (), GONE),
    ],
)
@pytest.mark.parametrize("lane", [None, "a"])
def test_an_append_is_for_the_response_that_runs(
    lane: str | None, status: str, reason: str | None, calls: tuple[dict[str, str], ...], code: str
) -> None:
    socket = SteeredSocket(rollouts=True)
    response = socket.begin(lane, rollout=True)
    assert socket.append(response) == [("append", lane, response)]
    socket.finish(lane, status, reason, *calls)
    assert socket.append(response) == [("append.failed",)]
    assert (socket.last["error"]["code"], socket.last.get("stream_id")) == (code, lane)
    socket.begin(lane)
    assert socket.append(response) == [("append.failed",)]
    assert (socket.last["error"]["code"], socket.last.get("stream_id")) == (code, lane)
    check(socket.frames)


@pytest.mark.parametrize("response", ["resp_other", None, 5, []])
def test_an_append_for_nothing_known(response: object) -> None:
    socket = SteeredSocket(rollouts=True)
    socket.begin("a", rollout=True)
    assert socket.append(response) == [("append.failed",)]
    assert socket.last["error"]["code"] == NOT_FOUND
    assert socket.last["response_id"] == (response if isinstance(response, str) else "")
    assert "stream_id" not in socket.last
    check(socket.frames)


def test_an_interrupted_response_takes_no_append() -> None:
    socket = SteeredSocket(rollouts=True)
    response = socket.begin(rollout=True)
    socket.interrupt(response)
    assert socket.append(response) == [("append.failed",)]
    assert socket.last["error"]["code"] == GONE


def test_an_append_passes_the_queue_and_is_taken_while_the_socket_ends() -> None:
    socket = SteeredSocket(rollouts=True)
    response = socket.begin(rollout=True)
    assert socket.create(n=1) == []
    assert socket.append(response) == [("append", None, response)]
    socket.seen(socket.connection.drain(1012, "over", socket.now))
    assert socket.append(response) == [("append", None, response)]


def test_without_the_extension_there_is_no_append() -> None:
    socket = SteeredSocket()
    response = socket.begin(rollout=True)
    assert socket.append(response) == [("error", "unsupported_event")]
    assert socket.steer(response)[0] == ("steer.accepted",)


@pytest.mark.parametrize(("asked", "objects"), [(True, True), (False, False), (None, False), ("yes", False)])
def test_rollouts_cannot_be_steered(asked: object, objects: bool) -> None:
    assert (objection_to({"rollout": asked}, rollouts=True) is not None) is objects
    assert objection_to({"rollout": asked}) is None
