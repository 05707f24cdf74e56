"""Gateways that run in the background: their record on disk, starting one, ending one.

The record names a pid together with its start time, so that a process which got the pid later is never touched.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gateway import processes
from gateway.processes import Process
from gateway.rollout import StartError

ROOT = Path(__file__).resolve().parent.parent
MARK = "LIMPET_RUN"
READY = "ready http"  # how the line begins that says so
ERROR = "limpet: "
LEFTOVER_WAIT_S = 3.0  # Ray's processes end with the one that started them
TERM_WAIT_EXTRA_S = 45.0  # stopping Serve and Ray, after the drain


def state_directory(environ: Mapping[str, str] = os.environ) -> Path:
    """Where records and logs lie: `$XDG_STATE_HOME/limpet`, or `~/.local/state/limpet`."""
    named = Path(environ.get("XDG_STATE_HOME", ""))
    base = named if named.is_absolute() else Path(environ.get("HOME") or Path.home()) / ".local" / "state"
    return base / "limpet"


@dataclass(frozen=True, slots=True)
class Record:
    """A gateway that was started."""

    pid: int
    start: int
    host: str
    port: int
    models: tuple[str, ...]
    began: float
    stop_timeout_s: float
    log: str | None = None

    @property
    def mark(self) -> str:
        """The value of `MARK` in the environment of every process it started."""
        return f"{self.pid}:{self.start}"

    def process(self) -> Process | None:
        """The gateway's process, None once it has ended (even if its pid lives on in another)."""
        found = processes.process(self.pid)
        return found if found is not None and found.start == self.start else None


def record_path(directory: Path, port: int) -> Path:
    """The record of the gateway on this port."""
    return directory / f"{port}.json"


def log_path(directory: Path, port: int) -> Path:
    """Where a detached gateway writes what it says."""
    return directory / f"{port}.log"


def write_record(directory: Path, record: Record) -> None:
    """Write it in one go, readable by its owner only."""
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = directory / f".{record.port}.{os.getpid()}"
    fresh.write_text(json.dumps(asdict(record), indent=1), encoding="utf-8")
    fresh.chmod(0o600)
    fresh.replace(record_path(directory, record.port))


def read_record(directory: Path, port: int) -> Record | None:
    """The record of the gateway on this port; None if there is none that can be read."""
    try:
        values: dict[str, Any] = json.loads(record_path(directory, port).read_text(encoding="utf-8"))
        return Record(**{**values, "models": tuple(values["models"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None


def read_records(directory: Path) -> list[Record]:
    """All of them, by port."""
    ports = sorted(int(path.stem) for path in directory.glob("*.json") if path.stem.isdecimal())
    return [record for port in ports if (record := read_record(directory, port)) is not None]


def remove_record(directory: Path, record: Record) -> None:
    """Remove it unless another gateway has written its own meanwhile."""
    now = read_record(directory, record.port)
    if now is not None and (now.pid, now.start) == (record.pid, record.start):
        record_path(directory, record.port).unlink(missing_ok=True)


class Follower:
    """Passes on the lines that a log file gains; notes the last one, the last error, and whether one said `ready`."""

    def __init__(self, path: Path, write: Callable[[str], object]) -> None:
        self._path = path
        self._write = write
        self._offset = 0
        self._rest = ""
        self.last = ""
        self.error = ""
        self.ready = False

    def poll(self) -> None:
        """What has been written since the last call; only whole lines."""
        with suppress(FileNotFoundError), self._path.open(encoding="utf-8", errors="replace") as log:
            log.seek(self._offset)
            text = log.read()
            self._offset = log.tell()
            *lines, self._rest = (self._rest + text).split("\n")
            for line in lines:
                self._write(line + "\n")
                self.ready = self.ready or line.startswith(READY)
                if line.startswith(ERROR):
                    self.error = line.removeprefix(ERROR).strip()
                if line.strip():
                    self.last = line.strip()


def launch(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start `limpet serve` in a session of its own; it outlives us and writes to `log`. The last one's log stays beside
    it, with `.1` at its end."""
    log.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileNotFoundError):
        log.replace(log.with_name(f"{log.name}.1"))
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("wb") as output:
        return subprocess.Popen(  # noqa: S603 - our own module
            [sys.executable, "-P", "-m", "gateway.cli", "serve", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "LIMPET_LOG_FILE": str(log)},
        )


def wait_launched(
    poll: Callable[[], int | None],
    follower: Follower,
    log: Path,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the launched gateway can take a turn, passing on what it says.

    Raises:
        StartError: It ended, or took too long.
    """
    deadline = clock() + timeout_s
    while True:
        status = poll()
        follower.poll()
        if status is not None:
            reason = follower.error or follower.last or "nothing was said"
            raise StartError(f"it ended with status {status}: {reason} (log: {log})")
        if follower.ready:
            return
        if clock() >= deadline:
            raise StartError(f"not ready after {timeout_s:.0f} s; it goes on in the background (log: {log})")
        sleep(0.25)


def bring_down(
    record: Record,
    say: Callable[[str], object],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """End a gateway: SIGTERM, wait as long as its drain may take, then SIGKILL for it and its descendants. Of one that
    has died, end what it left.

    Returns:
        Whether it ended by itself.
    """
    gateway = record.process()
    if gateway is None:
        left = processes.marked(MARK, record.mark)
        processes.end(left, 2.0, clock, sleep)
        names = ", ".join(sorted({entry.name for entry in left}))
        say(f"the gateway on port {record.port} (pid {record.pid}) has died; it left {names or 'nothing'}")
        return True
    family = [gateway, *processes.descendants(gateway.pid, processes.table())]
    limit = record.stop_timeout_s + TERM_WAIT_EXTRA_S
    say(f"stopping pid {gateway.pid} on port {record.port}; running turns have {record.stop_timeout_s:.0f} s")
    processes.send(gateway, signal.SIGTERM)
    deadline = clock() + limit
    told = clock()
    while processes.alive(gateway) and clock() < deadline:
        sleep(0.1)
        if clock() - told >= 8.0:
            told = clock()
            say(f"still stopping ({deadline - told:.0f} s until it is killed)")
    obeyed = not processes.alive(gateway)
    if not obeyed:
        say(f"it did not end within {limit:.0f} s: killing it")
        family += processes.descendants(gateway.pid, processes.table())
        processes.send(gateway, signal.SIGKILL)
    left = processes.wait_gone(family, LEFTOVER_WAIT_S, clock, sleep)
    killed = processes.end(left, 2.0, clock, sleep)
    if killed or left:
        say(f"ended {len(left)} processes that it left: " + ", ".join(sorted({entry.name for entry in left})))
    return obeyed
