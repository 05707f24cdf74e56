"""What deleting and time take away, and what must stay for those who continue."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from actors.conversation import Response
from actors.store.database import Database, StoreConfig
from actors.store.jobs import DeleteResponse
from actors.store.removal import LATE_RETRY_S
from actors.store.tables import echoes, responses
from tests.support.responses import NOW, TOOLS, asked, chain, facts, put, same, turn


async def rows_of(database: Database, table: sa.Table, tenant: str = "t") -> list[Any]:
    query = sa.select(table).where(table.c.tenant == tenant)
    return list(await database._connections.read(lambda connection: connection.execute(query).all()))


async def deltas(database: Database, tenant: str = "t") -> set[str]:
    return {row.id for row in await rows_of(database, responses, tenant) if row.delta is not None}


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


class TestDelete:
    async def test_an_end_goes_at_once(self, database: Database) -> None:
        nodes = chain("a", 3)
        await database.write([put(node) for node in nodes])

        assert await database.delete("t", "resp_a2")
        assert not await database.delete("t", "resp_a2")
        assert await database.body("t", "resp_a2") is None
        assert await database.load("t", "resp_a2") is None
        assert same(await database.load("t", "resp_a1"), put(nodes[1]))
        assert await deltas(database) == {"resp_a0", "resp_a1"}

    async def test_what_is_continued_keeps_only_what_that_needs(self, database: Database) -> None:
        nodes = chain("a", 3)
        await database.write([put(node) for node in nodes])
        for node in nodes[:2]:
            assert await database.delete("t", node.id)

        assert await database.load("t", "resp_a0") is None
        assert await database.body("t", "resp_a1") is None
        assert same(await database.load("t", "resp_a2"), put(nodes[2]))
        assert all(row.body is None for row in await rows_of(database, responses) if row.id != "resp_a2")
        assert await database.delete("t", "resp_a2")
        assert await deltas(database) == set()

    async def test_branches_that_meet_in_a_deleted_one(self, database: Database) -> None:
        root = chain("a", 3)
        left, right = turn("left", root[2]), turn("right", root[2])
        await database.write([put(node) for node in (*root, left, right)])
        for node in root:
            await database.delete("t", node.id)
        await database.delete("t", "resp_left")
        assert same(await database.load("t", "resp_right"), put(right))
        await database.delete("t", "resp_right")

        assert await deltas(database) == set()

    async def test_a_turn_that_was_running_when_its_parent_was_deleted(self, database: Database) -> None:
        nodes = chain("a", 3)
        await database.write([put(node) for node in nodes[:2]])
        await database.delete("t", "resp_a1")
        await database.write([put(nodes[2])])

        assert same(await database.load("t", "resp_a2"), put(nodes[2]))

    async def test_a_late_retry_does_not_bring_it_back(self, database: Database) -> None:
        job = put(turn("a"))
        await database.write([job])
        await database.write([DeleteResponse("t", "resp_a")])
        await database.write([job])

        assert await database.load("t", "resp_a") is None
        assert await deltas(database) == set()

    async def test_shared_texts_go_with_the_last_that_repeats_them(self, database: Database) -> None:
        request = asked(tools=TOOLS)
        await database.write([put(node, request=request) for node in chain("a", 2)])
        await database.delete("t", "resp_a0")
        assert len(await rows_of(database, echoes)) == 1
        await database.delete("t", "resp_a1")

        assert await rows_of(database, echoes) == []

    async def test_a_tenants_purge_leaves_others_alone(self, database: Database) -> None:
        mine, theirs = put(turn("a"), request=asked(tools=TOOLS)), put(turn("b"), "u", request=asked(tools=TOOLS))
        await database.write([mine, theirs])
        await database.purge_tenant("t")

        assert await rows_of(database, responses) == []
        assert await rows_of(database, echoes) == []
        assert same(await database.load("u", "resp_b"), theirs)

    async def test_deleted_content_is_not_left_in_the_file(self, tmp_path: Path) -> None:
        store = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
        await store.write([put(turn("a", said="launchcode"))])
        await store.delete("t", "resp_a")
        await store.close()

        assert b"launchcode" not in (tmp_path / "store.db").read_bytes()

    async def test_deleting_and_continuing_at_once(self, database: Database) -> None:
        """Whoever comes first: what was acknowledged can be continued, and nothing is left over."""
        for number in range(15):
            nodes = chain(f"r{number}x", 3)
            await database.write([put(node) for node in nodes[:2]])
            await asyncio.gather(
                database.write([put(nodes[2])]), *(database.delete("t", node.id) for node in nodes[:2])
            )
            assert same(await database.load("t", nodes[2].id), put(nodes[2]))
            await database.delete("t", nodes[2].id)
            assert await deltas(database) == set()


class TestExpire:
    @pytest.fixture
    def clock(self, database: Database) -> Clock:
        clock = Clock()
        database._now = clock
        return clock

    async def test_time_deletes_in_batches(self, database: Database, clock: Clock) -> None:
        await database.write([put(node, expires_at=NOW + 10) for node in chain("a", 25)])
        await database.write([put(turn("b")), put(turn("c"), "u", expires_at=NOW + 11)])
        assert await database.expire() == 0
        clock.now = NOW + 10

        assert [await database.expire(10) for _ in range(4)] == [10, 10, 5, 0]
        assert await deltas(database) == {"resp_b"}
        assert await database.load("u", "resp_c") is not None

    async def test_a_conversation_that_goes_on_keeps_its_beginning(self, database: Database, clock: Clock) -> None:
        nodes = chain("a", 4)
        await database.write([put(node, expires_at=NOW + 10 * (number + 1)) for number, node in enumerate(nodes)])
        clock.now = NOW + 30
        await database.expire()

        assert await database.load("t", "resp_a2") is None
        assert same(await database.load("t", "resp_a3"), put(nodes[3]))
        clock.now = NOW + 40
        await database.expire()
        assert await deltas(database) == set()

    async def test_ids_of_the_deleted_are_forgotten_in_the_end(self, database: Database, clock: Clock) -> None:
        await database.write([put(node) for node in chain("a", 3)])
        for node in chain("a", 3):
            await database.delete("t", node.id)
        assert await database.expire() == 0
        assert len(await rows_of(database, responses)) == 3
        clock.now += LATE_RETRY_S

        assert await database.expire() == 3
        assert await rows_of(database, responses) == []


class Reference:
    """The rules in memory: a tree of which any node may be deleted."""

    def __init__(self) -> None:
        self.nodes: dict[str, Response] = {}
        self.living: set[str] = set()
        self.expiry: dict[str, int | None] = {}

    def needed(self) -> set[str]:
        """Ids in the lineages of what can be found."""
        return {turn.id for name in self.living for turn in self.nodes[name].lineage()}


class Deletion(RuleBasedStateMachine):
    """Responses are put, put again, continued from anywhere, deleted and left to time, one after another."""

    url = ""
    loop: asyncio.AbstractEventLoop
    counter = 0
    names = Bundle("names")

    def __init__(self) -> None:
        super().__init__()
        Deletion.counter += 1
        self.tenant = f"tenant {Deletion.counter}"
        self.clock = Clock()
        self.reference = Reference()
        self.database = self.run(Database.open(StoreConfig(self.url), self.clock))

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def teardown(self) -> None:
        self.run(self.database.close())

    @initialize(target=names)
    def root(self) -> str:
        return self._put(None, None)

    @rule(target=names, parent=names, ttl=st.none() | st.integers(1, 20))
    def extend(self, parent: str, ttl: int | None) -> str:
        """From a deleted one too: its turn was running."""
        return self._put(self.reference.nodes[parent], ttl)

    @rule(target=names, ttl=st.none() | st.integers(1, 20))
    def begin(self, ttl: int | None) -> str:
        return self._put(None, ttl)

    @rule(name=names)
    def put_again(self, name: str) -> None:
        self._write(name)

    @rule(name=names, queued=st.booleans())
    def delete(self, name: str, queued: bool) -> None:
        if queued:
            self.run(self.database.write([DeleteResponse(self.tenant, name)]))
        else:
            assert self.run(self.database.delete(self.tenant, name)) == (name in self.reference.living)
        self.reference.living.discard(name)

    @rule(seconds=st.integers(1, 15))
    def pass_time(self, seconds: int) -> None:
        self.clock.now += seconds
        while self.run(self.database.expire(3)):
            pass
        for name, until in self.reference.expiry.items():
            if until is not None and until <= self.clock.now:
                self.reference.living.discard(name)

    @invariant()
    def the_living_are_whole_and_the_rest_is_gone(self) -> None:
        for name, node in self.reference.nodes.items():
            found = self.run(self.database.load(self.tenant, name))
            assert (found is not None) == (name in self.reference.living)
            if found is not None:
                assert facts(found.node) == facts(node)
        left = self.run(rows_of(self.database, responses, self.tenant))
        assert {row.id for row in left if row.body is not None} == self.reference.living
        # One that stands alone has its ancestors inside, so fewer rows than needed may be there, but none beyond.
        assert {row.id for row in left if row.delta is not None} <= self.reference.needed()
        assert bool(self.run(rows_of(self.database, echoes, self.tenant))) == bool(self.reference.living)

    def _put(self, parent: Response | None, ttl: int | None) -> str:
        node = turn(f"{len(self.reference.nodes)}", parent, said=f"text {len(self.reference.nodes)}")
        self.reference.nodes[node.id] = node
        self.reference.expiry[node.id] = None if ttl is None else self.clock.now + ttl
        self.reference.living.add(node.id)
        self._write(node.id)
        return node.id

    def _write(self, name: str) -> None:
        expiry = self.reference.expiry[name]
        job = put(self.reference.nodes[name], self.tenant, request=asked(tools=TOOLS), expires_at=expiry)
        self.run(self.database.write([job]))


def test_deletion_is_as_in_a_small_model(url: str) -> None:
    Deletion.url = url
    Deletion.loop = asyncio.new_event_loop()
    try:
        run_state_machine_as_test(
            Deletion,
            settings=settings(
                max_examples=8, stateful_step_count=20, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
    finally:
        Deletion.loop.close()
