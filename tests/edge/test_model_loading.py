"""How a session actor gets hold of a model and of the LoRA adapters on it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from openai import AsyncOpenAI

from actors.engines import Endpoint, EnginePool
from actors.models import Model, ModelTable
from gateway.model_loading import lora_loader, model_loader
from gateway.settings import ModelSettings
from inference.engine import EngineError
from inference.formats.chatml import chatml_format
from inference.replica import ReplicaInfo
from inference.tokenizer import scripted_tokenizer
from tests.support.actors import says
from tests.support.gateway import gateway

MODEL = ModelSettings(name="base", vllm={"loras": {"pirate": "/loras/pirate", "poet": "/loras/poet"}})  # type: ignore[arg-type]
INFO = ReplicaInfo("r1", "127.0.0.1", 1, draining=False, context_length=4096)


class Handle:
    """A Serve handle to the replicas of an engine without a checkpoint, as far as a loader uses it."""

    def __init__(self, *replicas: ReplicaInfo) -> None:
        self.replicas = list(replicas)
        self.fetched = 0
        self.asked = asyncio.Event()
        self.tokenizer_files = self

    def broadcast(self, method: str) -> Handle:
        assert method == "info"
        return self

    async def results_async(self, **_: Any) -> list[Any]:
        return list(self.replicas)

    async def remote(self) -> dict[str, bytes]:
        self.fetched += 1
        self.asked.set()
        await asyncio.sleep(0.01)
        return {}


async def one_endpoint() -> list[Endpoint]:
    return [Endpoint("only", "127.0.0.1", 0)]


def table(handle: Handle) -> ModelTable:
    base = model_loader(MODEL, handle, "token")  # type: ignore[arg-type]
    loaders = {MODEL.name: base, **{name: lora_loader(base, name) for name in MODEL.vllm.loras}}
    return ModelTable(loaders, {"alias": "base"}, patience_s=5.0)


async def test_adapters_are_models_on_the_engines_and_the_format_of_their_base() -> None:
    handle = Handle(INFO)
    models = table(handle)
    models.start()
    base, pirate, poet = await asyncio.gather(*map(models.resolve, ("base", "pirate", "poet")))

    assert models.names() == ["base", "pirate", "poet", "alias"]
    assert [model.name for model in (base, pirate, poet)] == ["base", "pirate", "poet"]
    assert base.engines is pirate.engines is poet.engines
    assert base.format is pirate.format is poet.format
    assert (pirate.context_length, handle.fetched) == (4096, 1)
    assert models.ready
    await models.close()  # closes what they share once for each
    assert not base.engines.usable


async def test_clients_name_an_adapter_and_the_engine_is_told() -> None:
    engine = says("ok")

    async def base() -> Model:
        pool = EnginePool(one_endpoint, lambda _: engine, refresh_s=3600, patience_s=0)
        await pool.start()
        return Model("base", chatml_format(scripted_tokenizer()), 4096, pool)

    loaders = {"base": base, "poet": lora_loader(base, "poet")}
    async with (
        gateway(engine, models=(), loaders=loaders) as running,
        AsyncOpenAI(base_url=running.http, api_key="k") as client,
    ):
        listed = [model.id async for model in client.models.list()]
        answers = [await client.responses.create(model=name, input="hi") for name in ("poet", "base")]

    assert listed == ["base", "poet"]
    assert [answer.model for answer in answers] == [generation.model for generation in engine.seen] == ["poet", "base"]
    assert engine.seen[0].prompt == engine.seen[1].prompt


async def test_an_engine_that_comes_later_is_loaded_once_for_all() -> None:
    handle = Handle()
    base = model_loader(MODEL, handle, "token")  # type: ignore[arg-type]
    poet = lora_loader(base, "poet")
    for loader in (base, poet):
        with pytest.raises(EngineError):
            await loader()
    handle.replicas.append(INFO)
    (first, second), again = await asyncio.gather(base(), poet()), await base()

    assert first is again
    assert first.engines is second.engines
    assert handle.fetched == 1
    await first.engines.close()


async def test_who_gives_up_loading_leaves_it_to_the_others() -> None:
    handle = Handle(INFO)
    base = model_loader(MODEL, handle, "token")  # type: ignore[arg-type]
    first, second = asyncio.ensure_future(base()), asyncio.ensure_future(lora_loader(base, "poet")())
    await handle.asked.wait()
    first.cancel()
    model = await second

    assert first.cancelled()
    assert sum(task.get_name() == "engine-discovery" for task in asyncio.all_tasks()) == 1
    assert (model.name, handle.fetched) == ("poet", 2)
    await model.engines.close()
