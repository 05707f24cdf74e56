"""Context-free grammars as values, and as the EBNF text that xgrammar reads (`rule ::= "text" [a-z] ( | ) * + ?`).

What both kinds of a custom tool's grammar become: `inference.larkgrammar` and `inference.regexgrammar` read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

MAX_EXPANDED = 20_000
"""Most elements of a grammar (texts, ranges of characters, groups) with its repetitions written out, an unlimited one
counted as its least number. xgrammar takes a few tenths of a second for these."""

_LAST = 0x10FFFF

Ranges = tuple[tuple[int, int], ...]
"""Code points, as sorted pairs (first, last) with gaps between them."""


class GrammarError(Exception):
    """A definition that can't be used. `code` is `invalid_value` for one that is broken, `unsupported_parameter` for
    one that no engine here can hold. The message names the fault, and quotes no more than a name of it."""

    def __init__(self, message: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.message = message
        self.code = code


def unsupported(what: str) -> GrammarError:
    """The refusal of something that is sound but has no counterpart."""
    return GrammarError(f"{what} can't be used here", "unsupported_parameter")


@dataclass(frozen=True, slots=True)
class Text:
    """Exactly this text; the empty one is nothing at all."""

    value: str


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Ref:
    """What another rule says."""

    name: str


@dataclass(frozen=True, slots=True)
class Chain:
    """One after the other."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """One of these."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """`least` to `most` times; `most` None is without end."""

    part: Node
    least: int
    most: int | None


Node = Text | Chars | Ref | Chain | Choice | Repeat


def chars(ranges: Iterable[tuple[int, int]]) -> Chars:
    """Characters from ranges in any order, overlapping or not."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return Chars(tuple(merged))


def but(excluded: Chars) -> Chars:
    """All other characters."""
    gaps, start = [], 0
    for first, last in excluded.ranges:
        if first > start:
            gaps.append((start, first - 1))
        start = last + 1
    if start <= _LAST:
        gaps.append((start, _LAST))
    return Chars(tuple(gaps))


def character(code: int) -> str:
    """The character of an escape. Raises `GrammarError` if there is none; a surrogate is none."""
    if code > _LAST or 0xD800 <= code < 0xE000:
        raise GrammarError("the grammar names a character that does not exist")
    return chr(code)


def children(node: Node) -> tuple[Node, ...]:
    """What a node is made of."""
    match node:
        case Chain(parts) | Choice(parts):
            return parts
        case Repeat(part):
            return (part,)
        case _:
            return ()


def references(node: Node) -> set[str]:
    """The rules a node names."""
    if isinstance(node, Ref):
        return {node.name}
    return set().union(*map(references, children(node)))


def check_rules(rules: Mapping[str, Node], root: str) -> None:
    """Raises `GrammarError` for rules that xgrammar would take forever for, or that no text can ever satisfy."""
    if sum(map(_expanded, rules.values())) > MAX_EXPANDED:
        raise unsupported(
            f"a grammar of more than {MAX_EXPANDED} elements, repetitions counted as often as they may be"
        )
    if root not in _finite(rules):
        raise GrammarError("the grammar never comes to an end: no text satisfies it")


def _expanded(node: Node) -> int:
    if isinstance(node, Repeat):
        return 1 + _expanded(node.part) * max(node.most or node.least, 1)
    own = len(node.ranges) if isinstance(node, Chars) else 1
    return own + sum(map(_expanded, children(node)))


def _finite(rules: Mapping[str, Node]) -> set[str]:
    """The rules that some text satisfies. Linear: each element waits for as many of its parts as it needs."""
    waiting: list[int] = []
    owners: list[int | str] = []
    users: dict[str, list[int]] = {name: [] for name in rules}

    def enter(node: Node, owner: int | str) -> None:
        at = len(waiting)
        owners.append(owner)
        match node:
            case Chain(parts):
                waiting.append(len(parts))
            case Ref(name):
                waiting.append(1)
                users[name].append(at)
            case Repeat(_, least):
                waiting.append(min(least, 1))
            case _:
                waiting.append(int(isinstance(node, Choice) or node == Chars(())))
        for child in children(node):
            enter(child, at)

    for name, node in rules.items():
        enter(node, name)
    found: set[str] = set()
    ready = [i for i, count in enumerate(waiting) if not count]
    while ready:
        owner = owners[ready.pop()]
        more = [owner] if isinstance(owner, int) else users[owner] if owner not in found else []
        if isinstance(owner, str):
            found.add(owner)
        for i in more:
            waiting[i] -= 1
            if not waiting[i]:
                ready.append(i)
    return found


def ebnf(rules: Mapping[str, Node]) -> str:
    """The grammar as text, a rule a line. The one called `root` is where it starts."""
    return "\n".join(f"{name} ::= {_write(node)}" for name, node in rules.items())


def _write(node: Node) -> str:
    match node:
        case Text(value):
            return '"' + "".join(map(_letter, value)) + '"'
        case Chars(ranges):
            return _class(ranges)
        case Ref(name):
            return name
        case Chain(parts):
            return f"({' '.join(map(_write, parts))})" if parts else '""'
        case Choice(options):
            return f"({' | '.join(map(_write, options))})"
        case Repeat(part, least, most):
            inner = f"({_write(part)})" if isinstance(part, Repeat) else _write(part)
            sign = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((least, most))
            return inner + (sign or f"{{{least},{'' if most is None else most}}}")


def _class(ranges: Ranges) -> str:
    # Sets that reach the last code point are mostly written as what they leave out.
    negated = ranges[-1][1] == _LAST and ranges[0] != (0, _LAST)
    listed = but(Chars(ranges)).ranges if negated else ranges
    inner = "".join(_letter(chr(first)) + (f"-{_letter(chr(last))}" if last > first else "") for first, last in listed)
    return f"[{'^' if negated else ''}{inner}]"


def _letter(char: str) -> str:
    if char.isascii() and (char.isalnum() or char == " "):
        return char
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
