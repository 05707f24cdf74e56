"""Starting vLLM: what an operator says about it, what it reads from the environment, and why it would not start."""

from __future__ import annotations

import importlib.metadata
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from inference.engine import EngineError
from inference.vllmloras import adapter_folders, lora_arguments, lora_requests
from inference.vllmparsers import check_parsers

log = logging.getLogger(__name__)

_CPU_ENVIRONMENT = {
    # Two threads wait for each other at barriers by spinning, which on a shared machine costs three times the CPU.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # No third process with its own import of vLLM.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
_CPU_BLOCK_SIZE = 32  # vLLM's 128 never reuses a shorter prompt


@dataclass(frozen=True, slots=True)
class VllmConfig:
    """How to start vLLM. None leaves it to vLLM or the device.

    `model` is a checkpoint's folder or a hub id; None is the small packaged model. `max_model_len` is the longest
    prompt plus answer, tokens. `kv_cache_gib` counts on a CPU, `gpu_memory_utilization` (0 to 1) on a GPU.
    With `nodes` > 1 the GPUs are those of the caller's Ray placement group, one in each of its bundles; else they are
    this machine's. `enforce_eager` skips compilation. `loras` are adapters' folders or hub ids by the name that
    `Generation.model` chooses them with. `tool_parser` and `reasoning_parser` are vLLM's names of parsers, for models
    that have no format of ours; with a reasoning parser, constraints begin to hold when the reasoning is over. `extra`
    holds further arguments of `AsyncEngineArgs` and wins over all else.
    """

    model: str | None = None
    device: Literal["auto", "cpu", "gpu"] = "auto"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 128
    block_size: int | None = None
    kv_cache_gib: float = 1.0
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    nodes: int = 1
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool | None = None
    tool_parser: str | None = None
    reasoning_parser: str | None = None
    loras: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)

    def arguments(self, model: str, cpu: bool) -> dict[str, Any]:
        """Arguments of `AsyncEngineArgs` on this kind of device."""
        wanted: dict[str, Any] = {
            "model": model,
            "dtype": "float32" if cpu and self.dtype == "auto" else self.dtype,  # bfloat16 is emulated without AVX-512
            # -1 has vLLM take the longest context that the GPU's memory allows, where the checkpoint's own may not fit.
            "max_model_len": -1 if self.max_model_len is None and not cpu else self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "block_size": _CPU_BLOCK_SIZE if cpu and self.block_size is None else self.block_size,
            "kv_cache_memory_bytes": int(self.kv_cache_gib * 2**30) if cpu else None,
            "tensor_parallel_size": self.tensor_parallel,
            "pipeline_parallel_size": self.pipeline_parallel,
            "distributed_executor_backend": "ray" if self.nodes > 1 and not cpu else None,
            "gpu_memory_utilization": None if cpu else self.gpu_memory_utilization,
            # Compiling takes 200 s at every start of a CPU engine.
            "enforce_eager": cpu if self.enforce_eager is None else self.enforce_eager,
            "enable_prefix_caching": True,
            "scheduling_policy": "priority",
            "reasoning_parser": self.reasoning_parser,
        }
        return {**{name: value for name, value in wanted.items() if value is not None}, **self.extra}


class Started(NamedTuple):
    """A vLLM that is up: the folder or hub id of its model, its `AsyncLLM`, and its adapters' `LoRARequest`s by name,
    of which it has loaded none yet."""

    model: str
    engine: Any
    loras: Mapping[str, Any]


def build_engine(config: VllmConfig, stats: Any, made: list[Started]) -> None:
    """Puts the started engine into `made`. Blocks; raises `EngineError`."""
    cpu = _is_cpu(config)
    try:
        model = _model(config)
        if cpu:
            for name, value in _CPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            if config.enforce_eager is not False:
                # vLLM compiles single functions even so (for logprobs), which needs a C++ compiler and a path without
                # spaces.
                os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
            if all(Path(path).expanduser().is_dir() for path in (model, *config.loras.values())):
                os.environ.setdefault("HF_HUB_OFFLINE", "1")
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        check_parsers(config.tool_parser, config.reasoning_parser)
        folders = adapter_folders(config.loras)
        arguments = AsyncEngineArgs(**{**lora_arguments(folders), **config.arguments(model, cpu)})
        if "structured_outputs_config" not in config.extra:
            # With vLLM's `auto` the first guide decides which library reads all later ones, for as long as the core
            # lives; after one that xgrammar doesn't take, no tool call could be forced any more.
            arguments.structured_outputs_config.backend = "xgrammar"
        loras = lora_requests(folders)
        made.append(Started(model, AsyncLLM.from_engine_args(arguments, stat_loggers=[stats]), loras))
    except EngineError:
        raise
    except Exception as problem:
        raise EngineError("unavailable", f"vLLM could not start: {root_cause(problem)}") from problem


def _model(config: VllmConfig) -> str:
    """Folder or hub id. Raises `EngineError` for a folder that isn't there."""
    if config.model is None:
        from inference.checkpoint import packaged_model

        return str(packaged_model(progress=log.info))
    if config.model.startswith((".", "/")) and not Path(config.model).is_dir():
        raise EngineError("unavailable", f"There is no checkpoint folder {config.model}.")
    return config.model


def _is_cpu(config: VllmConfig) -> bool:
    """Whether this vLLM computes on the CPU. Found without importing it."""
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
        built_for_cpu = distribution == "vllm-cpu" or "cpu" in version
        if config.device == "gpu" and built_for_cpu:
            raise EngineError("unavailable", "The vLLM that is installed is built for CPUs; install the one for GPUs.")
        return built_for_cpu or config.device == "cpu"
    raise EngineError("unavailable", "vLLM is not installed; see the README for the engine packages.")


def checkpoint_folder(model: str) -> Path | None:
    """The folder of a checkpoint's files; for a hub id the local cache's, which vLLM has filled by now."""
    if Path(model).is_dir():
        return Path(model)
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, allow_patterns=["*.json", "*.jinja"], local_files_only=True))
    except Exception as problem:  # noqa: BLE001  the library raises many kinds; the caller can do without
        log.warning("no local files of %s: %s", model, type(problem).__name__)
        return None


def root_cause(problem: BaseException) -> str:
    """The first cause of an exception, in one line."""
    while (cause := problem.__cause__ or problem.__context__) is not None:
        problem = cause
    if "Engine core initialization failed" in str(problem):
        return (
            "its core process failed; the log above says why (most often: too little memory for weights and KV cache)"
        )
    lines = [line.strip() for line in str(problem).splitlines() if line.strip()]
    if type(problem).__name__ == "ValidationError":  # pydantic's first line only counts the errors
        lines = lines[1:]
    return f"{type(problem).__name__}: {lines[0][:300] if lines else 'no message'}"
