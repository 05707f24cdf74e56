"""Connections: kept warm, bounded, and each wait with its deadline."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

import pytest
import pytest_asyncio

from inference.upstream.bodies import Body
from inference.upstream.errors import UpstreamError
from inference.upstream.pool import Deadlines, UpstreamPool, Warmth
from inference.upstream.silence import Silence
from tests.support.upstreams import INTEGRATION_HEADERS as HEADERS
from tests.support.upstreams import KEY, Stall, Upstream, cerebras_upstream, completion, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = Body(b'{"model": "gpt-oss-120b", "prompt": [1], "stream": true}', {"content-type": "application/json"})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Upstream]:
    async with serving(cerebras_upstream()) as found:
        yield found


@pytest.fixture
def upstream(server: Upstream) -> Upstream:
    server.reset()
    return server


async def test_connections_are_kept_warm_while_nothing_is_asked(upstream: Upstream) -> None:
    pool = UpstreamPool(upstream.base_url, KEY, warmth=Warmth("tcp_warming", connections=2, every_s=0.05))
    await pool.start()
    await pool.start()
    async with asyncio.timeout(30):
        while upstream.warmed < 8:
            upstream.touched.clear()
            await upstream.touched.wait()
    assert len(upstream.connections) == 2
    await pool.close()
    warmed = upstream.warmed
    await asyncio.sleep(0.12)
    assert upstream.warmed == warmed


async def test_an_upstream_that_is_away_does_not_stop_a_start() -> None:
    pool = UpstreamPool("http://127.0.0.1:9/v1", KEY, warmth=Warmth("tcp_warming"))
    await pool.start()
    await pool.close()


async def test_more_answers_than_connections_are_refused_as_overload(upstream: Upstream) -> None:
    deadlines = Deadlines(connect_s=0.1)
    pool = UpstreamPool(upstream.base_url, KEY, headers=HEADERS, deadlines=deadlines, connections=1)
    upstream.answer(completion([1]), Stall())
    async with aclosing(pool.events("completions", BODY)) as first:
        await anext(first)
        with pytest.raises(UpstreamError) as caught:
            await anext(pool.events("completions", BODY))
        assert (caught.value.fault, caught.value.code) == ("overloaded", "engine_overloaded")
    upstream.answer(completion([1], "stop"))
    assert [len(batch) async for batch in pool.events("completions", BODY)] == [1]
    await pool.close()


async def test_every_answer_is_observed(upstream: Upstream) -> None:
    seen: list[tuple[int, str | None]] = []
    pool = UpstreamPool(upstream.base_url, KEY, headers=HEADERS)
    upstream.answer(completion([1], "stop"), headers={"X-RateLimit-Limit-Requests": "7"})
    upstream.answer(status=429, headers={"X-RateLimit-Limit-Requests": "8"})

    def note(status: int, headers: Mapping[str, str]) -> None:
        seen.append((status, headers.get("x-ratelimit-limit-requests")))

    assert [len(batch) async for batch in pool.events("completions", BODY, note)] == [1]
    with pytest.raises(UpstreamError):
        await anext(pool.events("completions", BODY, note))
    assert seen == [(200, "7"), (429, "8")]
    await pool.close()


async def test_models_that_are_no_json(upstream: Upstream) -> None:
    pool = UpstreamPool(upstream.base_url, KEY)
    with pytest.raises(UpstreamError) as caught:
        await pool.get("nothing", 5)
    assert caught.value.code == "model_not_found"
    await pool.close()


async def test_only_the_wait_is_timed() -> None:
    silence = Silence()
    for _ in range(3):
        silence.begin(0.05)
        await asyncio.sleep(0.01)
        silence.end()
        await asyncio.sleep(0.08)
    silence.begin(0.05)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(5)
    assert silence.broke()
    await asyncio.sleep(0)  # the cancellation is used up
    silence.close()


async def test_a_cancellation_of_others_stays_one() -> None:
    async def wait(silence: Silence) -> bool:
        silence.begin(5)
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            return silence.broke()
        finally:
            silence.close()
        return True

    task = asyncio.create_task(wait(Silence()))
    await asyncio.sleep(0.01)
    task.cancel()
    assert await task is False


async def test_a_shorter_wait_ends_sooner() -> None:
    silence = Silence()
    silence.begin(60)
    silence.end()
    silence.begin(0.02)
    with pytest.raises(asyncio.CancelledError):
        await asyncio.sleep(5)
    assert silence.broke()
    silence.close()
