"""How fast tokens get from an engine to a client, how late they are, what that costs, and how soon an engine stops.

    python -m benchmarks.stream [--json]

Every part is a process on loopback: the scripted engine behind a token link, a session actor (uvicorn, no Serve, no
HAProxy), a bare `websockets` server on the same schedule, and this one, the client of both.

- One session at 4,000 tokens a second, a chunk and a delta each: the lag of a token is the time from when it was due,
  by the engine's own clock, to when it is here. Rounds take turns with the bare server's. Where other programs keep our
  processes waiting for a CPU, lag is theirs; so the figures are medians of the third of the rounds in which ours, the
  engine's included, waited least, and of all rounds beside them.
- The link alone, next to pyzmq and grpc.aio with the same frames, and to the scripted engine without any way between:
  CPU times of both ends, the engine's own work included.
- Aborts: from closing the socket, from `response.interrupt` and from closing the link's iterator, to when the engine's
  iterator is closed.

Needs pyzmq and grpcio, which come with vLLM and Ray. Takes less than three minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import uvloop

from benchmarks.processes import Part, gateway, running, this_process
from benchmarks.stream_link import COMPARED, IN_TOTAL, link_aborts, measure_transports
from benchmarks.stream_parts import bare, source
from benchmarks.stream_session import aborts, behind, listen, paced, paced_bare, together, unpaced
from benchmarks.turn import FRAME_BYTES

RATE = 4_000
TOKENS = 2_000  # of a round
ROUNDS = 24
FAST_TOKENS, FAST_ROUNDS = 20_000, 3
BEHIND_TOKENS, BEHIND_S = 60_000, 2.0  # 10 MB of deltas, more than socket buffers hold
MANY, MANY_TOKENS, MANY_RATE = 8, 1_000, 1_000
TRANSPORTS = ("link", "pyzmq", "grpc.aio", "none")
LAG_BUDGET_MS, PER_CORE_BUDGET = 5.0, 25_000
Figures = dict[str, float]


class _Waiting:
    """How long some processes were kept waiting for a CPU."""

    def __init__(self, *parts: Part) -> None:
        self._parts = parts
        self._before = self._now()

    def _now(self) -> float:
        return sum(part.kept_waiting_s() for part in self._parts)

    def ms(self) -> float:
        """Since this was made."""
        return (self._now() - self._before) * 1e3


async def one_session(gate: Part, engine: Part, server: Part) -> dict[str, Figures]:
    """Rounds of the session actor and of the bare server, in turn."""
    us = this_process()
    ours: list[Figures] = []
    floors: list[Figures] = []
    for _ in range(ROUNDS):
        waiting = _Waiting(us, server)
        floors.append(await paced_bare(server, TOKENS, RATE))
        floors[-1]["kept_waiting_ms"] = waiting.ms()
        waiting = _Waiting(us, gate, engine)
        ours.append(await paced(gate, engine, TOKENS, RATE))
        ours[-1]["kept_waiting_ms"] = waiting.ms()
    return {
        "session": medians(quietest(ours)),
        "session_all_rounds": medians(ours),
        "bare": medians(quietest(floors)),
        "bare_all_rounds": medians(floors),
    }


def quietest(rounds: Sequence[Figures]) -> list[Figures]:
    """The third that was kept waiting least."""
    return sorted(rounds, key=lambda one: one["kept_waiting_ms"])[: len(rounds) // 3]


def medians(rounds: Sequence[Figures]) -> Figures:
    """Of each figure by itself."""
    return {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}


async def run() -> dict[str, Any]:
    """Everything, and what was promised at the top level."""
    with ExitStack() as parts:
        server = parts.enter_context(running(bare, FRAME_BYTES))
        engine = parts.enter_context(running(source, "link"))
        gate = parts.enter_context(running(gateway, engine.port))
        await listen(gate, 500, 0)
        one = await one_session(gate, engine, server)
        fast = medians([await unpaced(gate, FAST_TOKENS) for _ in range(FAST_ROUNDS)])
        slow = await behind(gate, BEHIND_TOKENS, BEHIND_S)
        many = medians([await together(gate, MANY, MANY_TOKENS, MANY_RATE) for _ in range(FAST_ROUNDS)])
        stopped = {
            "close": await aborts(gate, engine, "close"),
            "interrupt": await aborts(gate, engine, "interrupt"),
            "link": await link_aborts(engine),
        }
    rows = await measure_transports(TRANSPORTS)
    total = next(row for row in rows if _is(row, "link", IN_TOTAL))
    return {
        "one_session_tok_s": one["session"]["held_tok_s"],
        "p99_lag_ms": one["session"]["p99_lag_ms"],
        "tok_s_per_core": total["tok_s_per_core"],
        "cpu_us_per_token": total["client_cpu_us"] + total["engine_cpu_us"],
        "abort_ms": statistics.median(stopped["close"]),
        "one_session": one,
        "one_session_unpaced": fast,
        "client_behind": slow,
        "sessions_together": many,
        "aborts": {
            name: {"median_ms": statistics.median(taken), "worst_ms": max(taken)} for name, taken in stopped.items()
        },
        "transports": rows,
        "load_average": os.getloadavg()[0],
    }


def _is(row: dict[str, Any], transport: str, load: tuple[int, int, int]) -> bool:
    return (row["transport"], row["streams"], row["rate"]) == (transport, load[0], load[2])


def table(result: dict[str, Any]) -> str:
    """For people."""
    return "\n".join((*_session_lines(result), "", *_transport_lines(result), "", *_summary_lines(result)))


def _session_lines(result: dict[str, Any]) -> list[str]:
    names = ("held_tok_s", "p50_lag_ms", "p99_lag_ms", "worst_lag_ms", "kept_waiting_ms")
    lines = [f"{'one at 4,000 tok/s':20}" + "".join(f"{name:>17}" for name in names)]
    for name, figures in result["one_session"].items():
        lines.append(f"{name:20}" + "".join(f"{figures[key]:17,.2f}" for key in names))
    ours, fast, many = result["one_session"]["session"], result["one_session_unpaced"], result["sessions_together"]
    floor = result["one_session"]["bare"]
    cpu, floor_cpu = ours["session_cpu_us_per_token"], floor["cpu_us_per_frame"]
    lines += [
        f"made to seen: p50 {ours['path_p50_ms']:.2f} ms, p99 {ours['path_p99_ms']:.2f} ms",
        f"the engine itself is late: p99 {ours['engine_p99_lag_ms']:.2f} ms",
        f"tokens a delta: {ours['tokens_per_delta']:.3f}",
        f"session actor: {cpu:.1f} us of CPU a token, {cpu / floor_cpu:.2f} times the bare server's {floor_cpu:.1f}",
        f"{MANY} sessions, {many['tok_s']:,.0f} tok/s together: {many['session_cpu_us_per_token']:.1f} us a token",
        f"as fast as it goes: {fast['tok_s']:,.0f} tok/s, {fast['tokens_per_delta']:.2f} tokens a delta",
        f"for a client that is behind: {result['client_behind']['tokens_per_delta']:.2f} tokens a delta",
    ]
    return lines


def _transport_lines(result: dict[str, Any]) -> list[str]:
    names = ("tok_s", "tokens_per_chunk", "client_cpu_us", "engine_cpu_us", "tok_s_per_core")
    lines = [f"{'transport':9} {'streams':>7} x {'tok/s':>6}" + "".join(f"{name:>17}" for name in names)]
    for row in result["transports"]:
        cells = "".join(f"{row[name]:17,.{0 if 'tok_s' in name else 2}f}" for name in names)
        lines.append(f"{row['transport']:9} {row['streams']:7} x {row['rate'] or 'most':>6}" + cells)
    for load in COMPARED:
        link = next(row for row in result["transports"] if _is(row, "link", load))
        others = [row for row in result["transports"] if _is(row, row["transport"], load) and row is not link]
        ratios = ", ".join(f"{row['transport']} {_cpu(row) / _cpu(link):.2f}" for row in others)
        lines.append(f"CPU of both ends to the link's, {load[0]} x {load[2] or 'most'}: {ratios}")
    return lines


def _cpu(row: dict[str, Any]) -> float:
    both: float = row["client_cpu_us"] + row["engine_cpu_us"]
    return both


def _summary_lines(result: dict[str, Any]) -> list[str]:
    return [
        *(
            f"abort by {name}: median {taken['median_ms']:.2f} ms, worst {taken['worst_ms']:.2f} ms"
            for name, taken in result["aborts"].items()
        ),
        f"one_session_tok_s: {result['one_session_tok_s']:,.0f} of {RATE:,} scheduled",
        f"p99_lag_ms: {result['p99_lag_ms']:.2f} of {LAG_BUDGET_MS:g} budgeted",
        f"tok_s_per_core: {result['tok_s_per_core']:,.0f}, at least {PER_CORE_BUDGET:,} wanted",
        f"cpu_us_per_token: {result['cpu_us_per_token']:.1f}, both ends and the scripted engine",
        f"abort_ms: {result['abort_ms']:.2f}",
        f"load average: {result['load_average']:.1f} on {os.cpu_count()} CPUs",
    ]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.stream", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args()
    result = uvloop.run(run())
    sys.stdout.write(table(result) + "\n")
    if options.json:
        sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
