r"""Regular expressions of custom tools, as grammars.

A subset on which Rust's and Python's syntax agree, taken to match the whole text: `^` and `$` may stand at the ends
and mean nothing more. What a grammar can't say is refused: look-around, back-references, lazy and possessive
repetition, word boundaries, Unicode properties. `\d`, `\w` and `\s` are ASCII; `.` is all but a line feed.
"""

from __future__ import annotations

import re
from functools import lru_cache

from inference.ebnf import Chain, Chars, Choice, GrammarError, Node, Repeat, Text, but, character, chars, unsupported

MAX_DEPTH = 64  # of groups
MAX_COUNT = 10_000  # in {m,n}

_COUNT = re.compile(r"\{(\d{1,6})(,(\d{1,6})?)?\}")
_GROUP_NAME = re.compile(r"\?P?<[A-Za-z_]\w*>", re.ASCII)
_GROUP_FLAGS = re.compile(r"\?([a-z]+)([:)])")
_HEX = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xu]\{([0-9a-fA-F]{1,6})\})")
_CONTROL = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "0": "\0"}
_SETS = {
    "d": chars([(0x30, 0x39)]),
    "w": chars([(0x30, 0x39), (0x41, 0x5A), (0x61, 0x7A), (0x5F, 0x5F)]),
    "s": chars([(0x09, 0x0D), (0x20, 0x20)]),
}
_REFUSED_ESCAPES = {
    "b": "a word boundary", "B": "a word boundary", "p": "a Unicode property", "P": "a Unicode property",
    "A": "an anchor", "z": "an anchor", "Z": "an anchor", "k": "a back-reference", "c": "a control escape",
}  # fmt: skip
_ANY = but(Chars(((0x0A, 0x0A),)))
_EVERYTHING = but(Chars(()))


def read_regex(pattern: str, flags: str = "", *, anchors: bool = False) -> Node:
    """The grammar of a regular expression. `flags`: letters, of which `i` and `s` change something and `m`, `u` and `l`
    do not. With `anchors`, `^` and `$` may stand at the ends.

    Raises:
        GrammarError: broken, or with something that has no counterpart.
    """
    return _Reader(pattern, flags, anchors=anchors).read()


class _Reader:
    """Recursive descent over the pattern."""

    def __init__(self, pattern: str, flags: str, *, anchors: bool) -> None:
        self._text = pattern
        self._at = 0
        self._depth = 0
        self._anchors = anchors
        self._flags = ""
        self._set_flags(flags)

    def read(self) -> Node:
        node = self._choice()
        if self._at < len(self._text):
            raise GrammarError("the regular expression has a ')' too many")
        return node

    def _set_flags(self, flags: str) -> None:
        if strange := set(flags) - set("imsul"):
            raise unsupported(f"the flag '{min(strange)}' of a regular expression")
        self._flags += flags

    def _peek(self, size: int = 1) -> str:
        return self._text[self._at : self._at + size]

    def _choice(self) -> Node:
        options = [self._chain()]
        while self._peek() == "|":
            self._at += 1
            options.append(self._chain())
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _chain(self) -> Node:
        if self._anchors and not self._depth and self._peek() == "^":
            self._at += 1
        parts: list[Node] = []
        while (char := self._peek()) and char not in "|)":
            if self._anchors and not self._depth and self._peek(2) in ("$", "$|"):
                self._at += 1
                break
            part = self._repeated(self._atom(char))
            before = parts[-1] if parts else None
            if isinstance(part, Text) and isinstance(before, Text):
                parts[-1] = Text(before.value + part.value)
            else:
                parts.append(part)
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        counts = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(self._peek())
        if counts is not None:
            self._at += 1
        elif (match := _COUNT.match(self._text, self._at)) is not None:
            self._at = match.end()
            least = int(match[1])
            most = least if match[2] is None else None if match[3] is None else int(match[3])
            if max(least, most or 0) > MAX_COUNT:
                raise unsupported(f"a repetition of more than {MAX_COUNT} times")
            if most is not None and most < least:
                raise GrammarError("a repetition in the regular expression has a maximum below its minimum")
            counts = (least, most)
        else:
            return node
        if self._peek() == "?":
            raise unsupported("a lazy repetition")
        if self._peek() == "+":
            raise unsupported("a possessive repetition")
        if self._peek() == "*" or _COUNT.match(self._text, self._at):
            raise GrammarError("the regular expression repeats a repetition")
        return Repeat(node, *counts)

    def _atom(self, char: str) -> Node:
        self._at += 1
        match char:
            case "(":
                return self._group()
            case "[":
                return self._class()
            case ".":
                return _EVERYTHING if "s" in self._flags else _ANY
            case "\\":
                found = self._escape()
                return found if isinstance(found, Chars) else self._letter(found)
            case "*" | "+" | "?":
                raise GrammarError("the regular expression repeats nothing")
            case "^" | "$":
                raise unsupported("an anchor in the middle of a regular expression")
            case _:
                return self._letter(char)

    def _letter(self, char: str) -> Node:
        if "i" in self._flags and len(_cases(char)) > 1:
            return chars((ord(case), ord(case)) for case in _cases(char))
        return Text(char)

    def _group(self) -> Node:
        """From behind the opening parenthesis to behind the closing one. Flags hold to the end of their group."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise unsupported(f"a regular expression with more than {MAX_DEPTH} groups in one another")
        outer = self._flags
        if self._peek() == "?":
            if (match := _GROUP_NAME.match(self._text, self._at)) is not None:
                self._at = match.end()
            elif self._peek(2) == "?:":
                self._at += 2
            elif (match := _GROUP_FLAGS.match(self._text, self._at)) is not None:
                self._set_flags(match[1])
                self._at = match.end()
                if match[2] == ")":  # for all that follows in the group around
                    self._depth -= 1
                    return Chain(())
            else:
                raise unsupported("look-around or another special group")
        node = self._choice()
        if self._peek() != ")":
            raise GrammarError("the regular expression has a group that is not closed")
        self._at += 1
        self._depth -= 1
        self._flags = outer
        return node

    def _escape(self) -> str | Chars:
        """What an escape means, from behind the backslash."""
        char = self._peek()
        if (match := _HEX.match(self._text, self._at - 1)) is not None:
            self._at = match.end()
            code = int(match[1] or match[2] or match[3] or match[4], 16)
            return character(code)
        self._at += 1
        if char.lower() in _SETS:
            found = _SETS[char.lower()]
            return found if char.islower() else but(found)
        if char in _CONTROL:
            return _CONTROL[char]
        if char in _REFUSED_ESCAPES:
            raise unsupported(_REFUSED_ESCAPES[char])
        if char.isdigit():
            raise unsupported("a back-reference")
        if not char or (char.isascii() and char.isalpha()):
            raise GrammarError("the regular expression has an escape that means nothing")
        return char

    def _class(self) -> Node:
        """A set in brackets, from behind the opening one."""
        negated = self._peek() == "^"
        self._at += negated
        ranges: list[tuple[int, int]] = []
        first = True
        while first or self._peek() != "]":
            first = False
            if self._peek(2) in ("&&", "--", "~~", "[:"):
                raise unsupported("an operation on sets of characters")
            start = self._member()
            if isinstance(start, Chars):
                ranges += start.ranges
                continue
            end = start
            if self._peek() == "-" and self._peek(2) not in ("-]", "-"):
                self._at += 1
                last = self._member()
                if isinstance(last, Chars) or last < start:
                    raise GrammarError("the regular expression has a range of characters that goes backwards")
                end = last
            ranges += _folded(ord(start), ord(end)) if "i" in self._flags else [(ord(start), ord(end))]
        self._at += 1
        found = but(chars(ranges)) if negated else chars(ranges)
        if not found.ranges:
            raise GrammarError("the regular expression has a set without any character")
        return found

    def _member(self) -> str | Chars:
        char = self._peek()
        if not char:
            raise GrammarError("the regular expression has a set that is not closed")
        self._at += 1
        return self._escape() if char == "\\" else char


def _cases(char: str) -> set[str]:
    return {case for case in (char, char.lower(), char.upper()) if len(case) == 1}


@lru_cache(maxsize=256)
def _folded(first: int, last: int) -> tuple[tuple[int, int], ...]:
    """A range in both cases: all letters of a short one, the ASCII letters of a long one."""
    near = range(first, last + 1) if last - first < 256 else range(first, min(last, 0x7F) + 1)
    codes = {ord(case) for code in near for case in _cases(chr(code))}
    return chars([(first, last), *((code, code) for code in codes)]).ranges
