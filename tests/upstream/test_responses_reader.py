"""Events of a Responses stream become well-formed deltas, whatever servers stream and in whatever order; and strict
servers take every conversation."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.conversation import is_waiting
from actors.output import EngineOutput
from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Delta,
    MessageStart,
    ReasoningDelta,
    ReasoningEnd,
    RefusalDelta,
    SummaryDelta,
    TextDelta,
)
from gateway.protocol.emitter import Emitter
from gateway.protocol.ids import IdSource
from gateway.protocol.items import Item
from gateway.protocol.response import ResponseObject, Usage
from gateway.protocol.tools import Tool, ToolSet
from inference.engine import Chunk, Finish
from inference.formats.format import Brief
from inference.formats.jsontext import UpstreamRequest, request_body
from inference.formats.responses import ResponsesFormat
from inference.upstream.dialects import RESPONSES_OPENAI
from inference.upstream.errors import UpstreamError
from inference.upstream.responses_reader import GROWING, TERMINALS, ResponsesReader
from tests.support.responses_upstream import (
    SEALED,
    ResponsesRequest,
    call,
    item_events,
    joined,
    message,
    response,
    streamed,
    thought,
)
from tests.upstream.test_messages import turns

TOOLS = ToolSet((Tool("function", "shell"), Tool("custom", "patch"), Tool("function", "get", "db")))
Events = Sequence[Mapping[str, Any]]


def read(events: Events, **options: Any) -> tuple[list[Delta], Finish]:
    """All deltas, event by event, those that belong together as one."""
    reader = ResponsesReader("o", options.pop("names", {}), **options)
    found = [delta for event in events for delta in reader.read([event])]
    rest, finish = reader.finish()
    return joined([*found, *rest]), finish


def expected(item: Mapping[str, Any]) -> list[Delta]:
    """The deltas of one output item, from the item alone."""
    if item["type"] == "message":
        (part,) = item["content"]
        said = TextDelta(part["text"]) if part["type"] == "output_text" else RefusalDelta(part["refusal"])
        return [MessageStart(item.get("phase")), said]
    if item["type"] == "reasoning":
        raw: list[Delta] = [ReasoningDelta(part["text"]) for part in item.get("content", ())]
        summary: list[Delta] = [SummaryDelta(part["text"], at) for at, part in enumerate(item["summary"])]
        return [*summary, *raw, ReasoningEnd(f"o\n{item['encrypted_content']}")]
    kind, field = ("function", "arguments") if item["type"] == "function_call" else ("custom", "input")
    end: list[Delta] = [] if item["status"] == "incomplete" else [CallEnd()]
    return [CallStart(kind, item["name"]), CallDelta(item[field]), *end]  # type: ignore[arg-type]


def refusing(text: str) -> dict[str, Any]:
    return message("", content=[{"type": "refusal", "refusal": text}])


TEXT = st.text(min_size=1, max_size=8)
ITEMS = st.one_of(
    st.builds(message, TEXT, phase=st.sampled_from(["commentary", "final_answer"])),
    st.builds(message, TEXT),
    st.builds(refusing, TEXT),
    st.builds(thought, TEXT, TEXT),
    st.builds(thought, text=TEXT),
    st.builds(call, st.just("f"), TEXT),
    st.builds(call, st.just("g"), TEXT, kind=st.just("custom_tool_call")),
)


@given(st.lists(ITEMS, max_size=5), st.data())
@settings(deadline=None)
def test_items_come_whole_and_in_order_however_their_events_are_mixed(output: list[Any], data: st.DataObject) -> None:
    left = [item_events(index, item) for index, item in enumerate(output)]
    events: list[Mapping[str, Any]] = []
    begun = 0
    while any(left):
        # An item may begin once the one before it has.
        index = data.draw(st.sampled_from([at for at, rest in enumerate(left) if rest and at <= begun]))
        begun = max(begun, index + 1)
        events.append(left[index].pop(0))
    events.append({"type": "response.completed", "response": response("completed", output)})
    deltas, finish = read(events)
    assert finish == "stop"
    assert deltas == [delta for item in output for delta in expected(item)]


@given(st.lists(ITEMS, min_size=1, max_size=3), st.sampled_from(["no deltas", "only the end", "no index", "no added"]))
@settings(deadline=None)
def test_servers_leave_things_out(output: list[Any], missing: str) -> None:
    events = streamed(output)
    if missing == "no deltas":
        events = [event for event in events if "output_item" in event["type"] or "completed" in event["type"]]
    elif missing == "only the end":
        events = events[-1:]
    elif missing == "no index":
        for event in events:
            event.pop("output_index", None)
    else:
        events = [event for event in events if not event["type"].endswith("item.added")]
    deltas, _ = read(events)
    wanted = [delta for item in output for delta in expected(item)]
    if missing == "no added":  # what the item's beginning says comes too late
        wanted = [MessageStart() if isinstance(delta, MessageStart) else delta for delta in wanted]
    if missing in ("no deltas", "only the end"):  # a thought is not told twice, in short and in full
        assert [delta for delta in wanted if not isinstance(delta, SummaryDelta)] == [
            delta for delta in deltas if not isinstance(delta, SummaryDelta)
        ]
    else:
        assert deltas == wanted


def test_an_item_without_its_end_and_a_call_without_arguments() -> None:
    events = [event for event in streamed([message("x"), call("f", "")]) if not event["type"].endswith("item.done")]
    assert read(events)[0] == [MessageStart(), TextDelta("x"), CallStart("function", "f"), CallEnd()]
    assert read(streamed([call("f", "")]))[0] == [CallStart("function", "f"), CallDelta("{}"), CallEnd()]
    hidden = thought(sealed="2")
    assert read(streamed([hidden]))[0] == [ReasoningEnd(f"o\n{SEALED}2")]


@pytest.mark.parametrize("status", ["completed", "incomplete"])
def test_a_call_that_was_cut_off_is_not_told_as_whole(status: str) -> None:
    """vLLM calls it completed in its own event, whatever the response says of itself."""
    details = {"incomplete_details": {"reason": "max_output_tokens"}}
    events = streamed([call("f", "{}"), call("f", '{"a')], status, **details)
    begun: list[Delta] = [CallStart("function", "f"), CallDelta("{}"), CallEnd(), CallStart("function", "f")]
    assert read(events) == ([*begun, CallDelta('{"a')], "length")
    events[-1]["response"]["incomplete_details"] = None
    if status == "completed":  # then that is how the model wrote it
        assert read(events) == ([*begun, CallDelta('{"a'), CallEnd()], "stop")
    assert read([*events[:-1], *item_events(2, message("x")), streamed([message("x")])[-1]])[0][-3:] == [
        CallEnd(), MessageStart(), TextDelta("x"),
    ]  # fmt: skip


def test_two_calls_at_once_that_are_cut_off() -> None:
    both = [{**call("f", '{"a'), "status": "incomplete"}, {**call("f", '{"b'), "status": "incomplete"}]
    first, second = item_events(0, both[0]), item_events(1, both[1])
    mixed = [event for pair in zip(first, second, strict=True) for event in pair]
    end = streamed(both, "incomplete", incomplete_details={"reason": "max_output_tokens"})[-1]
    cut = [CallStart("function", "f"), CallDelta('{"a'), CallEnd(), CallStart("function", "f"), CallDelta('{"b')]
    assert read([*mixed, end]) == (cut, "length")


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("completed", {"status": "cancelled"}),
        ("completed", {"status": "in_progress"}),
        ("incomplete", {"incomplete_details": {"reason": "new"}}),
        ("failed", {"status": None}),
    ],
)
def test_what_did_not_end_well_is_no_answer(kind: str, more: dict[str, Any]) -> None:
    with pytest.raises(UpstreamError):
        read([{"type": f"response.{kind}", "response": {**response("completed"), **more}}])
    assert read([{"type": "response.incomplete", "response": {}}])[1] == "length"
    assert read([{"type": "response.completed", "response": {}}])[1] == "stop"


def test_an_end_that_comes_twice_ends_once() -> None:
    events = streamed([message("x"), call("f", "{}")])
    doubled = [each for event in events for each in [event] * (1 + ("item.done" in event["type"]))]
    late = {"type": "response.output_text.delta", "output_index": 0, "delta": "late"}
    assert read([*doubled[:-1], late, doubled[-1]]) == read(events)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 3) | st.sampled_from(["", "x", "message", "function_call", '{"a'])
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=2)
    | st.dictionaries(st.sampled_from(["type", "text", "name", "status", "logprob", "bytes"]), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
SOUP = st.lists(
    st.fixed_dictionaries(
        {"type": st.sampled_from([*GROWING, "response.output_item.added", "response.output_item.done", *TERMINALS])},
        optional={
            "output_index": st.integers(0, 2) | ANYTHING,
            "delta": st.text(max_size=3) | ANYTHING,
            "summary_index": ANYTHING,
            "logprobs": ANYTHING,
            "item": ITEMS | ANYTHING,
            "response": ANYTHING | st.fixed_dictionaries({"output": st.lists(ITEMS, max_size=2) | ANYTHING}),
        },
    ),
    max_size=12,
)


@given(SOUP, st.booleans())
@settings(max_examples=400, deadline=None)
def test_whatever_a_server_sends_is_an_answer_or_a_fault_of_the_upstreams(events: list[Any], one_call: bool) -> None:
    """Never deltas that the emitter knows nothing of, and no other exception."""
    ids = IdSource("0" * 8, secrets.token_hex)
    emitter = Emitter(ResponseObject(ids.response(), 1, {"model": "m"}), ids, None)
    emitter.start()
    reader = ResponsesReader("o", {}, one_call=one_call)
    try:
        for event in events:
            emitter.feed(EngineOutput({}).read(Chunk([], deltas=reader.read([event]))))
        rest, finish = reader.finish()
    except UpstreamError:
        return
    emitter.feed(rest)
    usage = Usage(1, 1)
    assert emitter.complete(usage, 1) if finish == "stop" else emitter.incomplete("max_output_tokens", usage)


def test_what_nobody_knows_is_passed_over() -> None:
    search = {
        "type": "web_search_call",
        "id": "ws_1",
        "status": "completed",
        "action": {"type": "search", "query": "x"},
    }
    events: list[Any] = streamed([message("x")])
    events[2:2] = [{"type": "response.something.new"}, {"type": 7}, {}, *item_events(9, search)]
    assert read(events)[0] == [MessageStart(), TextDelta("x")]
    assert read([*events, *streamed([message("y")])])[0] == [MessageStart(), TextDelta("x")]


@pytest.mark.parametrize("until", range(8))
def test_an_answer_without_its_end_is_none(until: int) -> None:
    with pytest.raises(UpstreamError):
        read(streamed([message("x")])[:until])


def test_names_are_those_of_the_tools() -> None:
    assert read(streamed([call("db_get_1", "{}")]), names={"db_get_1": "db.get"})[0][0] == CallStart(
        "function", "db.get"
    )


@given(turns(), st.one_of(st.none(), st.text(max_size=12)))
@settings(max_examples=100, deadline=None)
def test_a_strict_server_takes_every_conversation(pieces: list[list[Item]], rules: str | None) -> None:
    form = ResponsesFormat(RESPONSES_OPENAI, "o")
    brief = Brief(rules, tools=TOOLS)
    calls: dict[str, str] = {}
    parts = [form.head(brief)]
    for piece in pieces:
        parts.append(form.body(piece, calls))
        calls |= {item.call_id: item.name for item in piece if is_waiting(item)}
    assert all(len(part) % 4 == 0 for part in parts)
    request = form.opening(brief).parsing
    assert isinstance(request, UpstreamRequest)
    body = request_body("input", parts, request, {"model": "m", "stream": True, "store": False})
    ResponsesRequest.model_validate_json(body).check()
