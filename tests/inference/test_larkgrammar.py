"""Grammars of custom tools: their language is that of Lark and of `re`, and what has no counterpart is refused."""

from __future__ import annotations

import functools
import importlib
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.ebnf import GrammarError
from inference.larkgrammar import COMMON, grammar_ebnf
from tests.support.cost import cpu_seconds, ever


@functools.cache
def compiler() -> Any:
    xgrammar = importlib.import_module("xgrammar")
    names = [bytes([i]) for i in range(256)] + [b"<end>"]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(names, stop_token_ids=[256]))


def accepts(syntax: str, definition: str, text: str) -> bool:
    import xgrammar

    matcher = xgrammar.GrammarMatcher(compiler().compile_grammar(grammar_ebnf(syntax, definition)))
    return bool(matcher.accept_string(text) and matcher.accept_token(256))


@functools.cache
def lark_parser(definition: str) -> Any:
    lark = importlib.import_module("lark")
    # without a lexer of its own, as we are
    return lark.Lark(definition, parser="earley", lexer="dynamic_complete")


def lark_accepts(definition: str, text: str) -> bool:
    import lark

    try:
        lark_parser(definition).parse(text)
    except lark.exceptions.LarkError:
        return False
    return True


# the definition, and texts of which some fit
GRAMMARS = {
    "words": ('start: "a" b* "c"? -> some\nb: "b" | "bb" "x"\n', ["a", "abbx", "abbbc", "ac", "b", "abbxb", ""]),
    "repeats": ('start: ("a" ~ 2 | B ~ 1..3) ["c"]\nB: "b"\n', ["aa", "aac", "a", "b", "bbb", "bbbb", "bbbc", "aab"]),
    "left recursion": ('?start: start "+" N | N\nN: /[0-9]+/', ["1", "1+23", "1+", "+1", "1+2+3"]),
    "empty": ('start: "a" x "b"\nx: | "x" x', ["ab", "axb", "axxb", "a", "axx"]),
    "ignored": (
        'start: "a" list\n_sep: ","\nlist: ITEM (_sep ITEM)*\nITEM: "x".."z"\n%ignore " "\n%ignore /#[^\\n]*\\n/',
        ["a x", "ax,y", " a  x , z ", "a x y", "a#no\nx", "a #x", "a  ,x", "a x,"],
    ),
    "terminals": (
        'start: A B\nA: "a" | C+\nC: "c"i "d"\nB: /b{2,3}/ | /x/i\n',
        ["abb", "cdbbb", "CdCdX", "cDx", "ab", "ax", "abbbb"],
    ),
    "imports": (
        "%import common.INT -> DIGITS\n%import common (WORD, NEWLINE)\nstart: WORD DIGITS NEWLINE?\n",
        ["ab12", "ab12\r\n\n", "12", "a1b", "a1"],
    ),
    "comments": (
        '// one\nstart: ("a" // two\n  | "b" "c")\n\n  | other\n\n!other: "\\u00e9\\x41\\n\\\\"\n',
        ["a", "bc", "éA\n\\", "b"],
    ),
}  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize("name", GRAMMARS)
def test_the_language_is_that_of_lark(name: str) -> None:
    definition, texts = GRAMMARS[name]
    expected = [lark_accepts(definition, text) for text in texts]
    assert [accepts("lark", definition, text) for text in texts] == expected
    assert {True, False} <= set(expected)


@pytest.mark.vllm
@settings(deadline=None, max_examples=150)
@given(name=st.sampled_from([name for name in GRAMMARS if name != "imports"]), data=st.data())
def test_the_language_is_that_of_lark_for_any_text(name: str, data: st.DataObject) -> None:
    definition, texts = GRAMMARS[name]
    letters = sorted(set("".join(texts)))
    text = data.draw(st.lists(st.sampled_from([*letters, *texts]), max_size=6).map("".join))
    assert accepts("lark", definition, text) == lark_accepts(definition, text)


@pytest.mark.vllm
@pytest.mark.parametrize("name", sorted(COMMON))
def test_the_library_common_is_that_of_lark(name: str) -> None:
    definition = f"%import common.{name}\nstart: {name}"
    texts = [
        "", "0", "1", "12", "-1", "+12", "1.", ".5", "1.5", "1e5", "1.5e-3", "-.5E+7", "e5", "a", "Z", "ab", "a1",
        "_a1",
        "f", " ", "\t ", "\n", "\r\n", "\r", "\n\n", "\f", '""', '"a\\"b"', '"a\nb"', '"a', '"\\"', "#x", "# x\n",
        "//x",
        "--x",
        "/**/", "/* a * b */", "/* a */ */", "/***/", "/*",
    ]  # fmt: skip
    expected = [text for text in texts if lark_accepts(definition, text)]
    assert [text for text in texts if accepts("lark", definition, text)] == expected


ATOMS = [
    "a", "b", "é", r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", ".", r"\.", r"\x41", r"\u00e9", r"\n", "[ab]", "[^ab]",
    "[a-c-]", "[]x]", r"[\]\-\\^]", r"[\d_]", r"[^\s]", "(?:a|b)", "(a)", "(ab|)", "(?i:ab)", "-", "]", r"\{",
]  # fmt: skip
counts = st.sampled_from(["*", "+", "?", "{2}", "{0,2}", "{1,}"])
regexes = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: st.one_of(
        st.lists(inner, min_size=1, max_size=3).map("".join),
        st.lists(inner, min_size=1, max_size=3).map(lambda options: f"(?:{'|'.join(options)})"),
        st.tuples(inner, counts).map(lambda pair: f"(?:{pair[0]}){pair[1]}"),
    ),
    max_leaves=6,
)


@pytest.mark.vllm
@settings(deadline=None, max_examples=150)
@given(pattern=regexes, data=st.data(), anchored=st.booleans())
def test_regular_expressions_match_as_in_python(pattern: str, data: st.DataObject, anchored: bool) -> None:
    compiled = re.compile(pattern, re.ASCII)
    letters = st.sampled_from([*"abcA0_-.]\\^ \né😀"])
    texts = ["", "a", "ab\n", "é", *(data.draw(st.text(letters, max_size=5)) for _ in range(3))]
    texts.append(data.draw(st.from_regex(compiled, fullmatch=True)))
    definition = f"^(?:{pattern})$" if anchored else pattern
    for text in texts:
        assert accepts("regex", definition, text) == bool(compiled.fullmatch(text)), text


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("pattern", "fitting", "others"),
    [
        ("(?i)straße|[a-c]x", ["STRAßE", "straße", "BX"], ["dx", "strasse"]),
        ("(?P<n>ab|)(?<m>c)", ["abc", "c"], ["ab"]),
        ("(?s:.)(?s)a.", ["\na\n"], ["a\n"]),
        ("^a$|^b$", ["a", "b"], ["ab", ""]),
        (r"\x{1F600}\u{e9}\U0001F600", ["😀é😀"], ["é"]),
        ("a{|b{x}", ["a{", "b{x}"], ["a"]),
        ("", [""], ["x"]),
        (r"\/\*[\s\S]{0,3}\*\/", ["/**/", "/*é\n😀*/"], ["/*1234*/"]),
    ],
)
def test_regular_expressions_of_other_dialects(pattern: str, fitting: list[str], others: list[str]) -> None:
    assert [text for text in [*fitting, *others] if accepts("regex", pattern, text)] == fitting


BROKEN_LARK = [
    "", 'x: "a"', "start", 'start "a"', 'start: "a', "start: 'a'", "start: /a",
    'start: ("a"', 'start: "a")', "start: a",
    'start: A\nA: A "x" | "y"', "start: A\nA: B\nB: A", 'start: A\nA: b\nb: "x"', "start: start", 'start: "a" start',
    'start: "a"\nstart: "b"', 'start: "a" ~ 3..1', 'start: "b".."a"', 'start: "ab".."c"', 'start: "a" -> "b"',
    'start: "a"\n"b"', "%import common.NOPE\nstart: NOPE", "start: /(/", "start: /[/",
    'start: "a"~x', 'start: "a" : "b"',
    '1: "a"', "start: é", 'start: "\\ud83d"', 'start: "\ud83d"', 'start: "\\U00110000"',
]  # fmt: skip
BROKEN_REGEX = [
    "(", ")", "a)", "[", "[a", "[]", "[z-a]", r"[\d-z]x[", "*", "+a", "a**", "a{2}{3}", "a{3,2}", "\\", r"\y",
    r"[^\s\S]",
    r"\U00110000", r"\ud83d", "[\ud83d]",
]  # fmt: skip
UNSUPPORTED_LARK = [
    "start{x}: x", 'start: a{"x"}', 'start.2: "a"', "%declare X\nstart: X", "%import .other.X\nstart: X", "start: /^a/",
    '%extend start: "a"', "%import python.NAME\nstart: NAME", "start: /(?=a)b/", "start: /a*?/", 'start: "a" ~ 99999',
    "start: /a/x", "start: " + "(" * 65 + '"a"' + ")" * 65, "//" + "x" * 70_000, 'start: "a"~9999 "b"~9999 "c"~9999',
]  # fmt: skip
UNSUPPORTED_REGEX = [
    "(?=a)", "(?!a)", "(?<=a)", "(?<!a)", "(?>a)", "(?#a)", r"(a)\1", "a*?", "a++", "a{1,2}?", r"\bword", r"\p{L}",
    "a^b", "a$b", "[[:alpha:]]", "[a&&b]", "(?x)a b", "a{99999}", "(" * 65 + ")" * 65, "((a{200}){200}){200}",
    r"(?P=n)",
]  # fmt: skip
REFUSED = [
    ("invalid_value", "lark", BROKEN_LARK),
    ("invalid_value", "regex", BROKEN_REGEX),
    ("unsupported_parameter", "lark", UNSUPPORTED_LARK),
    ("unsupported_parameter", "regex", UNSUPPORTED_REGEX),
]


@pytest.mark.parametrize(("code", "syntax", "definitions"), REFUSED)
def test_what_cannot_be_is_refused(code: str, syntax: str, definitions: list[str]) -> None:
    for definition in definitions:
        with pytest.raises(GrammarError) as caught:
            grammar_ebnf(syntax, definition)
        assert (definition, caught.value.code) == (definition, code)
        assert len(caught.value.message) < 200  # a grammar is no part of what may be logged


PIECES = [
    "start:", '"a"', "/b*/", "|", "(", ")", "[", "]", "\n", "~", "2", "..", "{", "}", "%import", "%ignore", "common",
    ".",
    "INT", "->", "x", "*", "?", "+", "\\", "^", "$", "-", ",", '"', "/", " ", "(?", ":", "i",
]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    syntax=st.sampled_from(["lark", "regex"]),
    pieces=st.lists(st.sampled_from(PIECES) | st.text(max_size=2), max_size=15),
)
def test_any_definition_is_read_or_refused(syntax: str, pieces: list[str]) -> None:
    try:
        written = grammar_ebnf(syntax, "".join(pieces))
    except GrammarError:
        return
    assert written.startswith("root ::= ")


def test_reading_takes_linear_time() -> None:
    """A long definition against twenty short ones of the same make; quadratic time would be twenty times as much."""

    numbers = itertools.count()

    def seconds(lines: int, times: int) -> float:
        def read() -> None:
            for _ in range(times):
                fresh = next(numbers)  # what was read before is remembered
                rules = "".join(f'r{k}: "x{fresh}" /[a-c]+/ r{k + 1}\n' for k in range(lines))
                terminals = "".join(f"T{k}: T{k + 1}\n" for k in range(lines))
                grammar_ebnf("lark", f"start: r0\n{rules}{terminals}r{lines}: T0\nT{lines}: /x/")

        return cpu_seconds(read)

    assert ever(lambda: seconds(1000, 1) < 5 * seconds(50, 20))
