"""What an actor keeps of responses that have ended, and the events of those that ran in the background."""

from __future__ import annotations

import asyncio
import json
import pickle

import pytest

from actors.conversation import Response
from actors.eventlog import EventLog
from actors.listing import Page, listed, page_of
from actors.stored import SharedResponses, StoredResponse, StoreLimits
from actors.tokencache import EMPTY
from gateway.protocol.emitter import Event
from gateway.protocol.errors import ApiError
from gateway.protocol.items import FunctionCallOutput, InputImage, Item, Message, OutputText
from gateway.protocol.requests import CreateRequest, parse_create
from gateway.protocol.response import ResponseObject

USER = Message("user", "hello")
ANSWER = Message("assistant", (OutputText("hi"),), id="msg_1", status="completed")
TOOLS = [
    {"type": "function", "name": f"tool_{n}", "parameters": {"type": "object"}, "strict": False} for n in range(90)
]


def node(name: str, *items: Item, parent: Response | None = None) -> Response:
    tokens = (EMPTY if parent is None else parent.tokens).extend(b"abcd")
    return Response(f"resp_{name}", parent, items, tokens, None, (), {}, None, "m", True)


def asked(**fields: object) -> CreateRequest:
    return parse_create({"model": "m", "input": "hello", **fields}, transport="http")


def record(name: str, *, request: CreateRequest | None = None, at: Response | None = None) -> StoredResponse:
    request = request or asked()
    body = ResponseObject(f"resp_{name}", 1, request.echo).render("completed", [ANSWER])
    event = Event("response.completed", f'{{"type":"response.completed","sequence_number":9,"response":{body}}}')
    return StoredResponse.ended(event, request, f"resp_{name}", at or node(name, USER, ANSWER), 1)


class TestStoredResponse:
    @pytest.mark.parametrize("fields", [{}, {"tools": TOOLS}, {"instructions": "be brief " * 1000}])
    def test_its_body_is_the_terminal_events(self, fields: dict[str, object]) -> None:
        request = asked(**fields)
        kept = record("a", request=request)

        assert kept.body() == ResponseObject("resp_a", 1, request.echo).render("completed", [ANSWER])

    def test_a_long_echo_is_not_kept_as_text(self) -> None:
        assert record("a", request=asked(tools=TOOLS)).size < 3000

    def test_its_inputs_are_the_context_and_what_was_new(self) -> None:
        first = node("a", USER, ANSWER)
        kept = record("b", at=node("b", Message("user", "more"), ANSWER, parent=first))
        inputs = kept.inputs()

        assert [item for _, item in inputs] == [USER, ANSWER, Message("user", "more")]
        assert len({item_id for item_id, _ in inputs}) == 3
        assert inputs == kept.inputs()

    def test_it_survives_the_way_to_another_actor(self) -> None:
        first = node("a", USER, ANSWER)
        kept = record("b", request=asked(tools=TOOLS), at=node("b", USER, ANSWER, parent=first))
        copy = StoredResponse.adopt(pickle.loads(pickle.dumps(kept.export())))

        assert (copy.body(), copy.inputs(), copy.background) == (kept.body(), kept.inputs(), False)
        assert copy.node is not None
        assert copy.node.tokens.tail(0) == b"abcdabcd"

    def test_one_that_failed_cannot_be_continued_but_shows_its_input(self) -> None:
        kept = StoredResponse.of("resp_a", "{}", asked())

        assert kept.node is None
        assert [item for _, item in kept.inputs()] == [USER]


class TestSharedResponses:
    async def test_tenants_do_not_see_each_other(self) -> None:
        shared = SharedResponses()
        shared.put("one", record("a"))

        assert await shared.get("one", "resp_a") is not None
        assert await shared.get("two", "resp_a") is None
        assert not await shared.delete("two", "resp_a")
        assert await shared.get("one", "resp_a") is not None

    async def test_the_least_recently_used_goes_first(self) -> None:
        shared = SharedResponses(StoreLimits(responses=2))
        shared.put("t", record("a"))
        shared.put("t", record("b"))
        await shared.get("t", "resp_a")
        shared.put("t", record("c"))

        assert [await shared.get("t", f"resp_{name}") is not None for name in "abc"] == [True, False, True]

    async def test_bytes_are_bounded_too(self) -> None:
        size = record("a").size
        shared = SharedResponses(StoreLimits(bytes=3 * size + size // 2))
        for name in "abcdefgh":
            shared.put("t", record(name))

        assert [await shared.get("t", f"resp_{name}") is not None for name in "abcdefgh"] == [False] * 5 + [True] * 3
        assert shared.size == 3 * size

    async def test_one_response_above_the_bound_is_kept_alone(self) -> None:
        shared = SharedResponses(StoreLimits(bytes=10))
        shared.put("t", record("a"))
        shared.put("t", record("b"))

        assert [await shared.get("t", f"resp_{name}") is not None for name in "ab"] == [False, True]

    async def test_delete_says_whether_it_was_there(self) -> None:
        shared = SharedResponses()
        shared.put("t", record("a"))

        assert [await shared.delete("t", "resp_a"), await shared.delete("t", "resp_a")] == [True, False]
        assert shared.size == 0

    async def test_a_copy_that_arrives_after_the_deletion_stays_away(self) -> None:
        shared = SharedResponses()
        await shared.delete("t", "resp_a")
        shared.put("t", record("a"))

        assert await shared.get("t", "resp_a") is None

    async def test_logs_beyond_the_bound_go_and_the_responses_stay(self) -> None:
        shared = SharedResponses(StoreLimits(log_bytes=250))
        for name in "abc":
            shared.put("t", record(name))
            log = EventLog(1000)
            log.append([Event("e", "x" * 100)])
            log.end()
            shared.keep_log("t", f"resp_{name}", log)

        kept = await shared.get("t", "resp_a")
        assert kept is not None
        assert kept.log is not None
        with pytest.raises(ApiError, match="no longer kept"):
            kept.log.since(-1, 10)
        assert shared.log_size == 200
        await shared.delete("t", "resp_b")
        assert shared.log_size == 100


class TestEventLog:
    @staticmethod
    def events(*numbers: int) -> list[Event]:
        return [Event("e", str(number) * 10) for number in numbers]

    def test_since_is_by_sequence_number(self) -> None:
        log = EventLog(1000)
        log.append(self.events(0, 1, 2))

        assert log.since(-1, 10) == (self.events(0, 1, 2), False)
        assert log.since(0, 1) == (self.events(1), False)
        assert log.since(2, 10) == ([], False)
        log.end()
        assert log.since(1, 10) == (self.events(2), True)
        assert log.since(0, 1) == (self.events(1), False)
        assert log.since(99, 10) == ([], True)

    def test_the_oldest_events_go_and_say_so(self) -> None:
        log = EventLog(40)
        for number in range(8):
            log.append(self.events(number))

        assert log.size <= 40
        with pytest.raises(ApiError) as refused:
            log.since(0, 10)
        assert refused.value.param == "starting_after"
        assert log.since(5, 10)[0] == self.events(6, 7)

    def test_an_event_above_the_bound_leaves_an_empty_log_that_counts_on(self) -> None:
        log = EventLog(5)
        log.append(self.events(0, 1))
        log.end()

        assert (log.size, log.since(1, 10)) == (0, ([], True))

    async def test_readers_are_woken_by_events_and_by_the_end(self) -> None:
        log = EventLog(1000)
        waiting = [asyncio.ensure_future(log.more(-1, 600)) for _ in range(2)]
        await asyncio.sleep(0)
        log.append(self.events(0))
        await asyncio.wait_for(asyncio.gather(*waiting), 30)
        last = asyncio.ensure_future(log.more(0, 600))
        await asyncio.sleep(0)
        log.end()
        await asyncio.wait_for(last, 30)
        await asyncio.wait_for(log.more(0, 600), 30)

    async def test_waiting_ends_with_the_time(self) -> None:
        log = EventLog(1000)
        await asyncio.wait_for(log.more(-1, 0.01), 30)

        assert log.since(-1, 1) == ([], False)


class TestLists:
    ENTRIES = tuple((f"i{n}", Message("user", str(n))) for n in range(5))

    @pytest.mark.parametrize(
        ("page", "ids", "more"),
        [
            (Page(), ["i4", "i3", "i2", "i1", "i0"], False),
            (Page(2), ["i4", "i3"], True),
            (Page(2, after="i3"), ["i2", "i1"], True),
            (Page(2, "asc"), ["i0", "i1"], True),
            (Page(2, "asc", "i2"), ["i3", "i4"], False),
            (Page(2, "asc", "i4"), [], False),
        ],
    )
    def test_pages(self, page: Page, ids: list[str], more: bool) -> None:
        found = page_of(self.ENTRIES, page)

        assert [item["id"] for item in found["data"]] == ids
        assert found["has_more"] is more
        assert (found["first_id"], found["last_id"]) == ((ids[0], ids[-1]) if ids else ("", ""))

    def test_an_unknown_after_is_refused(self) -> None:
        with pytest.raises(ApiError) as refused:
            page_of(self.ENTRIES, Page(after="nope"))

        assert (refused.value.code, refused.value.param) == ("invalid_value", "after")

    @pytest.mark.parametrize(
        ("item", "shown"),
        [
            (USER, {"content": [{"type": "input_text", "text": "hello"}], "status": "completed", "role": "user"}),
            (Message("assistant", "hi"), {"content": [{"type": "output_text", "text": "hi", "annotations": []}]}),
            (
                Message("user", (InputImage(image_url="u"),)),
                {"content": [{"type": "input_image", "image_url": "u", "detail": "auto"}]},
            ),
            (FunctionCallOutput("c", "out"), {"call_id": "c", "output": "out", "status": "completed"}),
            (ANSWER, {"status": "completed"}),
        ],
    )
    def test_items_have_what_the_published_type_demands(self, item: Item, shown: dict[str, object]) -> None:
        found = json.loads(json.dumps(listed("x_1", item)))

        assert found["id"] == "x_1"
        assert {key: found[key] for key in shown} == shown
