"""Items as messages of chat completions. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    Item,
    Message,
    Reasoning,
    text_of,
)
from inference.formats.jsontext import call_arguments, call_name, text_only
from inference.upstream.dialects import Dialect


class MessagesWriter:
    """Collects items. `calls` are those from before that still wait for an output."""

    def __init__(self, dialect: Dialect, calls: Mapping[str, str]) -> None:
        self._dialect = dialect
        self._waiting = set(calls)
        self._messages: list[dict[str, Any]] = []
        self._assistant: dict[str, Any] | None = None  # the message that what the assistant says next belongs to
        self._held: list[dict[str, Any]] = []  # what was said to the assistant before its calls had their outputs

    def add(self, item: Item) -> None:
        """The next item. Items without a form in the chat, and empty ones of the assistant, give nothing. Raises
        `ApiError`."""
        match item:
            case Message(role="assistant"):
                if text := text_only(item.content):
                    message = self._said()
                    before = message["content"]
                    message["content"] = f"{before}\n\n{text}" if before else text
            case Message():
                content = self._content(item)
                role = self._dialect.instructions if item.role in ("system", "developer") else "user"
                self._put({"role": role, "content": content})
            case Reasoning():
                if self._dialect.reasoning_in is not None and (thought := text_of(item.content or item.summary)):
                    message = self._said()
                    before = message.get(self._dialect.reasoning_in, "")
                    message[self._dialect.reasoning_in] = f"{before}\n\n{thought}" if before else thought
            case FunctionCall() | CustomToolCall():
                self._said().setdefault("tool_calls", []).append(_call(item))
                self._waiting.add(item.call_id)
            case FunctionCallOutput() | CustomToolCallOutput():
                self._waiting.discard(item.call_id)
                self._assistant = None
                answer = {"role": "tool", "tool_call_id": item.call_id, "content": text_only(item.output)}
                self._messages.append(answer)
                if not self._waiting:
                    self._release()
            case _:
                pass

    def finish(self) -> list[dict[str, Any]]:
        """All messages."""
        self._release()
        return self._messages

    def _put(self, message: dict[str, Any]) -> None:
        """What others say. Servers refuse anything between calls and their outputs."""
        if self._waiting:
            self._held.append(message)
        else:
            self._assistant = None
            self._messages.append(message)

    def _release(self) -> None:
        if self._held:
            self._assistant = None
            self._messages += self._held
            self._held = []

    def _said(self) -> dict[str, Any]:
        if self._assistant is None:
            self._assistant = {"role": "assistant", "content": ""}
            self._messages.append(self._assistant)
        return self._assistant

    def _content(self, message: Message) -> Any:
        """Text, or parts where there are images in a user's message and the dialect knows them."""
        given = message.content
        pictured = not isinstance(given, str) and any(isinstance(part, InputImage) for part in given)
        if isinstance(given, str) or not pictured or not self._dialect.images or message.role != "user":
            return text_only(given)
        return [self._part(part) for part in given]

    def _part(self, part: Any) -> dict[str, Any]:
        if isinstance(part, InputImage) and part.image_url is not None:
            image = {"url": part.image_url} if part.detail is None else {"url": part.image_url, "detail": part.detail}
            return {"type": "image_url", "image_url": image}
        return {"type": "text", "text": text_only((part,))}


def _call(call: FunctionCall | CustomToolCall) -> dict[str, Any]:
    function = {"name": call_name(call), "arguments": call_arguments(call)}
    return {"id": call.call_id, "type": "function", "function": function}
