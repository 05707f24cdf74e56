"""The command line and what it rests on: models, processes, records. Nothing here starts Ray."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gateway import cli, daemon, local_cluster, processes
from gateway.daemon import Follower, Record
from gateway.model_choice import GPU_MODEL, SMALL_MODEL, choose_models, run_told, with_checkpoints
from gateway.processes import Process, descendants, parse_stat
from gateway.rollout import StartError
from tests.support.starting import Clock, progress, settings

# --- which models ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("engine", "gpu", "name", "path", "device"),
    [
        ("auto", False, SMALL_MODEL, None, "cpu"),
        ("auto", True, GPU_MODEL, GPU_MODEL, "gpu"),
        ("vllm", False, SMALL_MODEL, None, "cpu"),
    ],
)
def test_without_a_model_one_that_fits_the_machine(engine, gpu, name, path, device):
    (model,) = choose_models(settings(), engine, None, lambda: gpu).models
    assert (model.name, model.path, model.engine, model.vllm.device) == (name, path, "vllm", device)


def test_scripted_replaces_every_engine_and_asks_for_no_gpu():
    def never() -> bool:
        raise AssertionError

    chosen = choose_models(settings(models=[{"name": "a"}, {"name": "b", "path": "/x"}]), "scripted", None, never)
    assert [model.engine for model in chosen.models] == ["scripted", "scripted"]
    assert chosen.scripted.any_model
    assert [model.name for model in choose_models(settings(), "scripted", None, never).models] == ["scripted"]


def test_configured_models_stay_as_they_are():
    given = settings(models=[{"name": "a", "engine": "scripted"}, {"name": "b", "vllm": {"device": "gpu"}}])
    assert choose_models(given, "auto", None, lambda: False) == given


def test_one_model_by_name_directory_or_hub_id(tmp_path):
    given = settings(models=[{"name": "a", "aliases": ["x"]}, {"name": "b"}])
    assert [m.name for m in choose_models(given, "auto", "x", lambda: False).models] == ["a"]
    (model,) = choose_models(given, "auto", str(tmp_path), lambda: False).models
    assert (model.name, model.path) == (tmp_path.name, str(tmp_path))
    assert choose_models(given, "auto", "org/name", lambda: False).models[0].path == "org/name"
    assert choose_models(given, "auto", SMALL_MODEL, lambda: False).models[0].path is None
    for wrong in ("nope", "./nope", "/nope/nope"):
        with pytest.raises(StartError, match="no configured model"):
            choose_models(given, "auto", wrong, lambda: False)


def test_the_packaged_model_is_made_once_and_only_if_needed():
    made = []

    def make(_):
        made.append(1)
        return "/cache/model"

    chosen = with_checkpoints(settings(models=[{"name": "a"}, {"name": "b"}]), progress([]), make)
    assert [model.path for model in chosen.models] == ["/cache/model", "/cache/model"]
    assert len(made) == 1
    with_checkpoints(
        settings(models=[{"name": "a", "path": "/x"}, {"name": "b", "engine": "scripted"}]), progress([]), make
    )
    assert len(made) == 1


def test_a_program_that_tells_its_progress():
    lines: list[str] = []
    code = "import sys; print('half', file=sys.stderr); print('/the/path')"
    assert run_told([sys.executable, "-c", code], progress(lines)) == "/the/path"
    assert "half" in lines[0]
    with pytest.raises(StartError, match="error: no disk"):
        run_told(
            [sys.executable, "-c", "import sys; print('error: no disk', file=sys.stderr); sys.exit(1)"], progress([])
        )


# --- processes ------------------------------------------------------------------------------------------------------


def test_stat_of_a_process_with_an_odd_name():
    line = "42 (a) b (c) S 7 40 39 0 -1 4194304 1 2 3 4 5 6 7 8 20 0 1 0 12345 1 2 3"
    assert parse_stat(line) == Process(42, 12345, 7, 40, "a) b (c")
    assert parse_stat(line.replace(") S", ") Z")).zombie


def test_descendants_come_parents_first_and_others_not():
    made = {pid: Process(pid, 0, parent, 0, "x") for pid, parent in ((2, 1), (3, 2), (4, 3), (5, 9), (6, 2))}
    assert [entry.pid for entry in descendants(2, made)] == [3, 6, 4]


def test_ending_is_by_identity_and_in_time():
    stubborn = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import signal,time; signal.signal(15, signal.SIG_IGN); print(flush=True); time.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    gentle = subprocess.Popen(["sleep", "60"])
    assert stubborn.stdout is not None
    stubborn.stdout.readline()
    known = [entry for child in (stubborn, gentle) if (entry := processes.process(child.pid))]
    stranger = Process(gentle.pid, known[1].start - 1, 0, 0, "recycled")
    processes.send(stranger, signal.SIGKILL)
    assert processes.alive(known[1])
    assert not processes.alive(stranger)
    assert [entry.pid for entry in processes.end(known, 0.3)] == [stubborn.pid]
    assert (gentle.wait(5), stubborn.wait(5)) == (-15, -9)
    stubborn.stdout.close()


def test_our_own_children_are_found():
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert child.pid in [entry.pid for entry in descendants(os.getpid(), processes.table())]
    finally:
        child.kill()
        child.wait()
    assert processes.process(child.pid) is None


# --- records, down --------------------------------------------------------------------------------------------------


def record_for(pid: int, **changes) -> Record:
    found = processes.process(pid)
    values = {"pid": pid, "start": found.start if found else 0, "host": "127.0.0.1", "port": 8000, "models": ("m",)}
    return Record(**{**values, "began": 0.0, "stop_timeout_s": 1.0, "log": None, **changes})


def test_a_record_survives_the_disk_and_names_a_living_process():
    directory = daemon.state_directory()
    record = record_for(os.getpid())
    daemon.write_record(directory, record)
    assert daemon.read_records(directory) == [record]
    assert daemon.record_path(directory, 8000).stat().st_mode & 0o777 == 0o600
    assert record.process() is not None
    assert record_for(os.getpid(), start=1).process() is None  # the pid is another's now
    daemon.remove_record(directory, record_for(os.getpid(), start=1))
    assert daemon.read_record(directory, 8000) == record
    daemon.remove_record(directory, record)
    assert daemon.read_record(directory, 8000) is None


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"pid": 1, "models": []}'])
def test_a_broken_record_is_no_record(text):
    directory = daemon.state_directory()
    directory.mkdir(parents=True)
    daemon.record_path(directory, 8000).write_text(text, encoding="utf-8")
    assert daemon.read_records(directory) == []


def test_where_records_lie():
    assert daemon.state_directory({"XDG_STATE_HOME": "/s"}) == Path("/s/limpet")
    assert daemon.state_directory({"XDG_STATE_HOME": "relative", "HOME": "/h"}) == Path("/h/.local/state/limpet")


GATEWAY = """
import signal, subprocess, sys, time
child = subprocess.Popen(["sleep", "60"])
signal.signal(signal.SIGTERM, {handler})
print(child.pid, flush=True)
time.sleep(60)
"""


def a_gateway(handler: str) -> tuple[subprocess.Popen[bytes], int]:
    code = GATEWAY.replace("{handler}", handler)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=True)
    assert parent.stdout is not None
    with parent.stdout:
        return parent, int(parent.stdout.readline())


def gone(pid: int, reaper: subprocess.Popen[bytes]) -> bool:
    reaper.poll()
    return processes.process(pid) is None


def test_down_ends_a_gateway_and_what_it_left_behind():
    parent, child = a_gateway("lambda *_: sys.exit(0)")
    said: list[str] = []
    assert daemon.bring_down(record_for(parent.pid), said.append)
    assert gone(parent.pid, parent)
    assert gone(child, parent)
    assert said[0].startswith(f"stopping pid {parent.pid}")
    assert "sleep" in said[-1]


def test_down_kills_a_gateway_that_does_not_listen(monkeypatch):
    monkeypatch.setattr(daemon, "TERM_WAIT_EXTRA_S", 0.0)
    parent, child = a_gateway("signal.SIG_IGN")
    said: list[str] = []
    assert not daemon.bring_down(record_for(parent.pid, stop_timeout_s=0.3), said.append)
    assert gone(parent.pid, parent)
    assert gone(child, parent)
    assert any("killing" in line for line in said)


def test_down_touches_nothing_when_the_pid_is_anothers():
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        said: list[str] = []
        daemon.bring_down(record_for(bystander.pid, start=1), said.append)
        assert bystander.poll() is None
        assert "has died" in said[0]
    finally:
        bystander.kill()
        bystander.wait()


def test_down_ends_what_a_dead_gateway_left():
    record = record_for(os.getpid(), start=1)
    orphan = subprocess.Popen(["sleep", "60"], env={**os.environ, daemon.MARK: record.mark})
    bystander = subprocess.Popen(["sleep", "60"], env={**os.environ, daemon.MARK: "1:1"})
    try:
        said: list[str] = []
        daemon.bring_down(record, said.append)
        assert said == [f"the gateway on port 8000 (pid {os.getpid()}) has died; it left sleep"]
        assert orphan.wait(5) == -15
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_down_and_status_without_a_gateway(capsys):
    daemon.write_record(daemon.state_directory(), record_for(os.getpid(), start=1))
    assert cli.main(["status"]) == 1
    assert cli.main(["down"]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[0] == said[2] == "no gateway runs"
    assert said[1].endswith("has died; it left nothing")
    assert daemon.read_records(daemon.state_directory()) == []


def test_down_asks_which_when_several_run(capsys):
    for port in (8001, 8002):
        daemon.write_record(daemon.state_directory(), record_for(os.getpid(), port=port))
    assert cli.main(["down"]) == 1
    assert "--port (8001, 8002)" in capsys.readouterr().err


def test_a_detached_start_passes_on_what_is_said(tmp_path):
    log = tmp_path / "log"
    said: list[str] = []
    follower = Follower(log, said.append)
    steps = iter(["[1 s] starting\nhal", "f\n\nready http://127.0.0.1:1/v1\n"])

    def poll() -> None:
        with log.open("a", encoding="utf-8") as file:
            file.write(next(steps))

    daemon.wait_launched(poll, follower, log, 10, Clock(), lambda _: None)
    assert "".join(said) == "[1 s] starting\nhalf\n\nready http://127.0.0.1:1/v1\n"


def test_a_detached_start_that_fails_or_hangs(tmp_path):
    log = tmp_path / "log"
    log.write_text("limpet: no such model\n[2 s] stopped\n", encoding="utf-8")
    with pytest.raises(StartError, match=rf"status 1: no such model \(log: {log}\)"):
        daemon.wait_launched(lambda: 1, Follower(log, lambda _: None), log, 10)
    clock = Clock()
    with pytest.raises(StartError, match="not ready after 10 s"):
        daemon.wait_launched(lambda: None, Follower(log, lambda _: None), log, 10, clock, clock.sleep)


# --- commands -------------------------------------------------------------------------------------------------------


def test_version_and_help(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.startswith("limpet 0.")
    with pytest.raises(SystemExit, match="2"):
        cli.main([])


@pytest.mark.parametrize(
    "arguments", [["up", "--port", "70000"], ["up", "--detach", "--port", "0"], ["serve", "--port", "-1"]]
)
def test_a_wrong_setting_stops_before_anything_starts(arguments, capsys):
    assert cli.main(arguments) == 1
    said = capsys.readouterr().err
    assert "server.port" in said
    assert "command line (--port)" in said


def test_a_taken_port_stops_before_anything_starts(capsys):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert cli.main(["up", "--engine", "scripted", "--port", str(port)]) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in capsys.readouterr().err
        daemon.write_record(daemon.state_directory(), record_for(os.getpid(), port=port))
        assert cli.main(["up", "--engine", "scripted", "--port", str(port)]) == 1
        assert f"limpet down --port {port}" in capsys.readouterr().err


def test_detaching_gives_the_child_the_same_options(monkeypatch, tmp_path):
    launched: list[list[str]] = []

    def launch(arguments, log):
        launched.append(list(arguments))
        return argparse.Namespace(pid=1, poll=lambda: None)

    monkeypatch.setattr(daemon, "launch", launch)
    monkeypatch.setattr(daemon, "wait_launched", lambda *_: None)
    config = tmp_path / "c.yaml"
    config.write_text("log_level: error\n", encoding="utf-8")
    port = local_cluster.free_port()
    assert cli.main(["up", "--detach", "--engine", "scripted", "--port", str(port), "--config", str(config)]) == 0
    assert launched == [["--engine", "scripted", "--config", str(config), "--port", str(port)]]
    for options in launched:
        cli._parser().parse_args(["serve", *options])


def test_the_log_of_the_last_run_is_kept_beside_the_new_one(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "executable", "/bin/echo")
    log = tmp_path / "8000.log"
    for run in ("one", "two"):
        assert daemon.launch([run], log).wait(10) == 0
    assert log.read_text().split()[-1] == "two"
    assert log.with_name("8000.log.1").read_text().split()[-1] == "one"


def test_the_greeting_can_be_pasted(capsys):
    cli._greet(choose_models(settings(server={"port": 8123}), "scripted", None, lambda: False))
    text = capsys.readouterr().out
    assert "\nready http://127.0.0.1:8123/v1\n" in text
    code = [line[2:] for line in text.splitlines() if line.startswith("  ")]
    compile("\n".join(code[: code.index("# the same by hand, one JSON text per line:")]), "example", "exec")
    create = next(line for line in code if line.startswith("(echo")).split("'")[1]
    assert json.loads(create)["model"] == "scripted"


def test_the_greeting_can_be_pasted_from_a_folder_with_a_blank(capsys, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/a b/python")
    cli._greet(choose_models(settings(), "scripted", None, lambda: False))
    line = next(line for line in capsys.readouterr().out.splitlines() if "-m websockets" in line)
    assert shlex.split(line)[:3] == ["/a b/python", "-m", "websockets"]


def test_steps_stop_at_the_first_failure_and_are_summed_up(capfd):
    status = cli._steps(
        [("one", ("this",)), ("two", ("json.tool", "/nope")), ("three", ("this",))],
    )
    out = capfd.readouterr().out
    assert status != 0
    assert "one: passed" in out
    assert "two: FAILED" in out
    assert "three: not run" in out


def test_tests_run_in_order_with_their_arguments(monkeypatch):
    ran: list[list[str]] = []

    def run(command, **_):
        ran.append(list(command[2:]))
        return argparse.Namespace(returncode=0)

    monkeypatch.setattr(cli.subprocess, "run", run)
    assert cli.main(["test", "-k", "x", "-q"]) == 0
    assert [command[0] for command in ran] == ["ruff", "ruff", "mypy", "pytest"]
    assert ran[-1] == ["pytest", "-k", "x", "-q"]
    ran.clear()
    assert cli.main(["test", "--", "tests/edge"]) == 0
    assert ran[-1] == ["pytest", "tests/edge"]


def test_all_tests_run_in_two_halves_and_either_may_fail(capfd, monkeypatch):
    monkeypatch.setattr(cli, "LINTS", ())
    commands = {0: ("ruff", "--version"), 2: ("ruff", "--no-such-option")}
    for codes in ((0, 0), (2, 0), (0, 2)):
        halves = [(name, commands[code]) for name, code in zip("ab", codes, strict=True)]
        monkeypatch.setattr(cli, "TESTS", halves)
        assert cli.main(["test"]) == max(codes)
        said = capfd.readouterr().out
        assert said.index("== a") < said.index("== b") < said.rindex("== summary")
        assert said.count("passed in") == codes.count(0)


TWICE = """
import pathlib
def test_steady(): pass
def test_unsteady():
    seen = pathlib.Path(__file__).with_name("seen")
    before = seen.exists()
    seen.touch()
    assert before
"""


@pytest.mark.parametrize(("also", "status"), [("", 0), ("def test_broken(): assert False", 1)])
def test_what_fails_is_tried_once_more_and_told_of(capfd, monkeypatch, tmp_path, also, status):
    (tmp_path / "test_it.py").write_text(TWICE + also)
    command = ("pytest", "-q", "--rootdir", str(tmp_path), "-c", "/dev/null", str(tmp_path))
    monkeypatch.setattr(cli, "LINTS", ())
    monkeypatch.setattr(cli, "TESTS", [("a", command), ("b", ("this",))])
    assert cli.main(["test"]) == status
    said = capfd.readouterr().out
    assert "test_it.py::test_unsteady" in said
    summary = said[said.rindex("== summary") :].splitlines()[1:]
    assert summary[0].startswith("   a: FAILED (1) in ")
    assert summary[1].startswith(f"   a, what failed once more: {'FAILED (1)' if status else 'passed'} in ")
    assert summary[1].endswith("UNSTEADY, see above which") == (status == 0)
    assert summary[2].startswith("   b: passed")


def test_the_two_halves_are_all_tests():
    assert [command[2] for _, command in cli.TESTS] == ["not ray and not vllm", "ray or vllm"]


def test_an_unknown_benchmark_names_the_others(capsys):
    assert cli.main(["bench", "nope"]) == 2
    assert "there are:" in capsys.readouterr().err


def test_settings_are_listed(capsys):
    assert cli.main(["settings", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# Settings\n")
    assert cli.main(["settings"]) == 0
    assert "server.port = 8000\n" in capsys.readouterr().out
