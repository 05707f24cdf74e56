"""What one turn and one token cost in the session actor, next to a bare `websockets` server in the same run.

    python -m benchmarks.turn [--json]

Three processes on loopback: scripted engine, session actor (uvicorn, no Serve, no HAProxy) and bare server; the client
is this one. CPU times are of the named process alone. The budgets are those of docs/design.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from websockets.asyncio.client import ClientConnection, connect

from benchmarks.processes import TOKEN, Part, engine, floor, gateway, running
from inference.engine import Generation, Sampling
from inference.link import LinkEngine
from inference.tokenizer import scripted_tokenizer

LOADS = ((1000.0, 8), (1000.0, 1), (4000.0, 1))
"""Tokens a second of each stream, and streams at once. The last one gives the figures at the top level."""
SHORT, LONG = 32, 2000
SHORT_TURNS, LONG_TURNS = 150, 4
SOCKETS = 1000
FRAME_BYTES = 190
BUDGETS = {"cpu_ms_per_turn": 3.0, "cpu_us_per_token": 20.0, "added_ttft_ms": 1.5, "idle_socket_kib": 25.0}


async def one_turn(ws: ClientConnection, tokens: int, previous: str | None) -> tuple[str, float]:
    """Run a turn of so many tokens; its response id and the seconds to its first text."""
    body = {"type": "response.create", "model": "m", "store": False, "input": f"Say {tokens}"}
    start = time.perf_counter()
    await ws.send(json.dumps(body if previous is None else body | {"previous_response_id": previous}))
    first = 0.0
    async for message in ws:
        if not first and '"response.output_text.delta"' in str(message)[:60]:
            first = time.perf_counter() - start
        if str(message).startswith('{"type":"response.completed"'):
            found: str = json.loads(message)["response"]["id"]
            return found, first
    raise ConnectionError("the gateway closed the socket")


async def chain(port: int, tokens: int, turns: int) -> list[float]:
    """Turns that continue each other on one socket; the times to first text."""
    previous, firsts = None, []
    async with connect(f"ws://127.0.0.1:{port}/v1/responses", max_size=None, compression=None) as ws:
        for _ in range(turns):
            previous, first = await one_turn(ws, tokens, previous)
            firsts.append(first)
    return firsts


async def direct(port: int, turns: int) -> list[float]:
    """Seconds to the first chunk when the engine is asked without a gateway, on a warm link."""
    vocabulary = scripted_tokenizer()
    prompt = vocabulary.encode(f"Say {SHORT}")
    link = LinkEngine(("127.0.0.1", port), TOKEN)
    firsts: list[float] = []
    for index in range(turns):
        start = time.perf_counter()
        async for chunk in link.generate(Generation(f"direct-{index}", "m", (prompt,), Sampling(max_tokens=SHORT))):
            if chunk.ids and len(firsts) == index:
                firsts.append(time.perf_counter() - start)
    await link.close()
    return firsts


async def cpu_of(part: Part, work: Callable[[], Any]) -> float:
    """CPU seconds the process used while the work ran."""
    before = part.thread_cpu_s()
    await work()
    return part.thread_cpu_s() - before


async def listen(port: int, frames: int, rate: float) -> None:
    """Have the bare server send so many frames."""
    async with connect(f"ws://127.0.0.1:{port}", max_size=None, compression=None) as ws:
        await ws.send(f"{frames} {rate}")
        for _ in range(frames):
            await ws.recv()


async def measure(rate: float, streams: int, gate: Part, source: Part, bare: Part) -> dict[str, float]:
    """One row: everything at one load."""
    await chain(gate.port, SHORT, 10)
    firsts: list[float] = []

    async def chains(tokens: int, turns: int) -> None:
        for part in await asyncio.gather(*(chain(gate.port, tokens, turns) for _ in range(streams))):
            firsts.extend(part if tokens == SHORT else ())

    short, long = SHORT_TURNS // streams, LONG_TURNS
    turn_cpu = await cpu_of(gate, lambda: chains(SHORT, short)) / short / streams
    long_cpu = await cpu_of(gate, lambda: chains(LONG, long)) / long / streams
    alone = await direct(source.port, SHORT_TURNS)
    frames = LONG * long

    async def echo() -> None:
        await asyncio.gather(*(listen(bare.port, frames, rate) for _ in range(streams)))

    return {
        "tokens_per_second": rate,
        "streams": streams,
        "cpu_ms_per_turn": turn_cpu * 1e3,
        "cpu_us_per_token": (long_cpu - turn_cpu) / (LONG - SHORT) * 1e6,
        "ttft_ms": statistics.median(firsts) * 1e3,
        "added_ttft_ms": (statistics.median(firsts) - statistics.median(alone)) * 1e3,
        "floor_cpu_us_per_frame": await cpu_of(bare, echo) / frames / streams * 1e6,
    }


async def idle_sockets(part: Part, path: str) -> float:
    """KiB per open, idle socket."""
    url = f"ws://127.0.0.1:{part.port}{path}"
    warm = await asyncio.gather(*(connect(url, compression=None) for _ in range(50)))
    before = part.memory_kib()
    sockets = []
    for _ in range(SOCKETS // 100):
        sockets += await asyncio.gather(*(connect(url, compression=None) for _ in range(100)))
    await asyncio.sleep(0.5)
    grown = part.memory_kib() - before
    await asyncio.gather(*(ws.close() for ws in (*warm, *sockets)))
    return grown / SOCKETS


async def run() -> dict[str, Any]:
    """All rows, and the figures of the last load at the top level."""
    rows = []
    idle = floor_idle = 0.0
    with running(floor, FRAME_BYTES) as bare:
        for rate, streams in LOADS:
            with running(engine, rate) as source, running(gateway, source.port) as gate:
                rows.append(await measure(rate, streams, gate, source, bare))
                if (rate, streams) == LOADS[-1]:
                    idle = await idle_sockets(gate, "/v1/responses")
        floor_idle = await idle_sockets(bare, "/")
    top = {key: value for key, value in rows[-1].items() if key not in ("tokens_per_second", "streams")}
    return {**top, "idle_socket_kib": idle, "floor_idle_socket_kib": floor_idle, "rows": rows}


def table(result: dict[str, Any]) -> str:
    """For people."""
    names = f"{'CPU ms/turn':>12} {'CPU us/token':>13} {'added TTFT ms':>14} {'floor us/frame':>15}"
    lines = [f"{'streams':>7} x {'tok/s':>6} {names}"]
    lines += [
        f"{row['streams']:7.0f} x {row['tokens_per_second']:6.0f} {row['cpu_ms_per_turn']:12.2f} "
        f"{row['cpu_us_per_token']:13.1f} {row['added_ttft_ms']:14.2f} {row['floor_cpu_us_per_frame']:15.1f}"
        for row in result["rows"]
    ]
    lines.append(f"idle socket: {result['idle_socket_kib']:.1f} KiB (bare: {result['floor_idle_socket_kib']:.1f} KiB)")
    for key, budget in BUDGETS.items():
        lines.append(f"{key}: {result[key]:.2f} of {budget:g} budgeted ({result[key] / budget:.0%})")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.turn", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    result = asyncio.run(run())
    sys.stdout.write(table(result) + "\n")
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
