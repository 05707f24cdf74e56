"""Post-work in any order with faults at every step: puts, turns that come and go, writes that are taken, lost, refused
or cut off, an owner that is cancelled and started again. Nothing happens by itself: each rule is one step.

The sink is a small database: a batch is taken whole or not at all, also when its answer is lost. The model knows what
was put and in which order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from actors.backpressure import Room
from actors.postwork import Fault, Job, Left, PostWork, PostWorkLimits

LIMITS = PostWorkLimits(jobs=7, bytes=60, batch_jobs=4, batch_bytes=25, linger_s=0, pause_s=1, longest_pause_s=4)
Key = tuple[str, str]
PICK = st.integers(0, 1000)


class StoreFault(Exception):
    def __init__(self, kind: Fault) -> None:
        super().__init__(kind)
        self.kind = kind


class Database:
    """`write` waits until the machine says how it ends. Payloads are the jobs themselves."""

    def __init__(self) -> None:
        self.rows: dict[Key, Job] = {}
        self.taken: list[list[Job]] = []
        self.poison: set[int] = set()  # by identity
        self.refused: set[int] = set()
        self.ending: asyncio.Future[None] | None = None
        self.batch: list[Job] = []

    async def write(self, jobs: Sequence[Any]) -> Sequence[object]:
        batch = [job for job in jobs if isinstance(job, Payload)]
        assert len(batch) == len(jobs) <= LIMITS.batch_jobs
        self.batch = [payload.job() for payload in batch]
        self.ending = asyncio.get_running_loop().create_future()
        try:
            await self.ending
        finally:
            self.ending = None
        if self.spoiled:
            if len(self.batch) == 1:
                self.refused.add(id(self.batch[0]))
            raise StoreFault("permanent")
        self.take()
        return ()

    @property
    def spoiled(self) -> bool:
        return any(id(job) in self.poison for job in self.batch)

    def take(self) -> None:
        self.taken.append(self.batch)
        self.rows |= {job.key: job for job in self.batch}


class Payload:
    """What the sink gets of a job: enough to name it."""

    def __init__(self) -> None:
        self.of: Job | None = None

    def job(self) -> Job:
        assert self.of is not None
        return self.of


class Turn:
    def __init__(self, name: str, parent: str | None, jobs: int, asking: asyncio.Future[Room]) -> None:
        self.name, self.parent, self.jobs, self.asking = name, parent, jobs, asking

    @property
    def running(self) -> bool:
        return self.asking.done() and not self.asking.cancelled()


class PostWorkMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.database = Database()
        self.naps: list[asyncio.Future[None]] = []
        self.told: list[Job] = []
        self.post = PostWork(self.database, LIMITS, self.written, clock=lambda: 0.0, sleep=self.sleep)
        self.turns: list[Turn] = []
        self.put: list[Job] = []
        self.names: list[str] = []
        self.count = 0
        self.admitted: set[str] = set()
        self.step(self.post.start)

    def written(self, job: Job, seconds: float) -> None:
        self.told.append(job)

    async def sleep(self, seconds: float) -> None:
        nap: asyncio.Future[None] = self.loop.create_future()
        self.naps.append(nap)
        await nap

    def step(self, action: Any = None) -> Any:
        """Do this on the loop, and all that follows by itself."""

        async def run() -> Any:
            result = None if action is None else action()
            for _ in range(12):
                await asyncio.sleep(0)
            return result

        result = self.loop.run_until_complete(run())
        running = {turn.name for turn in self.turns if turn.running}
        assert running <= self.admitted or self.post.bytes < LIMITS.bytes, "let in where there was no room"
        self.admitted |= running
        return result

    def add(self, kind: str, name: str, size: int, after: str | None, room: Room | None) -> None:
        payload = Payload()
        payload.of = job = Job(kind, name, payload, size, after)
        self.put.append(job)
        self.step(lambda: self.post.put(job, room))

    # Turns

    @precondition(lambda self: len(self.turns) < 6)
    @rule(pick=PICK, asked=st.lists(st.integers(1, 3), min_size=1, max_size=4))
    def ask(self, pick: int, asked: list[int]) -> None:
        """Turns that continue an earlier one, or none."""
        for jobs in asked:
            self.ask_one(pick, jobs)

    def ask_one(self, pick: int, jobs: int) -> None:
        self.count += 1
        parent = self.names[pick % len(self.names)] if self.names and pick % 3 else None
        asking = asyncio.ensure_future(self.post.room(1000, jobs), loop=self.loop)
        self.turns.append(Turn(f"r{self.count}", parent, jobs, asking))
        self.step()

    @precondition(lambda self: any(turn.running for turn in self.turns))
    @rule(pick=PICK, sizes=st.lists(st.integers(1, 30), min_size=1, max_size=3))
    def leave(self, pick: int, sizes: list[int]) -> None:
        """Turns end: what they reserved they put."""
        for size in sizes:
            running = [turn for turn in self.turns if turn.running]
            if running:
                self.leave_one(running[pick % len(running)], size)

    def leave_one(self, turn: Turn, size: int) -> None:
        self.turns.remove(turn)
        room = turn.asking.result()
        self.add("response", turn.name, size, turn.parent, room)
        if turn.jobs > 1:
            self.add("usage", turn.name, 1, None, room)
        self.names.append(turn.name)
        self.step(room.close)

    @precondition(lambda self: any(turn.running for turn in self.turns))
    @rule(pick=PICK, number=st.integers(1, 3), adds=st.booleans())
    def edit(self, pick: int, number: int, *, adds: bool) -> None:
        """The same thing is written over and over, or added to."""
        running = [turn for turn in self.turns if turn.running]
        turn = running[pick % len(running)]
        self.turns.remove(turn)
        room = turn.asking.result()
        self.add("conversation", f"c{number}", 2, f"c{number}" if adds else None, room)
        self.step(room.close)

    @precondition(lambda self: self.post.kept > 0)
    @rule(pick=PICK)
    def replace_kept(self, pick: int) -> None:
        """What could not be written is written anew, or deleted, by work that finds room."""
        if self.post.rooms.waiting or not self.post._fits(1):
            return
        job, _ = self.post._kept[pick % self.post.kept]
        room = self.step(lambda: asyncio.ensure_future(self.post.room(0, 1), loop=self.loop)).result()
        self.add(job.kind, job.id, 1, None, room)

    @precondition(lambda self: bool(self.turns))
    @rule(pick=PICK)
    def leave_nothing(self, pick: int) -> None:
        """A turn is cut off, while it runs or while it waits for room."""
        turn = self.turns.pop(pick % len(self.turns))
        if turn.running:
            self.step(turn.asking.result().close)
        else:
            self.step(turn.asking.cancel)

    # The database

    @precondition(lambda self: self.database.ending is not None)
    @rule(times=st.integers(1, 4))
    def answer(self, times: int) -> None:
        """Writes are taken, or refused for what is in them."""
        for _ in range(times):
            if self.database.ending is not None:
                self.end(None)

    @precondition(lambda self: self.database.ending is not None)
    @rule(
        error=st.sampled_from([StoreFault("transient"), StoreFault("full"), asyncio.CancelledError()]),
        lost=st.booleans(),
        wait=st.booleans(),
    )
    def fault(self, error: BaseException, *, lost: bool, wait: bool) -> None:
        """It fails for now, or is cancelled within; perhaps the batch was taken and only the answer was lost."""
        if lost and not self.database.spoiled:
            self.database.take()
        self.end(error)
        if not wait:
            self.wake()

    def end(self, error: BaseException | None) -> None:
        ending = self.database.ending
        assert ending is not None
        if error is None:
            self.step(lambda: ending.set_result(None))
        elif isinstance(error, asyncio.CancelledError):
            self.step(ending.cancel)
        else:
            self.step(lambda: ending.set_exception(error))

    @precondition(lambda self: bool(self.put))
    @rule(pick=PICK)
    def spoil(self, pick: int) -> None:
        """This can't be written from now on."""
        self.database.poison.add(id(self.put[-1 - pick % min(6, len(self.put))]))

    @precondition(lambda self: self.post.kept > 0)
    @rule(cured=st.booleans())
    def retry_failed(self, *, cured: bool) -> None:
        """The kept jobs are tried again, perhaps for good."""
        if cured:
            self.database.poison.clear()
        self.step(self.post.retry_failed)

    # The owner

    @precondition(lambda self: any(not nap.done() for nap in self.naps))
    @rule()
    def wake(self) -> None:
        self.step(lambda: [nap.set_result(None) for nap in self.naps if not nap.done()])

    @rule(lost=st.booleans())
    def restart(self, *, lost: bool) -> None:
        """The owner is cancelled, perhaps in the middle of a write that is taken all the same."""
        if lost and self.database.ending is not None and not self.database.spoiled:
            self.database.take()
        task = self.post._task
        assert task is not None
        assert not task.done(), "the owner outlives every fault"
        self.step(task.cancel)
        self.step(self.post.start)

    # What must be

    @invariant()
    def nothing_is_lost(self) -> None:
        post = self.post
        assert len(self.put) == post.counters.put
        assert len(self.put) == post.counters.written + post.depth + post.kept + post.counters.superseded
        assert post.counters.written == len(self.told)
        held = [*(job for job, _ in post._queue), *(job for job, _ in post._kept)]
        assert post.bytes == sum(job.size for job in held)
        newest = {job.key: job for job in self.put}
        for key, job in newest.items():
            if post.durable(key[1], key[0]):
                assert self.database.rows[key] is job
            else:
                assert post.newest(key[1], key[0]) is job.payload
                assert any(job is other for other in held)

    @invariant()
    def a_job_is_told_written_once_and_only_if_it_is(self) -> None:
        assert len({id(job) for job in self.told}) == len(self.told)
        taken = {id(job) for batch in self.database.taken for job in batch}
        assert all(id(job) in taken for job in self.told)

    @invariant()
    def parents_come_first(self) -> None:
        place = {id(job): number for number, job in enumerate(self.put)}
        there: set[Key] = set()
        for batch in self.database.taken:
            for job in batch:
                if job.after is not None and job.after != job.id:
                    assert (job.kind, job.after) in there
                there.add(job.key)
            # within what is written together, and of one thing, the order is that of the puts
            for key in {job.key for job in batch}:
                places = [place[id(job)] for job in batch if job.key == key]
                assert places == sorted(places)
        of_one: dict[Key, int] = {}
        for job in self.told:
            assert of_one.get(job.key, -1) < place[id(job)]
            of_one[job.key] = place[id(job)]

    @invariant()
    def an_addition_has_all_that_it_adds_to(self) -> None:
        """What was put of the thing before it is written, unless something written later replaced it."""
        told = {id(job) for job in self.told}
        for place, job in enumerate(self.put):
            if job.after == job.id and id(job) in told:
                for earlier in reversed(self.put[:place]):
                    if earlier.key == job.key:
                        assert id(earlier) in told
                        if earlier.after is None:
                            break

    @invariant()
    def only_what_was_refused_is_kept(self) -> None:
        """Or what needs such a job."""
        assert all(id(job) in self.database.refused or job.after is not None for job, _ in self.post._kept)

    @invariant()
    def memory_is_bounded(self) -> None:
        post = self.post
        assert post.depth + post.kept + post.rooms.reserved <= LIMITS.jobs
        assert post.rooms.reserved == sum(turn.jobs for turn in self.turns if turn.running)
        assert post.rooms.waiting == sum(not turn.asking.done() for turn in self.turns)

    @invariant()
    def whoever_fits_is_in(self) -> None:
        waiting = [turn for turn in self.turns if not turn.asking.done()]
        if waiting:
            held = self.post.depth + self.post.kept + self.post.rooms.reserved
            assert held + waiting[0].jobs > LIMITS.jobs or self.post.bytes >= LIMITS.bytes

    def teardown(self) -> None:
        """The faults end, the process stops: everything is written, and it is what was put."""
        self.database.poison.clear()
        for turn in list(self.turns):
            self.step(turn.asking.result().close if turn.running else turn.asking.cancel)
        self.turns.clear()
        draining = self.step(lambda: asyncio.ensure_future(self.post.drain(1000), loop=self.loop))
        for _ in range(1000):
            if draining.done():
                break
            for nap in self.naps:
                if not nap.done():
                    nap.set_result(None)
            if self.database.ending is not None:
                self.answer(1)
            self.step()
        assert draining.result() == Left(0, 0, 0)
        self.nothing_is_lost()
        self.parents_come_first()
        assert self.database.rows == {job.key: job for job in self.put}
        self.loop.run_until_complete(self.post.close())
        self.loop.close()


TestPostWork = PostWorkMachine.TestCase
TestPostWork.settings = settings(max_examples=80, stateful_step_count=80, deadline=None)
