"""Chunks of chat completions become well-formed deltas, whatever order servers send them in (bugs.md O-40 to O-44)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Delta,
    Logprob,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
)
from inference.engine import Counted, Finish
from inference.upstream.chat_reader import ChatReader
from inference.upstream.dialects import CEREBRAS, GENERIC, OPENAI, VLLM, Dialect
from inference.upstream.errors import UpstreamError
from tests.support.upstreams import call, chat, usage

Chunks = Sequence[Mapping[str, Any]]


def read(chunks: Chunks, dialect: Dialect = GENERIC, **options: Any) -> tuple[list[Delta], Finish]:
    """All deltas, chunk by chunk, checked to be well-formed."""
    reader = ChatReader(dialect, options.pop("names", {}), **options)
    deltas = [delta for chunk in chunks for delta in reader.read([chunk])]
    rest, finish = reader.finish()
    deltas += rest
    open_call = False
    for delta in deltas:
        assert isinstance(delta, CallDelta | CallEnd) == open_call or isinstance(delta, CallStart)
        assert not (isinstance(delta, CallStart) and open_call)
        open_call = isinstance(delta, CallStart) or (open_call and not isinstance(delta, CallEnd))
        assert not hasattr(delta, "text") or delta.text
    assert not open_call or finish == "length"
    return deltas, finish


def calls(deltas: Sequence[Delta]) -> list[tuple[str, str, bool]]:
    """(name, arguments, whether whole) of each call."""
    found: list[list[Any]] = []
    for delta in deltas:
        if isinstance(delta, CallStart):
            found.append([delta.name, "", False])
        elif isinstance(delta, CallDelta):
            found[-1][1] += delta.text
        elif isinstance(delta, CallEnd):
            found[-1][2] = True
    return [(name, arguments, whole) for name, arguments, whole in found]


ARGUMENTS = '{"path": "a \\"b\\" {c}", "n": {"深": [1, {}]}, "s": "}{"}'


@pytest.mark.parametrize("at", range(len(ARGUMENTS) + 1))
def test_arguments_cut_anywhere(at: int) -> None:
    chunks = [
        chat({"role": "assistant", "content": None}),
        chat(call(0, "", name="f", call_id="c1")),
        chat(call(0, ARGUMENTS[:at])),
        chat(call(0, ARGUMENTS[at:]), finish="tool_calls"),
    ]
    assert calls(read(chunks)[0]) == [("f", ARGUMENTS, True)]


def test_arguments_all_at_once_with_the_end() -> None:
    chunks = [chat(call(0, ARGUMENTS, name="f", call_id="c1"), finish="tool_calls")]
    assert read(chunks) == ([CallStart("function", "f"), CallDelta(ARGUMENTS), CallEnd()], "stop")


def test_three_calls_mixed_by_index() -> None:
    begun = [chat(call(n, name=f"f{n}", call_id=f"c{n}")) for n in (0, 1, 2)]
    parts = [(0, '{"a"'), (1, '{"b":'), (0, ": 1}"), (2, "{"), (1, " 2}"), (2, "}")]
    chunks = [*begun, *(chat(call(n, text)) for n, text in parts), chat(finish="tool_calls")]
    assert calls(read(chunks)[0]) == [("f0", '{"a": 1}', True), ("f1", '{"b": 2}', True), ("f2", "{}", True)]


@given(
    st.data(), st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=8), max_size=3), min_size=1, max_size=4)
)
@settings(max_examples=100)
def test_any_mixture_of_fragments(data: st.DataObject, given_calls: list[dict[str, str]]) -> None:
    texts = [json.dumps(entry) for entry in given_calls]
    left = [0] * len(texts)
    chunks = []
    begun = 0
    while begun < len(texts) or any(at < len(text) for at, text in zip(left, texts, strict=True)):
        open_ones = [n for n in range(begun) if left[n] < len(texts[n])]
        choices = [*open_ones, *([begun] if begun < len(texts) else [])]
        n = data.draw(st.sampled_from(choices))
        name = f"f{n}" if n == begun else None
        take = data.draw(st.integers(0 if name else 1, 12))
        chunks.append(chat(call(n, texts[n][left[n] : left[n] + take], name=name, call_id=name and f"c{n}")))
        left[n] += take
        begun += name is not None
    deltas, _ = read([*chunks, chat(finish="tool_calls")])
    assert calls(deltas) == [(f"f{n}", text, True) for n, text in enumerate(texts)]


def test_a_call_is_passed_on_as_it_comes() -> None:
    reader = ChatReader(GENERIC, {})
    assert reader.read([chat(call(0, "", name="f", call_id="c"))]) == [CallStart("function", "f")]
    assert reader.read([chat(call(0, '{"a":'))]) == [CallDelta('{"a":')]
    assert reader.read([chat(call(0, " 1}"))]) == [CallDelta(" 1}")]
    # The next one begins: the first is whole, so it ends now and not at the end of the answer.
    assert reader.read([chat(call(1, "{", name="g", call_id="d"))]) == [
        CallEnd(),
        CallStart("function", "g"),
        CallDelta("{"),
    ]


def test_calls_without_arguments_get_an_empty_object() -> None:
    chunks = [chat(call(0, name="f", call_id="c")), chat(call(1, name="g", call_id="d")), chat(finish="tool_calls")]
    assert calls(read(chunks)[0]) == [("f", "{}", True), ("g", "{}", True)]


@pytest.mark.parametrize(
    "chunks",
    [
        # the name once more in every fragment, and an empty last one
        [
            call(0, '{"a"', name="f", call_id="c"),
            call(0, ":1}", name="f", call_id="c"),
            call(0, "", name="f", call_id="c"),
        ],
        [call(0, "", name="f", call_id="c"), call(0, '{"a":1}'), {"tool_calls": []}, {"tool_calls": None}],
        # the name late
        [call(0, "", call_id="c"), call(0, "", name="f"), call(0, '{"a":1}')],
        [call(0, '{"a"', call_id="c"), call(0, ":1}", name="f")],
        # without numbers
        [{"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a":1}'}}]}],
        [
            {"tool_calls": [{"id": "c", "function": {"name": "f", "arguments": '{"a"'}}]},
            {"tool_calls": [{"function": {"arguments": ":1}"}}]},
        ],
        # what is no fragment
        [
            call(0, '{"a":1}', name="f", call_id="c"),
            {"tool_calls": [None, {"index": 0}, {"index": 0, "function": None}]},
        ],
    ],
)
def test_the_ways_of_servers(chunks: list[dict[str, Any]]) -> None:
    deltas, _ = read([*map(chat, chunks), chat(finish="tool_calls")])
    assert calls(deltas) == [("f", '{"a":1}', True)]


def test_calls_that_are_all_numbered_nought() -> None:
    chunks = [chat(call(0, '{"a":1}', name="f", call_id="c")), chat(call(0, '{"b":2}', name="g", call_id="d"))]
    assert calls(read([*chunks, chat(finish="stop")])[0]) == [("f", '{"a":1}', True), ("g", '{"b":2}', True)]


def test_calls_without_numbers_but_ids() -> None:
    fragments = [
        {"id": "c", "function": {"name": "f", "arguments": "{}"}},
        {"id": "d", "function": {"name": "f", "arguments": '{"x":1}'}},
    ]
    chunks = [chat({"tool_calls": [fragment]}) for fragment in fragments]
    assert calls(read([*chunks, chat(finish="stop")])[0]) == [("f", "{}", True), ("f", '{"x":1}', True)]


def test_kinds_follow_each_other() -> None:
    chunks = [
        chat({"role": "assistant", "content": ""}),
        chat({"reasoning": "hm"}),
        chat({"content": "Let me look."}),
        chat(call(0, "{}", name="f", call_id="c")),
        chat({"content": "Done."}),
        chat({"refusal": "No."}),
        chat(finish="stop"),
    ]
    assert read(chunks)[0] == [
        ReasoningDelta("hm"),
        TextDelta("Let me look."),
        CallStart("function", "f"),
        CallDelta("{}"),
        CallEnd(),
        TextDelta("Done."),
        RefusalDelta("No."),
    ]


@pytest.mark.parametrize(
    ("dialect", "delta", "expected"),
    [
        (CEREBRAS, {"reasoning": "a"}, [ReasoningDelta("a")]),
        (CEREBRAS, {"reasoning_content": "a"}, []),
        (VLLM, {"reasoning": "a", "reasoning_content": "a"}, [ReasoningDelta("a")]),
        (GENERIC, {"reasoning_content": "a"}, [ReasoningDelta("a")]),
        (GENERIC, {"reasoning": "a"}, [ReasoningDelta("a")]),
        (OPENAI, {"reasoning": "a"}, []),
        (GENERIC, {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, [TextDelta("ab")]),
        (GENERIC, {"content": "\ud83d x"}, [TextDelta("\ufffd x")]),
        (GENERIC, {"content": 7, "reasoning": {}, "refusal": ["x"]}, []),
    ],
)
def test_fields_of_dialects(dialect: Dialect, delta: dict[str, Any], expected: list[Delta]) -> None:
    assert read([chat(delta, finish="stop")], dialect) == (expected, "stop")


@pytest.mark.parametrize(
    ("reason", "finish"),
    [("stop", "stop"), ("tool_calls", "stop"), ("function_call", "stop"), ("eos", "stop"), ("length", "length")],
)
def test_reasons(reason: str, finish: str) -> None:
    assert read([chat({"content": "x"}), chat(finish=reason)]) == ([TextDelta("x")], finish)


@pytest.mark.parametrize(
    ("reason", "fault"),
    [(None, "unavailable"), ("", "unavailable"), ("error", "unavailable"), ("content_filter", "invalid")],
)
def test_answers_that_did_not_end(reason: str | None, fault: str) -> None:
    reader = ChatReader(GENERIC, {})
    reader.read([chat({"content": "x"}), chat(finish=reason)])
    with pytest.raises(UpstreamError) as caught:
        reader.finish()
    assert caught.value.fault == fault


@pytest.mark.parametrize(
    ("fragments", "expected"),
    [
        ([(0, '{"a":')], [("f0", '{"a":', False)]),
        ([(0, '{"a":1}')], [("f0", '{"a":1}', True)]),
        ([(0, '{"a":1}'), (1, '{"b"')], [("f0", '{"a":1}', True), ("f1", '{"b"', False)]),
        ([(0, '{"a":'), (1, '{"b":1}')], [("f0", '{"a":', False)]),
        ([(0, "")], [("f0", "", False)]),
    ],
)
def test_calls_cut_by_the_token_limit_are_not_whole(
    fragments: list[tuple[int, str]], expected: list[tuple[str, str, bool]]
) -> None:
    chunks = [chat(call(n, text, name=f"f{n}", call_id=f"c{n}")) for n, text in fragments]
    assert calls(read([*chunks, chat(finish="length")])[0]) == expected


@pytest.mark.parametrize(
    "after",
    [
        [call(1, '{"b":', name="g", call_id="d"), call(1, "2}")],
        [{"content": "and"}, call(1, '{"b":2}', name="g", call_id="d")],
    ],
)
def test_one_call_at_a_time(after: list[dict[str, Any]]) -> None:
    reader = ChatReader(GENERIC, {}, one_call=True)
    deltas = reader.read([chat(call(0, '{"a":1', name="f", call_id="c")), chat(call(0, "}"))])
    assert not reader.full
    deltas += reader.read([chat(delta) for delta in after])
    assert reader.full
    assert calls([delta for delta in deltas if not isinstance(delta, TextDelta)]) == [("f", '{"a":1}', True)]
    assert reader.finish() == ([], "stop")


def test_one_call_of_two_that_are_mixed() -> None:
    fragments = [(0, '{"a":', "f"), (1, '{"b"', "g"), (0, "1}", None), (1, ":2}", None)]
    chunks = [chat(call(n, text, name=name, call_id=name and f"c{n}")) for n, text, name in fragments]
    reader = ChatReader(GENERIC, {}, one_call=True)
    assert calls(reader.read(chunks)) == [("f", '{"a":1}', True)]
    assert reader.full


def test_names_are_mapped_back() -> None:
    chunks = [chat(call(0, "{}", name="db_get_12345678", call_id="c"), finish="stop")]
    assert calls(read(chunks, names={"db_get_12345678": "db.get"})[0]) == [("db.get", "{}", True)]


def test_usage_behind_the_last_choice() -> None:
    reader = ChatReader(GENERIC, {})
    reader.read([chat({"content": "x"}), chat(finish="stop"), {"choices": [], "usage": usage(7, 1, 4)}])
    assert reader.counted == Counted(7, 1, 4)


def test_log_probabilities_go_with_their_text() -> None:
    entry = {
        "token": "é",
        "logprob": -0.5,
        "bytes": [0xC3, 0xA9],
        "top_logprobs": [{"token": "e", "logprob": -1, "bytes": None}],
    }
    chunk = chat({"content": "é"}, finish="stop")
    chunk["choices"][0]["logprobs"] = {"content": [entry]}
    assert read([chunk])[0] == [TextDelta("é", (Logprob("é".encode(), -0.5, ((b"e", -1.0),)),))]
