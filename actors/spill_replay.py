"""What actors that are gone left in their spill files is written to the database.

Any actor of the node may do so at any time, several at once: whoever has a file's lock replays it, and a living actor
has the locks of its own. Jobs are marked in their file as they are written, and writing one twice changes nothing, so
a replay may itself be killed anywhere.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from actors.conversation import Response
from actors.postwork import fault_of
from actors.spill import SUFFIX, lock, mark_done, open_directory
from actors.spill_codec import (
    TEXT,
    WAITING,
    Frame,
    FrameCodec,
    Key,
    Spilled,
    SpilledResponse,
    read_frames,
    spilled_from_list,
)
from actors.store.errors import StoreError, Unreadable
from actors.store.jobs import DeleteItem, DeleteResponse, Job, PutItems, PutResponse, PutUsage
from actors.stored import StoredResponse

log = logging.getLogger(__name__)

FILES = 256
"""Files that one call takes; others are for the next."""
BATCH_JOBS = 128
BATCH_BYTES = 4 << 20
PATIENCE_S = 120.0
"""How long a response waits in its file for the one that it continues, seconds. That may be the job of an actor which
lives, and can't write it at the moment."""


class Target(Protocol):
    """`actors.store.database.Database`, as far as it is needed here."""

    async def write(self, jobs: Sequence[Job]) -> Sequence[object]:
        """As there."""
        ...

    async def load(self, tenant: str, response_id: str) -> StoredResponse | None:
        """As there."""
        ...


@dataclass(slots=True)
class ReplayReport:
    """`files` were written whole and are gone; `written` jobs, of which `outdated` were on conversations that are
    another actor's now, and `severed` are responses that can be read but not continued, as what they continue is
    nowhere.

    `left` files are for another try: `held` jobs wait for what they continue, `refused` ones were not taken by the
    database, `unreadable` ones are sealed with other keys or damaged; or the database went away. `torn` bytes at the
    ends of files were no whole frame: nothing in them was acknowledged. `settled` are the names of files that were read
    whole: what can be written of them is."""

    files: int = 0
    left: int = 0
    written: int = 0
    outdated: int = 0
    severed: int = 0
    held: int = 0
    refused: int = 0
    unreadable: int = 0
    torn: int = 0
    settled: set[str] = field(default_factory=set, compare=False)


@dataclass(slots=True, eq=False)
class _File:
    """One that nobody owns, locked. Counts are those of its last reading; `refused` are offsets."""

    path: Path
    descriptor: int
    written_at: float
    refused: set[int] = field(default_factory=set)
    held: int = 0
    unreadable: int = 0
    torn: int = 0
    finished: bool = False
    settled: bool = False


@dataclass(frozen=True, slots=True)
class _Ready:
    """A job that can be written, its frame's offset and size. `severed`: what it continues is nowhere."""

    offset: int
    job: Job
    size: int
    severed: bool = False


async def replay(
    directory: Path,
    database: Target,
    keys: Sequence[bytes] = (),
    *,
    patience_s: float = PATIENCE_S,
    first: str = "",
) -> ReplayReport:
    """Write what was left in the directory, by this actor first. Faults of the database and files that can't be read
    are reported, not raised: call again later. Raises OSError for a directory that can't be used."""
    open_directory(directory)
    report = ReplayReport()
    taking = asyncio.ensure_future(asyncio.to_thread(_take, directory, first))
    try:
        files = await asyncio.shield(taking)
    except asyncio.CancelledError:
        taking.add_done_callback(_let_go)  # nobody else could have them as long as this process lives
        raise
    try:
        await _Replay(database, FrameCodec(keys), report).all(files, patience_s)
    except (StoreError, OSError) as error:
        log.warning("a replay of spill files stopped (%s): what is left stays there", type(error).__name__)
    finally:
        for each in files:
            os.close(each.descriptor)
    for each in files:
        report.files += each.finished
        report.left += not each.finished
        report.held += each.held
        report.refused += len(each.refused)
        report.unreadable += each.unreadable
        report.torn += each.torn
        if each.settled:
            report.settled.add(each.path.name)
    if files:
        log.info("replayed spill files: %s", report)
    return report


def left_by(directory: Path, owner: str) -> set[str]:
    """Names of the files of this actor. If it is gone, what it acknowledged may not be in the database yet, though
    another actor may be about to write it."""
    return {path.name for path in directory.glob(f"{owner}.*{SUFFIX}")}


class _Replay:
    """One call of `replay`."""

    def __init__(self, database: Target, codec: FrameCodec, report: ReplayReport) -> None:
        self._database = database
        self._codec = codec
        self._report = report
        # Conversations of which a job was refused. Later ones would find it as it never was.
        self._blocked: set[Key] = set()

    async def all(self, files: Sequence[_File], patience_s: float) -> None:
        """File after file, and again while that gets on: one may hold what another's responses continue."""
        before = -1
        while before < self._report.written:
            before = self._report.written
            for each in files:
                if not each.finished:
                    await self._write_file(each, sever=False)
        for each in files:
            if each.held and time.time() - each.written_at > patience_s:
                await self._write_file(each, sever=True)

    async def _write_file(self, each: _File, *, sever: bool) -> None:
        """Write what can be. `sever`: no response need wait any longer for what it continues."""
        spilled = await asyncio.to_thread(self._read, each)
        parents = await self._parents([job for _, job, _ in spilled if isinstance(job, SpilledResponse)], sever=sever)
        ready = await asyncio.to_thread(self._jobs, each, spilled, parents)
        await self._write(each, ready)
        each.settled = sever or not each.held  # what is held then continues what can't be read, perhaps never
        if not (each.held or each.refused or each.unreadable):
            each.path.unlink(missing_ok=True)
            each.finished = True

    def _read(self, each: _File) -> list[tuple[int, Spilled, int]]:
        """The file's jobs that wait: offset, job, size of its frame."""
        each.unreadable = 0
        try:
            salt, frames, each.torn = read_frames(each.path.read_bytes())
        except Unreadable as error:
            log.warning("%s can't be replayed: %s", each.path.name, error)
            each.unreadable = 1
            return []
        by_offset = {frame.offset: frame for frame in frames if frame.state == TEXT}
        texts: dict[int, str] = {}

        def text_at(offset: int) -> str:
            if offset not in texts:
                texts[offset] = self._codec.open(salt, by_offset[offset])
            return texts[offset]

        spilled = []
        for frame in frames:
            if frame.state == WAITING and frame.offset not in each.refused:
                try:
                    job = spilled_from_list(self._codec.open(salt, frame), text_at)
                except Unreadable as error:
                    self._count_unreadable(each, frame, error)
                else:
                    spilled.append((frame.offset, job, len(frame.blob)))
        return spilled

    async def _parents(self, spilled: Sequence[SpilledResponse], *, sever: bool) -> dict[Key, Response | None]:
        """What those continue and is not among them; None for what can't be continued. Absent: to be waited for.
        Where that is nowhere, those are here themselves that were written before their parent was deleted."""
        own = {job.key for job in spilled}
        found: dict[Key, Response | None] = {}
        nowhere: set[Key] = set()
        for job in spilled:
            if job.parent is None or job.parent in own or job.parent in found:
                continue
            try:
                record = await self._database.load(*job.parent)
                if record is not None:
                    found[job.parent] = record.node
                elif (itself := await self._database.load(*job.key)) is not None:
                    found[job.key] = itself.node
                elif sever:
                    nowhere.add(job.parent)
            except Unreadable:
                continue
        return found | dict.fromkeys(nowhere)

    def _jobs(
        self, each: _File, spilled: Sequence[tuple[int, Spilled, int]], parents: dict[Key, Response | None]
    ) -> list[_Ready]:
        """Those that can be written now. `parents` gets what they make."""
        each.held = 0
        ready = []
        for offset, job, size in spilled:
            if not isinstance(job, SpilledResponse):
                if _conversation(job) in self._blocked:
                    each.refused.add(offset)
                else:
                    ready.append(_Ready(offset, job, size))
                continue
            there = job.key in parents
            if not there and job.parent is not None and job.parent not in parents:
                each.held += 1
                continue
            parent = None if job.parent is None else parents.get(job.parent)
            severed = job.parent is not None and parent is None
            try:
                put = job.job(parent, severed=severed)
            except Unreadable as error:
                log.warning("a response of %s can't be replayed: %s", each.path.name, error)
                each.unreadable += 1
                continue
            parents.setdefault(job.key, put.record.node)
            ready.append(_Ready(offset, put, size, severed and not there))
        return ready

    async def _write(self, each: _File, ready: list[_Ready]) -> None:
        """All of them in batches. One that the database will never take is found by halving, and left."""
        most = BATCH_JOBS
        while ready:
            batch = _batch(ready, most)
            try:
                outdated = await self._database.write([entry.job for entry in batch])
            except Exception as error:
                if fault_of(error) != "permanent":
                    raise
                if len(batch) > 1:
                    most = len(batch) // 2
                else:
                    ready = self._refuse(each, ready)
                continue
            for entry in batch:
                mark_done(each.descriptor, entry.offset)
            self._report.written += len(batch)
            self._report.outdated += len(outdated)
            self._report.severed += sum(entry.severed for entry in batch)
            ready = ready[len(batch) :]
            most = min(2 * most, BATCH_JOBS)

    def _refuse(self, each: _File, ready: Sequence[_Ready]) -> list[_Ready]:
        """Without the first one, and without what is on the same conversation."""
        first = ready[0]
        log.warning("a %s of %s is refused by the database", type(first.job).__name__, each.path.name)
        each.refused.add(first.offset)
        conversation = _conversation(first.job)
        if conversation is None:
            return list(ready[1:])
        self._blocked.add(conversation)
        each.refused.update(entry.offset for entry in ready if _conversation(entry.job) == conversation)
        return [entry for entry in ready if entry.offset not in each.refused]

    def _count_unreadable(self, each: _File, frame: Frame, error: Unreadable) -> None:
        if not each.unreadable:
            log.warning("%s can't be replayed from byte %d on: %s", each.path.name, frame.offset, error)
        each.unreadable += 1


def _take(directory: Path, first: str) -> list[_File]:
    """The files that nobody owns, now ours; oldest first for each actor that was."""
    taken: list[_File] = []
    try:
        for path in sorted(directory.glob(f"*{SUFFIX}"), key=lambda path: (not path.name.startswith(first), path.name)):
            if len(taken) == FILES:
                break
            with suppress(FileNotFoundError):
                descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
                if lock(descriptor):
                    taken.append(_File(path, descriptor, os.fstat(descriptor).st_mtime))
                else:
                    os.close(descriptor)
    except BaseException:
        for each in taken:
            os.close(each.descriptor)
        raise
    return taken


def _let_go(taking: asyncio.Future[list[_File]]) -> None:
    if not taking.cancelled() and taking.exception() is None:
        for each in taking.result():
            os.close(each.descriptor)


def _batch(ready: Sequence[_Ready], most: int) -> Sequence[_Ready]:
    """The first ones, within the bounds; at least one."""
    size = 0
    for count, entry in enumerate(ready[:most]):
        size += entry.size
        if count and size > BATCH_BYTES:
            return ready[:count]
    return ready[:most]


def _conversation(job: Job) -> Key | None:
    """Which one the job is on."""
    if isinstance(job, PutResponse | DeleteResponse | PutUsage):
        return None
    return job.tenant, job.conversation_id if isinstance(job, PutItems | DeleteItem) else job.id
