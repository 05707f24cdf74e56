"""Which figures of an actor's parts are shown, under which names: read when somebody asks, so they cost a turn
nothing. What turns add up to is in `actors.metrics`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import partial

from actors.metrics import Metrics
from actors.models import ModelTable
from actors.postwork import PostWork
from actors.spill import Spill

COUNTERS: Mapping[str, str] = {
    "rendered_items": "Items that were rendered by a chat template.",
    "heads_rendered": "Heads (instructions and tools) that were rendered and encoded.",
    "heads_reused": "Heads that were known already.",
    "compactions": "Contexts that were compacted.",
    "unopened_blobs": "Encrypted contents of clients that no key opens.",
    "cut_backs": "Times that a chat template made a token cache forget thoughts.",
    "cut_tokens": "Tokens that this took out of token caches.",
    "whole_renders": "Contexts that had to be rendered whole.",
    "truncations": "Contexts that were shortened to fit (truncation: auto).",
    "fallbacks": "Turns that another model answered, as no engine of their own could.",
    "released_sessions": "Sockets whose stored contexts left memory, as all held too much.",
    "guides_checked": "Output constraints that an engine was asked about.",
}
"""Fields of `actors.session.Counters` and what they count."""

_POST_WORK: Mapping[str, str] = {
    "put": "put",
    "written": "written",
    "retries": "retried",
    "full": "retried_no_space",
    "failed": "failed",
    "orphaned": "orphaned",
    "superseded": "superseded",
    "outdated": "outdated",
}


def watch_counters(metrics: Metrics, counters: object) -> None:
    """Show the totals of a session actor; `counters` has the fields of `COUNTERS`."""
    for name, text in COUNTERS.items():
        metrics.watch("counter", name, text, partial(_field, counters, name))


def watch_post_work(metrics: Metrics, post: PostWork) -> None:
    """Show how much waits to be written, for how long, and what became of the rest. To alert on: `kept` jobs, which
    only memory holds; an oldest age of more than a few seconds; refused turns."""

    def jobs() -> dict[str, float]:
        return {"waiting": post.depth, "kept": post.kept, "reserved": post.rooms.reserved}

    def events() -> dict[str, float]:
        return {shown: getattr(post.counters, name) for name, shown in _POST_WORK.items()}

    def batches() -> dict[str, float]:
        return {str(2**power): count for power, count in enumerate(post.counters.batch_sizes)}

    def turns() -> dict[str, float]:
        return {"waited": post.rooms.waits, "refused": post.rooms.refusals}

    watch = metrics.watch
    watch("gauge", "post_work_jobs", "Jobs that are not durable, and those that turns may still put.", jobs, "state")
    watch("gauge", "post_work_bytes", "About what these jobs hold.", lambda: post.bytes)
    watch("gauge", "post_work_oldest_seconds", "How long the next job has waited.", lambda: post.oldest_age_s)
    watch("gauge", "post_work_waiting_turns", "Turns that wait for room.", lambda: post.rooms.waiting)
    watch("counter", "post_work_events", "What became of jobs, and tries that failed.", events, "event")
    watch("counter", "post_work_batches", "Batches written, by how many jobs they had at most.", batches, "jobs")
    watch("counter", "post_work_turns", "Turns that had to wait for room, and that got none.", turns, "result")


def watch_spill(metrics: Metrics, spill: Spill) -> None:
    """Show what acknowledged writes hold on the disk until the database has them. To alert on: `failed` and `full`, of
    which a kill would take what only memory holds."""

    def events() -> dict[str, float]:
        return {name: getattr(spill.counters, name) for name in ("appended", "done", "full", "failed")}

    metrics.watch("gauge", "spill_bytes", "Size of the spill files of this actor.", lambda: spill.size)
    metrics.watch("gauge", "spill_jobs", "Jobs in them that the database lacks.", lambda: spill.waiting)
    metrics.watch("counter", "spill_events", "What became of appended jobs.", events, "event")


def watch_engines(metrics: Metrics, models: ModelTable) -> None:
    """Show where this actor's turns run, and how often a conversation had to leave its prefix."""

    def turns() -> dict[str, float]:
        return {
            f"{name}/{replica}": count
            for name, model in models.loaded().items()
            for replica, count in model.engines.active().items()
        }

    def moves() -> dict[str, float]:
        return {name: model.engines.moves for name, model in models.loaded().items()}

    def hedges() -> dict[str, float]:
        return {name: model.engines.hedges for name, model in models.loaded().items()}

    def timings() -> dict[str, float]:
        found: Counter[str] = Counter()
        for model in models.loaded().values():
            found.update(model.engines.timings())
        return dict(found)

    metrics.watch("counter", "upstream_seconds", "What upstreams say their answers took.", timings, "kind")
    metrics.watch("gauge", "engine_turns", "Turns of this actor by engine replica.", turns, "replica")
    metrics.watch("counter", "engine_moves", "Conversations that left an overloaded or lost replica.", moves, "model")
    metrics.watch("counter", "engine_hedges", "Second replicas asked beside a silent one.", hedges, "model")


def _field(of: object, name: str) -> float:
    value: float = getattr(of, name)
    return value
