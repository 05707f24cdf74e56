"""What a socket's machine tells its shell to do. `gateway.protocol.connection` makes these, the transport obeys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_MAX_REASON_BYTES = 123  # RFC 6455 5.5: a control frame holds 125 bytes, two of them are the code


@dataclass(frozen=True, slots=True)
class Start:
    """Run this create on this lane. Answer with exactly one `turn_ended`, however it ends, a bad body included.

    `automatic`: no client sent it, it continues a steered response (3.8). If it is refused before `response.created`,
    no error frame is sent and its parent stays: `turn_ended` takes the refusal and gives the input back.
    """

    lane: str | None
    frame: dict[str, Any]
    automatic: bool = False


@dataclass(frozen=True, slots=True)
class Send:
    """Send this frame."""

    frame: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Tell:
    """Put this event into the stream of the lane's running response, which numbers it (3.2)."""

    lane: str | None
    kind: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Steer:
    """Have the lane's response end at its next safe boundary, unless it ends by itself before that (3.8)."""

    lane: str | None


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Stop the lane's response now: the engine is aborted, unfinished items are discarded (3.8)."""

    lane: str | None


@dataclass(frozen=True, slots=True)
class Append:
    """Give this `response.append` to the lane's running response, which may wait for it (docs/rollout-extension.md)."""

    lane: str | None
    frame: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Cancel:
    """Stop the lane's running turn; its `turn_ended` is still owed.

    Unless the client is lost, a `Close` follows in the same list. Actions are carried out in order, so a turn that can
    end its stream at once (`response.failed`) does so before the close.
    """

    lane: str | None


@dataclass(frozen=True, slots=True)
class Close:
    """Close the socket with this code and reason. At most one in a connection's life, and the last action in it."""

    code: int
    reason: str

    def __post_init__(self) -> None:
        # 1004 to 1006 and 1015 must not be sent; beyond 1014 only the private ranges (RFC 6455 7.4).
        if not (1000 <= self.code <= 1003 or 1007 <= self.code <= 1014 or 3000 <= self.code <= 4999):
            raise ValueError(f"{self.code} is not a close code that may be sent")
        if len(self.reason.encode()) > _MAX_REASON_BYTES:
            raise ValueError(f"a close reason has at most {_MAX_REASON_BYTES} bytes")


Control = Tell | Steer | Interrupt | Append
"""Carried out in the same step in which they were decided: a moment later the response may have ended."""

Action = Start | Send | Control | Cancel | Close
