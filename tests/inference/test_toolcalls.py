"""Hermes tool calls as they arrive: what is a call, what stays text, and that portions make no difference."""

from __future__ import annotations

import json
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, TextDelta
from gateway.protocol.tools import Tool
from inference.formats.jsonstream import ObjectReader, StringDecoder
from inference.formats.toolcalls import CallReader, fits_raw
from tests.support.cost import cpu_seconds, ever

GET = Tool("function", "get_weather")
PATCH = Tool("custom", "apply_patch")
SEARCH = Tool("function", "search", "docs")
TWIN_A, TWIN_B = Tool("function", "open", "a"), Tool("function", "open", "b")
TOOLS = {tool.model_name: tool for tool in (GET, PATCH, SEARCH, TWIN_A, TWIN_B)}

FUNCTION = CallStart("function", "get_weather")
CUSTOM = CallStart("custom", "apply_patch")


def merged(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of one kind joined."""
    out: list[Any] = []
    delta: Any
    for delta in deltas:
        if out and type(out[-1]) is type(delta) and isinstance(delta, TextDelta | CallDelta):
            out[-1] = type(delta)(out[-1].text + delta.text)
        else:
            out.append(delta)
    return out


def read(portions: list[str]) -> tuple[list[Delta], str | None]:
    reader = CallReader(TOOLS)
    out: list[Delta] = []
    for i, portion in enumerate(portions):
        deltas, rest = reader.feed(portion)
        assert all(delta.text for delta in deltas if isinstance(delta, TextDelta | CallDelta))
        out += deltas
        if rest is not None:
            return merged(out), rest + "".join(portions[i + 1 :])
    return merged(out + reader.finish()), None


def every_way(text: str) -> tuple[list[Delta], str | None]:
    """Read whole, by character, and cut in two everywhere: all the same."""
    whole = read([text])
    assert read(list(text)) == whole
    for cut in range(len(text)):
        assert read([text[:cut], text[cut:]]) == whole
    return whole


def call(name: str, arguments: str) -> str:
    return f'\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(
    "arguments",
    [
        "{}",
        '{"city": "Paris"}',
        '{ "a" : [1, {"b": "}]\\" </tool_call> {"}], "c": -1.5e3 , "d":null}',
        '[1, "x"]',
        "12",
        "true",
    ],
)
def test_arguments_are_as_the_model_wrote_them(arguments: str) -> None:
    assert every_way(call("get_weather", arguments) + " rest") == ([FUNCTION, CallDelta(arguments), CallEnd()], " rest")


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ('{"arguments": {"a": 1}, "name": "get_weather"}</tool_call>', '{"a": 1}'),
        ('{"id": {"x": [1]}, "name": "get_weather", "t": "f", "arguments": {"a": 1}, "z": 1}</tool_call>', '{"a": 1}'),
        ('{"name": "get_weather", "arguments": "{\\"a\\": \\"\\\\n\\"}"}</tool_call>', '{"a": "\\n"}'),
        ('{"name": "get_weather"}</tool_call>', "{}"),
        ('{"name": "get_weather", "arguments": {"a": 1}}}\n }</tool_call>', '{"a": 1}'),
        ('{"name": "get_weather", "arguments": {"a": 1}</tool_call>', '{"a": 1}'),
        ('{"name": "get_weather", "arguments": {"a": 1</tool_call>', '{"a": 1'),
        ('{"name": "get_weather"</tool_call>', "{}"),
        ('{"name": "get\\u005fweather", "arguments": {"a": <b>, "c": "<"}}</tool_call>', '{"a": <b>, "c": "<"}'),
        ('{"name": "get_weather", "name": "x", "arguments": {"a": 1}, "arguments": {"b": 1}}</tool_call>', '{"a": 1}'),
    ],
)  # fmt: skip
def test_calls_of_another_shape(text: str, arguments: str) -> None:
    assert every_way(text) == ([FUNCTION, CallDelta(arguments), CallEnd()], "")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "*** Begin\\n+a\\t\\"b\\" \\\\ \\/ \\u00e9 \\ud83d\\ude00"}', '*** Begin\n+a\t"b" \\ / é 😀'),
        ('{"why": ["x"], "input": "a", "more": 1}', "a"),
        ('{"input": "\\ud83d x \\ude00 \\ud83d"}', "\ufffd x \ufffd \ufffd"),
        ('{"input": "\\d+ \\u12 \\uzzzz"}', "\\d+ \\u12 \\uzzzz"),
        ('{"input": "raw\nline </tool_call>"}', "raw\nline </tool_call>"),
        ('{"input": {"a": "<"}}', '{"a": "<"}'),
        ('"just text\\n"', "just text\n"),
        ('{"patch": "x\\n"}', '{"patch": "x\\n"}'),
        ('{"patch": <x>}', '{"patch": <x>}'),
    ],
)
def test_freeform_input_is_decoded(arguments: str, text: str) -> None:
    assert every_way(call("apply_patch", arguments)) == ([CUSTOM, CallDelta(text), CallEnd()], "")


@pytest.mark.parametrize("arguments", ["{}", '{"input": ""}', '""'])
def test_empty_freeform_input(arguments: str) -> None:
    assert every_way(call("apply_patch", arguments)) == ([CUSTOM, CallEnd()], "")


@pytest.mark.parametrize(
    "text",
    [
        " tag is markup", "\n[1]", "{name: 1}", '{"name" "x"}', '{"name": 5}', '{"name": ""}', '{"name": null}', "{}",
        '{"arguments": {"a": 1}}', '{"name": "x", oops', '{"name": "x" "arguments": {}}', "</tool_call>", "<tool_call>",
        '{"arguments": {"a": 1}, <b>', '{"na\\qme": 1}', '{"name": ]',
    ],
)  # fmt: skip
def test_what_is_no_call_comes_back_as_text(text: str) -> None:
    text += "</tool_call> and on"
    deltas, rest = every_way(text)
    assert len(deltas) == 1
    assert isinstance(deltas[0], TextDelta)
    assert deltas[0].text + (rest or "") == "<tool_call>" + text


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("", [TextDelta("<tool_call>")]),
        ('\n{"na', [TextDelta('<tool_call>\n{"na')]),
        ('{"arguments": {"a": 1}', [TextDelta('<tool_call>{"arguments": {"a": 1}')]),
        ("{</tool", [TextDelta("<tool_call>{</tool")]),
        ('{"name": "get_weather", "arg', [FUNCTION]),
        ('{"name": "get_weather", "arguments": {"a', [FUNCTION, CallDelta('{"a')]),
        ('{"name": "get_weather", "arguments": {"a": 1}', [FUNCTION, CallDelta('{"a": 1}')]),
        ('{"name": "get_weather", "arguments": {"a": </to', [FUNCTION, CallDelta('{"a": </to')]),
        ('{"name": "apply_patch", "arguments": {"input": "a\\u00', [CUSTOM, CallDelta("a")]),
        ('{"name": "apply_patch", "arguments": {"patch": "a', [CUSTOM, CallDelta('{"patch": "a')]),
        ('{"name": "get_weather", "arguments": {}}\n</tool', [FUNCTION, CallDelta("{}"), CallEnd()]),
    ],
)
def test_calls_cut_off(text: str, deltas: list[Delta]) -> None:
    assert every_way(text) == (deltas, None)


def raw(text: str, name: str = "apply_patch") -> str:
    return f'\n{{"name": "{name}"}}\n{text}\n</tool_call>'


@pytest.mark.parametrize(
    "text",
    [
        '*** Begin Patch\n+a "b" \\n\n', "a", "\n", "\n\n a", "}", "} x", "<", "</tool_cal", "a <tool_call>", "\r\n",
        "é😀",
        "a </tool_call> b", "a</tool_call>", "</tool_cal\n </tool_call>x", "a</tool_call>\n</tool_cal", '{"name": "x"}',
    ],
)  # fmt: skip
def test_raw_input_is_as_the_model_wrote_it(text: str) -> None:
    assert fits_raw(text)
    assert every_way(raw(text) + " rest") == ([CUSTOM, CallDelta(text), CallEnd()], " rest")


@pytest.mark.parametrize("text", ["</tool_call>", "a\n</tool_call>", "a\n</tool_call>b", "x</tool_call>\n <tool_call>"])
def test_raw_input_that_would_end_early(text: str) -> None:
    assert not fits_raw(text)
    deltas, rest = every_way(raw(text) + " rest")
    written = text.partition("</tool_call>")[0].removesuffix("\n")
    assert deltas == [CUSTOM, *([CallDelta(written)] if written else []), CallEnd()]
    assert rest == raw(text).split("</tool_call>", 1)[1] + " rest"


@pytest.mark.parametrize(
    ("text", "deltas", "rest"),
    [
        ('{"name": "apply_patch"}\n</tool_call>', [CUSTOM, CallEnd()], ""),
        ('{"name": "apply_patch"}</tool_call>', [CUSTOM, CallEnd()], ""),
        ('{"name": "apply_patch"</tool_call>', [CUSTOM, CallEnd()], ""),
        ('{"name": "apply_patch"}} \t\na\n</tool_call>', [CUSTOM, CallDelta("a"), CallEnd()], ""),
        ('{"name": "apply_patch"} a\n</tool_call>', [CUSTOM, CallDelta("a"), CallEnd()], ""),
        ('{"name": "apply_patch", "id": 1}\na\n</tool_call>x', [CUSTOM, CallDelta("a"), CallEnd()], "x"),
        ('{"name": "apply_patch"}\na</tool_call>\n<tool_call>', [CUSTOM, CallDelta("a"), CallEnd()], "\n<tool_call>"),
        ('{"name": "apply_patch"}\na</tool_call>', [CUSTOM, CallDelta("a"), CallEnd()], None),
        ('{"name": "apply_patch"}\na</tool_call>\n \n', [CUSTOM, CallDelta("a"), CallEnd()], None),
        ('{"name": "apply_patch"}\na</tool_call>\n<tool', [CUSTOM, CallDelta("a</tool_call>\n<tool")], None),
        ('{"name": "apply_patch"}\na\n</tool', [CUSTOM, CallDelta("a\n</tool")], None),
        ('{"name": "apply_patch"}\n', [CUSTOM], None),
        ('{"name": "apply_patch"}', [CUSTOM], None),
    ],
)
def test_raw_calls_of_another_shape(text: str, deltas: list[Delta], rest: str | None) -> None:
    assert every_way(text) == (deltas, rest)


RAW_PIECES = [
    "</tool_call>",
    "<tool_call>",
    "\n",
    " ",
    "}",
    "<",
    "</",
    "tool_call>",
    "a",
    "\r",
    " " * 70,
    '{"name": "x"}',
]
raw_texts = st.text(max_size=10) | st.lists(st.sampled_from(RAW_PIECES), max_size=8).map("".join)


@settings(deadline=None, max_examples=300)
@given(text=raw_texts, size=st.integers(1, 9))
def test_raw_input_comes_through_or_is_known_not_to(text: str, size: int) -> None:
    written = raw(text)
    found = read([written[i : i + size] for i in range(0, len(written), size)])
    assert found == read([written])
    assert (found == ([CUSTOM, *([CallDelta(text)] if text else []), CallEnd()], "")) == fits_raw(text)


def test_a_call_ends_with_its_brace() -> None:
    reader = CallReader(TOOLS)
    deltas, rest = reader.feed('{"name": "get_weather", "arguments": {}}')
    assert deltas[-1] == CallEnd()
    assert rest is None


def test_text_behind_a_call_that_is_not_closed() -> None:
    call_deltas = [FUNCTION, CallDelta("{}"), CallEnd()]
    assert every_way('{"name": "get_weather", "arguments": {}}\nSo.') == (call_deltas, "So.")
    assert every_way('{"name": "get_weather", "arguments": {}; "x"') == (call_deltas, '; "x"')


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("docs.search", CallStart("function", "search", "docs")),
        ("search", CallStart("function", "search", "docs")),
        ("open", CallStart("function", "open")),
        ("a.open", CallStart("function", "open", "a")),
        ("unknown", CallStart("function", "unknown")),
    ],
)
def test_names(name: str, start: CallStart) -> None:
    assert every_way(call(name, "{}"))[0][0] == start


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just('</tool_call>{"\\'),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@settings(deadline=None)
@given(arguments=st.dictionaries(st.text(), json_values, max_size=4), ascii_only=st.booleans(), first=st.booleans())
def test_any_arguments_come_through(arguments: dict[str, Any], ascii_only: bool, first: bool) -> None:
    raw = json.dumps(arguments, ensure_ascii=ascii_only)
    parts = ['"name": "get_weather"', f'"arguments": {raw}']
    text = "{" + ", ".join(parts if first else parts[::-1]) + "}</tool_call>"
    expected = ([FUNCTION, CallDelta(raw), CallEnd()], "")
    assert read([text]) == read(list(text)) == expected


@settings(deadline=None)
@given(text=st.text() | st.text('\\"ud83de00n\n'), ascii_only=st.booleans(), size=st.integers(1, 5))
def test_any_input_comes_through(text: str, ascii_only: bool, size: int) -> None:
    raw = call("apply_patch", json.dumps({"input": text}, ensure_ascii=ascii_only))
    expected = [CUSTOM, CallDelta(text), CallEnd()] if text else [CUSTOM, CallEnd()]
    assert read([raw[i : i + size] for i in range(0, len(raw), size)]) == (expected, "")


FRAGMENTS = [
    "{", "}", "[", "]", '"', "\\", ":", ",", "<", "</tool_call>", "<tool_call>", "name", "arguments", '"name":',
    '"get_weather"', '"apply_patch"', '"arguments":', '"input":', "1", "null", " ", "\n", "\\ud83d", "\\u", "x",
]  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=14), cuts=st.lists(st.integers(0, 80), max_size=6))
@example(['{"name": "apply_patch", "arguments": {"x": ', "<", '</tool_call>"'], [3])
def test_any_text_gives_the_same_in_any_portions(pieces: list[str], cuts: list[int]) -> None:
    text = ["", '{"name": "apply_patch", "arguments": ', '{"name": "apply_patch"}\n'][len(cuts) % 3] + "".join(pieces)
    edges = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    portions = [text[a:b] for a, b in pairwise(edges)]
    whole = read([text])
    assert read(portions) == whole
    assert read(list(text)) == whole


@settings(deadline=None)
@given(value=json_values, cut=st.integers(0, 200))
def test_object_reader_finds_every_value(value: Any, cut: int) -> None:
    text = json.dumps({"k": value, "é": value}) + "tail"
    cut %= len(text)
    reader = ObjectReader()
    found: dict[str, str] = {}
    for portion in (text[:cut], text[cut:]):
        pieces, position = reader.feed(portion)
        for key, raw, _ in pieces:
            found[key] = found.get(key, "") + raw
        if reader.done:
            assert "tail".startswith(portion[position:])
            break
    assert {key: json.loads(raw) for key, raw in found.items()} == {"k": value, "é": value}


@settings(deadline=None)
@given(text=st.text(), cuts=st.lists(st.integers(0, 60)))
def test_string_decoder_decodes(text: str, cuts: list[int]) -> None:
    raw = json.dumps(text)[1:]
    edges = sorted({0, len(raw), *(cut % (len(raw) + 1) for cut in cuts)})
    decoder = StringDecoder()
    assert "".join(decoder.feed(raw[a:b]) for a, b in pairwise(edges)) + decoder.finish() == text


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *product(["get_weather", "apply_patch"], ["name first", "name last"]),
        ("apply_patch", "raw"),
    ],
)
def test_long_arguments_take_linear_time(name: str, form: str) -> None:
    def seconds(lines: int) -> float:
        code = 'x = "<a>"\n' * lines
        parts = [f'"name": "{name}"', f'"arguments": {json.dumps({"input": code})}']
        text = "{" + ", ".join(parts if form == "name first" else parts[::-1]) + "}</tool_call>"
        if form == "raw":
            text = raw(code, name)
        reader = CallReader(TOOLS)
        return cpu_seconds(lambda: [reader.feed(text[i : i + 4]) for i in range(0, len(text), 4)])

    # quadratic time would be 64 times as much
    assert ever(lambda: seconds(16_000) < 24 * seconds(2_000))
