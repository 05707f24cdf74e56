"""A server of OpenAI's Responses API for tests: strict in what it takes, official in what it sends.

Written from openai 3.57.0 (types/responses/*): unknown fields are refused, as are an output without its call, a call
without its output, and a sealed thought that this server has not sealed. Every event it sends passes the SDK's types.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal

from openai.types.responses import ResponseStreamEvent
from pydantic import Field, TypeAdapter

from gateway.protocol.deltas import Delta
from tests.support.upstreams import MODEL, Strict, Upstream

SEALED = "gAAAAABsealed-by-this-server-"
_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
_Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class InputText(Strict):
    type: Literal["input_text"]
    text: str


class InputImage(Strict):
    type: Literal["input_image"]
    image_url: str
    detail: Literal["auto", "low", "high", "original"]


class InputFile(Strict):
    type: Literal["input_file"]
    file_data: str | None = None
    file_url: str | None = None
    filename: str | None = None


_Part = Annotated[InputText | InputImage | InputFile, Field(discriminator="type")]


class Message(Strict):
    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: str | list[_Part]
    phase: Literal["commentary", "final_answer"] | None = None


class SummaryText(Strict):
    type: Literal["summary_text"]
    text: str


class Reasoning(Strict):
    """Without `store` a thought is only what it brings along."""

    type: Literal["reasoning"]
    summary: list[SummaryText]
    encrypted_content: Annotated[str, Field(pattern=f"^{SEALED}")]


class FunctionCall(Strict):
    type: Literal["function_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=64)]
    name: _Name
    arguments: str


class CustomCall(Strict):
    type: Literal["custom_tool_call"]
    call_id: Annotated[str, Field(min_length=1, max_length=64)]
    name: _Name
    input: str


class FunctionOutput(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[_Part]


class CustomOutput(Strict):
    type: Literal["custom_tool_call_output"]
    call_id: str
    output: str | list[_Part]


_Item = Annotated[
    Message | Reasoning | FunctionCall | CustomCall | FunctionOutput | CustomOutput, Field(discriminator="type")
]


class Function(Strict):
    type: Literal["function"]
    name: _Name
    description: str | None = None
    parameters: dict[str, Any]
    strict: bool


class TextForm(Strict):
    type: Literal["text"]


class Grammar(Strict):
    type: Literal["grammar"]
    syntax: Literal["lark", "regex"]
    definition: str


class Custom(Strict):
    type: Literal["custom"]
    name: _Name
    description: str | None = None
    format: Annotated[TextForm | Grammar, Field(discriminator="type")]


class Named(Strict):
    type: Literal["function", "custom"]
    name: _Name


class Allowed(Strict):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Named], Field(min_length=1)]


class Schema(Strict):
    type: Literal["json_schema"]
    name: _Name
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool


class JsonObject(Strict):
    type: Literal["json_object"]


class Text(Strict):
    format: Annotated[Schema | JsonObject, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class Effort(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(Strict):
    """`POST /v1/responses` for a reasoning model, which takes neither temperature nor top_p."""

    model: str
    input: Annotated[list[_Item], Field(min_length=1)]
    stream: Literal[True]
    store: Literal[False]
    max_output_tokens: Annotated[int, Field(ge=16)] | None = None
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Annotated[Function | Custom, Field(discriminator="type")]], Field(min_length=1)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Named | Allowed | None = None
    parallel_tool_calls: bool | None = None
    text: Text | None = None
    reasoning: Effort | None = None

    def check(self) -> None:
        """Raises ValueError for calls and outputs that don't belong together."""
        kinds: dict[str, type] = {}
        waiting: set[str] = set()
        for item in self.input:
            if isinstance(item, FunctionCall | CustomCall):
                kinds[item.call_id] = FunctionOutput if isinstance(item, FunctionCall) else CustomOutput
                waiting.add(item.call_id)
            elif isinstance(item, FunctionOutput | CustomOutput):
                if kinds.get(item.call_id) is not type(item) or item.call_id not in waiting:
                    raise ValueError(f"No tool call found for {item.type} with call_id {item.call_id}.")
                waiting.remove(item.call_id)
        if waiting:
            raise ValueError(f"No tool output found for function call {min(waiting)}.")


def responses_upstream() -> Upstream:
    """OpenAI, with a reasoning model."""
    return Upstream({"responses": ResponsesRequest}, wrapped=True, unknown_status=400, integration=False)


def message(text: str, **more: Any) -> dict[str, Any]:
    """An output item."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part], **more}


def thought(*summary: str, sealed: str | None = "1", text: str | None = None) -> dict[str, Any]:
    """An output item: sealed, with a summary or without."""
    item: dict[str, Any] = {
        "type": "reasoning",
        "id": "rs_1",
        "summary": [{"type": "summary_text", "text": each} for each in summary],
    }
    if text is not None:
        item["content"] = [{"type": "reasoning_text", "text": text}]
    return item if sealed is None else {**item, "encrypted_content": SEALED + sealed}


def call(name: str, arguments: str, call_id: str = "call_u", kind: str = "function_call") -> dict[str, Any]:
    """An output item."""
    field = "arguments" if kind == "function_call" else "input"
    return {"type": kind, "id": "fc_1", "call_id": call_id, "name": name, field: arguments, "status": "completed"}


def used(prompt: int, output: int, cached: int = 0, reasoning: int = 0) -> dict[str, Any]:
    """The usage of a response."""
    return {
        "input_tokens": prompt,
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": output,
        "output_tokens_details": {"reasoning_tokens": reasoning},
        "total_tokens": prompt + output,
    }


def response(status: str, output: Sequence[Any] = (), **more: Any) -> dict[str, Any]:
    """A Response object."""
    return {
        "id": "resp_u",
        "object": "response",
        "created_at": 1_796_000_000,
        "model": MODEL,
        "status": status,
        "output": list(output),
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        **more,
    }


def streamed(output: Sequence[Mapping[str, Any]], status: str = "completed", **more: Any) -> list[dict[str, Any]]:
    """All events of a response with this output."""
    events = [
        {"type": "response.created", "response": response("in_progress")},
        {"type": "response.in_progress", "response": response("in_progress")},
    ]
    for index, item in enumerate(output):
        events += item_events(index, item)
    events.append({"type": f"response.{status}", "response": response(status, output, **more)})
    for number, event in enumerate(events):
        event["sequence_number"] = number
        _EVENT.validate_python(event, strict=False)
    return events


def item_events(index: int, item: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The events of one item."""
    where = {"output_index": index, "item_id": item["id"]}
    empty = {key: value for key, value in item.items() if key != "encrypted_content"}
    for key in ("content", "summary"):
        if key in empty:
            empty[key] = []
    for key in ("arguments", "input"):
        if key in empty:
            empty[key] = ""
    added = {"type": "response.output_item.added", "output_index": index, "item": {**empty, "status": "in_progress"}}
    done = {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
    return [added, *_inner(where, item), done]


def _inner(where: Mapping[str, Any], item: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    if item["type"] in ("function_call", "custom_tool_call"):
        name, field = (
            ("function_call_arguments", "arguments")
            if item["type"] == "function_call"
            else ("custom_tool_call_input", "input")
        )
        for piece in _pieces(item[field]):
            yield {"type": f"response.{name}.delta", **where, "delta": piece}
        done = {"type": f"response.{name}.done", **where, field: item[field]}
        yield {**done, "name": item["name"]} if field == "arguments" else done
        return
    for at, part in enumerate(item.get("summary") or ()):
        place = {**where, "summary_index": at}
        blank = {"type": "summary_text", "text": ""}
        yield {"type": "response.reasoning_summary_part.added", **place, "part": blank}
        for piece in _pieces(part["text"]):
            yield {"type": "response.reasoning_summary_text.delta", **place, "delta": piece}
        yield {"type": "response.reasoning_summary_text.done", **place, "text": part["text"]}
        yield {"type": "response.reasoning_summary_part.done", **place, "part": part}
    for at, part in enumerate(item.get("content") or ()):
        place = {**where, "content_index": at}
        field = "refusal" if part["type"] == "refusal" else "text"
        yield {"type": "response.content_part.added", **place, "part": {**part, field: ""}}
        more = {"logprobs": []} if part["type"] == "output_text" else {}
        for piece in _pieces(part[field]):
            yield {"type": f"response.{part['type']}.delta", **place, "delta": piece, **more}
        yield {"type": f"response.{part['type']}.done", **place, field: part[field], **more}
        yield {"type": "response.content_part.done", **place, "part": part}


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """The deltas with those that belong together as one."""
    out: list[Any] = []
    for delta in deltas:
        before = out[-1] if out else None
        same = type(before) is type(delta) and getattr(before, "part", 0) == getattr(delta, "part", 0)
        if same and hasattr(delta, "text"):
            out[-1] = replace(before, text=before.text + delta.text)  # type: ignore[union-attr,type-var]
        else:
            out.append(delta)
    return out


def _pieces(text: str) -> list[str]:
    return [text[at : at + 3] for at in range(0, len(text), 3)]
