"""What a link server remembers of prompts, against a model that remembers everything."""

from __future__ import annotations

import zlib

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from inference.linkframes import Base
from inference.linkmemory import PromptMemory, Remembered
from inference.tokenizer import pack_ids

ids = st.lists(st.integers(0, 3), max_size=30)  # few different ones, so that contents coincide
owners = st.integers(0, 2)
names = st.sampled_from("abcd")


def whole(prompt: list[int]) -> tuple[bytes, int]:
    packed = pack_ids(prompt)
    return packed, zlib.crc32(packed)


class Memory(RuleBasedStateMachine):
    """The memory may forget, but never completes a prompt to anything but what the client meant."""

    @initialize(limit=st.sampled_from([0, 1500, 4000, 100_000]))
    def start(self, limit: int) -> None:
        self.limit = limit
        self.memory = PromptMemory(limit)
        self.entries: dict[tuple[int, str], Remembered] = {}
        self.truth: dict[tuple[int, str], list[int]] = {}

    @rule(owner=owners, name=names, prompt=ids, known=st.booleans())
    def begin(self, owner: int, name: str, prompt: list[int], known: bool) -> None:
        packed, checksum = whole(prompt)
        self.entries[owner, name] = self.memory.remember(owner, name, packed, checksum if known else None)
        self.truth[owner, name] = list(prompt)

    @rule(owner=owners, name=names, sampled=ids)
    def sample(self, owner: int, name: str, sampled: list[int]) -> None:
        if (owner, name) in self.entries:
            self.memory.extend(self.entries[owner, name], sampled)
            if (owner, name) in self.truth:  # else the connection is lost, and an old task still delivers
                self.truth[owner, name] += sampled

    @rule(owner=owners)
    def lose(self, owner: int) -> None:
        self.memory.forget(owner)
        for key in [key for key in self.truth if key[0] == owner]:
            del self.truth[key]

    @rule(owner=owners, name=names, rest=ids, cut=st.integers(1, 60))
    def right(self, owner: int, name: str, rest: list[int], cut: int) -> None:
        known = self.truth.get((owner, name), [])[:cut]
        if known:
            base = Base(name, len(known), zlib.crc32(pack_ids(known)), len(known) + len(rest))
            got = self.memory.complete(owner, base, pack_ids(rest))
            assert got == whole(known + rest) or (got is None and self.limit < 100_000)
        else:
            assert self.memory.complete(owner, Base(name, cut, 0, cut), b"") is None

    @rule(owner=owners, name=names, claimed=ids.filter(bool), rest=ids, off=st.integers(-1, 1))
    def wrong(self, owner: int, name: str, claimed: list[int], rest: list[int], off: int) -> None:
        base = Base(name, len(claimed), zlib.crc32(pack_ids(claimed)), len(claimed) + len(rest) + off)
        got = self.memory.complete(owner, base, pack_ids(rest))
        same = self.truth.get((owner, name), [])[: len(claimed)] == claimed
        assert got is None or (same and not off and got == whole(claimed + rest))

    @invariant()
    def bounded(self) -> None:
        assert self.memory.size <= self.limit
        assert self.memory.size == sum(entry.size for entry in self.memory._order)


Memory.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestMemory = Memory.TestCase


def test_what_a_later_turn_has_taken_over_is_forgotten_first() -> None:
    entry = PromptMemory().remember(1, "x", bytes(4000)).size
    memory = PromptMemory(3 * entry)
    for name in ("old", "base", "other"):
        memory.remember(1, name, bytes(4000))
    base = Base("base", 1000, zlib.crc32(bytes(4000)), 1000)
    assert memory.complete(1, base, b"") == (bytes(4000), base.checksum)
    memory.remember(1, "next", bytes(4000))
    left = {name for name in ("old", "base", "other", "next") if memory.complete(1, _all_of(name), b"") is not None}
    assert left == {"old", "other", "next"}


def _all_of(name: str) -> Base:
    return Base(name, 1000, zlib.crc32(bytes(4000)), 1000)
