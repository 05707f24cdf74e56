"""Post-work: batches, faults, order, room for turns, shutdown. `test_postwork_machine` has them in any order."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from actors.backpressure import Room
from actors.postwork import Fault, Job, Left, PostWork, PostWorkLimits, fault_of
from gateway.protocol.errors import ApiError


class StoreFault(Exception):
    """As the database raises it; its text has content, as a database's own has."""

    def __init__(self, kind: Fault) -> None:
        super().__init__("SECRET")
        self.kind = kind


class Table:
    """A sink that refuses what is in `poison`, does what `plan` says next, and takes the rest."""

    def __init__(self) -> None:
        self.rows: dict[object, None] = {}
        self.batches: list[list[object]] = []
        self.plan: list[BaseException | asyncio.Event] = []
        self.poison: set[object] = set()
        self.outdated: set[object] = set()
        self.down = False

    async def write(self, jobs: Sequence[Any]) -> Sequence[object]:
        self.batches.append(list(jobs))
        await asyncio.sleep(0)
        if self.plan:
            planned = self.plan.pop(0)
            if isinstance(planned, BaseException):
                raise planned
            await planned.wait()
        if self.down:
            raise StoreFault("transient")
        if self.poison & set(jobs):
            raise StoreFault("permanent")
        self.rows |= dict.fromkeys(jobs)
        return [job for job in jobs if job in self.outdated]


class Naps:
    """Sleeping takes no time, and is noted."""

    def __init__(self) -> None:
        self.taken: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.taken.append(seconds)
        await asyncio.sleep(0)


def response(name: str, after: str | None = None, size: int = 1) -> Job:
    return Job("response", name, name, size, after)


def usage(name: str) -> Job:
    return Job("usage", name, f"usage of {name}", 1)


@asynccontextmanager
async def started(table: Table, limits: PostWorkLimits | None = None, **options: Any) -> AsyncIterator[PostWork]:
    post = PostWork(table, limits, **{"sleep": Naps(), "chance": lambda: 1.0, **options})
    post.start()
    try:
        yield post
    finally:
        await post.close()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0)
    raise AssertionError("it did not come about")


async def written(post: PostWork) -> None:
    await until(lambda: not post.depth)


async def test_what_waits_is_written_in_one_batch_and_in_order() -> None:
    table = Table()
    async with started(table) as post:
        for name in "abc":
            post.put(response(name))
        assert [post.durable(name) for name in "abc"] == [False, False, False]
        await written(post)

    assert table.batches == [["a", "b", "c"]]
    assert all(post.durable(name) for name in "abc")
    assert (post.depth, post.bytes, post.counters.put, post.counters.written) == (0, 0, 3, 3)
    assert post.counters.batch_sizes[2] == 1  # up to four


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [(PostWorkLimits(batch_jobs=2), [2, 2, 1]), (PostWorkLimits(batch_bytes=25), [2, 2, 1])],
)
async def test_a_batch_is_bounded_in_jobs_and_bytes(limits: PostWorkLimits, sizes: list[int]) -> None:
    table = Table()
    async with started(table, limits) as post:
        for name in "abcde":
            post.put(response(name, size=10))
        await written(post)

    assert [len(batch) for batch in table.batches] == sizes


async def test_one_job_may_be_larger_than_a_batch() -> None:
    table = Table()
    async with started(table, PostWorkLimits(batch_bytes=5)) as post:
        post.put(response("large", size=1000))
        post.put(response("small"))
        await written(post)

    assert table.batches == [["large"], ["small"]]


async def test_a_batch_stays_open_for_those_who_come_soon() -> None:
    table, naps = Table(), Naps()
    now = 100.0

    async def sleep(seconds: float) -> None:
        await naps(seconds)
        post.put(response("b"))

    async with started(table, PostWorkLimits(linger_s=0.005), clock=lambda: now, sleep=sleep) as post:
        post.put(response("a"))
        now += 0.002
        await until(lambda: bool(table.batches))

    assert naps.taken[0] == pytest.approx(0.003)
    assert table.batches[0] == ["a", "b"]


@pytest.mark.parametrize("error", [StoreFault("transient"), StoreFault("full"), OSError(), asyncio.CancelledError()])
async def test_a_passing_fault_is_tried_again_until_it_has_passed(error: BaseException) -> None:
    table, naps = Table(), Naps()
    table.plan = [error] * 6
    limits = PostWorkLimits(linger_s=0, pause_s=0.1, longest_pause_s=1.0)
    async with started(table, limits, sleep=naps) as post:
        post.put(response("a"))
        await written(post)

    assert list(table.rows) == ["a"]
    assert naps.taken == [0.1, 0.2, 0.4, 0.8, 1.0, 1.0]
    assert (post.counters.retries, post.counters.failed) == (6, 0)
    assert post.counters.full == (6 if getattr(error, "kind", None) == "full" else 0)


async def test_pauses_are_spread_so_that_actors_do_not_return_together() -> None:
    table, naps = Table(), Naps()
    table.plan = [StoreFault("transient")]
    async with started(table, PostWorkLimits(linger_s=0, pause_s=0.1), sleep=naps, chance=lambda: 0.0) as post:
        post.put(response("a"))
        await written(post)

    assert naps.taken == [0.05]


async def test_a_job_that_can_never_be_written_is_kept_and_stops_nobody(caplog: pytest.LogCaptureFixture) -> None:
    table = Table()
    table.poison = {"r37"}
    with caplog.at_level(logging.INFO):
        async with started(table) as post:
            for number in range(100):
                post.put(response(f"r{number}"))
            await written(post)

    assert list(table.rows) == [f"r{number}" for number in range(100) if number != 37]
    assert (post.kept, post.counters.failed, post.counters.written) == (1, 1, 99)
    assert not post.durable("r37")
    assert post.newest("r37") == "r37"
    assert post.newest("r36") is None
    assert len(table.batches) < 25, "found by halving, not one by one"
    assert "response r37 can't be written" in caplog.text
    assert "SECRET" not in caplog.text


async def test_a_child_is_kept_with_its_parent_but_its_usage_is_written() -> None:
    table = Table()
    table.poison = {"parent"}
    async with started(table) as post:
        post.put(response("parent"))
        await written(post)
        post.put(response("child", after="parent"))
        post.put(usage("child"))
        post.put(response("grandchild", after="child"))
        post.put(response("stranger"))
        await written(post)
        assert list(table.rows) == ["usage of child", "stranger"]
        assert (post.kept, post.counters.failed, post.counters.orphaned) == (3, 1, 2)

        table.poison.clear()
        post.retry_failed()
        assert await post.drain(5) == Left(0, 0, 0)

    assert list(table.rows) == ["usage of child", "stranger", "parent", "child", "grandchild"]


async def test_a_later_write_of_the_same_takes_the_place_of_a_kept_one() -> None:
    table = Table()
    table.poison = {"old"}
    async with started(table) as post:
        post.put(Job("conversation", "c", "old", 5))
        await written(post)
        post.put(Job("conversation", "c", "new", 5))
        await written(post)
        assert post.durable("c", "conversation")
        table.poison.clear()
        post.retry_failed()
        assert await post.drain(5) == Left(0, 0, 0)

    assert list(table.rows) == ["new"]
    assert post.counters.superseded == 1


async def test_an_addition_to_what_is_kept_is_kept() -> None:
    table = Table()
    table.poison = {"first"}
    async with started(table) as post:
        post.put(Job("conversation", "c", "first", 1))
        post.put(Job("conversation", "c", "second", 1, after="c"))
        await written(post)
        assert (list(table.rows), post.newest("c", "conversation")) == ([], "second")
        table.poison.clear()
        assert await post.drain(5) == Left(0, 0, 0)

    assert list(table.rows) == ["first", "second"]


async def test_any_other_error_of_the_sink_is_taken_for_a_fault_of_the_job() -> None:
    table = Table()
    table.plan = [ValueError("SECRET")]
    async with started(table) as post:
        post.put(response("a"))
        await written(post)
        assert post.kept == 1
        post.put(response("b"))
        await written(post)

    assert list(table.rows) == ["b"]


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (StoreFault("full"), "full"),
        (TimeoutError(), "transient"),
        (ConnectionResetError(), "transient"),
        (KeyError("x"), "permanent"),
    ],
)
def test_what_an_error_means(error: Exception, fault: Fault) -> None:
    assert fault_of(error) == fault


async def test_a_turn_waits_for_room_and_gets_it_in_its_turn() -> None:
    table = Table()
    gate = asyncio.Event()
    table.plan = [gate]
    async with started(table, PostWorkLimits(jobs=4)) as post:
        one, two = await post.room(0), await post.room(0)
        waiting = [asyncio.ensure_future(post.room(5)) for _ in range(2)]
        await asyncio.sleep(0)
        assert post.rooms.waiting == 2
        for room, name in ((one, "a"), (two, "b")):
            with room:
                post.put(response(name), room)
                post.put(usage(name), room)
        await asyncio.sleep(0)
        assert not any(task.done() for task in waiting)

        gate.set()
        rooms = await asyncio.gather(*waiting)
        assert post.rooms.reserved == 4
        assert (post.rooms.waits, post.rooms.refusals) == (2, 0)
        for room in rooms:
            room.close()
            room.close()
        assert post.rooms.reserved == 0


async def test_a_turn_that_finds_no_room_in_time_is_told_when_to_come_back() -> None:
    async with started(Table(), PostWorkLimits(jobs=2)) as post:
        with await post.room(0), pytest.raises(ApiError) as refused:
            await post.room(0.01)
        assert (refused.value.status, refused.value.headers()) == (429, {"retry-after": "5"})
        assert (post.rooms.waiting, post.rooms.refusals) == (0, 1)
        (await post.room(0)).close()


async def test_bytes_are_bounded_like_jobs() -> None:
    table = Table()
    table.down = True
    async with started(table, PostWorkLimits(bytes=100)) as post:
        with await post.room(0) as room:
            post.put(response("large", size=150), room)
        with pytest.raises(ApiError):
            await post.room(0.01)
        table.down = False
        await written(post)
        (await post.room(0)).close()


async def test_one_who_gives_up_waiting_lets_those_behind_in() -> None:
    async with started(Table(), PostWorkLimits(jobs=3)) as post:
        with await post.room(0):
            large = asyncio.ensure_future(post.room(5, jobs=3))
            await asyncio.sleep(0)
            small = asyncio.ensure_future(post.room(5, jobs=1))
            await asyncio.sleep(0)
            assert post.rooms.waiting == 2
            large.cancel()
            (await small).close()
            with pytest.raises(asyncio.CancelledError):
                await large


async def test_room_that_came_as_the_wait_was_cancelled_is_given_back() -> None:
    async with started(Table(), PostWorkLimits(jobs=2)) as post:
        room = await post.room(0)
        waiting: asyncio.Task[Room] = asyncio.ensure_future(post.room(5))
        await asyncio.sleep(0)
        room.close()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert post.rooms.reserved == 0


async def test_draining_writes_all_and_lets_nobody_in() -> None:
    table = Table()
    table.plan = [StoreFault("transient")] * 3
    async with started(table, PostWorkLimits(jobs=2)) as post:
        with await post.room(0) as room:
            late = asyncio.ensure_future(post.room(5))
            await asyncio.sleep(0)
            post.put(response("a"), room)
            assert await post.drain(5) == Left(0, 0, 0)
            for refused in (late, post.room(5)):
                with pytest.raises(ApiError) as stopping:
                    await refused
                assert stopping.value.code == "server_is_overloaded"
            post.put(response("b"), room)  # a turn that ended late
        assert await post.drain(5) == Left(0, 0, 0)

    assert list(table.rows) == ["a", "b"]


async def test_draining_ends_a_long_pause_and_tries_quickly_from_then_on() -> None:
    table, long = Table(), asyncio.Event()
    table.down = True
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        await (long.wait() if seconds > 1 else asyncio.sleep(0))

    async with started(table, PostWorkLimits(linger_s=0, pause_s=30, longest_pause_s=30), sleep=sleep) as post:
        post.put(response("a"))
        await until(lambda: bool(pauses))
        draining = asyncio.ensure_future(post.drain(5))
        await until(lambda: len(pauses) >= 5)
        table.down = False
        assert await draining == Left(0, 0, 0)

    assert pauses[:3] == [30, 0.2, 0.2]


async def test_what_a_drain_could_not_write_is_reported() -> None:
    table = Table()
    table.poison = {"a"}
    async with started(table, sleep=asyncio.sleep) as post:
        post.put(response("a", size=10))
        await written(post)
        table.down = True
        post.put(response("b", size=5))
        left = await post.drain(0.05)

    assert left in (Left(1, 1, 15), Left(2, 0, 15))  # "a" was given another try, which may not be over
    assert (post.newest("a"), post.newest("b")) == ("a", "b")


async def test_closing_in_the_middle_of_a_write_forgets_nothing() -> None:
    table = Table()
    table.plan = [asyncio.Event()]
    async with started(table) as post:
        post.put(response("a"))
        await until(lambda: bool(table.batches))
        await post.close()
        assert (post.depth, post.newest("a")) == (1, "a")


async def test_the_age_of_the_oldest_job_shows_a_sink_that_hangs() -> None:
    now = 100.0
    table, gate = Table(), asyncio.Event()
    table.plan = [gate]
    told: list[tuple[str, float]] = []
    options = {"clock": lambda: now, "written": lambda job, seconds: told.append((job.id, seconds))}
    async with started(table, PostWorkLimits(linger_s=0), **options) as post:
        assert post.oldest_age_s == 0
        post.put(response("a"))
        await until(lambda: bool(table.batches))
        now += 7
        assert post.oldest_age_s == 7
        gate.set()
        await written(post)

    assert told == [("a", 7)]


async def test_an_error_of_whoever_counts_stops_nothing() -> None:
    def broken(job: Job, seconds: float) -> None:
        raise RuntimeError

    table = Table()
    async with started(table, written=broken) as post:
        post.put(response("a"))
        post.put(response("b"))
        await written(post)

    assert list(table.rows) == ["a", "b"]


async def test_what_came_too_late_is_counted() -> None:
    """Another actor has become the owner of a conversation (`Database.write`)."""
    table = Table()
    table.outdated = {"a"}
    async with started(table) as post:
        post.put(Job("conversation", "c", "a", 1))
        post.put(response("b"))
        await written(post)

    assert (post.counters.written, post.counters.outdated, post.kept) == (2, 1, 0)
