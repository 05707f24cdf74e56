"""Engines for `benchmarks.history`, each in a process of its own."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil

from benchmarks.history_formats import TOOL
from benchmarks.processes import START_TIMEOUT_S, TOKEN, Part, Report, stop
from gateway.local_cluster import free_port

CONTEXT_TOKENS = 131_072
_BLOCK = 32
_KV_GIB = 0.5  # a million tokens of the model with one layer
_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR", "TQDM_DISABLE": "1"}


async def scripted(report: Report, checkpoint: Path) -> None:
    """The scripted engine behind a token link: every answer is a call of the same tool."""
    from inference.link import serve_link
    from inference.scripted import Say, Script, ScriptedEngine
    from inference.tokenizer import load_tokenizer

    call = f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"path": "src/parser/tokens.py"}}}}\n</tool_call>'
    server = await serve_link(ScriptedEngine(load_tokenizer(checkpoint), Script([Say(call)])), "127.0.0.1", 0, TOKEN)
    report(server.address[1])
    await asyncio.Event().wait()


async def real(report: Report, checkpoint: Path) -> None:
    """A real vLLM behind a token link, as in an engine replica. Ends on SIGTERM, its core with it."""
    from inference.link import serve_link
    from inference.vllm import VllmConfig, VllmEngine

    os.environ.update(_QUIET)
    warnings.simplefilter("ignore")
    over = asyncio.Event()
    engine = await VllmEngine.start(
        VllmConfig(
            str(checkpoint), max_model_len=CONTEXT_TOKENS, max_num_seqs=4, block_size=_BLOCK, kv_cache_gib=_KV_GIB
        )
    )
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    server = await serve_link(engine, "127.0.0.1", 0, TOKEN)
    report(server.address[1])
    await over.wait()
    await server.close()
    await engine.close()


@contextmanager
def vllm_server(checkpoint: Path) -> Iterator[Part]:
    """The server that vLLM brings, with its response store and its fast tokenizer on. Yields before it is up: see
    `await_server`. Its process is the API server, the engine's core is a child."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(checkpoint)]
    command += ["--served-model-name", "m", "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"]
    command += ["--enforce-eager", "--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", "4"]
    command += ["--block-size", str(_BLOCK), "--kv-cache-memory-bytes", str(int(_KV_GIB * 2**30))]
    command += ["--uvicorn-log-level", "error", "--disable-uvicorn-access-log"]
    environment = {
        **os.environ,
        **_QUIET,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_RESPONSES_API_STORE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_FASTOKENS": "1",
    }
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)  # noqa: S603  our own words
    started = psutil.Process(process.pid)
    try:
        yield Part(port, started)
    finally:
        stop(started)
        process.wait()


async def await_server(part: Part) -> None:
    """Until the server answers. Raises TimeoutError or RuntimeError."""
    deadline = time.monotonic() + START_TIMEOUT_S
    async with httpx.AsyncClient() as client:
        while time.monotonic() < deadline:
            if not part.process.is_running() or part.process.status() == psutil.STATUS_ZOMBIE:
                raise RuntimeError("vLLM's server did not start; its words are above")
            try:
                if (await client.get(f"http://127.0.0.1:{part.port}/health")).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.5)
    raise TimeoutError("vLLM's server did not come up")
