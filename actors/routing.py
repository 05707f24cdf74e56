"""Which replica takes a turn: the one that has its prefix, unless that is much busier than the others. Pure.

A conversation's replica has its KV prefix, so leaving it costs a prefill of the whole context. It is left only when it
is gone, draining, failing, or so loaded that waiting would cost more: bounded load, as in consistent hashing with
bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

LOAD_FACTOR = 1.5
"""How many times the mean load a replica may have before its conversations leave it."""
SLACK = 4
"""Turns above that which are still borne: with few turns the mean says little."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may take the turn. `load` is what runs and waits there, `waiting` what waits."""

    load: int
    waiting: int


def route(wanted: str | None, candidates: Mapping[str, Candidate]) -> str:
    """The replica's name; there must be a candidate. New conversations go where least is to do."""
    if wanted is not None and wanted in candidates and not overloaded(candidates[wanted], candidates):
        return wanted
    return min(candidates, key=lambda name: candidates[name].load)


def overloaded(one: Candidate, candidates: Mapping[str, Candidate]) -> bool:
    """Whether a conversation is better off elsewhere: turns wait here, and this has far more than its share."""
    if not one.waiting or len(candidates) < 2:
        return False
    mean = sum(each.load for each in candidates.values()) / len(candidates)
    return one.load > LOAD_FACTOR * mean + SLACK
