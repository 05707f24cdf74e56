"""Items as input items of an upstream's Responses API. Pure."""

from __future__ import annotations

from typing import Any

from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    Item,
    Message,
    Reasoning,
    text_of,
    to_json,
)
from inference.formats.jsontext import call_arguments, call_name, text_only
from inference.upstream.dialects import ResponsesDialect


class ItemWriter:
    """Writes items for one upstream, each by itself. Ids are ours and mean nothing there, so they stay here."""

    def __init__(self, dialect: ResponsesDialect, origin: str) -> None:
        self._dialect = dialect
        self._origin = f"{origin}\n"

    def message(self, role: str, content: Any) -> dict[str, Any]:
        """A message in the form that all servers take."""
        return {"type": "message", "role": role, "content": content}

    def item(self, item: Item) -> dict[str, Any] | None:
        """The upstream's form of an item; None for one without a form there, and for an empty one of the assistant.
        Raises `ApiError`."""
        match item:
            case Message(role="assistant"):
                return self._said(item)
            case Message():
                role = self._dialect.instructions if item.role in ("system", "developer") else item.role
                return self.message(role, self._content(item.content))
            case Reasoning():
                return self._thought(item)
            case CustomToolCall() if self._dialect.custom_tools:
                return {
                    "type": "custom_tool_call",
                    "call_id": item.call_id,
                    "name": call_name(item),
                    "input": item.input,
                }
            case FunctionCall() | CustomToolCall():
                return {
                    "type": "function_call",
                    "call_id": item.call_id,
                    "name": call_name(item),
                    "arguments": call_arguments(item),
                }
            case FunctionCallOutput() | CustomToolCallOutput():
                custom = isinstance(item, CustomToolCallOutput) and self._dialect.custom_tools
                kind = "custom_tool_call_output" if custom else "function_call_output"
                return {"type": kind, "call_id": item.call_id, "output": self._content(item.output)}
            case _:
                return None

    def _said(self, item: Message) -> dict[str, Any] | None:
        text = text_only(item.content)
        if not text:
            return None
        phase = {"phase": item.phase} if item.phase is not None and self._dialect.phases else {}
        return {**self.message("assistant", text), **phase}

    def _thought(self, item: Reasoning) -> dict[str, Any] | None:
        thoughts = self._dialect.thoughts
        if thoughts == "sealed" and item.foreign is not None and item.foreign.startswith(self._origin):
            blob = item.foreign.removeprefix(self._origin)
            return {"type": "reasoning", "summary": to_json(item.summary), "encrypted_content": blob}
        if thoughts == "text" and (text := text_of(item.content or item.summary)):
            name = {"id": "rs_0"} if self._dialect.thought_ids else {}
            content = [{"type": "reasoning_text", "text": text}]
            return {"type": "reasoning", **name, "summary": [], "content": content}
        return None

    def _content(self, content: str | tuple[Any, ...]) -> Any:
        """Text, or parts where there is more. Raises `ApiError` for what the dialect has no place for."""
        if isinstance(content, str) or not any(isinstance(part, InputImage | InputFile) for part in content):
            return text_of(content)
        return [self._part(part) for part in content]

    def _part(self, part: Any) -> dict[str, Any]:
        dialect = self._dialect
        if isinstance(part, InputImage) and dialect.images and part.image_url is not None:
            return {"type": "input_image", "image_url": part.image_url, "detail": part.detail or "auto"}
        if isinstance(part, InputFile) and dialect.files and part.file_id is None:
            found: dict[str, Any] = to_json(part)
            return found
        if isinstance(part, InputImage | InputFile) and part.file_id is not None:
            raise ApiError("unsupported_parameter", "files by id are not known here; send the content instead", "input")
        return {"type": "input_text", "text": text_only((part,))}
