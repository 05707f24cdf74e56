"""The life of one socket, without I/O: frames, turn ends and time go in, actions come out.

Source: spec/protocol.md 1.4 to 1.7 (frames, idle, close codes, lifetime), 2 (client events), 4.7 (lanes), 5 (errors),
8.9, 8.13, 8.14. What runs when is `gateway.protocol.lanes`; what steers and interrupts do is
`gateway.protocol.steering`; a create's body is looked at elsewhere, when its turn starts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

from gateway.protocol.actions import Action, Cancel, Close, Send, Start
from gateway.protocol.controls import inject_failed
from gateway.protocol.decode import decode_object
from gateway.protocol.errors import ApiError
from gateway.protocol.lanes import ABSENT, LaneError, LaneLimits, Lanes, check_stream_id
from gateway.protocol.steer_table import Ending
from gateway.protocol.steering import Steering, SteerLimits

# Theory
# ------
#   OPEN      creates are admitted
#   ENDING    the age limit came, or the replica drains, while turns run: nothing more is admitted, running turns may
#             finish until a deadline
#   CLOSED    over: closed by us, or lost. Late inputs are normal (frames in flight, turns being stopped) and give
#             nothing
#
#   input                   OPEN                           ENDING                            CLOSED
#   create                  Start, or queued, or error     limit error                       -
#   other frame             its answer                     its answer                        -
#   turn_ended              successor or next turns Start  last one: final words, Close      counted
#   age limit               idle: error, Close 1000;       -                                 -
#                           busy: to ENDING
#   drain                   idle: Close;                   deadline may come nearer          -
#                           busy: to ENDING
#   deadline of ENDING                                     Cancel all, final words, Close    -
#   binary, overflow        Cancel all, Close              Cancel all, Close                 -
#   lost                    Cancel all                     Cancel all                        -
#
# A socket ends for one reason: the first. A drain that comes after the age limit changes only the deadline.
#
# Queued turns are refused when ENDING begins, not finished, also by a drain: 64 of them fit in no grace, a refused
# one left no trace (no eviction either, 4.3), and Codex, opencode and Copilot answer this code by sending the request
# again on a new socket (5.3, 4.8). Where the lane has a running turn, the refusals follow that turn's end: for
# openai-python's lane sessions, as for any client that reads a lane in order, an error frame with the lane's stream_id
# ends the turn that runs there, which may still finish. New creates are refused at once, as 1.7 has it: they never
# entered the lane.
#
# A successor of a steered response keeps its lane's slot, so nothing that is queued comes between.
#
# Time: each input first lets pass what was due by then, so the outcome doesn't depend on how promptly `tick` is called.


class Phase(Enum):
    """Where a socket is in its life."""

    OPEN = "open"
    ENDING = "ending"
    CLOSED = "closed"


class Step(Enum):
    """What moves it on."""

    END = "stop admitting, let running turns finish"
    CLOSE = "close, or notice that the client is gone"


# Missing pairs are illegal; the public methods check the phase, so they never get there.
MOVES: Final[dict[tuple[Phase, Step], Phase]] = {
    (Phase.OPEN, Step.END): Phase.ENDING,
    (Phase.OPEN, Step.CLOSE): Phase.CLOSED,
    (Phase.ENDING, Step.CLOSE): Phase.CLOSED,
}


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Times in seconds, 3600 and 300 as in 1.7. No idle timeout, since a client may be busy with a long tool."""

    lifetime_s: float = 3600.0
    grace_s: float = 300.0
    drain_grace_s: float = 300.0
    idle_timeout_s: float | None = None
    max_message_bytes: int = 16 * 2**20
    pending_steers: int = 8
    lanes: LaneLimits = field(default_factory=LaneLimits)

    def __post_init__(self) -> None:
        lives = [self.lifetime_s] if self.idle_timeout_s is None else [self.lifetime_s, self.idle_timeout_s]
        if not all(0 < value < math.inf for value in lives):
            raise ValueError(f"a lifetime or idle timeout must be positive and finite: {self}")
        if not all(0 <= value < math.inf for value in (self.grace_s, self.drain_grace_s)):
            raise ValueError(f"a grace must be finite and not negative: {self}")


@dataclass(frozen=True, slots=True)
class _Ending:
    """Why and how the socket ends. `announce`: say `refusal` once more, for the socket, before the close."""

    refusal: ApiError
    announce: bool
    close: Close
    deadline: float


class Connection:
    """One socket, from the 101 to the last `turn_ended`. `now` is any monotonic clock's seconds, never decreasing.

    Each input returns the actions to carry out, in order; those of `actions.Control` in the same step, before anything
    else happens. The caller owes one `turn_ended` for each `Start`, also after a `Cancel` and also when the socket is
    gone; `turn_started` and `turn_over` before it if the turn made a response. State may be thrown away when `settled`.

    Args:
        limits: bounds and times.
        now: the time of the 101.
        jitter_s: added to the lifetime, so that sockets opened together do not end together; may be negative.
        decode: text to JSON object; raises ApiError `invalid_json`.
        steer_id: makes the ids of accepted steers.
        rollouts: whether `response.append` is known here (docs/rollout-extension.md).
    """

    __slots__ = (
        "_age_at",
        "_decode",
        "_ending",
        "_idle_since",
        "_lanes",
        "_limits",
        "_phase",
        "_rollouts",
        "_steering",
    )

    def __init__(
        self,
        limits: ConnectionLimits,
        now: float,
        *,
        jitter_s: float = 0.0,
        decode: Callable[[str | bytes], dict[str, Any]] = decode_object,
        steer_id: Callable[[], str] | None = None,
        rollouts: bool = False,
    ) -> None:
        if not 0 < limits.lifetime_s + jitter_s < math.inf:
            raise ValueError(f"{jitter_s} s of jitter leave no lifetime")
        self._limits = limits
        self._decode = decode
        self._lanes = Lanes(limits.lanes)
        count = itertools.count()
        steers = SteerLimits(limits.pending_steers, limits.lanes.max_queued_bytes)
        self._steering = Steering(steers, steer_id or (lambda: f"steer_{next(count):032x}"), rollouts=rollouts)
        self._rollouts = rollouts
        self._phase = Phase.OPEN
        self._ending: _Ending | None = None
        self._age_at = now + limits.lifetime_s + jitter_s
        self._idle_since = now

    @property
    def phase(self) -> Phase:
        """OPEN, ENDING or CLOSED."""
        return self._phase

    @property
    def running(self) -> tuple[str | None, ...]:
        """Lanes whose `turn_ended` is owed."""
        return self._lanes.running

    @property
    def settled(self) -> bool:
        """Closed, and every `Start` has had its `turn_ended`."""
        return self._phase is Phase.CLOSED and not self._lanes.running

    @property
    def next_deadline(self) -> float | None:
        """When to call `tick`; None when time no longer matters."""
        if self._phase is Phase.CLOSED:
            return None
        if self._ending is not None:
            return self._ending.deadline
        if self._limits.idle_timeout_s is None or not self._lanes.idle:
            return self._age_at
        return min(self._age_at, self._idle_since + self._limits.idle_timeout_s)

    def queued_frames(self) -> Iterator[dict[str, Any]]:
        """Creates that wait: their parents must not be evicted (8.12)."""
        return self._lanes.queued_frames()

    def receive_text(self, text: str | bytes, now: float) -> list[Action]:
        """A whole text message came. A bad one is answered and the socket stays open (8.13)."""
        if _size(text) > self._limits.max_message_bytes:
            # Exactly this code has Codex and opencode send the request again over HTTP (1.4).
            return self._break_off(Close(1009, "message is larger than this server takes"), now)
        actions = self._pass_time(now)
        if self._phase is Phase.CLOSED:
            return actions
        self._idle_since = now
        try:
            actions += self._client_event(self._decode(text), text)
        except ApiError as error:
            # Not a create that named a valid lane, so no stream_id (5.1, 8.14).
            actions.append(Send(error.frame()))
        return actions

    def receive_binary(self, now: float) -> list[Action]:
        """A binary message came: the peer speaks something else (1.4)."""
        return self._break_off(Close(1003, "only text messages are accepted"), now)

    def overflow(self, now: float) -> list[Action]:
        """The client reads so slowly that its outbox passed the byte bound (4.7). No words: they would queue too."""
        return self._break_off(Close(1013, "client reads too slowly"), now)

    def lost(self, now: float) -> list[Action]:  # noqa: ARG002 - inputs look alike
        """The client is gone, which is how a client cancels (1.6). Nothing is sent any more, whatever was due."""
        return [] if self._phase is Phase.CLOSED else self._close()

    def turn_started(self, lane: str | None, response_id: str) -> list[Action]:
        """The lane's turn has a response, whose `response.created` is about to be sent."""
        actions = self._steering.started(lane, response_id)
        return [] if self._phase is Phase.CLOSED else actions

    def turn_over(self, lane: str | None, ending: Ending) -> None:
        """The response's terminal event was made. From now on it can't be stopped, and what is said about it waits."""
        self._steering.over(lane, ending)

    def turn_ended(self, lane: str | None, now: float, refusal: str | None = None) -> list[Action]:
        """The lane's turn is over and its last frame is on its way. `refusal` is why it made no response, if so.

        Raises:
            LaneError: no turn runs there; nothing has changed.
        """
        if lane not in self._lanes.running:
            raise LaneError(f"no turn runs on lane {lane!r}")
        due = self.next_deadline
        admitting = self._phase is Phase.OPEN and (due is None or now < due)
        actions, successor = self._steering.ended(lane, self._lanes.queued_frames(), admitting, refusal)
        self._idle_since = now
        if successor is not None:
            return [*actions, Start(lane, successor, automatic=True)]
        # Before time passes: a turn that has ended must not be cancelled for being late.
        closed = self._phase is Phase.CLOSED
        self._lanes.turn_ended(lane)
        actions = ([] if closed else actions) + self._pass_time(now)
        if self._phase is Phase.OPEN:
            actions += self._start_ready()
        elif self._ending is not None:
            actions += _refuse(self._lanes.drop_waiting(), self._ending.refusal)
            if not self._lanes.running:
                actions += self._finish(self._ending)
        return actions

    def tick(self, now: float) -> list[Action]:
        """Time passed. Does nothing before `next_deadline`."""
        return self._pass_time(now)

    def drain(self, code: int, reason: str, now: float, grace_s: float | None = None) -> list[Action]:
        """The replica drains (1012) or shuts down (1001): end when running turns have, within the grace: `grace_s`
        seconds, or `drain_grace_s` of the limits.

        Raises:
            ValueError: not a code or reason that can be sent; nothing has changed.
        """
        close = Close(code, reason)
        actions = self._pass_time(now)
        deadline = now + (self._limits.drain_grace_s if grace_s is None else grace_s)
        if self._ending is not None:
            self._ending = replace(self._ending, deadline=min(deadline, self._ending.deadline))
        elif self._phase is Phase.OPEN:
            # No final words: an idle client takes the close alone, and opencode counts a frame there as a fault (1.5).
            actions += self._end(
                _Ending(_limit("The server is about to stop"), announce=False, close=close, deadline=deadline)
            )
        return actions + self._pass_time(now)

    def _pass_time(self, now: float) -> list[Action]:
        """All that was due by now."""
        actions: list[Action] = []
        while (due := self.next_deadline) is not None and now >= due:
            if self._ending is not None:
                actions += self._finish(self._ending)
            elif due == self._age_at:
                actions += self._end(self._too_old())
            else:
                # 1001, not 1000: SDKs that reconnect do so only after the former (1.6).
                actions += self._close(Close(1001, "idle for too long"))
        return actions

    def _too_old(self) -> _Ending:
        minutes = self._limits.lifetime_s / 60
        error = _limit(f"Responses websocket connection limit reached ({minutes:g} minutes)")
        close = Close(1000, "connection age limit reached")
        return _Ending(error, announce=True, close=close, deadline=self._age_at + self._limits.grace_s)

    def _client_event(self, frame: dict[str, Any], text: str | bytes) -> list[Action]:
        """Answer one JSON object (section 2). Control frames bypass the lanes (2.3)."""
        match frame.get("type"):
            case "response.create":
                return self._create(frame, _size(text))
            case "response.steer":
                admitting = self._phase is Phase.OPEN
                return self._steering.steer(frame, _size(text), self._lanes.queued_frames(), admitting)
            case "response.interrupt":
                return self._steering.interrupt(frame)
            case "response.inject":
                return [Send(inject_failed(frame))]
            case "response.processed":
                return []
            case "response.cancel":
                advice = "There is no cancel event in this protocol; to cancel, close the connection."
            case "response.append" if self._rollouts:
                return self._steering.append(frame)
            case "response.append":
                advice = "response.append is gone; send response.create with previous_response_id and the new input."
            case str():
                # The value isn't repeated: it may be anything, of any length.
                advice = "Messages of this type are not known here; send response.create to start a response."
            case _:
                advice = "Each message needs a type; send response.create to start a response."
        raise ApiError("unsupported_event", advice, "type")

    def _create(self, frame: dict[str, Any], size: int) -> list[Action]:
        lane = check_stream_id(frame.get("stream_id", ABSENT))
        if self._ending is not None:
            return _refuse([lane], self._ending.refusal)
        try:
            self._lanes.submit(lane, frame, size)
        except ApiError as error:
            return _refuse([lane], error)
        return self._start_ready()

    def _start_ready(self) -> list[Action]:
        return [Start(lane, self._steering.starting(lane, frame)) for lane, frame in self._lanes.start_ready()]

    def _end(self, ending: _Ending) -> list[Action]:
        """Stop admitting. With nothing running there is nothing to wait for."""
        if not self._lanes.running:
            return self._finish(ending)
        self._move(Step.END)
        self._ending = ending
        return _refuse(self._lanes.drop_waiting(), ending.refusal)

    def _finish(self, ending: _Ending) -> list[Action]:
        """Running turns have ended, or had their time."""
        words = _refuse(self._lanes.drop_queued(), ending.refusal)
        if ending.announce:
            words.append(Send(ending.refusal.frame()))
        return self._close(*words, ending.close)

    def _break_off(self, close: Close, now: float) -> list[Action]:
        """Close at once, for a fault of the peer. What was due before counts: the socket may be closed already."""
        actions = self._pass_time(now)
        return actions if self._phase is Phase.CLOSED else actions + self._close(close)

    def _close(self, *last: Action) -> list[Action]:
        self._lanes.drop_queued()
        self._move(Step.CLOSE)
        return [*(Cancel(lane) for lane in self._lanes.running), *last]

    def _move(self, step: Step) -> None:
        self._phase = MOVES[self._phase, step]
        if self._phase is Phase.CLOSED:
            self._ending = None


def _refuse(lanes: Iterable[str | None], error: ApiError) -> list[Action]:
    """The error once for each refused create, with its own stream_id."""
    return [Send(error.frame(stream_id=lane)) for lane in lanes]


def _limit(why: str) -> ApiError:
    return ApiError("websocket_connection_limit_reached", f"{why}. Create a new websocket connection to continue.")


def _size(text: str | bytes) -> int:
    """Bytes on the wire, without a copy in the usual case."""
    return len(text) if isinstance(text, bytes) or text.isascii() else len(text.encode("utf-8", "surrogatepass"))
