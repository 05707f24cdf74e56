"""Deltas as rows of plain values, for the engines that take their output apart themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, cast

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Delta,
    Logprob,
    MessageStart,
    Phase,
    ReasoningDelta,
    ReasoningEnd,
    RefusalDelta,
    SummaryDelta,
    TextDelta,
)

DeltaRow = tuple[int, str, str | None, tuple[Logprob, ...]]
"""(what it is; its text or name; a call's namespace, a message's phase or a summary's part; log-probabilities of the
text)"""


class _Code:
    TEXT: Final = 0
    REFUSAL: Final = 1
    REASONING: Final = 2
    CALL_PIECE: Final = 3
    FUNCTION: Final = 4
    CUSTOM: Final = 5
    CALL_END: Final = 6
    MESSAGE: Final = 7
    REASONING_END: Final = 8
    SUMMARY: Final = 9


_PLAIN: Final[dict[type, int]] = {
    RefusalDelta: _Code.REFUSAL,
    ReasoningDelta: _Code.REASONING,
    CallDelta: _Code.CALL_PIECE,
}
"""Those that are one text and nothing else."""
_BY_CODE: Final[dict[int, Callable[[str], Delta]]] = {code: kind for kind, code in _PLAIN.items()}
_PHASES: Final = (None, "commentary", "final_answer")


def pack_deltas(deltas: Iterable[Delta]) -> list[DeltaRow]:
    """One row for each delta."""
    return [_row(delta) for delta in deltas]


def _row(delta: Delta) -> DeltaRow:
    if (code := _PLAIN.get(type(delta))) is not None:
        return (code, delta.text, None, ())  # type: ignore[union-attr]
    match delta:
        case TextDelta():
            return (_Code.TEXT, delta.text, None, delta.logprobs)
        case CallStart():
            return (_Code.FUNCTION if delta.kind == "function" else _Code.CUSTOM, delta.name, delta.namespace, ())
        case CallEnd():
            return (_Code.CALL_END, "", None, ())
        case MessageStart():
            return (_Code.MESSAGE, "", delta.phase, ())
        case ReasoningEnd():
            return (_Code.REASONING_END, delta.foreign, None, ())
        case SummaryDelta():
            return (_Code.SUMMARY, delta.text, str(delta.part), ())
    raise TypeError(f"{type(delta).__name__} is no delta")


def unpack_deltas(rows: Iterable[DeltaRow]) -> list[Delta]:
    """The inverse. Raises ValueError for a row that is none."""
    return [_delta(*row) for row in rows]


def _delta(code: int, text: str, extra: str | None, logprobs: tuple[Logprob, ...]) -> Delta:
    if (kind := _BY_CODE.get(code)) is not None:
        return kind(text)
    match code:
        case _Code.TEXT:
            return TextDelta(text, logprobs)
        case _Code.FUNCTION | _Code.CUSTOM:
            return CallStart("function" if code == _Code.FUNCTION else "custom", text, extra)
        case _Code.CALL_END:
            return CallEnd()
        case _Code.MESSAGE if extra in _PHASES:
            return MessageStart(cast("Phase | None", extra))
        case _Code.REASONING_END:
            return ReasoningEnd(text)
        case _Code.SUMMARY if extra is not None and extra.isdecimal():
            return SummaryDelta(text, int(extra))
    raise ValueError("no delta looks like this")
