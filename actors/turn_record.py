"""What one turn cost and how long its parts took."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gateway.protocol.response import Usage


@dataclass(slots=True)
class TurnRecord:
    """What one turn cost and how long its parts took (seconds, monotonic); for logs, metrics and the ledger, never
    content. `actors.ledger.Recorded` says what each field means."""

    response_id: str
    tenant: str
    key: str
    model: str
    created_at: int
    started: float
    tool_s: float | None = None
    head_tokens: int = 0
    reused_tokens: int = 0
    encoded_tokens: int = 0
    rendered_items: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0
    inference_s: float = 0.0
    away_s: float = 0.0
    submitted: float | None = None
    first_chunk: float | None = None
    finished: float | None = None
    ended: float | None = None
    outcome: str = "running"
    accounted: bool = False

    def spent(self, usage: Usage) -> Usage:
        """Take over what the client is told of its tokens."""
        self.input_tokens, self.output_tokens = usage.input_tokens, usage.output_tokens
        self.reasoning_tokens = usage.reasoning_tokens
        return usage

    def worked(self, since: float) -> float:
        """The engine has worked since then; what time it is now."""
        now = time.monotonic()
        self.inference_s += now - since
        return now
