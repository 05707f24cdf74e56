"""Follows the start of the application: which replicas run, what failed, whether a turn can be taken."""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from gateway.progress import Progress

POLL_S = 0.5
CAUSE_MAX = 600
# `pkg.mod.SomeError: text` at the start of a line, as tracebacks end
RAISED = re.compile(
    r"^\s*(?:\x1b\[\d+m)?((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Exit|Interrupt|Refused|Timeout)): *(.*)$"
)
ALERT_HEAD = re.compile(r"^[\s:]*(?:\(\d+\) *:)? *(?:\[[^\]]*\])? *")
WRAPPERS = ("RayTaskError", "RayActorError", "ActorDiedError", "DeploymentFailed")


class StartError(Exception):
    """Limpet could not be started; the text is for the user and says what to look at."""


@dataclass(frozen=True, slots=True)
class DeploymentView:
    """One deployment as Serve reports it. `replicas` counts them by state."""

    status: str
    message: str = ""
    replicas: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        running = self.replicas.get("RUNNING", 0)
        return f"{running}/{max(1, sum(self.replicas.values()))} running"


@dataclass(frozen=True, slots=True)
class ApplicationView:
    """The application as Serve reports it."""

    status: str
    message: str = ""
    deployments: Mapping[str, DeploymentView] = field(default_factory=dict)

    def __str__(self) -> str:
        return ", ".join(f"{name} {view}" for name, view in sorted(self.deployments.items())) or self.status.lower()


def cause(message: str) -> str:
    """The line of a long message that says why: HAProxy's alert, or the last exception that is none of Ray's
    wrappers, or the last line."""
    if "[ALERT]" in message:
        message = "HAProxyError: " + ALERT_HEAD.sub("", message.rpartition("[ALERT]")[2])
    best, collecting = "", False
    for line in message.splitlines():
        found = RAISED.match(line)
        if found and not found[1].rpartition(".")[2].startswith(WRAPPERS):
            best = f"{found[1].rpartition('.')[2]}: {found[2]}".rstrip(": ")
            collecting = True
        elif (
            collecting and line.strip() and not line.lstrip().startswith(("File ", "Traceback", "The above", "During"))
        ):
            best += " " + line.strip()  # a message of several lines, as pydantic's are
        else:
            collecting = False
    if not best:
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        best = lines[-1] if lines else "no reason given"
    return best if len(best) <= CAUSE_MAX else best[: CAUSE_MAX - 1] + "…"


def failures(view: ApplicationView) -> list[str]:
    """`deployment: cause` for each one that has something to say about a failure."""
    ailing = {"UNHEALTHY", "DEPLOY_FAILED"}
    found = [
        f"{name}: {cause(part.message)}"
        for name, part in sorted(view.deployments.items())
        if part.message and (part.status in ailing or "Error" in part.message)
    ]
    return found or ([cause(view.message)] if view.message else [])


def wait_running(
    look: Callable[[], ApplicationView],
    progress: Progress,
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until the application runs. Says what changes meanwhile.

    Raises:
        StartError: It failed, or took longer than `timeout_s`.
    """
    deadline = clock() + timeout_s
    told: set[str] = set()
    while True:
        view = look()
        if view.status == "RUNNING":
            progress.say(str(view))
            return
        if view.status == "DEPLOY_FAILED":
            raise StartError("; ".join(failures(view)) or "the application failed to deploy")
        progress.say(str(view))
        for failure in failures(view):
            if "Error" in failure and failure not in told:
                told.add(failure)
                progress.say(f"failed once, trying again: {failure}")
        if clock() >= deadline:
            raise StartError(
                f"not running after {timeout_s:.0f} s ({view}); a larger ray.deploy_timeout_s waits longer"
            )
        sleep(POLL_S)


def ready(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """Whether a turn can be taken now."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health/ready")
        response = connection.getresponse()
        body = response.read(65536)
        return response.status == 200 and json.loads(body).get("ready") is True
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return False
    finally:
        connection.close()


def wait_ready(
    is_ready: Callable[[], bool],
    timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a turn can be taken.

    Raises:
        StartError: None can after `timeout_s`.
    """
    deadline = clock() + timeout_s
    while not is_ready():
        if clock() >= deadline:
            raise StartError(f"everything runs, but /health/ready did not say so within {timeout_s:.0f} s")
        sleep(POLL_S / 2)
