"""The spill: what was acknowledged survives a kill of its actor (design.md decision 10).

A turn's terminal event leaves before its response is in the database. So the jobs are first written to a file of this
node, with write(2) and no fsync: the kernel has them, and a killed process loses nothing. A power cut may lose what was
acknowledged in the last milliseconds, unless the database already had it.

    append -> WAITING in the newest file -> DONE in place once the database has it
    file: all of it done   -> emptied when it is the newest, deleted when it is not
          its actor is gone -> `actors.spill_replay` writes what waits to the database

Each file is locked by its actor with flock, which ends with the process in whatever way. A job costs O(what it adds):
its turn's own step and the id of what that continues; the tools that an agent repeats are in a file once.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from actors.conversation import Response
from actors.spill_codec import (
    DONE,
    MAGIC,
    SALT_BYTES,
    STATE_AT,
    TEXT,
    TEXT_AT,
    WAITING,
    FrameCodec,
    job_to_list,
)
from actors.store.jobs import Job, PutResponse
from actors.store.records import EchoTexts

log = logging.getLogger(__name__)

MIB = 1 << 20
SUFFIX = ".spill"
REMEMBERED_TURNS = 10_000
_OWNER = re.compile(r"[A-Za-z0-9_-]{1,64}")
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_TRIES = 16


@dataclass(frozen=True, slots=True)
class SpillLimits:
    """`bytes` bounds all files of one actor. A file from `segment_bytes` on gets no more jobs. When none of its jobs
    waits, the newest one is emptied from `empty_bytes` on: less would write the same tools again for every turn."""

    bytes: int = 256 * MIB
    segment_bytes: int = 8 * MIB
    empty_bytes: int = MIB


@dataclass(slots=True)
class SpillCounters:
    """Totals since the start, in jobs: `appended` were written, `done` are known to be in the database, `full` had no
    room (the disk's or our own bound), `failed` met any other error of the file system. `bytes` were written."""

    appended: int = 0
    done: int = 0
    full: int = 0
    failed: int = 0
    bytes: int = 0


@dataclass(slots=True, eq=False)
class _Segment:
    """One file. `texts` are the offsets of what it holds once; `jobs` how many of its jobs wait. An empty one has no
    header yet."""

    path: Path
    descriptor: int
    salt: bytes = b""
    size: int = 0
    jobs: int = 0
    texts: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Ticket:
    """What `Spill.done` is told: where the jobs of one `append` are."""

    segment: _Segment
    offsets: Sequence[int]


class Spill:
    """The files of one actor in `directory`, which is made if need be and is shared by the actors of a node. `owner`
    names the actor in file names. With `keys` (as in `StoreConfig`) content is sealed. Owned by one event loop; none of
    its methods waits or raises.

    Raises OSError if the directory can't be made or others may write to it, ValueError for an owner that is no name.
    """

    def __init__(
        self, directory: Path, owner: str, keys: Sequence[bytes] = (), limits: SpillLimits | None = None
    ) -> None:
        if not _OWNER.fullmatch(owner):
            raise ValueError(f"'{owner[:80]}' can't be part of a file name")
        open_directory(directory)
        self.counters = SpillCounters()
        self.directory = directory
        self.owner = owner
        self._codec = FrameCodec(keys)
        self._limits = limits or SpillLimits()
        self._texts = EchoTexts()
        self._newest: _Segment | None = None
        self._segments: set[_Segment] = set()
        self._stored: OrderedDict[str, None] = OrderedDict()
        self._failing = self._told = False
        self._times = 0

    @property
    def size(self) -> int:
        """How many bytes the files hold."""
        return sum(segment.size for segment in self._segments)

    @property
    def waiting(self) -> int:
        """Jobs in them that are not known to be in the database."""
        return sum(segment.jobs for segment in self._segments)

    @property
    def segments(self) -> int:
        """How many files there are."""
        return len(self._segments)

    def append(self, jobs: Sequence[Job]) -> Ticket | None:
        """Have them survive the process from here on, all or none. None if that failed, which is counted and logged:
        they are then in memory alone, as if there were no spill."""
        try:
            segment = self._writable()
            texts: dict[str, int] = {}
            offsets, data = self._encoded(segment, jobs, texts)
            self._write(segment, data)
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a job, its turn goes on
            self._refused(error, len(jobs))
            return None
        if self._failing:
            log.log(logging.INFO if self._told else logging.DEBUG, "the spill is written again")
            self._failing = self._told = False
        segment.texts |= texts
        segment.size += len(data)
        segment.jobs += len(jobs)
        self.counters.appended += len(jobs)
        self.counters.bytes += len(data)
        return Ticket(segment, offsets)

    def done(self, ticket: Ticket) -> None:
        """All jobs of the ticket are in the database, or will never be wanted there. Idempotent."""
        segment, offsets = ticket.segment, ticket.offsets
        ticket.offsets = ()
        if not offsets or segment not in self._segments:
            return
        segment.jobs -= len(offsets)
        self.counters.done += len(offsets)
        if segment.jobs == 0 and segment is not self._newest:
            self._delete(segment)
        elif segment.jobs == 0 and segment.size >= self._limits.empty_bytes:
            self._empty(segment)
        else:
            self._mark(segment, offsets)

    def tidy(self) -> None:
        """Empty the newest file if nothing in it waits. Call it now and then: what was deleted from the database may
        still be there."""
        if self._newest is not None and self._newest.jobs == 0 and self._newest.size:
            self._empty(self._newest)

    def close(self) -> None:
        """Let go of the files; those with jobs that wait stay, for whoever replays them. Idempotent."""
        self._newest = None
        for segment in list(self._segments):
            if segment.jobs == 0:
                self._delete(segment)
            else:
                os.close(segment.descriptor)
        self._segments.clear()

    def _writable(self) -> _Segment:
        segment = self._newest
        if segment is not None and segment.size >= self._limits.segment_bytes:
            self._retire(segment)
            segment = None
        if segment is None:
            path, descriptor = _create(self.directory, self.owner)
            segment = self._newest = _Segment(path, descriptor)
            self._segments.add(segment)
        if segment.size == 0:
            segment.salt = secrets.token_bytes(SALT_BYTES)
        return segment

    def _encoded(self, segment: _Segment, jobs: Sequence[Job], texts: dict[str, int]) -> tuple[list[int], bytes]:
        """Where the jobs' frames will be, and all that is to be written at the segment's end; `texts` gets what the
        segment has not held before."""
        data = bytearray() if segment.size else bytearray(MAGIC + segment.salt)
        offsets = []
        for job in jobs:
            with_turn = isinstance(job, PutResponse) and self._all_stored(job.record.node)
            content, text = job_to_list(job, self._texts, with_turn=with_turn)
            if text:
                content[TEXT_AT] = segment.texts.get(text, texts.get(text))
                if content[TEXT_AT] is None:
                    content[TEXT_AT] = texts[text] = segment.size + len(data)
                    data += self._codec.frame(segment.salt, texts[text], TEXT, text)
            offsets.append(segment.size + len(data))
            data += self._codec.frame(segment.salt, offsets[-1], WAITING, content)
        return offsets, bytes(data)

    def _all_stored(self, node: Response | None) -> bool:
        """Whether a response can be continued from the database, which takes nothing of a lineage with a `store: false`
        turn in it: that would come to the disk with what continues it. O(1) for a turn whose parent was asked about."""
        if node is None:
            return False
        for turn in node.lineage():
            if turn.id in self._stored:
                break
            if not turn.store:
                return False
        self._stored[node.id] = None
        if len(self._stored) > REMEMBERED_TURNS:
            self._stored.popitem(last=False)
        return True

    def _write(self, segment: _Segment, data: bytes) -> None:
        """All of it at the segment's end. Raises OSError; nothing is there then that a reader would take for more."""
        if self.size + len(data) > self._limits.bytes:
            raise OSError(errno.ENOSPC, "the spill's own bound")
        try:
            write_at(segment.descriptor, data, segment.size)
        except OSError:
            try:
                os.ftruncate(segment.descriptor, segment.size)
            except OSError:
                self._retire(segment)  # nothing behind what was left there could be read
            raise

    def _mark(self, segment: _Segment, offsets: Sequence[int]) -> None:
        try:
            for offset in offsets:
                mark_done(segment.descriptor, offset)
        except OSError as error:
            # They are replayed after a kill, which changes nothing where they are in the database.
            log.warning("a spill file can't be changed: %s", _name(error))

    def _empty(self, segment: _Segment) -> None:
        try:
            os.ftruncate(segment.descriptor, 0)
        except OSError:
            self._retire(segment)
            return
        segment.size = 0
        segment.texts.clear()

    def _retire(self, segment: _Segment) -> None:
        """Write no more to it."""
        if self._newest is segment:
            self._newest = None
        segment.texts.clear()
        if segment.jobs == 0:
            self._delete(segment)

    def _delete(self, segment: _Segment) -> None:
        self._segments.discard(segment)
        try:
            segment.path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("a spill file can't be deleted: %s", _name(error))
        os.close(segment.descriptor)

    def _refused(self, error: Exception, jobs: int) -> None:
        if isinstance(error, OSError) and error.errno in _FULL:
            self.counters.full += jobs
        else:
            self.counters.failed += jobs
        if not self._failing:
            # A nearly full disk takes one and refuses the next: told the 1st, 2nd, 4th, 8th … time it begins.
            self._failing, self._times = True, self._times + 1
            self._told = self._times & (self._times - 1) == 0
            if self._told:
                log.error("the spill can't be written (%s): what waits is in memory alone", _name(error))


def _name(error: Exception) -> str:
    """Not its message, which may hold anything."""
    code = error.errno if isinstance(error, OSError) else None
    return type(error).__name__ if code is None else errno.errorcode.get(code, str(code))


def open_directory(directory: Path) -> None:
    """Make it, or see that nobody else may write to it: what is there is replayed into the database. Raises OSError."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            errno.EPERM, "the spill's directory must be this user's own and closed to others", directory
        )


def lock(descriptor: int) -> bool:
    """Take the file for this process until it is closed; False if another has it, or it is deleted."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(descriptor).st_nlink > 0


def mark_done(descriptor: int, offset: int) -> None:
    """The job whose frame is at `offset` is in the database. Takes no room. Raises OSError."""
    os.pwrite(descriptor, bytes((DONE,)), offset + STATE_AT)


def write_at(descriptor: int, data: bytes, offset: int) -> None:
    """All of it. Raises OSError, with some of it written at times."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(descriptor, rest, offset)
        rest = rest[written:]
        offset += written


def _create(directory: Path, owner: str) -> tuple[Path, int]:
    """A new, locked file. One that replays may come between making and locking it, and delete what is empty: another is
    made then. Names of an owner sort by age."""
    for _ in range(_TRIES):
        path = directory / f"{owner}.{time.time_ns():020d}{SUFFIX}"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except FileExistsError:
            continue
        try:
            if lock(descriptor):
                return path, descriptor
        except OSError:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise
        os.close(descriptor)
    raise OSError(errno.EAGAIN, "no new spill file could be had")
