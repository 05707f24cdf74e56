"""The event grammar: order, numbering, and every event valid by the official SDK's own types."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Delta,
    Logprob,
    MessageStart,
    ReasoningDelta,
    ReasoningEnd,
    RefusalDelta,
    SummaryDelta,
    TextDelta,
)
from gateway.protocol.emitter import Emitter, Event, IllegalDelta
from gateway.protocol.ids import IdSource
from gateway.protocol.open_items import CompactionBeat, CompactionEnd, CompactionStart, CompactionStep, Seal
from gateway.protocol.response import ResponseObject, Usage

SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
USAGE = Usage(input_tokens=10, output_tokens=4, cached_tokens=8, reasoning_tokens=1)
ECHO = {
    "model": "m",
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "instructions": None,
    "metadata": {},
    "temperature": 1.0,
    "top_p": 1.0,
}


def emitter(stream_id: str | None = None, seal: Seal | None = None) -> Emitter:
    counter = iter(range(10_000))
    ids = IdSource("0" * 8, lambda n: f"{next(counter):0{2 * n}x}")
    return Emitter(ResponseObject(ids.response(), 1_700_000_000, ECHO), ids, stream_id, seal)


def decoded(events: list[Event]) -> list[dict[str, Any]]:
    found = [json.loads(event.data) for event in events]
    assert [event.type for event in events] == [event["type"] for event in found]
    for event in found:
        if event["type"] != "keepalive":
            SDK_EVENT.validate_python(event, strict=False)
    return found


def whole(
    deltas: Sequence[Delta | CompactionStep], stream_id: str | None = None, seal: Seal | None = None
) -> list[dict[str, Any]]:
    source = emitter(stream_id, seal)
    return decoded([*source.start(), *source.feed(deltas), *source.complete(USAGE, 1_700_000_001)])


def test_a_message_goes_through_every_step_of_its_grammar() -> None:
    events = whole([TextDelta("Hel"), TextDelta("lo")])

    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [event["sequence_number"] for event in events] == list(range(10))
    assert events[4]["logprobs"] == []
    assert events[6]["text"] == "Hello"
    done = events[8]["item"]
    assert done["status"] == "completed"
    assert done["content"] == [{"type": "output_text", "text": "Hello", "annotations": [], "logprobs": []}]
    assert events[9]["response"]["output"] == [done]


def test_the_terminal_response_tells_usage_with_every_key() -> None:
    response = whole([TextDelta("x")])[-1]["response"]

    assert response["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 8, "cache_write_tokens": 2},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 1},
        "total_tokens": 14,
    }
    assert (response["status"], response["completed_at"]) == ("completed", 1_700_000_001)


def test_started_responses_are_empty_and_have_no_usage() -> None:
    created = whole([])[0]["response"]

    assert (created["status"], created["output"], created["usage"]) == ("in_progress", [], None)
    assert created["error"] is None
    assert created["incomplete_details"] is None


def test_a_function_call_streams_its_arguments() -> None:
    events = whole([CallStart("function", "look"), CallDelta('{"a"'), CallDelta(":1}"), CallEnd()])
    kinds = [event["type"] for event in events[2:-1]]

    assert kinds == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    added, done = events[2]["item"], events[6]["item"]
    assert (added["arguments"], added["status"]) == ("", "in_progress")
    assert done == {**added, "arguments": '{"a":1}', "status": "completed"}
    assert done["call_id"].startswith("call_")
    assert events[5]["arguments"] == '{"a":1}'


def test_a_namespaced_custom_call_says_its_namespace() -> None:
    events = whole([CallStart("custom", "exec", "functions"), CallDelta("ls"), CallEnd()])
    item = events[-1]["response"]["output"][0]

    assert (item["type"], item["input"], item["namespace"]) == ("custom_tool_call", "ls", "functions")
    assert "response.custom_tool_call_input.done" in [event["type"] for event in events]


def test_parallel_calls_are_separate_items() -> None:
    call: list[Delta] = [CallStart("function", "f"), CallDelta("{}"), CallEnd()]
    events = whole([*call, *call])
    added = [event for event in events if event["type"] == "response.output_item.added"]

    assert [event["output_index"] for event in added] == [0, 1]
    assert len({event["item"]["call_id"] for event in added}) == 2


def test_a_change_of_kind_closes_the_item_before() -> None:
    events = whole([ReasoningDelta("hm"), TextDelta("yes"), RefusalDelta("no")])
    order = [(event["type"].removeprefix("response."), event["output_index"]) for event in events if "item" in event]

    assert order == [
        ("output_item.added", 0),
        ("output_item.done", 0),
        ("output_item.added", 1),
        ("output_item.done", 1),
        ("output_item.added", 2),
        ("output_item.done", 2),
    ]
    reasoning = events[-1]["response"]["output"][0]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert reasoning["summary"] == []


def test_every_event_of_a_named_lane_names_it_and_none_of_the_default_lane_does() -> None:
    assert {event.get("stream_id") for event in whole([TextDelta("x")], "main")} == {"main"}
    assert all("stream_id" not in event for event in whole([TextDelta("x")]))


def test_optional_fields_are_left_out_never_null() -> None:
    item = whole([TextDelta("x")])[-1]["response"]["output"][0]

    assert None not in item.values()
    assert "phase" not in item


def test_a_cut_answer_is_incomplete_and_so_is_its_item() -> None:
    source = emitter()
    events = decoded(
        [*source.start(), *source.feed([TextDelta("half")]), *source.incomplete("max_output_tokens", USAGE)]
    )

    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert events[-2]["item"]["status"] == "incomplete"


def test_a_failed_response_says_why_and_keeps_what_was_finished() -> None:
    source = emitter()
    source.start()
    source.feed([CallStart("function", "f"), CallDelta("{}"), CallEnd(), TextDelta("half")])
    events = decoded(source.fail("server_error", "gone"))

    assert [event["type"] for event in events] == ["response.failed"]
    assert events[0]["response"]["error"] == {"code": "server_error", "message": "gone"}
    assert [item["type"] for item in events[0]["response"]["output"]] == ["function_call"]


def test_keepalive_takes_a_sequence_number() -> None:
    source = emitter("a")
    source.start()

    assert json.loads(source.keepalive().data) == {"type": "keepalive", "stream_id": "a", "sequence_number": 2}


def test_sealed_reasoning_is_in_the_finished_item_only() -> None:
    events = whole([ReasoningDelta("h"), ReasoningDelta("m"), TextDelta("yes")], seal=lambda text, _: f"<{text}>")
    added, done = (event["item"] for event in events if event.get("output_index") == 0 and "item" in event)

    assert "encrypted_content" not in added
    assert (done["encrypted_content"], done["summary"]) == ("<hm>", [])
    assert done["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert events[-1]["response"]["output"][0] == done
    assert "encrypted_content" not in json.dumps(whole([ReasoningDelta("hm")]))


def test_a_summary_goes_through_every_step_of_its_grammar() -> None:
    events = whole([SummaryDelta("Loo"), SummaryDelta("king."), SummaryDelta("Found.", 1), TextDelta("yes")])
    mine = [event for event in events if event.get("output_index") == 0]

    assert [event["type"].removeprefix("response.") for event in mine] == [
        "output_item.added",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "reasoning_summary_part.added",
        "reasoning_summary_text.delta",
        "reasoning_summary_text.done",
        "reasoning_summary_part.done",
        "output_item.done",
    ]
    assert [event["summary_index"] for event in mine if "summary_index" in event] == [0] * 5 + [1] * 4
    assert mine[-1]["item"]["summary"] == [
        {"type": "summary_text", "text": "Looking."},
        {"type": "summary_text", "text": "Found."},
    ]
    assert "content" not in mine[-1]["item"]


def test_what_an_upstream_wants_back_is_in_the_seal_and_nowhere_else() -> None:
    deltas = [
        ReasoningDelta("hm"), ReasoningEnd("a"), SummaryDelta("sum"), ReasoningEnd("b"), ReasoningEnd("c"),
        TextDelta("yes"), ReasoningEnd("d"), SummaryDelta("none"),
    ]  # fmt: skip
    items = whole(deltas, seal=lambda text, foreign: f"<{text}|{foreign}>")[-1]["response"]["output"]

    kinds = ["reasoning", "reasoning", "reasoning", "message", "reasoning", "reasoning"]
    assert [item["type"] for item in items] == kinds
    sealed = [item.get("encrypted_content") for item in items]
    assert sealed == ["<hm|a>", "<|b>", "<|c>", None, "<|d>", "<none|None>"]
    assert "foreign" not in json.dumps(items)
    source = emitter()
    source.feed(deltas)
    assert [getattr(item, "foreign", None) for item in source.output] == ["a", "b", "c", None, "d"]


COMPACTION: list[CompactionStep] = [CompactionStart(), CompactionBeat(), CompactionBeat(), CompactionEnd("blob")]


def test_a_compaction_is_an_item_with_signs_of_life() -> None:
    events = whole([*COMPACTION, TextDelta("yes")], "lane")
    mine = [event for event in events if event.get("output_index") == 0]

    assert [event["type"] for event in mine] == [
        "response.output_item.added",
        "response.compaction.compacting",
        "response.compaction.compacting",
        "response.output_item.done",
    ]
    done = mine[-1]["item"]
    assert done == {"type": "compaction", "id": done["id"], "encrypted_content": "blob"}
    assert {event["item_id"] for event in mine if "item_id" in event} == {done["id"]} == {mine[0]["item"]["id"]}
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["compaction", "message"]
    assert {event["stream_id"] for event in events} == {"lane"}


def test_a_compaction_has_its_own_sign_of_life() -> None:
    source = emitter()
    source.start()
    source.feed(COMPACTION[:1])
    (event,) = decoded([source.keepalive()])

    assert (event["type"], event["sequence_number"]) == ("response.compaction.compacting", 3)


@pytest.mark.parametrize("ending", ["failed", "incomplete"])
def test_a_compaction_that_is_cut_short_leaves_no_item(ending: str) -> None:
    source = emitter()
    source.start()
    source.feed(COMPACTION[:2])
    events = decoded(source.fail("server_error", "x") if ending == "failed" else source.incomplete("steered", USAGE))

    assert [event["type"] for event in events] == [f"response.{ending}"]
    assert events[0]["response"]["output"] == []


def test_a_response_is_not_complete_while_it_compacts() -> None:
    source = emitter()
    source.start()
    source.feed(COMPACTION[:2])
    with pytest.raises(IllegalDelta):
        source.complete(USAGE, 1)

    assert decoded(source.feed(COMPACTION[3:]))[0]["item"]["encrypted_content"] == "blob"


OPENERS: dict[str, list[Any]] = {
    "text": [TextDelta("x")],
    "refusal": [RefusalDelta("x")],
    "reasoning": [ReasoningDelta("x")],
    "summary": [SummaryDelta("x")],
    "call": [CallStart("function", "f")],
    "compaction": [CompactionStart()],
    "nothing": [],
}
ILLEGAL = [
    *((name, step) for name in OPENERS if name != "compaction" for step in (CompactionBeat(), CompactionEnd("x"))),
    *((name, CompactionStart()) for name in OPENERS if name != "nothing"),
    *(("compaction", delta[0]) for name, delta in OPENERS.items() if delta),
    *(("compaction", delta) for delta in (CallDelta("x"), CallEnd(), ReasoningEnd("x"))),
]


@pytest.mark.parametrize(("opened", "delta"), ILLEGAL)
def test_a_compaction_stands_between_items(opened: str, delta: Any) -> None:
    source = emitter()
    source.start()
    source.feed(OPENERS[opened])
    before = source.keepalive()
    with pytest.raises(IllegalDelta):
        source.feed([delta])

    assert json.loads(source.keepalive().data)["sequence_number"] == json.loads(before.data)["sequence_number"] + 1


@pytest.mark.parametrize("delta", [CallDelta("x"), CallEnd()])
def test_an_illegal_delta_raises_and_changes_nothing(delta: Delta) -> None:
    source = emitter()
    source.start()
    with pytest.raises(IllegalDelta):
        source.feed([delta])

    assert json.loads(source.complete(USAGE, 1)[0].data)["sequence_number"] == 2


def test_nothing_comes_after_the_end() -> None:
    source = emitter()
    source.start()
    source.complete(USAGE, 1)
    for act in (lambda: source.complete(USAGE, 1), lambda: source.fail("server_error", ""), source.keepalive):
        with pytest.raises(IllegalDelta):
            act()


TEXTS = st.text(min_size=1, max_size=20)
CALLS = st.builds(
    lambda kind, name, pieces: [CallStart(kind, name), *map(CallDelta, pieces), CallEnd()],
    st.sampled_from(["function", "custom"]),
    st.sampled_from(["f", "g"]),
    st.lists(TEXTS, max_size=3),
)
RUNS = st.lists(
    st.one_of(
        st.builds(lambda text: [TextDelta(text)], TEXTS),
        st.builds(lambda text: [RefusalDelta(text)], TEXTS),
        st.builds(lambda text: [ReasoningDelta(text)], TEXTS),
        st.builds(lambda text, part: [SummaryDelta(text, part)], TEXTS, st.integers(0, 1)),
        st.just([ReasoningEnd("x")]),
        CALLS,
    ),
    max_size=8,
)
COMPACTIONS = st.just([]) | st.integers(0, 3).map(
    lambda beats: [CompactionStart(), *[CompactionBeat()] * beats, CompactionEnd("blob")]
)


@given(COMPACTIONS, RUNS, st.sampled_from([None, "lane.1"]))
def test_any_run_is_valid_dense_and_consistent(
    compaction: list[CompactionStep], runs: list[list[Delta]], stream_id: str | None
) -> None:
    events = whole([*compaction, *(delta for run in runs for delta in run)], stream_id)

    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    terminals = [event for event in events if event["type"] == "response.completed"]
    assert terminals == [events[-1]]
    output = events[-1]["response"]["output"]
    assert output == [event["item"] for event in events if event["type"] == "response.output_item.done"]
    added = [event["output_index"] for event in events if event["type"] == "response.output_item.added"]
    assert added == list(range(len(output)))
    for index, item in enumerate(output):
        mine = [event for event in events if event.get("output_index") == index]
        assert {event["item_id"] for event in mine if "item_id" in event} <= {item["id"]}
        streamed = "".join(event["delta"] for event in mine if event["type"].endswith(".delta"))
        final = (
            item.get("arguments")
            or item.get("input")
            or "".join(
                part.get("text") or part.get("refusal") or ""
                for part in (*item.get("content", ()), *item.get("summary", ()))
            )
        )
        assert streamed == final


def test_a_message_starts_anew_in_its_phase() -> None:
    events = whole(
        [MessageStart("commentary"), TextDelta("Let me see."), MessageStart("final_answer"), TextDelta("42")]
    )
    output = events[-1]["response"]["output"]

    assert [(item["phase"], item["content"][0]["text"]) for item in output] == [
        ("commentary", "Let me see."),
        ("final_answer", "42"),
    ]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    assert [(item["phase"], item["content"]) for item in added] == [("commentary", []), ("final_answer", [])]


def test_the_start_of_a_message_shows_only_with_its_text() -> None:
    assert whole([MessageStart("final_answer")])[-1]["response"]["output"] == []
    call = [MessageStart("commentary"), CallStart("function", "f"), CallEnd(), TextDelta("done")]
    items = whole(call)[-1]["response"]["output"]
    assert [item.get("phase") for item in items] == [None, None]  # another item came in between
    with pytest.raises(IllegalDelta):
        emitter().feed([CallStart("function", "f"), MessageStart()])


def test_log_probabilities_are_in_the_delta_the_done_event_and_the_part() -> None:
    scored = (Logprob(b"H\xc3", -0.5, ((b"H\xc3", -0.5),)), Logprob(b"\xa9", float("-inf")))
    events = whole([TextDelta("H\u00e9", scored), TextDelta("!")])
    delta, plain = (event for event in events if event["type"] == "response.output_text.delta")
    part = events[-1]["response"]["output"][0]["content"][0]

    assert plain["logprobs"] == []
    assert [entry["logprob"] for entry in delta["logprobs"]] == [-0.5, -9999.0]
    assert [entry["bytes"] for entry in part["logprobs"]] == [[72, 195], [169]]
    assert part["logprobs"][0]["top_logprobs"] == [{"token": "H\ufffd", "logprob": -0.5, "bytes": [72, 195]}]
