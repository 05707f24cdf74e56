"""JSON at the edge: what is refused and how it is said, and the promise that what was read can be written."""

from __future__ import annotations

import contextlib
import json
import math
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.protocol.decode import MAX_DEPTH, decode_object, encode
from gateway.protocol.errors import ApiError

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


def refusal(text: str | bytes) -> ApiError:
    with pytest.raises(ApiError) as caught:
        decode_object(text)
    assert caught.value.code == "invalid_json"
    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None or caught.value.__suppress_context__  # a parser's exception holds the text
    return caught.value


@pytest.mark.parametrize("text", ['{"a":1,"b":[null,true,1.5,"é"]}', b'{"a":1,"b":[null,true,1.5,"\xc3\xa9"]}'])
def test_text_and_bytes(text: str | bytes) -> None:
    assert decode_object(text) == {"a": 1, "b": [None, True, 1.5, "é"]}


def test_the_last_of_duplicate_keys_counts() -> None:
    assert decode_object('{"a":1,"a":2}') == {"a": 2}
    assert decode_object('{"a":"\\ud800","a":2}') == {"a": 2}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "line 1 column 1"),
        ("{", "line 1 column 2"),
        ('{"a":1}\n{"b":2}', "line 2 column 1"),
        ('{\n "a": tru}', "line 2 column 7"),
        ('{"a":NaN}', "line 1 column 6"),
        ('{"a":-Infinity}', "line 1"),
        ('{"a":1e999}', "infinity"),
        ('{"a":' + "9" * 5000 + "}", "infinity"),
        ("{'a':1}", "line 1 column 2"),
        ("\ufeff{}", "line 1 column 1"),
        (b'{"a":"\xff"}', "not UTF-8 at byte 6"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8 at byte 0"),
        ("[1]", "got an array"),
        ('"text"', "got a string"),
        ("null", "got null"),
        ("3", "got an integer"),
        ("3.5", "got a number"),
        ("false", "got a boolean"),
        # the same where a lone surrogate sends the text the slow way
        ('{"a":"\\ud83d",}', "line 1 column 15"),
        ('{"a":"\\ud83d","b":NaN}', "NaN"),
        ('{"a":"\\ud83d","b":1e999}', "out of range"),
        ('{"a":"\\ud83d","b":' + "9" * 5000 + "}", "out of range"),
        ('["\\ud83d"]', "got an array"),
        ('{"a":"\\udc', "line 1"),
    ],
)
def test_refusals_say_where_and_what(text: str | bytes, words: str) -> None:
    assert words in refusal(text).message


def test_a_refusal_does_not_quote_the_text() -> None:
    assert "secret" not in refusal('{"a": secret}').message
    assert "secret" not in refusal('{"\\ud83d": secret}').message


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ('{"a":"cut \\ud83d"}', {"a": "cut \ufffd"}),
        ('{"a":"\\ude00 cut"}', {"a": "\ufffd cut"}),
        ('{"\\uD83D":"\\uDE00"}', {"\ufffd": "\ufffd"}),
        ('{"a":"\\ud83d\\ud83d\\ude00\\ude00"}', {"a": "\ufffd😀\ufffd"}),
        ('{"a":"\\ude00\\ud83d"}', {"a": "\ufffd\ufffd"}),
        ('{"a":["\\ud83d",{"b":"\\\\ud83d"}]}', {"a": ["\ufffd", {"b": "\\ud83d"}]}),
        ('{"a":"\\\\\\ud83d","b":"😀"}', {"a": "\\\ufffd", "b": "😀"}),
        ('{"a":"\\ud83d","b":123456789012345678901234567890}', {"a": "\ufffd", "b": 1.2345678901234568e29}),
    ],
)
def test_lone_surrogates_become_replacement_characters(text: str, value: Any) -> None:
    assert decode_object(text) == value
    assert decode_object(text.encode()) == value


def test_surrogates_in_a_str_frame() -> None:
    assert decode_object('{"a\ud83d":"\ude00"}') == {"a\ufffd": "\ufffd"}


def test_whole_emoji_take_the_fast_way() -> None:
    assert decode_object('{"a":"\\ud83d\\ude00"}') == {"a": "😀"}


@pytest.mark.parametrize("number", ["18446744073709551616", "-9223372036854775809", "9" * 300])
def test_integers_beyond_64_bits_become_floats(number: str) -> None:
    value = decode_object(f'{{"a":{number}}}')["a"]
    assert isinstance(value, float)
    assert math.isfinite(value)


@pytest.mark.parametrize("opening", ["[", '{"b":'])
@pytest.mark.parametrize("lone", ["", '"x":"\\ud83d",'])
def test_depth(opening: str, lone: str) -> None:
    closing = "]" if opening == "[" else "}"

    def text(levels: int) -> str:
        innermost = "" if opening == "[" else "null"
        inner = opening * (levels - 1) + innermost + closing * (levels - 1)
        return f'{{{lone}"a":{inner}}}'

    decode_object(text(MAX_DEPTH))
    for levels in (MAX_DEPTH + 1, 1000, 1024, 1025, 100_000):
        assert str(MAX_DEPTH) in refusal(text(levels)).message


def test_what_is_as_deep_as_allowed_fits_into_an_event() -> None:
    value = decode_object('{"a":' + "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1) + "}")
    for _ in range(30):
        value = {"in": value}
    encode(value)


def test_encode_is_compact_text() -> None:
    assert encode({"a": [1, None, "é"]}) == '{"a":[1,null,"é"]}'


@given(st.dictionaries(st.text(), JSON, max_size=5))
def test_round_trip(value: dict[str, Any]) -> None:
    assert decode_object(encode(value)) == value
    assert decode_object(json.dumps(value)) == value


@given(st.dictionaries(st.text(st.characters(exclude_categories=())), st.text(st.characters(exclude_categories=()))))
def test_any_string_of_a_javascript_client_is_taken(value: dict[str, str]) -> None:
    decoded = decode_object(json.dumps(value))
    orjson.dumps(decoded)


@given(st.text() | st.binary() | st.text('[]{}\\"ud8c09:,ntl 1e-.'))
def test_any_text_is_an_object_or_a_refusal(text: str | bytes) -> None:
    value = None
    with contextlib.suppress(ApiError):
        value = decode_object(text)
    if value is None:
        refusal(text)
    else:
        assert decode_object(encode(value)) == value
