"""The order of turns in an engine's queue; the lowest number goes first."""

from __future__ import annotations

from typing import Any

from actors.priority import PRIMING, priority_of
from gateway.protocol.requests import parse_create


def priority(**fields: Any) -> int:
    return priority_of(parse_create({"model": "m", "input": "hi", "store": True, **fields}, transport="http"))


def test_a_paid_tier_goes_before_the_usual_one_and_that_before_flex() -> None:
    assert priority(service_tier="priority") == priority(service_tier="fast") < priority()
    assert (
        priority() == priority(service_tier="auto") == priority(service_tier="default") < priority(service_tier="flex")
    )


def test_a_background_turn_waits_for_others_of_its_tier_only() -> None:
    for better, worse in (("priority", "default"), ("default", "flex")):
        assert priority(service_tier=better) < priority(service_tier=better, background=True)
        assert priority(service_tier=better, background=True) < priority(service_tier=worse)
    assert priority(service_tier="flex", background=True) < PRIMING
