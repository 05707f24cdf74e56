"""What is appended is what a replay finds, whatever was done, torn, full or sealed in between."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors import spill as spill_module
from actors.conversation import Response
from actors.spill import Spill, SpillLimits, Ticket
from actors.spill_replay import ReplayReport, replay
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
from actors.stored import StoredResponse
from tests.support.responses import NOW, TOOLS, asked, chain, chains, ids, items, jobs_of, put, same, texts, turn

KEY, OTHER = b"k" * 32, b"o" * 32


class Recorder:
    """Takes jobs as a database would, and has the responses among them."""

    def __init__(self, known: Sequence[PutResponse] = ()) -> None:
        self.jobs: list[Job] = []
        self.known = {(job.tenant, job.record.id): job.record for job in known}

    async def write(self, jobs: Sequence[Job]) -> list[Job]:
        self.jobs += jobs
        self.known |= {(job.tenant, job.record.id): job.record for job in jobs if isinstance(job, PutResponse)}
        return []

    async def load(self, tenant: str, response_id: str) -> StoredResponse | None:
        return self.known.get((tenant, response_id))


@contextmanager
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name) / "spill"


def crash(spill: Spill) -> None:
    """Its process is gone: the files stay as they are, unlocked."""
    for segment in spill._segments:
        os.close(segment.descriptor)
    spill._segments.clear()


def replayed(
    directory: Path, keys: Sequence[bytes] = (), known: Sequence[PutResponse] = ()
) -> tuple[list[Job], ReplayReport]:
    recorder = Recorder(known)
    report = asyncio.run(replay(directory, recorder, keys))
    return recorder.jobs, report


def alike(found: Sequence[Job], wanted: Sequence[Job]) -> bool:
    return len(found) == len(wanted) and all(
        isinstance(old, PutResponse)
        and (new.tenant, new.status, new.model, new.created_at, new.expires_at, new.record.model)
        == (old.tenant, old.status, old.model, old.created_at, old.expires_at, old.record.model)
        and same(new.record, old)
        if isinstance(new, PutResponse)
        else new == old
        for new, old in zip(found, wanted, strict=True)
    )


def line(name: str) -> PutUsage:
    return PutUsage("t", name, "key", "m", "completed", NOW, 1, 2, 3, 4, None, 5)


numbers = st.integers(0, 1 << 40)
named_items = st.lists(items.filter(lambda item: item.id is not None), max_size=2).map(tuple)
other_jobs = st.one_of(
    st.builds(DeleteResponse, texts, ids),
    st.builds(
        PutUsage,
        *(texts, ids, texts, texts, texts),
        *(numbers, numbers, numbers, numbers, numbers, st.none() | numbers, st.none() | numbers),
    ),
    st.builds(
        PutConversation, texts, ids, ids, numbers, st.dictionaries(texts, texts, max_size=2), st.none() | numbers
    ),
    st.builds(PutItems, texts, ids, ids, named_items, st.none() | ids, numbers),
    st.builds(DeleteItem, texts, ids, ids, texts, st.none() | ids, numbers),
    st.builds(DeleteConversation, texts, ids, ids),
)


@settings(max_examples=30, deadline=None)
@given(chains(), st.lists(other_jobs, max_size=5), st.sampled_from([(), (KEY,)]), st.data())
def test_every_job_comes_back(
    nodes: list[Response], others: list[Job], keys: Sequence[bytes], data: st.DataObject
) -> None:
    jobs: list[Job] = [*jobs_of(nodes), *others]
    with folder() as directory:
        spill = Spill(directory, "a", keys)
        start = 0
        while start < len(jobs):
            count = data.draw(st.integers(1, len(jobs) - start))
            assert spill.append(jobs[start : start + count]) is not None
            start += count
        crash(spill)
        found, report = replayed(directory, keys)
        assert alike(found, jobs)
        assert report == ReplayReport(files=1, written=len(jobs))
        assert not list(directory.iterdir())


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_a_body_with_long_values_comes_back_and_is_held_once(tmp_path: Path, keys: Sequence[bytes]) -> None:
    request = asked(tools=TOOLS, instructions="Be brief. " * 100, metadata={"a": "ä"})
    nodes = chain("n", 20)
    jobs = [put(node, request=request, expires_at=NOW + 5) for node in nodes]
    spill = Spill(tmp_path / "s", "a", keys)
    for job in jobs:
        spill.append([job])
    if not keys:
        (path,) = (tmp_path / "s").iterdir()
        assert path.read_bytes().count(b"tool_89") == 1
    assert spill.size < 2 * len(jobs[0].record.body())
    crash(spill)
    assert alike(replayed(tmp_path / "s", keys)[0], jobs)


def test_a_turn_costs_what_it_adds(tmp_path: Path) -> None:
    jobs = [put(node, request=asked(tools=TOOLS)) for node in chain("n", 300)]
    spill = Spill(tmp_path / "s", "a")
    sizes = []
    for job in jobs:
        before = spill.counters.bytes
        spill.append([job])
        sizes.append(spill.counters.bytes - before)
    assert sizes[0] > 15_000
    assert max(sizes[1:]) < 1000
    assert sizes[-1] - sizes[1] < 30
    spill.close()


Op = tuple[str, int]
operations = st.lists(
    st.tuples(st.sampled_from(["append", "append", "append", "done", "done", "tidy"]), st.integers(0, 30)), max_size=60
)


@settings(max_examples=40, deadline=None)
@given(operations, st.integers(0, 4000), st.integers(0, 4000), st.booleans())
def test_what_is_not_done_is_found(ops: list[Op], segment_bytes: int, empty_bytes: int, closed: bool) -> None:
    """Whatever is appended and done in whatever order, over whatever files."""
    nodes = chain("n", 60)
    with folder() as directory:
        spill = Spill(directory, "a", (), SpillLimits(1 << 20, segment_bytes, empty_bytes))
        waiting: list[tuple[Ticket, PutResponse]] = []
        done: list[PutResponse] = []
        for op, number in ops:
            if op == "append":
                job = put(nodes[len(waiting) + len(done)])
                ticket = spill.append([job])
                assert ticket is not None
                waiting.append((ticket, job))
            elif op == "tidy":
                spill.tidy()
            elif waiting:
                ticket, job = waiting.pop(number % len(waiting))
                done.append(job)
                spill.done(ticket)
                spill.done(ticket)
            assert (spill.waiting, spill.counters.done) == (len(waiting), len(done))
            assert spill.size == sum(path.stat().st_size for path in directory.iterdir())
            assert len(list(directory.iterdir())) == spill.segments
        if closed:
            spill.close()
            assert bool(list(directory.iterdir())) == bool(waiting)
        else:
            crash(spill)
        found, report = replayed(directory, known=done)
        assert alike(found, [job for _, job in waiting])
        assert report.left == 0
        assert not list(directory.iterdir())


@pytest.mark.parametrize("keys", [(), (KEY,)])
def test_a_torn_tail_is_ignored_wherever_it_is_torn(tmp_path: Path, keys: Sequence[bytes]) -> None:
    jobs = jobs_of(chain("n", 3))
    spill = Spill(tmp_path / "s", "a", keys)
    ends = [0]
    for job in jobs:
        spill.append([job])
        ends.append(spill.size)
    crash(spill)
    (path,) = (tmp_path / "s").iterdir()
    whole = path.read_bytes()

    async def cut_everywhere() -> None:
        for length in range(len(whole) + 1):
            path.write_bytes(whole[:length] + b"\0" * (length % 3 * 700))  # a power cut may leave zeros
            recorder = Recorder()
            report = await replay(path.parent, recorder, keys)
            acknowledged = sum(end <= length for end in ends[1:])
            assert alike(recorder.jobs, jobs[:acknowledged])
            assert (report.files, report.left, report.unreadable) == (1, 0, 0)

    asyncio.run(cut_everywhere())


def test_a_changed_byte_is_never_replayed_as_something_else(tmp_path: Path) -> None:
    jobs: list[Job] = [put(node) for node in chain("n", 2)]
    spill = Spill(tmp_path / "s", "a", (KEY,))
    spill.append(jobs)
    crash(spill)
    (path,) = (tmp_path / "s").iterdir()
    whole = path.read_bytes()

    async def change_everywhere() -> None:
        for at in range(0, len(whole), 3):
            path.write_bytes(whole[:at] + bytes((whole[at] ^ 0x55,)) + whole[at + 1 :])
            recorder = Recorder()
            await replay(path.parent, recorder, (KEY,))
            assert all(any(alike([found], [job]) for job in jobs) for found in recorder.jobs)

    asyncio.run(change_everywhere())


def test_content_is_sealed_and_opens_with_its_key_only(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    job = put(turn("n0", said="Wolpertinger"))
    spill = Spill(directory, "a", (KEY,))
    spill.append([job])
    crash(spill)
    (path,) = directory.iterdir()
    before = path.read_bytes()
    assert b"Wolpertinger" not in before
    assert b"resp_n0" not in before
    for keys in ((OTHER,), ()):
        found, report = replayed(directory, keys)
        assert (found, report) == ([], ReplayReport(left=1, unreadable=1))
        assert path.read_bytes() == before
    assert alike(replayed(directory, (OTHER, KEY))[0], [job])
    spill = Spill(directory, "a")
    spill.append([job])
    crash(spill)
    assert alike(replayed(directory, (KEY,))[0], [job])  # from before there were keys


def test_a_file_of_another_layout_is_left(tmp_path: Path) -> None:
    Spill(tmp_path / "s", "a").close()
    path = tmp_path / "s" / "b.1.spill"
    path.write_bytes(b"LMPSPIL2" + bytes(100))
    assert replayed(path.parent) == ([], ReplayReport(left=1, unreadable=1))
    assert path.exists()


def test_nothing_of_a_turn_that_is_not_stored_comes_to_the_disk(tmp_path: Path) -> None:
    secret = turn("n0", said="Wolpertinger", store=False)
    # As when a template has an older turn rendered again: its ids are the new turn's own.
    rendered = b"WolpertingerIds!"
    child = turn("n1", secret)
    grandchild = Response(
        "resp_n2", child, child.items, child.tokens.cut(0).extend(rendered), None, (), {}, None, "m", True, 0, 0
    )
    jobs = [put(child), put(grandchild)]
    spill = Spill(tmp_path / "s", "a")
    for job in jobs:
        spill.append([job])
    crash(spill)
    (path,) = (tmp_path / "s").iterdir()
    assert b"Wolpertinger" not in path.read_bytes()
    found, report = replayed(tmp_path / "s")
    assert report == ReplayReport(files=1, written=2)
    assert [(job.record.body(), job.record.given, job.record.node) for job in found] == [
        (job.record.body(), job.record.given, None) for job in jobs
    ]


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    directory = tmp_path / "deep" / "s"
    spill = Spill(directory, "a")
    spill.append([line("r")])
    (path,) = directory.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    spill.close()
    directory.chmod(0o777)
    with pytest.raises(PermissionError):
        Spill(directory, "a")
    with pytest.raises(PermissionError):
        replayed(directory)


@pytest.mark.parametrize("owner", ["", "../a", "a.b", "a" * 65, "a\n"])
def test_an_owner_is_a_plain_name(tmp_path: Path, owner: str) -> None:
    with pytest.raises(ValueError, match="file name"):
        Spill(tmp_path / "s", owner)


def test_space_is_given_back(tmp_path: Path) -> None:
    directory = tmp_path / "s"
    spill = Spill(directory, "a", (), SpillLimits(segment_bytes=2000, empty_bytes=1000))
    tickets = [spill.append([put(node)]) for node in chain("n", 40)]
    files = spill.segments
    assert files > 10
    for ticket in tickets:
        assert ticket is not None
        spill.done(ticket)
    assert (spill.segments, spill.waiting) == (1, 0)
    spill.tidy()
    assert spill.size == 0
    spill.close()
    assert not list(directory.iterdir())


class Failing:
    """A system call that fails once, at its `at`-th call; of a write a part may be done before."""

    def __init__(self, call: Callable[..., Any], at: int, code: int, part: int | None = None) -> None:
        self.call, self.at, self.code, self.part = call, at, code, part
        self.calls = 0

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.calls += 1
        if self.part is not None and self.calls == self.at:
            descriptor, data, offset = arguments
            return self.call(descriptor, data[: self.part], offset)
        if self.calls == self.at + (self.part is not None):
            raise OSError(self.code, os.strerror(self.code))
        return self.call(*arguments, **named)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("part", [None, 1, 12, 40, 200])
def test_a_full_disk_at_every_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, part: int | None
) -> None:
    """What was acknowledged is found, whatever write failed, and nothing else is."""
    nodes = chain("n", 12)
    for at in range(1, 14):
        directory = tmp_path / f"s{at}"
        spill = Spill(directory, "a", (), SpillLimits(segment_bytes=2000, empty_bytes=500))
        failing = Failing(os.pwrite, at, code, part)
        monkeypatch.setattr(spill_module.os, "pwrite", failing)
        kept: list[PutResponse] = []
        lost: list[PutResponse] = []
        for node in nodes:
            job = put(node)
            (kept if spill.append([job]) else lost).append(job)
        monkeypatch.undo()
        assert len(lost) == (at <= 12)
        assert (spill.counters.full, spill.counters.failed) == (
            (len(lost), 0) if code == errno.ENOSPC else (0, len(lost))
        )
        assert spill.size == sum(path.stat().st_size for path in directory.iterdir())
        crash(spill)
        assert alike(replayed(directory, known=lost)[0], kept)


def test_what_a_failed_write_left_and_could_not_be_cut_off_hides_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [put(node) for node in chain("n", 3)]
    spill = Spill(tmp_path / "s", "a")
    assert spill.append(jobs[:1]) is not None
    monkeypatch.setattr(spill_module.os, "pwrite", Failing(os.pwrite, 1, errno.ENOSPC, 20))
    monkeypatch.setattr(spill_module.os, "ftruncate", Failing(os.ftruncate, 1, errno.EIO))
    assert spill.append(jobs[1:2]) is None
    assert spill.append(jobs[2:]) is not None
    monkeypatch.undo()
    crash(spill)
    found, report = replayed(tmp_path / "s", known=jobs[1:2])
    assert alike(found, [jobs[0], jobs[2]])
    assert report.torn == 20


@pytest.mark.parametrize("call", ["open", "ftruncate", "fstat"])
def test_other_calls_fail_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    nodes = chain("n", 10)
    for at in range(1, 6):
        directory = tmp_path / f"s{at}"
        spill = Spill(directory, "a", (), SpillLimits(segment_bytes=1500, empty_bytes=0))
        monkeypatch.setattr(spill_module.os, call, Failing(getattr(os, call), at, errno.ENOSPC))
        waiting, written = [], []
        for number, node in enumerate(nodes):
            job = put(node)
            ticket = spill.append([job])
            if ticket is not None and number % 4:
                spill.done(ticket)
            if ticket is None or number % 4:
                written.append(job)
            else:
                waiting.append(job)
        monkeypatch.undo()
        crash(spill)
        assert alike(replayed(directory, known=written)[0], waiting)


def test_the_own_bound_and_room_again(tmp_path: Path) -> None:
    nodes = chain("n", 100)
    spill = Spill(tmp_path / "s", "a", (), SpillLimits(bytes=10_000, segment_bytes=1500, empty_bytes=1000))
    tickets = []
    for node in nodes:
        ticket = spill.append([put(node)])
        if ticket is None:
            break
        tickets.append(ticket)
    assert 5 < len(tickets) < 50
    assert spill.counters.full == 1
    assert spill.size <= 10_000
    for ticket in tickets:
        spill.done(ticket)
    assert spill.append([put(nodes[60])]) is not None
    spill.close()


def test_a_job_that_is_no_job_is_counted(tmp_path: Path) -> None:
    spill = Spill(tmp_path / "s", "a")
    assert spill.append([PutConversation("t", "c", "a", NOW, {"a": object()})]) is None  # type: ignore[dict-item]
    assert spill.append([line("r")]) is not None
    assert spill.counters.failed == 1
    crash(spill)
    assert replayed(tmp_path / "s")[0] == [line("r")]


def test_a_replay_that_comes_while_a_file_is_made_takes_it_and_another_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "s"
    spill = Spill(directory, "a")
    lock = spill_module.lock

    def late(descriptor: int) -> bool:
        monkeypatch.undo()
        asyncio.run(replay(directory, Recorder()))
        return lock(descriptor)

    monkeypatch.setattr(spill_module, "lock", late)
    assert spill.append([line("r")]) is not None
    crash(spill)
    assert replayed(directory)[0] == [line("r")]


def test_a_disk_that_takes_one_and_refuses_the_next_is_told_of_less_and_less_often(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    spill = Spill(tmp_path / "s", "a")
    jobs = [put(node) for node in chain("n", 4)]
    for _ in range(100):
        monkeypatch.setattr(spill_module.os, "pwrite", Failing(os.pwrite, 1, errno.ENOSPC))
        assert spill.append(jobs[:1]) is None
        monkeypatch.undo()
        assert spill.append(jobs[1:2]) is not None
    told = [record.levelname for record in caplog.records if record.name == spill_module.__name__]
    assert told == ["ERROR", "INFO"] * 7  # 1, 2, 4 … 64
    assert spill.counters.full == 100
    spill.close()
