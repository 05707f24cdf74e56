"""What a turn costs when the conversation is long, next to the same without a token cache and to vLLM's own server.

    python -m benchmarks.history [--json]

An agent loop whose turns bring a tool's result of 200 tokens, on one WebSocket, with `previous_response_id` and
`store: false`. Every part is a process of its own; CPU times are medians over many turns of one process's alone.

- `cache` on, off: the session actor with its token cache, or rendering and encoding the whole history every turn, in
  front of the scripted engine (`gateway_cpu_ms`, `bytes_to_engine`) and of a real vLLM with a tiny random model, where
  users' messages of the same length get 16 tokens each (`engine_front_cpu_ms`: vLLM without its core).
- `cache` vllm: vLLM's own /v1/responses with `previous_response_id` and its fast tokenizer, asked the same as that; its
  API server is gateway and engine front in one.

Needs the engine packages. Takes about four minutes: two vLLMs start, and each computes 100,000 tokens once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from benchmarks.history_engines import CONTEXT_TOKENS, await_server, real, scripted, vllm_server
from benchmarks.history_hits import possible, tool_loop
from benchmarks.history_load import (
    TURN_TOKENS,
    Client,
    HttpClient,
    SocketClient,
    following,
    talk_history,
)
from benchmarks.processes import TOKEN, Part, gateway, running
from inference.checkpoint import tiny_random_model
from inference.engine import Generation, Prefix, Sampling
from inference.link import LinkEngine
from inference.linkframes import split_known
from inference.tokenizer import pack_ids, unpack_ids

LENGTHS = (1_000, 10_000, 64_000, 100_000)
"""Tokens of history, about."""
TURNS = 10
"""Measured behind the same turn: fewer than the responses that a lane keeps."""
GATEWAY_ROUNDS, ENGINE_ROUNDS = 6, 1
ANSWER = 16  # tokens of the real engines
SETTLE_S = 0.004  # what a turn does after its last event counts as the turn's
Figures = dict[tuple[str, int, str], list[float]]
"""Values by cache, length and column."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one turn took: tokens of its prompt, CPU of the process watched, bytes of prompts that this one sent,
    if it counts them."""

    history: int
    cpu_ms: float
    sent: float | None


class Watched:
    """A conversation of a certain length, and the CPU time of one process while it goes on."""

    def __init__(self, client: Client, part: Part) -> None:
        self._client, self._part = client, part
        self._last: dict[str, Any] = {"id": None, "output": []}
        self._turns = 0

    async def begin(self, history: list[dict[str, Any]]) -> None:
        """Send what came before at once."""
        self._last = await self._client.respond(history, None)

    async def grow(self, tokens: int) -> None:
        """Go on until the next prompt is about so long, by one turn at least."""
        grown = False
        while not grown or self._last["usage"]["input_tokens"] < tokens - TURN_TOKENS:
            grown = True
            self._turns += 1
            self._last = await self._client.respond(following(self._last, self._turns), self._last["id"])

    async def turn(self, seed: int) -> Turn:
        """One more turn behind those that it has grown by, which stay the last ones. Any number of these are of the
        same length."""
        counted = self._part.pipe is not None
        sent = self._part.figure() if counted else 0.0
        before = self._part.thread_cpu_s()
        response = await self._client.respond(following(self._last, seed), self._last["id"])
        await asyncio.sleep(SETTLE_S)
        spent = self._part.thread_cpu_s() - before
        bytes_sent = self._part.figure() - sent if counted else None
        return Turn(response["usage"]["input_tokens"], spent * 1e3, bytes_sent)


async def measure_gateway(checkpoint: Path) -> Figures:
    """The session actor in front of the scripted engine, in agents' loops of all lengths."""
    with ExitStack() as parts:
        source = parts.enter_context(running(scripted, checkpoint))
        gates = {
            cache: parts.enter_context(running(gateway, source.port, checkpoint, cache == "on"))
            for cache in ("on", "off")
        }
        async with AsyncExitStack() as sockets:
            loops = {}
            for length in LENGTHS:
                for cache, gate in gates.items():
                    client = await sockets.enter_async_context(SocketClient(gate.port, tools=True))
                    loops[cache, length] = Watched(client, gate)
            return await measure(loops, "gateway_cpu_ms", GATEWAY_ROUNDS)


async def measure(loops: Mapping[tuple[str, int], Watched], column: str, rounds: int) -> Figures:
    """Turns of all conversations in rotation, so that drifts of the machine hit all alike."""
    figures: Figures = defaultdict(list)
    for number in range(rounds):
        for (_, length), loop in loops.items():
            await loop.grow(length + (number - rounds // 2) * TURN_TOKENS)
        for turn in range(TURNS):
            for (cache, length), loop in loops.items():
                taken = await loop.turn(number * TURNS + turn)
                figures[cache, length, "history_tokens"].append(taken.history)
                figures[cache, length, column].append(taken.cpu_ms)
                if taken.sent is not None:
                    figures[cache, length, "bytes_to_engine"].append(taken.sent)
    return figures


async def measure_engines(checkpoint: Path) -> tuple[Figures, dict[str, float]]:
    """A real vLLM without its core, behind the token link and as its own server; and its prefix cache in a loop."""
    with ExitStack() as parts:
        served = parts.enter_context(vllm_server(checkpoint))
        source = parts.enter_context(running(real, checkpoint))
        cached = parts.enter_context(running(gateway, source.port, checkpoint))
        uncached = parts.enter_context(running(gateway, source.port, checkpoint, False))
        await await_server(served)
        hits = await measure_hits(source, checkpoint)
        async with AsyncExitStack() as clients:
            talks = {}
            for length in reversed(LENGTHS):  # the longest first: the others are the start of it, so computed once
                on = await clients.enter_async_context(SocketClient(cached.port, most=ANSWER))
                off = await clients.enter_async_context(SocketClient(uncached.port, most=ANSWER))
                vllm = await clients.enter_async_context(HttpClient(served.port, most=ANSWER))
                talks["on", length] = Watched(on, source)
                talks["off", length] = Watched(off, source)
                talks["vllm", length] = Watched(vllm, served)
                history = talk_history(length - TURN_TOKENS)
                await asyncio.gather(talks["on", length].begin(history), talks["vllm", length].begin(history))
                await talks["off", length].begin(history)
            return await measure(talks, "engine_front_cpu_ms", ENGINE_ROUNDS), hits


async def measure_hits(source: Part, checkpoint: Path) -> dict[str, float]:
    """Of an agent loop with thoughts and parallel calls: prompt tokens that came from the engine's prefix cache, and
    those that could have."""
    link = LinkEngine(("127.0.0.1", source.port), TOKEN)
    try:
        served = await tool_loop(link, checkpoint, CONTEXT_TOKENS)
    finally:
        await link.close()
    most = [possible(earlier, turn.prompt) for earlier, turn in zip([None, *served], served, strict=False)]
    had = [turn.cached or 0 for turn in served]
    return {
        "turns": len(served),
        "cached_tokens": sum(had),
        "possible_tokens": sum(most),
        "share": sum(had) / sum(most),
        "turns_below": sum(one < other for one, other in zip(had, most, strict=True)),
    }


def measure_ids(count: int = 100_000) -> dict[str, float]:
    """Milliseconds for what is done with the ids of a prompt, and for JSON in their place."""
    ids = [(index * 7919) % 49_152 for index in range(count)]
    whole = pack_ids(ids)
    size = 4 * count * TURN_TOKENS // count
    parts = [whole[at : at + size] for at in range(0, len(whole), size)]
    known = Generation("x", "m", parts, Sampling(1), known=Prefix("w", count - TURN_TOKENS))
    return {
        "pack_ms": _ms(lambda: pack_ids(ids)),
        "unpack_ms": _ms(lambda: unpack_ids(whole)),
        "join_ms": _ms(lambda: b"".join(parts)),
        "split_known_ms": _ms(lambda: split_known(known)),
        "json_ms": _ms(lambda: orjson.loads(orjson.dumps(ids))),
        "json_bytes": len(orjson.dumps(ids)),
        "bytes": len(whole),
    }


def _ms(work: Callable[[], object], times: int = 15) -> float:
    taken = []
    for _ in range(times):
        begin = time.thread_time()
        work()
        taken.append(time.thread_time() - begin)
    return statistics.median(taken) * 1e3


def rows_of(found: Sequence[Figures]) -> list[dict[str, Any]]:
    """One for each cache and length; None where a column has no meaning."""
    rows = []
    for cache in ("on", "off", "vllm"):
        for length in LENGTHS:
            row: dict[str, Any] = {"cache": cache}
            for name in ("history_tokens", "gateway_cpu_ms", "engine_front_cpu_ms", "bytes_to_engine"):
                values = next((part[cache, length, name] for part in found if (cache, length, name) in part), None)
                row[name] = None if values is None else statistics.median(values)
            rows.append(row)
    return rows


async def run() -> dict[str, Any]:
    """All rows, and the figures that need no row at the top level."""
    checkpoint = tiny_random_model()
    figures = await measure_gateway(checkpoint)
    engines, hits = await measure_engines(checkpoint)
    rows = rows_of((figures, engines))
    on, off, vllm = (rows[at * len(LENGTHS) : (at + 1) * len(LENGTHS)] for at in range(3))
    ours = on[-1]["gateway_cpu_ms"] + on[-1]["engine_front_cpu_ms"]
    return {
        "growth_ms": on[-1]["gateway_cpu_ms"] - on[0]["gateway_cpu_ms"],
        "engine_front_growth_ms": on[-1]["engine_front_cpu_ms"] - on[0]["engine_front_cpu_ms"],
        "vllm_growth_ms": vllm[-1]["engine_front_cpu_ms"] - vllm[0]["engine_front_cpu_ms"],
        "uncached_to_cached": off[-1]["gateway_cpu_ms"] / on[-1]["gateway_cpu_ms"],
        "vllm_to_ours": vllm[-1]["engine_front_cpu_ms"] / ours,
        "bytes_share": on[-1]["bytes_to_engine"] / (4 * on[-1]["history_tokens"]),
        "prefix_hits": hits,
        "ids_at_100k": measure_ids(),
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """For people."""
    names = ("history_tokens", "gateway_cpu_ms", "engine_front_cpu_ms", "bytes_to_engine")
    lines = [f"{'cache':5} " + " ".join(f"{name:>19}" for name in names)]
    for row in result["rows"]:
        cells = ("-" if row[name] is None else f"{row[name]:,.{2 if 'ms' in name else 0}f}" for name in names)
        lines.append(f"{row['cache']:5} " + " ".join(f"{cell:>19}" for cell in cells))
    hits, ids = result["prefix_hits"], result["ids_at_100k"]
    longest = f"{LENGTHS[-1]:,} tokens"
    lines += [
        f"growth from {LENGTHS[0]:,}, gateway: {result['growth_ms']:.2f} ms of CPU",
        f"growth from {LENGTHS[0]:,}, engine front: {result['engine_front_growth_ms']:.2f} ms",
        f"growth from {LENGTHS[0]:,}, vLLM's server: {result['vllm_growth_ms']:.2f} ms",
        f"without the cache, {longest}: {result['uncached_to_cached']:.1f} times the gateway's CPU",
        f"vLLM's server, {longest}: {result['vllm_to_ours']:.1f} times the CPU of gateway and engine front together",
        f"bytes to the engine at {longest}: {result['bytes_share']:.2%} of 4 a token",
        f"prefix cache, {hits['turns']} turns: {hits['cached_tokens']:,} of {hits['possible_tokens']:,} tokens",
        f"ids, ms at {longest}: " + ", ".join(f"{name[:-3]} {ids[name]:.2f}" for name in ids if name.endswith("_ms")),
    ]
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.history", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    result = asyncio.run(run())
    sys.stdout.write(table(result) + "\n")
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
