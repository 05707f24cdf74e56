"""One way to drive a whole gateway over both transports; whatever comes back passes `tests.support.sdk` first.

A turn gives the same on each: `Result.events`, the last one terminal. An HTTP refusal is shown as the error frame that
it would be on a socket, so that one test holds for both.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import Any
from unittest import mock

import httpx
from websockets.asyncio.client import ClientConnection

from actors.engines import EnginePool
from inference.engine import Chunk, Generation
from inference.formats.chatml import ChatMLFormat, ChatMLOptions
from inference.scripted import Echo, Say, Script, ScriptedEngine, Stall, Step
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support import gateway as support
from tests.support.gateway import TERMINALS, Running
from tests.support.sdk import EventChecker, check_error, check_error_body, check_response

Event = dict[str, Any]
TOKENIZER = scripted_tokenizer()
WAIT_S = 10.0


class Result:
    """What one turn gave."""

    def __init__(self, events: Sequence[Event], headers: Mapping[str, str] | None = None) -> None:
        self.events = list(events)
        self.headers = headers or {}

    @property
    def types(self) -> list[str]:
        return [event["type"] for event in self.events]

    @property
    def last(self) -> Event:
        return self.events[-1]

    @property
    def response(self) -> Event:
        """The terminal's Response object."""
        assert "response" in self.last, self.last
        response: Event = self.last["response"]
        return response

    @property
    def completed(self) -> Event:
        """The same, of a turn that went well."""
        assert self.last["type"] == "response.completed", self.last
        return self.response

    @property
    def id(self) -> str:
        return str(self.response["id"])

    @property
    def error(self) -> Event:
        """The error of a refused turn, with its status."""
        assert self.last["type"] == "error", self.last
        return {"status": self.last["status"], **self.last["error"]}

    @property
    def text(self) -> str:
        """All visible text of the output."""
        parts = [part for item in self.response["output"] for part in item.get("content", ())]
        return "".join(part["text"] for part in parts if part["type"] == "output_text")

    def items(self, kind: str) -> list[Event]:
        return [item for item in self.response["output"] if item["type"] == kind]


class SocketClient:
    """A WebSocket."""

    transport = "socket"
    store = False

    def __init__(self, running: Running, ws: ClientConnection) -> None:
        self.running = running
        self.ws = ws
        self.checker = EventChecker()

    async def send(self, frame: Any) -> None:
        await self.ws.send(frame if isinstance(frame, str | bytes) else json.dumps(frame))

    async def create(self, **body: Any) -> None:
        await self.send({"type": "response.create", "model": "m", "store": self.store, **body})

    async def receive(self, wait_s: float = WAIT_S) -> Event:
        message = await asyncio.wait_for(self.ws.recv(), wait_s)
        assert isinstance(message, str), "a binary frame"
        event: Event = json.loads(message)
        self.checker.feed(event)
        return event

    async def until(self, *types: str, count: int = 1) -> list[Event]:
        """Events up to and with the `count`th of these types."""
        events: list[Event] = []
        while count:
            events.append(await self.receive())
            count -= events[-1]["type"] in types
        return events

    async def finish(self) -> Result:
        """Everything up to the next terminal event."""
        return Result(await self.until(*TERMINALS))

    async def turn(self, **body: Any) -> Result:
        await self.create(**body)
        return await self.finish()

    async def silent(self, seconds: float) -> None:
        """Nothing comes for so long."""
        try:
            event = await self.receive(seconds)
        except TimeoutError:
            return
        raise AssertionError(f"unexpected: {event}")


class HttpClient:
    """`POST /responses`, streamed or not."""

    store = True

    def __init__(self, running: Running, http: httpx.AsyncClient, stream: bool) -> None:
        self.running = running
        self.http = http
        self.stream = stream
        self.transport = "sse" if stream else "json"

    async def turn(self, **body: Any) -> Result:
        body = {"model": "m", "store": self.store, "stream": self.stream, **body}
        answer = await self.http.post("/responses", json=body)
        assert answer.headers["x-request-id"]
        if answer.status_code != 200:
            return refused(answer)
        if self.stream:
            comments = str(answer.text.count("\n\n: ") + answer.text.startswith(": "))
            return Result(sse_events(answer.text), {**answer.headers, "x-comments": comments})
        response = answer.json()
        check_response(response)
        return Result([{"type": f"response.{response['status']}", "response": response}], answer.headers)


Client = SocketClient | HttpClient


def refused(answer: httpx.Response) -> Result:
    """An HTTP refusal as an error frame."""
    body = answer.json()
    check_error_body(body["error"])
    assert body.keys() == {"error"}
    assert body["error"].keys() == {"message", "type", "param", "code"}
    frame = {"type": "error", "status": answer.status_code, **body}
    check_error(frame)
    return Result([frame], answer.headers)


def sse_events(raw: str) -> list[Event]:
    """The events of an SSE body, its framing checked (6.2): `event` equals the type, no ids, `[DONE]` last."""
    blocks = [block for block in raw.split("\n\n") if block and not block.startswith(":")]
    assert blocks.pop() == "data: [DONE]"
    checker, events = EventChecker(), []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        checker.feed(event)
        events.append(event)
    assert not checker.running, "a response without its terminal event"
    return events


@cache
def thinking_format() -> ChatMLFormat:
    """A model that writes `<think>` blocks."""
    return ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=True, keeps_thinking=True))


@asynccontextmanager
async def serving(
    engine: Any, settings: Mapping[str, Any] | None = None, *, thinking: bool = False, **options: Any
) -> AsyncIterator[Running]:
    """A whole gateway in front of this engine."""
    chat = thinking_format() if thinking else support._chat()
    pool = partial(EnginePool, patience_s=0.2)
    with mock.patch.multiple(support, _chat=lambda: chat, EnginePool=pool):
        async with support.gateway(engine, settings, **options) as running:
            yield running


@asynccontextmanager
async def connected(running: Running, transport: str = "socket", key: str = "k") -> AsyncIterator[Any]:
    """A client of a running gateway."""
    headers = {"authorization": f"Bearer {key}"}
    if transport == "socket":
        async with running.connect(additional_headers=headers) as ws:
            yield SocketClient(running, ws)
    else:
        async with httpx.AsyncClient(base_url=running.http, headers=headers, timeout=WAIT_S) as http:
            yield HttpClient(running, http, transport == "sse")


@asynccontextmanager
async def client(
    engine: Any, transport: str = "socket", settings: Mapping[str, Any] | None = None, **options: Any
) -> AsyncIterator[Any]:
    """Both at once."""
    async with serving(engine, settings, **options) as running, connected(running, transport) as one:
        yield one


def says(*steps: str | Step, **pace: Any) -> ScriptedEngine:
    """An engine with one answer for everything: texts, and what else a script can do."""
    return ScriptedEngine(TOKENIZER, script(*steps, **pace))


def script(*steps: str | Step, **pace: Any) -> Script:
    return Script(tuple(Say(step) if isinstance(step, str) else step for step in steps), **pace)


def slowly(words: str = "one two three four five six", seconds: float = 0.02) -> ScriptedEngine:
    """Words with a pause after each."""
    steps: list[str | Step] = []
    for word in words.split():
        steps += [f"{word} ", Stall(seconds)]
    return says(*steps)


def digest() -> ScriptedEngine:
    """Answers with a digest of the whole prompt."""
    return says(Echo())


def prompt_text(generation: Generation) -> str:
    """A prompt as text, control tokens spelled out."""
    return b"".join(TOKENIZER.token_bytes(token) for token in unpack_ids(generation.prompt)).decode()


class Gated:
    """An engine that says one word, then waits until it is let go."""

    def __init__(self, word: str = "word") -> None:
        self.open = asyncio.Event()
        self.running = 0
        self.aborted = 0
        self.inner = says(word)

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        self.running += 1
        done = False
        try:
            async for chunk in self.inner.generate(generation):
                yield chunk
                if chunk.finish is None:
                    await self.open.wait()
            done = True
        finally:
            self.running -= 1
            self.aborted += not done

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


async def eventually(condition: Any, seconds: float = 30.0) -> None:
    """Fails if the condition doesn't hold within so long."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - any condition
            await asyncio.sleep(0.01)


CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>'


def call(name: str, arguments: str = "{}") -> str:
    """A tool call as the model writes it."""
    return CALL.format(name, arguments)


def function(name: str = "get_weather", **more: Any) -> Event:
    """A function tool."""
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    return {"type": "function", "name": name, "parameters": schema, **more}
