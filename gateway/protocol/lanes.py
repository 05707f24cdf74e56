"""The lanes of one socket: which turn may run now, as a table.

Source: spec/protocol.md 0, 2.1 and 4.7 (lanes and their limits), 8.1 and 8.2 (multiplex; queue, don't refuse), 5.2
(codes).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from gateway.protocol.errors import ApiError

# Theory
# ------
# A lane is an ordered line of turns: it runs one at a time, first in first out. Lanes run side by side as long as the
# socket has slots (`max_active`, default lane included). Each lane is one small machine with three states:
#
#   IDLE      nothing runs, nothing is queued
#   WAITING   nothing runs, at least one turn is queued: the lane stands in the socket's waiting line
#   RUNNING   one turn runs and holds a slot; any number may be queued behind it
#
# and the waiting line is the only thing that lanes share. Three rules follow, and everything else from them:
#
# 1. A lane joins the waiting line at its end, at the moment it becomes WAITING. A lane whose turn ends with more queued
#    becomes WAITING anew, so it stands behind every lane that already waits. That is the fairness: between joining and
#    starting, a lane is passed at most once by any other, whatever the others queue.
# 2. Free slots go to the front of the line. The caller asks (`start_ready`) after each submit and each end, so a lane
#    waits only while all slots are taken.
# 3. A queued turn is one that could not start at once. Only those count against the queue's bounds.
#
# `max_names` counts names that got a turn accepted. A refused create leaves no trace, so it doesn't use up a name.


class State(Enum):
    """What a lane is doing."""

    IDLE = "idle"
    WAITING = "waiting"
    RUNNING = "running"


class Event(Enum):
    """What happens to a lane."""

    SUBMIT = "a turn was accepted"
    SLOT_FREE = "the lane got a slot; its first queued turn starts"
    TURN_ENDED = "the running turn ended, nothing is queued behind it"
    TURN_ENDED_MORE = "the running turn ended, more are queued"
    DROP = "the queue was thrown away"


# Pairs that are missing are illegal: the caller lost count.
TABLE: Final[dict[tuple[State, Event], State]] = {
    (State.IDLE, Event.SUBMIT): State.WAITING,
    (State.WAITING, Event.SUBMIT): State.WAITING,
    (State.WAITING, Event.SLOT_FREE): State.RUNNING,
    (State.WAITING, Event.DROP): State.IDLE,
    (State.RUNNING, Event.SUBMIT): State.RUNNING,
    (State.RUNNING, Event.TURN_ENDED): State.IDLE,
    (State.RUNNING, Event.TURN_ENDED_MORE): State.WAITING,
    (State.RUNNING, Event.DROP): State.RUNNING,
}

_STREAM_ID = re.compile(r"[A-Za-z0-9_.-]{1,256}")


class Absent(Enum):
    """The value of a field that a frame doesn't have, which is not the same as null."""

    ABSENT = "absent"


ABSENT: Final = Absent.ABSENT


class LaneError(RuntimeError):
    """The caller made a move that the table forbids (not the client's fault). The state is as it was."""


@dataclass(frozen=True, slots=True)
class LaneLimits:
    """Bounds per socket. 16 and 32 are published (4.7); the queue's are ours, of the size that 4.7 recommends.

    `max_queued_bytes` counts the frames as they came; parsed they take several times as much. Twice the largest frame
    (16 MiB, 1.4), so that one turn of any legal size can wait.
    """

    max_active: int = 16
    max_names: int = 32
    max_queued: int = 64
    max_queued_bytes: int = 32 * 1024 * 1024

    def __post_init__(self) -> None:
        if self.max_active < 1 or min(self.max_names, self.max_queued, self.max_queued_bytes) < 0:
            raise ValueError(f"a socket needs at least one slot, and no bound may be negative: {self}")


def check_stream_id(value: object = ABSENT) -> str | None:
    """The lane that a `stream_id` names; None, the default lane, when the field is absent.

    null is refused like any other non-string (2.1: "non-string"; the SDK types have no null either): a client that
    means a lane and sends null would otherwise land, unnoticed, behind the default lane's turns.

    Raises:
        ApiError: `invalid_stream_id`; its frame must not carry a `stream_id`.
    """
    if value is ABSENT:
        return None
    if isinstance(value, str) and _STREAM_ID.fullmatch(value):
        return value
    raise ApiError(
        "invalid_stream_id",
        "stream_id must be a non-empty string of at most 256 characters: letters, digits, underscores, hyphens and"
        " periods. Leave it out for the default lane.",
        "stream_id",
    )


@dataclass(frozen=True, slots=True)
class _Turn:
    frame: dict[str, Any]
    size: int


@dataclass(slots=True)
class _Lane:
    state: State = State.IDLE
    queue: deque[_Turn] = field(default_factory=deque)


class Lanes:
    """All lanes of one socket. A lane's name is its `stream_id`, or None for the default lane.

    Call `start_ready` after `submit` and after `turn_ended`, and run what it returns.
    """

    __slots__ = ("_lanes", "_limits", "_queued", "_queued_bytes", "_running", "_waiting")

    def __init__(self, limits: LaneLimits) -> None:
        self._limits = limits
        self._lanes: dict[str | None, _Lane] = {None: _Lane()}
        # Ordered sets: who joined first stands first, and leaving from the middle is cheap.
        self._waiting: dict[str | None, None] = {}
        self._running: dict[str | None, None] = {}
        self._queued = 0
        self._queued_bytes = 0

    @property
    def running(self) -> tuple[str | None, ...]:
        """Lanes with a running turn, longest running first."""
        return tuple(self._running)

    @property
    def waiting(self) -> tuple[str | None, ...]:
        """Lanes that wait for a slot, longest waiting first."""
        return tuple(self._waiting)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing is queued."""
        return not self._running and not self._waiting

    @property
    def queued(self) -> int:
        """Turns accepted and not started."""
        return self._queued

    @property
    def queued_bytes(self) -> int:
        """Size of the queued frames as they came."""
        return self._queued_bytes

    @property
    def names(self) -> int:
        """Distinct named lanes used so far; never more than `max_names`."""
        return len(self._lanes) - 1

    def state_of(self, name: str | None) -> State:
        """The lane's state. IDLE for a name that was never used."""
        lane = self._lanes.get(name)
        return State.IDLE if lane is None else lane.state

    def queued_frames(self) -> Iterator[dict[str, Any]]:
        """Frames that wait. Whoever evicts responses keeps the parents that these name (8.12: pinned at arrival)."""
        return (turn.frame for lane in self._lanes.values() for turn in lane.queue)

    def submit(self, name: str | None, frame: dict[str, Any], size: int) -> None:
        """Accept a turn of `size` bytes into its lane.

        Raises:
            ApiError: `websocket_stream_limit_reached` or `websocket_queue_full`; the turn left no trace.
        """
        lane = self._lanes.get(name)
        if lane is None:
            self._check_new_name()
            lane = _Lane()
        if lane.state is not State.IDLE or len(self._running) + len(self._waiting) >= self._limits.max_active:
            self._check_queue(size)
        self._lanes[name] = lane
        lane.queue.append(_Turn(frame, size))
        self._queued += 1
        self._queued_bytes += size
        self._move(name, lane, Event.SUBMIT)

    def start_ready(self) -> list[tuple[str | None, dict[str, Any]]]:
        """Give free slots to the lanes that waited longest; returns the turns that start now, in that order."""
        started = []
        while self._waiting and len(self._running) < self._limits.max_active:
            name = next(iter(self._waiting))
            lane = self._lanes[name]
            self._move(name, lane, Event.SLOT_FREE)
            started.append((name, self._take(lane).frame))
        return started

    def turn_ended(self, name: str | None) -> None:
        """The lane's running turn is over, whatever way; its slot is free.

        Raises:
            LaneError: nothing runs there.
        """
        lane = self._lanes.get(name, _Lane())
        self._move(name, lane, Event.TURN_ENDED_MORE if lane.queue else Event.TURN_ENDED)

    def drop_waiting(self) -> list[str | None]:
        """Throw away what is queued on lanes where nothing runs. Returns the lane of each dropped turn, in order."""
        return self._drop(self.waiting)

    def drop_queued(self) -> list[str | None]:
        """Throw away all that is queued; running turns stay. Returns the lane of each dropped turn, in order."""
        return self._drop(self.waiting + self.running)

    def _drop(self, names: tuple[str | None, ...]) -> list[str | None]:
        dropped = []
        for name in names:
            lane = self._lanes[name]
            self._move(name, lane, Event.DROP)
            while lane.queue:
                self._take(lane)
                dropped.append(name)
        return dropped

    def _take(self, lane: _Lane) -> _Turn:
        turn = lane.queue.popleft()
        self._queued -= 1
        self._queued_bytes -= turn.size
        return turn

    def _move(self, name: str | None, lane: _Lane, event: Event) -> None:
        """The one place where a lane changes state; keeps both lines in step with it."""
        before = lane.state
        after = TABLE.get((before, event))
        if after is None:
            expected = ", ".join(legal.name for state, legal in TABLE if state is before)
            raise LaneError(f"lane {name!r} is {before.name}: expected {expected}, got {event.name}")
        if after is before:
            return
        lane.state = after
        for state, line in ((State.WAITING, self._waiting), (State.RUNNING, self._running)):
            if before is state:
                del line[name]
            if after is state:
                line[name] = None

    def _check_new_name(self) -> None:
        if self.names >= self._limits.max_names:
            raise ApiError(
                "websocket_stream_limit_reached",
                f"This connection has already used {self._limits.max_names} distinct stream_id values. Use one of them"
                " again, or open another connection.",
                "stream_id",
            )

    def _check_queue(self, size: int) -> None:
        limits = self._limits
        if self._queued >= limits.max_queued or self._queued_bytes + size > limits.max_queued_bytes:
            raise ApiError(
                "websocket_queue_full",
                f"Too much is queued on this connection (at most {limits.max_queued} requests and"
                f" {limits.max_queued_bytes} bytes may wait). Wait for a response to end, then send this again.",
            )
