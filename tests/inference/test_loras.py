"""LoRA adapters as models of their own on a real vLLM, the engine of `conftest.py`."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from inference.engine import Chunk, EngineError, Generation, Guide, Sampling
from inference.link import LinkEngine, serve_link
from inference.tokenizer import pack_ids
from inference.vllm import VllmConfig, VllmEngine
from inference.vllmloras import AT_ONCE, adapter_folders, load_adapters, lora_arguments, lora_requests
from tests.support.adapters import greedy, write_adapter

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),  # the first test waits for the engine
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn a lot
]
COUNT = 6


def prompt(seed: int, count: int = 100) -> list[int]:
    drawn = random.Random(seed)
    return [drawn.randrange(100, 49_000) for _ in range(count)]


def request(model: str, ids: list[int], guide: Guide | None = None) -> Generation:
    return Generation("r", model, (pack_ids(ids),), Sampling(COUNT, temperature=0.0, guide=guide))


async def run(engine: VllmEngine | LinkEngine, generation: Generation) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(generation)]


async def said(engine: VllmEngine | LinkEngine, model: str, ids: list[int]) -> list[int]:
    return [token for chunk in await run(engine, request(model, ids)) for token in chunk.ids]


async def test_a_name_says_what_its_merged_weights_would(
    engine: VllmEngine, model: Path, adapters: dict[str, Path]
) -> None:
    ids = prompt(1)
    expected = {name: greedy(model, folder, ids, COUNT) for name, folder in {**adapters, "base": None}.items()}

    assert len(set(map(tuple, expected.values()))) == 3
    assert {name: await said(engine, name, ids) for name in expected} == expected


async def test_over_the_token_link_the_name_arrives(engine: VllmEngine) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, "secret")
    link = LinkEngine(server.address, "secret")
    ids = prompt(2)
    answers = [await said(each, name, ids) for each in (engine, link) for name in ("pirate", "base")]
    await link.close()
    await server.close()

    assert answers[:2] == answers[2:]
    assert answers[0] != answers[1]


async def test_no_adapter_sees_the_prefix_cache_of_another(engine: VllmEngine) -> None:
    ids = prompt(3)
    names = ("base", "pirate", "poet")
    cached = [(await run(engine, request(name, ids)))[0].cached_tokens for name in names * 2]

    assert cached == [0, 0, 0, 96, 96, 96]


async def test_a_guide_holds_an_adapter_too(engine: VllmEngine) -> None:
    ids = prompt(4)
    free, guided = [
        [token for chunk in await run(engine, request("poet", ids, guide)) for token in chunk.ids]
        for guide in (None, Guide("json", json.dumps({"enum": ["yes", "no"]})))
    ]

    assert guided != free
    assert guided


async def test_an_adapter_without_weights_is_said_in_one_line(
    engine: VllmEngine, adapters: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 4, "target_modules": ["q_proj"]}')
    with pytest.raises(EngineError, match=r"vLLM can't load the LoRA mine: .*doesn't contain tensors") as failed:
        await load_adapters(engine._engine, lora_requests({**adapters, "mine": tmp_path}))
    assert failed.value.fault == "unavailable"
    assert "\n" not in failed.value.message
    await engine.check_health()


# --- before the start -----------------------------------------------------------------------------------------------


async def test_room_is_made_for_the_largest_rank_and_a_batch_of_adapters(model: Path, tmp_path: Path) -> None:
    folders = {f"a{number}": tmp_path / f"a{number}" for number in range(AT_ONCE + 1)}
    for number, folder in enumerate(folders.values()):
        write_adapter(folder, model, number, rank=9 if number == 2 else 2)
    paths = {name: str(folder) for name, folder in folders.items()}

    found = lora_arguments(adapter_folders(paths))
    assert found == {
        "enable_lora": True,
        "max_loras": AT_ONCE,
        "max_cpu_loras": AT_ONCE + 1,
        "max_lora_rank": 16,  # the least that vLLM takes for a rank of 9
    }
    config = json.loads((folders["a0"] / "adapter_config.json").read_text(encoding="utf-8"))
    for one, rank in (({"rank_pattern": {"q_proj": 65}}, 128), ({"rank_pattern": None}, 16)):
        (folders["a0"] / "adapter_config.json").write_text(json.dumps({**config, **one}), encoding="utf-8")
        assert lora_arguments(adapter_folders(paths))["max_lora_rank"] == rank
    assert lora_arguments(adapter_folders({})) == {}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (None, "no adapter_config.json with a rank"),
        ("{", "no adapter_config.json with a rank"),
        ('{"peft_type": "LORA"}', "no adapter_config.json with a rank"),
        ('{"r": 100000}', "rank 100000; vLLM takes up to"),
    ],
)
async def test_an_adapter_that_is_none_is_said_in_one_line(
    model: Path, tmp_path: Path, config: str | None, words: str
) -> None:
    if config is not None:
        (tmp_path / "adapter_config.json").write_text(config, encoding="utf-8")
    with pytest.raises(EngineError, match=words) as failed:
        await VllmEngine.start(VllmConfig(str(model), loras={"mine": str(tmp_path)}))
    assert failed.value.fault == "unavailable"
    assert "LoRA mine" in failed.value.message
    assert "\n" not in failed.value.message


async def test_a_folder_that_is_missing_is_no_hub_id(model: Path) -> None:
    with pytest.raises(EngineError, match="LoRA mine: there is no folder /no/such/adapter"):
        await VllmEngine.start(VllmConfig(str(model), loras={"mine": "/no/such/adapter"}))
