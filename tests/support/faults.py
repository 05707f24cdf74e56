"""A real cluster whose parts are killed, and its control store, which the test may start again."""

from __future__ import annotations

import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import httpx

from gateway import processes
from gateway.local_cluster import free_port
from gateway.processes import Process
from gateway.settings import Settings
from tests.support.cluster import Cluster, _await_ready

Part = Literal["session", "engine", "haproxy", "haproxy manager", "controller", "gcs"]
PARTS: dict[Part, str] = {
    "session": "ray::ServeReplica:limpet:session",
    "engine": "ray::ServeReplica:limpet:engine-scripted",
    "haproxy manager": "ray::HAProxyManager",
    "controller": "ray::ServeController",
}
"""How the processes that Ray starts call themselves."""
REPLICAS = 2
MODEL = "scripted"
SETTLED_S = 120.0
POLL_S = 0.1
FULL_BYTES = 4096
"""What a file may grow to on a disk that is full: less than the database has."""


def fault_settings(store_url: str, **sections: dict[str, Any]) -> Settings:
    """Two session actors, two engines that say 200 tokens a second, and this database."""
    values: dict[str, dict[str, Any]] = {
        "server": {},
        "scripted": {"tokens_per_second": 200},
        "sessions": {"min_replicas": REPLICAS, "max_replicas": REPLICAS},
        "limits": {"drain_grace_s": 3},
        "ray": {"min_draining_s": 5},
        "store": {"url": store_url, "memory_responses": 100_000},
    }
    for name, section in sections.items():
        values[name] = values.get(name, {}) | section
    values["server"]["port"] = free_port()
    engines = {"min": REPLICAS, "max": REPLICAS}
    return Settings.model_validate({**values, "models": [{"name": MODEL, "engine": "scripted", "replicas": engines}]})


class FaultyCluster(Cluster):
    """As `Cluster`, with all its state in `folder`, the control store's too. Parts are killed by what they are."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings)
        self._folder = folder
        (folder / "gcs").mkdir()
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, settings.model_dump(mode="json")))

    def __enter__(self) -> FaultyCluster:
        # Ray's processes inherit it (spec/ray.md 6); another cluster must find none of it.
        durable = {"RAY_gcs_storage": "rocksdb", "RAY_gcs_storage_path": str(self._folder / "gcs")}
        with patch.dict(os.environ, {**durable, "XDG_STATE_HOME": str(self._folder / "state")}):
            super().__enter__()
        return self

    def find(self, part: Part) -> list[Process]:
        """The processes that are this part, oldest first."""
        pid = self._process.pid
        assert pid is not None
        family = processes.descendants(pid, processes.table())
        if part in ("haproxy", "gcs"):
            name = {"haproxy": "haproxy", "gcs": "gcs_server"}[part]
            found = [entry for entry in family if entry.name == name]
        else:
            # Behind a dot it says what it is busy with.
            found = [entry for entry in family if f"{_title(entry)}.".startswith(f"{PARTS[part]}.")]
        return sorted(found, key=lambda entry: entry.identity[::-1])

    def kill(self, victim: Process) -> None:
        """kill -9. Returns when it is gone."""
        processes.send(victim, signal.SIGKILL)
        assert not processes.wait_gone([victim], 10)

    def stop(self, victim: Process) -> None:
        """It does nothing any more, and its sockets stay open."""
        processes.send(victim, signal.SIGSTOP)

    def resume(self, victim: Process) -> None:
        """After `stop`."""
        processes.send(victim, signal.SIGCONT)

    def start_gcs(self) -> None:
        """Start the control store again after it was killed, as a supervisor of `ray start` would."""
        self._pipe.send("start gcs")
        self._answer(60)

    def settled(self, timeout_s: float = SETTLED_S) -> float:
        """Wait until every replica runs and the edge answers; how long that took, seconds."""
        began = time.monotonic()
        wait_for(self._whole, timeout_s, "the cluster is whole again")
        return time.monotonic() - began

    @contextmanager
    def full_disk(self) -> Iterator[None]:
        """No file of a session actor grows any more, whatever it writes."""
        victims = self.find("session")
        before = [resource.prlimit(victim.pid, resource.RLIMIT_FSIZE) for victim in victims]
        try:
            for victim, (_, hard) in zip(victims, before, strict=True):
                resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (FULL_BYTES, hard))
            yield
        finally:
            for victim, limits in zip(victims, before, strict=True):
                with suppress(ProcessLookupError):
                    resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, limits)

    def _whole(self) -> bool:
        if len(self.find("session")) != REPLICAS or len(self.find("engine")) != REPLICAS or not self.find("haproxy"):
            return False
        self._pipe.send("look")
        states: list[dict[str, int]] = self._answer(60)
        if len(states) != 2 or any(state != {"RUNNING": REPLICAS} for state in states):
            return False
        with suppress(httpx.HTTPError):
            return httpx.get(f"{self.http}/models", timeout=5).status_code == 200
        return False


def wait_for(happened: Callable[[], object], timeout_s: float, what: str) -> float:
    """Look until it has happened; how long that took, seconds. Raises TimeoutError that says `what` did not."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(POLL_S)
    return time.monotonic() - began


def _title(entry: Process) -> str:
    with suppress(OSError):
        return Path(f"/proc/{entry.pid}/cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
    return ""


def _run(pipe: Connection, values: dict[str, Any]) -> None:
    """The cluster's process: start, answer questions, stop."""
    from gateway.local_cluster import LocalCluster
    from gateway.progress import Progress

    settings = Settings.model_validate(values)
    local = LocalCluster(settings, Progress(sys.stderr.write))
    try:
        local.start()
        from gateway.app import build_application
        from tests.support.recording import RecordingScripted

        local.deploy(build_application(settings, {"scripted": RecordingScripted}))
        _await_ready(local, settings)
        pipe.send("ready")
        while (question := pipe.recv()) is not None:
            try:
                pipe.send(_answer(local, question))
            except Exception as error:  # noqa: BLE001 - the test that asked gets it
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    except Exception as error:  # noqa: BLE001 - as above
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    finally:
        local.shut_down()


def _answer(local: Any, question: Any) -> Any:
    import ray
    from ray import serve

    from gateway.names import APPLICATION

    if question == "start gcs":
        node: Any = ray._private.worker._global_node
        node.kill_gcs_server(check_alive=False)  # it is dead; this is what makes room for another on its port
        node.start_gcs_server()
        return None
    if question == "look":
        view = local.look()
        # A replica that was killed is stopped by Serve in its own time; it is gone for everybody else.
        return [{s: n for s, n in part.replicas.items() if n and s != "STOPPING"} for part in view.deployments.values()]
    deployment, method, args = question
    handle = serve.get_deployment_handle(deployment, APPLICATION)
    return handle.broadcast(method, *args).results(timeout_s=25)
