"""Every event a test receives, held against the official SDK's types and the grammar of protocol.md 3.

`EventChecker` takes the frames of one socket or one SSE answer in order; it knows nothing of this gateway's code.
Events that the SDK does not publish are listed here, each with its fields, so that nothing unknown passes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Literal, get_args

from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.beta import BetaResponseInjectFailedEvent
from openai.types.responses import ResponsesServerEvent, Tool
from pydantic import BaseModel, ConfigDict

TERMINALS = ("response.completed", "response.incomplete", "response.failed")

# protocol.md 3.6: what Open Responses requires in every Response object
_NEVER_NULL = (
    "id, object, created_at, status, model, output, tools, tool_choice, top_p, temperature, presence_penalty, text,"
    " frequency_penalty, top_logprobs, store, background, parallel_tool_calls, service_tier, metadata, truncation"
)
_NULLABLE = (
    "completed_at, incomplete_details, previous_response_id, instructions, error, reasoning, usage, max_output_tokens,"
    " max_tool_calls, safety_identifier, prompt_cache_key"
)
NEVER_NULL = frozenset(re.findall(r"\w+", _NEVER_NULL))
RESPONSE_KEYS = NEVER_NULL | frozenset(re.findall(r"\w+", _NULLABLE))


class _Unpublished(BaseModel):
    model_config = ConfigDict(extra="forbid")
    stream_id: str | None = None


class Keepalive(_Unpublished):
    """3.7."""

    type: Literal["keepalive"]
    sequence_number: int


class InterruptAccepted(_Unpublished):
    """3.8."""

    type: Literal["response.interrupt.accepted"]
    response_id: str
    sequence_number: int


class ItemInterrupted(_Unpublished):
    """3.8."""

    type: Literal["response.output_item.interrupted"]
    response_id: str
    item_id: str
    output_index: int
    sequence_number: int


class _InterruptError(BaseModel):
    code: str
    message: str


class InterruptFailed(_Unpublished):
    """3.8."""

    type: Literal["response.interrupt.failed"]
    response_id: str
    error: _InterruptError
    sequence_number: int | None = None


UNPUBLISHED: tuple[type[BaseModel], ...] = (Keepalive, InterruptAccepted, ItemInterrupted, InterruptFailed)
# Answers to control frames: they may come outside a response, and have no number of it where their target is unknown.
CONTROL_ANSWERS = (
    "response.steer.pending",
    "response.steer.failed",
    "response.interrupt.failed",
    "response.inject.failed",
)


def _types() -> dict[str, type[BaseModel]]:
    published = get_args(get_args(ResponsesServerEvent)[0])
    models = (*published, BetaResponseInjectFailedEvent, *UNPUBLISHED)
    return {get_args(model.model_fields["type"].annotation)[0]: model for model in models}


_TYPES = _types()


_TOOL_TYPES = {
    name for model in get_args(get_args(Tool)[0]) for name in get_args(model.model_fields["type"].annotation)
}


def check_type(event: Mapping[str, Any]) -> BaseModel:
    """The event as the SDK's type, read strictly. Fails for unknown types and wrong fields. Only what the client itself
    made up may come back as it was: a tool of an unknown type, the input of a steer that failed. One reason of an
    incomplete response is unpublished (3.4)."""
    kind = event["type"]
    assert kind in _TYPES, f"no client knows {kind}"
    if tools := event.get("response", {}).get("tools"):
        known = [tool for tool in tools if tool["type"] in _TOOL_TYPES]
        event = {**event, "response": {**event["response"], "tools": known}}
    if kind == "response.steer.failed":
        event = {**event, "steer": {**event["steer"], "input": ""}}
    elif kind == "response.inject.failed":
        event = {**event, "input": []}
    elif kind == "response.incomplete" and event["response"]["incomplete_details"] == {"reason": "interrupted"}:
        event = {**event, "response": {**event["response"], "incomplete_details": {"reason": "steered"}}}
    return _TYPES[kind].model_validate_json(json.dumps(event), strict=True)


def check_error(frame: Mapping[str, Any]) -> None:
    """E7 and protocol.md 5.1: integer status, object error, string type, code and message."""
    assert type(frame["status"]) is int
    assert 400 <= frame["status"] <= 599
    check_error_body(frame["error"])
    headers = frame.get("headers", {})
    assert all(isinstance(text, str) for entry in headers.items() for text in entry)


def check_error_body(error: Any) -> None:
    """The object under `error`, of a frame or of an HTTP body."""
    assert isinstance(error, dict)
    for key in ("type", "code", "message"):
        assert isinstance(error[key], str), error
        assert error[key], error
    assert error["param"] is None or isinstance(error["param"], str)


def check_usage(usage: Mapping[str, Any]) -> None:
    """T6 and 3.5: all keys, and sums that fit."""
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 <= usage["input_tokens_details"]["cached_tokens"] <= usage["input_tokens"]
    assert 0 <= usage["input_tokens_details"]["cache_write_tokens"] <= usage["input_tokens"]
    assert 0 <= usage["output_tokens_details"]["reasoning_tokens"] <= usage["output_tokens"]


def check_response(response: Mapping[str, Any]) -> None:
    """T5 and 3.6: the whole Response object."""
    assert response.keys() >= RESPONSE_KEYS, RESPONSE_KEYS - response.keys()
    assert not [key for key in NEVER_NULL if response[key] is None]
    assert response["object"] == "response"
    assert "format" in response["text"]
    assert response["reasoning"] is None or response["reasoning"].keys() >= {"effort", "summary"}
    for tool in response["tools"]:
        assert tool["type"] != "function" or tool.keys() >= {"type", "name", "description", "parameters", "strict"}
    for item in response["output"]:
        assert item["type"] not in ("message", "function_call") or item["status"], item
        # Open Responses' schema has no null in these: leave them out (3.6, traps)
        nulls = [key for key in ("encrypted_content", "content", "phase", "logprobs") if item.get(key, 0) is None]
        assert not nulls, item
    if response["usage"] is not None:
        check_usage(response["usage"])
    assert (response["completed_at"] is not None) == (response["status"] == "completed")


class EventChecker:
    """All frames of one socket, or of one SSE answer. Lanes are checked apart; each response is a `ResponseCheck`."""

    def __init__(self) -> None:
        self._running: dict[str | None, ResponseCheck] = {}
        self.ended = 0

    @property
    def running(self) -> tuple[str | None, ...]:
        """Lanes whose response has begun and not ended."""
        return tuple(self._running)

    def feed(self, event: Mapping[str, Any]) -> None:
        """The next frame."""
        kind, lane = event["type"], event.get("stream_id")
        typed = check_type(event)
        if kind == "error":
            check_error(event)
        elif kind == "response.created":
            assert lane not in self._running, f"a second response begins on lane {lane}"
            self._running[lane] = ResponseCheck(event, typed)
        elif lane in self._running:
            self._running[lane].feed(event, typed)
            if kind in TERMINALS:
                del self._running[lane]
                self.ended += 1
        else:
            assert kind in CONTROL_ANSWERS, f"{kind} outside a response"


_PARTS = {  # delta event, done event, the field with the text
    "output_text": ("response.output_text.delta", "response.output_text.done", "text"),
    "refusal": ("response.refusal.delta", "response.refusal.done", "refusal"),
    "reasoning_text": ("response.reasoning_text.delta", "response.reasoning_text.done", "text"),
}
_CALLS = {  # the same of calls
    "function_call": ("response.function_call_arguments.delta", "response.function_call_arguments.done", "arguments"),
    "custom_tool_call": ("response.custom_tool_call_input.delta", "response.custom_tool_call_input.done", "input"),
}


class ResponseCheck:
    """One response from created to its terminal event: 3.1 (order), 3.2 (numbers), 3.3 (items), 3.4 (terminals)."""

    def __init__(self, created: Mapping[str, Any], typed: BaseModel) -> None:
        response = created["response"]
        self.id = response["id"]
        self.done: list[dict[str, Any]] = []
        self._next = 0
        self._index = 0
        self._began = False
        self._item: ItemCheck | None = None
        self._accumulator: Any = ResponseStreamState(input_tools=omit, text_format=omit)
        check_response(response)
        assert response["status"] in ("queued", "in_progress")
        assert (response["output"], response["usage"]) == ([], None)
        self._number(created)
        self._accumulator.handle_event(typed)

    def feed(self, event: Mapping[str, Any], typed: BaseModel) -> None:
        kind = event["type"]
        if kind in CONTROL_ANSWERS:
            if event.get("sequence_number") == self._next:
                self._next += 1
            return
        self._number(event)
        if not isinstance(typed, UNPUBLISHED) and not kind.startswith("response.steer"):
            self._accumulator.handle_event(typed)  # raises for a delta of an item that was never announced
        if kind in ("response.queued", "response.in_progress"):
            assert not self._began
            self._began = kind == "response.in_progress"
            assert event["response"]["id"] == self.id
            check_response(event["response"])
        elif kind in TERMINALS:
            self._end(kind.removeprefix("response."), event["response"])
        elif kind == "response.output_item.added":
            assert self._began
            assert self._item is None, "items come one after the other"
            assert event["output_index"] == self._index
            self._item = ItemCheck(event["item"], self._index)
        elif kind == "response.output_item.done":
            assert self._item is not None
            self._item.end(event["item"])
            self.done.append(event["item"])
            self._item, self._index = None, self._index + 1
        elif kind == "response.output_item.interrupted":
            assert self._item is not None
            assert event["item_id"] == self._item.id
            self._item = None
        elif "item_id" in event:
            assert self._item is not None, f"{kind} outside an item"
            self._item.feed(event)

    def _number(self, event: Mapping[str, Any]) -> None:
        assert event["sequence_number"] == self._next, f"{event['type']}: {event['sequence_number']} != {self._next}"
        self._next += 1

    def _end(self, status: str, response: Mapping[str, Any]) -> None:
        # What a failure cut off stays open: it is no answer (design decision 9).
        assert self._item is None or status == "failed", "an item was left open"
        assert (response["id"], response["status"]) == (self.id, status)
        check_response(response)
        assert response["output"] == self.done, "the terminal repeats what was streamed"
        assert (response["error"] is not None) == (status == "failed")
        assert (response["incomplete_details"] is not None) == (status == "incomplete")
        assert response["usage"] is not None or status == "failed"


class ItemCheck:
    """One output item between its `added` and its `done`."""

    def __init__(self, item: Mapping[str, Any], index: int) -> None:
        self.id = item["id"]
        self._first = item
        self._index = index
        self._parts: list[dict[str, Any]] = []
        self._summaries: list[dict[str, Any]] = []
        self._part: str | None = None
        self._text: list[str] = []
        self._said: str | None = None
        assert item.get("status", "in_progress") == "in_progress"
        assert not item.get("content")
        assert not item.get("arguments")
        assert not item.get("input")

    def feed(self, event: Mapping[str, Any]) -> None:
        assert (event["item_id"], event["output_index"]) == (self.id, self._index)
        kind = event["type"]
        if kind == "response.compaction.compacting":
            assert self._first["type"] == "compaction"
        elif kind.startswith("response.reasoning_summary"):
            self._summary(kind, event)
        elif self._first["type"] in _CALLS:
            self._stream(kind, event, _CALLS[self._first["type"]])
        elif kind == "response.content_part.added":
            assert self._part is None
            self._at(event)
            self._part = event["part"]["type"]
            allowed = ("reasoning_text",) if self._first["type"] == "reasoning" else ("output_text", "refusal")
            assert self._part in allowed
        elif kind == "response.content_part.done":
            self._at(event)
            assert self._part == event["part"]["type"]
            assert self._said == event["part"][_PARTS[self._part][2]]
            self._parts.append(event["part"])
            self._part, self._said = None, None
        elif kind != "response.output_text.annotation.added":
            assert self._part is not None, f"{kind} outside a part"
            self._at(event)
            self._stream(kind, event, _PARTS[self._part])

    def end(self, item: Mapping[str, Any]) -> None:
        assert self._part is None, "a part was left open"
        assert (item["id"], item["type"]) == (self.id, self._first["type"])
        assert item.get("status", "completed") in ("completed", "incomplete")
        if item["type"] in _CALLS:
            assert item["call_id"] == self._first["call_id"]
            assert item["name"] == self._first["name"]
            assert item[_CALLS[item["type"]][2]] == self._said
        else:
            assert item.get("content", []) == self._parts
            assert item.get("summary", []) == self._summaries

    def _at(self, event: Mapping[str, Any]) -> None:
        assert event["content_index"] == len(self._parts)

    def _stream(self, kind: str, event: Mapping[str, Any], names: tuple[str, str, str]) -> None:
        delta, done, field = names
        if kind == delta:
            assert self._said is None
            assert event["delta"], "an empty delta"
            self._text.append(event["delta"])
        else:
            assert kind == done
            self._said = "".join(self._text)
            self._text = []
            assert event[field] == self._said, "the deltas make up the text"

    def _summary(self, kind: str, event: Mapping[str, Any]) -> None:
        assert self._first["type"] == "reasoning"
        assert event["summary_index"] == len(self._summaries)
        if kind.endswith("part.done"):
            assert event["part"]["text"] == self._said
            self._summaries.append(event["part"])
            self._said = None
        elif "_text." in kind:
            names = ("response.reasoning_summary_text.delta", "response.reasoning_summary_text.done", "text")
            self._stream(kind, event, names)
