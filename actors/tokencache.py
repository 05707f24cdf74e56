"""The token cache: rendered ids of a conversation, append-only, shared between forks.

A `Tokens` value is one node of a chain: its own ids and the node it continues. Nothing is ever changed, and a fork or
a cut costs one node whatever the length of the history: all branches share what they have in common.
Ids are little-endian unsigned 32-bit integers (4 bytes a token), the form in which they travel to the engine.
"""

from __future__ import annotations

ID_BYTES = 4


class Tokens:
    """A run of token ids. `len()` counts all ids from the root of the chain to here."""

    __slots__ = ("_count", "ids", "parent")

    def __init__(self, parent: Tokens | None, ids: bytes) -> None:
        if len(ids) % ID_BYTES:
            raise ValueError(f"{len(ids)} bytes are no whole number of {ID_BYTES}-byte token ids")
        self.parent = parent
        self.ids = ids
        self._count = (0 if parent is None else len(parent)) + len(ids) // ID_BYTES

    def __len__(self) -> int:
        return self._count

    def extend(self, ids: bytes) -> Tokens:
        """A chain that continues this one; this one stays as it is."""
        return Tokens(self, ids) if ids else self

    def parts(self) -> list[bytes]:
        """The segments, oldest first."""
        found: list[bytes] = []
        node: Tokens | None = self
        while node is not None:
            found.append(node.ids)
            node = node.parent
        found.reverse()
        return found

    def cut(self, count: int) -> Tokens:
        """A chain of the first `count` ids. Copies part of one segment at most; raises ValueError for more than there
        are."""
        if not 0 <= count <= len(self):
            raise ValueError(f"{count} of {len(self)} token ids")
        last, node = self, self if len(self) <= count else self.parent
        while node is not None and len(node) > count:
            last, node = node, node.parent
        before = EMPTY if node is None else node
        return before if len(before) == count else before.extend(last.ids[: (count - len(before)) * ID_BYTES])

    def tail(self, start: int) -> bytes:
        """The ids from position `start` to the end, in one piece. Touches no older segment."""
        found: list[bytes] = []
        node: Tokens | None = self
        while node is not None and len(node) > start:
            before = 0 if node.parent is None else len(node.parent)
            found.append(node.ids[max(0, start - before) * ID_BYTES :])
            node = node.parent
        found.reverse()
        return b"".join(found)


EMPTY = Tokens(None, b"")
