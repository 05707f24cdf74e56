"""Tool calls in the Hermes form, read as they arrive.

    <tool_call>                                     <tool_call>
    {"name": "search", "arguments": {"q": "x"}}     {"name": "apply_patch"}
    </tool_call>                                    the input, as it is
                                                    </tool_call>

Left, any tool. Right, the raw form of freeform tools: nothing in it is escaped, so a grammar can be held to it. It ends
at the first line that begins with `</tool_call>`. An input that has such a line is written in the left form, its text
under `input` (`fits_raw`).

The arguments go out while the model still writes them. Once a call has been announced (its name and the first of its
arguments were read) it can't be taken back: if the rest then goes wrong, the client gets what the model wrote and can
tell the model. What the client sees of calls that are not as above:

    written                                          seen
    no JSON object, no `name`, or a name that is     text, to the letter
      no string or empty
    a name that no tool has                          a function call of that name; agents answer it with an error
    the name of one namespaced tool, without its     a call of that tool
      namespace
    `arguments` before `name`; other keys; keys      a call; the first `name` and the first `arguments` count
      twice
    no `arguments`                                   a function's are `{}`
    a function's arguments in a JSON string          what the string says
    a freeform tool's `{"input": "…"}` or `"…"`      what the string says; a lone surrogate is U+FFFD
    a freeform tool's object without `input`         the object, as written; nothing for `{}`
    raw line ends, unknown escapes in strings        as written; decoded in freeform input
    an object without its last brace, or with        the call
      braces too many
    arguments cut off by `</tool_call>`              a complete call with what was written
    other text where JSON must go on                 the call ends there, complete; the rest is text
    a raw input with `</tool_call>` inside a line    input, unless nothing or another `<tool_call>` follows it:
                                                     then the end of the call
    the end of the output                            an announced call without end; without a name, text; with a
                                                     name alone, a call without arguments and without end
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, TextDelta
from gateway.protocol.tools import Tool
from inference.formats.jsonstream import ObjectReader, Piece, StringDecoder

OPEN = "<tool_call>"
CLOSE = "</tool_call>"
INPUT_KEY = "input"
"""The one property of the function that a freeform tool is shown as."""


class _FunctionText:
    """Arguments of a function: as the model wrote them, except that a model that put them into a JSON string meant what
    the string says."""

    def __init__(self) -> None:
        self._begun = False
        self._decoder: StringDecoder | None = None

    def feed(self, raw: str, complete: bool) -> str:
        if not self._begun:
            self._begun = True
            if raw.startswith('"'):
                self._decoder = StringDecoder()
                raw = raw[1:]
        if self._decoder is None:
            return raw
        text = self._decoder.feed(raw)
        return text + self._decoder.finish() if complete else text


class FreeformText:
    """Input of a freeform tool: the string under `input`, or a bare string. If there is no such string the model's own
    words, raw, so that nothing is lost (an empty object: nothing)."""

    def __init__(self) -> None:
        self._raw: list[str] = []
        self._object: ObjectReader | None = None
        self._value: _FunctionText | None = None
        self._over = False

    def feed(self, raw: str, complete: bool) -> str:
        begun = self._value is not None or self._object is not None
        if not begun:
            if raw.startswith("{"):
                self._object = ObjectReader()
            else:
                self._value = _FunctionText()
        if self._object is None:
            return "" if self._value is None else self._value.feed(raw, complete)
        text = "" if self._over else self._inside(self._object, raw)
        if self._value is None:
            self._raw.append(raw)
            if complete:
                words = "".join(self._raw)
                return words if words.strip("{} \t\r\n") else ""
        return text

    def _inside(self, reader: ObjectReader, raw: str) -> str:
        text = ""
        position, passing = 0, 0
        while not reader.failed:
            pieces, position = reader.feed(raw, position, passing)
            for piece in pieces:
                if piece.key == INPUT_KEY and not self._over:
                    self._value = self._value or _FunctionText()
                    text += self._value.feed(piece.raw, piece.complete)
                    self._over = piece.complete
            if not reader.stopped or not reader.inside:
                return text
            passing = 1  # a `<` outside strings means nothing in here
        return text


_LONGEST_BLANK = 64  # white space of more than this is no markup's
_RAW_LEAD = re.compile(r"[ \t\r}]{0,64}")
_RAW_GAP = re.compile(r"\s{0,64}")


class _RawText:
    """The raw form of a freeform tool's input, from behind the closing brace of the object with its name."""

    def __init__(self) -> None:
        self._begun = False
        self._held = ""
        self._empty = True  # nothing has gone out, so that a closing tag here is at the start of a line

    def feed(self, text: str) -> tuple[str, str | None]:
        """(what is input for certain, what lies behind the call; None while the call goes on)."""
        text, self._held = self._held + text, ""
        if not self._begun:
            lead = _RAW_LEAD.match(text)
            start = 0 if lead is None else lead.end()
            if start == len(text) < _LONGEST_BLANK:
                self._held = text
                return "", None
            self._begun = True
            text = text[start:].removeprefix("\n")
        position = 0
        while (close := text.find(CLOSE, position)) >= 0:
            position = close + len(CLOSE)
            if text[close - 1 : close] == "\n" or (self._empty and not close):
                return text[: max(close - 1, 0)], text[position:]
            gap = _RAW_GAP.match(text, position)
            end = position if gap is None else gap.end()
            following = text[end : end + len(OPEN)]
            if following == OPEN:
                return text[:close], text[position:]
            if end + len(following) == len(text) and OPEN.startswith(following):
                return self._hold(text, close), None
        start = text.rfind("<", position)
        if start < 0 or not CLOSE.startswith(text[start:]):
            start = len(text)
        return self._hold(text, start - (text[start - 1 : start] == "\n")), None

    def finish(self) -> tuple[str, bool]:
        """No more text: (the rest of the input, whether the call is complete)."""
        held, self._held = self._held, ""
        if held.startswith(CLOSE) and not held[len(CLOSE) :].strip():
            return "", True
        return held if self._begun else "", False

    def _hold(self, text: str, start: int) -> str:
        self._held = text[start:]
        self._empty = self._empty and not start
        return text[:start]


def fits_raw(text: str) -> bool:
    """Whether a freeform tool's input comes back from the raw form as it was."""
    return _RawText().feed(f"\n{text}\n{CLOSE}") == (text, "")


class CallReader:
    """Reads one call, from behind `<tool_call>`. `lead` is the white space that was taken for markup before it."""

    def __init__(self, tools: Mapping[str, Tool], lead: str = "") -> None:
        self._tools = tools
        self._seen = [lead, OPEN]  # what is text if no call comes of it
        self._reader = ObjectReader()
        self._name: str | None = None
        self._name_raw: list[str] = []
        self._arguments: list[Piece] = []  # read before the name
        self._text: _FunctionText | FreeformText | None = None  # None: not announced
        self._read = False  # the arguments are complete
        self._raw: _RawText | None = None
        self._held = ""
        self._ended = False

    def feed(self, text: str) -> tuple[list[Delta], str | None]:
        """What `text` adds, and what of it lies behind the call; None while the call goes on."""
        text, self._held = self._held + text, ""
        if self._ended:
            return [], self._behind(text)
        out: list[Delta] = []
        if self._raw is not None:
            return self._pass_raw(self._raw, text, out)
        position, passing = 0, 0
        while True:
            start = position
            pieces, position = self._reader.feed(text, position, passing)
            if self._text is None:
                self._seen.append(text[start:position])
            for piece in pieces:
                self._take(piece, out)
            if self._reader.done:
                return self._end(out, text[position:])
            if self._reader.failed:
                return self._fail(out, text[position:])
            if not self._reader.stopped:
                return out, None
            rest = text[position:]
            if rest.startswith(CLOSE):
                return self._cut(out, rest)
            if CLOSE.startswith(rest):
                self._held = rest
                return out, None
            if not self._reader.inside:
                return self._fail(out, rest)
            passing = 1

    def finish(self) -> list[Delta]:
        """No more text: the call was cut off. It stays open if its name was read; otherwise it was text."""
        out: list[Delta] = []
        if self._ended:
            return out
        if self._raw is not None:
            text, complete = self._raw.finish()
            out += [CallDelta(text)] if text else []
            out += [CallEnd()] if complete else []
        elif self._text is not None:
            self._deliver(self._held, True, out)
        elif self._name is not None:
            self._announce(out)
        else:
            out.append(TextDelta("".join(self._seen) + self._held))
        return out

    def _take(self, piece: Piece, out: list[Delta]) -> None:
        if piece.key == "name" and self._name is None:
            self._name_raw.append(piece.raw)
            if piece.complete:
                self._name = self._named()
                if self._name is not None and self._arguments:
                    self._announce(out)
        elif piece.key == "arguments" and not self._read:
            self._read = piece.complete
            if self._text is None:
                self._arguments.append(piece)
                if self._name is not None:
                    self._announce(out)
            else:
                self._deliver(piece.raw, piece.complete, out)

    def _named(self) -> str | None:
        """The name, None if it is none."""
        raw = "".join(self._name_raw)
        self._name_raw.clear()
        if not raw.startswith('"'):
            return None
        decoder = StringDecoder()
        return (decoder.feed(raw[1:]) + decoder.finish()) or None

    def _announce(self, out: list[Delta]) -> _FunctionText | FreeformText:
        """A name and the first of the arguments are there: from here on it is a call. Returns what reads them."""
        assert self._name is not None
        tool = self._tools.get(self._name) or self._by_own_name(self._name)
        if tool is None:
            # Passed on: agents answer a call of an unknown tool with an error, from which the model recovers.
            tool = Tool("function", self._name)
        out.append(CallStart(tool.kind, tool.name, tool.namespace))
        self._text = reader = FreeformText() if tool.kind == "custom" else _FunctionText()
        if self._arguments:
            self._deliver("".join([piece.raw for piece in self._arguments]), self._arguments[-1].complete, out)
        self._arguments.clear()
        self._seen.clear()
        return reader

    def _by_own_name(self, name: str) -> Tool | None:
        """A namespaced tool that the model called without its namespace, if only one fits."""
        fitting = [tool for tool in self._tools.values() if tool.name == name]
        return fitting[0] if len(fitting) == 1 else None

    def _deliver(self, raw: str, complete: bool, out: list[Delta]) -> None:
        assert self._text is not None
        if text := self._text.feed(raw, complete):
            out.append(CallDelta(text))

    def _end(self, out: list[Delta], rest: str) -> tuple[list[Delta], str | None]:
        """The object is closed. A call without arguments is one with none, `{}`, or a freeform tool's in raw form."""
        if self._name is None:
            return self._fail(out, rest)
        if self._text is None and isinstance(self._announce(out), FreeformText):
            self._raw = _RawText()
            return self._pass_raw(self._raw, rest, out)
        if not self._read:
            self._deliver("{}", True, out)
        out.append(CallEnd())
        self._ended = True
        return out, self._behind(rest)

    def _cut(self, out: list[Delta], rest: str) -> tuple[list[Delta], str | None]:
        """`</tool_call>` came before the object was closed: the model thinks it's done, so the call is."""
        if self._name is None:
            return self._fail(out, rest)
        if self._text is not None and not self._read:
            self._read = True
            self._deliver("", True, out)
        return self._end(out, rest)

    def _pass_raw(self, raw: _RawText, text: str, out: list[Delta]) -> tuple[list[Delta], str | None]:
        piece, rest = raw.feed(text)
        if piece:
            out.append(CallDelta(piece))
        if rest is not None:
            out.append(CallEnd())
        return out, rest

    def _fail(self, out: list[Delta], rest: str) -> tuple[list[Delta], str | None]:
        """No JSON any more: text if nothing was announced, else the end of the call if its arguments are complete."""
        if self._text is None:
            out.append(TextDelta("".join(self._seen)))
            return out, rest
        out.append(CallEnd())
        self._ended = True
        return out, self._behind(rest)

    def _behind(self, text: str) -> str | None:
        """What follows the markup of an ended call: white space and surplus braces belong to it."""
        text = text.lstrip("} \t\r\n")
        if text.startswith(CLOSE):
            return text[len(CLOSE) :]
        if CLOSE.startswith(text):
            self._held = text
            return None
        return text
