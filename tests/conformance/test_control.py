"""Steering and interrupts, the sequences of protocol.md 3.8 (part of E6). `tests.support.sdk` counts the numbers."""

from __future__ import annotations

from typing import Any

import pytest

from inference.scripted import Stall
from tests.conformance.driver import call, client, function, prompt_text, says, script, slowly

TERMINAL = ("response.completed", "response.incomplete", "response.failed")


def steer(target: str, text: Any = "turn left") -> dict[str, Any]:
    return {"type": "response.steer", "previous_response_id": target, "input": text}


@pytest.mark.parametrize("lane", [{}, {"stream_id": "a"}])
async def test_e6_a_steer_ends_the_response_and_starts_its_successor(lane: dict[str, str]) -> None:
    """accepted, the item finishes, incomplete (steered) or completed, created by itself."""
    async with client(slowly()) as one:
        await one.create(input="go", **lane, instructions="Be brief.", metadata={"a": "b"})
        begun = await one.until("response.output_text.delta")
        target = begun[0]["response"]["id"]
        await one.send(steer(target))
        events = await one.until(*TERMINAL, count=2)
        assert {event.get("stream_id") for event in events} == {lane.get("stream_id")}
        (accepted,) = [event for event in events if event["type"] == "response.steer.accepted"]
        assert accepted["steer"]["previous_response_id"] == target
        first = next(event for event in events if event["type"] in TERMINAL)
        if first["type"] == "response.incomplete":
            assert first["response"]["incomplete_details"] == {"reason": "steered"}
        successor = events[events.index(first) + 1]
        assert successor["type"] == "response.created"
        assert successor["response"]["previous_response_id"] == target
        assert (successor["response"]["instructions"], successor["response"]["metadata"]) == ("Be brief.", {"a": "b"})
        assert events[-1]["type"] == "response.completed"
        prompt = prompt_text(one.running.engine.received[-1])
        assert prompt.index("go") < prompt.index("one") < prompt.index("turn left")
        await one.silent(0.1)


async def test_e6_a_steer_waits_for_the_outputs_of_calls() -> None:
    """completed, pending with what is required, and the queued input stands before the outputs' turn."""
    made_up = call("get_weather", '{"city": "Rome"}')
    engine = says(made_up[:60], Stall(0.2), made_up[60:])
    async with client(engine) as one:
        await one.create(input="go", tools=[function()])
        begun = await one.until("response.output_item.added")
        target = begun[0]["response"]["id"]
        await one.send(steer(target))
        events = await one.until("response.steer.pending")
        ended = next(event for event in events if event["type"] in TERMINAL)
        (made,) = [item for item in ended["response"]["output"] if item["type"] == "function_call"]
        pending = events[-1]
        assert pending["reason"] == "waiting_for_required_input"
        assert pending["required_input"] == [
            {"type": "function_call_output", "call_id": made["call_id"], "name": "get_weather"}
        ]
        engine.script = script("fine")
        output = {"type": "function_call_output", "call_id": made["call_id"], "output": "sunny"}
        assert (await one.turn(input=[output], previous_response_id=target, tools=[function()])).completed
        prompt = prompt_text(engine.received[-1])
        assert "turn left" in prompt
        assert "sunny" in prompt


@pytest.mark.parametrize(
    "text", [7, [], [{"type": "function_call", "call_id": "c", "name": "f", "arguments": ""}], None]
)
async def test_e6_a_steer_with_other_input_fails(text: Any) -> None:
    async with client(slowly()) as one:
        await one.create(input="go")
        begun = await one.until("response.output_text.delta")
        await one.send(steer(begun[0]["response"]["id"], text))
        events = await one.until(*TERMINAL)
        assert "response.steer.accepted" not in [event["type"] for event in events]
        (failed,) = [event for event in events if event["type"] == "response.steer.failed"]
        assert failed["error"]["code"] == "invalid_input"
        assert events[-1]["type"] == "response.completed"


async def test_e6_a_steer_after_the_end_fails() -> None:
    async with client(says("ok")) as one:
        done = await one.turn(input="go")
        await one.send(steer(done.id))
        failed = await one.receive()
        assert failed["type"] == "response.steer.failed"
        assert failed["error"]["code"] in ("response_already_completed", "response_not_active")
        assert failed["error"]["type"] == "invalid_request_error"
        await one.silent(0.1)


async def test_e6_an_interrupt_passes_the_queue_and_ends_the_response() -> None:
    """accepted, the open item is interrupted, incomplete with finished items only; the next turn continues it."""
    async with client(slowly()) as one:
        await one.create(input="go")
        await one.create(input="queued behind")
        begun = await one.until("response.output_text.delta")
        target = begun[0]["response"]["id"]
        await one.send({"type": "response.interrupt", "response_id": target, "mode": "discard_partial_items"})
        events = await one.until("response.incomplete", "response.completed")
        kinds = [event["type"] for event in events]
        assert kinds[-1] == "response.incomplete"
        assert kinds.index("response.interrupt.accepted") < kinds.index("response.output_item.interrupted")
        assert events[-1]["response"]["incomplete_details"] == {"reason": "interrupted"}
        assert events[-1]["response"]["output"] == []
        assert events[-1]["response"]["usage"] is not None
        assert (await one.finish()).completed  # what was queued
        assert (await one.turn(input="instead", previous_response_id=target)).completed
        prompt = prompt_text(one.running.engine.received[-1])
        assert prompt.index("go") < prompt.index("instead")
        assert one.running.engine.aborted == 1
