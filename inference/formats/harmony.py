"""Harmony, the format of gpt-oss: messages with a channel and an addressee, thoughts and calls among them.

    <|start|>system<|message|>You are …<|end|><|start|>user<|message|>Hi<|end|>
    <|start|>assistant<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>Hello<|return|>

Rendered so that the ids equal those of OpenAI's library (the tests compare with it), with these differences, all of
them deliberate:

- the date is left out unless it is an option of the format: a prompt that changes at midnight loses its prefix cache;
- thoughts are forgotten once the round they are of (from one user message to the next) has an answer. The library
  forgets those before the first answer of all, and shows them again while a later turn is at its calls;
- a tool's output names its addressee before the channel, as OpenAI documents it (newer forks put it behind);
- a namespace of tools is listed beside `functions` among those whose calls go to the channel `commentary`;
- developer and system messages inside a conversation are developer messages.

Tools in a namespace are declared and called as `namespace.name`, others as `functions.name`. Freeform tools take a
string, and a call of one is the bare text. The model makes one call a turn: `<|call|>` ends it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

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
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import ToolSet
from inference.formats.format import Brief, Opening
from inference.formats.harmony_guides import CONTROL, HarmonyGuides
from inference.formats.harmony_parser import HarmonyParser
from inference.formats.harmony_tools import namespaces, recipient, tools_section
from inference.formats.plaintext import text_only
from inference.tokenizer import Tokenizer, VocabularyError, load_tokenizer, pack_ids

_EFFORTS = {
    "none": "low",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."


@dataclass(frozen=True, slots=True)
class HarmonyOptions:
    """The system message. `current_date` (YYYY-MM-DD) is for those who restart the service each day."""

    identity: str = "You are ChatGPT, a large language model trained by OpenAI."
    knowledge_cutoff: str = "2024-06"
    current_date: str | None = None


class HarmonyFormat:
    """`inference.formats.format.Format` for gpt-oss."""

    name = "harmony"
    forgetful = True
    appendable = True
    speaks_ids = True

    def __init__(self, tokenizer: Tokenizer, options: HarmonyOptions | None = None) -> None:
        self.tokenizer = tokenizer
        self.options = options or HarmonyOptions()
        self._ids = {name: tokenizer.special(name) for name in CONTROL}
        self._packed = {name: pack_ids([i]) for name, i in self._ids.items()}
        self._opening = Opening(self._packed["<|start|>"] + tokenizer.encode("assistant"))
        self._guides = HarmonyGuides(tokenizer)
        ends = ["<|return|>", "<|call|>", "<|endoftext|>"]
        self.stop_ids = tuple(tokenizer.special(name) for name in ends if tokenizer.has_special(name))

    def head(self, brief: Brief) -> bytes:
        tools = () if brief.tools.choice.mode == "none" else brief.tools.tools
        date = self.options.current_date
        about = [self.options.identity, f"Knowledge cutoff: {self.options.knowledge_cutoff}"]
        if date is not None:
            about.append(f"Current date: {date}")
        channels = _CHANNELS
        if tools:
            names = ", ".join(f"'{name}'" for name in namespaces(tools))
            channels += f"\nCalls to these tools must go to the commentary channel: {names}."
        effort = _EFFORTS.get(brief.effort or "", "medium")
        system = "\n\n".join(["\n".join(about), f"Reasoning: {effort}", channels])
        sections = []
        if given := "\n\n".join(text for text in (brief.instructions, brief.preamble) if text):
            sections.append(f"# Instructions\n\n{given}")
        if tools:
            sections.append(tools_section(tools))
        if (schema := _shown_schema(brief.text)) is not None:
            sections.append(f"# Response Formats\n\n## response\n\n{schema}")
        developer = self._message("developer", "\n\n".join(sections)) if sections else b""
        return self._message("system", system) + developer

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """See `Format.body`. Raises `ApiError` (unsupported_parameter) for images and files."""
        names = dict(calls)
        forgotten = _forgotten(items)
        out = []
        for i, item in enumerate(items):
            match item:
                case Message():
                    out.append(self._said(item, _channel(items, i)))
                case FunctionCall() | CustomToolCall():
                    name = called_name(item)
                    names[item.call_id] = name
                    out.append(self._call(item, name))
                case FunctionCallOutput() | CustomToolCallOutput():
                    # A call that nobody knows can't come this far, but an output says something even so.
                    author = recipient(names[item.call_id]) if item.call_id in names else "tool"
                    out.append(self._message(f"{author} to=assistant", text_only(item.output), "commentary"))
                case Reasoning() if i not in forgotten and (thought := _thought(item)):
                    out.append(self._message("assistant", thought, "analysis"))
                case _:
                    pass
        return b"".join(out)

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """See `Format.whole`."""
        return self.head(brief) + self.body(items, calls)

    def forgets(self, items: Sequence[Item], added: Sequence[Item]) -> bool:
        """See `Format.forgets`: thoughts are forgotten once an answer stands behind them."""
        return any(at < len(items) for at in _forgotten([*items, *added]))

    def opening(self, brief: Brief) -> Opening:
        """See `Format.opening`. The model may think first, so a call that it must make is not part of the prompt."""
        guide = self._guides.guide(brief.tools, brief.text)
        return self._opening if guide is None else Opening(self._opening.ids, guide=guide)

    def spoken(self, sampled: Sequence[int]) -> tuple[int, bytes]:
        """See `Format.spoken`. A cut-off message is closed; a mere header goes, or is closed if it is all there is."""
        ids = self._ids
        ends = (ids["<|end|>"], ids["<|call|>"])
        kept = len(sampled)
        if kept and sampled[-1] in self.stop_ids and sampled[-1] != ids["<|call|>"]:
            kept -= 1
        marks = (*ends, ids["<|start|>"], ids["<|channel|>"], ids["<|message|>"])
        last = next((i for i in range(kept - 1, -1, -1) if sampled[i] in marks), None)
        if last is None:
            return kept, self._packed["<|end|>"]
        if sampled[last] == ids["<|message|>"]:
            return kept, self._packed["<|call|>" if self._calls(sampled, last) else "<|end|>"]
        whole = next((i + 1 for i in range(last, -1, -1) if sampled[i] in ends), 0)
        return (whole, b"") if whole else (kept, self._packed["<|message|>"] + self._packed["<|end|>"])

    def parser(self, tools: ToolSet, opening: Opening) -> HarmonyParser:  # noqa: ARG002  nothing is forced
        return HarmonyParser(self.tokenizer, tools)

    def _calls(self, sampled: Sequence[int], message: int) -> bool:
        """Whether the header that ends at `message` is that of a call."""
        edges = (self._ids["<|start|>"], self._ids["<|end|>"], self._ids["<|message|>"])
        start = next((i for i in range(message - 1, -1, -1) if sampled[i] in edges), -1)
        return b"to=" in b"".join(map(self.tokenizer.token_bytes, sampled[start + 1 : message]))

    def _message(self, author: str, text: str, channel: str | None = None, kind: str | None = None) -> bytes:
        """A whole message. `kind` is the content type; `channel` may be followed by whom it addresses."""
        parts = [self._packed["<|start|>"], self.tokenizer.encode(author)]
        if channel is not None:
            parts += [self._packed["<|channel|>"], self.tokenizer.encode(channel)]
        if kind is not None:
            parts += [self._packed["<|constrain|>"], self.tokenizer.encode(kind)]
        called = author == "assistant" and channel is not None and " to=" in channel
        end = self._packed["<|call|>" if called else "<|end|>"]
        return b"".join([*parts, self._packed["<|message|>"], self.tokenizer.encode(text), end])

    def _said(self, item: Message, channel: str) -> bytes:
        text = text_only(item.content)
        if item.role == "assistant":
            return self._message("assistant", text, channel) if text else b""
        if item.role == "user":
            return self._message("user", text)
        return self._message("developer", f"# Instructions\n\n{text}")

    def _call(self, item: FunctionCall | CustomToolCall, name: str) -> bytes:
        channel = f"commentary to={recipient(name)}"
        if isinstance(item, CustomToolCall):
            return self._message("assistant", item.input, channel)
        return self._message("assistant", item.arguments.strip() or "{}", channel + " ", "json")


def _channel(items: Sequence[Item], i: int) -> str:
    """On which channel an assistant's message was. What stands before a call is a remark, unless it says otherwise."""
    item = items[i]
    phase = item.phase if isinstance(item, Message) else None
    followed = i + 1 < len(items) and isinstance(items[i + 1], FunctionCall | CustomToolCall)
    return "commentary" if phase == "commentary" or (phase is None and followed) else "final"


def _forgotten(items: Sequence[Item]) -> set[int]:
    """Which items are thoughts that have an answer behind them, in the same round."""
    found: set[int] = set()
    answered = False
    for i in range(len(items) - 1, -1, -1):
        item = items[i]
        if isinstance(item, Message) and item.role == "user":
            answered = False
        elif isinstance(item, Message) and item.role == "assistant" and text_of(item.content):
            answered = answered or _channel(items, i) == "final"
        elif answered and isinstance(item, Reasoning) and _thought(item):
            found.add(i)
    return found


def _thought(item: Reasoning) -> str:
    """The raw reasoning, or its summary."""
    return text_of(item.content or item.summary)


def _shown_schema(text: TextFormat) -> str | None:
    """The schema that the answer must follow, as the model is told it."""
    if text.type == "text":
        return None
    return text.schema if text.type == "json_schema" else '{"type":"object"}'


def harmony_format(source: Path | str | Tokenizer) -> HarmonyFormat:
    """The format of a checkpoint's folder, or of a tokenizer.

    Raises:
        VocabularyError: unreadable files, or a vocabulary without Harmony's control tokens.
    """
    tokenizer = load_tokenizer(source) if isinstance(source, Path | str) else source
    if missing := [name for name in CONTROL if not tokenizer.has_special(name)]:
        raise VocabularyError(f"this is no Harmony model: its vocabulary has no control token {', '.join(missing)}")
    return HarmonyFormat(tokenizer)
