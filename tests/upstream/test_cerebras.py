"""Cerebras by token ids, against a strict server of its documented API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from gateway.protocol.deltas import CallDelta, CallEnd
from gateway.protocol.tools import Tool, ToolSet
from inference.engine import Chunk, Counted, EngineError, Generation, Guide, Prefix, Sampling
from inference.formats.format import Opening
from inference.formats.harmony import harmony_format
from inference.tokenizer import harmony_tokenizer, pack_ids, unpack_ids
from inference.upstream.cerebras import INTEGRATION, PATH, WARMTH, CerebrasEngine
from inference.upstream.dialects import Encoding
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.errors import UpstreamError
from inference.upstream.pool import UpstreamPool
from tests.support.harmony import marked
from tests.support.upstreams import KEY, MODEL, Stall, Upstream, cerebras_upstream, completion, event, serving, usage

STOPS = (7, 8)
PROMPT = list(range(100, 400))


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Upstream]:
    async with serving(cerebras_upstream()) as found:
        yield found


@pytest.fixture
def upstream(server: Upstream) -> Upstream:
    server.reset()
    return server


@pytest_asyncio.fixture(loop_scope="module")
async def engine(upstream: Upstream) -> AsyncIterator[CerebrasEngine]:
    found = make(upstream)
    yield found
    await found.close()


def make(upstream: Upstream, **options: Any) -> CerebrasEngine:
    pool = UpstreamPool(upstream.base_url, KEY, headers=INTEGRATION, warmth=WARMTH)
    return CerebrasEngine(UpstreamEndpoint(pool, MODEL, PATH), **options)


def generation(prompt: Sequence[int] = PROMPT, max_tokens: int = 50, **more: Any) -> Generation:
    sampling = Sampling(max_tokens, 0.7, 0.9, STOPS, more.pop("logprobs", None), more.pop("guide", None))
    parts = (pack_ids(prompt[:100]), pack_ids(prompt[100:]))
    return Generation("r1", "alias", parts, sampling, **more)


async def collect(engine: CerebrasEngine, request: Generation) -> list[Chunk]:
    async with aclosing(engine.generate(request)) as chunks:
        return [chunk async for chunk in chunks]


def ids(chunks: Sequence[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


async def test_ids_go_out_and_come_back(upstream: Upstream, engine: CerebrasEngine) -> None:
    info = {"queue_time": 0.1, "prompt_time": 0.2, "completion_time": 0.3, "total_time": 0.6, "created": 1.0}
    upstream.answer(
        completion([1, 2]),
        completion([3]),
        completion([7], "stop"),
        {**completion(), "choices": [], "usage": usage(300, 4, 256), "time_info": info},
    )
    chunks = await collect(engine, generation())
    assert ids(chunks) == [1, 2, 3, 7]
    assert [chunk.finish for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].finish == "stop"
    assert chunks[-1].counted == Counted(300, 4, 256)
    assert chunks[-1].cached_tokens == 256
    (seen,) = upstream.requests
    assert seen.fields == {
        "model": MODEL,
        "prompt": PROMPT,
        "max_tokens": 50,
        "temperature": 0.7,
        "top_p": 0.9,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_raw_tokens": True,
    }
    assert engine.timings.answers == 1
    assert engine.timings.queue_s == pytest.approx(0.1)


@pytest.mark.parametrize("form", ["json", "msgpack"])
@pytest.mark.parametrize("gzip_above", [None, 0, 100_000])
async def test_encodings(upstream: Upstream, form: Any, gzip_above: int | None) -> None:
    engine = make(upstream, encoding=Encoding(form, gzip_above))
    long = [n % 150_000 for n in range(0, 400_000, 8)]
    for prompt in (PROMPT, long):
        upstream.answer(completion([7], "stop"))
        await collect(engine, generation(prompt))
    await engine.close()
    small, large = upstream.requests
    assert (small.fields["prompt"], large.fields["prompt"]) == (PROMPT, long)
    assert small.headers["content-type"] == ("application/json" if form == "json" else "application/vnd.msgpack")
    assert ("content-encoding" in small.headers) == (gzip_above == 0)
    assert ("content-encoding" in large.headers) == (gzip_above is not None)


async def test_only_headers_of_ours_go_out(upstream: Upstream, engine: CerebrasEngine) -> None:
    upstream.answer(completion([7], "stop"), headers={"set-cookie": "track=1; Path=/"})
    upstream.answer(completion([7], "stop"))
    await collect(engine, generation())
    await collect(engine, generation())
    for seen in upstream.requests:
        assert set(seen.headers) == {
            "host",
            "connection",
            "content-length",
            "content-type",
            "accept",
            "accept-encoding",
            "user-agent",
            "authorization",
            "x-cerebras-3rd-party-integration",
        }
        assert seen.headers["accept-encoding"] == "identity"
    with pytest.raises(ValueError, match="cookie"):
        UpstreamPool("http://127.0.0.1:1/v1", KEY, headers={"Cookie": "a=b"})


async def test_start_opens_connections_and_turns_use_them(upstream: Upstream, engine: CerebrasEngine) -> None:
    await engine.start()
    assert upstream.warmed == WARMTH.connections
    opened = set(upstream.connections)
    assert len(opened) == WARMTH.connections
    for _ in range(3):
        upstream.answer(completion([1]), completion([7], "stop"))
        await collect(engine, generation())
    assert upstream.connections == opened


async def test_a_model_that_is_not_there(upstream: Upstream, engine: CerebrasEngine) -> None:
    upstream.models = ["qwen-3.8-27b"]
    with pytest.raises(EngineError, match=r"qwen-3\.8-27b") as caught:
        await engine.start()
    assert caught.value.fault == "unavailable"


async def test_a_wrong_key(upstream: Upstream) -> None:
    pool = UpstreamPool(upstream.base_url, "csk-other", headers=INTEGRATION)
    engine = CerebrasEngine(UpstreamEndpoint(pool, MODEL, PATH))
    for attempt in (engine.start, engine.check_health):
        with pytest.raises(EngineError) as caught:
            await attempt()
        assert caught.value.fault == "unavailable"
        assert "csk" not in caught.value.message
    await engine.close()


@pytest.mark.parametrize(("asked", "cap", "sent"), [(50, 16_384, 50), (100_000, 16_384, 16_384), (50, 10, 10)])
async def test_no_request_reserves_more_than_the_cap(upstream: Upstream, asked: int, cap: int, sent: int) -> None:
    engine = make(upstream, max_tokens=cap)
    upstream.answer(completion([1], "length"))
    chunks = await collect(engine, generation(max_tokens=asked))
    assert upstream.requests[0].fields["max_tokens"] == sent
    assert chunks[-1].finish == "length"
    assert ids(chunks) == [1]
    await engine.close()


@pytest.mark.parametrize(
    ("steps", "expected", "finish"),
    [
        # a stop id in the last chunk, in the middle of one, in one that comes with what follows it
        ([completion([1, 7]), completion(None, "stop")], [1, 7], "stop"),
        ([completion([1, 8, 5, 5]), Stall()], [1, 8], "stop"),
        ([completion([1, 8]), completion([5]), Stall()], [1, 8], "stop"),
        # Cerebras kept the stop id for itself
        ([completion([1, 2]), completion(None, "stop")], [1, 2, 7], "stop"),
        ([completion([1, 2], "stop")], [1, 2, 7], "stop"),
        ([completion(None, "stop")], [7], "stop"),
        # cut by the limit
        ([completion([1, 2], "length")], [1, 2], "length"),
    ],
)
async def test_where_sampling_ends(
    upstream: Upstream, engine: CerebrasEngine, steps: list[Any], expected: list[int], finish: str
) -> None:
    upstream.answer(*steps)
    chunks = await asyncio.wait_for(collect(engine, generation()), 30)
    assert ids(chunks) == expected
    assert chunks[-1].finish == finish


async def test_a_call_whose_end_was_kept_back_is_whole(upstream: Upstream, engine: CerebrasEngine) -> None:
    """gpt-oss ends a call with a stop id of its own; without any, the call would count as cut off."""
    form = harmony_format(harmony_tokenizer())
    text = (
        "<|channel|>analysis<|message|>Look.<|end|><|start|>assistant<|channel|>commentary to=functions.shell "
        '<|constrain|>json<|message|>{"c": "ls"}'
    )
    said = marked(text)
    upstream.answer(completion(said[:9]), completion(said[9:]), completion(None, "stop"))
    sampling = Sampling(50, stop_token_ids=form.stop_ids)
    chunks = await collect(engine, Generation("r1", "any", (pack_ids(PROMPT),), sampling))
    parser = form.parser(ToolSet((Tool("function", "shell"),)), Opening(b""))
    deltas = [delta for chunk in chunks for delta in parser.feed(chunk.ids)] + parser.finish()
    assert deltas[-1] == CallEnd()
    assert "".join(delta.text for delta in deltas if isinstance(delta, CallDelta)) == '{"c": "ls"}'
    kept, closing = form.spoken(ids(chunks))
    assert [*ids(chunks)[:kept], *unpack_ids(closing)] == marked(text + "<|call|>")


async def test_constraints_are_refused_before_anything_is_asked(upstream: Upstream, engine: CerebrasEngine) -> None:
    guide = Guide("json", '{"type": "object"}')
    with pytest.raises(EngineError) as caught:
        await engine.check(guide)
    assert caught.value.fault == "invalid"
    for request in (generation(guide=guide), generation(logprobs=0)):
        with pytest.raises(EngineError) as caught:
            await collect(engine, request)
        assert caught.value.fault == "invalid"
    assert upstream.requests == []


async def test_text_without_ids_is_no_answer(upstream: Upstream, engine: CerebrasEngine) -> None:
    chunk = completion(None)
    chunk["choices"][0]["text"] = "hello"
    upstream.answer(chunk)
    with pytest.raises(UpstreamError):
        await collect(engine, generation())


async def test_a_content_filter_is_no_plain_end(upstream: Upstream, engine: CerebrasEngine) -> None:
    upstream.answer(completion([1]), completion(None, "content_filter"))
    with pytest.raises(UpstreamError) as caught:
        await collect(engine, generation())
    assert caught.value.fault == "invalid"


def limits(left: int) -> dict[str, str]:
    return {
        "x-ratelimit-limit-tokens-minute": "60000",
        "x-ratelimit-remaining-tokens-minute": str(left),
        "x-ratelimit-reset-tokens-minute": "60",
    }


async def test_a_request_that_would_be_refused_is_not_sent(upstream: Upstream, engine: CerebrasEngine) -> None:
    upstream.answer(completion([7], "stop"), headers=limits(200))
    assert engine.refusal(generation()) is None
    await collect(engine, generation())
    refusal = engine.refusal(generation())
    with pytest.raises(UpstreamError) as caught:
        await collect(engine, generation())
    error = caught.value
    assert refusal is not None
    assert (refusal.code, refusal.message) == (error.code, error.message)
    assert (error.fault, error.code) == ("overloaded", "rate_limit_exceeded")
    # 300 + 50 tokens are needed, 200 are left, and 59,800 come back in a minute
    assert error.retry_after_s == pytest.approx(150 * 60 / 59_800, abs=0.05)
    assert len(upstream.requests) == 1
    # What the upstream's prompt cache has does not count.
    upstream.answer(completion([7], "stop"), headers=limits(200))
    await collect(engine, generation(known=Prefix("r0", 250)))
    assert len(upstream.requests) == 2


async def test_after_a_429_nothing_is_sent_for_as_long_as_it_says(upstream: Upstream, engine: CerebrasEngine) -> None:
    upstream.answer(status=429, headers={"retry-after": "30"}, body={"message": "tokens per minute", "code": "x"})
    for _ in range(2):
        with pytest.raises(UpstreamError) as caught:
            await collect(engine, generation())
        assert caught.value.code == "rate_limit_exceeded"
        assert caught.value.retry_after_s == pytest.approx(30, abs=0.5)
    assert len(upstream.requests) == 1


async def test_load_counts_what_runs(upstream: Upstream, engine: CerebrasEngine) -> None:
    upstream.answer(completion([1]), Stall())
    chunks = engine.generate(generation())
    assert ids([await anext(chunks)]) == [1]
    assert (await engine.load()).running == 1
    await chunks.aclose()
    assert (await engine.load()).running == 0
    await asyncio.wait_for(upstream.aborted.wait(), 30)


async def test_ids_that_come_together_are_one_chunk(upstream: Upstream, engine: CerebrasEngine) -> None:
    upstream.answer(b"".join(event(completion([n])) for n in range(10, 60)) + event(completion([7], "stop")))
    chunks = await collect(engine, generation(max_tokens=100))
    assert ids(chunks) == [*range(10, 60), 7]
    assert len(chunks) <= 3


async def test_logs_hold_no_key_and_no_prompt(
    upstream: Upstream, engine: CerebrasEngine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("DEBUG")
    upstream.answer(completion([4_711_001], "length"))
    upstream.answer(status=400, body={"message": "secret words of 4711002", "code": "x y", "type": "bad_request"})
    await collect(engine, generation([4_711_000] * 150))
    with pytest.raises(UpstreamError):
        await collect(engine, generation())
    assert KEY not in caplog.text
    assert "4711" not in caplog.text.replace(KEY, "")
    assert "secret" not in caplog.text
    assert "answered 400 (code none, type bad_request)" in caplog.text
