"""A real vLLM with a tiny random model: the engine of `conftest.py`, killed by the last test.

The model says nonsense, so what is tested is what goes in and comes out, not what it says.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.protocol.deltas import TextDelta
from inference.engine import Chunk, EngineError, Generation, Guide, Load, Parsing, Sampling
from inference.link import LinkEngine, serve_link
from inference.tokenizer import HubTokenizer, load_tokenizer, pack_ids
from inference.vllm import VllmConfig, VllmEngine
from tests.support.cost import TRIES

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),  # the first test waits for the engine
    pytest.mark.filterwarnings("ignore"),  # vLLM's imports warn a lot
]
NEVER = 49_000  # vocabulary 49,152; the model ends by itself at 2


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> HubTokenizer:
    return load_tokenizer(model)


def prompt(count: int = 40) -> bytes:
    """Never seen before, so never in the prefix cache."""
    return pack_ids([random.randrange(100, NEVER) for _ in range(count)])


def request(ids: bytes | None = None, salt: str | None = None, **sampling: object) -> Generation:
    options = {"max_tokens": 8, "temperature": 0.0, **sampling}
    return Generation("same name", "any", (ids or prompt(),), Sampling(**options), cache_salt=salt)  # type: ignore[arg-type]


async def run(engine: VllmEngine | LinkEngine, generation: Generation) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(generation)]


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


def text_of(tokenizer: HubTokenizer, chunks: list[Chunk]) -> str:
    tokens = [token for token in ids_of(chunks) if token not in tokenizer.special_ids]
    return b"".join(map(tokenizer.token_bytes, tokens)).decode()


def merged(chunks: list[Chunk]) -> list[str]:
    """Texts of what the engine's parser found, neighbours of a kind joined."""
    found: list[tuple[type, str]] = []
    for delta in [delta for chunk in chunks for delta in chunk.deltas or ()]:
        text = getattr(delta, "text", getattr(delta, "name", "end"))
        if found and found[-1][0] is type(delta):
            found[-1] = (type(delta), found[-1][1] + text)
        else:
            found.append((type(delta), text))
    return [text for _, text in found]


async def exhaust(stream: AsyncIterator[Chunk]) -> None:
    async for _ in stream:
        pass


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  the condition is the state of an engine
            await asyncio.sleep(0.001)


async def nothing_runs(engine: VllmEngine) -> None:
    assert await engine.load() == Load(0, 0)
    assert engine._engine.get_num_unfinished_requests() == 0


async def test_a_stream(engine: VllmEngine, model: Path) -> None:
    chunks = await run(engine, request())
    assert len(ids_of(chunks)) == 8
    assert len(chunks) > 1
    assert [chunk.finish for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert [chunk.cached_tokens for chunk in chunks] == [0] + [None] * (len(chunks) - 1)
    assert all(chunk.logprobs is None for chunk in chunks)
    assert (engine.context_length, engine.directory) == (8192, model)
    await engine.check_health()
    await nothing_runs(engine)


async def test_a_stop_id_is_delivered_and_ends_it(engine: VllmEngine) -> None:
    ids = prompt()
    free = ids_of(await run(engine, request(ids, max_tokens=12)))
    stop = free[5]
    chunks = await run(engine, request(ids, max_tokens=12, stop_token_ids=(stop, NEVER)))
    assert ids_of(chunks) == free[: free.index(stop) + 1]
    assert chunks[-1].finish == "stop"


async def test_cached_tokens_of_a_repeated_prompt_are_its_full_blocks(engine: VllmEngine) -> None:
    async def cached(ids: bytes, salt: str | None = None) -> int | None:
        return (await run(engine, request(ids, salt, max_tokens=1)))[0].cached_tokens

    ids = prompt(100)
    assert [await cached(ids), await cached(ids), await cached(ids + prompt(30))] == [0, 96, 96]
    assert await cached(ids[: 4 * 64]) == 32  # the last token is always computed
    assert [await cached(ids, "tenant"), await cached(ids, "tenant")] == [0, 96]


async def test_logprobs(engine: VllmEngine) -> None:
    ids = prompt()
    greedy = [entry for chunk in await run(engine, request(ids, logprobs=3)) for entry in chunk.logprobs or []]
    assert [len(entry.top) for entry in greedy] == [3] * 8
    assert all(entry.top[0] == (entry.token_id, entry.logprob) for entry in greedy)
    assert all(list(entry.top) == sorted(entry.top, key=lambda pair: -pair[1]) for entry in greedy)
    drawn = [
        entry
        for chunk in await run(engine, request(ids, logprobs=0, temperature=1.0))
        for entry in chunk.logprobs or []
    ]
    assert [entry.top for entry in drawn] == [()] * len(drawn)
    assert all(entry.logprob <= 0 for entry in drawn)


async def test_several_at_once_with_the_same_name(engine: VllmEngine) -> None:
    requests = [request(max_tokens=4 + n) for n in range(8)]
    tasks = [asyncio.create_task(run(engine, each)) for each in requests]
    await until(lambda: len(engine._running) == 8)
    load = await engine.load()
    assert load.running + load.waiting == 8
    answers = await asyncio.gather(*tasks)
    assert [len(ids_of(chunks)) for chunks in answers] == [4 + n for n in range(8)]
    await nothing_runs(engine)


async def test_who_waits_goes_by_priority_and_then_by_arrival(engine: VllmEngine) -> None:
    """With the engine full but for one place, so that waiting requests start one after the other."""
    holding = [engine.generate(request(max_tokens=4000)) for _ in range(3)]
    for stream in holding:
        await anext(stream)
    order: list[str] = []

    async def wait(name: str, priority: int) -> None:
        chunks = await run(engine, replace(request(max_tokens=4), priority=priority))
        assert chunks[-1].finish == "length"
        order.append(name)

    first = asyncio.create_task(run(engine, request(max_tokens=40)))
    await until(lambda: len(engine._running) == 4)
    asked = [("priming", 100), ("flex", 10), ("default", 0), ("later default", 0), ("priority", -10)]
    waiting = [asyncio.create_task(wait(*each)) for each in asked]
    await asyncio.gather(first, *waiting)
    for stream in holding:
        await stream.aclose()  # type: ignore[attr-defined]

    assert order == ["priority", "default", "later default", "flex", "priming"]
    await nothing_runs(engine)


async def test_closing_the_iterator_leaves_nothing_running(engine: VllmEngine) -> None:
    stream = engine.generate(request(max_tokens=2000))
    await anext(stream)
    assert (await engine.load()).running == 1
    await stream.aclose()  # type: ignore[attr-defined]
    await nothing_runs(engine)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 5, 8, 20, 100])
async def test_cancelling_at_any_time_leaves_nothing_running(engine: VllmEngine, turns: int) -> None:
    for guide in (None, Guide("regex", "[ab]*")):
        task = asyncio.create_task(run(engine, request(max_tokens=2000, guide=guide)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await nothing_runs(engine)


SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}


async def test_guided_by_a_json_schema(engine: VllmEngine, tokenizer: HubTokenizer) -> None:
    chunks = await run(engine, request(max_tokens=200, guide=Guide("json", json.dumps(SCHEMA)), temperature=1.0))
    compact = "".join(text_of(tokenizer, chunks).split())  # a random model may fill all the room with white space
    possible = [f'{{"city":"{city}","hot":{hot}}}' for city in ("Rome", "Oslo") for hot in ("true", "false")]
    assert compact in possible if chunks[-1].finish == "stop" else any(each.startswith(compact) for each in possible)


async def test_guided_by_a_structural_tag(engine: VllmEngine, tokenizer: HubTokenizer) -> None:
    tag = {
        "type": "tag",
        "begin": '<tool_call>\n{"name": "f", "arguments": ',
        "content": {"type": "json_schema", "json_schema": SCHEMA, "max_whitespace_cnt": 1},
        "end": "}\n</tool_call>",
    }
    value = json.dumps(
        {
            "type": "structural_tag",
            "format": {
                "type": "triggered_tags",
                "triggers": ["<tool_call>"],
                "tags": [tag],
                "at_least_one": True,
                "stop_after_first": True,
            },
        }
    )
    chunks = await run(engine, request(max_tokens=200, guide=Guide("structural_tag", value)))
    text = text_of(tokenizer, chunks)
    assert text.startswith('<tool_call>\n{"name": "f", "arguments": ')
    assert json.loads(text[len("<tool_call>\n") : -len("\n</tool_call>")])["name"] == "f"


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", '{"type": "secret"}'),
        ("json", "{secret"),
        ("json", '{"type": "integer", "multipleOf": 2}'),  # another library could, and would then get all later guides
        ("regex", "(secret["),
        ("regex", "(?=secret)x"),
        ("grammar", "start: ((secret"),
        ("grammar", " "),
        ("structural_tag", '{"type": "structural_tag", "format": {"type": "secret"}}'),
        ("structural_tag", "secret"),
    ],
)
async def test_a_bad_guide_is_invalid(engine: VllmEngine, kind: str, value: str) -> None:
    guide = Guide(kind, value)  # type: ignore[arg-type]
    for asked in (engine.check(guide), run(engine, request(guide=guide))):
        with pytest.raises(EngineError) as refused:
            await asked
        assert refused.value.fault == "invalid"
        assert kind in refused.value.message
        assert "\n" not in refused.value.message
        assert "secret" not in refused.value.message
    await nothing_runs(engine)


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json", json.dumps(SCHEMA)),
        ("regex", "[ab]+"),
        ("grammar", 'start: WORD ("," WORD)*\nWORD: /[a-z]+/'),
        ("grammar", 'root ::= "yes" | "no"'),
        ("structural_tag", json.dumps({"type": "structural_tag", "format": {"type": "const_string", "value": "x"}})),
    ],
)
async def test_a_guide_that_checks_is_one_that_works(engine: VllmEngine, kind: str, value: str) -> None:
    guide = Guide(kind, value)  # type: ignore[arg-type]
    await engine.check(guide)
    assert ids_of(await run(engine, request(guide=guide, max_tokens=4)))


async def test_tokens_flow_while_a_large_guide_is_compiled(engine: VllmEngine) -> None:
    for attempt in range(TRIES):
        names = [[f"p{n}_{m}_{attempt}" for m in range(8)] for n in range(60)]
        branches = [{"type": "object", "properties": dict.fromkeys(some, SCHEMA)} for some in names]
        guide = Guide("json", json.dumps({"anyOf": branches}))
        checking = asyncio.create_task(engine.check(guide))
        longest, last = 0.0, time.monotonic()
        started = last
        while not checking.done():
            await asyncio.sleep(0.005)
            longest, last = max(longest, time.monotonic() - last), time.monotonic()
        await checking
        if longest < max(1.0, (last - started) / 2):
            return
    raise AssertionError(f"a gap of {longest:.2f} s in each of {TRIES} tries")


async def test_output_that_the_engine_takes_apart(engine: VllmEngine, tokenizer: HubTokenizer) -> None:
    value = '{"type": "structural_tag", "format": {"type": "const_string", "value": %s}}'
    said = 'Well: <tool_call>\n{"name": "db.find", "arguments": {"city": "Zürich"}}\n</tool_call>'
    guide = Guide("structural_tag", value % json.dumps(said))
    tools = json.dumps([{"type": "function", "function": {"name": "db.find", "parameters": {"type": "object"}}}])
    generation = replace(request(guide=guide, max_tokens=200), parsing=Parsing(tools))
    chunks = await run(engine, generation)
    assert chunks[-1].finish == "stop"
    assert all(chunk.deltas is not None for chunk in chunks)
    assert merged(chunks) == ["Well: ", "db.find", '{"city": "Zürich"}', "end"]
    plain = await run(engine, replace(generation, parsing=None))
    assert ids_of(plain) == ids_of(chunks)
    assert all(chunk.deltas is None for chunk in plain)
    text = await run(engine, replace(generation, parsing=Parsing()))
    assert "".join(d.text for c in text for d in c.deltas or () if isinstance(d, TextDelta)) == said
    with pytest.raises(EngineError) as refused:
        await run(engine, replace(generation, parsing=Parsing("{")))
    assert refused.value.fault == "invalid"
    await nothing_runs(engine)


@pytest.mark.parametrize("count", [8192, 20_000])
async def test_too_long_a_prompt_is_invalid(engine: VllmEngine, count: int) -> None:
    with pytest.raises(EngineError, match=f"{count} tokens") as refused:
        await run(engine, request(prompt(count)))
    assert refused.value.fault == "invalid"


@pytest.mark.parametrize("bad", [request(pack_ids([5, 60_123])), request(top_p=7.0), request(stop_token_ids=(60_123,))])
async def test_what_vllm_refuses_is_invalid_and_its_values_stay_inside(engine: VllmEngine, bad: Generation) -> None:
    with pytest.raises(EngineError) as refused:
        await run(engine, bad)
    assert refused.value.fault == "invalid"
    assert "60123" not in refused.value.message
    assert refused.value.__context__ is None
    await nothing_runs(engine)


async def test_over_the_token_link(engine: VllmEngine) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, "secret")
    link = LinkEngine(server.address, "secret")
    ids = prompt()
    assert ids_of(await run(link, request(ids, logprobs=1))) == ids_of(await run(engine, request(ids)))
    stream = link.generate(request(max_tokens=2000))
    await anext(stream)
    await stream.aclose()  # type: ignore[attr-defined]
    await link.check_health()
    await until(lambda: not server.active)
    await nothing_runs(engine)
    await link.close()
    await server.close()


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (VllmConfig("/no/such/checkpoint"), "no checkpoint folder /no/such/checkpoint"),
        (VllmConfig("EMPTY"), "could not start"),
        (VllmConfig("MODEL", extra={"no_such_argument": 1}), "no_such_argument"),
        (VllmConfig("MODEL", max_model_len=10**9), "1000000000"),
        (VllmConfig("MODEL", device="gpu"), "built for CPUs"),
        (VllmConfig("MODEL", tool_parser="hermez"), "did you mean hermes"),
    ],
)
async def test_a_failed_start_is_one_line(
    engine: VllmEngine, model: Path, tmp_path: Path, config: VllmConfig, words: str
) -> None:
    path = {"EMPTY": str(tmp_path), "MODEL": str(model)}.get(str(config.model), config.model)
    config = replace(config, model=path)
    with pytest.raises(EngineError, match=words) as failed:
        await VllmEngine.start(config)
    assert failed.value.fault == "unavailable"
    assert "\n" not in failed.value.message


async def test_workers_are_rays_only_where_there_are_several_nodes() -> None:
    for config, executor in (
        (VllmConfig("m", tensor_parallel=2, pipeline_parallel=2), None),
        (VllmConfig("m", tensor_parallel=2, pipeline_parallel=2, nodes=2), "ray"),
    ):
        arguments = config.arguments("m", cpu=False)
        assert arguments.get("distributed_executor_backend") == executor
        assert (arguments["tensor_parallel_size"], arguments["pipeline_parallel_size"]) == (2, 2)
    assert "distributed_executor_backend" not in VllmConfig("m", pipeline_parallel=2, nodes=2).arguments("m", cpu=True)


async def test_the_death_of_the_core_is_unavailable(engine: VllmEngine) -> None:  # the last test: the engine is gone
    stream = engine.generate(request(max_tokens=2000))
    await anext(stream)
    (core,) = engine._engine.engine_core.resources.engine_manager.processes
    os.kill(core.pid, signal.SIGKILL)
    with pytest.raises(EngineError) as died:
        await asyncio.wait_for(exhaust(stream), 30)
    assert died.value.fault == "unavailable"
    for failing in (engine.check_health(), run(engine, request())):
        with pytest.raises(EngineError) as dead:
            await failing
        assert dead.value.fault == "unavailable"
    async with asyncio.timeout(30):
        await engine.close()
        await engine.close()
