"""Processes as /proc shows them: who descends from whom, and ending exactly those.

A process is known by its pid and its start time, so that one whose pid was given to another is never signalled.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Process:
    """One process. `start` is in clock ticks since the boot."""

    pid: int
    start: int
    parent: int
    group: int
    name: str
    zombie: bool = False

    @property
    def identity(self) -> tuple[int, int]:
        """What no other process has, before the next boot."""
        return self.pid, self.start


def parse_stat(text: str) -> Process:
    """One `/proc/PID/stat`. The name may hold blanks and brackets, so it is taken out first."""
    head, _, tail = text.rpartition(")")
    pid, _, name = head.partition(" (")
    fields = tail.split()
    return Process(int(pid), int(fields[19]), int(fields[1]), int(fields[2]), name, fields[0] in {"Z", "X"})


def process(pid: int) -> Process | None:
    """The process with this pid, None if there is none or it is a zombie."""
    try:
        found = parse_stat((PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError, IndexError):
        return None
    return None if found.zombie else found


def table() -> dict[int, Process]:
    """All live processes."""
    pids = (int(entry) for entry in os.listdir(PROC) if entry.isdecimal())  # noqa: PTH208 - a thousand Paths for nothing
    return {found.pid: found for pid in pids if (found := process(pid)) is not None}


def descendants(pid: int, processes: Mapping[int, Process]) -> list[Process]:
    """The children of `pid`, their children and so on, parents first."""
    children: dict[int, list[Process]] = {}
    for entry in processes.values():
        children.setdefault(entry.parent, []).append(entry)
    found: list[Process] = []
    level = [pid]
    while level:
        below = [child for parent in level for child in children.get(parent, ()) if child.pid != pid]
        found += below
        level = [child.pid for child in below]
    return found


def marked(variable: str, value: str) -> list[Process]:
    """Live processes, ourselves apart, that inherited this environment variable with this value. Misses one that has
    written its title over its environment, so `descendants` is the better way while their ancestor lives."""
    wanted = f"{variable}={value}".encode()
    found = []
    for pid, entry in table().items():
        with suppress(OSError):  # another user's, or gone
            if pid != os.getpid() and wanted in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                found.append(entry)
    return found


def alive(entry: Process) -> bool:
    """Whether this very process still runs."""
    now = process(entry.pid)
    return now is not None and now.identity == entry.identity


def send(entry: Process, signum: int) -> None:
    """Signal exactly this process, if it still runs."""
    if alive(entry):
        with suppress(ProcessLookupError):
            os.kill(entry.pid, signum)


def end(
    entries: Iterable[Process],
    grace_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Process]:
    """SIGTERM, wait at most `grace_s`, SIGKILL. Returns those that had to be killed; none of them runs afterwards."""
    left = [entry for entry in entries if alive(entry)]
    for entry in left:
        send(entry, signal.SIGTERM)
    left = wait_gone(left, grace_s, clock, sleep)
    for entry in left:
        send(entry, signal.SIGKILL)
    wait_gone(left, 5.0, clock, sleep)
    return left


def wait_gone(
    entries: Iterable[Process],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> list[Process]:
    """Wait until all have ended, at most `timeout_s`. Returns those that have not."""
    deadline = clock() + timeout_s
    left = [entry for entry in entries if alive(entry)]
    while left and clock() < deadline:
        sleep(0.05)
        left = [entry for entry in left if alive(entry)]
    return left


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that `descendants` keeps finding it."""
    with suppress(OSError, AttributeError):  # not on Linux: orphans go to init
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
