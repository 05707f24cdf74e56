"""What can be done to a response when, and what becomes of it: the tables behind `gateway.protocol.steering`.

Source: spec/protocol.md 3.8 (sequences and codes), 2.2 and 2.3 (what a steer and an interrupt may name).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

# Theory
# ------
# Only the newest response of a lane can be steered or interrupted:
#
#   stage         meaning                                        steer             interrupt
#   RUNNING       created, no terminal event yet                 accepted          accepted
#   INTERRUPTED   as RUNNING, and told to stop                   not_active        not_active
#   WAITING       ended with calls that wait for outputs         accepted          already_completed
#   COMPLETED     ended by itself, or its continuation started   already_completed already_completed
#   ENDED         incomplete or failed                           not_active        not_active
#   (none)        unknown here, or too long ago                  not_found         not_found
#
# An accepted steer is owned by the server until one of four things happens to it, in this order of preference:
#
#   its response runs   the response is cut at a safe boundary, or ends by itself; if it can go on without the client
#                       the successor starts at once, in the same slot, before anything queued on the lane
#   it waits            `pending` is sent once for each steer, unless the client's create is there already; that create
#                       takes all steers, in front of its own input
#   a turn took it      the turn's `response.created` commits it; a turn that is refused before that gives it back
#   nothing will        `response.steer.failed` gives the input back: the response failed or was interrupted, another
#                       one started on its lane, or the socket is about to end
#
# A response that was interrupted starts no successor: its client stopped it to say something else, and does so itself.
#
# Between the terminal event being made and being sent, answers wait (`held`), so that they come behind it.


class Stage(Enum):
    """Where the newest response of a lane is."""

    RUNNING = "running"
    INTERRUPTED = "interrupted"
    WAITING = "waiting for outputs"
    COMPLETED = "completed"
    ENDED = "ended"


class Verb(Enum):
    """What a client wants of a response."""

    STEER = "steer"
    INTERRUPT = "interrupt"


class Event(Enum):
    """What happens to a response."""

    INTERRUPT = "an interrupt was accepted"
    WAITS = "its terminal event exists, and calls wait for outputs"
    COMPLETES = "its terminal event exists, and it is complete"
    ENDS = "its terminal event exists, and it is not"
    CONTINUED = "another response started on its lane"


ACCEPT: Final = "accept"
DONE: Final = "response_already_completed"
GONE: Final = "response_not_active"

ANSWERS: Final[dict[tuple[Stage, Verb], str]] = {
    (Stage.RUNNING, Verb.STEER): ACCEPT,
    (Stage.RUNNING, Verb.INTERRUPT): ACCEPT,
    (Stage.INTERRUPTED, Verb.STEER): GONE,
    (Stage.INTERRUPTED, Verb.INTERRUPT): GONE,
    (Stage.WAITING, Verb.STEER): ACCEPT,
    (Stage.WAITING, Verb.INTERRUPT): DONE,
    (Stage.COMPLETED, Verb.STEER): DONE,
    (Stage.COMPLETED, Verb.INTERRUPT): DONE,
    (Stage.ENDED, Verb.STEER): GONE,
    (Stage.ENDED, Verb.INTERRUPT): GONE,
}

# Missing pairs are illegal: the caller lost count.
MOVES: Final[dict[tuple[Stage, Event], Stage]] = {
    (Stage.RUNNING, Event.INTERRUPT): Stage.INTERRUPTED,
    **{(stage, Event.WAITS): Stage.WAITING for stage in (Stage.RUNNING, Stage.INTERRUPTED)},
    **{(stage, Event.COMPLETES): Stage.COMPLETED for stage in (Stage.RUNNING, Stage.INTERRUPTED)},
    **{(stage, Event.ENDS): Stage.ENDED for stage in (Stage.RUNNING, Stage.INTERRUPTED)},
    (Stage.WAITING, Event.CONTINUED): Stage.COMPLETED,
    (Stage.COMPLETED, Event.CONTINUED): Stage.COMPLETED,
    (Stage.ENDED, Event.CONTINUED): Stage.ENDED,
}

RUNS = (Stage.RUNNING, Stage.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Ending:
    """How a response ended. `required` are the stubs of the outputs it waits for; `sequence` is the number that follows
    its terminal event's."""

    status: str
    reason: str | None
    required: tuple[dict[str, Any], ...]
    sequence: int

    @property
    def event(self) -> Event:
        """What it means for the response."""
        if self.status != "failed" and self.required:
            return Event.WAITS
        return Event.COMPLETES if self.status == "completed" else Event.ENDS

    @property
    def can_go_on(self) -> bool:
        """Whether the server may continue it by itself."""
        return self.status != "failed" and self.reason != "interrupted"


LAST: Final = "This connection is about to close and starts no more responses. Send this input on a new one."
WHY: Final[dict[str, str]] = {
    "response_not_found": "No such response is known on this connection.",
    DONE: "The response has completed. Send this in a response.create that continues it.",
    GONE: "The response is no longer active. Send this in a response.create.",
    "too_many_pending_steers": "Too much steering input waits for this response. Send its tool outputs, or wait for "
    "its continuation.",
}
