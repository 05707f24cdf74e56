"""The control frames of a client and the failures that answer them (protocol.md 2.2 to 2.4, 3.8).

The answer to a control frame is never an `error` frame, which would cost Codex its socket and end the lane's turn for
others.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.protocol.errors import INVALID, ApiError
from gateway.protocol.invalid import missing, wrong_type, wrong_value
from gateway.protocol.items import CustomToolCallOutput, FunctionCallOutput, Item, Message
from gateway.protocol.requests import parse_create

_STEER_KEYS = frozenset({"type", "previous_response_id", "input"})
_MESSAGE_KEYS = frozenset({"type", "role", "content"})
_PARTS = frozenset({"input_text", "input_image", "input_file"})


def steer_input(frame: Mapping[str, Any]) -> list[Any]:
    """The user messages of a `response.steer`, as input items. Raises `ApiError` with the words for `invalid_input`.

    Only the three keys of 2.2; a non-empty string or array; of each message only what the guide lists. Bounds are those
    of a create's input.
    """
    extra = frame.keys() - _STEER_KEYS
    if extra:
        raise wrong_value("response.steer", "It takes 'type', 'previous_response_id' and 'input' only.")
    target, given = frame.get("previous_response_id"), frame.get("input")
    if not isinstance(target, str):
        raise wrong_type("previous_response_id", "a string", target)
    if not isinstance(given, str | list):
        raise wrong_type("input", "a string or an array", given)
    if not given:
        raise missing("input")
    items = [{"type": "message", "role": "user", "content": given}] if isinstance(given, str) else given
    for index, item in enumerate(items):
        _check_message(f"input[{index}]", item)
    parse_create({"model": "any", "input": items}, transport="websocket")
    return items


def _check_message(where: str, item: Any) -> None:
    if not isinstance(item, dict):
        raise wrong_type(where, "an object", item)
    if item.get("type", "message") != "message" or item.get("role") != "user":
        raise wrong_value(where, "Only user messages can steer a response.")
    if item.keys() - _MESSAGE_KEYS:
        raise wrong_value(where, "A message that steers has 'type', 'role' and 'content' only.")
    content = item.get("content")
    if isinstance(content, list) and any(isinstance(part, dict) and part.get("type") not in _PARTS for part in content):
        raise wrong_value(f"{where}.content", "Supported parts are input_text, input_image and input_file.")


def objection_to(create: Mapping[str, Any], *, rollouts: bool = False) -> str | None:
    """Why responses to this create can't be steered, if so (2.2). `rollouts`: the extension is on."""
    if rollouts and create.get("rollout") is True:
        return "Rollouts can't be steered. Send user messages behind the tools' outputs in a response.append."
    if create.get("conversation") is not None:
        return "Responses that are bound to a conversation can't be steered."
    if create.get("context_management"):
        return "Responses with automatic compaction can't be steered."
    options = create.get("prompt_cache_options")
    if create.get("generate") is False or (isinstance(options, dict) and options.get("prewarm")):
        return "A warm-up can't be steered: it generates nothing."
    given = create.get("input")
    last = given[-1] if isinstance(given, list) and given else None
    if isinstance(last, dict) and last.get("type") == "compaction_trigger":
        return "A compaction can't be steered."
    return None


def steer_failed(frame: Mapping[str, Any], code: str, why: str, steer_id: str | None = None) -> dict[str, Any]:
    """The fields of `response.steer.failed`: the input is given back for use in a create. Without an id before it was
    accepted. What is not even of the right kind is left out; a message's `type`, which clients may leave out and the
    SDK's event must have, is put in."""
    target, given = frame.get("previous_response_id"), frame.get("input")
    steer: dict[str, Any] = {} if steer_id is None else {"id": steer_id}
    steer["previous_response_id"] = target if isinstance(target, str) else ""
    if isinstance(given, list):
        given = [{"type": "message", **item} if isinstance(item, dict) and "role" in item else item for item in given]
    steer["input"] = given if isinstance(given, str | list) else []
    return {"error": {"type": INVALID, "code": code, "message": why}, "steer": steer}


def steer_frame(what: str, lane: str | None, sequence: int, fields: Mapping[str, Any]) -> dict[str, Any]:
    """`response.steer.accepted`, `.pending` or `.failed` as a whole frame, for responses that no longer run."""
    named = {} if lane is None else {"stream_id": lane}
    return {"type": f"response.steer.{what}", **named, "sequence_number": sequence, **fields}


def interrupt_failed(response_id: str, lane: str | None, code: str, why: str) -> dict[str, Any]:
    """The answer to an interrupt that can't be: the response, if it runs, goes on."""
    named = {} if lane is None else {"stream_id": lane}
    error = {"code": code, "message": why}
    return {"type": "response.interrupt.failed", **named, "response_id": response_id, "error": error}


def inject_failed(frame: Mapping[str, Any]) -> dict[str, Any]:
    """2.4: out of scope, so there never is such a response. No counter is ours to take a number from."""
    target, given = frame.get("response_id"), frame.get("input")
    message = "response.inject is not supported. Send this input in a response.create."
    return {
        "type": "response.inject.failed",
        "sequence_number": 0,
        "response_id": target if isinstance(target, str) else "",
        "error": {"code": "response_not_found", "message": message},
        "input": given if isinstance(given, list) else [],
    }


def asks_rollout(create: Mapping[str, Any]) -> bool:
    """Whether a create opts in to be a rollout (docs/rollout-extension.md). Raises `ApiError`."""
    asked = create.get("rollout")
    if asked is not None and not isinstance(asked, bool):
        raise wrong_type("rollout", "a boolean", asked)
    return bool(asked)


def append_items(frame: Mapping[str, Any]) -> tuple[Item, ...]:
    """What a `response.append` adds: outputs of tools, then user messages. Raises `ApiError`; bounds are those of a
    create's input."""
    given = frame.get("input")
    if not isinstance(given, list):
        raise wrong_type("input", "an array", given)
    if not given:
        raise missing("input")
    items = parse_create({"model": "any", "input": given}, transport="websocket").input
    messages = False
    for index, item in enumerate(items):
        message = isinstance(item, Message) and item.role == "user"
        if not message and (messages or not isinstance(item, FunctionCallOutput | CustomToolCallOutput)):
            raise wrong_value(f"input[{index}]", "Expected the outputs of tool calls and, behind them, user messages.")
        messages = messages or message
    return items


def append_failed(response_id: str, lane: str | None, error: ApiError | tuple[str, str]) -> dict[str, Any]:
    """The answer to an append that can't be: the response, if it runs, goes on. `error` may be a code and a message."""
    named = {} if lane is None else {"stream_id": lane}
    if isinstance(error, ApiError):
        said = error.body()["error"]
    else:
        said = {"message": error[1], "type": INVALID, "param": "response_id", "code": error[0]}
    return {"type": "response.append.failed", **named, "response_id": response_id, "error": said}
