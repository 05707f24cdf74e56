"""Reasoning that a client carries for us: sealed on the way out, opened on the way back (protocol.md 4.5).

A client without stored state replays reasoning items with their `encrypted_content`, with or without the text. What we
sealed is the raw text, so an opened item is rendered exactly as the one that was emitted; and with it what an upstream
gave for itself (`Reasoning.foreign`), so that its thoughts go on, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson

from gateway.protocol.items import Item, Reasoning, ReasoningText
from gateway.protocol.open_items import Seal
from gateway.protocol.requests import CreateRequest

if TYPE_CHECKING:
    from actors.session import Session


def reasoning_seal(session: Session, request: CreateRequest) -> Seal | None:
    """What makes `encrypted_content` of a thought, if the request includes it."""
    if "reasoning.encrypted_content" not in request.include:
        return None
    sealer, tenant = session.actor.sealer, session.tenant

    def seal(text: str, foreign: str | None) -> str:
        if foreign is None:
            return sealer.seal("reasoning", tenant, text.encode())
        return sealer.seal("foreign_reasoning", tenant, orjson.dumps([text, foreign]))

    return seal


def opened(session: Session, items: Sequence[Item]) -> tuple[Item, ...]:
    """The items, with the text of sealed reasoning put in.

    A blob that does not open is no error for the client: its item is dropped, unless it brings its text in the open
    anyway. Both are counted.
    """
    if not any(isinstance(item, Reasoning) and item.encrypted_content is not None for item in items):
        return tuple(items)
    return tuple(found for item in items if (found := _opened(session, item)) is not None)


def _opened(session: Session, item: Item) -> Item | None:
    if not isinstance(item, Reasoning) or item.encrypted_content is None:
        return item
    sealer, tenant = session.actor.sealer, session.tenant
    if (sealed := sealer.open("reasoning", tenant, item.encrypted_content)) is not None:
        return replace(item, content=(ReasoningText(sealed.decode()),))
    if (sealed := sealer.open("foreign_reasoning", tenant, item.encrypted_content)) is not None:
        text, foreign = orjson.loads(sealed)
        return replace(item, content=(ReasoningText(text),) if text else item.content, foreign=foreign)
    session.actor.counters.unopened_blobs += 1
    return item if item.content or item.summary or item.foreign is not None else None
