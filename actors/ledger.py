"""The usage ledger: one entry for each response on which an engine worked, whatever became of it. Never content.

Where a turn's time went is split in buckets (design.md section 1):

    client tool time   terminal event of the turn before made -> this request received; in a rollout also the waits for
                       appended outputs
    inference          handed to the engine -> its last chunk, over all generations of the turn
    gateway overhead   all the rest, from the request to the terminal event
    post-processing    `actors.postwork` tells that, later
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from actors.store.jobs import PutUsage


class Recorded(Protocol):
    """What is read of a turn's record: `actors.turn.TurnRecord`. Seconds; `started` and the like on one monotonic
    clock, None for what did not happen.

    `model` is the model's own name, not what the request called it. `tenant` and `key` name who asked: digests, never a
    key. `finished` is when the terminal event was made, `ended` when nothing of the turn went on any more.
    `inference_s` is the sum over its generations; `away_s` what it waited for its client's tools; `tool_s` the client's
    time before the turn, None for a lane's first. `input_tokens`, `output_tokens` and `reasoning_tokens` count all
    generations, those that were cut off too.
    """

    response_id: str
    tenant: str
    key: str
    model: str
    outcome: str
    created_at: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    encoded_tokens: int
    reused_tokens: int
    started: float
    submitted: float | None
    first_chunk: float | None
    finished: float | None
    ended: float | None
    inference_s: float
    away_s: float
    tool_s: float | None


@dataclass(frozen=True, slots=True)
class Buckets:
    """Where the time of one turn went, seconds, none below 0. `tool_s` is None when there was no tool to wait for, as
    far as the gateway can know."""

    inference_s: float
    overhead_s: float
    tool_s: float | None

    @classmethod
    def of(cls, record: Recorded) -> Buckets:
        """Of a turn that is over. What it took after its terminal event, to be read by its client, is nobody's."""
        overhead = _total(record) - record.inference_s - record.away_s
        tool = record.tool_s
        if record.away_s:
            tool = record.away_s + (tool or 0.0)
        return cls(max(0.0, record.inference_s), max(0.0, overhead), tool)


def usage_entry(record: Recorded) -> PutUsage | None:
    """The entry of a turn that is over; None if there is nothing to account for: it was refused or cut off before an
    engine had worked for it. A warm-up is accounted for by its outcome, as its engine works later."""
    worked = record.submitted is not None or record.output_tokens or record.inference_s
    if not worked and record.outcome not in ("completed", "incomplete"):
        return None
    buckets = Buckets.of(record)
    return PutUsage(
        tenant=record.tenant,
        id=record.response_id,
        key=record.key,
        model=record.model,
        status=record.outcome,
        created_at=record.created_at,
        input_tokens=record.input_tokens,
        # An engine counts a whole block that it has, our prompt may end inside of it.
        cached_tokens=min(record.cached_tokens, record.input_tokens),
        output_tokens=record.output_tokens,
        reasoning_tokens=record.reasoning_tokens,
        first_token_ms=None if record.first_chunk is None else _ms(record.first_chunk - record.started),
        total_ms=_ms(_total(record)),
        inference_ms=_ms(buckets.inference_s),
        overhead_ms=_ms(buckets.overhead_s),
        tool_ms=None if buckets.tool_s is None else _ms(buckets.tool_s),
    )


def _total(record: Recorded) -> float:
    end = record.ended if record.finished is None else record.finished
    return 0.0 if end is None else max(0.0, end - record.started)


def _ms(seconds: float) -> int:
    return max(0, round(seconds * 1000))
