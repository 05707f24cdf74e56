"""Values as bytes and back: exactly what went in."""

from __future__ import annotations

import struct
from dataclasses import fields
from typing import Any, get_args

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.conversation import Response
from actors.store.records import (
    LAYOUTS,
    EchoTexts,
    dump,
    items_from_lists,
    items_to_lists,
    join_body,
    parse,
    split_body,
    turn_from_list,
    turn_to_list,
)
from actors.stored import StoredResponse
from gateway.protocol.items import Item, Message, MessagePart, Opaque
from gateway.protocol.response import ResponseObject
from tests.support.responses import TOOLS, asked, chains, facts, items, json_values, turn

_long = st.sampled_from([1, 300, 600]).flatmap(lambda size: st.just("é\n" * size))
written = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.text(max_size=5) | _long,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
"""What orjson can write, at times long."""


def exact(value: Any) -> Any:
    """For comparing: 1, 1.0 and True differ, and so do 0.0 and -0.0."""
    if isinstance(value, float):
        return "float", struct.pack("d", value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [exact(entry) for entry in value]
    if isinstance(value, dict):
        return "dict", [(exact(key), exact(entry)) for key, entry in value.items()]
    if hasattr(value, "__dataclass_fields__"):
        return type(value).__name__, [exact(getattr(value, field.name)) for field in fields(value)]
    return type(value).__name__, value


class TestValues:
    @given(json_values)
    def test_json_comes_back_exactly(self, value: Any) -> None:
        assert exact(parse(dump(value))) == exact(value)

    @pytest.mark.parametrize("value", ["\ud83d\ude00", {"\udfff": [1 << 90, -(1 << 80)]}, {"a": {"b": "\ud800"}}])
    def test_what_messagepack_cannot_hold_comes_back_too(self, value: Any) -> None:
        assert exact(parse(dump(value))) == exact(value)


class TestItems:
    @given(st.lists(items, max_size=4).map(tuple))
    def test_items_come_back_exactly(self, given_items: tuple[Item, ...]) -> None:
        assert exact(items_from_lists(parse(dump(items_to_lists(given_items))))) == exact(given_items)

    def test_every_type_and_every_field_has_a_place(self) -> None:
        """An item that gets a new field is stored without it until the field is put at the end of its layout."""
        assert set(LAYOUTS) == set(get_args(Item)) | set(get_args(MessagePart))
        for kind, (_, names) in LAYOUTS.items():
            own = {field.name for field in fields(kind)} - (set() if kind is Opaque else {"type"})
            assert set(names) == own, kind
        assert len({number for number, _ in LAYOUTS.values()}) == len(LAYOUTS)

    def test_old_rows_read_as_before(self) -> None:
        """Written by hand from the layouts: what is on disks must stay readable."""
        raw = [
            [0, "user", [[20, "a"], [21, None, "file_1"]], "msg_1"],
            [1, "call_1", "f", "{}", None, "completed", "space"],
            [5, "rs_1", [[26, "s"]]],
            [10, "web_search_call", {"id": "ws_1"}, "ws_1"],
        ]
        found = items_from_lists(parse(dump(raw)))

        assert items_to_lists(found) == raw
        assert isinstance(found[0], Message)
        assert found[0].type == "message"


class TestTurns:
    @settings(max_examples=60)
    @given(chains())
    def test_a_chain_comes_back_exactly(self, nodes: list[Response]) -> None:
        found: Response | None = None
        for raw in parse(dump([turn_to_list(node) for node in nodes])):
            found = turn_from_list(raw, found)

        assert exact(facts(found)) == exact(facts(nodes[-1]))

    def test_a_turn_is_written_without_its_history(self) -> None:
        node = None
        sizes = []
        for _ in range(50):
            node = turn("same", node)
            sizes.append(len(dump(turn_to_list(node))))

        assert max(sizes) - min(sizes[1:]) <= 2

    def test_a_turn_without_the_one_it_continues_is_refused(self) -> None:
        raw = turn_to_list(turn("b", turn("a")))

        with pytest.raises(ValueError, match="continues"):
            turn_from_list(raw, None)


class TestBodies:
    @pytest.mark.parametrize(
        "request_fields",
        [{}, {"tools": TOOLS}, {"tools": TOOLS, "instructions": "é " * 900}, {"instructions": "i" * 9000, "user": "u"}],
    )
    def test_a_split_body_joins_to_the_same_text(self, request_fields: dict[str, Any]) -> None:
        request = asked(**request_fields)
        body = ResponseObject("resp_a", 1, request.echo).render("completed", [Message("assistant", "x")])
        record = StoredResponse.of("resp_a", body, request)
        split = split_body(record.own, record.echo, EchoTexts())

        assert join_body(split) == body
        assert sum(len(piece) for piece in split.pieces if isinstance(piece, str)) < 2000

    @given(st.dictionaries(st.text(max_size=5), written, min_size=1, max_size=5))
    def test_any_echo_joins_to_the_same_text(self, echo: dict[str, Any]) -> None:
        texts = EchoTexts()
        for _ in range(2):
            split = split_body('{"id":1', echo, texts)
            assert join_body(split) == f'{{"id":1,{orjson.dumps(echo).decode()[1:]}'

    def test_turns_that_differ_in_small_things_share_the_long_ones(self) -> None:
        texts = EchoTexts()
        shared = set()
        for number in range(3):
            request = asked(tools=TOOLS, previous_response_id=f"resp_{number}")
            body = ResponseObject("resp_a", 1, request.echo).render("completed", [])
            record = StoredResponse.of("resp_a", body, request)
            shared.add(split_body(record.own, record.echo, texts).shared)

        assert len(shared) == 1

    @given(st.lists(st.lists(st.text("abc", max_size=300), max_size=4), max_size=4))
    def test_texts_of_lists_are_as_orjson_writes_them(self, values: list[list[str]]) -> None:
        texts = EchoTexts()
        for value in values + values:
            assert texts.text(value) == orjson.dumps(value).decode()
