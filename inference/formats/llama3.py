"""Llama 3, 3.1, 3.2 and 3.3 Instruct: turns under `<|start_header_id|>` headers, calls as bare JSON.

Rendered so that the ids equal those of the checkpoint's own Jinja template (the tests compare with transformers), with
these differences, all of them deliberate:

- tools are in the system turn, as by the template's own switch `tools_in_user_message=false`. By default it puts them
  into the first user message; but tools belong to a request and messages to the conversation, so tools that change
  between turns would change what is already in the prefix cache;
- today's date is the one the template falls back to, never the calendar's: at midnight a moving date would throw away
  every cached conversation, in the middle of its loop. Who wants the model to know the date says it in the input;
- the calls of one turn share a message, with `; ` between them, where the template takes one call only;
- client text never becomes a control token;
- tools are shown to Llama 3.0 too, whose template ignores them;
- a developer message is a system message; instructions and a leading system message share the system turn;
- arguments of calls are rendered as the model wrote them, not parsed and printed again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gateway.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    called_name,
)
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.engine import Guide
from inference.formats.checkpoint_files import read_template, tokenizer_with
from inference.formats.format import Brief, Opening
from inference.formats.guides import CallLayout, forced_tool, output_guide, parameters
from inference.formats.llama3_parser import END_OF_TEXT, LONGEST_BLANK, MESSAGE_ENDS, PYTHON_TAG, Llama3Parser
from inference.formats.plaintext import text_only
from inference.formats.toolcalls import INPUT_KEY
from inference.tokenizer import Tokenizer, VocabularyError, pack_ids

BEGIN = "<|begin_of_text|>"
START_HEADER = "<|start_header_id|>"
END_HEADER = "<|end_header_id|>"
END = "<|eot_id|>"
DEFAULT_TODAY = "26 Jul 2024"
"""The date that the templates fall back to."""

_BETWEEN = "; "
# The wording of Llama 3.1's template, whose sentences touch.
_TOOLS_BEFORE = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)


def call_begin(name: str) -> str:
    """The fixed start of a call, up to the colon before its arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "parameters":'


BARE_JSON = CallLayout(
    trigger='{"name": ', begin=lambda tool: call_begin(tool.model_name), end="}", between=_BETWEEN, lead=" "
)


@dataclass(frozen=True, slots=True)
class Llama3Options:
    """How one model's template differs from others. As they stand: Llama 3.0's.

    `knowledge_date`: the system turn names the end of the model's knowledge and today's date, and is always there.
    `today`: the date it names. `environment`: it says `Environment: ipython` when there are tools.
    """

    knowledge_date: str | None = None
    today: str = DEFAULT_TODAY
    environment: bool = False


class Llama3Format:
    """`inference.formats.format.Format` for Llama 3.x Instruct models."""

    name = "llama3"
    forgetful = False
    appendable = True
    speaks_ids = True

    def __init__(self, tokenizer: Tokenizer, options: Llama3Options | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or Llama3Options()
        self._begin = pack_ids([tokenizer.special(BEGIN)])
        self._end = pack_ids([tokenizer.special(END)])
        self._headers = {
            role: pack_ids([tokenizer.special(START_HEADER)])
            + tokenizer.encode(role)
            + pack_ids([tokenizer.special(END_HEADER)])
            for role in ("system", "user", "assistant", "ipython")
        }
        ends = {name: tokenizer.special(name) for name in (*MESSAGE_ENDS, END_OF_TEXT) if tokenizer.has_special(name)}
        self.stop_ids = tuple(ends.values())
        self._message_ends = [ends[name] for name in MESSAGE_ENDS if name in ends]

    def head(self, brief: Brief) -> bytes:
        given = [text.strip() for text in (brief.instructions, brief.preamble) if text is not None]
        shown = () if brief.tools.choice.mode == "none" else brief.tools.tools
        options = self.options
        if not given and not shown and options.knowledge_date is None:
            return self._begin
        text = "Environment: ipython\n" if shown and options.environment else ""
        if options.knowledge_date is not None:
            text += f"Cutting Knowledge Date: {options.knowledge_date}\nToday Date: {options.today}\n\n"
        if shown:
            text += _TOOLS_BEFORE + "".join(f"{_tool_json(tool)}\n\n" for tool in shown)
        return self._begin + self._message("system", text + "\n\n".join(given).strip())

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:  # noqa: ARG002  outputs name no tool here
        """See `Format.body`. Raises `ApiError` (unsupported_parameter) for images and files."""
        out: list[bytes] = []
        calling: list[str] = []  # calls of the assistant's message that is open
        for item in items:
            match item:
                case FunctionCall() | CustomToolCall():
                    calling.append(_call_json(item))
                case Message() | FunctionCallOutput() | CustomToolCallOutput():
                    out.append(self._called(calling))
                    calling.clear()
                    out.append(self._said(item))
                case _:
                    pass
        out.append(self._called(calling))
        return b"".join(out)

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        return self.head(brief) + self.body(items, calls)

    def forgets(self, items: Sequence[Item], added: Sequence[Item]) -> bool:  # noqa: ARG002
        """See `Format.forgets`: these models have no thoughts."""
        return False

    def opening(self, brief: Brief) -> Opening:
        guide, free = output_guide(brief.tools, brief.text, BARE_JSON)
        if guide is not None and free:
            guide = _calls_or_text(brief.tools)
        tool = forced_tool(brief.tools)
        forced = "" if tool is None else call_begin(tool.model_name)
        return Opening(self._headers["assistant"] + self.tokenizer.encode("\n\n" + forced), forced, guide)

    def spoken(self, sampled: Sequence[int]) -> tuple[int, bytes]:
        """See `Format.spoken`. `<|eom_id|>`, by which the model waits for a tool, stays; `<|end_of_text|>` has no place
        in a conversation."""
        last = sampled[-1] if sampled else None
        if last in self._message_ends:
            return len(sampled), b""
        return len(sampled) - (last in self.stop_ids), self._end

    def parser(self, tools: ToolSet, opening: Opening) -> Llama3Parser:
        return Llama3Parser(self.tokenizer, tools, opening)

    def _said(self, item: Message | FunctionCallOutput | CustomToolCallOutput) -> bytes:
        if isinstance(item, Message):
            role = "system" if item.role == "developer" else item.role
            return self._message(role, text_only(item.content).strip())
        return self._message("ipython", json.dumps(text_only(item.output), ensure_ascii=False))

    def _called(self, calls: Sequence[str]) -> bytes:
        return self._message("assistant", _BETWEEN.join(calls)) if calls else b""

    def _message(self, role: str, text: str) -> bytes:
        # Encoded as one piece, as a template's output would be.
        return self._headers[role] + self.tokenizer.encode("\n\n" + text) + self._end


def _call_json(call: FunctionCall | CustomToolCall) -> str:
    name = called_name(call)
    if isinstance(call, CustomToolCall):
        arguments = json.dumps({INPUT_KEY: call.input}, ensure_ascii=False)
    else:
        arguments = call.arguments.strip() or "{}"
    return f"{call_begin(name)} {arguments}}}"


def _tool_json(tool: Tool) -> str:
    """A tool as the template shows it: OpenAI's chat-completions form, indented."""
    function: dict[str, Any] = {"name": tool.model_name}
    description = tool.description or ""
    if tool.grammar is not None:
        syntax, definition = tool.grammar
        description += f"\n\nThe input must match this {syntax} grammar:\n{definition}"
    if description:
        function["description"] = description
    function["parameters"] = parameters(tool)
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False, indent=4)


# What `Llama3Parser` takes for text, whatever follows: it begins with no brace. Nor with the start of a control token,
# as an engine may match such a token by its name.
_FREE_START = f"[ \\t\\r\\n]{{0,{LONGEST_BLANK}}}([^{{< \\t\\r\\n]|<+[^|<])"
_FREE_PARTS = [{"type": "regex", "pattern": _FREE_START}, {"type": "any_text", "excludes": [PYTHON_TAG]}]
_FREE_TEXT = json.dumps({"type": "optional", "content": {"type": "sequence", "elements": _FREE_PARTS}})


def _calls_or_text(tools: ToolSet) -> Guide:
    """The constraint for a free choice between calls, of which some must be exact, and text.

    A trigger inside the text, as formats with markup have it, would do too little here and too much: a call in another
    order of keys would pass by it, and any JSON with a name in it would have to be a call.
    """
    # What is not strict is free in its arguments, as it is with other formats.
    loose = {"type": "object"}
    offered = tuple(t if t.strict or t.kind == "custom" else replace(t, parameters=loose) for t in tools.tools)
    required = ToolSet(offered, ToolChoice("required", tools.choice.names), tools.parallel)
    guide, _ = output_guide(required, TextFormat(), BARE_JSON)
    assert guide is not None
    calls = guide.value.partition('"format": ')[2].removesuffix("}")  # parsing fifty schemas would take milliseconds
    if (tool := forced_tool(required)) is not None:  # then a guide begins behind the call's start
        begin = json.dumps(call_begin(tool.model_name))
        calls = f'{{"type": "sequence", "elements": [{{"type": "const_string", "value": {begin}}}, {calls}]}}'
    form = f'{{"type": "or", "elements": [{calls}, {_FREE_TEXT}]}}'
    return Guide("structural_tag", f'{{"type": "structural_tag", "format": {form}}}')


_KNOWLEDGE_DATE = re.compile(r"Cutting Knowledge Date: ([^\\\"'\n]+)")
_TODAY = re.compile(r"date_string\s*=\s*[\"']([^\\\"']+)[\"']")


def options_from_template(template: str) -> Llama3Options:
    """What a checkpoint's Jinja template says about the model. Read as text, never run.

    Raises:
        VocabularyError: not a template of Llama 3.
    """
    if START_HEADER not in template or END not in template:
        raise VocabularyError(f"the chat template lacks {START_HEADER} or {END}: this is no Llama 3 model")
    knowledge, today = _KNOWLEDGE_DATE.search(template), _TODAY.search(template)
    return Llama3Options(
        knowledge_date=None if knowledge is None else knowledge.group(1),
        today=DEFAULT_TODAY if today is None else today.group(1),
        environment="Environment: ipython" in template,
    )


def llama3_format(directory: Path | str) -> Llama3Format:
    """The format of a checkpoint's folder.

    Raises:
        VocabularyError: unreadable files, no chat template, or files that are not Llama 3's.
    """
    directory = Path(directory)
    options = options_from_template(read_template(directory))
    return Llama3Format(tokenizer_with(directory, (BEGIN, START_HEADER, END_HEADER, END)), options)
