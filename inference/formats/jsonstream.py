"""JSON that arrives in pieces: where values end, and what strings say, without waiting for the whole.

Lenient where a model's slip does no harm (raw line ends and unknown escapes in strings, anything between balanced
brackets), since the raw text is what clients get. All of it is linear in the text, whatever the portions.
"""

from __future__ import annotations

import json
import re
from typing import NamedTuple

REPLACEMENT = "\ufffd"

_WHITE = re.compile(r"[ \t\r\n]*")
_STRING_STOP = re.compile(r'["\\]')
_NESTED_STOP = re.compile(r'["{}\[\]<]')
_SCALAR = re.compile(r"[-+.\w]*")
_PLAIN = re.compile(r'[^"\\]+')
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")


class _NotJson(Exception):
    """The text can't go on as JSON; `position` is where, in the portion just fed."""

    def __init__(self, position: int) -> None:
        super().__init__(f"not JSON at {position}")
        self.position = position


class ValueScanner:
    """Finds the end of one JSON value. `stopped`: it halted at a `<` outside strings, where no JSON has one."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_kind", "stopped")

    def __init__(self) -> None:
        self._kind = ""
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.stopped = False

    def scan(self, text: str, start: int, passing: int = 0) -> tuple[int, bool]:
        """(where the value ends or the text does, whether the value is complete). `passing` characters at the start
        are taken as they are (a `<` it stopped at before). Raises `_NotJson` if no value can begin here."""
        self.stopped = False
        position = start + passing
        if not self._kind:
            self._begin(text[start], start)
        if self._kind == "scalar":
            match = _SCALAR.match(text, position)
            end = position if match is None else match.end()
            return end, end < len(text)
        complete = False
        while position < len(text) and not complete and not self.stopped:
            position = self._string(text, position) if self._in_string else self._structure(text, position)
            complete = self._depth == 0 and not self._in_string and not self.stopped
        return position, complete

    def _begin(self, first: str, position: int) -> None:
        if first in "{[":
            self._kind = "nested"
        elif first == '"':
            self._kind = "string"
        elif first.isalnum() or first == "-":
            self._kind = "scalar"
        else:
            raise _NotJson(position)

    def _structure(self, text: str, position: int) -> int:
        """Behind the next bracket or quote outside strings, at a `<`, or the end of the text."""
        match = _NESTED_STOP.search(text, position)
        if match is None:
            return len(text)
        mark = match.group()
        if mark == "<":
            self.stopped = True
            return match.start()
        if mark == '"':
            self._in_string = True
        else:
            self._depth += 1 if mark in "{[" else -1
        return match.end()

    def _string(self, text: str, position: int) -> int:
        """Behind the closing quote, or the end of the text."""
        if self._escaped:
            self._escaped = False
            position += 1
        while (match := _STRING_STOP.search(text, position)) is not None:
            if match.group() == '"':
                self._in_string = False
                return match.end()
            position = match.end() + 1
            if position > len(text):
                self._escaped = True
        return len(text)


class Piece(NamedTuple):
    """Raw text of the value of `key`; `complete` if it ends there."""

    key: str
    raw: str
    complete: bool


class ObjectReader:
    """Takes one JSON object apart into its values, as they arrive. `done` after the closing brace; `stopped` at a `<`
    outside strings; `failed` where the text can't go on as JSON."""

    __slots__ = ("_expect", "_key", "_key_raw", "_scanner", "done", "failed", "stopped")

    def __init__(self) -> None:
        self._expect = "{"  # what comes next: { key : value , (after a value) or nothing more
        self._key = ""
        self._key_raw: list[str] = []
        self._scanner: ValueScanner | None = None
        self.done = False
        self.stopped = False
        self.failed = False

    @property
    def inside(self) -> bool:
        """Whether it is in the middle of a key or a value."""
        return self._scanner is not None

    def feed(self, text: str, start: int = 0, passing: int = 0) -> tuple[list[Piece], int]:
        """Pieces in `text` from `start`, and where reading stopped: the end of the text or of the object, a `<`, or the
        first character that can't be (a malformed key: behind it). `passing` characters at the start are taken as they
        are: a `<` it stopped at before."""
        pieces: list[Piece] = []
        position, self.stopped = start, False
        try:
            while not self.done and not self.stopped:
                if self._scanner is None:
                    match = _WHITE.match(text, position)
                    position = position if match is None else match.end()
                if position >= len(text):
                    break
                position = self._next(text, position, passing, pieces)
                passing = 0
        except _NotJson as error:
            self.failed = True
            position = error.position
        return pieces, position

    def _next(self, text: str, position: int, passing: int, pieces: list[Piece]) -> int:
        """One step: a portion of a key or value, or one punctuation mark."""
        if self._scanner is not None:
            return self._scan(self._scanner, text, position, passing, pieces)
        mark = text[position]
        if mark == "<":
            self.stopped = True
            return position
        if self._expect == "value" or (self._expect == "key" and mark == '"'):
            self._scanner = ValueScanner()
            return position
        self._punctuation(mark, position)
        return position + 1

    def _scan(self, scanner: ValueScanner, text: str, position: int, passing: int, pieces: list[Piece]) -> int:
        end, complete = scanner.scan(text, position, passing)
        self.stopped = scanner.stopped
        if self._expect == "value":
            if end > position or complete:
                pieces.append(Piece(self._key, text[position:end], complete))
        else:
            self._key_raw.append(text[position:end])
        if complete:
            if self._expect == "key":
                self._key = _plain_string("".join(self._key_raw), end)
                self._key_raw.clear()
            self._expect = ":" if self._expect == "key" else ","
            self._scanner = None
        return end

    def _punctuation(self, mark: str, position: int) -> None:
        if mark == "{" and self._expect == "{":
            self._expect = "key"
        elif mark == ":" and self._expect == ":":
            self._expect = "value"
        elif mark == "," and self._expect == ",":
            self._expect = "key"
        elif mark == "}" and self._expect in (",", "key"):
            self.done = True
        else:
            raise _NotJson(position)


def _plain_string(raw: str, position: int) -> str:
    """A whole JSON string, decoded."""
    try:
        value = json.loads(raw, strict=False)
    except ValueError:
        raise _NotJson(position) from None
    return str(value)


class StringDecoder:
    """What a JSON string says, as it arrives. Escapes and surrogate pairs may be split anywhere; a lone surrogate gives
    U+FFFD, an escape JSON does not know gives itself. Text after the closing quote is ignored."""

    __slots__ = ("_closed", "_held", "_high")

    def __init__(self) -> None:
        self._held = ""
        self._high = 0
        self._closed = False

    def feed(self, raw: str) -> str:
        """The text that `raw` adds; the opening quote must not be fed."""
        if self._closed:
            return ""
        raw, self._held = self._held + raw, ""
        out: list[str] = []
        position = 0
        while position < len(raw):
            if (plain := _PLAIN.match(raw, position)) is not None:
                out.append(self._lone() + plain.group())
                position = plain.end()
            elif raw[position] == '"':
                self._closed = True
                break
            else:
                size = 6 if raw[position + 1 : position + 2] == "u" else 2
                if position + size > len(raw) and '"' not in raw[position + 2 :]:
                    self._held = raw[position:]
                    break
                text, used = self._escape(raw[position : position + size])
                out.append(text)
                position += used
        return "".join(out)

    def finish(self) -> str:
        """No more text: an unpaired surrogate comes out as U+FFFD, an unfinished escape is dropped."""
        self._held = ""
        return self._lone()

    def _lone(self) -> str:
        if not self._high:
            return ""
        self._high = 0
        return REPLACEMENT

    def _escape(self, escape: str) -> tuple[str, int]:
        """(text, characters used) of one escape."""
        if escape[1] != "u":
            return self._lone() + _ESCAPES.get(escape[1], escape), 2
        match = _HEX4.fullmatch(escape, 2)
        if match is None:
            return self._lone() + escape[:2], 2
        code = int(match.group(), 16)
        if 0xD800 <= code < 0xDC00:
            before, self._high = self._lone(), code
            return before, 6
        if 0xDC00 <= code < 0xE000:
            if not self._high:
                return REPLACEMENT, 6
            high, self._high = self._high, 0
            return chr(0x10000 + ((high - 0xD800) << 10) + (code - 0xDC00)), 6
        return self._lone() + chr(code), 6


_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}
