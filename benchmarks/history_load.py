"""What `benchmarks.history` asks: conversations of a given length, and clients that go on with them turn by turn."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import httpx
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.history_formats import TOOL

TURN_TOKENS = 265
"""About what a turn adds, scaffolding included: `NEW_TOKENS` from outside and a short answer."""
NEW_TOKENS = 200
_ANSWER_TOKENS = 40
_CHARS_PER_TOKEN = 4.3  # of this vocabulary and this text
_TOOLS = [
    {
        "type": "function",
        "name": TOOL,
        "description": "Show a file of the project.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]},
    }
]
_TERMINALS = ("response.completed", "response.incomplete", "response.failed", "error")


def text(tokens: int, seed: int) -> str:
    """About so many tokens of source code, as an agent's tools show it; always the same for a seed."""
    whole = _sources()
    size = int(tokens * _CHARS_PER_TOKEN)
    start = seed * size % (len(whole) - size)
    return whole[start : start + size]


@cache
def _sources() -> str:
    folder = Path(asyncio.__file__).parent
    return "".join(file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.py")))


def question(seed: int) -> dict[str, Any]:
    """A user message."""
    return {"role": "user", "content": text(NEW_TOKENS, seed)}


def talk_history(tokens: int) -> list[dict[str, Any]]:
    """Messages, ending with a user's. A longer one begins with the shorter one."""
    items = [question(0)]
    for turn in range(1, tokens // TURN_TOKENS):
        items += [{"role": "assistant", "content": text(_ANSWER_TOKENS, turn)}, question(turn)]
    return items


def following(response: dict[str, Any], seed: int) -> list[dict[str, Any]]:
    """The items that continue a response: results of its calls, or else a message of the user."""
    calls = [item["call_id"] for item in response["output"] if item["type"] == "function_call"]
    results = [{"type": "function_call_output", "call_id": call, "output": text(NEW_TOKENS, seed)} for call in calls]
    return results or [question(seed)]


class Client(Protocol):
    """Runs turns, one after the other."""

    async def respond(self, given: list[dict[str, Any]], previous: str | None) -> dict[str, Any]:
        """The response to these items, which continue an earlier response. Raises RuntimeError for a failed one."""
        ...


@dataclass(slots=True)
class SocketClient:
    """An agent on the gateway's WebSocket. `most` bounds the output tokens; `tools` are offered or not."""

    port: int
    most: int | None = None
    tools: bool = False
    _socket: ClientConnection | None = None

    async def __aenter__(self) -> Self:
        url = f"ws://127.0.0.1:{self.port}/v1/responses"
        self._socket = await connect(url, max_size=None, compression=None, ping_interval=None)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._socket is not None
        await self._socket.close()

    async def respond(self, given: list[dict[str, Any]], previous: str | None) -> dict[str, Any]:
        assert self._socket is not None
        body: dict[str, Any] = {"type": "response.create", "model": "m", "store": False, "input": given}
        body |= {"max_output_tokens": self.most} if self.most else {}
        body |= {"tools": _TOOLS} if self.tools else {}
        await self._socket.send(json.dumps(body | {"previous_response_id": previous}))
        while True:
            message = str(await self._socket.recv())
            if message.startswith(tuple(f'{{"type":"{name}"' for name in _TERMINALS)):
                return _sound(json.loads(message))


@dataclass(slots=True)
class HttpClient:
    """The same on the server that vLLM brings: HTTP, streaming, responses stored as `previous_response_id` needs it."""

    port: int
    most: int
    _client: httpx.AsyncClient | None = None

    async def __aenter__(self) -> Self:
        self._client = httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.port}", timeout=300)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._client is not None
        await self._client.aclose()

    async def respond(self, given: list[dict[str, Any]], previous: str | None) -> dict[str, Any]:
        assert self._client is not None
        body = {"model": "m", "store": True, "stream": True, "input": given, "max_output_tokens": self.most}
        answer = await self._client.post("/v1/responses", json=body | {"previous_response_id": previous})
        if answer.status_code != 200:
            raise RuntimeError(f"HTTP {answer.status_code}: {answer.text[:300]}")
        lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
        return _sound(json.loads(lines[-1].removeprefix("data: ")))


def _sound(event: dict[str, Any]) -> dict[str, Any]:
    if event["type"] not in ("response.completed", "response.incomplete"):
        raise RuntimeError(f"a turn ended with {event['type']}: {json.dumps(event)[:300]}")
    response: dict[str, Any] = event["response"]
    return response
