"""What upstreams report about an answer's cost. Pure. A figure that they don't give is absent, never invented."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from inference.engine import Counted

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UsageShape:
    """Where a dialect's chunks hold the figures: paths, the first that leads to a count is taken."""

    input: tuple[Path, ...] = (("usage", "prompt_tokens"),)
    output: tuple[Path, ...] = (("usage", "completion_tokens"),)
    cached: tuple[Path, ...] = (("usage", "prompt_tokens_details", "cached_tokens"),)
    reasoning: tuple[Path, ...] = (("usage", "completion_tokens_details", "reasoning_tokens"),)


def counted(chunk: Mapping[str, Any], shape: UsageShape) -> Counted | None:
    """The usage in a chunk; None if it has none, or lacks how much went in or came out."""
    given, said = _first(chunk, shape.input), _first(chunk, shape.output)
    if given is None or said is None:
        return None
    return Counted(given, said, _first(chunk, shape.cached), _first(chunk, shape.reasoning))


@dataclass(slots=True)
class Timings:
    """What an upstream says its answers took, added up (seconds), for metrics: waiting there, reading prompts, writing.
    `wall_s` is what they took here, so `overhead_s` is the way there and back and what both ends do beside."""

    answers: int = 0
    queue_s: float = 0.0
    prompt_s: float = 0.0
    completion_s: float = 0.0
    total_s: float = 0.0
    wall_s: float = 0.0

    @property
    def overhead_s(self) -> float:
        """Of all answers that were timed."""
        return max(0.0, self.wall_s - self.total_s)

    def seconds(self) -> dict[str, float]:
        """By kind, for metrics."""
        kinds = {"queue": self.queue_s, "prompt": self.prompt_s, "completion": self.completion_s}
        return {**kinds, "overhead": self.overhead_s}

    def add(self, info: Any, wall_s: float) -> None:
        """One answer's `time_info`. Without a total it tells nothing and is left out."""
        if not isinstance(info, dict) or (total := _time(info, "total_time")) is None:
            return
        self.answers += 1
        self.queue_s += _time(info, "queue_time") or 0.0
        self.prompt_s += _time(info, "prompt_time") or 0.0
        self.completion_s += _time(info, "completion_time") or 0.0
        self.total_s += total
        self.wall_s += wall_s


def _first(chunk: Any, paths: tuple[Path, ...]) -> int | None:
    for path in paths:
        value = chunk
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return None


def _time(info: Mapping[str, Any], name: str) -> float | None:
    value = info.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0 else None
