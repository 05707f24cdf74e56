"""Post-work: what is written after a turn's terminal event was sent, while its client is already at the next turn.

    put -> waiting -> written                    the sink took it
                   -> waiting                    a passing fault (database gone, disk full): tried again for ever
                   -> kept                       the sink will never take it; the jobs that need it are kept as well
           kept    -> waiting                    `retry_failed`
           kept    -> dropped                    a later job of the same thing was written

Nothing that was put is lost while the process lives. So memory is bounded at the other end: a turn takes `room` before
it starts, and is refused when there is none in time (design.md sections 1 and 4, decision 10).

One task owns the sink and writes in the order of `put`, which is also the order of every conversation. It commits
groups: all that waits, up to a bound. A batch that fails is halved and the next ones grow again, so that a job that can
never be written is found in a few steps and then stands alone, while a database that only groans gets smaller bites.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal, Protocol

from actors.backpressure import Room, Rooms

log = logging.getLogger(__name__)

MIB = 1 << 20
JOBS_PER_TURN = 2
"""What a turn reserves: its response and its usage row."""
DRAINING_PAUSE_S = 0.2
"""The longest pause between tries once the process is about to end."""

Fault = Literal["transient", "full", "permanent"]
Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Job:
    """One thing to write: `payload` is what the sink takes, about `size` bytes of it. `kind` and `id` name it in logs,
    so they hold no content. `after` is the id of a job of the same kind without which this one is worth nothing: a
    response's parent, or the own id if this only adds to what was put before. `spilled` is where it waits on the disk
    as well (`actors.spill.Ticket`), None if nowhere."""

    kind: str
    id: str
    payload: object
    size: int
    after: str | None = None
    spilled: object | None = None

    @property
    def key(self) -> Key:
        """What it is about."""
        return self.kind, self.id


class Sink(Protocol):
    """Where jobs are written to."""

    async def write(self, jobs: Sequence[Any]) -> Sequence[object]:
        """All of these payloads in this order, or none: one transaction, ended within a deadline of its own. The same
        one twice changes nothing, since the answer to a commit may be lost. Returns those that came too late to change
        anything, since another actor has taken over what they are about.

        Raises an error with a `kind`: `transient` and `full` may pass, `permanent` won't. Of others, `OSError` and
        `TimeoutError` count as transient, any other as permanent.
        """
        ...


@dataclass(frozen=True, slots=True)
class PostWorkLimits:
    """`jobs` and `bytes` bound what waits, what is kept and, for jobs, what running turns have reserved: at least two
    a turn. Running turns may overrun `bytes` by what they put. A batch has up to `batch_jobs` and `batch_bytes` and is
    held open for `linger_s`. Pauses between tries grow from `pause_s` to `longest_pause_s`."""

    jobs: int = 20_000
    bytes: int = 256 * MIB
    batch_jobs: int = 128
    batch_bytes: int = 4 * MIB
    linger_s: float = 0.005
    pause_s: float = 0.05
    longest_pause_s: float = 5.0


@dataclass(slots=True)
class PostWorkCounters:
    """Totals since the start. `retries` are tries that failed for now, `full` those of them for want of space; `failed`
    jobs that the sink refused for good, `orphaned` those kept untried because they need such a one, `superseded` kept
    ones that a later write made needless; `outdated` are of those written and changed nothing. `batch_sizes[n]` counts
    batches of up to 2**n jobs."""

    put: int = 0
    written: int = 0
    written_bytes: int = 0
    batches: int = 0
    retries: int = 0
    full: int = 0
    failed: int = 0
    orphaned: int = 0
    superseded: int = 0
    outdated: int = 0
    batch_sizes: list[int] = field(default_factory=lambda: [0] * 12)


@dataclass(frozen=True, slots=True)
class Left:
    """What a drain could not write: jobs that still wait, and kept ones that the sink refuses; bytes of both."""

    waiting: int
    kept: int
    bytes: int


_Waiting = tuple[Job, float]


class PostWork:
    """The queue of one actor and the task that empties it. Bound to one event loop.

    `written` is told each job that became durable and how many seconds after its `put`; for metrics and audit lines.
    `dropped` is told each kept job that a later write made needless.
    `rooms` shows what turns have reserved and how many wait.
    """

    def __init__(
        self,
        sink: Sink,
        limits: PostWorkLimits | None = None,
        written: Callable[[Job, float], None] | None = None,
        dropped: Callable[[Job], None] | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self.counters = PostWorkCounters()
        self.rooms = Rooms(self._fits)
        self._sink = sink
        self._limits = limits or PostWorkLimits()
        self._written = written
        self._dropped = dropped
        self._clock = clock
        self._sleep = sleep
        self._chance = chance
        self._queue: deque[_Waiting] = deque()
        self._kept: list[_Waiting] = []
        self._kept_keys: Counter[Key] = Counter()
        # The newest job of each thing that is not durable.
        self._newest: dict[Key, Job] = {}
        self._bytes = 0
        self._bite = self._limits.batch_jobs
        self._pause_s = self._limits.pause_s
        self._failing = False
        self._retry_kept = False
        self._draining = False
        self._wake = asyncio.Event()
        self._empty = asyncio.Event()
        self._nap: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def depth(self) -> int:
        """Jobs that wait to be written, those of the batch at hand included."""
        return len(self._queue)

    @property
    def kept(self) -> int:
        """Jobs that the sink refuses, and those that need them."""
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """About what all of them hold."""
        return self._bytes

    @property
    def oldest_age_s(self) -> float:
        """How long the next job has waited; 0 if none waits."""
        return self._clock() - self._queue[0][1] if self._queue else 0.0

    def start(self) -> None:
        """Begin to write. Call from the event loop that puts."""
        self._task = asyncio.create_task(self._run(), name="post-work")

    async def close(self) -> None:
        """Stop writing, in the middle of a batch if need be: what waits stays as it is. Idempotent."""
        self.rooms.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def room(self, deadline_s: float, jobs: int = JOBS_PER_TURN) -> Room:
        """Wait until a turn may start, in the order of asking, at most `deadline_s`. Raises `ApiError` with advice when
        to try again."""
        return await self.rooms.take(jobs, deadline_s)

    def put(self, job: Job, room: Room | None = None) -> None:
        """Have it written. Never waits and never fails. `room` is what the turn took before it began."""
        self._queue.append((job, self._clock()))
        self._newest[job.key] = job
        self._bytes += job.size
        self.counters.put += 1
        if room is not None:
            room.use()
        self._empty.clear()
        self._wake.set()

    def durable(self, response_id: str, kind: str = "response") -> bool:
        """Whether all that was put about it is written; true of what was never put."""
        return (kind, response_id) not in self._newest

    def newest(self, response_id: str, kind: str = "response") -> object | None:
        """The payload last put about it if that is not written yet, so that it can be answered from here."""
        job = self._newest.get((kind, response_id))
        return None if job is None else job.payload

    def retry_failed(self) -> None:
        """Give the kept jobs another try, before all others, as they are older."""
        if self._kept:
            self._retry_kept = True
            self._empty.clear()
            self._wake.set()

    async def drain(self, deadline_s: float) -> Left:
        """Let no turn in any more and write all there is, the kept jobs once more. What is left after the deadline is
        returned; `close` then gives it up."""
        self._draining = True
        self.rooms.close()
        self.retry_failed()
        if self._nap is not None:
            self._nap.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline_s):
                while self._queue or self._retry_kept:
                    await self._empty.wait()
        left = Left(len(self._queue), len(self._kept), self._bytes)
        if left.waiting or left.kept:
            log.error("post-work is not all written: %d jobs wait, %d were refused", left.waiting, left.kept)
        return left

    async def _run(self) -> None:
        while True:
            if self._retry_kept:
                self._unshelve()
            self._shelve_orphans()
            if not self._queue:
                self._empty.set()
                self._wake.clear()
                await self._wake.wait()
                continue
            open_s = self._queue[0][1] + self._limits.linger_s - self._clock()
            if open_s > 0 and len(self._queue) < self._limits.batch_jobs and not self._draining:
                await self._pause(open_s)
            batch = self._next_batch()
            fault = await self._try(batch)
            if fault is None:
                self._settle(batch)
            elif fault != "permanent":
                await self._back_off(fault, len(batch))
            elif len(batch) > 1:
                self._bite = len(batch) // 2
            else:
                self.counters.failed += 1
                log.error("%s %s can't be written; it stays in memory", batch[0].kind, batch[0].id)
                self._shelve()

    def _next_batch(self) -> list[Job]:
        """The first jobs that wait. They stay in the queue until they are written: cancelled, nothing is lost."""
        batch: list[Job] = []
        size = 0
        for job, _ in islice(self._queue, self._bite):
            size += job.size
            if batch and (size > self._limits.batch_bytes or self._orphan(job)):
                break
            batch.append(job)
        return batch

    async def _try(self, batch: Sequence[Job]) -> Fault | None:
        try:
            outdated = await self._sink.write([job.payload for job in batch])
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            return "transient"  # something inside of the sink was cancelled, not we
        except Exception as error:  # noqa: BLE001 - the owner of all writes must outlive every fault of one
            fault = fault_of(error)
            # Not the error itself: a database puts values in its messages.
            log.debug("post-work: %s of %d jobs failed: %s", fault, len(batch), type(error).__name__)
            return fault
        self.counters.outdated += len(outdated)
        return None

    def _settle(self, batch: Sequence[Job]) -> None:
        counters, now = self.counters, self._clock()
        if self._failing:
            log.info("post-work is written again; %d jobs wait", len(self._queue))
            self._failing = False
        self._pause_s = self._limits.pause_s
        self._bite = min(self._bite * 2, self._limits.batch_jobs)
        counters.batches += 1
        counters.batch_sizes[min((len(batch) - 1).bit_length(), len(counters.batch_sizes) - 1)] += 1
        for job in batch:
            _, since = self._queue.popleft()
            counters.written += 1
            counters.written_bytes += job.size
            self._bytes -= job.size
            if job.key in self._kept_keys:
                self._supersede(job.key)
            if self._newest.get(job.key) is job:
                del self._newest[job.key]
            if self._written is not None:
                self._tell(self._written, job, now - since)
        self.rooms.admit()

    def _tell(self, listener: Callable[..., None], job: Job, *seconds: float) -> None:
        try:
            listener(job, *seconds)
        except Exception:
            log.exception("counting written post-work failed")

    async def _back_off(self, fault: Fault, tried: int) -> None:
        """Wait before the next try, which is a smaller one. The pauses of several actors drift apart."""
        self.counters.retries += 1
        self.counters.full += fault == "full"
        if not self._failing:
            log.warning("post-work can't be written now (%s); %d jobs wait", fault, len(self._queue))
            self._failing = True
        self._bite = max(1, tried // 2)
        longest = self._limits.longest_pause_s
        pause = min(self._pause_s, DRAINING_PAUSE_S if self._draining else longest)
        self._pause_s = min(2 * self._pause_s, longest)
        await self._pause(pause * (0.5 + self._chance() / 2))

    async def _pause(self, seconds: float) -> None:
        """Sleep, unless a drain is in a hurry."""
        nap = self._nap = asyncio.ensure_future(self._sleep(seconds))
        try:
            await asyncio.wait({nap})
        finally:
            nap.cancel()
            self._nap = None

    def _orphan(self, job: Job) -> bool:
        return job.after is not None and (job.kind, job.after) in self._kept_keys

    def _shelve_orphans(self) -> None:
        while self._queue and self._orphan(self._queue[0][0]):
            self.counters.orphaned += 1
            self._shelve()

    def _shelve(self) -> None:
        """Keep the first job that waits, out of the way of the others."""
        waiting = self._queue.popleft()
        self._kept.append(waiting)
        self._kept_keys[waiting[0].key] += 1

    def _unshelve(self) -> None:
        self._retry_kept = False
        self._queue.extendleft(reversed(self._kept))
        self._kept.clear()
        self._kept_keys.clear()

    def _supersede(self, key: Key) -> None:
        """What is written says more than what was kept about the same thing, which would only undo it."""
        self.counters.superseded += self._kept_keys.pop(key)
        needless = [job for job, _ in self._kept if job.key == key]
        self._bytes -= sum(job.size for job in needless)
        self._kept = [waiting for waiting in self._kept if waiting[0].key != key]
        if self._dropped is not None:
            for job in needless:
                self._tell(self._dropped, job)

    def _fits(self, jobs: int) -> bool:
        held = len(self._queue) + len(self._kept) + self.rooms.reserved
        return held + jobs <= self._limits.jobs and self._bytes < self._limits.bytes


def fault_of(error: Exception) -> Fault:
    """What a failed write means; `Sink.write` has the rules."""
    kind: object = getattr(error, "kind", None)
    if kind in ("transient", "full", "permanent"):
        found: Fault = kind
        return found
    return "transient" if isinstance(error, OSError | TimeoutError) else "permanent"
