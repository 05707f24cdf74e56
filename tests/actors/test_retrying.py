"""When something is sent a second time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.retrying import RETRIES, Hedging, Next, Stage, after_failure


@pytest.mark.parametrize("fault", ["invalid", "overloaded", "unavailable"])
def test_nothing_is_repeated_after_output(fault: str) -> None:
    found = after_failure(fault, started=True, attempts=1, most=9, untried=9)  # type: ignore[arg-type]
    assert found is Next.FAIL


@pytest.mark.parametrize(
    ("fault", "attempts", "untried", "left_s", "expected"),
    [
        ("unavailable", 1, 2, 10, Next.ELSEWHERE),
        ("unavailable", 1, 0, 10, Next.ELSEWHERE),
        ("unavailable", 3, 2, 10, Next.FAIL),
        ("unavailable", 1, 2, 0, Next.FAIL),
        ("overloaded", 1, 1, 10, Next.OTHERS_ONLY),
        ("overloaded", 1, 0, 10, Next.FAIL),  # O-89: no hidden loop at the same endpoint
        ("invalid", 1, 2, 10, Next.FAIL),
    ],
)
def test_before_output(fault: str, attempts: int, untried: int, left_s: float, expected: Next) -> None:
    found = after_failure(
        fault,  # type: ignore[arg-type]
        started=False,
        attempts=attempts,
        most=3,
        untried=untried,
        left_s=left_s,
    )
    assert found is expected


def test_the_table_is_whole() -> None:
    assert set(RETRIES) == {(fault, stage) for fault in ("invalid", "overloaded", "unavailable") for stage in Stage}


def test_no_hedging_before_waits_are_known() -> None:
    hedging = Hedging(needed=20)
    for _ in range(19):
        assert hedging.begin() is None
        hedging.first_output(0.1)
    hedging.first_output(0.1)
    assert hedging.begin() == pytest.approx(0.1)


@given(st.lists(st.floats(0.001, 50), min_size=20, max_size=200), st.sampled_from([0.5, 0.9, 0.95, 1.0]))
@settings(max_examples=50)
def test_the_delay_is_the_quantile(waits: list[float], quantile: float) -> None:
    hedging = Hedging(quantile=quantile, least_s=0.0, window=200)
    for wait in waits:
        hedging.first_output(wait)
    delay = hedging.begin()
    assert delay is not None
    assert delay in waits
    assert sum(wait <= delay for wait in waits) >= quantile * len(waits) - 1e-9
    assert sum(wait < delay for wait in waits) < quantile * len(waits) + 1e-9


@given(st.integers(1, 500), st.sampled_from([0.01, 0.05, 0.2, 1.0]))
@settings(max_examples=50)
def test_second_requests_stay_a_small_part(turns: int, share: float) -> None:
    hedging = Hedging(share=share)
    sent = 0
    for _ in range(turns):
        hedging.begin()
        sent += hedging.spend()
    assert sent <= turns * share + 1e-6
    assert sent >= int(turns * share) - 1
    assert not hedging.spend()


def test_the_delay_has_a_floor() -> None:
    hedging = Hedging(least_s=0.2)
    for _ in range(30):
        hedging.first_output(0.001)
    assert hedging.begin() == 0.2
