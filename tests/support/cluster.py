"""A real cluster in a process of its own: Ray leaves threads and environment behind that other tests must not meet."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

from gateway.settings import Settings
from tests.support.recording import Record

START_S = 300.0
ASK_S = 30.0


class Cluster:
    """A running gateway with watched engines, and a look into its replicas. Use as a context manager."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(theirs, settings.model_dump(mode="json")))

    def __enter__(self) -> Cluster:
        self._process.start()
        self._answer(START_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.send(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._process.close()
        self._pipe.close()

    @property
    def http(self) -> str:
        return f"http://127.0.0.1:{self.settings.server.port}/v1"

    @property
    def ws(self) -> str:
        return f"ws://127.0.0.1:{self.settings.server.port}/v1/responses"

    def ask(self, deployment: str, method: str, *args: Any) -> list[Any]:
        """Call a method on every replica of a deployment."""
        self._pipe.send((deployment, method, args))
        answers: list[Any] = self._answer(ASK_S)
        return answers

    def records(self, model: str) -> list[Record]:
        """What this model's engine was given since the last time."""
        found = self.settings.model_named(model)
        assert found is not None
        return [record for part in self.ask(found.deployment, "take_records") for record in part]

    def counters(self) -> list[dict[str, int]]:
        """Of each session actor."""
        return self.ask("session", "counters")

    def _answer(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError("the cluster's process does not answer")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer


def _run(pipe: Connection, values: dict[str, Any]) -> None:
    """The cluster's process: start, answer questions, stop."""
    from gateway.local_cluster import LocalCluster
    from gateway.names import APPLICATION
    from gateway.progress import Progress

    settings = Settings.model_validate(values)
    local = LocalCluster(settings, Progress(sys.stderr.write))
    try:
        local.start()
        from ray import serve

        from gateway.app import build_application
        from tests.support.recording import RecordingScripted, RecordingVllm

        local.deploy(build_application(settings, {"vllm": RecordingVllm, "scripted": RecordingScripted}))
        _await_ready(local, settings)
        pipe.send("ready")
        while (question := pipe.recv()) is not None:
            deployment, method, args = question
            try:
                handle = serve.get_deployment_handle(deployment, APPLICATION)
                pipe.send(handle.broadcast(method, *args).results(timeout_s=ASK_S - 5))
            except Exception as error:  # noqa: BLE001 - the test that asked gets it
                pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    except Exception as error:  # noqa: BLE001 - as above
        pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))
    finally:
        local.shut_down()


def _await_ready(local: Any, settings: Settings) -> None:
    from gateway.rollout import failures, ready

    deadline = time.monotonic() + START_S - 30
    while time.monotonic() < deadline:
        view = local.look()
        if found := failures(view):
            raise RuntimeError(f"deployment failed: {found}")
        if view.status == "RUNNING" and ready(settings.server.host, settings.server.port):
            return
        time.sleep(0.5)
    raise TimeoutError(f"not ready: {local.look()}")
