"""Constraints on gpt-oss's output: whole turns, message by message.

A turn is any number of messages that do not end it (thoughts, and remarks ahead of a call), then one that does: a call
or an answer. So the model may always think first, and a turn has one call at most, whatever `parallel_tool_calls` says.

Control tokens are named by id, and free text takes any token but these, so what the constraint takes for the end of a
message is what the parser does. The token that ends the turn is no part of the constraint: xgrammar lets a stop token
come where the constraint is fulfilled, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Sequence

from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolSet
from inference.engine import Guide
from inference.formats.guides import (
    any_of,
    arguments,
    check_grammars,
    const,
    forced_tool,
    json_schema,
    printed,
    sequence,
    structural_tag,
    text_schema,
)
from inference.formats.harmony_tools import recipient
from inference.larkgrammar import grammar_ebnf
from inference.tokenizer import Tokenizer

CONTROL = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|constrain|>", "<|message|>")


class HarmonyGuides:
    """Constraints in one vocabulary's ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids = {name: tokenizer.special(name) for name in CONTROL}
        never = [tokenizer.special(name) for name in (*CONTROL, "<|endoftext|>") if tokenizer.has_special(name)]
        self._free = f'{{"type": "any_tokens", "exclude_tokens": {never}}}'

    def guide(self, tools: ToolSet, text: TextFormat) -> Guide | None:
        """The constraint that a request asks for.

        Raises:
            ApiError: a schema that is none (invalid_json_schema), a grammar that is broken (invalid_value) or can't be
                held to (unsupported_parameter), or a choice that leaves nothing to call.
        """
        check_grammars(tools)
        schema = text_schema(text)
        left = tools.callable()
        if tools.choice.mode == "required":
            forced_tool(tools)  # refuses a choice that leaves nothing
            return self._turn(("analysis", "commentary"), [self._call(tool, True) for tool in left])
        if schema is not None:
            # A remark beside the answer would be text that isn't of the schema.
            calls = [self._call(tool, True) for tool in left]
            return self._turn(("analysis",), [*calls, self._final(json_schema(schema), constrained=True)])
        if left and (tools.choice.names or any(tool.strict or tool.grammar for tool in left)):
            calls = [self._call(tool, tool.strict) for tool in left]
            return self._turn(("analysis", "commentary"), [*calls, self._final(self._free)])
        return None

    def _turn(self, leading: Sequence[str], last: Sequence[str]) -> Guide:
        channel = any_of(map(const, leading))
        again = f"{self._control('<|end|>')}, {self._control('<|start|>')}, {const('assistant')}"
        message = sequence(self._control("<|channel|>"), channel, self._control("<|message|>"), self._free, again)
        return structural_tag(sequence(f'{{"type": "star", "content": {message}}}', any_of(last)))

    def _final(self, content: str, *, constrained: bool = False) -> str:
        header = [self._control("<|channel|>"), const("final")]
        if constrained:
            header.append(any_of([const(""), self._json_mark()]))
        return sequence(*header, self._control("<|message|>"), content)

    def _call(self, tool: Tool, exact: bool) -> str:
        """A call in the forms that the model writes of itself: whom it calls stands before the channel or behind it."""
        to = const(f" to={recipient(tool.model_name)}")
        channel = sequence(self._control("<|channel|>"), const("commentary"))
        header = any_of([sequence(channel, to), sequence(to, channel)])
        if tool.kind == "custom":
            content = self._free
            if tool.grammar is not None:
                content = f'{{"type": "grammar", "grammar": {printed(grammar_ebnf(*tool.grammar))}}}'
            return sequence(header, self._control("<|message|>"), content)
        return sequence(header, self._json_mark(), self._control("<|message|>"), arguments(tool, exact))

    def _json_mark(self) -> str:
        constrain = sequence(self._control("<|constrain|>"), const("json"))
        return any_of([const(" json"), constrain, sequence(const(" "), constrain)])

    def _control(self, name: str) -> str:
        return f'{{"type": "token", "token": {self._ids[name]}}}'
