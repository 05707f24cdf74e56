"""What was acknowledged is in the database after its actor was killed: all of it, once, and in one piece."""

from __future__ import annotations

import asyncio
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import sqlalchemy as sa

from actors import spill_replay
from actors.spill import Spill
from actors.spill_replay import ReplayReport, left_by, replay
from actors.store.database import Database, StoreConfig
from actors.store.errors import ErrorKind, StoreError, Unreadable
from actors.store.jobs import (
    DeleteConversation,
    DeleteItem,
    DeleteResponse,
    Job,
    PutConversation,
    PutItems,
    PutResponse,
    PutUsage,
)
from actors.store.tables import conversation_items, conversations, responses, usage
from actors.stored import StoredResponse
from gateway.protocol.items import Message
from tests.support.postgres import PostgresServer, running_postgres
from tests.support.responses import NOW, TOOLS, asked, chain, put, same, turn

ROOT = Path(__file__).resolve().parents[2]
KEY = b"k" * 32
ACTOR = """
import asyncio, sys
from pathlib import Path
from actors.postwork import Job, PostWork
from actors.spill import Spill, SpillLimits
from actors.store.database import Database, StoreConfig
from tests.actors.test_spill_replay import KEY, line
from tests.support.responses import TOOLS, asked, put, turn
url, directory, owner = sys.argv[1:]
async def main():
    database = await Database.open(StoreConfig(url, (KEY,), deadline_s=60.0))  # three start at once, on a busy machine
    spill = Spill(Path(directory), owner, (KEY,), SpillLimits(segment_bytes=30_000, empty_bytes=10_000))
    post = PostWork(database, None, lambda job, seconds: spill.done(job.spilled))
    post.start()
    number, nodes, request = 0, {}, asked(tools=TOOLS)
    while True:
        lane = number % 3
        nodes[lane] = node = turn(f"{owner}x{number}", nodes.get(lane), said=f"{number} " * 20)
        for kind, job in (("response", put(node, request=request)), ("usage", line(node.id))):
            ticket = spill.append([job])
            assert ticket is not None
            post.put(Job(kind, node.id, job, 1000, spilled=ticket))
        print(node.id, flush=True)
        number += 1
        await asyncio.sleep(0.0003)
asyncio.run(main())
"""


def line(name: str) -> PutUsage:
    return PutUsage("t", name, "key", "m", "completed", NOW, 1, 1, 1, 1)


@pytest.fixture(scope="module")
def postgres() -> Iterator[PostgresServer]:
    with running_postgres() as server:
        yield server


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/store.db"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.create_database()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "spill"


def leave(directory: Path, owner: str, jobs: Sequence[Job], done: int = 0) -> None:
    """An actor appended these and was killed when the first `done` were known to be in the database."""
    spill = Spill(directory, owner)
    tickets = [spill.append([job]) for job in jobs]
    for ticket in tickets[:done]:
        assert ticket is not None
        spill.done(ticket)
    for segment in spill._segments:
        os.close(segment.descriptor)


async def rows(database: Database) -> list[list[tuple[object, ...]]]:
    """All that is in it, as far as it doesn't depend on what was written with what."""
    wanted = (
        sa.select(responses.c.id, responses.c.tenant, responses.c.state, responses.c.parent_id, responses.c.depth),
        sa.select(usage),
        sa.select(conversations.c.id, conversations.c.owner, conversations.c.head, conversations.c.rendered),
        sa.select(conversation_items.c.item_id, conversation_items.c.position),
    )
    return [
        sorted(await database._connections.read(lambda c, q=query: [tuple(row) for row in c.execute(q)]), key=repr)
        for query in wanted
    ]


def some_of_everything() -> list[Job]:
    """In an order that matters: things are made, changed and deleted."""
    nodes = chain("n", 5)
    fork = turn("f", nodes[1])
    request = asked(tools=TOOLS)
    said = [Message("user", f"{number}", id=f"msg_{number}") for number in range(5)]
    return [
        put(nodes[0], request=request),
        line("resp_n0"),
        PutConversation("t", "conv_1", "a", NOW, {"k": "v"}),
        PutItems("t", "conv_1", "a", tuple(said[:2])),
        put(nodes[1], request=request),
        put(nodes[2]),
        put(fork),
        put(turn("u"), tenant="u"),
        DeleteResponse("t", nodes[1].id),
        PutItems("t", "conv_1", "a", tuple(said[2:]), nodes[2].id, 5),
        DeleteItem("t", "conv_1", "a", "msg_3"),
        put(nodes[3], request=request),
        PutConversation("t", "conv_1", "a", NOW, {"k": "w"}),
        PutConversation("t", "conv_2", "a", NOW),
        put(nodes[4]),
        DeleteConversation("t", "conv_2", "a"),
        line("resp_n4"),
        DeleteResponse("t", nodes[4].id),
    ]


class Faulty:
    """A database whose `at`-th call fails: before it does anything, or after, so that only the answer is lost."""

    def __init__(self, database: Database, at: int, kind: ErrorKind = "transient", *, after: bool = False) -> None:
        self.database, self.at, self.kind, self.after = database, at, kind, after
        self.calls = 0

    def _fail(self) -> None:
        if self.calls == self.at:
            raise StoreError(self.kind, "made up")

    async def write(self, jobs: Sequence[Job]) -> Sequence[object]:
        self.calls += 1
        if not self.after:
            self._fail()
        outdated = await self.database.write(jobs)
        self._fail()
        return outdated

    async def load(self, tenant: str, response_id: str) -> StoredResponse | None:
        self.calls += 1
        self._fail()
        return await self.database.load(tenant, response_id)


class Refusing:
    """A database that never takes some jobs."""

    def __init__(self, database: Database, refused: Sequence[Job]) -> None:
        self.database, self.refused = database, [_name(job) for job in refused]

    async def write(self, jobs: Sequence[Job]) -> Sequence[object]:
        if any(_name(job) in self.refused for job in jobs):
            raise StoreError("permanent", "made up")
        return await self.database.write(jobs)

    async def load(self, tenant: str, response_id: str) -> StoredResponse | None:
        return await self.database.load(tenant, response_id)


def _name(job: Job) -> object:
    return job.record.id if isinstance(job, PutResponse) else job


async def test_the_database_is_as_if_there_had_been_no_kill(
    directory: Path, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the replay is cut off, and whether the last answer or the last write was lost."""
    monkeypatch.setattr(spill_replay, "BATCH_JOBS", 3)
    jobs = some_of_everything()
    batches = math.ceil(len(jobs) / 3)
    reference = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/reference.db"))
    for job in jobs:
        await reference.write([job])
    wanted = await rows(reference)
    database = await Database.open(StoreConfig(url))
    try:
        for after in (False, True):
            for at in range(1, batches + 2):
                await database.purge_tenant("t")
                await database.purge_tenant("u")
                leave(directory, "a", jobs)
                first = await replay(directory, Faulty(database, at, after=after))
                assert (first.files, first.left) == ((0, 1) if at <= batches else (1, 0))
                second = await replay(directory, database)
                assert first.written + second.written == len(jobs)
                assert await rows(database) == wanted
                assert not left_by(directory, "a")
    finally:
        await database.close()
        await reference.close()


async def test_what_was_done_is_not_written_again(directory: Path, url: str) -> None:
    nodes = chain("n", 6)
    database = await Database.open(StoreConfig(url))
    try:
        jobs = [put(node) for node in nodes]
        await database.write(jobs[:4])
        leave(directory, "a", jobs, done=3)
        assert await replay(directory, database) == ReplayReport(files=1, written=3)
        for job in jobs:
            assert same(await database.load("t", job.record.id), job)
    finally:
        await database.close()


async def test_two_that_replay_do_each_file_once(directory: Path, tmp_path: Path) -> None:
    database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
    try:
        alive = Spill(directory, "z")
        assert alive.append([line("alive")]) is not None
        for owner in "abcdef":
            leave(directory, owner, [put(node) for node in chain(owner, 4)])
        reports = await asyncio.gather(*(replay(directory, database) for _ in range(3)))
        assert sum(report.written for report in reports) == 24
        assert sum(report.files for report in reports) == 6
        assert not any(report.left for report in reports)
        assert left_by(directory, "z")
        assert not left_by(directory, "a")
        assert (await rows(database))[1] == []
        alive.close()
    finally:
        await database.close()


async def test_a_parent_may_be_in_another_actors_file(directory: Path, tmp_path: Path) -> None:
    """Which comes later in the alphabet, so that it is replayed after its continuation was tried."""
    nodes = chain("n", 4)
    jobs = [put(node) for node in nodes]
    database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
    try:
        leave(directory, "c", jobs[:1])
        leave(directory, "b", jobs[1:2])
        leave(directory, "a", jobs[2:])
        assert await replay(directory, database) == ReplayReport(files=3, written=4)
        assert same(await database.load("t", nodes[3].id), jobs[3])
    finally:
        await database.close()


async def test_a_response_waits_for_what_it_continues_but_not_for_ever(directory: Path, tmp_path: Path) -> None:
    nodes = chain("n", 3)
    jobs = [put(node) for node in nodes]
    database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
    try:
        leave(directory, "a", [*jobs[1:], line("r")])
        assert await replay(directory, database) == ReplayReport(left=1, written=1, held=2)
        assert await replay(directory, database) == ReplayReport(left=1, held=2)
        assert await replay(directory, database, patience_s=-1.0) == ReplayReport(files=1, written=2, severed=2)
        found = await database.load("t", nodes[2].id)
        assert found is not None
        assert (found.body(), found.given, found.node) == (jobs[2].record.body(), jobs[2].record.given, None)
        await database.purge_tenant("t")
        leave(directory, "a", jobs[1:])
        assert (await replay(directory, database)).held == 2
        await database.write(jobs[:1])  # the actor that had it could write again
        assert await replay(directory, database) == ReplayReport(files=1, written=2)
        assert same(await database.load("t", nodes[2].id), jobs[2])
    finally:
        await database.close()


async def test_what_was_written_before_its_parent_was_deleted_can_be_continued(directory: Path, tmp_path: Path) -> None:
    nodes = chain("n", 4)
    forks = [turn("f", nodes[0]), turn("g", nodes[0])]
    late, early = (put(fork) for fork in forks)
    jobs = [put(node) for node in nodes]
    database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
    try:
        await database.write([*jobs[:3], early])
        assert await database.delete("t", nodes[0].id)
        leave(directory, "a", [late, *jobs[1:], early])
        assert await replay(directory, database) == ReplayReport(left=1, written=4, held=1)
        assert await replay(directory, database, patience_s=-1.0) == ReplayReport(files=1, written=1, severed=1)
        for job in (*jobs[1:], early):
            assert same(await database.load("t", job.record.id), job)
        assert await database.body("t", "resp_f") == late.record.body()
    finally:
        await database.close()


async def test_a_parent_that_cannot_be_read_is_waited_for(directory: Path, tmp_path: Path) -> None:
    nodes = chain("n", 2)
    url = f"sqlite:///{tmp_path}/store.db"
    sealed = await Database.open(StoreConfig(url, (KEY,)))
    keyless = await Database.open(StoreConfig(url))
    try:
        await sealed.write([put(nodes[0])])
        with pytest.raises(Unreadable):
            await keyless.load("t", nodes[0].id)
        leave(directory, "a", [put(nodes[1])])
        assert await replay(directory, keyless, patience_s=-1.0) == ReplayReport(left=1, held=1)
        assert await replay(directory, sealed) == ReplayReport(files=1, written=1)
    finally:
        await sealed.close()
        await keyless.close()


async def test_what_the_database_refuses_stays_and_nothing_else_does(directory: Path, tmp_path: Path) -> None:
    jobs = [job for job in some_of_everything() if not isinstance(job, DeleteResponse)]
    conversation = [job for job in jobs if getattr(job, "conversation_id", getattr(job, "id", "")) == "conv_1"]
    database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
    try:
        leave(directory, "a", jobs)
        leave(directory, "b", [PutItems("t", "conv_1", "a", (Message("user", "more", id="msg_9"),))])
        # Later changes of a conversation would find it as it never was.
        refusing = Refusing(database, [jobs[1], conversation[0]])
        report = await replay(directory, refusing)
        refused = 2 + len(conversation)
        assert report == ReplayReport(left=2, written=len(jobs) + 1 - refused, refused=refused)
        assert await replay(directory, refusing) == ReplayReport(left=2, refused=refused)
        assert await replay(directory, database) == ReplayReport(files=2, written=refused)
        found = await database.conversation("t", "conv_1")
        assert found is not None
        assert [item.id for item in found.items] == ["msg_0", "msg_1", "msg_2", "msg_4", "msg_9"]
    finally:
        await database.close()


async def test_a_conversation_that_has_another_owner_is_left_as_it_is(directory: Path, tmp_path: Path) -> None:
    database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
    try:
        await database.write([PutConversation("t", "conv_1", "a", NOW)])
        assert await database.claim("t", "conv_1", "a", "b")
        leave(directory, "a", [PutItems("t", "conv_1", "a", (Message("user", "late", id="msg_1"),)), line("r")])
        assert await replay(directory, database) == ReplayReport(files=1, written=2, outdated=1)
        found = await database.conversation("t", "conv_1")
        assert found is not None
        assert (found.owner, found.items) == ("b", ())
    finally:
        await database.close()


async def test_what_is_replayed_takes_no_more_room_than_what_was_written(directory: Path, tmp_path: Path) -> None:
    """An answer that was replayed can be deleted, and goes with all that it had."""
    database = await Database.open(StoreConfig(f"sqlite:///{tmp_path}/store.db"))
    try:
        job = put(turn("n0"), request=asked(tools=TOOLS))
        leave(directory, "a", [job])
        await replay(directory, database)
        assert await database.body("t", "resp_n0") == job.record.body()
        assert await database.delete("t", "resp_n0")
        leave(directory, "a", [job])  # a copy of the file that came late
        await replay(directory, database)
        assert await database.load("t", "resp_n0") is None
    finally:
        await database.close()


ACTORS = 3


def kill_some(url: str, directory: Path) -> list[str]:
    """Run actors that put, acknowledge and write as fast as they can, and kill them at random moments: all ids that
    they acknowledged."""
    actors = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", ACTOR, url, str(directory), f"a{number}"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(ACTORS)
    ]
    told: list[str] = []
    try:
        for actor in actors:
            assert actor.stdout is not None
            told.append(actor.stdout.readline())
            assert told[-1], "the actor did not start"
        for actor in actors:
            time.sleep(random.uniform(0.0, 0.1))
            actor.send_signal(signal.SIGKILL)
            assert actor.stdout is not None
            told += actor.stdout.readlines()
    finally:
        for actor in actors:
            actor.kill()
            actor.wait(20)
            assert actor.stdout is not None
            actor.stdout.close()
    return [name.strip() for name in told if name.endswith("\n")]


async def test_all_that_a_killed_actor_acknowledged_is_there(directory: Path, url: str) -> None:
    acknowledged = await asyncio.to_thread(kill_some, url, directory)
    database = await Database.open(StoreConfig(url, (KEY,)))
    try:
        before = {row[0] for row in (await rows(database))[0]}
        assert set(acknowledged) - before  # the kills came in between
        reports = await asyncio.gather(*(replay(directory, database, (KEY,)) for _ in range(2)))
        # Each takes some of the files: what continues a response in another's may have to wait for the next try.
        assert all(report.left == 0 or report.held for report in reports)
        reports.append(await replay(directory, database, (KEY,)))
        assert reports[-1].left == 0
        assert not any(report.severed or report.refused or report.unreadable for report in reports)
        assert not any(left_by(directory, f"a{number}") for number in range(ACTORS))
        found, lines, *_ = await rows(database)
        stored = [str(row[0]) for row in found]
        assert set(acknowledged) <= set(stored)
        assert len(stored) - len(acknowledged) <= ACTORS  # those whose actor was killed before it could tell
        assert len(lines) in range(len(acknowledged), len(stored) + 1)
        for number in range(ACTORS):
            newest = [name for name in acknowledged if name.startswith(f"resp_a{number}x")][-1]
            record = await database.load("t", newest)
            assert record is not None
            assert same(record, put_again(record, number, int(newest.rpartition("x")[2])))
    finally:
        await database.close()


def put_again(record: StoredResponse, actor: int, position: int) -> PutResponse:
    """As that actor put it."""
    node = None
    for index in range(position % 3, position + 1, 3):
        node = turn(f"a{actor}x{index}", node, said=f"{index} " * 20)
    assert node is not None
    assert node.id == record.id
    return put(node, request=asked(tools=TOOLS))
