"""Upstreams for tests: a Cerebras and a server of OpenAI's chat completions, strict and as faulty as a test wants.

Written from the documented APIs (spec/cerebras.md; cerebras-cloud-sdk 1.91.0, types/*; OpenAI's chat completions): what
is not documented is refused, as are messages in an order that real servers refuse. A test gives the answers; each says
what happens at which step.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
import uvicorn
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

KEY = "csk-test-key-4711"
MODEL = "gpt-oss-120b"
INTEGRATION_HEADERS = {"x-cerebras-3rd-party-integration": "a-test"}
DONE = b"data: [DONE]\n\n"


class Strict(BaseModel):
    """Unknown fields are refused, and nothing is converted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    def check(self) -> None:
        """Raises ValueError for what a server refuses though its form is right."""


class StreamOptions(Strict):
    include_usage: bool | None = None


class CompletionRequest(Strict):
    """`POST /v1/completions` at Cerebras, the part for one prompt of ids or text."""

    model: str
    prompt: str | list[Annotated[int, Field(ge=0)]]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    min_tokens: int | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    user: str | None = None
    logprobs: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_raw_tokens: bool | None = None
    prompt_cache_key: str | None = None


class CallFunction(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    arguments: str


class MessageCall(Strict):
    id: str
    type: Literal["function"]
    function: CallFunction


class TextPart(Strict):
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    url: str
    detail: str | None = None


class ImagePart(Strict):
    type: Literal["image_url"]
    image_url: ImageUrl


class SystemMessage(Strict):
    role: Literal["system"]
    content: str | list[TextPart]


class DeveloperMessage(Strict):
    role: Literal["developer"]
    content: str | list[TextPart]


class UserMessage(Strict):
    role: Literal["user"]
    content: str | list[Annotated[TextPart | ImagePart, Field(discriminator="type")]]


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: str | list[TextPart] | None = None
    tool_calls: Annotated[list[MessageCall], Field(min_length=1)] | None = None


class ReasoningAssistantMessage(AssistantMessage):
    """Cerebras: thoughts go back as `reasoning`, and under no other name (bugs.md O-87)."""

    reasoning: str | None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: str | list[TextPart]
    tool_call_id: str


class ToolFunction(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    type: Literal["function"]
    function: ToolFunction


class NamedFunction(Strict):
    name: str


class NamedChoice(Strict):
    type: Literal["function"]
    function: NamedFunction


class Schema(Strict):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: Schema | None = None


Choice = Literal["none", "auto", "required"] | NamedChoice


class ChatRequest(Strict):
    """What servers of chat completions have in common."""

    model: str
    messages: Annotated[
        list[Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]],
        Field(min_length=1),
    ]
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: Annotated[list[Tool], Field(min_length=1)] | None = None
    tool_choice: Choice | None = None
    response_format: ResponseFormat | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    def check(self) -> None:
        check_order(self.messages)


class CerebrasChatRequest(ChatRequest):
    """`POST /v1/chat/completions` at Cerebras, for gpt-oss."""

    messages: Annotated[  # type: ignore[assignment]
        list[
            Annotated[
                SystemMessage | DeveloperMessage | UserMessage | ReasoningAssistantMessage | ToolMessage,
                Field(discriminator="role"),
            ]
        ],
        Field(min_length=1),
    ]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "low", "medium", "high"] | None = None
    reasoning_format: Literal["none", "parsed", "text_parsed", "raw", "hidden"] | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default", "flex", "priority"] | None = None
    tool_choice: Literal["none", "auto"] | None = None  # bugs.md O-88


@dataclass(frozen=True, slots=True)
class Stall:
    """Nothing more comes, until the client goes away."""


@dataclass(frozen=True, slots=True)
class Pause:
    """Nothing comes for a while."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection breaks."""


Step = bytes | Mapping[str, Any] | Stall | Pause | Cut
"""Bytes go out as they are, one write each; an object is an event of its own."""


@dataclass(slots=True)
class Answer:
    """One answer: its status and headers after `delay_s`, then the steps. Other statuses have `body` instead."""

    steps: Sequence[Step] = ()
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Any = None
    delay_s: float = 0.0
    kind: str = "text/event-stream; charset=utf-8"
    done: bool = True


@dataclass(slots=True)
class Seen:
    """A request that was understood."""

    path: str
    headers: dict[str, str]
    fields: dict[str, Any]
    size: int


class Broken(Exception):
    """Ends a connection in the middle of an answer."""


class Upstream:
    """A server. `answers` are given out in order; `requests` are those that were in form; `aborted` is set when a
    client goes away before its answer's end, and `written` counts the steps that went out."""

    def __init__(
        self, schemas: Mapping[str, type[Strict]], *, wrapped: bool, unknown_status: int, integration: bool
    ) -> None:
        self.schemas = schemas
        self.base_url = ""
        self.reset()
        self._wrapped = wrapped
        self._unknown_status = unknown_status
        self._integration = integration

    def reset(self) -> None:
        """As new, for the next test."""
        self.answers: list[Answer] = []
        self.requests: list[Seen] = []
        self.refused: list[str] = []
        self.aborted = asyncio.Event()
        self.stalled = asyncio.Event()
        self.written = 0
        self.warmed = 0
        self.touched = asyncio.Event()
        self.connections: set[tuple[str, int]] = set()
        self.models = [MODEL]
        self.keys = {KEY}

    def answer(self, *steps: Step, **options: Any) -> None:
        """The next answer."""
        self.answers.append(Answer(steps, **options))

    def app(self) -> Starlette:
        routes = [Route(f"/v1/{path}", self._ask, methods=["POST"]) for path in self.schemas]
        routes += [Route("/v1/models", self._list), Route("/v1/tcp_warming", self._warm)]
        return Starlette(routes=routes)

    async def _warm(self, request: Request) -> Response:
        self._note(request)
        self.warmed += 1
        self.touched.set()
        return JSONResponse({})

    async def _list(self, request: Request) -> Response:
        self._note(request)
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.keys:
            return self._refuse(401, "wrong key", "wrong_api_key")
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})

    async def _ask(self, request: Request) -> Response:
        self._note(request)
        raw = await request.body()
        if request.headers.get("authorization", "").removeprefix("Bearer ") not in self.keys:
            return self._refuse(401, f"wrong key, {KEY[:8]} expected", "wrong_api_key")
        if self._integration and "x-cerebras-3rd-party-integration" not in request.headers:
            return self._refuse(400, "no integration header", "missing_header")
        path = request.url.path.removeprefix("/v1/")
        try:
            fields = _decoded(raw, request.headers)
            self.schemas[path].model_validate_json(json.dumps(fields)).check()
        except ValidationError as error:
            first = error.errors()[0]
            unknown = first["type"] in ("extra_forbidden", "literal_error")
            param = ".".join(map(str, first["loc"]))
            return self._refuse(self._unknown_status if unknown else 400, first["msg"], "wrong_api_format", param)
        except ValueError as error:
            return self._refuse(400, str(error), "wrong_api_format")
        if fields["model"] not in self.models:
            return self._refuse(404, "no such model", "model_not_found")
        self.requests.append(Seen(path, dict(request.headers), fields, len(raw)))
        answer = self.answers.pop(0)
        if answer.delay_s:
            await asyncio.sleep(answer.delay_s)
        if answer.status != 200:
            return JSONResponse(answer.body or {}, answer.status, headers=dict(answer.headers))
        return StreamingResponse(self._play(answer), headers=dict(answer.headers), media_type=answer.kind)

    async def _play(self, answer: Answer) -> AsyncIterator[bytes]:
        finished = False
        try:
            for step in answer.steps:
                if isinstance(step, Stall):
                    self.stalled.set()
                    await asyncio.Event().wait()
                elif isinstance(step, Pause):
                    await asyncio.sleep(step.seconds)
                elif isinstance(step, Cut):
                    finished = True
                    raise Broken
                else:
                    yield step if isinstance(step, bytes) else event(step)
                    self.written += 1
                    await asyncio.sleep(0)
            if answer.done:
                yield DONE
            finished = True
        finally:
            if not finished:
                self.aborted.set()

    def _note(self, request: Request) -> None:
        assert request.client is not None
        self.connections.add((request.client.host, request.client.port))

    def _refuse(self, status: int, message: str, code: str, param: str | None = None) -> Response:
        self.refused.append(f"{status} {param or code}: {message}")
        body = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
        return JSONResponse({"error": body} if self._wrapped else body, status)


def _decoded(raw: bytes, headers: Mapping[str, str]) -> dict[str, Any]:
    if (encoding := headers.get("content-encoding")) is not None:
        if encoding != "gzip":
            raise ValueError(f"content-encoding {encoding}")
        raw = gzip.decompress(raw)
    kind = headers.get("content-type")
    if kind == "application/vnd.msgpack":
        fields = msgspec.msgpack.decode(raw)
    elif kind == "application/json":
        fields = json.loads(raw)
    else:
        raise ValueError(f"content-type {kind}")
    if not isinstance(fields, dict) or not fields.get("stream"):
        raise ValueError("this server only streams")
    return fields


def check_order(messages: Sequence[Any]) -> None:
    """What servers demand of the order: right behind calls stand their outputs, all of them and no others."""
    waiting: list[str] = []
    for at, message in enumerate(messages):
        if message.role == "tool":
            if message.tool_call_id not in waiting:
                raise ValueError(f"messages[{at}] answers no call")
            waiting.remove(message.tool_call_id)
            continue
        if waiting:
            raise ValueError(f"messages[{at}] stands where an output is missing")
        if message.role == "assistant":
            calls = message.tool_calls or []
            if not calls and not message.content and not getattr(message, "reasoning", None):
                raise ValueError(f"messages[{at}] is empty")
            for call in calls:
                if not isinstance(json.loads(call.function.arguments), dict):
                    raise ValueError(f"messages[{at}] has arguments that are no object")  # noqa: TRY004
            waiting = [call.id for call in calls]
    if waiting:
        raise ValueError("an output is missing at the end")


def cerebras_upstream() -> Upstream:
    """Cerebras, with gpt-oss. Its error bodies have no wrapper; what it does not know is a 422."""
    schemas: dict[str, type[Strict]] = {"completions": CompletionRequest, "chat/completions": CerebrasChatRequest}
    return Upstream(schemas, wrapped=False, unknown_status=422, integration=True)


def openai_upstream() -> Upstream:
    """A server that knows what all have in common, and not one field more."""
    return Upstream({"chat/completions": ChatRequest}, wrapped=True, unknown_status=400, integration=False)


@asynccontextmanager
async def serving(upstream: Upstream) -> AsyncIterator[Upstream]:
    """The server in the test's own loop, on a port of its own."""
    config = uvicorn.Config(
        upstream.app(), host="127.0.0.1", port=0, lifespan="off", log_config=None, timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined,method-assign]
    task = asyncio.create_task(server._serve(), name="upstream")
    while not server.started:
        if task.done():
            task.result()
        await asyncio.sleep(0.002)
    port = server.servers[0].sockets[0].getsockname()[1]
    upstream.base_url = f"http://127.0.0.1:{port}/v1"
    try:
        yield upstream
    finally:
        server.should_exit = server.force_exit = True
        await task


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Any]


@asynccontextmanager
async def raw_server(handler: Handler) -> AsyncIterator[str]:
    """A server below HTTP: its handler has the connection. Yields the base URL."""
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            await handler(reader, writer)
        except (asyncio.CancelledError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.wait_closed()


def event(chunk: Mapping[str, Any]) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(chunk, ensure_ascii=False).encode() + b"\n\n"


def completion(tokens: Sequence[int] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of `/v1/completions` with `return_raw_tokens`."""
    choice = {"index": 0, "text": None, "tokens": tokens and list(tokens), "logprobs": None, "finish_reason": finish}
    return {
        "id": "cmpl-1",
        "object": "text_completion",
        "created": 1_796_000_000,
        "model": MODEL,
        "system_fingerprint": "fp_1",
        "choices": [choice],
        **more,
    }


def chat(delta: Mapping[str, Any] | None = None, finish: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of `/v1/chat/completions`."""
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_796_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "delta": dict(delta or {}), "finish_reason": finish, "logprobs": None}],
        **more,
    }


def call(index: int, arguments: str = "", *, name: str | None = None, call_id: str | None = None) -> dict[str, Any]:
    """The delta of one fragment of a call."""
    function: dict[str, Any] = {"arguments": arguments} if name is None else {"name": name, "arguments": arguments}
    fragment: dict[str, Any] = {"index": index, "function": function}
    if call_id is not None:
        fragment |= {"id": call_id, "type": "function"}
    return {"tool_calls": [fragment]}


def usage(prompt: int, output: int, cached: int | None = None, reasoning: int | None = None) -> dict[str, Any]:
    """The usage of an answer in the form of OpenAI and Cerebras."""
    found: dict[str, Any] = {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
    }
    if cached is not None:
        found["prompt_tokens_details"] = {"cached_tokens": cached}
    if reasoning is not None:
        found["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return found


SAFE_TEXT = re.compile(r"[A-Za-z0-9 ,.;:'()\[\]_-]+")
"""What a message for a client may be made of: words of ours."""
