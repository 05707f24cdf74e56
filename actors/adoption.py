"""A stored conversation moves from the actor that owns it to the one that is asked to continue it.

Responses are immutable, so adopting one is copying it: both actors may continue it afterwards, each making a branch
(protocol.md 4.2 allows that for stored responses).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from actors.conversation import Response
from actors.tokencache import EMPTY


def flatten(response: Response) -> list[Response]:
    """The lineage oldest first, each without its parent and with only the ids that it added: deep chains survive
    pickling. What an engine knows of them is of no use elsewhere, and holds the whole head."""
    chain = list(response.lineage())
    chain.reverse()
    return [replace(turn, parent=None, tokens=EMPTY.extend(turn.tokens.tail(turn.kept)), sent=None) for turn in chain]


def restore(chain: Sequence[Response]) -> Response:
    """The inverse of `flatten`. Raises ValueError for an empty chain."""
    parent: Response | None = None
    for turn in chain:
        before = EMPTY if parent is None else parent.tokens.cut(turn.kept)
        parent = replace(turn, parent=parent, tokens=before.extend(turn.tokens.ids))
    if parent is None:
        raise ValueError("an empty chain has no newest response")
    return parent
