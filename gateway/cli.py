"""The `limpet` command: start, stop and look at a gateway on this machine; tests, benchmarks, settings."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from gateway import __version__, daemon
from gateway.bootstrap import NO_VLLM, gpu_present
from gateway.model_choice import choose_models, with_checkpoints
from gateway.progress import Progress
from gateway.rollout import StartError, ready
from gateway.settings import Settings, SettingsError, load_settings
from gateway.settings_schema import markdown

ROOT = Path(__file__).resolve().parent.parent
FAILED, USAGE = 1, 2
LINTS = (
    ("ruff check", ("ruff", "check", ".")),
    ("ruff format", ("ruff", "format", "--check", ".")),
    ("mypy", ("mypy", "gateway", "actors", "inference")),
)

# In two halves, one behind the other: beside each other they are done three minutes sooner on two cores, and whatever
# waits for real processes waits for the other half as well.
TESTS = (
    ("pytest", ("pytest", "-m", "not ray and not vllm")),
    ("pytest with Ray and vLLM", ("pytest", "-m", "ray or vllm")),
)
# What fails again is broken; what does not was told of all the same (docs/decisions/0019-second-try.md).
AGAIN = ("--last-failed", "--last-failed-no-failures=none")
SOME_FAILED = 1
"""pytest's status when it ran to its end; a second try mends nothing of the others."""

EXAMPLE = """\
ready http://{host}:{port}/v1

  # pip install "openai[realtime]"
  from openai import OpenAI

  client = OpenAI(base_url="http://{host}:{port}/v1", api_key="{key}")
  with client.responses.connect() as socket:
      socket.response.create(model="{model}", input="Say hello.")
      for event in socket:
          if event.type == "response.output_text.delta":
              print(event.delta, end="", flush=True)
          elif event.type in ("response.completed", "response.incomplete", "response.failed", "error"):
              break

  # the same by hand, one JSON text per line:
  (echo '{{"type":"response.create","model":"{model}","input":"Say hello."}}'; sleep 10) |
    {python} -m websockets ws://{host}:{port}/v1/responses
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = _parsed(sys.argv[1:] if argv is None else list(argv))
    command: Callable[[argparse.Namespace], int] = options.run
    try:
        return command(options)
    except (SettingsError, StartError) as error:
        print(f"limpet: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        return 130


def _parsed(arguments: list[str]) -> argparse.Namespace:
    """The command line. What follows `test` and `bench NAME` is another program's and not looked at."""
    own = {"test": 1, "bench": 2}.get(arguments[0] if arguments else "", len(arguments))
    if {"-h", "--help"} & set(arguments[: own + 1]):
        own = len(arguments)
    options = _parser().parse_args(arguments[:own])
    options.rest = arguments[own + 1 :] if arguments[own : own + 1] == ["--"] else arguments[own:]
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="limpet", description="A self-hosted Responses gateway for agent loops.")
    parser.add_argument("--version", action="version", version=f"limpet {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, text in (("up", "start a gateway on this machine"), ("serve", "the same, always in the foreground")):
        up = commands.add_parser(name, help=text)
        up.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML (default: $LIMPET_CONFIG)")
        up.add_argument("--host", help="address to listen on (server.host)")
        up.add_argument("--port", type=int, help="port to listen on (server.port)")
        up.add_argument(
            "--engine",
            choices=("auto", "vllm", "scripted"),
            default="auto",
            help="auto: what the models' settings say; scripted: a double that needs no model (default: auto)",
        )
        up.add_argument("--model", help="serve only this: a configured name, a directory, or a hub id")
        up.add_argument("--needs-vllm", action="store_true", help=argparse.SUPPRESS)  # asked by gateway.bootstrap
        if name == "up":
            up.add_argument("--detach", action="store_true", help="return when ready; end it with `limpet down`")
        up.set_defaults(run=_up, detach=False)
    for name, text, run in (("down", "end a gateway", _down), ("status", "what runs here", _status)):
        command = commands.add_parser(name, help=text)
        command.add_argument("--port", type=int, help="which one (default: the only one that runs)")
        command.set_defaults(run=run)
    for name, text, tell in (
        ("usage", "what tenants used, by model", _usage),
        ("purge", "delete all that a tenant has stored", _purge),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("--config", type=Path, metavar="FILE", help="settings in YAML (default: $LIMPET_CONFIG)")
        command.set_defaults(run=tell)
        if name == "usage":
            command.add_argument("--days", type=_days, default=30.0, help="how far back (default: 30)")
            command.add_argument("--tenant", help="only this one, as the table names it")
            command.add_argument("--json", action="store_true", help="a list of objects instead of a table")
        else:
            command.add_argument("tenant", help="as `limpet usage` names it")
    test = commands.add_parser(
        "test", help="lint, types, tests; further arguments go to pytest", usage="%(prog)s [-h] …"
    )
    test.set_defaults(run=_test)
    commands.add_parser("lint", help="lint and types only").set_defaults(run=_lint)
    bench = commands.add_parser("bench", help="run a benchmark; further arguments go to it")
    bench.add_argument("name", metavar="NAME", help="a module of benchmarks/")
    bench.set_defaults(run=_bench)
    settings = commands.add_parser("settings", help="every setting: default, allowed values, reason")
    settings.add_argument("--markdown", action="store_true", help="as docs/settings.md")
    settings.set_defaults(run=_settings)
    return parser


# --- up, serve ------------------------------------------------------------------------------------------------------


def _load(options: argparse.Namespace) -> Settings:
    given = {"host": options.host, "port": options.port}
    server = {name: value for name, value in given.items() if value is not None}
    source = "command line (" + ", ".join(f"--{name}" for name in server) + ")"
    settings = load_settings(options.config, os.environ, {"server": server} if server else {}, overrides_from=source)
    return choose_models(settings, options.engine, options.model, lambda: gpu_present(os.environ))


def _up(options: argparse.Namespace) -> int:
    if options.needs_vllm:
        return _needs_vllm(options)
    settings = _load(options)
    _refuse_taken_port(settings)
    if options.detach:
        return _detach(options, settings)
    if not settings.server.api_keys:
        print("no API key is set: anyone on this machine may use the gateway (server.api_keys)", flush=True)
    from gateway.running import run

    progress = Progress(_out)
    return run(with_checkpoints(settings, progress), progress, _greet, _application)


def _needs_vllm(options: argparse.Namespace) -> int:
    """0 if these settings want vLLM, `NO_VLLM` if they don't, or if they are wrong, which the command will say."""
    try:
        models = _load(options).models
    except (SettingsError, StartError):
        return NO_VLLM
    return 0 if any(model.engine == "vllm" for model in models) else NO_VLLM


def _days(text: str) -> float:
    days = float(text)
    if not 0 < days <= 36_500:
        raise ValueError(text)
    return days


def _application(settings: Settings) -> Any:
    from gateway.app import build_application
    from gateway.storage import default_store

    return build_application(default_store(settings))


def _refuse_taken_port(settings: Settings) -> None:
    from gateway.local_cluster import port_in_use

    host, port = settings.server.host, settings.server.port
    reason = port_in_use(host, port)
    if reason is None:
        return
    record = daemon.read_record(daemon.state_directory(), port)
    if record is not None and record.process() is not None:
        hint = f"a gateway (pid {record.pid}) has it: `limpet down --port {port}` ends it"
    else:
        hint = "another program has it; take another one with --port"
    raise StartError(f"cannot listen on {host}:{port} ({reason.lower()}); {hint}")


def _detach(options: argparse.Namespace, settings: Settings) -> int:
    arguments = ["--engine", options.engine]
    if options.config is not None:
        arguments += ["--config", str(options.config.resolve())]
    for name in ("host", "port", "model"):
        if getattr(options, name) is not None:
            arguments += [f"--{name}", str(getattr(options, name))]
    log = daemon.log_path(daemon.state_directory(), settings.server.port)
    child = daemon.launch(arguments, log)
    print(f"pid {child.pid}, log {log}", flush=True)
    wait = settings.ray.deploy_timeout_s + 600
    daemon.wait_launched(child.poll, daemon.Follower(log, _out), log, wait)
    return 0


def _greet(settings: Settings) -> None:
    from gateway.running import reachable_host

    server = settings.server
    key = "YOUR_KEY" if server.api_keys else "none"
    host = reachable_host(server.host)
    text = EXAMPLE.format(
        host=f"[{host}]" if ":" in host else host,
        port=server.port,
        key=key,
        model=settings.models[0].name,
        python=shlex.quote(sys.executable),
    )
    _out("\n" + (text.partition("\n  # the same by hand")[0] + "\n" if server.api_keys else text) + "\n")


def _line(text: str) -> None:
    print(text, flush=True)


def _out(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


# --- down, status ---------------------------------------------------------------------------------------------------


def _down(options: argparse.Namespace) -> int:
    directory = daemon.state_directory()
    records = _records(directory, options.port)
    running = [record for record in records if record.process() is not None]
    for record in records:
        if record not in running:
            daemon.bring_down(record, _line)
            daemon.remove_record(directory, record)
    if not running:
        print("no gateway runs" + (f" on port {options.port}" if options.port else ""))
        return 0
    if len(running) > 1:
        ports = ", ".join(str(record.port) for record in running)
        raise StartError(f"several gateways run; say which with --port ({ports})")
    obeyed = daemon.bring_down(running[0], _line)
    daemon.remove_record(directory, running[0])
    print("stopped" if obeyed else "killed")
    return 0


def _status(options: argparse.Namespace) -> int:
    from gateway.running import reachable_host

    running = [record for record in _records(daemon.state_directory(), options.port) if record.process() is not None]
    for record in running:
        host = reachable_host(record.host)
        state = "ready" if ready(host, record.port) else "not ready"
        age = time.time() - record.began
        print(f"{state}  http://{host}:{record.port}/v1  pid {record.pid}  {age:.0f} s  {', '.join(record.models)}")
        if record.log:
            print(f"  log {record.log}")
    if not running:
        print("no gateway runs" + (f" on port {options.port}" if options.port else ""))
    return 0 if running else FAILED


def _records(directory: Path, port: int | None) -> list[daemon.Record]:
    return [record for record in daemon.read_records(directory) if port in {None, record.port}]


# --- usage, purge ---------------------------------------------------------------------------------------------------


def _usage(options: argparse.Namespace) -> int:
    from gateway.tenants import usage

    settings = load_settings(options.config, os.environ)
    _line(usage(settings, options.days, options.tenant, as_json=options.json))
    return 0


def _purge(options: argparse.Namespace) -> int:
    from gateway.tenants import purge

    _line(purge(load_settings(options.config, os.environ), options.tenant))
    return 0


# --- test, lint, bench, settings ------------------------------------------------------------------------------------


def _lint(_: argparse.Namespace) -> int:
    return _steps(LINTS)


def _test(options: argparse.Namespace) -> int:
    if options.rest:
        return _steps((*LINTS, ("pytest", ("pytest", *options.rest))))
    return _steps(LINTS) or _tests(TESTS)


def _tests(halves: Sequence[tuple[str, Sequence[str]]]) -> int:
    """Run all of them, and what failed once more; the status of the first that failed twice."""
    told: list[str] = []
    status = 0
    for name, command in halves:
        code, outcome = _run(name, command)
        told.append(outcome)
        if code == SOME_FAILED:
            code, outcome = _run(f"{name}, what failed once more", (*command, *AGAIN))
            told.append(outcome if code else f"{outcome}: UNSTEADY, see above which")
        status = status or code
    print("== summary", *told, sep="\n   ", flush=True)
    return status


def _steps(steps: Sequence[tuple[str, Sequence[str]]]) -> int:
    """Run them in order, stop at the first that fails, and say how it went."""
    told: list[str] = []
    status = 0
    for name, command in steps:
        status, outcome = _run(name, command)
        told.append(outcome)
        if status:
            break
    told += [f"{name}: not run" for name, _ in steps[len(told) :]]
    print("== summary", *told, sep="\n   ", flush=True)
    return status


def _run(name: str, command: Sequence[str]) -> tuple[int, str]:
    """Its status, and how that is told."""
    print(f"== {name}", flush=True)
    began = time.monotonic()
    code = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=False).returncode  # noqa: S603
    return code, f"{name}: {'passed' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - began:.1f} s"


def _bench(options: argparse.Namespace) -> int:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("*.py") if not path.stem.startswith("_"))
    if options.name not in names:
        print(f"limpet: no benchmark {options.name!r}; there are: {', '.join(names) or 'none'}", file=sys.stderr)
        return USAGE
    command = [sys.executable, "-m", f"benchmarks.{options.name}", *options.rest]
    return subprocess.run(command, cwd=ROOT, check=False).returncode  # noqa: S603


def _settings(options: argparse.Namespace) -> int:
    text = markdown(Settings)
    if options.markdown:
        _out(text)
        return 0
    for line in text.splitlines():
        if line.startswith("| `"):
            key, default, allowed, why = (cell.strip() for cell in line.strip("|").split(" | ", 3))
            _out(f"{key.strip('`')} = {default.strip('`')}\n    {why}\n    {allowed}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
