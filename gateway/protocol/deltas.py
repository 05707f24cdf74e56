"""What a model produces, after its format has been parsed: the alphabet between parsers and the emitter.

A well-formed run is any sequence of: text and refusal and reasoning and summary deltas, `MessageStart`, `ReasoningEnd`,
and calls, each `CallStart`, `CallDelta`*, `CallEnd`. A change of kind ends the item before it; the emitter takes care
of that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

CallKind = Literal["function", "custom"]


Phase = Literal["commentary", "final_answer"]


class Logprob(NamedTuple):
    """Log-probability of one token of the text; `top` has alternatives as (bytes, log-probability), likeliest first."""

    token: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextDelta:
    """Visible text. Never empty, never half a code point. `logprobs` of its tokens, if they were asked for."""

    text: str
    logprobs: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class MessageStart:
    """What is being said is complete; text that follows is a message of its own, in this phase."""

    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class RefusalDelta:
    """Text of a refusal."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """Raw reasoning text of an open-weight model."""

    text: str


@dataclass(frozen=True, slots=True)
class SummaryDelta:
    """Text of a summary of reasoning, from an upstream that keeps the reasoning itself to itself. `part` counts the
    summary's parts, from 0."""

    text: str
    part: int = 0


@dataclass(frozen=True, slots=True)
class ReasoningEnd:
    """A thought is complete, one without any text that can be shown too. `foreign` is what its upstream wants back
    (`Reasoning.foreign`)."""

    foreign: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `name` is the tool's own name; `namespace` the group it was declared in, if any."""

    kind: CallKind
    name: str
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of the call's arguments (JSON text for a function, plain text for a custom tool)."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The call is complete. A call cut off by the token limit gets no `CallEnd`."""


Delta = (
    TextDelta
    | MessageStart
    | RefusalDelta
    | ReasoningDelta
    | SummaryDelta
    | ReasoningEnd
    | CallStart
    | CallDelta
    | CallEnd
)
