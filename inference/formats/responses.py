"""The Responses API as an upstream's: the prompt as the JSON text of its input items.

`inference.formats.jsontext` has what this shares with other upstreams' formats.

Sources: protocol.md 2; openai 3.57.0, types/responses/response_input_item_param.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

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
from inference.formats.responses_items import ItemWriter
from inference.formats.template_messages import tool_object
from inference.upstream.dialects import ResponsesDialect


class ResponsesFormat(JsonTextFormat):
    """`inference.formats.format.Format` for upstreams of one dialect.

    Args:
        dialect: what they take.
        origin: who they are: only what came from there goes back sealed (`Reasoning.foreign`).
    """

    name = "responses"

    def __init__(self, dialect: ResponsesDialect, origin: str) -> None:
        super().__init__()
        self.dialect = dialect
        self._writer = ItemWriter(dialect, origin)

    def head(self, brief: Brief) -> bytes:
        """See `Format.head`: a message, as what `instructions` are to a model too, so that it counts as one."""
        given = [text for text in (brief.instructions, brief.preamble) if text is not None]
        if not given:
            return b""
        return run_of((self._writer.message(self.dialect.instructions, "\n\n".join(given)),))

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:  # noqa: ARG002  outputs name their calls
        """See `Format.body`. Raises `ApiError` (unsupported_parameter) for images and files that the dialect has no
        place for."""
        return run_of(found for item in shown(items) if (found := self._writer.item(item)) is not None)

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """See `Format.whole`."""
        return self.head(brief) + self.body(items, calls)

    def opening(self, brief: Brief) -> Opening:
        """See `Format.opening`: no ids, but the rest of the request. Raises `ApiError` as `output_guide` does for what
        is broken."""
        tools, dialect = brief.tools, self.dialect
        check_grammars(tools)
        fields: dict[str, Any] = {}
        offered, choice = self._choice(tools)
        if offered:
            fields["tools"] = [self._tool(tool) for tool in offered]
            fields["tool_choice"] = choice
            fields["parallel_tool_calls"] = tools.parallel
        if text := self._text(brief.text):
            fields["text"] = text
        reasoning: dict[str, str] = {}
        if brief.effort is not None and (effort := dialect.efforts.get(brief.effort)) is not None:
            reasoning["effort"] = effort
        if brief.summary is not None and dialect.summaries:
            reasoning["summary"] = brief.summary
        if reasoning:
            fields["reasoning"] = reasoning
        return request_opening(fields, tools, offered)

    def _choice(self, tools: ToolSet) -> tuple[Sequence[Tool], Any]:
        """The tools to offer, and `tool_choice`."""
        mode, left = tools.choice.mode, tools.callable()
        if mode == "none":
            return tools.tools, "none"
        forced_tool(tools)  # raises if there is nothing to call
        if not tools.choice.names or len(left) == len(tools.tools):
            return tools.tools, mode
        if mode == "required" and len(left) == 1:
            return tools.tools, self._named(left[0])
        if self.dialect.allowed_tools:
            return tools.tools, {"type": "allowed_tools", "mode": mode, "tools": [self._named(tool) for tool in left]}
        return left, mode

    def _named(self, tool: Tool) -> dict[str, str]:
        kind = "custom" if tool.kind == "custom" and self.dialect.custom_tools else "function"
        return {"type": kind, "name": wire_name(tool.model_name)}

    def _tool(self, tool: Tool) -> dict[str, Any]:
        if tool.kind == "custom" and self.dialect.custom_tools:
            form: dict[str, Any] = {"type": "text"}
            if tool.grammar is not None:
                form = {"type": "grammar", "syntax": tool.grammar[0], "definition": tool.grammar[1]}
            given = {"description": tool.description} if tool.description else {}
            return {"type": "custom", "name": wire_name(tool.model_name), **given, "format": form}
        function: dict[str, Any] = {**tool_object(tool)["function"], "name": wire_name(tool.model_name)}
        if not function["description"]:
            del function["description"]
        return {"type": "function", **function, "strict": tool.strict}  # strict is what leaving it out means

    def _text(self, text: TextFormat) -> dict[str, Any]:
        """`text` of the request."""
        fields: dict[str, Any] = {}
        if text.type == "json_object":
            fields["format"] = {"type": "json_object"}
        elif text.type == "json_schema":
            schema = checked_schema(text.schema)
            # `strict` is what makes it hold, but not for schemas that leave properties open: those are refused then.
            strict = is_closed(schema)
            fields["format"] = {"type": "json_schema", "name": SCHEMA_NAME, "schema": schema, "strict": strict}
        if text.verbosity is not None and self.dialect.verbosity:
            fields["verbosity"] = text.verbosity
        return fields
