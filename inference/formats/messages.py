"""Chat completions: the prompt as the JSON text of its messages, for upstreams that render it themselves.

`inference.formats.jsontext` has what this shares with other upstreams' formats.

Sources: protocol.md 2, bugs.md O-43, O-44, O-84, O-87, O-88.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gateway.protocol.errors import ApiError
from gateway.protocol.items import Item
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.format import Brief, Opening
from inference.formats.guides import check_grammars, forced_tool
from inference.formats.jsontext import (
    SCHEMA_NAME,
    JsonTextFormat,
    checked_schema,
    is_closed,
    request_opening,
    run_of,
    shown,
    wire_name,
)
from inference.formats.messages_writer import MessagesWriter
from inference.formats.template_messages import tool_object
from inference.upstream.dialects import Dialect


class MessagesFormat(JsonTextFormat):
    """`inference.formats.format.Format` for upstreams of one dialect. `speaks_ids` is False: see `jsontext`."""

    name = "messages"

    def __init__(self, dialect: Dialect) -> None:
        super().__init__()
        self.dialect = dialect

    def head(self, brief: Brief) -> bytes:
        """See `Format.head`. Tools are no part of it: they go beside the messages."""
        given = [text for text in (brief.instructions, brief.preamble) if text is not None]
        if not given:
            return b""
        message = {"role": self.dialect.instructions, "content": "\n\n".join(given)}
        return run_of((message,))

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """See `Format.body`. What the assistant says in a row is one message, within one body: what later items add to
        it is a message of its own, as messages that are there never change. Outputs stand right behind the calls they
        belong to, whatever came between. Raises `ApiError` (unsupported_parameter) for images and files that the
        dialect has no place for."""
        writer = MessagesWriter(self.dialect, calls)
        for item in shown(items):
            writer.add(item)
        return run_of(writer.finish())

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """See `Format.whole`."""
        return self.head(brief) + self.body(items, calls)

    def opening(self, brief: Brief) -> Opening:
        """See `Format.opening`: no ids, but the rest of the request. Strict functions hold where the dialect knows
        them; grammars of freeform tools are only described. Raises `ApiError` (unsupported_parameter) for a choice of
        tools or a text format that the dialect lacks, and as `output_guide` does for what is broken."""
        tools = brief.tools
        check_grammars(tools)
        fields: dict[str, Any] = {}
        offered, choice = self._choice(tools)
        if offered:
            fields["tools"] = [self._tool(tool) for tool in offered]
            fields["tool_choice"] = choice
            if not tools.parallel and self.dialect.parallel_option:
                fields["parallel_tool_calls"] = False
        if (form := self._response_format(brief.text, beside_tools=bool(offered))) is not None:
            fields["response_format"] = form
        if brief.effort is not None and (effort := self.dialect.efforts.get(brief.effort)) is not None:
            fields["reasoning_effort"] = effort
        return request_opening(fields, tools, offered)

    def _choice(self, tools: ToolSet) -> tuple[Sequence[Tool], Any]:
        """The tools to offer, and `tool_choice`."""
        dialect, mode, left = self.dialect, tools.choice.mode, tools.callable()
        if mode == "none":
            return (tools.tools, "none") if "none" in dialect.choices else ((), None)
        if mode != "required":
            return left, "auto"
        forced_tool(tools)  # raises if there is nothing to call
        if tools.choice.names and len(left) == 1 and dialect.named_choice:
            return tools.tools, {"type": "function", "function": {"name": wire_name(left[0].model_name)}}
        if "required" not in dialect.choices:
            text = "this model's upstream can't be held to a call of a tool; use tool_choice auto or none"
            raise ApiError("unsupported_parameter", text, "tool_choice")
        return left, "required"

    def _tool(self, tool: Tool) -> dict[str, Any]:
        function: dict[str, Any] = {**tool_object(tool)["function"], "name": wire_name(tool.model_name)}
        if not function["description"]:
            del function["description"]
        if tool.strict and self.dialect.strict_tools:
            function["strict"] = True
        return {"type": "function", "function": function}

    def _response_format(self, text: TextFormat, *, beside_tools: bool) -> dict[str, Any] | None:
        if text.type == "text":
            return None
        if text.type not in self.dialect.formats:
            raise ApiError("unsupported_parameter", f"this model's upstream has no {text.type} format", "text.format")
        if beside_tools and not self.dialect.format_beside_tools:
            said = "this model's upstream holds no text format beside tools; leave one of them out"
            raise ApiError("unsupported_parameter", said, "text.format")
        if text.type == "json_object":
            return {"type": "json_object"}
        schema = checked_schema(text.schema)
        form: dict[str, Any] = {"name": SCHEMA_NAME, "schema": schema}
        if self.dialect.strict_schemas:
            # `strict` is what makes it hold, but not for schemas that leave properties open: those are refused then.
            form["strict"] = is_closed(schema)
        return {"type": "json_schema", "json_schema": form}
