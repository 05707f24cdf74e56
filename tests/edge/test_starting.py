"""Starting on one machine: progress, the watch over a start, the cluster. Three tests start Ray, each in a process."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from gateway import daemon, local_cluster, processes, running
from gateway.local_cluster import LocalCluster, connections, logical_cpus, machine_environment, node_environment
from gateway.processes import descendants
from gateway.progress import Progress
from gateway.rollout import ApplicationView, DeploymentView, StartError, cause, ready, wait_ready, wait_running
from tests.support.starting import ROOT, Clock, progress, settings

# --- progress -------------------------------------------------------------------------------------------------------


def test_progress_is_never_silent_for_long():
    clock, lines = Clock(), []
    spoken = threading.Event()

    def write(text: str) -> None:
        lines.append(text)
        if "still" in text:
            spoken.set()

    told = Progress(write, clock, beat_s=0.02)
    with told.phase("loading"):
        clock.sleep(9.0)
        assert spoken.wait(5)
    told.say("done")
    told.say("done")
    assert lines[0] == "[   0.0 s] loading\n"
    assert lines[1] == "[   9.0 s] still loading (9 s)\n"
    assert [line for line in lines if "done" in line] == ["[   9.0 s] done\n"]


# --- the watch over a start -----------------------------------------------------------------------------------------

TRACEBACK = """The deployment failed to start 1 times in a row. See controller logs for details. Error:
\x1b[36mray::ServeReplica:limpet:bad.initialize_and_get_metadata()\x1b[39m (pid=1, ip=127.0.0.1)
  File "/x/concurrent/futures/_base.py", line 449, in result
ValueError: the inner one

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "/x/vllm.py", line 3, in load
inference.engine.EngineError: no such file: /models/x
  and a second line of it
"""


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (TRACEBACK, "EngineError: no such file: /models/x and a second line of it"),
        ("ray.exceptions.RayTaskError(ValueError): wrapped\nValueError: inner", "ValueError: inner"),
        ("Deploying failed\nlast line\n", "last line"),
        ("", "no reason given"),
        ("KeyError: 'x'", "KeyError: 'x'"),
        (
            "[NOTICE] (1) : x\n[ALERT]    (147) : [/x/haproxy.main()] Cannot raise FD limit to 163876, limit is 20000.",
            "HAProxyError: Cannot raise FD limit to 163876, limit is 20000.",
        ),
    ],
)
def test_the_cause_in_a_long_message(message, expected):
    assert cause(message) == expected


def test_a_cause_is_never_a_page():
    assert len(cause("ValueError: " + "x" * 5000)) <= 600


def view(status: str, message: str = "", **parts: DeploymentView) -> ApplicationView:
    return ApplicationView(status, message, parts)


def test_waiting_tells_changes_and_ends_when_all_runs():
    starting = DeploymentView("UPDATING", "", {"STARTING": 1})
    running = view("RUNNING", a=DeploymentView("HEALTHY", "", {"RUNNING": 2}))
    views = iter([view("NOT_STARTED"), view("DEPLOYING", a=starting), view("DEPLOYING", a=starting), running])
    lines: list[str] = []
    clock = Clock()
    wait_running(lambda: next(views), progress(lines), 60, clock, clock.sleep)
    assert [line[11:].strip() for line in lines] == ["not_started", "a 0/1 running", "a 2/2 running"]


def test_a_failure_is_one_line_and_a_retry_is_told_once():
    ailing = DeploymentView("UPDATING", TRACEBACK, {"STARTING": 1})
    views = iter(
        [view("DEPLOYING", a=ailing)] * 3 + [view("DEPLOY_FAILED", "m", a=DeploymentView("UNHEALTHY", TRACEBACK))]
    )
    lines: list[str] = []
    clock = Clock()
    with pytest.raises(StartError) as caught:
        wait_running(lambda: next(views), progress(lines), 60, clock, clock.sleep)
    assert str(caught.value) == "a: EngineError: no such file: /models/x and a second line of it"
    assert sum("trying again" in line for line in lines) == 1


def test_a_start_that_takes_too_long():
    clock = Clock()
    with pytest.raises(StartError, match="not running after 5 s"):
        wait_running(lambda: view("DEPLOYING"), progress([]), 5, clock, clock.sleep)
    with pytest.raises(StartError, match="/health/ready"):
        wait_ready(lambda: False, 5, clock, clock.sleep)


@pytest.mark.parametrize(
    ("status", "body", "expected"),
    [
        (200, '{"ready": true}', True),
        (200, '{"ready": 1}', False),
        (503, '{"ready": true}', False),
        (200, "<html>", False),
        (200, "[]", False),
    ],
)
def test_ready_is_exactly_that_answer(status, body, expected):
    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/ready" else 404)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_):
            pass

    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.handle_request)
        thread.start()
        assert ready("127.0.0.1", server.server_port) is expected
        thread.join()
    assert not ready("127.0.0.1", server.server_port)


# --- one machine ----------------------------------------------------------------------------------------------------


def test_haproxy_and_throughput_go_together():
    for on in (True, False):
        environment = node_environment(settings(ray={"haproxy": on}))
        assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == str(int(on))
        assert not set(environment) & set(local_cluster.DRIVER_ENVIRONMENT)


def test_a_machines_own_ports_paths_and_limits():
    one = machine_environment(settings(), Path("/tmp/limpet-0-8000"), 20_000)
    two = machine_environment(settings(), Path("/tmp/" + "x" * 60), 10**7)
    assert int(one["RAY_SERVE_HAPROXY_MAXCONN"]) * local_cluster.FILES_PER_SOCKET < 20_000
    assert two["RAY_SERVE_HAPROXY_MAXCONN"] == "65536"
    assert one["RAY_SERVE_HAPROXY_STATS_PORT"] != two["RAY_SERVE_HAPROXY_STATS_PORT"]
    assert len(one["RAY_SERVE_HAPROXY_SOCKET_PATH"]) + 60 < 107  # a node id comes in between
    assert "RAY_SERVE_HAPROXY_SOCKET_PATH" not in two
    assert one["RAY_AUTH_MODE"] == "token"
    assert one["RAY_AUTH_TOKEN"] != two["RAY_AUTH_TOKEN"]


def test_all_actors_fit_on_a_laptop():
    assert logical_cpus(settings(models=[{"name": "a"}, {"name": "b", "engine": "scripted"}]), 2) == 5
    assert logical_cpus(settings(), 64) == 64
    assert logical_cpus(settings(ray={"num_cpus": 3}, models=[{"name": "a", "replicas": {"max": 9}}]), 2) == 3


def test_connections_are_counted(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert local_cluster.port_in_use("127.0.0.1", port)
        assert connections(port) == 0
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0]:
            assert connections(port) == 1
    assert local_cluster.port_in_use("127.0.0.1", port) is None
    assert connections(port, (tmp_path / "absent",)) == 0


def test_signals_first_orderly_then_at_once():
    killed: list[int] = []
    signals = running.Signals(lambda: killed.append(1))
    with pytest.raises(running.Interrupted):
        signals.handle(signal.SIGTERM, None)
    signals.handle(signal.SIGTERM, None)  # impatient, but not a person
    assert killed == []
    signals.handle(signal.SIGINT, None)
    assert killed == [1]
    late = running.Signals(lambda: killed.append(2))
    late.stopping()
    late.handle(signal.SIGINT, None)  # the end has begun on its own account
    assert killed == [1]


# --- all of it ------------------------------------------------------------------------------------------------------

TRIVIAL = """
import sys
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
import os

async def ready(_):
    return JSONResponse({"ready": True, "separate_loop": os.environ.get("RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP")})

class Session:
    def __serve_build_asgi_app__(self):
        return Starlette(routes=[Route("/health/ready", ready)])

class Broken:
    def __init__(self):
        raise ValueError("no such checkpoint")

def build(settings):
    from ray import serve

    if settings.models[0].name == "broken":
        return serve.deployment(Broken, name="engine-broken", max_constructor_retry_count=1).bind()
    return serve.deployment(serve.ingress()(Session), name="session").bind()

if __name__ == "__main__":
    from gateway.cli import _greet, _out
    from gateway.progress import Progress
    from gateway.running import run
    from gateway.settings import load_settings
    port, model, haproxy = sys.argv[1:]
    settings = load_settings(environ={}, overrides={
        "server": {"port": int(port)}, "ray": {"haproxy": haproxy == "1"},
        "models": [{"name": model, "engine": "scripted"}]})
    sys.exit(run(settings, Progress(_out), _greet, build))
"""


def start_trivial(tmp_path: Path, port: int, model: str, haproxy: str) -> tuple[subprocess.Popen[bytes], Path]:
    script = tmp_path / "trivial.py"
    script.write_text(TRIVIAL, encoding="utf-8")
    log = tmp_path / "log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with log.open("wb") as output:
        child = subprocess.Popen(
            [sys.executable, str(script), str(port), model, haproxy],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environ | {"PYTHONPATH": str(ROOT)},
            start_new_session=True,
        )
    return child, log


def wait_for(text: str, log: Path, child: subprocess.Popen[bytes], timeout_s: float = 150.0) -> str:
    deadline = time.monotonic() + timeout_s
    while text not in log.read_text(encoding="utf-8") and child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    said = log.read_text(encoding="utf-8")
    assert text in said, said
    return said


@pytest.mark.ray
@pytest.mark.timeout(240)
@pytest.mark.parametrize("haproxy", ["1", "0"])
def test_a_gateway_starts_answers_and_leaves_no_process(tmp_path, haproxy):
    port = local_cluster.free_port()
    child, log = start_trivial(tmp_path, port, "m", haproxy)
    try:
        wait_for(f"ready http://127.0.0.1:{port}/v1", log, child)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health/ready") as answer:
            assert json.load(answer) == {"ready": True, "separate_loop": None}  # the driver's variable stayed there
        family = descendants(child.pid, processes.table())
        names = {entry.name for entry in family}
        assert ("haproxy" in names) == (haproxy == "1")
        assert "raylet" in names
        child.send_signal(signal.SIGTERM)
        assert child.wait(60) == 0, log.read_text(encoding="utf-8")
        assert [entry.name for entry in family if processes.alive(entry)] == []
        assert daemon.read_records(daemon.state_directory()) == []
    finally:
        child.kill()
        child.wait()


@pytest.mark.ray
@pytest.mark.timeout(240)
def test_an_engine_that_fails_is_one_message(tmp_path):
    port = local_cluster.free_port()
    child, log = start_trivial(tmp_path, port, "broken", "0")
    try:
        assert child.wait(150) == 1
        said = log.read_text(encoding="utf-8")
        assert "limpet: engine-broken: ValueError: no such checkpoint\n" in said
        assert "Traceback" not in said
    finally:
        child.kill()
        child.wait()
        shutil.rmtree(f"/tmp/limpet-{os.getuid()}-{port}", ignore_errors=True)  # a failure keeps Ray's logs


def test_a_cluster_that_cannot_be_joined_is_one_message(monkeypatch):
    lines: list[str] = []
    cluster = LocalCluster(settings(ray={"address": "127.0.0.1:1"}), progress(lines), {})

    def refuse() -> None:
        raise ConnectionError("ray.exceptions.RaySystemError: could not connect")

    monkeypatch.setattr(cluster, "_init_ray", refuse)
    monkeypatch.setattr(cluster, "end_processes", list)
    with pytest.raises(StartError, match="Ray did not start: RaySystemError: could not connect"):
        cluster.start()
