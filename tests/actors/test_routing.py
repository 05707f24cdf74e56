"""Prefix affinity with bounded load."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from actors.routing import LOAD_FACTOR, SLACK, Candidate, overloaded, route

candidates = st.dictionaries(
    st.sampled_from("abcdef"), st.builds(Candidate, st.integers(0, 200), st.integers(0, 50)), min_size=1
)


@given(candidates)
def test_a_new_conversation_goes_where_least_is_to_do(given: dict[str, Candidate]) -> None:
    assert given[route(None, given)].load == min(each.load for each in given.values())


@given(candidates, st.sampled_from("abcdef"))
def test_a_conversation_stays_unless_its_replica_is_gone_or_overloaded(
    given: dict[str, Candidate], wanted: str
) -> None:
    chosen = route(wanted, given)
    if wanted in given and not overloaded(given[wanted], given):
        assert chosen == wanted
    else:
        assert given[chosen].load == min(each.load for each in given.values())


@given(candidates, st.sampled_from("abcdef"))
def test_load_is_bounded_and_an_idle_queue_moves_nobody(given: dict[str, Candidate], name: str) -> None:
    if name not in given:
        return
    mean = sum(each.load for each in given.values()) / len(given)
    if overloaded(given[name], given):
        assert given[name].waiting
        assert given[name].load > LOAD_FACTOR * mean + SLACK
        assert route(name, given) != name
