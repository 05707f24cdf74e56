"""Rate limits of an upstream, respected before it is asked. Pure: the caller says what time it is.

An upstream tells with every answer what is left of its limits, and refuses by estimate: input plus the most output
that a request allows. So does this, from the same figures, and spares the client a refusal that costs a round trip.
Each limit is a bucket that fills steadily until it is full at the time named as its reset; Cerebras and OpenAI say so
of theirs. Where one is filled all at once instead, the upstream's own refusal (`refused`) holds.

Cerebras counts tokens twice, those that its prompt cache lacks and all of them, and either limit may refuse. A header
that says just `tokens` is taken to count the uncached: to be wrong there costs one refusal, the other way all turns
of a long conversation.

Source: cerebras.md (rate limits).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from inference.engine import Generation

Measure = Literal["requests", "uncached", "total"]

_NAME = re.compile(
    r"x-ratelimit-(limit|remaining|reset)-(?:(uncached|total)-)?(requests|tokens)(?:-(?:per-)?(minute|hour|day))?"
)
_DURATION = re.compile(r"(?:(\d+(?:\.\d+)?)d)?(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?")
_MILLISECONDS = re.compile(r"(\d+(?:\.\d+)?)ms")
_UNTOLD_WAIT_S = 1.0
_EPOCH_ABOVE_S = 1e9  # no limit takes thirty years to reset: this is a date


@dataclass(frozen=True, slots=True)
class Need:
    """What a request will be taken to cost: `total` tokens at most, `uncached` of them not in the prompt cache."""

    total: int
    uncached: int

    def of(self, measure: Measure) -> int:
        """In units of that measure."""
        return 1 if measure == "requests" else self.total if measure == "total" else self.uncached


def need_of(generation: Generation, most: int, beside: int = 0) -> Need:
    """The need of a generation that may sample `most` tokens; `beside` tokens go in that are not in its prompt. What
    the upstream has seen of the prompt is taken to be in its cache."""
    prompt = generation.prompt_tokens
    cached = 0 if generation.known is None else min(generation.known.length, prompt)
    return Need(prompt + beside + most, prompt - cached + beside + most)


class Limit(NamedTuple):
    """What one limit was at one time: `left` of `size` at `seen`, full again `reset_s` later."""

    measure: Measure
    size: float
    left: float
    seen: float
    reset_s: float

    def level(self, now: float) -> float:
        """How much is left at a time not before `seen`."""
        if self.reset_s <= 0:
            return self.size
        return min(self.size, self.left + (self.size - self.left) * (now - self.seen) / self.reset_s)

    def wait(self, need: float, held: float, now: float) -> float:
        """Seconds until that much is left beside what is `held` for others. What is more than the whole limit waits
        for a full one, and is then for the upstream to refuse."""
        missing = min(need, self.size) + held - self.level(now)
        if missing <= 0:
            return 0.0
        filled = self.size - self.left
        # A full bucket does not tell how fast it fills.
        return missing * self.reset_s / filled if filled > 0 and self.reset_s > 0 else _UNTOLD_WAIT_S


class Admission:
    """What one upstream lets in. `wait`, then `reserve` if that is 0, then `release` when its answer begins or fails;
    `observe` what the answer's headers say first."""

    def __init__(self) -> None:
        self._limits: dict[tuple[str, str], Limit] = {}
        self._reserved: dict[int, Need] = {}
        self._tickets = 0
        self._closed_until = 0.0

    def wait(self, need: Need, now: float) -> float:
        """Seconds until the upstream would let this in; 0 for now."""
        longest = max(0.0, self._closed_until - now)
        for limit in self._limits.values():
            # Requests under way count here until an answer says that they are counted there.
            held = sum(other.of(limit.measure) for other in self._reserved.values())
            longest = max(longest, limit.wait(need.of(limit.measure), held, now))
        return longest

    def reserve(self, need: Need) -> int:
        """Count a request as under way. Returns what `release` wants."""
        self._tickets += 1
        self._reserved[self._tickets] = need
        return self._tickets

    def release(self, ticket: int) -> None:
        """The upstream has counted it, or never will. Idempotent."""
        self._reserved.pop(ticket, None)

    def observe(self, headers: Mapping[str, str], now: float, wall: float) -> None:
        """Take over what an answer says. Names are lower case; `wall` is the time of day (seconds since 1970). What
        can't be read, or is only half there, changes nothing."""
        for key, found in _grouped(headers, wall):
            size, left, reset = (found.get(name) for name in ("limit", "remaining", "reset"))
            if size is None or left is None or reset is None or size <= 0:
                continue
            measure: Measure = "requests" if key[0] == "requests" else "total" if key[0] == "total" else "uncached"
            self._limits[key] = Limit(measure, size, min(left, size), now, reset)

    def refused(self, wait_s: float | None, now: float) -> None:
        """The upstream has refused something and said for how long."""
        if wait_s is not None:
            self._closed_until = max(self._closed_until, now + wait_s)

    @property
    def limits(self) -> tuple[Limit, ...]:
        """What is known, for metrics."""
        return tuple(self._limits.values())


def _grouped(headers: Mapping[str, str], wall: float) -> Iterator[tuple[tuple[str, str], dict[str, float]]]:
    """(what is counted, over which time) and the figures given for it."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for name, value in headers.items():
        if (match := _NAME.fullmatch(name)) is None:
            continue
        field, kind, measure, window = match.groups()
        figure = _seconds(value, wall) if field == "reset" else _figure(value)
        if figure is not None:
            found.setdefault((kind or measure, window or ""), {})[field] = figure
    yield from found.items()


def _figure(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if 0 <= value < 1e18 else None


def _seconds(text: str, wall: float) -> float | None:
    """A reset: seconds, a date in seconds since 1970, or a duration such as `6m0s` or `20ms`."""
    if (value := _figure(text)) is not None:
        return max(0.0, value - wall) if value > _EPOCH_ABOVE_S else value
    if (match := _MILLISECONDS.fullmatch(text)) is not None:
        return float(match[1]) / 1000
    match = _DURATION.fullmatch(text)
    if match is None or not any(match.groups()):
        return None
    return sum(float(part) * unit for part, unit in zip(match.groups(), (86400, 3600, 60, 1), strict=True) if part)
