"""Pinning, discovery and the one safe retry."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import aclosing

import pytest

from actors.engines import Endpoint, EnginePool, PinnedEngine
from actors.models import Model, ModelTable
from actors.retrying import Hedging
from actors.session import SessionActor
from inference.engine import Chunk, EngineError, Generation, Sampling
from tests.support.actors import asked, chat, run_turn, says
from tests.support.engines import PlannedEngine

GENERATION = Generation("r", "m", (b"\1\0\0\0",), Sampling(max_tokens=4))
ANSWER = [Chunk([1], cached_tokens=0), Chunk([2], finish="stop")]
GONE = EngineError("unavailable", "gone")


class Cluster:
    """Replicas by name that can come, go and drain."""

    def __init__(self, **engines: PlannedEngine) -> None:
        self.engines = engines
        self.draining: set[str] = set()
        self.loads: dict[str, tuple[int, int]] = {}
        self.running = list(engines)
        self.lookups = 0
        self.broken = False
        self.patience_s = 0.0

    async def discover(self) -> Sequence[Endpoint]:
        self.lookups += 1
        if self.broken:
            raise ConnectionError("no controller")
        return [
            Endpoint(name, "127.0.0.1", 1, name in self.draining, *self.loads.get(name, (0, 0)))
            for name in self.running
        ]

    async def pool(self) -> EnginePool:
        pool = EnginePool(
            self.discover, lambda endpoint: self.engines[endpoint.replica], refresh_s=3600, patience_s=self.patience_s
        )
        await pool.start()
        return pool


async def run(engine: object) -> list[int]:
    return [token async for chunk in engine.generate(GENERATION) for token in chunk.ids]  # type: ignore[attr-defined]


async def test_a_conversation_stays_on_its_replica() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    for _ in range(3):
        assert await run(engine) == [1, 2]

    assert sorted(len(engine.seen) for engine in cluster.engines.values()) == [0, 3]
    await pool.close()


async def test_new_conversations_go_where_least_runs() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    async with aclosing(pool.pinned().generate(GENERATION)) as busy:
        await anext(busy)
        await run(pool.pinned())

    assert [len(engine.seen) for engine in cluster.engines.values()] == [1, 1]
    await pool.close()


async def test_an_unavailable_replica_is_left_before_its_first_chunk() -> None:
    cluster = Cluster(a=PlannedEngine([GONE]), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    engine.replica = "a"

    assert await run(engine) == [1, 2]
    assert engine.replica == "b"
    await pool.close()


async def test_nothing_is_generated_a_second_time_after_the_first_chunk() -> None:
    cluster = Cluster(a=PlannedEngine([ANSWER[0], GONE]), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    engine.replica = "a"
    with pytest.raises(EngineError, match="gone"):
        await run(engine)

    assert cluster.engines["b"].seen == []
    await pool.close()


async def test_an_invalid_request_is_not_tried_again() -> None:
    cluster = Cluster(a=PlannedEngine([EngineError("invalid", "no")]), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    engine.replica = "a"
    with pytest.raises(EngineError, match="no"):
        await run(engine)
    await pool.close()


async def test_an_overloaded_replica_sends_a_turn_to_another_but_never_back() -> None:
    full = EngineError("overloaded", "full")
    cluster = Cluster(a=PlannedEngine([full]), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    engine.replica = "a"
    assert await run(engine) == [1, 2]
    assert engine.replica == "b"
    cluster.engines["b"].plan = [full]
    with pytest.raises(EngineError, match="full"):
        await run(engine)
    assert [len(each.seen) for each in cluster.engines.values()] == [2, 2]
    await pool.close()


async def test_a_pinned_replica_that_is_far_busier_is_left_and_that_is_counted() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    engine.replica = "a"
    cluster.loads["a"] = (30, 10)
    await pool.refresh()
    await run(engine)
    assert (engine.replica, pool.moves) == ("b", 1)
    # Busy, but nobody waits there: the prefix is worth more.
    engine.replica = "a"
    cluster.loads["a"] = (30, 0)
    await pool.refresh()
    await run(engine)
    assert (engine.replica, pool.moves) == ("a", 1)
    await pool.close()


async def test_a_replica_that_fails_again_and_again_is_left_alone_for_a_while() -> None:
    cluster = Cluster(a=PlannedEngine([GONE]), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    for _ in range(10):
        engine = pool.pinned()
        engine.replica = "a"
        assert await run(engine) == [1, 2]
    assert len(cluster.engines["a"].seen) == 3
    await pool.close()


async def test_a_draining_replica_gets_no_new_turn() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    engine.replica = "a"
    cluster.draining.add("a")
    await pool.refresh()
    await run(engine)

    assert engine.replica == "b"
    await pool.close()


async def test_all_replicas_gone_says_so_after_looking_again() -> None:
    cluster = Cluster(a=PlannedEngine([GONE]))
    pool = await cluster.pool()
    with pytest.raises(EngineError, match="No engine replica"):
        await run(pool.pinned())
    await pool.close()


async def test_a_turn_waits_for_a_restarted_replica() -> None:
    cluster = Cluster(a=PlannedEngine([GONE]), b=PlannedEngine(ANSWER))
    cluster.running = ["a"]
    cluster.patience_s = 5.0
    pool = await cluster.pool()
    turn = asyncio.create_task(run(pool.pinned()))
    await asyncio.sleep(0)
    cluster.running = ["b"]

    assert await turn == [1, 2]
    await pool.close()


async def test_look_ups_are_shared() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    before = cluster.lookups
    await asyncio.gather(*(pool.refresh() for _ in range(50)))

    assert cluster.lookups == before + 1
    await pool.close()


async def test_a_replica_that_left_in_mid_turn_gets_no_new_one() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    engine = pool.pinned()
    engine.replica = "a"
    async with aclosing(engine.generate(GENERATION)) as busy:
        await anext(busy)
        cluster.running.remove("a")
        await pool.refresh()
        other = pool.pinned()
        other.replica = "a"
        await run(other)

    assert other.replica == "b"
    await pool.close()


async def test_a_pool_without_replicas_is_not_usable() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    assert pool.usable
    cluster.draining.add("a")
    await pool.refresh()

    assert not pool.usable
    await pool.close()


async def test_a_failed_look_up_keeps_what_is_known() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    cluster.broken = True
    await pool.refresh()

    assert await run(pool.pinned()) == [1, 2]
    await pool.close()


async def test_a_replica_that_left_is_disconnected() -> None:
    cluster = Cluster(a=PlannedEngine(ANSWER), b=PlannedEngine(ANSWER))
    pool = await cluster.pool()
    cluster.running.remove("a")
    await pool.refresh()

    assert cluster.engines["a"].closed
    await pool.close()


async def test_closing_the_stream_aborts_the_generation() -> None:
    cluster = Cluster(a=PlannedEngine([ANSWER[0], 3600.0, ANSWER[1]]))
    pool = await cluster.pool()
    async with aclosing(pool.pinned().generate(GENERATION)) as stream:
        await anext(stream)

    assert cluster.engines["a"].aborted == 1
    await pool.close()


async def test_a_start_without_any_replica_fails() -> None:
    pool = EnginePool(Cluster().discover, lambda endpoint: PlannedEngine([]))
    with pytest.raises(EngineError):
        await pool.start()


async def test_a_request_that_fails_everywhere_is_tried_three_times() -> None:
    cluster = Cluster(a=PlannedEngine([GONE]))
    cluster.patience_s = 60.0
    pool = await cluster.pool()
    with pytest.raises(EngineError, match="gone"):
        await run(pool.pinned())

    assert len(cluster.engines["a"].seen) == 3
    await pool.close()


class Steady(Hedging):
    """Hedges after a moment, as often as it likes."""

    def begin(self) -> float | None:
        return 0.01

    def spend(self) -> bool:
        return True


async def hedging(**engines: PlannedEngine) -> tuple[EnginePool, PinnedEngine]:
    cluster = Cluster(**engines)
    pool = await cluster.pool()
    pool.hedging = Steady()
    engine = pool.pinned()
    engine.replica = "a"
    return pool, engine


async def test_a_silent_replica_is_hedged_and_the_quicker_one_keeps_the_conversation() -> None:
    slow, quick = PlannedEngine([60.0, *ANSWER]), PlannedEngine(ANSWER)
    pool, engine = await hedging(a=slow, b=quick)
    assert await asyncio.wait_for(run(engine), 30) == [1, 2]
    assert (engine.replica, pool.hedges, slow.aborted) == ("b", 1, 1)
    assert pool.active() == {"a": 0, "b": 0}
    await pool.close()


async def test_a_replica_that_speaks_in_time_is_not_hedged() -> None:
    other = PlannedEngine(ANSWER)
    pool, engine = await hedging(a=PlannedEngine(ANSWER), b=other)
    assert await run(engine) == [1, 2]
    assert (engine.replica, pool.hedges, other.seen) == ("a", 0, [])
    await pool.close()


async def test_the_first_may_still_win_and_the_second_is_closed() -> None:
    other = PlannedEngine([60.0])
    pool, engine = await hedging(a=PlannedEngine([0.05, *ANSWER]), b=other)
    assert await asyncio.wait_for(run(engine), 30) == [1, 2]
    assert (engine.replica, pool.hedges, other.aborted) == ("a", 1, 1)
    await pool.close()


async def test_a_hedge_that_fails_does_not_hurt_and_both_failing_says_so() -> None:
    pool, engine = await hedging(a=PlannedEngine([0.1, *ANSWER]), b=PlannedEngine([GONE]))
    assert await asyncio.wait_for(run(engine), 30) == [1, 2]
    await pool.close()
    pool, engine = await hedging(a=PlannedEngine([0.1, GONE]), b=PlannedEngine([GONE]))
    with pytest.raises(EngineError, match="No engine replica can take this turn"):
        await asyncio.wait_for(run(engine), 30)
    await pool.close()


@pytest.mark.parametrize("after", [0.0, 0.03])
async def test_giving_up_closes_both(after: float) -> None:
    one, two = PlannedEngine([60.0]), PlannedEngine([60.0])
    pool, engine = await hedging(a=one, b=two)
    task = asyncio.create_task(run(engine))
    await asyncio.sleep(after)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert one.aborted == len(one.seen)
    assert two.aborted == len(two.seen)
    assert pool.active() == {"a": 0, "b": 0}
    await pool.close()


async def test_a_conversation_over_http_goes_back_to_its_replica() -> None:
    """Each request is a session of its own; the response it continues knows where its prefix is."""
    engines = {name: says("Fine.") for name in "ab"}
    cluster = Cluster(**engines)

    async def load() -> Model:
        return Model("m", chat(), 100_000, await cluster.pool())

    actor = SessionActor(ModelTable({"m": load}, {}, 5.0), "0123abcd")
    actor.models.start()
    previous = None
    for _ in range(4):
        previous = (await run_turn(actor, asked("hi", previous_response_id=previous)))["id"]
        # Others come in between, so that the least loaded one is no longer the same by chance.
        await run_turn(actor, asked("other"))
    chained = [[each.known is not None for each in engine.seen].count(True) for engine in engines.values()]
    assert sorted(chained) == [0, 3]
    await actor.close()
