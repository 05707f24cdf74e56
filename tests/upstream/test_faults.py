"""Every fault of an upstream at every step of an answer, for every kind of engine: an `EngineError` that says what to
do, in words of ours; never a hang, never a second request, never output that did not come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import pytest
import pytest_asyncio

from gateway.protocol.deltas import TextDelta
from gateway.protocol.items import Message
from inference.engine import Chunk, Engine, EngineError, Generation, Sampling
from inference.formats.format import Brief, Format
from inference.formats.messages import MessagesFormat
from inference.formats.responses import ResponsesFormat
from inference.tokenizer import pack_ids
from inference.upstream import cerebras
from inference.upstream import chat as chat_module
from inference.upstream import responses as responses_module
from inference.upstream.cerebras import INTEGRATION, CerebrasEngine
from inference.upstream.chat import ChatEngine
from inference.upstream.dialects import CEREBRAS_GPT_OSS, GENERIC, RESPONSES_OPENAI
from inference.upstream.endpoint import UpstreamEndpoint
from inference.upstream.errors import UpstreamError
from inference.upstream.pool import Deadlines, UpstreamPool
from inference.upstream.responses import ResponsesEngine
from tests.support.responses_upstream import response, responses_upstream
from tests.support.upstreams import (
    KEY,
    MODEL,
    SAFE_TEXT,
    Cut,
    Pause,
    Stall,
    Step,
    Upstream,
    cerebras_upstream,
    chat,
    completion,
    event,
    openai_upstream,
    raw_server,
    serving,
)

pytestmark = pytest.mark.asyncio(loop_scope="module")

HASTY = Deadlines(connect_s=0.5, first_event_s=0.25, idle_s=0.25)
KINDS = ("cerebras-ids", "cerebras-chat", "openai-chat", "openai-responses")


class Case:
    """One engine and its server."""

    def __init__(
        self, kind: str, upstream: Upstream, deadlines: Deadlines | None = None, base_url: str | None = None
    ) -> None:
        self.kind, self.upstream = kind, upstream
        pool = UpstreamPool(base_url or upstream.base_url, KEY, headers=INTEGRATION, deadlines=deadlines)
        self.engine: Engine
        if kind == "cerebras-ids":
            self.engine = CerebrasEngine(UpstreamEndpoint(pool, MODEL, cerebras.PATH))
        elif kind == "openai-responses":
            endpoint = UpstreamEndpoint(pool, MODEL, responses_module.PATH)
            self.engine = ResponsesEngine(endpoint, RESPONSES_OPENAI, "o")
        else:
            dialect = CEREBRAS_GPT_OSS if kind == "cerebras-chat" else GENERIC
            self.engine = ChatEngine(UpstreamEndpoint(pool, MODEL, chat_module.PATH), dialect)

    def request(self) -> Generation:
        if self.kind == "cerebras-ids":
            return Generation("r1", "any", (pack_ids(range(50)),), Sampling(9, stop_token_ids=(7,)))
        form: Format = MessagesFormat(CEREBRAS_GPT_OSS)
        if self.kind == "openai-responses":
            form = ResponsesFormat(RESPONSES_OPENAI, "o")
        parts = (form.body((Message("user", "Hello"),), {}),)
        return Generation("r1", "any", parts, Sampling(9), parsing=form.opening(Brief()).parsing)

    def chunk(self, n: int, finish: str | None = None) -> dict[str, Any]:
        if self.kind == "cerebras-ids":
            return completion(None if finish else [n], finish)
        if self.kind == "openai-responses":
            if finish:
                return {"type": "response.completed", "response": response("completed")}
            return {"type": "response.output_text.delta", "output_index": 0, "item_id": "m", "delta": f"t{n}"}
        return chat({} if finish else {"content": f"t{n}"}, finish)

    async def ask(self) -> tuple[list[int], str | None]:
        """What came, as numbers of chunks, and how it ended."""
        found: list[int] = []
        finish = None
        async with aclosing(self.engine.generate(self.request())) as chunks:  # type: ignore[type-var]
            try:
                async for chunk in chunks:
                    found += numbers(chunk)
                    finish = chunk.finish
            except EngineError as error:
                error.came = found  # type: ignore[attr-defined]
                raise
        return [n for n in found if n != 7], finish


def numbers(chunk: Chunk) -> list[int]:
    return chunk.ids or [int(delta.text[1:]) for delta in chunk.deltas or () if isinstance(delta, TextDelta)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=KINDS)
async def server(request: pytest.FixtureRequest) -> AsyncIterator[tuple[str, Upstream]]:
    servers = {"openai-chat": openai_upstream, "openai-responses": responses_upstream}
    async with serving(servers.get(request.param, cerebras_upstream)()) as upstream:
        yield request.param, upstream


@pytest_asyncio.fixture(loop_scope="module")
async def case(server: tuple[str, Upstream]) -> AsyncIterator[Case]:
    """With deadlines that a busy machine keeps."""
    server[1].reset()
    found = Case(*server)
    yield found
    await found.engine.close()


@pytest_asyncio.fixture(loop_scope="module")
async def hasty(server: tuple[str, Upstream]) -> AsyncIterator[Case]:
    """With deadlines that a test can wait for."""
    server[1].reset()
    found = Case(*server, deadlines=HASTY)
    yield found
    await found.engine.close()


async def fails(case: Case, fault: str, code: str, came: list[int]) -> UpstreamError:
    with pytest.raises(UpstreamError) as caught:
        await asyncio.wait_for(case.ask(), 30)
    error = caught.value
    assert (error.fault, error.code) == (fault, code)
    assert SAFE_TEXT.fullmatch(error.message)
    assert error.came == came  # type: ignore[attr-defined]
    assert len(case.upstream.requests) <= 1
    assert (await case.engine.load()).running == 0
    return error


Broken = Callable[[Case, int], list[Step]]
FAULTS: Mapping[str, tuple[Broken, str, str]] = {
    "cut": (lambda case, n: [Cut()], "unavailable", "server_error"),
    "cut in a line": (lambda case, n: [event(case.chunk(n))[:25], Cut()], "unavailable", "server_error"),
    "cut between line ends": (lambda case, n: [event(case.chunk(n))[:-1], Cut()], "unavailable", "server_error"),
    "end": (lambda case, n: [], "unavailable", "server_error"),
    "end in a line": (lambda case, n: [event(case.chunk(n))[:25]], "unavailable", "server_error"),
    "done without a reason": (lambda case, n: [b"data: [DONE]\n\n"], "unavailable", "server_error"),
    "no JSON": (lambda case, n: [b"data: {nothing\n\n"], "unavailable", "server_error"),
    "no object": (lambda case, n: [b"data: [1]\n\n"], "unavailable", "server_error"),
    "bad UTF-8": (lambda case, n: [b'data: {"a": "\xff"}\n\n'], "unavailable", "server_error"),
    "error chunk": (
        lambda case, n: [{"error": {"message": "at /srv/x: boom", "type": "t"}, "status_code": 500}],
        "unavailable",
        "server_error",
    ),
    "rate limit chunk": (
        lambda case, n: [{"error": {"message": "slow down"}, "status_code": 429}],
        "overloaded",
        "rate_limit_exceeded",
    ),
    "overload chunk, named": (
        lambda case, n: [b'event: error\ndata: {"error": {"message": "x", "code": 503}}\n\n'],
        "overloaded",
        "engine_overloaded",
    ),
}


@pytest.mark.parametrize("before", [0, 1, 3])
@pytest.mark.parametrize("name", FAULTS)
async def test_faults_in_the_stream(case: Case, name: str, before: int) -> None:
    broken, fault, code = FAULTS[name]
    steps = [case.chunk(10 + n) for n in range(before)]
    case.upstream.answer(*steps, *broken(case, before), done=False)
    await fails(case, fault, code, list(range(10, 10 + before)))


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("in_line", [True, False])
async def test_stalls(hasty: Case, before: int, in_line: bool) -> None:
    case = hasty
    steps = [case.chunk(10 + n) for n in range(before)]
    case.upstream.answer(*steps, *([event(case.chunk(99))[:25]] if in_line else []), Stall())
    await fails(case, "unavailable", "engine_unavailable", list(range(10, 10 + before)))
    await asyncio.wait_for(case.upstream.aborted.wait(), 30)


@pytest.mark.parametrize(
    ("status", "fault", "code", "wait"),
    [
        (400, "invalid", "invalid_prompt", None),
        (401, "unavailable", "server_error", None),
        (402, "unavailable", "insufficient_quota", None),
        (404, "unavailable", "model_not_found", None),
        (422, "invalid", "invalid_prompt", None),
        (429, "overloaded", "rate_limit_exceeded", 30),
        (500, "unavailable", "server_error", 30),
        (503, "overloaded", "engine_overloaded", 30),
    ],
)
async def test_refusals(case: Case, status: int, fault: str, code: str, wait: float | None) -> None:
    body = {"message": "no: /srv/models, key csk-1", "type": "t", "code": "c"}
    case.upstream.answer(status=status, headers={"retry-after": "30"}, body=body)
    error = await fails(case, fault, code, [])
    assert error.status == status
    if wait is not None:
        assert error.retry_after_s == wait


async def test_overflow_in_the_words_of_cerebras(case: Case) -> None:
    body = {"message": "Please reduce the length of the messages or completion.", "code": "context_length_exceeded"}
    case.upstream.answer(status=400, body=body)
    await fails(case, "invalid", "context_length_exceeded", [])


async def test_an_answer_that_is_no_stream(case: Case) -> None:
    case.upstream.answer(case.chunk(10), kind="application/json")
    await fails(case, "unavailable", "server_error", [])


async def test_no_word_before_the_deadline(hasty: Case) -> None:
    hasty.upstream.answer(hasty.chunk(10), delay_s=60)
    await asyncio.wait_for(fails(hasty, "unavailable", "engine_unavailable", []), 30)


async def test_comments_are_no_first_event(hasty: Case) -> None:
    """Servers keep a connection alive for as long as they like; the first token still has its deadline."""
    pings: list[Step] = [b": ping\n\n", Pause(0.05)] * 20
    hasty.upstream.answer(*pings, hasty.chunk(10), hasty.chunk(7, "stop"))
    await fails(hasty, "unavailable", "engine_unavailable", [])


async def test_slow_is_no_fault(case: Case) -> None:
    steps: list[Step] = []
    for n in range(10, 13):
        text = event(case.chunk(n))
        steps += [text[:20], Pause(0.04), text[20:], Pause(0.04), b": ping\n\n"]
    case.upstream.answer(*steps, case.chunk(7, "stop"))
    assert await case.ask() == ([10, 11, 12], "stop")


async def test_a_missing_done_is_no_fault(case: Case) -> None:
    case.upstream.answer(case.chunk(10), case.chunk(7, "stop"), done=False)
    assert await case.ask() == ([10], "stop")


async def test_a_connection_that_breaks_behind_the_end_is_no_fault(case: Case) -> None:
    end = case.chunk(7, "stop") if case.kind == "openai-responses" else b"data: [DONE]\n\n"
    steps = [case.chunk(10), *([] if case.kind == "openai-responses" else [case.chunk(7, "stop")]), end]
    case.upstream.answer(*steps, Cut(), done=False)
    assert await case.ask() == ([10], "stop")


@pytest.mark.parametrize("read", [0, 1, 2])
async def test_closing_aborts_the_upstream_at_once(case: Case, read: int) -> None:
    case.upstream.answer(*(case.chunk(10 + n) for n in range(read)), Stall())
    chunks = case.engine.generate(case.request())
    task = asyncio.create_task(drain(chunks))
    await asyncio.wait_for(case.upstream.stalled.wait(), 30)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await asyncio.wait_for(case.upstream.aborted.wait(), 30)
    assert (await case.engine.load()).running == 0


async def drain(chunks: AsyncIterator[Chunk]) -> None:
    async with aclosing(chunks):  # type: ignore[type-var]
        async for _ in chunks:
            pass


async def test_an_endless_answer_stops_when_its_reader_goes(case: Case) -> None:
    """bugs.md O-77, O-78: what is written after the close is no more than was on its way."""
    case.upstream.answer(*(case.chunk(10 + n) for n in range(20_000)))
    chunks = case.engine.generate(case.request())
    async with aclosing(chunks):  # type: ignore[type-var]
        await anext(chunks)
    await asyncio.wait_for(case.upstream.aborted.wait(), 30)
    assert case.upstream.written < 20_000


@pytest.mark.parametrize("kind", KINDS)
async def test_nobody_listens(kind: str) -> None:
    async with raw_server(hang_up) as base_url:
        pass  # the port is free again
    case = Case(kind, cerebras_upstream(), base_url=base_url)
    error = await fails(case, "unavailable", "engine_unavailable", [])
    assert error.retry_after_s == 1
    await case.engine.close()


async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")


async def keep_silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while await reader.read(65_536):
        pass


async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readuntil(b"\r\n\r\n")
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")
    await writer.drain()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("handler", "code"),
    [(hang_up, "server_error"), (keep_silent, "engine_unavailable"), (talk_nonsense, "server_error")],
)
async def test_servers_that_are_none(kind: str, handler: Any, code: str) -> None:
    async with raw_server(handler) as base_url:
        case = Case(kind, cerebras_upstream(), HASTY, base_url)
        await fails(case, "unavailable", code, [])
        await case.engine.close()


async def test_a_connection_that_the_server_let_go_is_no_fault(case: Case) -> None:
    """Kept connections die silently; the next request must not fail for it."""
    for _ in range(3):
        case.upstream.answer(case.chunk(10), case.chunk(7, "stop"), headers={"connection": "close"})
        assert await case.ask() == ([10], "stop")
    assert len(case.upstream.connections) == 3


async def test_after_close_nothing_is_asked(case: Case) -> None:
    await case.engine.close()
    await case.engine.close()
    await fails(case, "unavailable", "server_error", [])
    assert case.upstream.requests == []
