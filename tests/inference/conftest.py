"""One real vLLM with a tiny random model and two LoRA adapters for all tests that want one. It takes 40 s to start; the
last of them, in `test_vllm.py`, kills its core."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from inference.checkpoint import tiny_random_model
from inference.vllm import VllmConfig, VllmEngine
from tests.support.adapters import write_adapter


@pytest.fixture(scope="session")
def model() -> Path:
    return tiny_random_model()


@pytest.fixture(scope="session")
def adapters(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders by the names that the engine knows them by."""
    found = {name: tmp_path_factory.mktemp("adapters") / name for name in ("pirate", "poet")}
    for seed, folder in enumerate(found.values(), 1):
        write_adapter(folder, model, seed)
    return found


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine(model: Path, adapters: dict[str, Path]) -> AsyncIterator[VllmEngine]:
    config = VllmConfig(
        str(model),
        max_model_len=8192,
        max_num_seqs=4,
        kv_cache_gib=0.1,
        tool_parser="hermes",
        loras={name: str(folder) for name, folder in adapters.items()},
    )
    engine = await VllmEngine.start(config)
    yield engine
    await engine.close()
