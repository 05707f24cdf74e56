"""What models write: any ids in any chunks. The parser never raises, gives the same however it is fed, and the emitter
makes of it a stream that the official SDK reads."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from itertools import product

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, ReasoningDelta, RefusalDelta, TextDelta
from gateway.protocol.emitter import Emitter
from gateway.protocol.ids import IdSource
from gateway.protocol.requests import parse_create
from gateway.protocol.response import ResponseObject, Usage
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.chatml import ChatMLFormat, ChatMLOptions, call_begin, raw_begin
from inference.formats.format import Opening
from inference.tokenizer import unpack_ids
from tests.conformance.driver import TOKENIZER
from tests.fuzz.seeds import fuzzing
from tests.scenarios.interpreter import BYTES
from tests.support.sdk import EventChecker

TOOLS = ToolSet((Tool("function", "f"), Tool("custom", "c"), Tool("function", "f", "group")))
FORMATS = [ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=thinking)) for thinking in (False, True)]
ECHO = parse_create({"model": "m", "input": "x"}, transport="http").echo

PIECES = [
    *("<tool_call>", "</tool_call>", "<think>", "</think>", "\n", " ", "{", "}", '"', "\\", ",", ":", "[", "]", "<"),
    *("tool", '"name"', '"arguments"', '"f"', '"c"', '"group.f"', '"unknown"', '"input"', "1", "null", "é", "😀", "東"),
    '{"name": "f", "arguments": {"a": [1, "}"]}}',
    '<tool_call>\n{"name": "c", "arguments": {"input": "x\\n"}}\n</tool_call>',
    '<tool_call>\n{"name": "c"}\n',
]
DEEP = '<tool_call>{"name":"f","arguments":' + "[" * 3000
ids_of_text = st.lists(st.sampled_from(PIECES) | st.text(max_size=4), max_size=25).map(
    lambda pieces: unpack_ids(TOKENIZER.encode("".join(pieces).encode("utf-8", "ignore").decode()))
)
ids_of_bytes = st.lists(st.sampled_from(PIECES), max_size=8).map(
    lambda pieces: [BYTES[byte] for byte in "".join(pieces).encode()]
)
any_ids = st.lists(st.integers(0, TOKENIZER.vocab_size + 100), max_size=30)
forced = st.sampled_from(["", call_begin("f"), call_begin("c"), raw_begin("c"), "<think>\n"])


def merged(deltas: Iterable[Delta]) -> list[tuple[object, str]]:
    """Neighbours of one kind as one."""
    out: list[tuple[object, str]] = []
    for delta in deltas:
        text = getattr(delta, "text", "")
        kind = type(delta) if hasattr(delta, "text") else delta
        if out and out[-1][0] == kind and hasattr(delta, "text"):
            out[-1] = (kind, out[-1][1] + text)
        else:
            out.append((kind, text))
    return out


def stream(batches: Sequence[Sequence[Delta]], end: str) -> None:
    """The batches as events, held against the SDK."""
    emitter = Emitter(ResponseObject("resp_1", 0, ECHO), IdSource("0" * 8, lambda n: os.urandom(n).hex()), None)
    events = emitter.start()
    for batch in batches:
        events += emitter.feed(batch)
    usage = Usage(1, 1)
    match end:
        case "completed":
            events += emitter.complete(usage, 1)
        case "incomplete":
            events += emitter.incomplete("max_output_tokens", usage)
        case _:
            events += emitter.fail("server_error", "gone", usage)
    checker = EventChecker()
    for event in events:
        checker.feed(json.loads(event.data))
    assert checker.ended == 1


@fuzzing
@given(
    ids_of_text | ids_of_bytes | any_ids,
    st.sampled_from(FORMATS),
    st.sampled_from([TOOLS, ToolSet()]),
    forced,
    st.lists(st.integers(1, 6), max_size=30),
    st.sampled_from(["completed", "incomplete", "failed"]),
)
@example(unpack_ids(TOKENIZER.encode("<tool_call>" * 500)), FORMATS[0], TOOLS, "", [], "completed")
@example(
    unpack_ids(TOKENIZER.encode(DEEP)),
    FORMATS[0],
    TOOLS,
    "",
    [],
    "completed",
)
def test_any_output(ids: list[int], form: ChatMLFormat, tools: ToolSet, start: str, sizes: list[int], end: str) -> None:
    whole = form.parser(tools, Opening(b"", start))
    expected = [*whole.feed(ids), *whole.finish()]
    parser, batches, at = form.parser(tools, Opening(b"", start)), [], 0
    for size in [*sizes, *[1] * len(ids)]:
        if at >= len(ids):
            break
        batches.append(parser.feed(ids[at : at + size]))
        at += size
    batches.append(parser.finish())
    assert merged(delta for batch in batches for delta in batch) == merged(expected)
    assert all(len(merged(batch)) == len(batch) for batch in batches)
    assert parser.reasoning_tokens <= len(ids)
    assert all(delta.text for delta in expected if isinstance(delta, TextDelta | ReasoningDelta))
    stream(batches, end)


RUNS: list[list[Delta]] = [
    [TextDelta("t")],
    [ReasoningDelta("r")],
    [RefusalDelta("no")],
    [CallStart("function", "f"), CallDelta("{"), CallDelta("}"), CallEnd()],
    [CallStart("custom", "c"), CallDelta("x"), CallEnd()],
]


def test_every_interleaving_of_kinds() -> None:
    """O-33, openai/openai-python#2942: deltas of an item that was never added crash the SDK. All orders of up to four
    runs (of two kinds up to eight), and a call that is cut off at the end."""
    orders = [order for length in range(5) for order in product(RUNS, repeat=length)]
    orders += list(product(RUNS[:2], repeat=8))
    for order in orders:
        stream(order, "completed")
    for order in product(RUNS[:3], repeat=2):
        for end in ("completed", "incomplete", "failed"):
            stream([*order, RUNS[3][:2]], end)
