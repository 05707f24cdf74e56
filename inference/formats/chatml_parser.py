"""What a ChatML model says, taken apart as it arrives: text, `<think>` blocks, Hermes tool calls.

Neighbouring pieces of one feed come out as one. White space at the joints (before `<tool_call>`, between calls, around
a `<think>` block) is the template's, not the model's, and is left out: a line end before a call, and blank text with
nothing but markup after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby

from gateway.protocol.deltas import CallDelta, Delta, ReasoningDelta, TextDelta
from gateway.protocol.tools import ToolSet
from inference.detokenizer import Detokenizer
from inference.formats.toolcalls import OPEN, CallReader
from inference.tokenizer import Tokenizer

THINK = "<think>"
END_THINK = "</think>"
MARKUP = (OPEN, "</tool_call>", THINK, END_THINK)

_LONGEST_BLANK = 64  # more white space than this at the start of a text is the model's, not the template's


class ChatMLParser:
    """Parser of one turn. `forced` is output that the prompt's opening already contains."""

    def __init__(self, tokenizer: Tokenizer, tools: ToolSet, thinking: bool, forced: str = "") -> None:
        # Where the vocabulary has markup as control tokens, their names are what the parser looks for.
        shown = {tokenizer.special(name) for name in MARKUP if tokenizer.has_special(name)}
        self._detokenizer = Detokenizer(tokenizer, shown)
        self._step = self._detokenizer.step
        self._tools = tools.by_model_name() if tools.callable() else {}
        openers = ([OPEN] if self._tools else []) + ([THINK] if thinking else [])
        self._opener = re.compile("|".join(openers)) if openers else None
        self._openers = openers
        self._call: CallReader | None = None
        self._thinking = False
        self._held = ""
        self._fresh = "start" if openers else ""  # "start" of the turn, "joint" behind markup, "" inside a text
        self._plain = not openers
        self._reasoning_tokens = 0
        self._early: list[Delta] = []
        if forced:
            self._route(forced, self._early)

    @property
    def reasoning_tokens(self) -> int:
        """Ids inside a `<think>` block, the tags included."""
        return self._reasoning_tokens

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """See `inference.formats.format.OutputParser`."""
        out, self._early = self._early, []
        step, run = self._step, ""
        for token_id in ids:
            text = step(token_id)
            if text and self._plain and (self._opener is None or ("<" not in text and text[-1] != "\n")):
                run += text  # nothing in it can be markup
                continue
            if run:
                out.append(TextDelta(run))
                run = ""
            thinking = self._thinking
            if text:
                self._route(text, out)
            self._reasoning_tokens += thinking or self._thinking
        if run:
            out.append(TextDelta(run))
        return out if len(out) < 2 else _merged(out)

    def finish(self) -> list[Delta]:
        """See `inference.formats.format.OutputParser`."""
        out, self._early = self._early, []
        if text := self._detokenizer.finish():
            self._route(text, out)
        held, self._held = self._held, ""
        if self._call is not None:
            out.extend(self._call.finish())
        elif self._thinking:
            _add(out, ReasoningDelta, held)
        else:
            self._say(held, out)
        return _merged(out)

    def _route(self, text: str, out: list[Delta]) -> None:
        """Passes text on to the reader of the state, and what that leaves to the next."""
        while text:
            if self._call is not None:
                deltas, rest = self._call.feed(text)
                out.extend(deltas)
                if rest is not None:
                    # Text means the markup was none; then what follows belongs to that text.
                    self._fresh = "" if deltas and isinstance(deltas[-1], TextDelta) else "joint"
                    self._call = None
                text = rest or ""
            elif self._thinking:
                text = self._think(text, out)
            else:
                text = self._visible(text, out)
        self._plain = self._call is None and not self._thinking and not self._held and not self._fresh

    def _visible(self, text: str, out: list[Delta]) -> str:
        """Visible text up to the next opening tag; returns what is behind the tag."""
        text, self._held = self._held + text, ""
        match = None if self._opener is None else self._opener.search(text)
        if match is None:
            keep = len(text) - _undecided(text, self._openers)
            if self._fresh and not text[:keep].strip() and keep <= _LONGEST_BLANK:
                self._held = text
                return ""
            self._say(text[:keep], out)
            self._held = text[keep:]
            return ""
        before = text[: match.start()]
        blank = self._fresh and not before.strip() and len(before) <= _LONGEST_BLANK
        body = "" if blank else before.removesuffix("\n") if match.group() == OPEN else before
        self._say(body, out)
        if match.group() == OPEN:
            self._call = CallReader(self._tools, before[len(body) :] if not blank or self._fresh == "start" else "")
        else:
            self._thinking = True
            self._fresh = "joint"
        return text[match.end() :]

    def _say(self, text: str, out: list[Delta]) -> None:
        """Visible text goes out; behind markup without its leading white space."""
        if self._fresh == "joint":
            text = text.lstrip()
        if text:
            self._fresh = ""
            out.append(TextDelta(text))

    def _think(self, text: str, out: list[Delta]) -> str:
        """Reasoning up to `</think>`; returns what is behind it."""
        text, self._held = self._held + text, ""
        if self._fresh:  # the line end behind <think>
            text = text.lstrip("\n")
            if not text:
                return ""
        end = text.find(END_THINK)
        if end < 0:
            keep = len(text) - _undecided(text, [END_THINK])
            self._held = text[keep:]
            if keep:
                self._fresh = ""
            _add(out, ReasoningDelta, text[:keep])
            return ""
        _add(out, ReasoningDelta, text[:end].removesuffix("\n"))
        self._thinking = False
        self._fresh = "joint"
        return text[end + len(END_THINK) :]


def _add(out: list[Delta], kind: type[TextDelta] | type[ReasoningDelta], text: str) -> None:
    if text:
        out.append(kind(text))


def _merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind as one: a client gets an event for each delta."""
    out: list[Delta] = []
    for kind, run in groupby(deltas, type):
        if kind is TextDelta or kind is ReasoningDelta or kind is CallDelta:
            out.append(kind("".join([delta.text for delta in run if isinstance(delta, kind)])))
        else:
            out += run
    return out


def _undecided(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end may be the beginning of a tag, or the line end before one."""
    start = text.rfind("<")
    if start < 0 or not any(tag.startswith(text[start:]) for tag in tags):
        start = len(text)
    if tags and text.endswith("\n", 0, start):
        start -= 1
    return len(text) - start
