"""What gpt-oss says, taken apart as it arrives: messages with a header that says on which channel and to whom.

    <|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}<|call|>

A prompt ends behind the first `<|start|>assistant`. Control tokens are told by their ids: no text can be taken for one.

    channel      addressed to   gives
    analysis     nobody         reasoning
    commentary   nobody         text: a remark ahead of calls
    final        nobody         text: the answer
    any          a tool         a call

What is not well-formed is salvaged, never an error:

- junk in a header is ignored; the channel is the first word that names one, `final` if none does;
- the tool is what follows `to=` or begins with `functions.`, before the channel or behind it. Words that make up a
  known name when joined are one; `user`, `assistant` and `all` are nobody. An unknown tool is passed on, as agents
  answer its call with an error; a request without tools has nobody to call;
- a header that ends without `<|message|>`, or is longer than `MAX_HEADER_IDS`: what is no part of a header is content.
  Begun anew or cut off with the output it gives nothing, unless it has no `<|channel|>` either: then it was an answer;
- `<|start|>` or `<|channel|>` in a message: it is over, and another begins. Other control tokens in it are ignored;
- a message of another role (the model plays somebody else's part): nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, MessageStart, ReasoningDelta, TextDelta
from gateway.protocol.tools import Tool, ToolSet
from inference.detokenizer import Detokenizer
from inference.formats.harmony_header import Header, Section, broken_header, whole_header
from inference.formats.toolcalls import INPUT_KEY
from inference.tokenizer import Tokenizer

MAX_HEADER_IDS = 300
"""A namespace and a name of 128 characters each, one token a character, and what belongs around them."""

_ENDS = ("<|end|>", "<|return|>", "<|call|>", "<|endoftext|>")
_OWN = "assistant"  # the role of a header without `<|start|>`
_SECTIONS: dict[str, Section] = {"<|channel|>": "channel", "<|constrain|>": "type"}


class HarmonyParser:
    """Parser of one turn, from behind the prompt's `<|start|>assistant`."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolSet) -> None:
        names = ("<|start|>", "<|message|>", *_SECTIONS, *_ENDS)
        self._controls = {tokenizer.special(name): name for name in names if tokenizer.has_special(name)}
        self._detokenizer = Detokenizer(tokenizer)
        self._tools = tools.by_model_name() if tools.callable() else {}
        self._header: Header | None = None  # None: still being read
        self._sections: dict[Section, str] = {"role": _OWN}
        self._header_ids = 0
        self._call: _CallText | None = None
        self._run: list[str] = []  # content read and not yet given out
        self._said = ""  # the kind of the last message that gave something
        self._reasoning_tokens = 0

    @property
    def reasoning_tokens(self) -> int:
        """Ids of messages on the channel `analysis`, with their headers and ends."""
        return self._reasoning_tokens

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `inference.formats.format.OutputParser`."""
        out: list[Delta] = []
        step, controls = self._detokenizer.step, self._controls
        for token_id in ids:
            name = controls.get(token_id)
            if name is not None:
                self._control(name, out)
                continue
            text = step(token_id)
            header = self._header
            if header is None:
                self._header_ids += 1
                self._write(text or "")
                if self._header_ids > MAX_HEADER_IDS:
                    self._open(broken_header(self._sections, self._tools), out)
                continue
            if header.kind == "reasoning":
                self._reasoning_tokens += 1
            if text:
                self._run.append(text)
        self._flush(out)
        return out

    def finish(self) -> list[Delta]:
        """See `inference.formats.format.OutputParser`."""
        out: list[Delta] = []
        tail = self._detokenizer.finish()
        if self._header is None:
            self._write(tail)
            if self._is_beginning():
                return out
            self._open(broken_header(self._sections, self._tools), out, needs_content=True)
        else:
            self._run.append(tail)
        self._flush(out)
        if self._call is not None and (text := self._call.cut()):
            out.append(CallDelta(text))
        return out

    def _write(self, text: str) -> None:
        """More text of the header's last section."""
        if text:
            self._sections[next(reversed(self._sections))] += text

    def _is_beginning(self) -> bool:
        """Whether the header is a mere beginning, without content that it swallowed."""
        text = self._sections["role"].strip()
        return len(self._sections) > 1 or _OWN.startswith(text) or "to=".startswith(text.removeprefix(_OWN).strip())

    def _control(self, name: str, out: list[Delta]) -> None:
        tail = self._detokenizer.finish()
        if self._header is None:
            self._header_ids += 1
            self._write(tail)
            self._control_in_header(name, out)
            return
        if self._header.kind == "reasoning":
            self._reasoning_tokens += name not in ("<|start|>", "<|channel|>")
        self._run.append(tail)
        if name in ("<|message|>", "<|constrain|>"):
            return
        self._close(out)
        if name not in _ENDS:
            self._header_ids = 1
        if name == "<|channel|>":
            self._sections["channel"] = ""
        elif name == "<|start|>":
            self._sections["role"] = ""

    def _control_in_header(self, name: str, out: list[Delta]) -> None:
        if name == "<|message|>":
            self._open(whole_header(self._sections, self._tools), out)
        elif (section := _SECTIONS.get(name)) is not None:
            before = self._sections.pop(section, "")
            self._sections[section] = before and before + " "  # the last one now, with what it had
        else:
            if name != "<|start|>" or not self._is_beginning():
                self._open(broken_header(self._sections, self._tools), out, needs_content=name != "<|call|>")
            self._close(out)
            if name == "<|start|>":
                self._sections["role"] = ""
                self._header_ids = 1

    def _open(self, header: Header, out: list[Delta], *, needs_content: bool = False) -> None:
        """The header is read and content follows, `header.rest` first."""
        if needs_content and not header.rest:
            header = Header("nothing")
        self._header = header
        if header.kind == "reasoning":
            self._reasoning_tokens += self._header_ids
        # Here and not with the first text, which is to be alone with the log-probabilities of its ids.
        if header.kind == "text" or header.kind == self._said == "reasoning":
            out.append(MessageStart(header.phase))
        if header.tool is not None:
            tool = header.tool
            out.append(CallStart(tool.kind, tool.name, tool.namespace))
            self._call = _CallText(tool, header.json)
            self._said = "call"
        self._run.append(header.rest)

    def _close(self, out: list[Delta]) -> None:
        """The message is over."""
        self._flush(out)
        if self._call is not None:
            if text := self._call.end():
                out.append(CallDelta(text))
            out.append(CallEnd())
        self._call = None
        self._header = None
        self._sections = {"role": _OWN}
        self._header_ids = 0

    def _flush(self, out: list[Delta]) -> None:
        """Gives out the content read so far."""
        text = "".join(self._run)
        self._run.clear()
        if not text or self._header is None or self._header.kind == "nothing":
            return
        if self._call is not None:
            if text := self._call.feed(text):
                out.append(CallDelta(text))
            return
        self._said = self._header.kind
        out.append(TextDelta(text) if self._header.kind == "text" else ReasoningDelta(text))


class _CallText:
    """Arguments of a function as the model wrote them, `{}` if it wrote none; a freeform tool's input to the letter.

    A model that put either into JSON (a string with the arguments, an object with the input) meant what that says: such
    text is held until it is complete. What then is no JSON comes out as it is.
    """

    def __init__(self, tool: Tool, said_json: bool) -> None:
        self._function = tool.kind == "function"
        self._wrapping = '"' if self._function else '"{' if said_json else ""
        self._held = ""
        self._begun = False
        self._holding = False

    def feed(self, text: str) -> str:
        """What `text` adds."""
        if not self._begun:
            text, self._held = self._held + text, ""
            start = text.lstrip()
            if not start and (self._function or self._wrapping):
                self._held = text
                return ""
            self._begun = True
            self._holding = bool(self._wrapping) and start[0] in self._wrapping
            text = start if self._function else text
        if self._holding:
            self._held += text
            return ""
        return text

    def end(self) -> str:
        """What is left of a complete call."""
        if self._function and not self._begun:
            return "{}"
        return self._unwrapped() if self._holding else self._held

    def cut(self) -> str:
        """What is left of a call that was cut off."""
        return self._held if self._begun or not self._function else ""

    def _unwrapped(self) -> str:
        try:
            value = json.loads(self._held, strict=False)
        except (ValueError, RecursionError):
            return self._held
        if isinstance(value, dict) and not self._function:
            value = value.get(INPUT_KEY, next(iter(value.values())) if len(value) == 1 else None)
        return value if isinstance(value, str) else self._held
