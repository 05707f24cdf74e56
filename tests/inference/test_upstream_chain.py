"""One conversation that changes between a real vLLM here and other people's servers, by every API that we speak."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from gateway.model_loading import upstream_loader
from gateway.settings import ModelSettings
from inference.engine import Chunk, Generation
from inference.formats.choice import choose_format
from inference.tokenizer import harmony_tokenizer, unpack_ids
from inference.vllm import VllmEngine
from tests.support.gateway import gateway, turn
from tests.support.harmony import marked
from tests.support.responses_upstream import message, responses_upstream, streamed, thought
from tests.support.upstreams import KEY, MODEL, Upstream, call, cerebras_upstream, chat, completion, serving

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),  # the first test waits for the engine
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn a lot
]

BLOCK = 32
WEATHER = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Bern"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


class Watched:
    """An engine, and what it was asked."""

    def __init__(self, engine: VllmEngine) -> None:
        self.seen: list[Generation] = []
        self._engine = engine

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        self.seen.append(generation)
        async with aclosing(self._engine.generate(generation)) as chunks:
            async for chunk in chunks:
                yield chunk

    async def close(self) -> None:
        """It is the session's."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def loader(name: str, upstream: Upstream, engine: str, form: str = "auto", dialect: str = "generic") -> Any:
    settings = {"url": upstream.base_url, "model": MODEL, "keys": [KEY], "dialect": dialect}
    model = {"name": name, "engine": engine, "format": form, "context_length": 8192, "upstream": settings}
    return upstream_loader(ModelSettings.model_validate(model))


async def test_a_chain_over_vllm_and_three_other_apis_loses_nothing(engine: VllmEngine, model: Path) -> None:
    watched = Watched(engine)
    form = choose_format(model, "auto")
    async with serving(cerebras_upstream()) as cerebras, serving(responses_upstream()) as openai:
        loaders = {
            "ids": loader("ids", cerebras, "cerebras", "harmony"),
            "chat": loader("chat", cerebras, "chat", dialect="cerebras-gpt-oss"),
            "items": loader("items", openai, "responses", dialect="openai"),
        }
        serve = gateway(watched, models=("ours",), context_length=8192, formats={"ours": form}, loaders=loaders)  # type: ignore[arg-type]
        async with serve as running, running.connect() as ws:
            options: dict[str, Any] = {"tools": [WEATHER], "instructions": "Be kind and answer in few words. " * 4}

            async def next_turn(model: str, given: Any, parent: Any = None, **more: Any) -> Any:
                chained = {} if parent is None else {"previous_response_id": parent["id"]}
                event = (await turn(ws, model=model, input=given, **chained, **options, **more))[-1]
                assert event["type"] in ("response.completed", "response.incomplete"), event
                return event["response"]

            def output(parent: Any, text: str) -> list[dict[str, Any]]:
                return [{"type": "function_call_output", "call_id": parent["output"][-1]["call_id"], "output": text}]

            one = await next_turn("ours", "First question.", tool_choice="required", parallel_tool_calls=False)
            final = marked("<|channel|>final<|message|>Second.<|return|>")
            cerebras.answer(completion(final), completion([], "stop"))
            two = await next_turn("ids", output(one, "sunny"), one)
            cerebras.answer(chat(call(0, '{"city": "Oslo"}', name="weather", call_id="x")), chat({}, "tool_calls"))
            three = await next_turn("chat", "Third question.", two)
            openai.answer(*streamed([thought("Pondering."), message("Fourth.")]))
            four = await next_turn("items", output(three, "rainy"), three)
            five = await next_turn("ours", "Fifth question.", four, max_output_tokens=40, temperature=0)
            six = await next_turn("ours", "Sixth question.", five, max_output_tokens=16)

    (weather,) = one["output"]
    city = json.loads(weather["arguments"])["city"]  # as the schema holds a random model to
    said = ["Be kind", "First question.", city, "sunny", "Second.", "Third question.", "Oslo", "rainy", "Fourth."]
    said.append("Fifth question.")
    prompts = {
        "ids": harmony_text(cerebras.requests[0].fields["prompt"]),
        "chat": str(cerebras.requests[1].fields["messages"]),
        "items": str(openai.requests[0].fields["input"]),
        "ours": text_of(form, watched.seen[1]),
    }
    for (name, prompt), count in zip(prompts.items(), (4, 6, 8, 10), strict=True):
        at = 0
        for part in said[:count]:  # in this order; the tools, which name cities too, come first
            at = prompt.find(part, at)
            assert at >= 0, (name, part)
    # vLLM has what it had seen before the conversation went away, and all of it again one turn later.
    first, second, third = watched.seen
    assert five["usage"]["input_tokens_details"]["cached_tokens"] >= shared(first, second) // BLOCK * BLOCK > 0
    assert third.prompt.startswith(second.prompt)
    known = second.prompt_tokens + five["usage"]["output_tokens"] - 1  # the id sampled last has no KV block yet
    assert six["usage"]["input_tokens_details"]["cached_tokens"] == known // BLOCK * BLOCK


def shared(one: Generation, other: Generation) -> int:
    """How many ids the prompts begin with both."""
    pairs = zip(unpack_ids(one.prompt), unpack_ids(other.prompt), strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), one.prompt_tokens)


def harmony_text(ids: list[int]) -> str:
    return b"".join(map(harmony_tokenizer().token_bytes, ids)).decode()


def text_of(form: Any, generation: Generation) -> str:
    special = form.tokenizer.special_ids
    ids = [token for token in unpack_ids(generation.prompt) if token not in special]
    return b"".join(map(form.tokenizer.token_bytes, ids)).decode(errors="replace")
