"""Rate limits: what is let in is what an upstream with these limits would take, and no wait is longer than it must be.

The reference is a bucket kept by itself, step by step, as the documentation describes it.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.upstream.admission import Admission, Need

WALL = 1_796_000_000.0


class Bucket:
    """An upstream's limit: fills at `rate` up to `size`; refuses what it does not hold."""

    def __init__(self, size: float, rate: float, level: float) -> None:
        self.size, self.rate, self.level, self.at = size, rate, level, 0.0

    def pour(self, now: float) -> None:
        self.level = min(self.size, self.level + self.rate * (now - self.at))
        self.at = now

    def takes(self, amount: float, now: float) -> bool:
        self.pour(now)
        if amount > self.level + 1e-6 * self.size:
            return False
        self.level = max(0.0, self.level - amount)
        return True

    def headers(self, name: str, now: float) -> dict[str, str]:
        self.pour(now)
        reset = (self.size - self.level) / self.rate
        figures = {"limit": self.size, "remaining": self.level, "reset": reset}
        return {f"x-ratelimit-{field}-{name}": repr(value) for field, value in figures.items()}


def buckets() -> st.SearchStrategy[tuple[int, float, float]]:
    return st.tuples(st.integers(100, 100_000), st.floats(0.5, 5000), st.floats(0, 1))


@given(
    buckets(),
    buckets(),
    st.lists(st.tuples(st.integers(1, 60_000), st.floats(0, 1), st.floats(0, 30)), min_size=1, max_size=20),
)
@settings(max_examples=100)
def test_a_single_client_is_never_refused_and_never_waits_too_long(
    uncached: tuple[int, float, float],
    total: tuple[int, float, float],
    requests: list[tuple[int, float, float]],
) -> None:
    admission = Admission()
    pair = {
        "uncached-tokens-minute": Bucket(uncached[0], uncached[1], uncached[0] * uncached[2]),
        "total-tokens-minute": Bucket(total[0], total[1], total[0] * total[2]),
    }
    now = 0.0

    def tell() -> None:
        for name, bucket in pair.items():
            admission.observe(bucket.headers(name, now), now, WALL + now)

    tell()
    for amount, share, pause in requests:
        now += pause
        need = Need(min(amount, total[0]), int(min(amount, total[0], uncached[0]) * share))
        wait = admission.wait(need, now)
        amounts = {"uncached-tokens-minute": need.uncached, "total-tokens-minute": need.total}
        if wait > 1e-3:
            early = now + wait - 1e-3 * (1 + wait)
            assert any(
                amounts[name] > min(b.size, b.level + b.rate * (early - b.at)) - 1e-6 * b.size
                for name, b in pair.items()
            )
        now += wait
        ticket = admission.reserve(need)
        assert all(bucket.takes(amounts[name], now) for name, bucket in pair.items())
        tell()
        admission.release(ticket)


@given(st.integers(1, 1000), st.floats(0, 1000), st.floats(0, 1000), st.integers(0, 5000), st.integers(0, 5000))
def test_waits_are_bounded_and_grow_with_the_need(size: int, left: float, reset: float, less: int, more: int) -> None:
    admission = Admission()
    figures = {"limit": size, "remaining": left, "reset": reset}
    admission.observe({f"x-ratelimit-{name}-tokens-minute": str(value) for name, value in figures.items()}, 5, WALL)
    less, more = sorted((less, more))
    waits = [admission.wait(Need(amount, amount), 5) for amount in (less, more)]
    assert 0 <= waits[0] <= waits[1] <= reset + 1e-6
    assert admission.wait(Need(more, more), 5 + reset + 1e-3) == pytest.approx(0, abs=1e-6)


def test_requests_under_way_count_until_their_answer_tells() -> None:
    admission = Admission()
    full = {
        "x-ratelimit-limit-tokens-minute": "1000",
        "x-ratelimit-remaining-tokens-minute": "1000",
        "x-ratelimit-reset-tokens-minute": "60",
    }
    admission.observe(full, 0, WALL)
    tickets = [admission.reserve(Need(400, 400)) for _ in range(2)]
    assert admission.wait(Need(200, 200), 0) == 0
    assert admission.wait(Need(201, 201), 0) > 0
    admission.observe({**full, "x-ratelimit-remaining-tokens-minute": "700"}, 0, WALL)
    assert admission.wait(Need(100, 100), 0) == pytest.approx(200 * 60 / 300)
    for ticket in tickets:
        admission.release(ticket)
        admission.release(ticket)
    assert admission.wait(Need(700, 700), 0) == 0


def test_cached_tokens_count_in_one_bucket_only() -> None:
    admission = Admission()
    for kind, left in (("uncached", "100"), ("total", "100000")):
        for field, value in (("limit", "100000"), ("remaining", left), ("reset", "60")):
            admission.observe({f"x-ratelimit-{field}-{kind}-tokens-minute": value}, 0, WALL)
        figures = {"limit": "100000", "remaining": left, "reset": "60"}
        admission.observe({f"x-ratelimit-{f}-{kind}-tokens-minute": v for f, v in figures.items()}, 0, WALL)
    assert admission.wait(Need(50_000, 90), 0) == 0
    assert admission.wait(Need(50_000, 50_000), 0) > 25


def test_a_refusal_closes_for_as_long_as_it_says() -> None:
    admission = Admission()
    admission.refused(None, 10)
    assert admission.wait(Need(1, 1), 10) == 0
    admission.refused(7.5, 10)
    admission.refused(1, 10)
    assert admission.wait(Need(1, 1), 12) == 5.5
    assert admission.wait(Need(1, 1), 17.5) == 0


def test_what_exceeds_a_whole_limit_is_asked_once_it_is_full() -> None:
    admission = Admission()
    figures = {"limit": "1000", "remaining": "500", "reset": "30"}
    admission.observe({f"x-ratelimit-{name}-tokens-minute": value for name, value in figures.items()}, 0, WALL)
    assert admission.wait(Need(10**6, 10**6), 0) == 30
    assert admission.wait(Need(10**6, 10**6), 30) == 0


@pytest.mark.parametrize(
    ("names", "reset", "measure", "seconds"),
    [
        ("tokens-minute", "12.5", "uncached", 12.5),
        ("tokens", "6m0s", "uncached", 360.0),
        ("tokens", "20ms", "uncached", 0.02),
        ("requests", "1h2m3.5s", "requests", 3723.5),
        ("requests-day", "86400", "requests", 86400.0),
        ("tokens-per-minute", str(WALL + 42), "uncached", 42.0),
        ("total-tokens-hour", "1d", "total", 86400.0),
    ],
)
def test_forms_of_headers(names: str, reset: str, measure: str, seconds: float) -> None:
    admission = Admission()
    figures = {"limit": "100", "remaining": "40", "reset": reset}
    admission.observe({f"x-ratelimit-{field}-{names}": value for field, value in figures.items()}, 3, WALL)
    (limit,) = admission.limits
    assert (limit.measure, limit.size, limit.left, limit.seen) == (measure, 100, 40, 3)
    assert limit.reset_s == pytest.approx(seconds)


@pytest.mark.parametrize(
    "headers",
    [
        {"x-ratelimit-limit-tokens-minute": "100"},
        {"x-ratelimit-limit-tokens": "?", "x-ratelimit-remaining-tokens": "1", "x-ratelimit-reset-tokens": "1"},
        {"x-ratelimit-limit-tokens": "9", "x-ratelimit-remaining-tokens": "1", "x-ratelimit-reset-tokens": "soon"},
        {"x-ratelimit-limit-tokens": "0", "x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1"},
        {"x-ratelimit-limit-tokens": "-9", "x-ratelimit-remaining-tokens": "nan", "x-ratelimit-reset-tokens": "1"},
        {"x-ratelimit-limit-tokens": "9", "x-ratelimit-remaining-tokens": "1", "x-ratelimit-reset-tokens": ""},
    ],
)
def test_half_told_limits_change_nothing(headers: dict[str, str]) -> None:
    admission = Admission()
    admission.observe(headers, 0, WALL)
    assert admission.limits == ()
