"""The usage ledger: what is accounted for, and where a turn's time goes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.ledger import Buckets, usage_entry
from actors.store.jobs import PutUsage
from tests.support.records import Record


def test_an_entry_says_who_used_what_and_how_long_it_took() -> None:
    assert usage_entry(Record()) == PutUsage(
        tenant="acme",
        id="resp_1",
        key="0a1b",
        model="m",
        status="completed",
        created_at=1_700_000_000,
        input_tokens=1000,
        cached_tokens=600,
        output_tokens=50,
        reasoning_tokens=20,
        first_token_ms=250,
        total_ms=2000,
        inference_ms=1900,
        overhead_ms=100,
        tool_ms=3000,
    )


def test_what_the_client_takes_to_read_the_end_is_no_overhead() -> None:
    buckets = Buckets.of(Record(finished=102.0, ended=500.0))

    assert buckets.overhead_s == pytest.approx(0.1)


def test_the_waits_of_a_rollout_are_its_clients_tools() -> None:
    buckets = Buckets.of(Record(finished=112.0, away_s=10.0, tool_s=None))

    assert (buckets.tool_s, buckets.overhead_s) == (10.0, pytest.approx(0.1))
    assert Buckets.of(Record(finished=112.0, away_s=10.0, tool_s=3.0)).tool_s == 13.0


def test_the_first_turn_of_a_lane_waited_for_no_tool() -> None:
    entry = usage_entry(Record(tool_s=None))

    assert entry is not None
    assert entry.tool_ms is None


@pytest.mark.parametrize("outcome", ["cancelled", "abandoned", "engine_unavailable", "incomplete"])
def test_a_turn_that_was_cut_is_accounted_for_with_what_was_sampled(outcome: str) -> None:
    """Spec: disconnects, interrupts and failures are entries too."""
    entry = usage_entry(Record(outcome=outcome, output_tokens=7, finished=None, ended=101.0, inference_s=0.95))

    assert entry is not None
    assert (entry.status, entry.output_tokens, entry.total_ms) == (outcome, 7, 1000)


def test_a_turn_that_died_before_its_first_token_is_accounted_for() -> None:
    entry = usage_entry(Record(outcome="cancelled", output_tokens=0, first_chunk=None, finished=None, ended=100.5))

    assert entry is not None
    assert (entry.first_token_ms, entry.output_tokens) == (None, 0)


UNSUBMITTED: dict[str, Any] = {"submitted": None, "first_chunk": None, "output_tokens": 0, "inference_s": 0.0}


@pytest.mark.parametrize("outcome", ["model_not_found", "rate_limit_exceeded", "cancelled", "running"])
def test_a_refused_turn_used_nothing(outcome: str) -> None:
    assert usage_entry(Record(outcome=outcome, **UNSUBMITTED)) is None


def test_a_warm_up_is_accounted_for() -> None:
    entry = usage_entry(Record(**UNSUBMITTED))

    assert entry is not None
    assert (entry.input_tokens, entry.inference_ms) == (1000, 0)


def test_a_compaction_that_did_not_help_is_accounted_for() -> None:
    """Nothing was submitted for the answer, but the summary was sampled."""
    record = Record(outcome="context_length_exceeded", **{**UNSUBMITTED, "output_tokens": 40, "inference_s": 0.8})

    assert usage_entry(record) is not None


def test_an_engine_that_counts_whole_blocks_does_not_make_more_cached_than_there_was() -> None:
    entry = usage_entry(Record(input_tokens=100, cached_tokens=112))

    assert entry is not None
    assert entry.cached_tokens == 100


SECONDS = st.floats(0, 10_000)


@given(SECONDS, SECONDS, SECONDS, st.none() | SECONDS, st.booleans(), st.booleans())
def test_the_buckets_of_any_turn_are_times(
    whole: float, inference: float, away: float, tool: float | None, finished: bool, ended: bool
) -> None:
    end = 100.0 + whole
    record = Record(
        inference_s=inference,
        away_s=away,
        tool_s=tool,
        finished=end if finished else None,
        ended=end if ended else None,
    )
    buckets, entry = Buckets.of(record), usage_entry(record)

    assert buckets.inference_s >= 0
    assert buckets.overhead_s >= 0
    assert buckets.tool_s is None or buckets.tool_s >= 0
    if finished and inference + away <= whole:
        assert buckets.inference_s + away + buckets.overhead_s == pytest.approx(whole, abs=1e-6)
    assert entry is not None
    assert min(entry.total_ms, entry.inference_ms, entry.overhead_ms) >= 0
