"""When a generation is tried again elsewhere, and when a second one is sent along with the first. Pure.

Nothing is repeated once its client has seen output (design decision 8, bugs.md O-56), and nobody is kept waiting for a
rate limit without knowing (O-89).
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from enum import Enum, auto

from inference.engine import EngineFault


class Stage(Enum):
    """How far a generation has come: output has been passed on, or not yet."""

    BEFORE = auto()
    AFTER = auto()


class Next(Enum):
    """What to do about a failure. ELSEWHERE: at another endpoint of the model, or the next in its failover order; the
    same one may only be asked again if it is the only one. OTHERS_ONLY: likewise, but never the same one."""

    FAIL = auto()
    ELSEWHERE = auto()
    OTHERS_ONLY = auto()


RETRIES: Mapping[tuple[EngineFault, Stage], Next] = {
    ("invalid", Stage.BEFORE): Next.FAIL,
    ("overloaded", Stage.BEFORE): Next.OTHERS_ONLY,
    ("unavailable", Stage.BEFORE): Next.ELSEWHERE,
    ("invalid", Stage.AFTER): Next.FAIL,
    ("overloaded", Stage.AFTER): Next.FAIL,
    ("unavailable", Stage.AFTER): Next.FAIL,
}


def after_failure(
    fault: EngineFault, *, started: bool, attempts: int, most: int, untried: int, left_s: float = math.inf
) -> Next:
    """What follows a failure.

    Args:
        fault: of the attempt that failed.
        started: output of it has been passed on.
        attempts: made so far, this one included.
        most: attempts allowed; a request that kills its engine must not go on to kill all of them.
        untried: endpoints that could be asked and have not been.
        left_s: seconds until the turn's deadline.
    """
    step = RETRIES[fault, Stage.AFTER if started else Stage.BEFORE]
    if attempts >= most or left_s <= 0 or (step is Next.OTHERS_ONLY and not untried):
        return Next.FAIL
    return step


class Hedging:
    """Whether and when a turn that still waits for its first output is sent to a second endpoint as well.

    The delay is how long all but a few turns wait for theirs, so a second request is rare by itself; `share` bounds it
    where all turns have become slow, when more load would be the last thing to help.

    Args:
        quantile: of the waits seen so far, which is the delay.
        share: second requests, as a part of all turns at most.
        least_s: the delay is never shorter.
        window: how many waits are remembered.
        needed: waits that must have been seen before there is any hedging.
    """

    def __init__(
        self, quantile: float = 0.95, share: float = 0.05, least_s: float = 0.05, window: int = 200, needed: int = 20
    ) -> None:
        self._quantile = quantile
        self._share = share
        self._least_s = least_s
        self._needed = needed
        self._waits: deque[float] = deque(maxlen=window)
        self._credit = 0.0

    def begin(self) -> float | None:
        """A turn begins. Seconds after which it should be hedged if nothing has come; None for never."""
        self._credit = min(1.0, self._credit + self._share)
        if len(self._waits) < self._needed:
            return None
        ordered = sorted(self._waits)
        return max(self._least_s, ordered[min(len(ordered) - 1, math.ceil(self._quantile * len(ordered)) - 1)])

    def spend(self) -> bool:
        """The delay has passed: whether a second request may be sent now. True counts it."""
        if self._credit < 1.0 - 1e-9:
            return False
        self._credit = 0.0
        return True

    def first_output(self, waited_s: float) -> None:
        """A turn got its first output after that long."""
        self._waits.append(waited_s)
