"""ChatML: SmolLM2, Qwen2.5, Qwen3 and their like. Turns between `<|im_start|>` and `<|im_end|>`, tools the Hermes way.

Rendered so that the ids equal those of the checkpoint's own Jinja template (the tests compare with transformers), with
these differences, all of them deliberate:

- client text never becomes a control token, markup such as `<tool_call>` included;
- tools are shown to models whose template ignores them;
- a developer message is a system message; instructions and a leading system message share one system turn;
- arguments of calls are rendered as the model wrote them, not parsed and printed again;
- a freeform tool is called in a form of its own, its input as it is (`inference.formats.toolcalls`);
- where a template shows thoughts, it shows those of the round only that the last question began, or all. Templates that
  show none lose them with the next question, as the first kind does: a model keeps what it thought while it works on an
  answer. An empty block, which Qwen3's template puts into the last message, is written by `opening` only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

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
    called_name,
    text_of,
)
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.chatml_parser import END_THINK, MARKUP, THINK, ChatMLParser
from inference.formats.checkpoint_files import read_template, tokenizer_with
from inference.formats.format import Brief, Opening
from inference.formats.guides import CallLayout, forced_tool, output_guide, parameters
from inference.formats.toolcalls import CLOSE, INPUT_KEY, OPEN, fits_raw
from inference.tokenizer import Tokenizer, VocabularyError, pack_ids

START = "<|im_start|>"
END = "<|im_end|>"

_TOOL_RESPONSE = "<tool_response>"
_END_TOOL_RESPONSE = "</tool_response>"
_NO_REASONING = ("none", "minimal")

# Which turn is open in a body: none, one that takes nothing more, tool outputs, or an assistant's: with reasoning only,
# with an empty message, or with text or calls.
_Turn = Literal["none", "message", "outputs", "thought", "blank", "calls"]

# The wording of Qwen's template, which these models were trained on.
_TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>"
)
_TOOLS_BEHIND = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
    "</tool_call>"
)


def call_begin(name: str) -> str:
    """The fixed start of a call, up to the colon before its arguments."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}, "arguments":'


def raw_begin(name: str) -> str:
    """The fixed start of a freeform tool's call, up to its input."""
    return f'{OPEN}\n{{"name": {json.dumps(name, ensure_ascii=False)}}}\n'


def _begin(tool: Tool) -> str:
    return raw_begin(tool.model_name) if tool.kind == "custom" else call_begin(tool.model_name)


HERMES = CallLayout(trigger=OPEN, begin=_begin, end="}\n" + CLOSE, between="\n", lead=" ", raw_end="\n" + CLOSE)


@dataclass(frozen=True, slots=True)
class ChatMLOptions:
    """How one model's template differs from others.

    `default_system`: the system turn when none is given. `thinking`: the model writes `<think>` blocks.
    `keeps_thinking`: the template shows reasoning of earlier turns; `keeps_round`: only that since the last message of
    a user. `opens_thinking`: the template itself writes `<think>` after the assistant's header, always. `names_media`:
    images and files are shown as `[input_image]` instead of being refused: the scripted double takes any request.
    """

    default_system: str | None = None
    thinking: bool = False
    keeps_thinking: bool = False
    keeps_round: bool = False
    opens_thinking: bool = False
    names_media: bool = False


class ChatMLFormat:
    """`inference.formats.format.Format` for ChatML models."""

    name = "chatml"
    appendable = True
    speaks_ids = True

    def __init__(self, tokenizer: Tokenizer, options: ChatMLOptions | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or ChatMLOptions()
        self.forgetful = self.options.thinking and not self.options.keeps_thinking
        self._start = pack_ids([tokenizer.special(START)])
        self._end_id = tokenizer.special(END)
        self._end = pack_ids([self._end_id])
        self._newline = tokenizer.encode("\n")
        markup = [*MARKUP, _TOOL_RESPONSE, _END_TOOL_RESPONSE]
        self._markup = {name: pack_ids([tokenizer.special(name)]) for name in markup if tokenizer.has_special(name)}
        self._markup_pattern = re.compile(f"({'|'.join(map(re.escape, self._markup))})" if self._markup else "(?!)")
        self._opening = self._writer().start("assistant\n").ids()
        ends = [self._end_id]
        if tokenizer.has_special("<|endoftext|>"):
            ends.append(tokenizer.special("<|endoftext|>"))
        self.stop_ids = tuple(ends)
        thought = ("" if self.options.opens_thinking else THINK, END_THINK) if self.options.thinking else None
        self._layout = replace(HERMES, thought=thought)

    def head(self, brief: Brief) -> bytes:
        tools = brief.tools
        given = [text for text in (brief.instructions, brief.preamble) if text is not None]
        system = "\n\n".join(given) if given else self.options.default_system
        shown = () if tools.choice.mode == "none" else tools.tools
        if system is None and not shown:
            return b""
        writer = self._writer().start("system\n").text(system or "")
        if shown:
            writer.markup(("" if system is None else "\n\n") + _TOOLS_BEFORE)
            for tool in shown:
                writer.text("\n" + _tool_json(tool))
            writer.markup(_TOOLS_BEHIND)
        return writer.end().ids()

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:  # noqa: ARG002  outputs name no tool here
        """See `Format.body`. Raises `ApiError` (unsupported_parameter) for images and files."""
        writer = self._writer()
        turn: _Turn = "none"
        shown = self._shown_from(items)
        for i, item in enumerate(items):
            match item:
                case Message():
                    turn = self._message(writer, turn, item)
                case FunctionCall() | CustomToolCall():
                    if turn not in ("thought", "blank", "calls"):
                        writer.close(turn).start("assistant\n")
                    elif turn == "calls":
                        writer.text("\n")
                    _render_call(writer, item)
                    turn = "calls"
                case FunctionCallOutput() | CustomToolCallOutput():
                    if turn != "outputs":
                        writer.close(turn).start("user")
                    writer.text("\n").markup(_TOOL_RESPONSE).text("\n" + self._text(item.output) + "\n")
                    writer.markup(_END_TOOL_RESPONSE)
                    turn = "outputs"
                case Reasoning() if i >= shown and (thought := text_of(item.content or item.summary)):
                    writer.close(turn).start("assistant\n")
                    writer.markup(THINK).text("\n" + thought.strip("\n") + "\n").markup(END_THINK).text("\n\n")
                    turn = "thought"
                case _:
                    pass
        return writer.close(turn).ids()

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """See `Format.whole`."""
        return self.head(brief) + self.body(items, calls)

    def forgets(self, items: Sequence[Item], added: Sequence[Item]) -> bool:
        """See `Format.forgets`. Of an empty block, which no item tells of, anything a model has said may hold one."""
        return self.forgetful and any(map(_is_said, items)) and any(map(_is_question, added))

    def opening(self, brief: Brief) -> Opening:
        tools, effort = brief.tools, brief.effort
        guide, room = output_guide(tools, brief.text, self._layout)
        ids, forced = self._opening, ""
        if self.options.opens_thinking and room:
            ids, forced = ids + self._writer().markup(THINK).text("\n").ids(), f"{THINK}\n"
        elif self.options.thinking and (not room or effort in _NO_REASONING):
            # An empty block is how these templates say "answer at once"; under a guide there is no other way.
            ids += self._writer().markup(THINK).text("\n\n").markup(END_THINK).text("\n\n").ids()
        if (tool := forced_tool(tools)) is not None:
            forced = _begin(tool)
            ids += self._writer().markup(OPEN).text(forced.removeprefix(OPEN)).ids()
        return Opening(ids, forced, guide)

    def spoken(self, sampled: Sequence[int]) -> tuple[int, bytes]:
        """See `Format.spoken`."""
        ended = bool(sampled) and sampled[-1] == self._end_id
        return len(sampled), self._newline if ended else self._end + self._newline

    def parser(self, tools: ToolSet, opening: Opening) -> ChatMLParser:
        return ChatMLParser(self.tokenizer, tools, self.options.thinking, opening.forced)

    def _writer(self) -> _Writer:
        return _Writer(self.tokenizer, self._start, self._end, self._markup, self._markup_pattern)

    def _shown_from(self, items: Sequence[Item]) -> int:
        """From which item on thoughts are rendered."""
        if self.options.keeps_thinking:
            return 0
        if not self.options.keeps_round:
            return len(items)
        return max((i for i, item in enumerate(items) if _is_question(item)), default=0)

    def _message(self, writer: _Writer, turn: _Turn, item: Message) -> _Turn:
        text = self._text(item.content)
        if item.role != "assistant":
            writer.close(turn).start(f"{'system' if item.role == 'developer' else item.role}\n").text(text)
            return "message"
        if turn == "thought":
            writer.text(text.lstrip("\n"))
        else:
            writer.close(turn).start("assistant\n").text(text)
        return "calls" if text else "blank"

    def _text(self, content: str | tuple[Any, ...]) -> str:
        """The text of a message or a tool output. Raises `ApiError` for what this model can't see."""
        if isinstance(content, str) or not any(isinstance(part, InputImage | InputFile) for part in content):
            return text_of(content)
        if self.options.names_media:
            media = (InputImage, InputFile)
            return "".join(f"[{part.type}]" if isinstance(part, media) else text_of((part,)) for part in content)
        kind = next(part.type for part in content if isinstance(part, InputImage | InputFile))
        raise ApiError("unsupported_parameter", f"this model reads text only; leave out the {kind} part", "input")


def _render_call(writer: _Writer, call: FunctionCall | CustomToolCall) -> None:
    name = called_name(call)
    if isinstance(call, CustomToolCall):
        if fits_raw(call.input):
            writer.markup(OPEN).text(f"{raw_begin(name).removeprefix(OPEN)}{call.input}\n").markup(CLOSE)
            return
        arguments = json.dumps({INPUT_KEY: call.input}, ensure_ascii=False)
    else:
        arguments = call.arguments.strip() or "{}"
    writer.markup(OPEN).text(f"{call_begin(name).removeprefix(OPEN)} {arguments}}}\n").markup(CLOSE)


class _Writer:
    """Collects ids. Text between two control tokens is encoded as one piece, as a template's output would be."""

    def __init__(
        self, tokenizer: Tokenizer, start: bytes, end: bytes, markup: dict[str, bytes], pattern: re.Pattern[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._start = start
        self._end = end
        self._markup = markup
        self._pattern = pattern
        self._out: list[bytes] = []
        self._text: list[str] = []

    def text(self, text: str) -> _Writer:
        """Text that stays text."""
        self._text.append(text)
        return self

    def markup(self, text: str) -> _Writer:
        """Text of ours, in which the markup the vocabulary knows becomes its token."""
        for piece in self._pattern.split(text):
            if (control := self._markup.get(piece)) is not None:
                self._control(control)
            else:
                self._text.append(piece)
        return self

    def start(self, header: str) -> _Writer:
        """A turn begins."""
        self._control(self._start)
        return self.text(header)

    def end(self) -> _Writer:
        """The turn is over."""
        self._control(self._end)
        return self.text("\n")

    def close(self, turn: _Turn) -> _Writer:
        """The turn is over, if one is open."""
        return self if turn == "none" else self.end()

    def ids(self) -> bytes:
        """Everything so far."""
        self._control(b"")
        return b"".join(self._out)

    def _control(self, control: bytes) -> None:
        if text := "".join(self._text):
            self._out.append(self._tokenizer.encode(text))
        self._text.clear()
        self._out.append(control)


def _is_said(item: Item) -> bool:
    """Whether a model said this."""
    if isinstance(item, Message):
        return item.role == "assistant"
    return isinstance(item, Reasoning | FunctionCall | CustomToolCall)


def _is_question(item: Item) -> bool:
    """Whether a user says this. Qwen3's template takes a message that looks like a tool's answer for one."""
    if not isinstance(item, Message) or item.role != "user":
        return False
    text = text_of(item.content)
    return not (text.startswith(_TOOL_RESPONSE) and text.endswith(_END_TOOL_RESPONSE))


def _tool_json(tool: Tool) -> str:
    """A tool as the template shows it: OpenAI's chat-completions form."""
    function: dict[str, Any] = {"name": tool.model_name}
    description = tool.description or ""
    if tool.grammar is not None:
        syntax, definition = tool.grammar
        description += f"\n\nThe input must match this {syntax} grammar:\n{definition}"
    if tool.kind == "custom":
        form = f"{raw_begin(tool.model_name)}<input>\n{CLOSE}"
        description += (
            f"\n\nIt takes plain text, not arguments in JSON. Write the input as it is, line by line:\n{form}"
        )
    if description:
        function["description"] = description.lstrip("\n")
    if tool.kind != "custom":
        function["parameters"] = parameters(tool)
    return json.dumps({"type": "function", "function": function}, ensure_ascii=False)


# A literal system turn in a template, as Python or Jinja write it: `<|im_start|>system\nYou are …<|im_end|>`.
_DEFAULT_SYSTEM = re.compile(r"<\|im_start\|>system(?:\\n|\n)((?:[^{}'\"<\\]|\\.)*)<\|im_end\|>")
_OPENS_THINKING = re.compile(r"assistant(?:\\n|\n)<think>(?:\\n|\n)['\"]")


def options_from_template(template: str) -> ChatMLOptions:
    """What a checkpoint's Jinja template says about the model. Read as text, never run.

    Raises:
        VocabularyError: not a ChatML template.
    """
    if START not in template:
        raise VocabularyError(f"the chat template has no {START}: this is no ChatML model")
    found = _DEFAULT_SYSTEM.search(template)
    thinking = THINK in template
    return ChatMLOptions(
        default_system=None if found is None else re.sub(r"\\(.)", _unescape, found.group(1)),
        thinking=thinking,
        keeps_thinking=thinking and "reasoning_content" in template and "last_query_index" not in template,
        # how Qwen3's template calls the message from which on it shows reasoning
        keeps_round=thinking and "last_query_index" in template,
        opens_thinking=_OPENS_THINKING.search(template) is not None,
    )


def _unescape(match: re.Match[str]) -> str:
    return {"n": "\n", "t": "\t"}.get(match.group(1), match.group(1))


def chatml_format(source: Path | str | Tokenizer) -> ChatMLFormat:
    """The format of a checkpoint's folder, or of a tokenizer without a template.

    Raises:
        VocabularyError: unreadable files, no chat template, or one that is not ChatML.
    """
    if not isinstance(source, Path | str):
        return ChatMLFormat(source)
    directory = Path(source)
    options = options_from_template(read_template(directory))
    return ChatMLFormat(tokenizer_with(directory, (START, END)), options)
