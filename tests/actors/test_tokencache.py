"""The token cache shares, never copies, and gives back exactly what was put in."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.tokencache import EMPTY, Tokens


def ids(*values: int) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def test_length_counts_the_whole_chain() -> None:
    assert len(EMPTY.extend(ids(1, 2)).extend(ids(3))) == 3


def test_extending_leaves_the_original_alone() -> None:
    base = EMPTY.extend(ids(1))
    left, right = base.extend(ids(2)), base.extend(ids(3))

    assert (base.tail(0), left.tail(0), right.tail(0)) == (ids(1), ids(1, 2), ids(1, 3))


def test_a_fork_shares_the_history() -> None:
    base = EMPTY.extend(ids(*range(1000)))

    assert base.extend(ids(1)).parts()[1] is base.extend(ids(2)).parts()[1] is base.ids


def test_adding_nothing_adds_no_node() -> None:
    base = EMPTY.extend(ids(1))

    assert base.extend(b"") is base


def test_half_a_token_is_refused() -> None:
    with pytest.raises(ValueError, match="whole number"):
        Tokens(None, b"abc")


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=5), max_size=20))
def test_a_chain_is_the_concatenation_of_its_parts(groups: list[list[int]]) -> None:
    chain = EMPTY
    for group in groups:
        chain = chain.extend(ids(*group))

    assert chain.tail(0) == b"".join(ids(*group) for group in groups)
    assert len(chain) == sum(map(len, groups))


chains = st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5), min_size=1, max_size=20)


@given(chains, st.data())
def test_a_cut_keeps_the_first_ids_and_the_segments_they_are_in(groups: list[list[int]], data: st.DataObject) -> None:
    chain = EMPTY
    for group in groups:
        chain = chain.extend(ids(*group))
    at = data.draw(st.integers(0, len(chain)))

    cut = chain.cut(at)

    assert (len(cut), cut.tail(0)) == (at, chain.tail(0)[: 4 * at])
    assert all(new is old for new, old in zip(cut.parts()[:-1], chain.parts(), strict=False))
    assert chain.tail(at) == chain.tail(0)[4 * at :]


@pytest.mark.parametrize("count", [-1, 3])
def test_more_than_there_is_cannot_be_cut(count: int) -> None:
    with pytest.raises(ValueError, match="of 2 token ids"):
        EMPTY.extend(ids(1, 2)).cut(count)
