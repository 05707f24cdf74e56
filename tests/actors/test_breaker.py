"""The circuit breaker against a plain description of what it must do, over all orders of events."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.breaker import AFTER, OUTCOMES, CircuitBreaker, Outcome, State


def failed(breaker: CircuitBreaker, now: float) -> None:
    breaker.end(breaker.begin(now), Outcome.BAD, now)


def test_opens_after_failures_in_a_row_only() -> None:
    breaker = CircuitBreaker(threshold=3)
    for _ in range(5):
        failed(breaker, 0)
        failed(breaker, 0)
        breaker.end(breaker.begin(0), Outcome.GOOD, 0)
    assert breaker.allows(0)
    for _ in range(3):
        failed(breaker, 0)
    assert breaker.state is State.OPEN
    assert not breaker.allows(0)


def test_a_mute_backend_is_tried_again_on_a_bounded_schedule() -> None:
    # bugs.md O-57: a ten-minute cooldown starved the session.
    breaker, now, pauses = CircuitBreaker(threshold=3, pause_s=1, longest_pause_s=30), 0.0, []
    for _ in range(3):
        failed(breaker, now)
    for _ in range(40):
        pauses.append(breaker.wait(now))
        now += pauses[-1]
        assert breaker.allows(now)
        failed(breaker, now)
    assert pauses[:6] == [1, 2, 4, 8, 16, 30]
    assert set(pauses[6:]) == {30}
    now += breaker.wait(now)
    breaker.end(breaker.begin(now), Outcome.GOOD, now)
    assert breaker.state is State.CLOSED
    failed(breaker, now)
    assert breaker.allows(now)


def test_one_request_tries_and_decides() -> None:
    breaker = CircuitBreaker(threshold=1, pause_s=1)
    straggler = breaker.begin(0)
    failed(breaker, 0)
    breaker.end(straggler, Outcome.GOOD, 0.5)
    assert not breaker.allows(0.5)
    trial = breaker.begin(1)
    assert not breaker.allows(1)
    breaker.end(straggler, Outcome.BAD, 1.1)
    assert breaker.state is State.HALF_OPEN
    breaker.end(trial, Outcome.NEUTRAL, 2)
    assert breaker.allows(2)
    breaker.end(breaker.begin(2), Outcome.GOOD, 2)
    assert breaker.state is State.CLOSED


def test_which_faults_count() -> None:
    bad = {fault for fault, outcome in OUTCOMES.items() if outcome is Outcome.BAD}
    assert bad == {"unavailable"}
    assert set(OUTCOMES) == {None, "invalid", "overloaded", "unavailable"}


def test_the_table_is_whole() -> None:
    assert set(AFTER) == {(state, outcome) for state in State for outcome in Outcome}


class Driven(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.breaker = CircuitBreaker(threshold=2, pause_s=1, longest_pause_s=8)
        self.now = 0.0
        self.running: list[int] = []
        self.bad_ends: list[float] = []

    @rule(seconds=st.sampled_from([0.0, 0.4, 1.0, 3.0, 9.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: self.breaker.allows(self.now))
    @rule()
    def begins(self) -> None:
        was = self.breaker.state
        self.running.append(self.breaker.begin(self.now))
        assert self.breaker.state is (State.CLOSED if was is State.CLOSED else State.HALF_OPEN)

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 10), outcome=st.sampled_from(list(Outcome)))
    def ends(self, at: int, outcome: Outcome) -> None:
        was = self.breaker.state
        self.breaker.end(self.running.pop(at % len(self.running)), outcome, self.now)
        if outcome is Outcome.BAD:
            self.bad_ends.append(self.now)
        if self.breaker.state is State.OPEN and was is not State.OPEN:
            assert outcome is Outcome.BAD
        if was is State.OPEN:
            assert self.breaker.state is State.OPEN

    @invariant()
    def never_closed_for_good(self) -> None:
        assert 0 <= self.breaker.wait(self.now) <= 8
        if not self.bad_ends:
            assert self.breaker.state is State.CLOSED
        if not self.breaker.allows(self.now) and self.breaker.state is State.HALF_OPEN:
            assert self.running  # whoever tries it is still under way


TestDriven = Driven.TestCase
TestDriven.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize("pause", [0.5, 2.0])
def test_pause_is_what_was_asked_for(pause: float) -> None:
    breaker = CircuitBreaker(threshold=1, pause_s=pause)
    failed(breaker, 10)
    assert breaker.wait(10) == pause
    assert not breaker.allows(10 + pause * 0.99)
    assert breaker.allows(10 + pause)
