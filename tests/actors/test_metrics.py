"""The metrics of an actor and of all actors. Texts are read by prometheus_client's own parser."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence
from typing import Any

import httpx
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette
from starlette.routing import Route

from actors.metrics import OUTCOMES, Histogram, Metrics, bounded
from actors.peers import Switchboard
from actors.postwork import Job, PostWork
from actors.scrape import Scrape, merge
from actors.session import Counters
from actors.watched import COUNTERS, watch_counters, watch_post_work
from gateway.auth import Authenticator
from gateway.http_answers import refused
from gateway.http_metrics import MetricsEndpoint
from gateway.protocol.errors import TABLE, ApiError
from tests.support.records import Record

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def samples(text: bytes) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in found, "a sample stands twice"
            found[key] = sample.value
    return found


def value(text: bytes, name: str, **labels: str) -> float | None:
    return samples(text).get((f"limpet_{name}", tuple(sorted({"actor": "one", **labels}.items()))))


def metrics(actor: str = "one") -> Metrics:
    return Metrics(actor, ["m", "n"])


async def test_turns_and_their_tokens_are_counted_by_model() -> None:
    shown = metrics()
    for record in (Record(), Record(outcome="cancelled", output_tokens=5), Record(model="n")):
        shown.turn_ended(record)
    text = await shown.render()

    assert value(text, "turns_total", model="m", outcome="completed") == 1
    assert value(text, "turns_total", model="m", outcome="cancelled") == 1
    assert value(text, "turns_total", model="n", outcome="completed") == 1
    counted = [
        value(text, "tokens_total", model="m", kind=kind)
        for kind in ("input", "cached", "output", "reasoning", "encoded", "reused")
    ]
    assert counted == [2000, 1200, 55, 40, 60, 1800]


async def test_the_four_buckets_of_a_turn_are_histograms() -> None:
    shown = metrics()
    shown.turn_ended(Record())
    shown.post_processed(0.004)
    text = await shown.render()

    sums = {
        "inference_seconds": 1.9,
        "gateway_overhead_seconds": 0.1,
        "client_tool_seconds": 3.0,
        "first_token_seconds": 0.25,
    }
    for name, seconds in sums.items():
        assert value(text, f"{name}_sum", model="m") == pytest.approx(seconds)
        assert value(text, f"{name}_count", model="m") == 1
    assert value(text, "post_processing_seconds_sum") == pytest.approx(0.004)
    assert value(text, "post_processing_seconds_bucket", le="0.0025") == 0
    assert value(text, "post_processing_seconds_bucket", le="0.005") == 1


async def test_a_refused_turn_has_no_times() -> None:
    shown = metrics()
    shown.turn_ended(Record(outcome="invalid_value", submitted=None, first_chunk=None, inference_s=0))
    text = await shown.render()

    assert value(text, "turns_total", model="m", outcome="invalid_value") == 1
    assert value(text, "inference_seconds_count", model="m") == 0


@given(st.lists(st.floats(0, 400) | st.sampled_from([0.1, 0.5, 1.0]), max_size=30))
def test_a_histogram_counts_as_prometheus_does(values: list[float]) -> None:
    bounds = (0.1, 0.5, 1.0, 100.0)
    ours = Histogram(bounds)
    family = prometheus_client.core.HistogramMetricFamily("h", "h", labels=["x"])
    registry = prometheus_client.CollectorRegistry()
    theirs = prometheus_client.Histogram("h", "h", ["x"], buckets=bounds, registry=registry).labels("1")
    for one in values:
        ours.add(one)
        theirs.observe(one)
    ours.into(family, ["1"])

    expected = [(s.name, s.labels, s.value) for f in registry.collect() for s in f.samples if "_created" not in s.name]
    found = sorted(((s.name, s.labels, s.value) for s in family.samples), key=str)
    assert found == sorted(expected, key=str)


async def test_labels_have_few_values_whatever_clients_send() -> None:
    """A wildcard table lets clients name any model."""
    shown = metrics()
    for number in range(1000):
        shown.turn_ended(Record(model=f"made-up-{number}", outcome=f"new-{number}"))
    text = await shown.render()

    assert value(text, "turns_total", model="other", outcome="other") == 1000
    assert len(samples(text)) < 250
    assert b"made-up" not in text


def test_every_outcome_of_a_refusal_is_known() -> None:
    assert set(TABLE) <= OUTCOMES


@given(st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=400))
def test_watched_labels_are_bounded_and_nothing_is_missing_in_their_sum(figures: dict[str, float]) -> None:
    shown = bounded(figures)

    assert len(shown) <= 256
    assert sum(shown.values()) == sum(figures.values())


async def test_what_is_watched_is_read_when_somebody_asks() -> None:
    shown, sockets, load = metrics(), [3.0], {"r1": 2.0}
    shown.watch("gauge", "sockets", "Open sockets.", lambda: sockets[0])
    shown.watch("gauge", "engine_turns", "Turns at an engine replica.", lambda: load, "replica")
    sockets[0], load["r2"] = 4.0, 1.0
    text = await shown.render()

    assert value(text, "sockets") == 4
    assert value(text, "engine_turns", replica="r1") == 2
    assert value(text, "engine_turns", replica="r2") == 1


async def test_every_total_of_a_session_actor_is_shown() -> None:
    """By the turns' own figures, or by the table."""
    per_turn = {"turns", "failed_turns", "encoded_tokens", "reused_tokens", "output_tokens", "cached_tokens"}
    assert {field.name for field in dataclasses.fields(Counters)} <= per_turn | set(COUNTERS)

    shown, totals = metrics(), Counters()
    watch_counters(shown, totals)
    totals.cut_backs = 5
    totals.unopened_blobs = 2

    assert value(await shown.render(), "cut_backs_total") == 5
    assert value(await shown.render(), "unopened_blobs_total") == 2


class Broken:
    async def write(self, jobs: Sequence[Any]) -> Sequence[object]:
        await asyncio.sleep(0)
        raise ValueError


async def test_post_work_is_shown() -> None:
    shown, post = metrics(), PostWork(Broken())
    watch_post_work(shown, post)
    room = await post.room(0)
    post.put(Job("response", "a", "a", 70), room)
    text = await shown.render()
    assert value(text, "post_work_jobs", state="waiting") == 1
    assert value(text, "post_work_jobs", state="reserved") == 1
    assert value(text, "post_work_bytes") == 70
    assert (value(text, "post_work_oldest_seconds") or 0) > 0

    post.start()
    await post.drain(5)
    await post.close()
    text = await shown.render()
    assert value(text, "post_work_jobs", state="kept") == 1
    assert value(text, "post_work_events_total", event="failed") == 1
    assert value(text, "post_work_events_total", event="put") == 1


class Network:
    def __init__(self) -> None:
        self.boards: list[Switchboard] = []

    async def ask(self, operation: str, args: tuple[Any, ...]) -> list[Any]:
        return [await board.answer(operation, args) for board in self.boards] + [TimeoutError()]


def scrapes(*actors: str) -> list[Scrape]:
    """Peers as Serve has them: each asks all the others."""
    made = []
    networks = [Network() for _ in actors]
    boards = [Switchboard(name, network) for name, network in zip(actors, networks, strict=True)]
    for actor, board in zip(actors, boards, strict=True):
        shown = metrics(actor)
        shown.turn_ended(Record())
        shown.watch("gauge", "sockets", "Open sockets.", lambda: 1.0)
        made.append(Scrape(board, shown))
    for network, own in zip(networks, boards, strict=True):
        network.boards = [board for board in boards if board is not own]
    return made


async def test_whichever_actor_is_asked_answers_for_all() -> None:
    one, two, _ = scrapes("one", "two", "three")
    first, second = await one.text(), await two.text()

    assert samples(first) == samples(second)
    for actor in ("one", "two", "three"):
        assert value(first, "turns_total", actor=actor, model="m", outcome="completed") == 1
        assert value(first, "sockets", actor=actor) == 1
    assert samples(first)["limpet_scraped_actors", ()] == 3


async def test_an_actor_without_peers_answers_for_itself() -> None:
    text = await Scrape(Switchboard("", None), metrics()).text()

    assert samples(text)["limpet_scraped_actors", ()] == 1


NAME = st.sampled_from(["a", "b", "a_b", "c"])
LABEL = st.text(max_size=8)
FAMILIES = st.dictionaries(NAME, st.tuples(st.text(max_size=12), st.lists(LABEL, unique=True, max_size=3)))


@given(st.lists(FAMILIES, max_size=4))
def test_a_merged_text_has_all_samples_and_each_family_once(actors: list[dict[str, tuple[str, list[str]]]]) -> None:
    """Against prometheus_client's own writer and parser, with any text in labels and help."""
    texts, expected = [], {}
    for number, families in enumerate(actors):
        registry = prometheus_client.CollectorRegistry()
        for name, (about, labels) in families.items():
            gauge = prometheus_client.Gauge(name, about, ["actor", "x"], registry=registry)
            for place, label in enumerate(labels):
                gauge.labels(str(number), label).set(place)
        texts.append(prometheus_client.generate_latest(registry))
        expected |= samples(texts[-1])
    merged = merge(texts)

    assert samples(merged) == expected
    heads = [line for line in merged.decode().split("\n") if line.startswith("# TYPE ")]
    assert len(heads) == len(set(heads)) == len({name for families in actors for name in families})


def test_two_kinds_under_one_name_are_not_mixed() -> None:
    """During an update. A text with both would be refused whole."""
    old = b'# HELP a x\n# TYPE a gauge\na{actor="1"} 1.0\n'
    new = b'# HELP a x\n# TYPE a counter\na{actor="2"} 2.0\n'

    assert merge([old, new]) == old


async def scraped(keys: list[str], headers: dict[str, str]) -> httpx.Response:
    endpoint = MetricsEndpoint(Scrape(Switchboard("", None), metrics()), Authenticator(keys))
    app = Starlette(routes=[Route("/metrics", endpoint.scrape)], exception_handlers={ApiError: refused})
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        return await client.get("/metrics", headers=headers)


async def test_a_scraper_gets_text_it_understands() -> None:
    answer = await scraped(["k"], {"authorization": "Bearer k"})

    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert samples(answer.content)["limpet_scraped_actors", ()] == 1


async def test_a_stranger_gets_nothing() -> None:
    assert (await scraped(["k"], {})).status_code == 401
    assert (await scraped([], {"origin": "https://example.org"})).status_code == 403
