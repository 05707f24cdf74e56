"""Ray and Serve on one machine: start them, run the application, end them and every process they made.

The environment of a cluster's processes is `node_environment`; `cluster.yaml` has the same values. This module imports
Ray inside functions: Serve reads its environment when it is imported, so that must be complete by then, and the driver
needs one variable that replicas must not get.
"""

from __future__ import annotations

import logging
import math
import os
import resource
import secrets
import shutil
import socket
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from gateway import processes
from gateway.names import APPLICATION, SESSION_DEPLOYMENT
from gateway.processes import Process
from gateway.progress import Progress
from gateway.rollout import ApplicationView, DeploymentView, StartError, cause
from gateway.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
# With throughput settings a call from a thread without a loop, as the command line is, needs the router's own loop.
DRIVER_ENVIRONMENT = {"RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1"}
LAST_WORDS_S = 3.0
FILES_PER_SOCKET = 2.6  # HAProxy: 163,876 files for 65,536 sockets
SHORT_PATH = 24  # HAProxy adds up to 80 bytes to it, and a socket's path has 107


def node_environment(settings: Settings) -> dict[str, str]:
    """What every process of a cluster needs in its environment, set before Ray starts on the node.

    `cluster.yaml` sets the same; there `ulimit -n` must allow `FILES_PER_SOCKET` files for each of `ray.maxconn`.
    """
    ray = settings.ray
    fast = "1" if ray.haproxy else "0"  # either alone is slower than neither: ray.md, P7
    return {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray gives what it starts a 30th of the share that anything else on the machine gets: an agent that compiles
        # beside its gateway would stop it.
        "RAY_worker_niceness": "0",
        "RAY_SERVE_ENABLE_HA_PROXY": fast,
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": fast,
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": str(ray.hard_stop_s),
        "RAY_SERVE_HAPROXY_MAXCONN": str(ray.maxconn),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": str(ray.min_draining_s),
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{ray.proxy_ready_timeout_s:g}",
        # Three misses and a HAProxy that died is started again: half a minute with Serve's own 10 s.
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S": "3",
        "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": str(ray.min_draining_s + 30),
    }


def machine_environment(settings: Settings, temp_dir: Path, files: int) -> dict[str, str]:
    """What one machine needs besides: ports and paths of its own, so that two gateways do not meet in them, and no more
    sockets than `files` allow, as HAProxy does not start otherwise."""
    found = {
        "RAY_SERVE_HAPROXY_MAXCONN": str(min(settings.ray.maxconn, max(64, int(files / FILES_PER_SOCKET) - 64))),
        "RAY_AUTH_MODE": "token",  # Ray listens on every interface, whatever its node address is
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    if len(str(temp_dir)) <= SHORT_PATH:
        own = temp_dir / "ha"
        found |= {
            "VLLM_RPC_BASE_PATH": str(temp_dir),  # else vLLM leaves its Unix sockets in /tmp
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(own / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(own / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(own / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(own),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(own / "server-state"),
        }
    return found


def raise_file_limit() -> int:
    """Allow as many open files as the system lets us; returns how many. Children inherit it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            return hard
    return soft


def logical_cpus(settings: Settings, real: int) -> int:
    """The cores Ray counts with: enough for all actors and engines at their largest, at least the real ones."""
    if settings.ray.num_cpus is not None:
        return settings.ray.num_cpus
    needed = settings.sessions.max_replicas * settings.sessions.cpus
    needed += sum(model.replicas.max * max(model.vllm.cpus, 1.0) for model in settings.models)
    return max(real, math.ceil(needed) + 1)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def port_in_use(host: str, port: int) -> str | None:
    """Why the port cannot be had, None if it can."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return str(error.strerror or error)
    return None


def connections(port: int, tables: tuple[Path, ...] = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))) -> int:
    """Clients connected to the port now."""
    count = 0
    for path in tables:
        with suppress(OSError):
            for line in path.read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                count += fields[3] == "01" and int(fields[1].rpartition(":")[2], 16) == port
    return count


class LocalCluster:
    """Ray and Serve for one gateway: started here, or joined at `ray.address`."""

    def __init__(self, settings: Settings, progress: Progress, environ: MutableMapping[str, str] = os.environ) -> None:
        self._settings = settings
        self._progress = progress
        self._environ = environ
        self._own = settings.ray.address is None
        default = Path(tempfile.gettempdir()) / f"limpet-{os.getuid()}-{settings.server.port}"
        self.temp_dir = settings.ray.temp_dir or default
        self._session_dir: Path | None = None
        self._servers: list[Process] = []

    def start(self) -> None:
        """Start Ray, then Serve with its ingress.

        Raises:
            StartError: One of them did not start.
        """
        logging.getLogger("ray").setLevel(logging.ERROR)
        if self._own:
            if "ray" in sys.modules:  # it has read its environment, the token's included
                raise RuntimeError("a cluster can be started only by a process that has not imported Ray before")
            processes.adopt_orphans()
            self._prepare_temp_dir()
            own = machine_environment(self._settings, self.temp_dir, raise_file_limit())
            self._environ.update(node_environment(self._settings) | own)
            fewer, wanted = own["RAY_SERVE_HAPROXY_MAXCONN"], self._settings.ray.maxconn
            if self._settings.ray.haproxy and int(fewer) < wanted:
                self._progress.say(f"room for {fewer} sockets, not {wanted} (ray.maxconn): see `ulimit -Hn`")
        with self._progress.phase("starting Ray" if self._own else f"joining Ray at {self._settings.ray.address}"):
            self._start_ray()
        self._environ.update(DRIVER_ENVIRONMENT)
        with self._progress.phase("starting Serve" + (" with HAProxy" if self._settings.ray.haproxy else "")):
            self._start_serve()

    def _prepare_temp_dir(self) -> None:
        """Make our directory, and empty it if it is the default one: the port was free, so nobody uses it."""
        default = self._settings.ray.temp_dir is None
        self.temp_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self.temp_dir.lstat()
        if default and (found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077):
            raise StartError(f"{self.temp_dir} is not ours alone; remove it or set ray.temp_dir")
        if default:
            for entry in self.temp_dir.iterdir():
                shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()

    def _start_ray(self) -> None:
        attempts = self._settings.ray.start_attempts if self._own else 1
        for attempt in range(1, attempts + 1):
            try:
                self._init_ray()
            except Exception as error:  # Ray raises bare Exception among others
                self._abandon()
                if attempt == attempts:
                    raise StartError(f"Ray did not start: {cause(str(error))}{self._logs()}") from error
                self._progress.say(f"Ray did not start ({cause(str(error))}); attempt {attempt + 1} of {attempts}")
                time.sleep(2.0)
            else:
                return

    def _init_ray(self) -> None:
        import ray

        settings = self._settings
        options: dict[str, Any] = {"namespace": settings.ray.namespace, "log_to_driver": False}
        options |= {"logging_level": logging.ERROR, "configure_logging": False}
        if self._own:
            options |= {
                "address": "local",
                "num_cpus": logical_cpus(settings, os.cpu_count() or 1),
                "include_dashboard": False,
                "object_store_memory": settings.ray.object_store_mb * 1_000_000,
                # Ray makes its directory writable for everybody, so it lies inside ours
                "_temp_dir": str(self.temp_dir / "r" if settings.ray.temp_dir is None else self.temp_dir),
                "_node_ip_address": "127.0.0.1",
            }
        else:
            options["address"] = settings.ray.address
        ray.init(**options)
        if self._own:
            node: Any = ray._private.worker._global_node  # noqa: SLF001
            self._session_dir = Path(node.get_session_dir_path())
            children = processes.descendants(os.getpid(), processes.table())
            self._servers = [child for child in children if child.name in {"raylet", "gcs_server"}]

    def _abandon(self) -> None:
        """Clear away a start that failed half-way."""
        import ray

        with suppress(Exception):
            ray.shutdown()
        self.end_processes()

    def _start_serve(self) -> None:
        from ray import serve

        logging.getLogger("ray.serve").setLevel(logging.ERROR)  # Serve has set its own when it was imported
        server = self._settings.server
        location = "HeadOnly" if self._own else "EveryNode"
        try:
            serve.start(proxy_location=location, http_options={"host": server.host, "port": server.port})
        except Exception as error:
            raise StartError(f"Serve did not start: {cause(str(error))}{self._logs()}") from error

    def deploy(self, application: Any) -> None:
        """Hand the application to Serve; returns before its replicas run."""
        from ray import serve

        target = serve.RunTarget(target=application, name=APPLICATION, route_prefix="/")
        try:
            serve.run_many([target], wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)
        except Exception as error:
            raise StartError(f"the application was not accepted: {cause(str(error))}") from error

    def look(self) -> ApplicationView:
        """The application's state."""
        from ray import serve

        found = serve.status().applications.get(APPLICATION)
        if found is None:
            return ApplicationView("NOT_STARTED")
        deployments = {
            name: DeploymentView(
                str(part.status.value), part.message, {str(state): n for state, n in part.replica_states.items()}
            )
            for name, part in found.deployments.items()
        }
        return ApplicationView(str(found.status.value), found.message, deployments)

    def lost(self) -> str | None:
        """Which part of Ray has died, None if all is well."""
        return next((server.name for server in self._servers if not processes.alive(server)), None)

    def stop(self) -> None:
        """Let running turns end, at most `ray.stop_timeout_s`; then end Ray and every process that is left."""
        limit = self._settings.ray.stop_timeout_s
        # Serve's own way, deleting the application, keeps every session actor for `ray.min_draining_s` even when idle.
        count = connections(self._settings.server.port)
        with self._progress.phase(f"draining {count} connections (at most {limit:g} s)"):
            _bounded(lambda: _drain_sessions(limit), limit + 5.0)
        self.shut_down()

    def shut_down(self, *, keep_logs: bool = False) -> None:
        """End Ray and every process that is left, without waiting for turns."""
        import ray

        if not self._own:
            _bounded(ray.shutdown, 10.0)
            return
        known = processes.descendants(os.getpid(), processes.table())
        with self._progress.phase("stopping Ray"):
            _bounded(ray.shutdown, 20.0)
            killed = self.end_processes(known)
        if killed:
            self._progress.say("had to kill " + ", ".join(f"{entry.name} ({entry.pid})" for entry in killed))
        if self._settings.ray.temp_dir is None and not keep_logs:
            shutil.rmtree(self.temp_dir, ignore_errors=True)

    def end_processes(self, known: list[Process] | None = None) -> list[Process]:
        """End the descendants, those of `known` included. Returns those that had to be killed."""
        left = {entry.identity: entry for entry in known or []}
        left |= {entry.identity: entry for entry in processes.descendants(os.getpid(), processes.table())}
        still = processes.wait_gone(left.values(), 2.0)
        killed = processes.end(still, 5.0)
        _reap()
        return killed

    def _logs(self) -> str:
        return f" (logs in {self._session_dir or self.temp_dir})" if self._own else ""


def _drain_sessions(limit_s: float) -> None:
    """Have every session actor end its turns and close its sockets with 1001."""
    from ray import serve

    sessions = serve.get_deployment_handle(SESSION_DEPLOYMENT, APPLICATION)
    # Turns that are not over by then fail with words, which needs a moment.
    drained = sessions.broadcast("drain", 1001, "the server is shutting down", max(0.0, limit_s - LAST_WORDS_S))
    drained.results(timeout_s=limit_s, return_exceptions=True)


def _bounded(work: Callable[[], object], timeout_s: float) -> None:
    """Run it in a thread and wait at most so long; what it raises is of no use when everything ends anyway."""

    def quiet() -> None:
        with suppress(Exception):
            work()

    thread = threading.Thread(target=quiet, name="stopping", daemon=True)
    thread.start()
    thread.join(timeout_s)


def _reap() -> None:
    """Take leave of adopted children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
