"""Which models `limpet up` serves: those of the settings, or one that fits the machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from gateway.progress import Progress
from gateway.rollout import StartError
from gateway.settings import ModelSettings, ReplicaSettings, Settings

EngineOption = Literal["auto", "vllm", "scripted"]
SMALL_MODEL = "smollm2-135m"
GPU_MODEL = "Qwen/Qwen3-4B-Instruct-2507"
SCRIPTED_MODEL = "scripted"
ROOT = Path(__file__).resolve().parent.parent


def choose_models(settings: Settings, engine: EngineOption, model: str | None, gpu: Callable[[], bool]) -> Settings:
    """The settings with at least one model and with the engines that `--engine` asks for.

    Args:
        settings: As loaded.
        engine: `auto` keeps what the models say; `vllm` and `scripted` replace the engine of every model.
        model: A checkpoint directory, a hub id, or one of the configured names, to be the only model.
        gpu: Whether this machine has one; asked only where it matters.

    Raises:
        StartError: The model is neither configured nor something that can be loaded.
    """
    models = settings.models
    if model is not None:
        named = settings.model_named(model)
        models = (named,) if named is not None else (_named(model, engine),)
    elif not models:
        models = (_default(engine, gpu),)
    if engine != "auto":
        models = tuple(entry.model_copy(update={"engine": engine}) for entry in models)
    if any(entry.engine == "vllm" and entry.vllm.device == "auto" for entry in models):
        models = tuple(_on(entry, "gpu" if gpu() else "cpu") for entry in models)
    updates: dict[str, object] = {"models": models}
    if engine == "scripted":
        updates["scripted"] = settings.scripted.model_copy(update={"any_model": True})
    return settings.model_copy(update=updates)


def _default(engine: EngineOption, gpu: Callable[[], bool]) -> ModelSettings:
    if engine == "scripted":
        return ModelSettings(name=SCRIPTED_MODEL, engine="scripted")
    if gpu():
        return ModelSettings(name=GPU_MODEL, path=GPU_MODEL)
    return ModelSettings(name=SMALL_MODEL, replicas=ReplicaSettings(min=1, max=1))


def _on(model: ModelSettings, device: str) -> ModelSettings:
    """The model with a device that was left open decided."""
    if model.vllm.device != "auto":
        return model
    return model.model_copy(update={"vllm": model.vllm.model_copy(update={"device": device})})


def _named(model: str, engine: EngineOption) -> ModelSettings:
    if engine == "scripted":
        return ModelSettings(name=model, engine="scripted")
    if model == SMALL_MODEL:
        return ModelSettings(name=SMALL_MODEL)
    path = Path(model).expanduser()
    if path.is_dir():
        return ModelSettings(name=path.resolve().name, path=str(path.resolve()))
    if model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise StartError(
            f"--model {model}: no configured model, no directory, and no hub id such as {GPU_MODEL}; "
            f"the packaged one is {SMALL_MODEL}"
        )
    return ModelSettings(name=model, path=model)


def with_checkpoints(settings: Settings, progress: Progress, make: Callable[[Progress], str] | None = None) -> Settings:
    """The settings with the packaged model's directory for every vLLM model that names none; made first if need be.

    Raises:
        StartError: It could not be made.
    """
    if all(model.engine != "vllm" or model.path is not None for model in settings.models):
        return settings
    path = (make or _packaged)(progress)  # it says itself how far it is
    models = [
        model.model_copy(update={"path": path}) if model.engine == "vllm" and model.path is None else model
        for model in settings.models
    ]
    return settings.model_copy(update={"models": tuple(models)})


def _packaged(progress: Progress) -> str:
    """Ask `inference.checkpoint`, in a process of its own: the conversion needs a gigabyte that we would keep."""
    return run_told([sys.executable, "-m", "inference.checkpoint"], progress)


def run_told(command: Sequence[str], progress: Progress) -> str:
    """Run a program whose error output is progress; the last line of its output.

    Raises:
        StartError: It failed; the text is its last line of error output.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    environ = os.environ | {"PYTHONPATH": path}
    with subprocess.Popen(  # noqa: S603 - our own module
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ
    ) as program:
        said: list[str] = []

        def listen() -> None:
            for line in program.stderr or ():
                said.append(line.strip())
                progress.say(line.strip())

        listener = threading.Thread(target=listen, name="listener", daemon=True)
        listener.start()
        try:
            lines = (program.stdout.read() if program.stdout else "").split("\n")
        except BaseException:
            program.terminate()
            raise
        listener.join()
    output = [line for line in lines if line.strip()]
    if program.returncode or not output:
        raise StartError(next((line for line in reversed(said) if line), f"{' '.join(command)} failed"))
    return output[-1].strip()
