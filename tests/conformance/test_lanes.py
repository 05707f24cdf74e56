"""Lanes, L1 to L9 of protocol.md 10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.conformance.driver import Gated, client, eventually, prompt_text, says, slowly
from tests.support.gateway import TERMINALS


async def test_l1_two_lanes_interleave() -> None:
    async with client(slowly()) as one:
        await one.create(input="x", stream_id="one")
        await one.create(input="y", stream_id="two")
        lanes = [event["stream_id"] for event in await one.until("response.completed", count=2)]
    assert "two" in lanes[: len(lanes) - lanes[::-1].index("one")]
    assert "one" in lanes[: len(lanes) - lanes[::-1].index("two")]


@pytest.mark.parametrize("lane", [{}, {"stream_id": "a"}])
async def test_l2_one_lane_is_first_in_first_out(lane: dict[str, str]) -> None:
    async with client(slowly(seconds=0.01)) as one:
        for n in range(4):
            await one.create(input=f"turn {n}", metadata={"n": str(n)}, **lane)
        for n in range(4):
            result = await one.finish()
            assert {event["response"]["metadata"]["n"] for event in result.events if "response" in event} == {str(n)}
            assert result.completed


async def test_l3_stream_id_on_every_event_of_named_lanes_and_on_no_other() -> None:
    async with client(says("ok")) as one:
        named = await one.turn(input="hi", stream_id="A.b-c_9")
        assert {event["stream_id"] for event in named.events} == {"A.b-c_9"}
        refused = await one.turn(input="hi", previous_response_id="resp_x", stream_id="A.b-c_9")
        assert refused.last["stream_id"] == "A.b-c_9"
        default = await one.turn(input="hi")
        assert not [event for event in default.events if "stream_id" in event]
        assert "stream_id" not in (await one.turn(input="hi", previous_response_id="resp_x")).last


async def test_l4_a_fork_keeps_both_chains() -> None:
    async with client(says("ok")) as one:
        root = await one.turn(input="root", stream_id="main")
        await one.create(input="left", previous_response_id=root.id, stream_id="main")
        await one.create(input="right", previous_response_id=root.id, stream_id="side")
        ended = [event for event in await one.until(*TERMINALS, count=2) if event["type"] in TERMINALS]
        ids = {event["stream_id"]: event["response"]["id"] for event in ended}
        for lane, mine, other in (("main", "left", "right"), ("side", "right", "left")):
            assert (await one.turn(input="end", previous_response_id=ids[lane], stream_id=lane)).completed
            prompt = prompt_text(one.running.engine.received[-1])
            assert "root" in prompt
            assert mine in prompt
            assert other not in prompt


async def test_l4_a_queued_fork_pins_its_parent() -> None:
    """8.12: pinned at arrival, so main may advance meanwhile, even where only the newest is kept."""
    engine = Gated()
    settings = {"limits": {"kept_responses_per_lane": 1, "active_turns": 1}}
    async with client(engine, settings=settings) as one:
        engine.open.set()
        root = await one.turn(input="root", stream_id="main")
        engine.open.clear()
        await one.create(input="next", previous_response_id=root.id, stream_id="main")
        await one.create(input="fork", previous_response_id=root.id, stream_id="side")
        engine.open.set()
        ended = [event for event in await one.until(*TERMINALS, count=2) if event["type"] in TERMINALS]
        assert [event["type"] for event in ended] == ["response.completed"] * 2


async def test_l5_the_17th_active_response_waits() -> None:
    engine = Gated()
    async with client(engine) as one:
        for n in range(17):
            await one.create(input="hi", stream_id=f"lane{n}")
        await eventually(lambda: engine.running == 16)
        began = await one.until("response.created", count=16)
        await one.until("response.output_text.delta", count=16 - sum("delta" in e["type"] for e in began))
        await one.silent(0.1)
        engine.open.set()
        ended = 0
        while ended < 17:
            event = await one.receive()
            if event["type"] == "response.created":
                assert (event["stream_id"], ended > 0) == ("lane16", True)
            ended += event["type"] == "response.completed"


async def test_l5_the_default_lane_counts() -> None:
    engine = Gated()
    async with client(engine, settings={"limits": {"active_turns": 2}}) as one:
        for lane in ({}, {"stream_id": "a"}, {"stream_id": "b"}):
            await one.create(input="hi", **lane)
        await eventually(lambda: engine.running == 2)
        engine.open.set()
        await one.until("response.completed", count=3)


async def test_l6_the_33rd_name_is_refused_and_the_32_stay() -> None:
    async with client(says("ok")) as one:
        for n in range(32):
            assert (await one.turn(input="hi", stream_id=f"lane{n}")).completed
        assert (await one.turn(input="hi")).completed  # the default lane isn't counted
        refused = await one.turn(input="hi", stream_id="one too many")
        assert refused.error["code"] == "invalid_stream_id"  # a space is no name at all
        refused = await one.turn(input="hi", stream_id="one-too-many")
        assert (refused.error["code"], refused.error["param"]) == ("websocket_stream_limit_reached", "stream_id")
        assert refused.last["stream_id"] == "one-too-many"
        for n in (0, 31):
            assert (await one.turn(input="hi", stream_id=f"lane{n}")).completed


@pytest.mark.parametrize("name", ["", "a b", "ä", "x" * 257, "a/b", None, 7, True, ["a"], {}])
async def test_l7_bad_names_are_refused_without_echo(name: Any) -> None:
    async with client(says("ok")) as one:
        refused = await one.turn(input="hi", stream_id=name)
        assert (refused.error["code"], refused.error["param"]) == ("invalid_stream_id", "stream_id")
        assert "stream_id" not in refused.last
        assert (await one.turn(input="hi", stream_id="x" * 256)).completed


async def test_l8_an_error_on_one_lane_leaves_another_alone() -> None:
    async with client(slowly()) as one:
        await one.create(input="hi", stream_id="good")
        await one.until("response.output_text.delta")
        for body in ({"model": 7}, {"previous_response_id": "resp_x"}, {"tools": 1}):
            await one.create(input="hi", stream_id="bad", **body)
        events = await one.until("response.completed")
        errors = [event for event in events if event["type"] == "error"]
        assert [event["stream_id"] for event in errors] == ["bad"] * 3
        assert {event["stream_id"] for event in events if event["type"] != "error"} == {"good"}


async def test_l9_a_lane_used_again_without_parent_starts_afresh() -> None:
    async with client(says("ok")) as one:
        first = await one.turn(input="hi", stream_id="a")
        assert (await one.turn(input="on", previous_response_id=first.id, stream_id="a")).completed
        assert (await one.turn(input="anew", stream_id="a")).completed
        assert prompt_text(one.running.engine.received[-1]).count("<|im_start|>user") == 1
