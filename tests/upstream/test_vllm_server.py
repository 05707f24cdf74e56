"""vLLM's own server as an upstream: one that nobody here wrote, on the CPU with a tiny random model."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.local_cluster import free_port
from gateway.model_loading import upstream_loader
from gateway.settings import ModelSettings
from inference.checkpoint import tiny_random_model
from tests.support.engines import PlannedEngine
from tests.support.gateway import create, gateway, receive, text, turn

pytestmark = pytest.mark.vllm
START_S = 240.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, folder = free_port(), tmp_path_factory.mktemp("vllm")
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(tiny_random_model())]
    command += ["--served-model-name", "tiny", "--host", "127.0.0.1", "--port", str(port), "--api-key", "sesame"]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "4096", "--max-num-seqs", "4"]
    command += ["--block-size", "32", "--kv-cache-memory-bytes", str(100 << 20), "--enable-prompt-tokens-details"]
    command += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with Path(folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env={**os.environ, **ENVIRONMENT}, cwd=folder, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + START_S
        while not _answers(url):
            assert process.poll() is None, Path(folder / "log").read_text(errors="replace")[-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.5)
        yield url
    finally:
        process.terminate()
        process.wait(60)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def loader(url: str, engine: str = "chat", key: str = "sesame") -> Any:
    settings = {"url": f"{url}/v1", "model": "tiny", "keys": [key], "dialect": "vllm"}
    model = {"name": "afar", "engine": engine, "context_length": 4096, "upstream": settings}
    return upstream_loader(ModelSettings.model_validate(model))


@pytest.mark.parametrize("engine", ["chat", "responses"])
async def test_a_conversation_formats_and_an_abort(server: str, engine: str) -> None:
    async with gateway(PlannedEngine(()), models=("ours",), loaders={"afar": loader(server, engine)}) as running:
        async with running.connect() as ws:
            options: dict[str, Any] = {"model": "afar", "max_output_tokens": 16, "instructions": "Be kind. " * 30}
            events = await turn(ws, input="Hello there, how are you?", **options)
            first = events[-1]["response"]
            assert first["status"] in ("completed", "incomplete")
            assert text(events) == "".join(part["text"] for item in first["output"] for part in item["content"])
            second = (await turn(ws, input="And now?", previous_response_id=first["id"], **options))[-1]["response"]
            # vLLM counts, and has what it has seen.
            assert second["usage"]["input_tokens"] > first["usage"]["input_tokens"] > 60
            assert second["usage"]["input_tokens_details"]["cached_tokens"] >= 64

            schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
            form = {
                "type": "json_schema",
                "name": "n",
                "strict": True,
                "schema": {**schema, "additionalProperties": False},
            }
            events = await turn(ws, model="afar", input="Choose.", text={"format": form}, max_output_tokens=64)
            # A random model fills its budget with blanks; but for those it can only write one of two things.
            written = "".join(text(events).split())
            assert written
            assert any(whole.startswith(written) for whole in ('{"a":"x"}', '{"a":"y"}'))

            (refused,) = await turn(ws, model="afar", input="word " * 6000)
            assert refused["error"]["code"] == "context_length_exceeded"

        async with running.connect() as ws:
            await create(ws, model="afar", input="Go on and on.", max_output_tokens=3000)
            while (await receive(ws))["type"] != "response.output_text.delta":
                pass
        async with httpx.AsyncClient(base_url=server) as client, asyncio.timeout(30):
            idle = 'num_requests_running{engine="0",model_name="tiny"} 0.0'
            while idle not in (await client.get("/metrics")).text:  # noqa: ASYNC110 - it offers nothing to wait for
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("engine", ["chat", "responses"])
async def test_a_tool_loop_with_thoughts(server: str, engine: str) -> None:
    """The thoughts are another model's: a random one has none."""
    schema = {"type": "object", "properties": {"a": {"enum": ["x", "y"]}}, "required": ["a"]}
    tool = {"type": "function", "name": "pick", "strict": True, "parameters": {**schema, "additionalProperties": False}}
    options: dict[str, Any] = {"model": "afar", "tools": [tool], "temperature": 0.5}
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "Let me think."}]}
    question = [{"role": "user", "content": "Choose."}, thought, {"role": "assistant", "content": "I will."}]
    async with (
        gateway(PlannedEngine(()), models=("ours",), loaders={"afar": loader(server, engine)}) as running,
        running.connect() as ws,
    ):
        choice = {"type": "function", "name": "pick"}
        events = await turn(ws, input=question, tool_choice=choice, max_output_tokens=200, **options)
        first = events[-1]["response"]
        # A random model may call several times, and fill its budget with blanks inside the last one's JSON, of which
        # vLLM then says that it is {} and complete.
        calls = first["output"]
        assert {(call["type"], call["name"]) for call in calls} == {("function_call", "pick")}
        for call in calls[:-1] if first["status"] == "incomplete" else calls:
            assert call["status"] == "completed"
            assert "".join(call["arguments"].split()) in ('{"a":"x"}', '{"a":"y"}')
        assert "response.function_call_arguments.delta" in {event["type"] for event in events}
        answers = [{"type": "function_call_output", "call_id": call["call_id"], "output": "done"} for call in calls]
        more = {"previous_response_id": first["id"], "max_output_tokens": 16}
        second = (await turn(ws, input=[*answers, {"role": "user", "content": "And?"}], **more, **options))[-1]
        assert second["type"] in ("response.completed", "response.incomplete"), second.get("error")
        assert second["response"]["usage"]["input_tokens"] > first["usage"]["input_tokens"]


async def test_a_wrong_key_is_no_clients_business(server: str) -> None:
    async with (
        gateway(PlannedEngine(()), models=("ours",), loaders={"afar": loader(server, key="wrong")}) as running,
        running.connect() as ws,
    ):
        (refused,) = await turn(ws, model="afar", input="Hi.")
        assert (refused["status"], refused["error"]["code"]) == (500, "engine_unavailable")
        assert "wrong" not in json.dumps(refused)
