"""LoRA adapters that one vLLM serves beside its model: where their files lie, and how vLLM is told of them.

An adapter is named by `Generation.model`. vLLM keeps the prefix cache of each adapter apart by that name. Imports vllm
inside, as `inference.vllm` does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from inference.engine import EngineError

AT_ONCE = 8
"""Most adapters in one batch; requests for further ones wait for a step without. Each takes GPU memory for its rank in
every layer, used or not, so a server of a hundred adapters must not hold them all there."""


def adapter_folders(loras: Mapping[str, str]) -> dict[str, Path]:
    """The folder of each adapter by its name; a hub id is fetched first if it is not in the local cache. Blocks.

    Raises:
        EngineError: unavailable; there is no such folder, or none could be fetched.
    """
    return {name: _folder(name, path) for name, path in loras.items()}


def lora_arguments(folders: Mapping[str, Path]) -> dict[str, Any]:
    """Arguments of `AsyncEngineArgs` that make room for these adapters; none for none.

    Raises:
        EngineError: unavailable; an adapter's configuration can't be read, or its rank is more than vLLM takes.
    """
    if not folders:
        return {}
    from vllm.config.lora import MaxLoRARanks

    ranks = {name: _rank(name, folder) for name, folder in folders.items()}
    largest = max(ranks, key=lambda name: ranks[name])
    allowed = sorted(get_args(MaxLoRARanks))
    if ranks[largest] > allowed[-1]:
        raise EngineError("unavailable", f"LoRA {largest} has rank {ranks[largest]}; vLLM takes up to {allowed[-1]}.")
    return {
        "enable_lora": True,
        "max_loras": min(len(folders), AT_ONCE),
        "max_cpu_loras": len(folders),
        "max_lora_rank": next(rank for rank in allowed if rank >= ranks[largest]),
    }


def lora_requests(folders: Mapping[str, Path]) -> dict[str, Any]:
    """What vLLM calls each adapter, a `LoRARequest`, by its name."""
    if not folders:
        return {}
    from vllm.lora.request import LoRARequest

    return {name: LoRARequest(name, number, str(folder)) for number, (name, folder) in enumerate(folders.items(), 1)}


async def load_adapters(engine: Any, loras: Mapping[str, Any]) -> None:
    """Have the core of this `AsyncLLM` read all adapters now: a bad one is known before a client asks for it, and no
    turn waits for a disk.

    Raises:
        EngineError: unavailable; vLLM can't use one of them.
    """
    for name, lora in loras.items():
        try:
            await engine.add_lora(lora)
        except Exception as problem:
            text = str(problem).partition("\n")[0][:300]
            raise EngineError("unavailable", f"vLLM can't load the LoRA {name}: {text}") from problem


def _folder(name: str, path: str) -> Path:
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise EngineError("unavailable", f"LoRA {name}: there is no folder {path}.")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path))
    except Exception as problem:
        raise EngineError("unavailable", f"LoRA {name}: can't fetch {path} ({type(problem).__name__}).") from problem


def _rank(name: str, folder: Path) -> int:
    """The largest rank of an adapter's matrices; single modules may have their own."""
    try:
        config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
        return max(map(int, [config["r"], *(config.get("rank_pattern") or {}).values()]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
        raise EngineError(
            "unavailable", f"LoRA {name}: no adapter_config.json with a rank in {folder} ({type(problem).__name__})."
        ) from problem
