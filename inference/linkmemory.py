"""What a link server remembers of the prompts it was sent, so that they need not be sent again. Pure.

One entry for each generation of a connection: its prompt and what was sampled since, as delivered. An entry from which
a later generation has borrowed is the first to go when room is needed: mostly the later one has taken its place, as a
conversation goes on from its newest turn. Otherwise the oldest goes first.
"""

from __future__ import annotations

import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

from inference.linkframes import Base
from inference.tokenizer import pack_ids

MEMORY_BYTES = 256 * 2**20
"""Most that one server remembers: the newest turns of 650 conversations of 100,000 tokens each."""
_ENTRY_BYTES = 1024  # counted for each entry beside its ids


class Remembered:
    """One generation. `checksum` is the CRC-32 of its prompt, once that is known."""

    __slots__ = ("checksum", "name", "owner", "prompt", "sampled")

    def __init__(self, owner: int, name: str, prompt: bytes, checksum: int | None) -> None:
        self.owner, self.name, self.prompt, self.checksum = owner, name, prompt, checksum
        self.sampled = array("I")

    @property
    def size(self) -> int:
        """Bytes it counts for."""
        return _ENTRY_BYTES + len(self.prompt) + self.sampled.itemsize * len(self.sampled)

    def checksum_of(self, start: memoryview, more: bytes) -> int:
        """CRC-32 of the prompt's start and what follows it. That of a whole prompt is kept."""
        if len(start) < len(self.prompt):
            return zlib.crc32(more, zlib.crc32(start))
        if self.checksum is None:
            self.checksum = zlib.crc32(start)
        return zlib.crc32(more, self.checksum)


class PromptMemory:
    """Generations by connection and request id, `limit` bytes of them at most."""

    def __init__(self, limit: int = MEMORY_BYTES) -> None:
        self._limit = limit
        self._size = 0
        self._order: OrderedDict[Remembered, None] = OrderedDict()  # the next to go first
        self._owners: dict[int, dict[str, Remembered]] = {}

    @property
    def size(self) -> int:
        """Bytes in use."""
        return self._size

    def remember(self, owner: int, name: str, prompt: bytes, checksum: int | None = None) -> Remembered:
        """A generation begins; it takes the place of an earlier one of that name. One too large is remembered by its
        caller alone. `checksum` is the prompt's CRC-32, if that is known."""
        if (earlier := self._owners.get(owner, {}).get(name)) is not None:
            self._drop(earlier)
        entry = Remembered(owner, name, prompt, checksum)
        if entry.size > self._limit:
            return entry
        self._order[entry] = None
        self._owners.setdefault(owner, {})[name] = entry
        self._size += entry.size
        self._shrink()
        return entry

    def extend(self, entry: Remembered, ids: Sequence[int]) -> None:
        """Ids were sampled."""
        if entry in self._order:
            entry.sampled.extend(ids)
            self._size += entry.sampled.itemsize * len(ids)
            self._shrink()

    def complete(self, owner: int, base: Base, rest: bytes) -> tuple[bytes, int] | None:
        """(the whole prompt, its CRC-32); None if the base isn't there, is too short, or isn't what the client takes it
        for. Reads what is new, and all of it only where a base is cut within its prompt or was sent whole."""
        entry = self._owners.get(owner, {}).get(base.request_id)
        if entry is None or 4 * (base.total - base.length) != len(rest):
            return None
        count = len(entry.prompt) // 4
        more = pack_ids(entry.sampled[: max(base.length - count, 0)])
        start = memoryview(entry.prompt)[: 4 * base.length]
        if len(start) + len(more) != 4 * base.length or entry.checksum_of(start, more) != base.checksum:
            return None
        self._order.move_to_end(entry, last=False)
        return b"".join((start, more, rest)), zlib.crc32(rest, base.checksum)

    def forget(self, owner: int) -> None:
        """The connection is gone."""
        for entry in list(self._owners.get(owner, {}).values()):
            self._drop(entry)

    def _shrink(self) -> None:
        while self._size > self._limit:
            self._drop(next(iter(self._order)))

    def _drop(self, entry: Remembered) -> None:
        del self._order[entry]
        names = self._owners[entry.owner]
        del names[entry.name]
        if not names:
            del self._owners[entry.owner]
        self._size -= entry.size
