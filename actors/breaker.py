"""A circuit breaker for one endpoint: one that has failed several times in a row is left alone for a while. Pure: the
caller says what time it is.

One per endpoint, never per session (bugs.md O-57): whoever fails there spares the others the same wait. The pause is
bounded, and one request tries the endpoint after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto

from inference.engine import EngineFault


class State(Enum):
    """CLOSED lets everything through, OPEN nothing, HALF_OPEN one request whose outcome decides."""

    CLOSED = auto()
    OPEN = auto()
    HALF_OPEN = auto()


class Outcome(Enum):
    """What a request says about its endpoint. NEUTRAL: nothing, as when its client went away."""

    GOOD = auto()
    BAD = auto()
    NEUTRAL = auto()


OUTCOMES: Mapping[EngineFault | None, Outcome] = {
    None: Outcome.GOOD,
    "invalid": Outcome.GOOD,  # it has read the request and answered
    "overloaded": Outcome.GOOD,  # it lives; rate limits are `admission`'s business
    "unavailable": Outcome.BAD,
}
"""By fault; None is an answer that came to its end."""

AFTER: Mapping[tuple[State, Outcome], State | None] = {
    (State.CLOSED, Outcome.GOOD): State.CLOSED,
    (State.CLOSED, Outcome.BAD): None,
    (State.CLOSED, Outcome.NEUTRAL): State.CLOSED,
    # Requests that were under way when the circuit opened: only the one that tries it decides.
    (State.OPEN, Outcome.GOOD): State.OPEN,
    (State.OPEN, Outcome.BAD): State.OPEN,
    (State.OPEN, Outcome.NEUTRAL): State.OPEN,
    (State.HALF_OPEN, Outcome.GOOD): State.CLOSED,
    (State.HALF_OPEN, Outcome.BAD): State.OPEN,
    (State.HALF_OPEN, Outcome.NEUTRAL): State.HALF_OPEN,
}
"""The state after an outcome. None: OPEN once it is the `threshold`th bad one in a row, else as before."""


class CircuitBreaker:
    """`allows` tells whether the endpoint may be asked; whoever asks calls `begin` and then `end` once.

    Args:
        threshold: failures in a row that open the circuit.
        pause_s: how long it stays open at first; twice as long after every try that failed.
        longest_pause_s: at most.
    """

    __slots__ = (
        "_bad",
        "_longest_pause_s",
        "_pause_s",
        "_reopens",
        "_since",
        "_threshold",
        "_trial",
        "_trials",
        "state",
    )

    def __init__(self, threshold: int = 3, pause_s: float = 1.0, longest_pause_s: float = 30.0) -> None:
        self._threshold = threshold
        self._pause_s = pause_s
        self._longest_pause_s = longest_pause_s
        self.state = State.CLOSED
        self._bad = 0
        self._reopens = 0
        self._since = 0.0
        self._trial: int | None = None
        self._trials = 0

    def allows(self, now: float) -> bool:
        """Whether a request may go there."""
        return self.wait(now) == 0 and (self.state is not State.HALF_OPEN or self._trial is None)

    def wait(self, now: float) -> float:
        """Seconds until a request may try it, 0 if that is now (or another is trying)."""
        if self.state is not State.OPEN:
            return 0.0
        return max(0.0, self._since + self.pause_s - now)

    @property
    def pause_s(self) -> float:
        """How long the circuit stays open this time."""
        return float(min(self._longest_pause_s, self._pause_s * 2 ** min(self._reopens, 32)))

    def begin(self, now: float) -> int:
        """A request goes there. Returns what `end` wants."""
        self._trials += 1
        if self.state is State.OPEN and self.wait(now) == 0:
            self.state = State.HALF_OPEN
        if self.state is State.HALF_OPEN and self._trial is None:
            self._trial = self._trials
        return self._trials

    def end(self, request: int, outcome: Outcome, now: float) -> None:
        """A request has ended."""
        if self.state is State.HALF_OPEN:
            if request != self._trial:
                return
            self._trial = None
        after = AFTER[self.state, outcome]
        if self.state is State.CLOSED and outcome is not Outcome.NEUTRAL:
            self._bad = self._bad + 1 if outcome is Outcome.BAD else 0
            after = State.OPEN if self._bad >= self._threshold else State.CLOSED
        assert after is not None
        if after is State.OPEN and self.state is not State.OPEN:
            self._reopens = self._reopens + 1 if self.state is State.HALF_OPEN else 0
            self._since = now
        if after is State.CLOSED and self.state is State.HALF_OPEN:
            self._bad = self._reopens = 0
        self.state = after
