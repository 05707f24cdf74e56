"""What a client of a socket sees of an engine's tokens: how late each is, and how soon the engine stops without it."""

from __future__ import annotations

import asyncio
import json
import math
import statistics
import time
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.processes import Part
from benchmarks.stream_engine import MODEL, answer_ids, ask
from benchmarks.stream_link import ABORTED_RATE, ABORTED_TOKENS, ABORTS, any_moment
from benchmarks.stream_parts import generations, trace_of
from inference.tokenizer import scripted_tokenizer

Message = tuple[float, str]
"""When it came, and what."""
_DELTA = '{"type":"response.output_text.delta"'
_COMPLETED = '{"type":"response.completed"'


def socket(part: Part) -> connect:
    """A client of a session actor, or of the bare server, which takes any path."""
    return connect(f"ws://127.0.0.1:{part.port}/v1/responses", max_size=None, compression=None)


async def _create(ws: ClientConnection, tokens: int, rate: float) -> None:
    body = {"type": "response.create", "model": MODEL, "store": False, "input": ask(tokens, rate)}
    await ws.send(json.dumps(body))


async def listen(part: Part, tokens: int, rate: float, pause_s: float = 0.0) -> list[Message]:
    """The text deltas of one turn on a socket of its own, which isn't read before `pause_s`."""
    came: list[Message] = []
    async with socket(part) as ws:
        await _create(ws, tokens, rate)
        await asyncio.sleep(pause_s)
        async for data in ws:
            now, message = time.monotonic(), str(data)
            if message.startswith(_DELTA):
                came.append((now, message))
            elif message.startswith(_COMPLETED):
                return came
    raise ConnectionError("the gateway closed the socket")


def arrivals(came: Sequence[Message], tokens: int) -> list[float]:
    """When each token came: with the delta that has the last character of its text."""
    vocabulary = scripted_tokenizer()
    ends = list(accumulate(len(vocabulary.token_bytes(token)) for token in answer_ids(vocabulary, tokens)))
    seen = list(accumulate(len(json.loads(message)["delta"]) for _, message in came))
    if seen[-1] != ends[-1]:
        raise ValueError(f"{seen[-1]} characters came of {ends[-1]}")
    return [came[bisect_left(seen, end)][0] for end in ends]


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of them is not above."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def lags(when: Sequence[float], start: float, rate: float) -> dict[str, float]:
    """Against the schedule: token i is due at start + i / rate. `held_tok_s` is tokens by the time they took."""
    late = [(at - start - index / rate) * 1e3 for index, at in enumerate(when)]
    return {
        "held_tok_s": (len(when) - 1) / (when[-1] - when[0]),
        "p50_lag_ms": statistics.median(late),
        "p99_lag_ms": percentile(late, 0.99),
        "worst_lag_ms": max(late),
    }


async def paced(gate: Part, engine: Part, tokens: int, rate: float) -> dict[str, float]:
    """One turn at a rate. `engine_p99_lag_ms` is how late the engine itself was."""
    number = generations(engine) + 1
    before = gate.thread_cpu_s()
    came = await listen(gate, tokens, rate)
    cpu = gate.thread_cpu_s() - before
    trace = await trace_of(engine, number)
    when, start = arrivals(came, tokens), trace.made[0]
    path = [(at - made) * 1e3 for at, made in zip(when, trace.made, strict=False)]
    return {
        **lags(when, start, rate),
        "engine_p99_lag_ms": lags(trace.made, start, rate)["p99_lag_ms"],
        "path_p50_ms": statistics.median(path),
        "path_p99_ms": percentile(path, 0.99),
        "tokens_per_delta": tokens / len(came),
        "session_cpu_us_per_token": cpu / tokens * 1e6,
    }


async def paced_bare(server: Part, frames: int, rate: float) -> dict[str, float]:
    """The same for the bare server."""
    async with connect(f"ws://127.0.0.1:{server.port}", max_size=None, compression=None) as ws:
        before = server.thread_cpu_s()
        await ws.send(f"{frames} {rate:.0f}")
        start = float(str(await ws.recv()))
        when = []
        for _ in range(frames):
            await ws.recv()
            when.append(time.monotonic())
        cpu = server.thread_cpu_s() - before
    return {**lags(when, start, rate), "cpu_us_per_frame": cpu / frames * 1e6}


async def unpaced(gate: Part, tokens: int) -> dict[str, float]:
    """One turn as fast as everything can; the client may fall behind, and deltas be merged."""
    came = await listen(gate, tokens, 0)
    when = arrivals(came, tokens)
    return {"tok_s": (tokens - 1) / (when[-1] - when[0]), "tokens_per_delta": tokens / len(came)}


async def behind(gate: Part, tokens: int, pause_s: float) -> dict[str, float]:
    """One turn as fast as the engine can, for a client that does something else first."""
    came = await listen(gate, tokens, 0, pause_s)
    arrivals(came, tokens)  # nothing is lost
    return {"tokens_per_delta": tokens / len(came)}


async def together(gate: Part, sockets: int, tokens: int, rate: float) -> dict[str, float]:
    """Turns on many sockets at once."""
    before, begin = gate.thread_cpu_s(), time.monotonic()
    came = await asyncio.gather(*(listen(gate, tokens, rate) for _ in range(sockets)))
    seconds, cpu = time.monotonic() - begin, gate.thread_cpu_s() - before
    total = sockets * tokens
    return {
        "tok_s": total / seconds,
        "tokens_per_delta": total / sum(map(len, came)),
        "session_cpu_us_per_token": cpu / total * 1e6,
    }


async def aborts(gate: Part, engine: Part, how: str) -> list[float]:
    """Milliseconds until the engine's iterator is closed, from cutting the socket (`close`) or from the client's
    `response.interrupt` (`interrupt`)."""
    taken = []
    for _ in range(ABORTS):
        number = generations(engine) + 1
        async with socket(gate) as ws:
            await _create(ws, ABORTED_TOKENS, ABORTED_RATE)
            response = json.loads(await ws.recv())["response"]["id"]
            while not str(await ws.recv()).startswith(_DELTA):
                pass
            await any_moment()
            begin = time.monotonic()
            if how == "close":
                ws.transport.abort()
            else:
                await ws.send(json.dumps(_interrupt(response)))
                while not str(await ws.recv()).startswith('{"type":"response.incomplete"'):
                    pass
            taken.append((await trace_of(engine, number)).closed - begin)
    return [seconds * 1e3 for seconds in taken]


def _interrupt(response: str) -> dict[str, Any]:
    return {"type": "response.interrupt", "response_id": response, "mode": "discard_partial_items"}
