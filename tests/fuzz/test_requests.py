"""Frames and bodies that are almost right: only `ApiError` may come out, and what is taken can be written again.

`LIMPET_FUZZ_EXAMPLES=100000 python -m pytest tests/fuzz` for longer.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.protocol import requests
from gateway.protocol.connection import Close, Connection, ConnectionLimits, Send, Start
from gateway.protocol.decode import MAX_DEPTH, decode_object, encode
from gateway.protocol.errors import ApiError
from gateway.protocol.lanes import LaneLimits
from gateway.protocol.response import ResponseObject, Usage
from gateway.protocol.tooldefs import ToolMemo
from tests.fuzz.seeds import LONG, frames, fuzzing, near
from tests.support.sdk import check_error, check_error_body, check_response, check_type

SEEDS = frames()
TEXTS = [json.dumps(seed) for seed in SEEDS]


@st.composite
def texts(draw: st.DrawFn) -> str | bytes:
    """JSON text, whole or broken: cut, with letters changed or bytes that are no UTF-8."""
    text = json.dumps(draw(near(SEEDS)), ensure_ascii=draw(st.booleans()))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(text)))
        text = text[:at] + draw(st.text(max_size=4) | st.sampled_from(list('{}[],:"\\'))) + text[at + 1 :]
    if draw(st.booleans()):
        return text[: draw(st.integers(0, len(text)))]
    data = text.encode("utf-8", "surrogatepass")
    return data if draw(st.booleans()) else text


@fuzzing
@given(texts() | st.binary(max_size=40) | st.text(max_size=40))
@example("[" * 100_000)
@example('{"a":' * (MAX_DEPTH - 1) + "{}" + "}" * (MAX_DEPTH - 1))
@example('{"a":1e999,"b":99999999999999999999999999}')
@example('{"a":"\\ud83d","\\ude00":"\\ud83d\\ude00"}')
@example(b'{"a":"\xff"}')
def test_decoding(text: str | bytes) -> None:
    try:
        value = decode_object(text)
    except ApiError as error:
        check_error(error.frame())
        return
    assert decode_object(encode(value)) == value
    # Inside an event it can be written too.
    encode({"response": {"tools": [value], "metadata": value}})


@fuzzing
@given(st.lists(texts() | st.sampled_from(TEXTS), max_size=12), st.data())
def test_a_connection_takes_any_frames(given_frames: list[str | bytes], data: st.DataObject) -> None:
    """Every action can be carried out, every frame of ours has its published type, and turns are balanced."""
    limits = ConnectionLimits(lifetime_s=30.0, grace_s=2.0, lanes=LaneLimits(2, 3, 2, 100_000))
    connection = Connection(limits, 0.0)
    now, running = 0.0, []
    for text in given_frames:
        now += data.draw(st.sampled_from([0.0, 1.0, 20.0]))
        actions = list(connection.receive_text(text, now))
        if running and data.draw(st.booleans()):
            actions += connection.turn_ended(running.pop(0), now)
        for action in actions:
            if isinstance(action, Send):
                frame = json.loads(encode(action.frame))
                check_type(frame)
                if frame["type"] == "error":
                    check_error(frame)
            elif isinstance(action, Start):
                assert action.lane not in running
                running.append(action.lane)
            elif isinstance(action, Close):
                assert action.code in (1000, 1009)
    connection.lost(now)
    for lane in running:
        connection.turn_ended(lane, now)
    assert connection.settled


def body_of(value: dict[str, Any]) -> dict[str, Any] | None:
    """As it would arrive: only what JSON can carry, decoded."""
    try:
        return decode_object(json.dumps(value))
    except (ApiError, ValueError):
        return None


def checked(parse: Callable[[], requests.CreateRequest]) -> None:
    """The request, or an ApiError in the published shape; what is taken makes a whole Response object."""
    try:
        request = parse()
    except ApiError as error:
        check_error_body(error.body()["error"])
        return
    response = ResponseObject("resp_1", 0, request.echo)
    check_response(json.loads(response.render("completed", usage=Usage(1, 1), completed_at=1)))


MEMO = ToolMemo()


@fuzzing
@given(near(SEEDS))
def test_creates(value: dict[str, Any]) -> None:
    body = body_of(value)
    if body is not None:
        checked(lambda: requests.parse_create(body, transport="websocket", memo=MEMO))
        checked(lambda: requests.parse_create(body, transport="http"))


@fuzzing
@given(near(SEEDS))
def test_the_relatives_of_create(value: dict[str, Any]) -> None:
    body = body_of(value)
    if body is not None:
        checked(lambda: requests.parse_compact(body))
        checked(lambda: requests.parse_input_tokens(body))


def test_seeds_are_taken_as_they_are() -> None:
    """Else fuzzing would only ever see refusals."""
    taken = 0
    for seed in SEEDS:
        try:
            requests.parse_create(decode_object(json.dumps(seed)), transport="websocket")
        except ApiError:
            continue
        taken += 1
    assert taken > len(SEEDS) * 0.7
    assert LONG >= 0
