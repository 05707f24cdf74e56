"""What an operator can watch of one actor, in Prometheus' text format. Never content; labels have few values.

A turn adds to plain numbers, which takes a few microseconds; families and text are made when somebody asks.
`prometheus_client`'s own counters take a lock each and bring a `_created` series each; its text is used family by
family, since all of it at once holds up the event loop for milliseconds.

Every sample has the label `actor`, the owner's tag, so that the texts of all actors can be put together
(`actors.scrape`). Model names are those of the model table, any other is `other`.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Literal

from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from actors.ledger import Buckets, Recorded
from gateway.protocol.errors import TABLE

PREFIX = "limpet_"
OTHER = "other"
WATCHED_LABELS = 256
"""Label values that one watched figure may have; the others are added up as `other`."""

Figures = Mapping[str, float]

_INFERENCE_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_GATEWAY_S = (0.0005, 0.001, 0.0015, 0.002, 0.003, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1.0, 5.0)
_TOOL_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
_POST_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.5, 1.0, 5.0, 30.0, 300.0)

_TIMES: Mapping[str, tuple[str, tuple[float, ...]]] = {
    "inference_seconds": ("Engine time of a turn, over all its generations.", _INFERENCE_S),
    "gateway_overhead_seconds": ("Time of a turn in the gateway, engine and tools left out.", _GATEWAY_S),
    "client_tool_seconds": ("From a terminal event to the next request, and waits for outputs.", _TOOL_S),
    "first_token_seconds": ("From the request to the first chunk of the engine.", _INFERENCE_S),
}
_TOKENS: Mapping[str, str] = {
    "input": "input_tokens",
    "cached": "cached_tokens",
    "output": "output_tokens",
    "reasoning": "reasoning_tokens",
    "encoded": "encoded_tokens",
    "reused": "reused_tokens",
}

OUTCOMES = frozenset(
    {
        *("completed", "incomplete", "cancelled", "abandoned", "running"),
        *("engine_invalid", "engine_overloaded", "engine_unavailable"),
        *TABLE,
    }
)
"""What `TurnRecord.outcome` may say."""


class Histogram:
    """Counts of values up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def into(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        """Its samples, cumulative as Prometheus wants them."""
        bounds = [*(str(bound) for bound in self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


@dataclass(slots=True)
class _OfModel:
    """What the turns of one model add up to."""

    turns: dict[str, int] = field(default_factory=dict)
    tokens: list[int] = field(default_factory=lambda: [0] * len(_TOKENS))
    times: list[Histogram] = field(default_factory=lambda: [Histogram(bounds) for _, bounds in _TIMES.values()])


@dataclass(frozen=True, slots=True)
class _Watched:
    kind: Literal["counter", "gauge"]
    name: str
    help: str
    read: Callable[[], float | Figures]
    label: str | None


class _Alone(Collector):
    """One family, for `prometheus_client`."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> tuple[Metric]:
        return (self._family,)


class Metrics:
    """The figures of one actor. `models` are the names of its model table. Owned by one event loop, `render` too."""

    def __init__(self, actor: str, models: Collection[str]) -> None:
        self._actor = actor
        self._models = {name: _OfModel() for name in models}
        self._others = _OfModel()
        self._post = Histogram(_POST_S)
        self._watched: list[_Watched] = []

    def turn_ended(self, record: Recorded) -> None:
        """Account for a turn, whatever its outcome. Times only of those that reached an engine."""
        of = self._models.get(record.model, self._others)
        outcome = record.outcome if record.outcome in OUTCOMES else OTHER
        of.turns[outcome] = of.turns.get(outcome, 0) + 1
        tokens = of.tokens
        # In the order of `_TOKENS`.
        tokens[0] += record.input_tokens
        tokens[1] += record.cached_tokens
        tokens[2] += record.output_tokens
        tokens[3] += record.reasoning_tokens
        tokens[4] += record.encoded_tokens
        tokens[5] += record.reused_tokens
        if record.submitted is None:
            return
        buckets, times = Buckets.of(record), of.times
        # In the order of `_TIMES`.
        times[0].add(buckets.inference_s)
        times[1].add(buckets.overhead_s)
        if buckets.tool_s is not None:
            times[2].add(buckets.tool_s)
        if record.first_chunk is not None:
            times[3].add(record.first_chunk - record.started)

    def post_processed(self, seconds: float) -> None:
        """What a turn left behind is durable, so long after it was put: the fourth bucket."""
        self._post.add(seconds)

    def watch(
        self,
        kind: Literal["counter", "gauge"],
        name: str,
        text: str,
        read: Callable[[], float | Figures],
        label: str | None = None,
    ) -> None:
        """Show what `read` returns whenever somebody asks: one number, or one per value of `label`. It is called in
        `render` and must not fail. A counter's name goes without `_total`."""
        self._watched.append(_Watched(kind, PREFIX + name, text, read, label))

    async def render(self) -> bytes:
        """All figures as text, each family once. A turn that ends meanwhile is in the later families only."""
        texts: list[bytes] = []
        for family in self._families():
            texts.append(generate_latest(_Alone(family)))
            await asyncio.sleep(0)
        return b"".join(texts)

    def _families(self) -> Iterator[Metric]:
        actor = self._actor
        models = {**self._models, OTHER: self._others} if self._others.turns else self._models
        turns = CounterMetricFamily(f"{PREFIX}turns", "Turns that are over.", labels=["actor", "model", "outcome"])
        tokens = CounterMetricFamily(
            f"{PREFIX}tokens",
            "Tokens of turns: input and output as clients are told, cached by engines, encoded here, reused from here.",
            labels=["actor", "model", "kind"],
        )
        for model, of in models.items():
            for outcome, count in of.turns.items():
                turns.add_metric([actor, model, outcome], count)
            for kind, count in zip(_TOKENS, of.tokens, strict=True):
                tokens.add_metric([actor, model, kind], count)
        yield turns
        yield tokens
        for place, (name, (text, _)) in enumerate(_TIMES.items()):
            family = HistogramMetricFamily(PREFIX + name, text, labels=["actor", "model"])
            for model, of in models.items():
                of.times[place].into(family, [actor, model])
            yield family
        post = HistogramMetricFamily(
            f"{PREFIX}post_processing_seconds", "From a job's put until it is durable.", labels=["actor"]
        )
        self._post.into(post, [actor])
        yield post
        for watched in self._watched:
            yield self._show(watched)

    def _show(self, watched: _Watched) -> Metric:
        family_of = CounterMetricFamily if watched.kind == "counter" else GaugeMetricFamily
        labels = ["actor"] if watched.label is None else ["actor", watched.label]
        family: Metric = family_of(watched.name, watched.help, labels=labels)
        found = watched.read()
        figures = bounded(found) if isinstance(found, Mapping) else {None: found}
        for value, figure in figures.items():
            family.add_metric([self._actor] if value is None else [self._actor, value], figure)  # type: ignore[attr-defined]
        return family


def bounded(figures: Figures) -> dict[str | None, float]:
    """At most `WATCHED_LABELS` of them, the others in one."""
    shown: dict[str | None, float] = {}
    for value, figure in figures.items():
        if len(shown) < WATCHED_LABELS - 1:
            shown[value] = figure
        else:
            shown[OTHER] = shown.get(OTHER, 0.0) + figure
    return shown
