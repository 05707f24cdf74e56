"""Grammars of custom tools, in Lark or as a regular expression, turned into what xgrammar reads.

The part of Lark that OpenAI documents for custom tools: rules and terminals, text (also `"x"i`), regular expressions,
ranges `"a".."z"`, `|`, groups, `[x]`, `?`, `*`, `+`, `~n`, `~n..m`, `%import common.X`, `%ignore`, comments. What
shapes the tree only (`?rule`, `!rule`, `-> alias`) is read over. Refused: templates, priorities, other imports and
directives.

There is no lexer: a grammar is taken letter by letter, so a text is accepted if any reading of it fits. Lark's own
lexer takes the longest match instead; where the two differ, ours accepts more.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from graphlib import CycleError, TopologicalSorter

from inference.ebnf import (
    Chain,
    Choice,
    GrammarError,
    Node,
    Ref,
    Repeat,
    Text,
    character,
    chars,
    check_rules,
    ebnf,
    references,
    unsupported,
)
from inference.regexgrammar import MAX_COUNT, read_regex

MAX_DEFINITION_CHARS = 65_536
MAX_DEPTH = 64  # of groups
START = "start"

# What `%import common.X` brings, by the names of Lark's library.
_EXPONENT = r"[eE][+-]?[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"(?:[0-9]+{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"
COMMON: Mapping[str, str] = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"{_FLOAT}|[0-9]+",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[A-Za-z]",
    "WORD": "[A-Za-z]+",
    "CNAME": "[A-Za-z_][A-Za-z_0-9]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
    "SQL_COMMENT": r"--[^\n]*",
}

_TOKEN = re.compile(
    r"""(?P<blank>[ \t\f]+|//[^\n]*|\#[^\n]*)|(?P<line>(?:\r?\n)+)|(?P<text>"(?:\\.|[^"\\\n])*"i?)"""
    r"""|(?P<regex>/(?:\\.|[^/\\\n])+/[a-z]*)|(?P<directive>%[a-z]+)|(?P<name>_?[a-z][_a-z0-9]*|_?[A-Z][_A-Z0-9]*)"""
    r"""|(?P<number>[0-9]+)|(?P<mark>->|\.\.|[:|()\[\]?*+~.,!{}])"""
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "t": "\t", "r": "\r", "f": "\f", "v": "\v", "a": "\a", "b": "\b", "0": "\0"}


def grammar_ebnf(syntax: str, definition: str) -> str:
    """The grammar of a custom tool (`Tool.grammar`) as EBNF whose first rule is `root`.

    Raises:
        GrammarError: broken, too large, or with something that no engine here can hold.
    """
    if len(definition) > MAX_DEFINITION_CHARS:
        raise unsupported(f"a grammar of more than {MAX_DEFINITION_CHARS} characters")
    if not definition.isascii() and any("\ud800" <= char < "\ue000" for char in definition):
        raise GrammarError("the grammar has a surrogate that belongs to no character")
    found = _convert(syntax, definition)
    if isinstance(found, GrammarError):
        raise GrammarError(found.message, found.code)
    return found


@lru_cache(maxsize=64)
def _convert(syntax: str, definition: str) -> str | GrammarError:
    """Remembered, as clients send the same grammars turn after turn; also what was wrong with one."""
    try:
        rules = _read_lark(definition) if syntax == "lark" else {"root": read_regex(definition, anchors=True)}
        check_rules(rules, "root")
    except GrammarError as error:
        return error
    return ebnf(rules)


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


def _tokens(definition: str) -> Iterator[_Token]:
    """The definition's tokens; line ends only where they can end a statement, and one at the end."""
    position, line, depth = 0, 1, 0
    ended: _Token | None = None
    while position < len(definition):
        match = _TOKEN.match(definition, position)
        if match is None:
            raise GrammarError(f"the grammar has a character in line {line} that can't be read")
        token = _Token(str(match.lastgroup), match.group(), line)
        position = match.end()
        line += token.text.count("\n")
        if token.kind == "line":
            ended = ended or token
        elif token.kind != "blank":
            # An alternative may begin a line; inside a group, anything may.
            if ended is not None and token.text != "|" and not depth:
                yield ended
            ended = None
            depth += (token.text in ("(", "[")) - (token.text in (")", "]"))
            yield token
    yield _Token("line", "", line)


@dataclass(slots=True)
class _Rules:
    """What a definition says: rules by name, the terminals to be ignored."""

    found: dict[str, Node] = field(default_factory=dict)
    ignored: list[Node] = field(default_factory=list)

    def add(self, name: str, node: Node) -> None:
        """A rule or terminal. Raises `GrammarError` if there is one."""
        if name in self.found:
            raise GrammarError(f"the grammar defines {name!r} twice")
        self.found[name] = node


def _read_lark(definition: str) -> dict[str, Node]:
    """All rules of a Lark grammar under the names they get, `root` first."""
    rules = _Rules()
    reader = _Reader(list(_tokens(definition)), rules)
    reader.read()
    found = rules.found
    if START not in found:
        raise GrammarError(f"the grammar has no rule {START!r}")
    for name, node in found.items():
        for other in sorted(references(node)):
            if other not in found:
                raise GrammarError(f"the grammar does not define {other!r}, which {name!r} uses")
            if _is_terminal(name) and not _is_terminal(other):
                raise GrammarError(f"the terminal {name!r} uses the rule {other!r}")
    _check_terminals(found)
    if not rules.ignored:
        return {"root": Ref(_ruled(START)), **{_ruled(name): _renamed(node) for name, node in found.items()}}
    blank = Ref("ignored")
    out: dict[str, Node] = {
        "root": Chain((blank, Ref(_ruled(START)))),
        "ignored": Repeat(Choice(tuple(map(_renamed, rules.ignored))), 0, None),
    }
    for name, node in found.items():
        out[_ruled(name)] = _renamed(node) if _is_terminal(name) else _spaced(_renamed(node), blank)
    return out


def _is_terminal(name: str) -> bool:
    return name.isupper()


def _ruled(name: str) -> str:
    """The name in EBNF, where `root` and `ignored` are ours."""
    return f"{'t' if _is_terminal(name) else 'r'}_{name}"


def _check_terminals(found: Mapping[str, Node]) -> None:
    """Raises `GrammarError` for a terminal that is part of itself."""
    try:
        TopologicalSorter({name: references(node) for name, node in found.items() if _is_terminal(name)}).prepare()
    except CycleError as error:
        raise GrammarError(f"the terminal {min(error.args[1])!r} is part of itself") from None


def _mapped(node: Node, change: Callable[[Node], Node]) -> Node:
    """The node with everything in it that has no parts put through `change`."""
    match node:
        case Chain(parts):
            return Chain(tuple(_mapped(part, change) for part in parts))
        case Choice(options):
            return Choice(tuple(_mapped(option, change) for option in options))
        case Repeat(part, least, most):
            return Repeat(_mapped(part, change), least, most)
        case _:
            return change(node)


def _renamed(node: Node) -> Node:
    return _mapped(node, lambda part: Ref(_ruled(part.name)) if isinstance(part, Ref) else part)


def _spaced(node: Node, blank: Node) -> Node:
    """A rule in which every token may be followed by what is to be ignored."""
    return _mapped(node, lambda part: part if isinstance(part, Ref) and part.name[0] == "r" else Chain((part, blank)))


class _Reader:
    """Recursive descent over the tokens of a definition."""

    def __init__(self, tokens: list[_Token], rules: _Rules) -> None:
        self._tokens = tokens
        self._at = 0
        self._depth = 0
        self._rules = rules
        self._patterns = 0

    def read(self) -> None:
        """Every statement."""
        while self._at < len(self._tokens):
            if self._next_is("line"):
                self._at += 1
            else:
                self._statement()

    def _statement(self) -> None:
        token = self._take()
        if token.kind == "directive":
            self._directive(token)
        else:
            while token.text in ("?", "!"):
                token = self._take()
            if token.kind != "name":
                raise self._fault(token)
            self._refuse({"{": "a template in a grammar", ".": "a priority in a grammar"})
            self._expect(":")
            self._rules.add(token.text, self._choice())
        if not self._next_is("line"):
            raise self._fault(self._take())

    def _directive(self, token: _Token) -> None:
        match token.text:
            case "%ignore":
                self._rules.ignored.append(self._choice())
            case "%import":
                self._import()
            case _:
                raise unsupported(f"the directive {token.text} in a grammar")

    def _import(self) -> None:
        self._refuse({".": "an import from another file"})
        library = self._take()
        if library.text != "common":
            raise unsupported("an import from anything but 'common'")
        if self._skip("("):
            names = [self._take()]
            while self._skip(","):
                names.append(self._take())
            self._expect(")")
            for name in names:
                self._rules.add(name.text, self._common(name))
            return
        self._expect(".")
        name = self._take()
        self._rules.add(self._take().text if self._skip("->") else name.text, self._common(name))

    @staticmethod
    def _common(name: _Token) -> Node:
        if name.text not in COMMON:
            raise GrammarError(f"the library 'common' does not have what line {name.line} of the grammar imports")
        return read_regex(COMMON[name.text])

    def _choice(self) -> Node:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise unsupported(f"a grammar with more than {MAX_DEPTH} groups in one another")
        options = [self._chain()]
        while self._skip("|"):
            options.append(self._chain())
        self._depth -= 1
        return options[0] if len(options) == 1 else Choice(tuple(options))

    def _chain(self) -> Node:
        parts: list[Node] = []
        while not self._next_is("line") and self._tokens[self._at].text not in ("|", ")", "]", "->"):
            parts.append(self._repeated(self._atom()))
        if self._skip("->") and self._take().kind != "name":
            raise self._fault(self._tokens[self._at - 1])
        return parts[0] if len(parts) == 1 else Chain(tuple(parts))

    def _repeated(self, node: Node) -> Node:
        for sign, counts in (("?", (0, 1)), ("*", (0, None)), ("+", (1, None))):
            if self._skip(sign):
                return Repeat(node, *counts)
        if not self._skip("~"):
            return node
        least = most = self._count()
        if self._skip(".."):
            most = self._count()
        if most < least:
            raise GrammarError("a repetition in the grammar has a maximum below its minimum")
        return Repeat(node, least, most)

    def _count(self) -> int:
        token = self._take()
        if token.kind != "number":
            raise self._fault(token)
        if len(token.text) > 6 or int(token.text) > MAX_COUNT:
            raise unsupported(f"a repetition of more than {MAX_COUNT} times")
        return int(token.text)

    def _atom(self) -> Node:
        token = self._take()
        match token.kind:
            case "name":
                self._refuse({"{": "a template in a grammar"})
                return Ref(token.text)
            case "text":
                return self._text(token)
            case "regex":
                pattern, _, flags = token.text[1:].rpartition("/")
                return read_regex(pattern, flags)
        if token.text == "(":
            node = self._choice()
            self._expect(")")
            return node
        if token.text == "[":
            node = self._choice()
            self._expect("]")
            return Repeat(node, 0, 1)
        raise self._fault(token)

    def _text(self, token: _Token) -> Node:
        fold = token.text.endswith("i")
        value = _unquoted(token.text)
        if self._skip(".."):
            last = self._take()
            end = _unquoted(last.text) if last.kind == "text" else ""
            if len(value) != 1 or len(end) != 1 or value > end:
                raise self._fault(last)
            return chars([(ord(value), ord(end))])
        return read_regex(re.escape(value), "i") if fold else Text(value)

    def _refuse(self, marks: Mapping[str, str]) -> None:
        if (what := marks.get(self._tokens[self._at].text)) is not None:
            raise unsupported(what)

    def _next_is(self, kind: str) -> bool:
        return self._tokens[self._at].kind == kind

    def _take(self) -> _Token:
        token = self._tokens[self._at]
        if token.kind == "line":
            raise self._fault(token)
        self._at += 1
        return token

    def _skip(self, text: str) -> bool:
        found = self._tokens[self._at].text == text
        self._at += found
        return found

    def _expect(self, text: str) -> None:
        token = self._take()
        if token.text != text:
            raise self._fault(token)

    @staticmethod
    def _fault(token: _Token) -> GrammarError:
        return GrammarError(f"the grammar can't be read at line {token.line}")


def _unquoted(literal: str) -> str:
    """What a quoted text says."""

    def letter(match: re.Match[str]) -> str:
        if code := match[1] or match[2] or match[3]:
            return character(int(code, 16))
        return _LETTERS.get(match[4], match[4])

    return _ESCAPE.sub(letter, literal.removesuffix("i")[1:-1])
