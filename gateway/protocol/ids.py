"""Ids, and who owns them.

A response id carries the tag of the actor that made it, so that a request that lands elsewhere can be sent to the
owner: `resp_<owner tag, 8 hex digits><32 hex digits>`. Other ids carry no owner.
"""

from __future__ import annotations

import re
from collections.abc import Callable

OWNER_DIGITS = 8
_RESPONSE_ID = re.compile(r"resp_([0-9a-f]{8})[0-9a-f]{32}\Z")
_OWNER = re.compile(r"[0-9a-f]{8}\Z")


class IdSource:
    """Makes ids for one owner. `random_hex(n)` returns 2n hex digits (`secrets.token_hex` outside tests)."""

    __slots__ = ("_random_hex", "owner")

    def __init__(self, owner: str, random_hex: Callable[[int], str]) -> None:
        if not _OWNER.match(owner):
            raise ValueError(f"an owner tag is {OWNER_DIGITS} lower-case hex digits, not {owner!r}")
        self.owner = owner
        self._random_hex = random_hex

    def response(self) -> str:
        """A response id that names its owner."""
        return f"resp_{self.owner}{self._random_hex(16)}"

    def item(self, prefix: str) -> str:
        """An item or call id: `msg_…`, `fc_…`, `ctc_…`, `rs_…`, `call_…`, `cmp_…`."""
        return f"{prefix}_{self._random_hex(16)}"


def owner_of(response_id: str) -> str | None:
    """The owner's tag, or None for an id that this gateway never made."""
    found = _RESPONSE_ID.match(response_id)
    return found[1] if found else None
