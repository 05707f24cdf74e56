"""Steering and interrupting: what control frames do to the responses of one socket, without I/O.

Source: spec/protocol.md 2.2 to 2.4 (frames), 3.2 (whose counter numbers the answers), 3.8 (sequences, codes), and the
SDK's `ResponseSteer*` types. The tables are in `steer_table`. `Connection` says when turns start and end
and passes the answers on as its actions.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gateway.protocol.actions import Action, Append, Interrupt, Send, Steer, Tell
from gateway.protocol.controls import (
    append_failed,
    interrupt_failed,
    objection_to,
    steer_failed,
    steer_frame,
    steer_input,
)
from gateway.protocol.errors import ApiError
from gateway.protocol.steer_table import ACCEPT, ANSWERS, DONE, GONE, LAST, MOVES, RUNS, WHY, Ending, Event, Stage, Verb

_UNUSED: Final = "The response ended before this input was used."

PAST_KEPT: Final = 256
"""How many responses that are no longer the newest of their lane are known by name."""


class SteeringError(RuntimeError):
    """The caller made a move that the table forbids (not the client's fault). The state is as it was."""


@dataclass(frozen=True, slots=True)
class SteerLimits:
    """`per_response` steers may wait for one response, `bytes` of frames for all of a socket."""

    per_response: int = 8
    bytes: int = 32 * 2**20


@dataclass(slots=True)
class _Steering:
    """One accepted steer. `given` is the input as it came, `items` the messages in it."""

    id: str
    given: str | list[Any]
    items: list[Any]
    size: int
    told: bool = False


@dataclass(slots=True)
class _Target:
    """The newest response of a lane. `frame` is its create, as long as it runs."""

    id: str
    lane: str | None
    frame: dict[str, Any] | None
    objection: str | None
    stage: Stage = Stage.RUNNING
    ending: Ending | None = None
    sequence: int = 0
    steers: list[_Steering] = field(default_factory=list)
    held: list[Action] = field(default_factory=list)
    out: bool = False


@dataclass(slots=True)
class _Lane:
    """`frame` is the create of the turn that runs; `taken` are the steers in it, with the response they were for."""

    frame: dict[str, Any] | None = None
    target: _Target | None = None
    taken: tuple[_Target, list[_Steering]] | None = None


class Steering:
    """Steers and interrupts of one socket. `new_id` makes ids of steers. `rollouts`: that extension is on."""

    __slots__ = ("_bytes", "_lanes", "_limits", "_new_id", "_past", "_rollouts", "_targets")

    def __init__(self, limits: SteerLimits, new_id: Callable[[], str], *, rollouts: bool = False) -> None:
        self._limits = limits
        self._rollouts = rollouts
        self._new_id = new_id
        self._lanes: dict[str | None, _Lane] = {}
        self._targets: dict[str, _Target] = {}
        self._past: OrderedDict[str, tuple[str | None, Stage]] = OrderedDict()
        self._bytes = 0

    @property
    def owned(self) -> int:
        """Steers that were accepted and neither committed nor given back."""
        taken = sum(len(lane.taken[1]) for lane in self._lanes.values() if lane.taken is not None)
        return taken + sum(len(target.steers) for target in self._targets.values())

    def starting(self, lane: str | None, frame: dict[str, Any]) -> dict[str, Any]:
        """A turn is about to run. Returns its create, with the input of the steers that wait for it in front."""
        state = self._lanes.setdefault(lane, _Lane())
        target = state.target
        if target is not None and target.steers and frame.get("previous_response_id") == target.id:
            frame = self._take(state, target, frame)
        state.frame = frame
        return frame

    def started(self, lane: str | None, response_id: str) -> list[Action]:
        """`response.created` is on its way: the commit point of what the turn took. The lane's older response is no
        longer its newest, so steers that still wait for it are given back."""
        state = self._lanes[lane]
        actions: list[Action] = []
        if state.taken is not None:
            self._free(state.taken[1])
            state.taken = None
        if (old := state.target) is not None:
            self._move(old, Event.CONTINUED)
            actions = self._give_back(
                old, GONE, "Another response was created on this lane before this input was used."
            )
            del self._targets[old.id]
            self._remember(old)
        frame = state.frame or {}
        objection = objection_to(frame, rollouts=self._rollouts)
        state.target = self._targets[response_id] = _Target(response_id, lane, frame, objection)
        return actions

    def over(self, lane: str | None, ending: Ending) -> None:
        """The running response's terminal event was made; it is on its way, and the turn's end follows."""
        target = self._lanes[lane].target
        if target is None or target.out:
            raise SteeringError(f"no response runs on lane {lane!r}")
        self._move(target, ending.event)
        target.ending, target.sequence = ending, ending.sequence
        if not ending.can_go_on:
            self._give_back(target, GONE, _UNUSED)

    def ended(
        self, lane: str | None, queued: Iterable[dict[str, Any]], admitting: bool, refusal: str | None = None
    ) -> tuple[list[Action], dict[str, Any] | None]:
        """The lane's turn is over. Returns what to send, and the create of the successor that runs now in its slot.

        Args:
            lane: where it ran.
            queued: creates that wait; one that continues the response makes `pending` needless.
            admitting: whether turns may still start on this socket.
            refusal: why the turn never got to `response.created`.
        """
        state = self._lanes[lane]
        state.frame = None
        target = state.target
        if target is None or target.out:  # this turn made no response
            return self._return_taken(state, refusal or "The turn did not start"), None
        frame, target.frame, target.out = target.frame, None, True
        actions, target.held = target.held, []
        if target.stage in RUNS:  # it broke off without a terminal event
            self._move(target, Event.ENDS)
            actions += self._give_back(target, GONE, _UNUSED)
        if not target.steers:
            return actions, None
        if not admitting:
            return actions + self._give_back(target, "successor_creation_failed", LAST), None
        if target.stage is Stage.WAITING:
            return actions + self._tell_pending(target, queued), None
        successor = {**(frame or {}), "previous_response_id": target.id, "input": []}
        return actions, self._take(state, target, successor)

    def steer(
        self, frame: dict[str, Any], size: int, queued: Iterable[dict[str, Any]], admitting: bool
    ) -> list[Action]:
        """Answer `response.steer` (2.2)."""
        target = self._find(frame)
        try:
            items = steer_input(frame)
        except ApiError as error:
            return self._refuse(target, frame, "invalid_input", error.message)
        if target is None:
            lane, stage = self._past.get(frame["previous_response_id"], (None, None))
            code = "response_not_found" if stage is None else ANSWERS[stage, Verb.STEER]
            return [Send(steer_frame("failed", lane, 0, steer_failed(frame, code, WHY[code])))]
        if target.objection is not None:
            return self._refuse(target, frame, "steering_not_supported", target.objection)
        code = ANSWERS[target.stage, Verb.STEER]
        if code == ACCEPT and target.stage is Stage.WAITING and self._continuing(target):
            code = DONE
        if code != ACCEPT:
            return self._refuse(target, frame, code, WHY[code])
        if not admitting:
            return self._refuse(target, frame, "successor_creation_failed", LAST)
        if len(target.steers) >= self._limits.per_response or self._bytes + size > self._limits.bytes:
            return self._refuse(target, frame, "too_many_pending_steers", WHY["too_many_pending_steers"])
        steer = _Steering(self._new_id(), frame["input"], items, size)
        target.steers.append(steer)
        self._bytes += size
        actions = self._answer(target, "accepted", {"steer": _named(steer, target)})
        if target.stage is Stage.RUNNING:
            return [*actions, Steer(target.lane)]
        return actions + (self._tell_pending(target, queued) if target.out else [])

    def interrupt(self, frame: dict[str, Any]) -> list[Action]:
        """Answer `response.interrupt` (2.3). A failure is never an error frame and never terminal."""
        wanted, lane, code = self._running(frame)
        if frame.get("mode", "discard_partial_items") != "discard_partial_items":
            why = "The only mode is 'discard_partial_items'. The response goes on."
            return [Send(interrupt_failed(wanted, lane, "interrupt_not_supported", why))]
        if code != ACCEPT:
            return [Send(interrupt_failed(wanted, lane, code, WHY[code]))]
        self._move(self._targets[wanted], Event.INTERRUPT)
        return [Tell(lane, "response.interrupt.accepted", {"response_id": wanted}), Interrupt(lane)]

    def append(self, frame: dict[str, Any]) -> list[Action]:
        """Answer `response.append`, or leave that to the response: only it knows whether it waits for this. It may be
        named as long as it may be interrupted."""
        wanted, lane, code = self._running(frame)
        if code != ACCEPT:
            return [Send(append_failed(wanted, lane, (code, WHY[code])))]
        return [Append(lane, frame)]

    def _running(self, frame: dict[str, Any]) -> tuple[str, str | None, str]:
        """The response that a frame names, its lane, and ACCEPT if it runs, else the code that says what it does."""
        wanted = frame.get("response_id")
        wanted = wanted if isinstance(wanted, str) else ""
        target = self._targets.get(wanted)
        lane, stage = (target.lane, target.stage) if target is not None else self._past.get(wanted, (None, None))
        return wanted, lane, "response_not_found" if stage is None else ANSWERS[stage, Verb.INTERRUPT]

    def _find(self, frame: dict[str, Any]) -> _Target | None:
        wanted = frame.get("previous_response_id")
        return self._targets.get(wanted) if isinstance(wanted, str) else None

    def _continuing(self, target: _Target) -> bool:
        """Whether a turn that continues this response is starting: it has taken what was to be taken."""
        frame = self._lanes[target.lane].frame
        return target.out and frame is not None and frame.get("previous_response_id") == target.id

    def _take(self, state: _Lane, target: _Target, frame: dict[str, Any]) -> dict[str, Any]:
        """The create with all steers of the response in front of its input, in order."""
        state.taken = (target, target.steers)
        before = [item for steer in target.steers for item in steer.items]
        target.steers = []
        own = frame.get("input") or []
        if isinstance(own, str):
            own = [{"type": "message", "role": "user", "content": own}]
        if isinstance(own, list):  # anything else is refused for what it is
            frame = {**frame, "input": before + own}
        state.frame = frame
        return frame

    def _return_taken(self, state: _Lane, why: str) -> list[Action]:
        """The turn came to nothing, and so does what it took."""
        if state.taken is None:
            return []
        target, steers = state.taken
        state.taken = None
        target.steers = steers
        return self._give_back(target, "successor_creation_failed", why)

    def _give_back(self, target: _Target, code: str, why: str) -> list[Action]:
        """`response.steer.failed` for each steer of the response, with its id and input."""
        actions: list[Action] = []
        for steer in target.steers:
            given = {"input": steer.given, "previous_response_id": target.id}
            actions += self._answer(target, "failed", steer_failed(given, code, why, steer.id))
        self._free(target.steers)
        target.steers = []
        return actions

    def _tell_pending(self, target: _Target, queued: Iterable[dict[str, Any]]) -> list[Action]:
        """`response.steer.pending`, once for each steer, unless the create that it asks for has come already."""
        for frame in queued:
            if frame.get("previous_response_id") == target.id and frame.get("stream_id") == target.lane:
                return []
        required = list(target.ending.required) if target.ending is not None else []
        actions: list[Action] = []
        for steer in target.steers:
            if not steer.told:
                steer.told = True
                fields = {"reason": "waiting_for_required_input", "required_input": required}
                actions += self._answer(target, "pending", {**fields, "steer": _named(steer, target)})
        return actions

    def _refuse(self, target: _Target | None, frame: dict[str, Any], code: str, why: str) -> list[Action]:
        """A steer that was not accepted: its failure has no id."""
        fields = steer_failed(frame, code, why)
        if target is None:
            return [Send(steer_frame("failed", None, 0, fields))]
        return self._answer(target, "failed", fields)

    def _answer(self, target: _Target, what: str, fields: dict[str, Any]) -> list[Action]:
        """An event about this response, numbered by its counter: in its stream, or behind its terminal event."""
        if target.stage in RUNS:
            return [Tell(target.lane, f"response.steer.{what}", fields)]
        send = Send(steer_frame(what, target.lane, target.sequence, fields))
        target.sequence += 1
        if target.out:
            return [send]
        target.held.append(send)
        return []

    def _free(self, steers: Sequence[_Steering]) -> None:
        self._bytes -= sum(steer.size for steer in steers)

    def _remember(self, target: _Target) -> None:
        self._past[target.id] = (target.lane, target.stage)
        while len(self._past) > PAST_KEPT:
            self._past.popitem(last=False)

    def _move(self, target: _Target, event: Event) -> None:
        after = MOVES.get((target.stage, event))
        if after is None:
            raise SteeringError(f"response {target.id} is {target.stage.name}: {event.name} can't happen to it")
        target.stage = after


def _named(steer: _Steering, target: _Target) -> dict[str, Any]:
    return {"id": steer.id, "previous_response_id": target.id}
