"""Thoughts that a template forgets, and histories that outgrow the model: what of the token cache stays.

The cache is append-only with two exceptions, both cuts at a boundary that is known beforehand:

- A template that shows thoughts only until the talk moves on (`Format.forgets`): the context is cut back to where the
  thoughts of the newest round began, which is right behind a user message, and what followed is rendered again without
  them. Older rounds have lost theirs before, so this costs O(round), once a round.
- `truncation: auto`: the oldest turns go, so many that it need not happen again soon.

Pure. Sources: bugs.md O-63 to O-65, protocol.md 2.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from actors.conversation import Continuation, Response, Round
from actors.tokencache import EMPTY
from gateway.protocol.items import Item, Message, Reasoning
from inference.formats.format import Format

KEPT_SHARE = 0.75
"""Of the context, what a truncation leaves at most: it breaks the engine's prefix cache, so it must be rare."""


def remembered(link: Continuation, form: Format) -> Continuation:
    """The link as the template shows it: cut back if the new items make it forget thoughts."""
    parent = link.parent
    if not form.forgetful or parent is None or link.round is None:
        return link
    thought = parent.latest(link.round.items)
    if not form.forgets(thought, link.body):
        return link
    return replace(link, tokens=parent.tokens.cut(link.round.start), body=(*thought, *link.body), calls={}, round=None)


def newest_round(items: Sequence[Item], form: Format) -> int:
    """Where the newest round begins: behind the last user message. At the start if there is none, or if the template
    goes on showing the thoughts in front of it."""
    at = next((at for at in reversed(range(len(items))) if is_from_user(items[at])), -1)
    before = items[: max(at, 0)]
    goes_on = any(isinstance(item, Reasoning) for item in before) and not form.forgets(before, items[at : at + 1])
    return 0 if goes_on else at + 1


def is_from_user(item: Item) -> bool:
    """Whether a person wrote this."""
    return isinstance(item, Message) and item.role == "user"


def round_of(link: Continuation, start: int, skipped: int, items: int) -> Round:
    """The round that the next turn may cut back: the parent's goes on unless it was cut. Otherwise it is the body's
    newest, whose ids start at position `start`. `items` is how many the model adds, `skipped` how many of the body are
    older."""
    if link.round is not None:
        return Round(link.round.start, link.round.items + len(link.body) + items)
    return Round(start, len(link.body) - skipped + items)


def truncated(link: Continuation, most: int) -> tuple[Continuation, bytes] | None:
    """The link without the oldest turns, and the ids of those that are left, at most `most` tokens: they are to be put
    in front of the body. None if there is no turn to leave out."""
    length = len(link.tokens)
    if link.parent is None or not length:
        return None
    fitting = [at for at in _starts(link.parent, length) if length - at <= most]
    at = min(fitting, default=length)
    shifted = None if link.round is None or link.round.start < at else Round(link.round.start - at, link.round.items)
    return replace(link, tokens=EMPTY, round=shifted), link.tokens.tail(at)


def _starts(response: Response, length: int) -> Iterator[int]:
    """Positions among the first `length` ids at which a turn begins with a user message, newest first."""
    for turn in response.lineage():
        if 0 < turn.begins < length and turn.items and is_from_user(turn.items[0]):
            yield turn.begins
        length = min(length, turn.kept)


def without_oldest(items: Sequence[Item]) -> Sequence[Item]:
    """These items without their oldest round; nothing if there is only one."""
    return next((items[at:] for at in range(1, len(items)) if is_from_user(items[at])), ())
