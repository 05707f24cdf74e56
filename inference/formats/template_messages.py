"""Items as the messages that chat templates are written for (those of chat completions), in the form a template takes.

Templates differ in what they take; `inference.formats.template_probe` finds that out. What one has no place for is said
in the next best way, never left out: a system message as part of the first user message, calls and their outputs in
the Hermes form as text, tools as a list behind the instructions.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from gateway.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
    called_name,
    text_of,
)
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.format import Brief
from inference.formats.guides import parameters
from inference.formats.plaintext import text_only
from inference.formats.toolcalls import CLOSE, INPUT_KEY, OPEN

Cover = Callable[[str], str]
ChatMessage = dict[str, Any]

_TOOLS = (
    "You can call these functions. Each line describes one, with the JSON schema of its arguments:\n\n{tools}\n\n"
    f'To call one, write {OPEN}, a JSON object with the keys "name" and "arguments", and {CLOSE}.'
)
_SHORT_ID = re.compile("[0-9A-Za-z]{9}")
_ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class Forms:
    """What a template takes.

    `parts`: contents are lists of parts, not strings. `system`: a system message in front. `late_system`: also later.
    `developer`: the role developer. `repeats`: two user messages in a row. `thoughts`: the fields it reads reasoning
    from. `calls`: whether a call's arguments are given as an object or as JSON text; None: it has no place for calls.
    `text_calls`: it prints arguments given as text as they are. `single_calls`: a message has one call, its output
    behind it. `short_ids`: call ids must be nine letters and digits. `tools`: it shows the tools offered.
    """

    parts: bool = False
    system: bool = True
    late_system: bool = True
    developer: bool = False
    repeats: bool = True
    thoughts: tuple[str, ...] = ()
    calls: Literal["object", "text"] | None = "object"
    text_calls: bool = False
    single_calls: bool = False
    short_ids: bool = False
    tools: bool = True


def shown_tools(tools: ToolSet) -> Sequence[Tool]:
    """The tools that the model is told of: all, unless it may call none."""
    return () if tools.choice.mode == "none" else tools.tools


def tool_object(tool: Tool) -> dict[str, Any]:
    """A tool in chat-completions form. A freeform tool is a function with one argument, `input`."""
    description = tool.description or ""
    if tool.grammar is not None:
        syntax, definition = tool.grammar
        description += f"\n\nThe input must match this {syntax} grammar:\n{definition}"
    function = {"name": tool.model_name, "description": description, "parameters": dict(parameters(tool))}
    return {"type": "function", "function": function}


def covered_tool(tool: Tool, cover: Cover, cover_all: Callable[[Any], Any]) -> dict[str, Any]:
    """The same with all text in it covered."""
    function = tool_object(tool)["function"]
    given = {name: cover(function[name]) for name in ("name", "description")}
    return {"type": "function", "function": {**given, "parameters": cover_all(function["parameters"])}}


def system_text(brief: Brief, forms: Forms) -> str | None:
    """Instructions, the leading system message, and tools if the template doesn't show any; None for nothing."""
    given = [text for text in (brief.instructions, brief.preamble) if text is not None]
    tools = shown_tools(brief.tools)
    if tools and not forms.tools:
        given.append(_TOOLS.format(tools="\n".join(map(_print, map(tool_object, tools)))))
    return "\n\n".join(given) if given else None


def with_system(system: str | None, messages: list[ChatMessage], forms: Forms, cover: Cover) -> list[ChatMessage]:
    """The conversation behind its system text; `messages` are `chat_messages`."""
    if system is None:
        return messages
    if forms.system:
        return [_message("system", cover(system), forms), *messages]
    return _joined([_message("user", cover(system), forms), *messages], forms)


def chat_messages(items: Sequence[Item], calls: Mapping[str, str], forms: Forms, cover: Cover) -> list[ChatMessage]:
    """The items as messages. `calls`: names by call ids of calls before these items. Items without a form in the chat
    give nothing.

    Raises:
        ApiError: unsupported_parameter for images and files.
    """
    writer = _Writer(calls, forms, cover)
    for item in items:
        writer.add(item)
    messages = _one_by_one(writer.messages) if forms.single_calls else writer.messages
    return _joined(messages, forms)


class _Writer:
    def __init__(self, calls: Mapping[str, str], forms: Forms, cover: Cover) -> None:
        self.messages: list[ChatMessage] = []
        self._names = dict(calls)
        self._forms = forms
        self._cover = cover
        # An assistant's message that may still grow: with reasoning only, or with text or calls.
        self._open: Literal["", "thought", "said"] = ""
        self._thought = ""

    def add(self, item: Item) -> None:
        match item:
            case Message(role="assistant"):
                if self._open != "thought":
                    self._begin()
                self.messages[-1]["content"] = _content(self._text(item.content), self._forms)
                self._open = "said"
            case Message():
                self._open = ""
                self.messages.append(_message(self._role(item.role), self._text(item.content), self._forms))
            case Reasoning() if self._forms.thoughts and (thought := text_of(item.content or item.summary).strip("\n")):
                if self._open == "thought":
                    thought = f"{self._thought}\n\n{thought}"
                else:
                    self._begin()
                self._thought = thought
                self.messages[-1].update(dict.fromkeys(self._forms.thoughts, self._cover(thought)))
                self._open = "thought"
            case FunctionCall() | CustomToolCall():
                if not self._open or (self._forms.single_calls and self.messages[-1].get("tool_calls")):
                    self._begin()
                self._call(item)
                self._open = "said"
            case FunctionCallOutput() | CustomToolCallOutput():
                self._open = ""
                self._output(item)
            case _:
                pass

    def _begin(self) -> None:
        self.messages.append(_message("assistant", "", self._forms))

    def _role(self, role: str) -> str:
        """A conversation's first system message is no item here; later ones are users' where the template has no place
        for them."""
        if role == "user" or (role == "developer" and self._forms.developer):
            return role
        return "system" if self._forms.late_system else "user"

    def _text(self, content: str | tuple[Any, ...]) -> str:
        return self._cover(text_only(content))

    def _call(self, call: FunctionCall | CustomToolCall) -> None:
        name = called_name(call)
        self._names[call.call_id] = name
        given = {INPUT_KEY: call.input} if isinstance(call, CustomToolCall) else _parsed(call.arguments)
        message = self.messages[-1]
        if self._forms.calls is None:
            raw = call.arguments if isinstance(call, FunctionCall) and given is None else _print(given)
            block = f'{{"name": {_print(name)}, "arguments": {raw}}}'
            before = message["content"] if isinstance(message["content"], str) else message["content"][0]["text"]
            joint = "\n" if before else ""
            message["content"] = _content(f"{before}{joint}{OPEN}\n{self._cover(block)}\n{CLOSE}", self._forms)
            return
        function = {"name": self._cover(name), "arguments": self._arguments(call, given)}
        entry = {"id": self._id(call.call_id), "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(entry)

    def _arguments(self, call: FunctionCall | CustomToolCall, given: dict[str, Any] | None) -> Any:
        """As the template takes them. What is no JSON object is shown as it is, or else under a key of its own."""
        if given is None and isinstance(call, FunctionCall):
            if self._forms.text_calls or self._forms.calls == "text":
                return self._cover(call.arguments)
            return {"arguments": self._cover(call.arguments)}
        if self._forms.calls == "text":
            return self._cover(call.arguments if isinstance(call, FunctionCall) else _print(given))
        return _covered(given, self._cover)

    def _id(self, call_id: str) -> str:
        if not self._forms.short_ids or _SHORT_ID.fullmatch(call_id):
            return self._cover(call_id)
        number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8], "big")
        return "".join(_ALPHABET[number // 62**place % 62] for place in range(9))

    def _output(self, item: FunctionCallOutput | CustomToolCallOutput) -> None:
        text = self._text(item.output)
        if self._forms.calls is None:
            block = f"<tool_response>\n{text}\n</tool_response>"
            self.messages.append(_message("user", block, self._forms))
            return
        name = self._cover(self._names.get(item.call_id, ""))
        message = _message("tool", text, self._forms)
        self.messages.append({**message, "name": name, "tool_call_id": self._id(item.call_id)})


def _message(role: str, text: str, forms: Forms) -> ChatMessage:
    return {"role": role, "content": _content(text, forms)}


def _content(text: str, forms: Forms) -> Any:
    return [{"type": "text", "text": text}] if forms.parts else text


def _joined(messages: list[ChatMessage], forms: Forms) -> list[ChatMessage]:
    """One message of adjacent ones, where the template wants roles to take turns."""
    if forms.repeats:
        return messages
    out: list[ChatMessage] = []
    for message in messages:
        last = out[-1] if out else None
        same = last is not None and last["role"] == message["role"] and message["role"] in ("user", "assistant")
        if last is None or not same or last.get("tool_calls"):
            out.append(message)
            continue
        texts = [entry["content"][0]["text"] if forms.parts else entry["content"] for entry in (last, message)]
        out[-1] = {**last, **message, "content": _content("\n\n".join(filter(None, texts)), forms)}
    return out


def _one_by_one(messages: list[ChatMessage]) -> list[ChatMessage]:
    """Each output moved up behind its call."""
    outputs = {message["tool_call_id"]: message for message in messages if message["role"] == "tool"}
    out: list[ChatMessage] = []
    for message in messages:
        if message["role"] != "tool" or message["tool_call_id"] in outputs:
            out.append(message)
        answered = [call["id"] for call in message.get("tool_calls", ()) if call["id"] in outputs]
        out += [outputs.pop(call_id) for call_id in answered]
    return out


def _parsed(arguments: str) -> dict[str, Any] | None:
    """Arguments as an object; None if they are none."""
    if not arguments.strip():
        return {}
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _covered(value: Any, cover: Cover) -> Any:
    if isinstance(value, str):
        return cover(value)
    if isinstance(value, dict):
        return {cover(key): _covered(entry, cover) for key, entry in value.items()}
    return [_covered(entry, cover) for entry in value] if isinstance(value, list) else value


def _print(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
