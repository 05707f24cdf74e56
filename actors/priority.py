"""Who goes first in an engine's queue. vLLM starts the lowest number first, and equals by their arrival."""

from __future__ import annotations

from gateway.protocol.requests import CreateRequest

PRIMING = 100
"""Of a warm-up's prefix: after every turn, as nobody waits for it yet."""
BACKGROUND = 5
"""What a turn without a waiting client adds to its tier's number."""

_TIERS = {"priority": -10, "fast": -10, "ultrafast": -10, "flex": 10}


def priority_of(request: CreateRequest) -> int:
    """The priority of a turn, and of the compaction before it, by `service_tier` and `background`."""
    return _TIERS.get(request.service_tier or "auto", 0) + BACKGROUND * request.background
