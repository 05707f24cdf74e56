"""The token link over real sockets, with an engine that is driven by hand.

No test sleeps for something to happen: where time matters (pings, deadlines) the timer's callback is called.
"""

from __future__ import annotations

import asyncio
import gc
import random
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, TextDelta
from inference import link as link_module
from inference import linkframes as frames
from inference.engine import Chunk, EngineError, Generation, Guide, Load, Parsing, Prefix, Sampling
from inference.link import LinkEngine, LinkServer, Timing, serve_link
from inference.linkframes import FrameSplitter, Kind
from inference.tokenizer import pack_ids

TOKEN = "secret of the cluster"
REQUEST = Generation("r1", "any", (pack_ids(range(100)),), Sampling(max_tokens=10, stop_token_ids=(2,)))


class ManualEngine:
    """Emits what the test puts into a run's queue: chunks, or an exception."""

    def __init__(self) -> None:
        self.runs: dict[str, asyncio.Queue[Chunk | Exception]] = {}
        self.received: list[Generation] = []
        self.closed: list[str] = []
        self.started = asyncio.Event()
        self.now = Load(0, 0)
        self.ill: Exception | None = None
        self.checked: list[Guide] = []
        self.verdict: Exception | None = None
        self.may_answer = asyncio.Event()
        self.may_answer.set()

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        name = generation.request_id
        self.received.append(generation)
        queue = self.runs.setdefault(name, asyncio.Queue())
        self.started.set()
        try:
            while True:
                entry = await queue.get()
                if isinstance(entry, Exception):
                    raise entry
                yield entry
                if entry.finish is not None:
                    return
        finally:
            self.closed.append(name)

    def emit(self, name: str, *entries: Chunk | Exception) -> None:
        queue = self.runs.setdefault(name, asyncio.Queue())
        for entry in entries:
            queue.put_nowait(entry)

    async def check(self, guide: Guide) -> None:
        self.checked.append(guide)
        await self.may_answer.wait()
        if self.verdict is not None:
            raise self.verdict

    async def load(self) -> Load:
        if self.ill is not None:
            raise self.ill
        return self.now

    async def check_health(self) -> None:
        if self.ill is not None:
            raise self.ill

    async def close(self) -> None:
        pass


@pytest.fixture
async def engine() -> ManualEngine:
    return ManualEngine()


@pytest.fixture
async def server(engine: ManualEngine) -> AsyncIterator[LinkServer]:
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN)
    yield server
    await server.close()
    await no_leaks()


@pytest.fixture
async def link(server: LinkServer) -> AsyncIterator[LinkEngine]:
    link = LinkEngine(server.address, TOKEN)
    yield link
    await link.close()


async def until(condition: Callable[[], object]) -> None:
    """Lets the loop turn until the sockets have done their part."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110  the condition is the state of sockets
            await asyncio.sleep(0.001)


async def no_leaks() -> None:
    """No task runs code of the link. (Those of pytest-asyncio run code of this file.)"""
    home = str(Path(link_module.__file__).parent)

    def ours() -> list[Any]:
        coroutines: list[Any] = [task.get_coro() for task in asyncio.all_tasks()]
        return [each for each in coroutines if each.cr_code.co_filename.startswith(home)]

    await until(lambda: not ours())
    gc.collect()  # an unclosed transport or iterator warns now, and warnings are errors


def request(name: str, max_tokens: int = 10) -> Generation:
    return Generation(name, "any", (pack_ids([1, 2, 3]),), Sampling(max_tokens))


async def collect(link: LinkEngine, generation: Generation = REQUEST) -> list[Chunk]:
    return [chunk async for chunk in link.generate(generation)]


def ids_of(chunks: list[Chunk]) -> list[int]:
    return [token for chunk in chunks for token in chunk.ids]


async def test_a_generation_arrives_as_it_is_and_its_chunks_as_they_were(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    sent = [Chunk([5], cached_tokens=96), Chunk([6, 7]), Chunk([8]), Chunk([2], "stop")]
    engine.emit("r1", *[Chunk(list(chunk.ids), chunk.finish, chunk.cached_tokens) for chunk in sent])
    assert await collect(link) == sent
    assert engine.received == [REQUEST]
    await until(lambda: server.active == 0)
    assert engine.closed == ["r1"]


async def test_many_streams_share_one_connection(engine: ManualEngine, server: LinkServer, link: LinkEngine) -> None:
    names = [f"r{n}" for n in range(50)]
    tasks = [asyncio.create_task(collect(link, request(name))) for name in names]
    await until(lambda: server.active == 50)
    for n, name in reversed(list(enumerate(names))):
        engine.emit(name, Chunk([n]), Chunk([n + 1000], "length"))
    results = await asyncio.gather(*tasks)
    assert [ids_of(chunks) for chunks in results] == [[n, n + 1000] for n in range(50)]
    assert len(server.wires) == 1


async def test_a_prompt_larger_than_any_buffer(engine: ManualEngine, link: LinkEngine) -> None:
    prompt = pack_ids(range(500_000))
    engine.emit("r1", Chunk([1], "stop"))
    await collect(link, Generation("r1", "any", (prompt,), Sampling(1)))
    assert engine.received[0].prompt == prompt


@pytest.mark.parametrize("fault", ["invalid", "overloaded", "unavailable"])
async def test_engine_errors_arrive_as_they_are(engine: ManualEngine, link: LinkEngine, fault: str) -> None:
    engine.emit("r1", Chunk([1]), EngineError(fault, "because"))  # type: ignore[arg-type]
    stream = link.generate(REQUEST)
    assert await anext(stream) == Chunk([1])
    with pytest.raises(EngineError) as failed:
        await anext(stream)
    assert (failed.value.fault, failed.value.message) == (fault, "because")


async def test_an_unknown_exception_says_nothing_to_the_client(
    engine: ManualEngine, link: LinkEngine, caplog: pytest.LogCaptureFixture
) -> None:
    engine.emit("r1", RuntimeError("a prompt of somebody"))
    with pytest.raises(EngineError) as failed:
        await collect(link)
    assert failed.value.fault == "unavailable"
    assert "somebody" not in failed.value.message + caplog.text
    assert "RuntimeError" in caplog.text


async def test_an_engine_that_just_stops_is_unavailable() -> None:
    class Stops(ManualEngine):
        async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
            del generation
            yield Chunk([1])

    server = await serve_link(Stops(), "127.0.0.1", 0, TOKEN)
    link = LinkEngine(server.address, TOKEN)
    with pytest.raises(EngineError, match="stopped in the middle"):
        await collect(link)
    await link.close()
    await server.close()
    await no_leaks()


async def test_closing_the_iterator_aborts_in_the_engine(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    engine.emit("r1", Chunk([1]))
    stream = link.generate(REQUEST)
    assert await anext(stream) == Chunk([1])
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: engine.closed == ["r1"])
    await until(lambda: server.active == 0)
    engine.emit("r2", Chunk([1], "stop"))  # the connection is as good as before
    assert await collect(link, request("r2")) == [Chunk([1], "stop")]
    assert len(server.wires) == 1


async def test_cancelling_the_reader_aborts_in_the_engine(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    task = asyncio.create_task(collect(link))
    await engine.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await until(lambda: engine.closed == ["r1"])
    await until(lambda: server.active == 0)


async def test_the_server_closes_the_iterator_in_the_turn_after_the_cancel(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    task = asyncio.create_task(collect(link))
    await engine.started.wait()
    (wire,) = server.wires
    (number,) = wire.streams
    wire._frame(Kind.CANCEL, number, b"")
    await asyncio.sleep(0)
    assert engine.closed == ["r1"]
    task.cancel()
    await asyncio.wait([task])


async def test_a_cancel_that_comes_with_its_open_starts_nothing(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    await link.load()
    (wire,) = server.wires
    wire.data_received(frames.encode_open(77, REQUEST) + frames.encode(Kind.CANCEL, 77))
    await until(lambda: not wire.streams)
    assert engine.received == []


async def test_a_reader_who_keeps_up_gets_every_chunk_by_itself(engine: ManualEngine, link: LinkEngine) -> None:
    engine.emit("r1", *[Chunk([n]) for n in range(200)], Chunk([2], "stop"))  # they share writes and reads
    assert [chunk.ids for chunk in await collect(link, request("r1", 201))] == [[n] for n in range(200)] + [[2]]


async def test_chunks_of_a_reader_who_is_behind_are_merged(engine: ManualEngine, link: LinkEngine) -> None:
    stream = link.generate(request("r1", 1000))
    engine.emit("r1", Chunk([0], cached_tokens=3))
    first = await anext(stream)
    wire = link._wire
    assert wire is not None
    (pending,) = wire._streams.values()
    for n in range(1, 500):  # one read each; the reader does nothing meanwhile
        wire.data_received(frames.encode_chunk(1, Chunk([n])))
    assert len(pending.chunks) == 1
    wire.data_received(frames.encode_chunk(1, Chunk([2], "stop")))
    rest = [chunk async for chunk in stream]
    assert first == Chunk([0], cached_tokens=3)
    assert rest == [Chunk([*range(1, 500), 2], "stop")]


async def test_a_full_socket_stops_the_engine_not_the_memory() -> None:
    produced = 0

    class Endless(ManualEngine):
        async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
            del generation
            nonlocal produced
            while True:
                produced += 1
                yield Chunk([7] * 1000)

    server = await serve_link(Endless(), "127.0.0.1", 0, TOKEN)
    with socket.create_connection(server.address) as peer:  # reads nothing
        peer.sendall(frames.encode_hello(TOKEN) + frames.encode_open(1, REQUEST))
        await until(lambda: any(wire.paused for wire in server.wires))
        stalled_at = produced
        for _ in range(20):
            await asyncio.sleep(0)
        assert produced == stalled_at
        assert server.active == 1
    await until(lambda: server.active == 0)
    await server.close()
    await no_leaks()


async def test_an_engine_that_never_waits_can_still_be_cancelled() -> None:
    class Endless(ManualEngine):
        async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
            try:
                while True:
                    yield Chunk([7])
            finally:
                self.closed.append(generation.request_id)

    engine = Endless()
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN)
    link = LinkEngine(server.address, TOKEN)
    async for _ in (stream := link.generate(REQUEST)):
        break
    await stream.aclose()  # type: ignore[attr-defined]
    await until(lambda: engine.closed == ["r1"])
    await link.close()
    await server.close()
    await no_leaks()


async def test_load_and_health(engine: ManualEngine, link: LinkEngine) -> None:
    engine.now = Load(3, 4, 0.25)
    assert await link.load() == Load(3, 4, 0.25)
    await link.check_health()
    engine.ill = EngineError("unavailable", "out of order")
    for question in (link.check_health, link.load):
        with pytest.raises(EngineError, match="out of order"):
            await question()
    engine.ill = RuntimeError("inner matters")
    with pytest.raises(EngineError, match="could not answer"):
        await link.check_health()


async def test_an_engine_that_does_not_answer_in_time(engine: ManualEngine, server: LinkServer) -> None:
    hangs = asyncio.Event()

    async def hang() -> Load:
        await hangs.wait()
        return Load(0, 0)

    engine.load = hang  # type: ignore[method-assign]
    link = LinkEngine(server.address, TOKEN, Timing(ask_s=0.01))
    with pytest.raises(EngineError, match="did not answer"):
        await link.load()
    await link.check_health()  # the connection isn't at fault
    await link.close()


# -- what an engine says about guides

GUIDE = Guide("json", '{"type": "object"}')


async def test_a_guide_is_checked_once_for_all_who_ask(engine: ManualEngine, server: LinkServer) -> None:
    links = [LinkEngine(server.address, TOKEN) for _ in range(3)]
    engine.may_answer.clear()
    tasks = [asyncio.create_task(link.check(GUIDE)) for link in links for _ in range(3)]
    await until(lambda: len(server.wires) == 3 and all(len(wire.questions) == 3 for wire in server.wires))
    engine.may_answer.set()
    await asyncio.gather(*tasks)
    await links[0].check(GUIDE)
    assert engine.checked == [GUIDE]
    await links[0].check(Guide("grammar", GUIDE.value))
    assert len(engine.checked) == 2
    for link in links:
        await link.close()


async def test_a_refused_guide_stays_refused_but_a_fault_is_not_remembered(
    engine: ManualEngine, link: LinkEngine
) -> None:
    engine.verdict = EngineError("overloaded", "later")
    with pytest.raises(EngineError, match="later"):
        await link.check(GUIDE)
    engine.verdict = RuntimeError("the schema of somebody")
    with pytest.raises(EngineError, match="could not answer") as failed:
        await link.check(GUIDE)
    assert failed.value.fault == "unavailable"
    engine.verdict = EngineError("invalid", "no such type")
    for _ in range(2):
        with pytest.raises(EngineError, match="no such type") as refused:
            await link.check(GUIDE)
        assert refused.value.fault == "invalid"
    assert len(engine.checked) == 3


async def test_a_check_has_a_deadline_of_its_own_and_is_known_after_it(engine: ManualEngine) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN)
    link = LinkEngine(server.address, TOKEN, Timing(ask_s=60, check_s=0.01))
    engine.may_answer.clear()
    with pytest.raises(EngineError, match="did not answer") as late:
        await link.check(GUIDE)
    assert late.value.fault == "unavailable"
    engine.may_answer.set()
    await until(lambda: not server.checks._running)
    patient = LinkEngine(server.address, TOKEN)
    await patient.check(GUIDE)
    assert len(engine.checked) == 1
    for each in (link, patient):
        await each.close()
    await server.close()
    await no_leaks()


async def test_closing_the_server_ends_its_checks(engine: ManualEngine, server: LinkServer, link: LinkEngine) -> None:
    engine.may_answer.clear()
    task = asyncio.create_task(link.check(GUIDE))
    await until(lambda: engine.checked)
    await server.close()
    with pytest.raises(EngineError) as lost:
        await task
    assert lost.value.fault == "unavailable"


async def test_a_guide_too_large_for_a_frame_is_invalid(link: LinkEngine) -> None:
    with pytest.raises(EngineError) as refused:
        await link.check(Guide("regex", "a" * frames.MAX_FRAME_BYTES))
    assert refused.value.fault == "invalid"


# -- parsing by the engine


async def test_deltas_of_an_engine_that_parses_arrive(engine: ManualEngine, link: LinkEngine) -> None:
    sent = [
        Chunk([5], cached_tokens=0, deltas=[]),
        Chunk([6], deltas=[TextDelta("a"), CallStart("function", "ns.f")]),
        Chunk([2], "stop", deltas=[CallDelta("{}"), CallEnd()]),
    ]
    engine.emit("r1", *[Chunk(list(c.ids), c.finish, c.cached_tokens, deltas=list(c.deltas or [])) for c in sent])
    generation = Generation("r1", "any", (pack_ids([1]),), Sampling(3), parsing=Parsing('[{"type": "function"}]'))
    assert await collect(link, generation) == sent
    assert engine.received == [generation]


# -- what need not be sent again


async def turn(
    engine: ManualEngine, link: LinkEngine, name: str, prompt: bytes, sampled: list[int], known: Prefix | None = None
) -> int:
    """One generation; the bytes of its prompt that were sent. The prompt arrives as it is."""
    engine.emit(name, *[Chunk([token]) for token in sampled], Chunk([], "stop"))
    before = link.prompt_bytes_sent
    generation = Generation(name, "any", (prompt[:8], prompt[8:]), Sampling(100), known=known)
    assert ids_of(await collect(link, generation)) == sampled
    assert engine.received[-1].prompt == prompt
    assert engine.received[-1].known is None
    return link.prompt_bytes_sent - before


async def test_a_conversation_sends_each_id_once(engine: ManualEngine, server: LinkServer, link: LinkEngine) -> None:
    first, answer, more = pack_ids(range(1000)), [7, 8, 9], pack_ids([50, 51])
    assert await turn(engine, link, "a", first, answer) == 4000
    second = first + pack_ids(answer) + more
    assert await turn(engine, link, "b", second, [3], Prefix("a", 1003)) == 8
    assert await turn(engine, link, "c", second + pack_ids([3]), [4], Prefix("b", 1006)) == 0
    # a fork from the middle of an answer, and one from the middle of a prompt
    assert await turn(engine, link, "d", first + pack_ids(answer[:1]) + more, [1], Prefix("a", 1001)) == 8
    assert await turn(engine, link, "e", first[:400] + more, [1], Prefix("d", 100)) == 8
    # what still runs can be built on as far as it got
    stream = link.generate(Generation("f", "any", (first,), Sampling(100)))
    engine.emit("f", Chunk([70, 71]))
    assert await anext(stream) == Chunk([70, 71])
    assert await turn(engine, link, "g", first + pack_ids([70, 71]), [1], Prefix("f", 1002)) == 0
    await stream.aclose()  # type: ignore[attr-defined]
    assert len(server.wires) == 1


@pytest.mark.parametrize(
    ("name", "length", "edit"),
    [
        ("never", 100, 0),  # no such generation
        ("a", 104, 0),  # more than there is
        ("a", 102, 4),  # an edit at the front
        ("a", 102, 4 * 101),  # an edit in the answer
    ],
)
async def test_a_hint_that_is_wrong_costs_only_bytes(
    engine: ManualEngine, link: LinkEngine, name: str, length: int, edit: int
) -> None:
    prompt = pack_ids(range(100))
    await turn(engine, link, "a", prompt, [7, 8, 9])
    later = bytearray(prompt + pack_ids([7, 8, 9, 10, 11]))
    if edit:
        later[edit] += 1
    sent = await turn(engine, link, "b", bytes(later), [1], Prefix(name, length))
    assert sent == len(later) - 4 * length + len(later)
    assert await turn(engine, link, "c", bytes(later), [1], Prefix("b", 105)) == 0


async def test_a_new_connection_knows_nothing_of_the_old_one(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    prompt = pack_ids(range(100))
    await turn(engine, link, "a", prompt, [7])
    (wire,) = server.wires
    wire.abort("test")
    assert link._wire is not None
    await link._wire.ended
    assert server.memory.size == 0
    assert await turn(engine, link, "b", prompt + pack_ids([7]), [8], Prefix("a", 101)) == 404
    assert await turn(engine, link, "c", prompt + pack_ids([7, 8]), [9], Prefix("b", 102)) == 0
    other = LinkEngine(server.address, TOKEN)
    assert await turn(engine, other, "d", prompt, [9], Prefix("c", 100)) == 400
    await other.close()


async def test_a_whole_prompt_too_large_for_a_frame_fails_when_it_must_be_sent(
    engine: ManualEngine, link: LinkEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME_BYTES", 300)
    generation = Generation("b", "any", (pack_ids(range(100)),), Sampling(1), known=Prefix("a", 90))
    with pytest.raises(EngineError) as refused:
        await collect(link, generation)
    assert refused.value.fault == "invalid"
    assert engine.received == []
    engine.emit("c", Chunk([1], "stop"))
    assert ids_of(await collect(link, request("c"))) == [1]


async def test_cancelling_while_the_server_asks_for_the_whole_prompt(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    await link.load()
    generation = Generation("b", "any", (pack_ids(range(100)),), Sampling(1), known=Prefix("a", 90))
    task = asyncio.create_task(collect(link, generation))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await link.load()  # UNKNOWN has come by now
    assert engine.received == []
    assert not server.active


@pytest.mark.parametrize("seed", range(8))
async def test_whatever_was_forked_cut_forgotten_or_lost_the_engine_gets_the_prompt(
    engine: ManualEngine, seed: int
) -> None:
    chance = random.Random(seed)
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN, memory_bytes=chance.choice([0, 6_000, 40_000]))
    links = [LinkEngine(server.address, TOKEN) for _ in range(2)]
    contexts: list[tuple[str, bytes]] = [("", b"")]  # (generation, its prompt and answer)
    for n in range(60):
        name, context = chance.choice(contexts[-8:])
        cut = chance.randint(0, len(context) // 4)
        prompt = context[: 4 * cut] + pack_ids([chance.randrange(9) for _ in range(chance.randint(1, 40))])
        sampled = [chance.randrange(9) for _ in range(chance.randint(0, 20))]
        known = Prefix(name, cut) if chance.random() < 0.8 else None
        mine = f"g{chance.choice([n, n % 7])}"  # names repeat
        await turn(engine, chance.choice(links), mine, prompt, sampled, known)
        contexts.append((mine, prompt + pack_ids(sampled)))
        if chance.random() < 0.1:
            lost = chance.choice(links)
            if lost._wire is not None:
                lost._wire.abort("test")
                await lost._wire.ended
    for link in links:
        await link.close()
    await server.close()
    await no_leaks()


# -- who may connect


async def test_a_wrong_token_is_a_clear_error(server: LinkServer, caplog: pytest.LogCaptureFixture) -> None:
    link = LinkEngine(server.address, "guess")
    with pytest.raises(EngineError, match="wrong token") as refused:
        await link.load()
    assert refused.value.fault == "unavailable"
    assert "guess" not in caplog.text
    await link.close()
    await until(lambda: not server.wires)


async def test_another_version_is_a_clear_error(server: LinkServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "encode_hello", lambda _: frames.encode(Kind.HELLO, 0, frames.MAGIC + b"\x09\x00x"))
    link = LinkEngine(server.address, TOKEN)
    with pytest.raises(EngineError, match="version 2 of the token link, not 9"):
        await link.load()
    await link.close()


@pytest.mark.parametrize(
    "first",
    [
        b"GET / HTTP/1.1\r\nhost: x\r\n\r\n",
        frames.encode_open(1, REQUEST),
        frames.encode(Kind.HELLO, 0, b"nonsense"),
        frames.encode(Kind.HELLO, 0, bytes(frames.MAX_HELLO_BYTES)),
        frames.encode_hello(TOKEN) + frames.encode(99),
        frames.encode_hello(TOKEN) + frames.encode(Kind.OPEN, 1, b"nonsense"),
        frames.encode_hello(TOKEN) + frames.encode(Kind.ASK, 1, b"\x09"),
    ],
)
async def test_strangers_are_cut_off_and_run_nothing(engine: ManualEngine, first: bytes) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN, timing=Timing(connect_s=600))
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(first)
    try:
        async with asyncio.timeout(30):
            await reader.read()
    except ConnectionError:
        pass
    writer.close()
    await until(lambda: not server.wires)
    assert engine.received == []
    await server.close()
    await no_leaks()


async def test_who_says_nothing_is_cut_off_at_the_deadline(engine: ManualEngine) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN, timing=Timing(connect_s=0.01))
    reader, writer = await asyncio.open_connection(*server.address)
    async with asyncio.timeout(30):
        assert await reader.read() == b""
    writer.close()
    await server.close()
    await no_leaks()


async def test_a_link_needs_a_secret(engine: ManualEngine) -> None:
    with pytest.raises(ValueError, match="secret"):
        await serve_link(engine, "127.0.0.1", 0, "")


# -- loss


class Cutter:
    """A proxy that passes `up` frames to the server and `down` frames to the client, then cuts both connections."""

    def __init__(self, target: tuple[str, int], up: int | None = None, down: int | None = None) -> None:
        self.target, self.left = target, {"up": up, "down": down}
        self.passed = {"up": 0, "down": 0}
        self.tasks: set[asyncio.Task[None]] = set()
        self.cut = False

    async def start(self) -> tuple[str, int]:
        self.listener = await asyncio.start_server(self.serve, "127.0.0.1", 0)
        host, port = self.listener.sockets[0].getsockname()
        return host, port

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        up_reader, up_writer = await asyncio.open_connection(*self.target)
        ways = [
            asyncio.create_task(self.copy("up", reader, up_writer)),
            asyncio.create_task(self.copy("down", up_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.wait(ways)
            for each in (writer, up_writer):
                each.transport.abort()

    async def copy(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        splitter = FrameSplitter()
        try:
            while data := await reader.read(65536):
                for kind, number, body in splitter.feed(data):
                    if self.left[way] is not None and self.passed[way] >= self.left[way]:  # type: ignore[operator]
                        self.cut = True
                        await asyncio.sleep(0.002)  # what was passed on gets there before the cut
                        return
                    self.passed[way] += 1
                    writer.write(frames.encode(kind, number, body))
        except ConnectionError:
            pass

    async def stop(self) -> None:
        self.listener.close()
        for task in self.tasks:
            task.cancel()
        if self.tasks:
            await asyncio.wait(self.tasks)


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("after", range(9))
async def test_a_cut_after_any_frame(engine: ManualEngine, server: LinkServer, way: str, after: int) -> None:
    cutter = Cutter(server.address, **{way: after})
    link = LinkEngine(await cutter.start(), TOKEN)
    engine.emit("r1", *[Chunk([n]) for n in range(5)], Chunk([2], "stop"))
    got: list[Chunk] = []
    failure = None
    try:
        async with asyncio.timeout(30):
            async for chunk in link.generate(REQUEST):
                got.append(chunk)  # noqa: PERF401  what came before the error counts
    except EngineError as error:
        failure = error
    # either all of it or a clean prefix and an error
    ids = ids_of(got)
    if failure is None:
        assert ids == [0, 1, 2, 3, 4, 2]
        assert got[-1].finish == "stop"
    else:
        assert failure.fault == "unavailable"
        assert ids == [0, 1, 2, 3, 4, 2][: len(ids)]
        assert all(chunk.finish is None for chunk in got)
        if way == "down":
            assert len(ids) == max(0, after - 1)  # all that was passed on, WELCOME aside
    assert cutter.cut == (failure is not None)
    await until(lambda: server.active == 0)
    assert engine.closed == [generation.request_id for generation in engine.received]
    await link.close()
    await cutter.stop()


async def test_a_lost_connection_ends_all_its_streams_and_the_next_call_dials_again(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    tasks = [asyncio.create_task(collect(link, request(f"r{n}"))) for n in range(3)]
    asking = asyncio.create_task(link.load())
    await until(lambda: server.active == 3)
    await asking
    next(iter(server.wires)).abort("test")
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [getattr(result, "fault", result) for result in results] == ["unavailable"] * 3
    await until(lambda: sorted(engine.closed) == ["r0", "r1", "r2"])
    engine.emit("again", Chunk([1], "stop"))
    assert await collect(link, request("again")) == [Chunk([1], "stop")]


async def test_a_server_loses_its_client(engine: ManualEngine, server: LinkServer, link: LinkEngine) -> None:
    task = asyncio.create_task(collect(link))
    await engine.started.wait()
    assert link._wire is not None
    link._wire.abort("test")
    with pytest.raises(EngineError):
        await task
    await until(lambda: engine.closed == ["r1"])
    assert server.active == 0


async def test_a_silent_peer_is_given_up(server: LinkServer, link: LinkEngine) -> None:
    task = asyncio.create_task(collect(link))
    await until(lambda: server.active == 1)
    wire, timing = link._wire, Timing()
    assert wire is not None
    wire._silent_ticks = 0
    for _ in range(timing.pings_unanswered + 1):
        wire._tick()
        assert not task.done()
    wire._tick()
    with pytest.raises(EngineError, match="stopped answering") as lost:
        await task
    assert lost.value.fault == "unavailable"


async def test_a_quiet_peer_that_answers_pings_is_kept(server: LinkServer, link: LinkEngine) -> None:
    await link.load()
    client, (far,) = link._wire, server.wires
    assert client is not None
    for wire in (client, far):
        for _ in range(20):
            wire._tick()
            if wire._silent_ticks > 1:
                await until(lambda wire=wire: wire._silent_ticks == 0)  # type: ignore[misc]
    await link.load()
    assert len(server.wires) == 1


# -- dialling


async def test_nobody_listens_is_said_at_once_and_not_tried_again_too_soon(
    engine: ManualEngine, caplog: pytest.LogCaptureFixture
) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN)
    await server.close()
    link = LinkEngine(server.address, TOKEN, Timing(retry_first_s=100, retry_most_s=1000))
    for _ in range(3):
        with pytest.raises(EngineError, match="could not be reached") as failed:
            await collect(link)
        assert failed.value.fault == "unavailable"
    assert caplog.text.count("no connection") == 1
    back = await serve_link(engine, *server.address, TOKEN)
    link._retry_at = 0.0  # as if the pause were over
    await link.check_health()
    assert link._failures == 0
    await link.close()
    await back.close()
    await no_leaks()


async def test_the_pause_between_dials_grows_to_a_limit(engine: ManualEngine) -> None:
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN)
    await server.close()
    link = LinkEngine(server.address, TOKEN, Timing(retry_first_s=1, retry_most_s=8))
    pauses = []
    for _ in range(6):
        link._retry_at = 0.0
        with pytest.raises(EngineError):
            await link.load()
        pauses.append(link._retry_at - asyncio.get_running_loop().time())
    for pause, most in zip(pauses, [1, 2, 4, 8, 8, 8], strict=True):
        assert most / 2 - 0.1 < pause <= most
    await link.close()


async def test_a_dial_that_hangs_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # takes connections, never answers the hello
        link = LinkEngine(mute.getsockname(), TOKEN, Timing(connect_s=0.02))
        with pytest.raises(EngineError, match="no answer"):
            await link.load()
        await link.close()
    await no_leaks()


async def test_one_dial_serves_all_and_outlives_a_caller_who_gives_up(server: LinkServer) -> None:
    link = LinkEngine(server.address, TOKEN)
    impatient, *others = [asyncio.create_task(link.load()) for _ in range(10)]
    await asyncio.sleep(0)
    impatient.cancel()
    await asyncio.gather(*others)
    assert impatient.cancelled()
    assert len(server.wires) == 1
    await link.close()


@pytest.mark.parametrize("turns", range(6))
async def test_closing_while_dialling(turns: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        link = LinkEngine(mute.getsockname(), TOKEN)
        waiting = asyncio.create_task(link.load())
        for _ in range(turns):
            await asyncio.sleep(0)
        await link.close()
        with pytest.raises(EngineError, match="closed"):
            await waiting
    await no_leaks()


# -- closing


async def test_closing_the_client_ends_its_streams_and_is_final(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    task = asyncio.create_task(collect(link))
    await engine.started.wait()
    await link.close()
    await link.close()
    with pytest.raises(EngineError, match="closed"):
        await task
    await until(lambda: engine.closed == ["r1"])
    with pytest.raises(EngineError, match="closed"):
        await link.load()
    assert not server.wires


async def test_a_draining_server_finishes_what_runs_and_takes_nothing_new(
    engine: ManualEngine, server: LinkServer, link: LinkEngine
) -> None:
    task = asyncio.create_task(collect(link))
    await engine.started.wait()
    closing = asyncio.create_task(server.close(drain_s=30))
    await until(lambda: server.closing)
    with pytest.raises(EngineError, match="shutting down") as refused:
        await collect(link, request("late"))
    assert refused.value.fault == "unavailable"
    engine.emit("r1", Chunk([1]), Chunk([2], "stop"))
    assert ids_of(await task) == [1, 2]
    async with asyncio.timeout(30):
        await closing
    assert not server.wires
    with pytest.raises(EngineError):
        await link.load()


async def test_what_does_not_end_in_time_is_aborted(engine: ManualEngine, server: LinkServer, link: LinkEngine) -> None:
    task = asyncio.create_task(collect(link))
    await engine.started.wait()
    await server.close(drain_s=0.01)
    assert engine.closed == ["r1"]
    with pytest.raises(EngineError, match="shutting down"):
        await task
    await server.close()
