"""Runs one gateway in the foreground: start it, say when a turn can be taken, keep it, end it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from gateway import daemon, processes
from gateway.local_cluster import LocalCluster
from gateway.progress import Progress
from gateway.rollout import StartError, ready, wait_ready, wait_running
from gateway.settings import Settings

READY_WAIT_S = 120.0
WATCH_S = 1.0


class Interrupted(BaseException):
    """The first SIGINT or SIGTERM, raised wherever the main thread is."""


class Signals:
    """The first signal ends what runs in an orderly way; the second SIGINT ends everything at once."""

    def __init__(self, at_once: Callable[[], object]) -> None:
        self._at_once = at_once
        self._armed = True
        self._seen = 0

    def install(self) -> None:
        """Take SIGINT and SIGTERM; again after Ray has started, since it takes SIGTERM for itself."""
        signal.signal(signal.SIGINT, self.handle)
        signal.signal(signal.SIGTERM, self.handle)

    def stopping(self) -> None:
        """From here on a first signal no longer interrupts: the end has begun."""
        self._armed = False

    def handle(self, signum: int, _: FrameType | None) -> None:
        """The handler itself."""
        self._seen += 1
        if self._armed:
            self._armed = False
            raise Interrupted
        if signum == signal.SIGINT and self._seen > 1:
            self._at_once()


def reachable_host(host: str) -> str:
    """Where this machine reaches a server that listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104 - compared, not bound


def kill_all(record: daemon.Record) -> None:
    """End every descendant and ourselves, now."""
    daemon.remove_record(daemon.state_directory(), record)
    for entry in reversed(processes.descendants(os.getpid(), processes.table())):
        processes.send(entry, signal.SIGKILL)
    os._exit(130)


def run(
    settings: Settings, progress: Progress, greet: Callable[[Settings], object], build: Callable[[Settings], Any]
) -> int:
    """Serve until a signal or a failure.

    Args:
        settings: With models.
        progress: Told what happens.
        greet: Called once a turn can be taken.
        build: Makes the Serve application of the settings.

    Returns:
        The exit status: 0 after a signal, 130 if the start was interrupted, 1 after a failure.
    """
    directory = daemon.state_directory()
    known = daemon.read_record(directory, settings.server.port)
    if known is not None and known.pid != os.getpid() and known.process() is not None:
        # It binds its port only when Ray and Serve are up, so the port alone does not tell.
        raise StartError(
            f"a gateway is starting or running on port {known.port} (pid {known.pid}); "
            f"`limpet down --port {known.port}` ends it, --port takes another one"
        )
    record = record_of(settings)
    signals = Signals(lambda: kill_all(record))
    signals.install()
    cluster = LocalCluster(settings, progress)
    serving = False
    status = 1
    os.environ[daemon.MARK] = record.mark
    try:
        daemon.write_record(directory, record)
        cluster.start()
        signals.install()
        _start_application(cluster, settings, progress, build)
        serving = True
        greet(settings)
        status = _watch(cluster, progress)
    except (Interrupted, SystemExit):  # Ray answers SIGTERM with the latter until we have taken it back
        status = 0 if serving else 130
        progress.say("stopping; Ctrl-C again ends it at once")
    except StartError as error:
        sys.stderr.write(f"limpet: {error}\n")
        progress.say(f"Ray's logs stay in {cluster.temp_dir}")
    finally:
        signals.stopping()
        cluster.stop() if serving else cluster.shut_down(keep_logs=status == 1)
        daemon.remove_record(directory, record)
    progress.say("stopped")
    return status


def record_of(settings: Settings) -> daemon.Record:
    """The record of this very process."""
    mine = processes.process(os.getpid())
    detached = os.environ.get("LIMPET_LOG_FILE")
    return daemon.Record(
        pid=os.getpid(),
        start=mine.start if mine is not None else 0,
        host=settings.server.host,
        port=settings.server.port,
        models=tuple(model.name for model in settings.models),
        began=time.time(),
        stop_timeout_s=settings.ray.stop_timeout_s,
        log=detached,
    )


def _start_application(
    cluster: LocalCluster, settings: Settings, progress: Progress, build: Callable[[Settings], Any]
) -> None:
    names = ", ".join(f"{model.name} ({model.engine})" for model in settings.models)
    with progress.phase(f"starting session actors and engines: {names}"):
        cluster.deploy(build(settings))
        wait_running(cluster.look, progress, settings.ray.deploy_timeout_s)
    host = reachable_host(settings.server.host)
    with progress.phase("waiting until a turn can be taken"):
        wait_ready(lambda: ready(host, settings.server.port), READY_WAIT_S)


def _watch(cluster: LocalCluster, progress: Progress) -> int:
    """Stay until Ray dies; a signal leaves by an exception."""
    while True:
        time.sleep(WATCH_S)
        if (lost := cluster.lost()) is not None:
            progress.say(f"Ray's {lost} has died, so nothing can be served any more")
            return 1
