"""Records of turns that are over, made up."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Record:
    """As `actors.ledger.Recorded`. A turn of 2.0 s: 0.05 s until it was submitted, 1.9 s of engine, 0.05 s after."""

    response_id: str = "resp_1"
    tenant: str = "acme"
    key: str = "0a1b"
    model: str = "m"
    outcome: str = "completed"
    created_at: int = 1_700_000_000
    input_tokens: int = 1000
    cached_tokens: int = 600
    output_tokens: int = 50
    reasoning_tokens: int = 20
    encoded_tokens: int = 30
    reused_tokens: int = 900
    started: float = 100.0
    submitted: float | None = 100.05
    first_chunk: float | None = 100.25
    finished: float | None = 102.0
    ended: float | None = 107.0
    inference_s: float = 1.9
    away_s: float = 0.0
    tool_s: float | None = 3.0
