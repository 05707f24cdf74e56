"""Models that somebody else runs, through the whole gateway: chains over dialects, fall-backs, limits, aborts."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from gateway.model_loading import upstream_loader
from gateway.settings import ModelSettings
from inference.engine import EngineError
from inference.tokenizer import harmony_tokenizer
from tests.support.engines import PlannedEngine
from tests.support.gateway import create, gateway, receive, turn
from tests.support.harmony import marked
from tests.support.plans import CALL, FUNCTION, Plans, plan, words
from tests.support.upstreams import (
    KEY,
    MODEL,
    Stall,
    Upstream,
    call,
    cerebras_upstream,
    chat,
    completion,
    serving,
    usage,
)


def by_ids(upstream: Upstream, **more: Any) -> Any:
    """A model at Cerebras, by token ids."""
    settings = {"url": upstream.base_url, "model": MODEL, "keys": [KEY]}
    model = {"name": "ids", "engine": "cerebras", "format": "harmony", "context_length": 65_536, "upstream": settings}
    return upstream_loader(ModelSettings.model_validate({**model, **more}))


def by_messages(upstream: Upstream, name: str = "chat") -> Any:
    """The same by chat completions."""
    settings = {"url": upstream.base_url, "model": MODEL, "keys": [KEY], "dialect": "cerebras-gpt-oss"}
    model = {"name": name, "engine": "chat", "context_length": 65_536, "upstream": settings}
    return upstream_loader(ModelSettings.model_validate(model))


def says(upstream: Upstream, text: str) -> None:
    upstream.answer(
        chat({"role": "assistant", "reasoning": "hm"}), chat({"content": text}), chat({}, "stop"),
        chat(usage=usage(11, 3, 7, 1)),
    )  # fmt: skip


def output_of(call_id: str, text: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": text}


async def test_a_chain_goes_over_three_dialects_and_loses_nothing() -> None:
    engine = Plans(plan("Looking.\n", CALL), plan("Done."))
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(engine, models=("ours",), loaders={"ids": by_ids(upstream), "chat": by_messages(upstream)}) as running,
        running.connect() as ws,
    ):
        options = {"tools": [FUNCTION], "instructions": "Be kind."}
        one = (await turn(ws, model="ours", input="First.", **options))[-1]["response"]
        call_id = one["output"][-1]["call_id"]

        final = marked(
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Second.<|return|>"
        )
        upstream.answer(completion(final), completion([], "stop"), completion(usage=usage(200, len(final))))
        parent = {"previous_response_id": one["id"]}
        two = (await turn(ws, model="ids", input=[output_of(call_id, "sunny")], **parent, **options))[-1]["response"]

        upstream.answer(
            chat({"role": "assistant"}),
            chat(call(0, '{"a"', name="f", call_id="x")),
            chat(call(0, ": 1}")),
            chat({}, "tool_calls"),
            chat(usage=usage(300, 5, 256)),
        )
        parent = {"previous_response_id": two["id"]}
        three = (await turn(ws, model="chat", input="Third.", **parent, **options))[-1]["response"]
        parent = {"previous_response_id": three["id"]}
        given = [output_of(three["output"][-1]["call_id"], "rainy"), {"role": "user", "content": "Fourth."}]
        four = (await turn(ws, model="ours", input=given, **parent, **options))[-1]["response"]

    assert [each["status"] for each in (one, two, three, four)] == ["completed"] * 4
    # By ids: the conversation so far, in Harmony's words.
    prompt = b"".join(harmony_tokenizer().token_bytes(i) for i in upstream.requests[0].fields["prompt"]).decode()
    assert [part for part in ("Be kind.", "First.", "Looking.", "functions.f", "sunny") if part not in prompt] == []
    # By messages: roles, calls and outputs in their places, thoughts under the dialect's name.
    messages = upstream.requests[1].fields["messages"]
    assert [each["role"] for each in messages] == ["system", "user", "assistant", "tool", "assistant", "user"]
    assert messages[2]["tool_calls"][0]["id"] == messages[3]["tool_call_id"]
    assert (messages[3]["content"], messages[4]["content"], messages[5]["content"]) == ("sunny", "Second.", "Third.")
    # And back: all of it, by ids of the first vocabulary.
    last = words(engine.seen[-1].prompt)
    said = ("Be kind.", "First.", "Looking.", "sunny", "Second.", "Third.", '"a": 1', "rainy", "Fourth.")
    positions = [last.find(part) for part in said]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert (three["usage"]["input_tokens"], three["usage"]["input_tokens_details"]["cached_tokens"]) == (300, 256)
    assert two["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_a_chain_by_messages_sends_what_was_sent_before_and_what_is_new() -> None:
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"chat": by_messages(upstream)}) as running,
        running.connect() as ws,
    ):
        for text in ("One.", "Two."):
            says(upstream, text)
        first = (await turn(ws, model="chat", input="a"))[-1]["response"]
        second = (await turn(ws, model="chat", input="b", previous_response_id=first["id"]))[-1]["response"]
    before, after = (each.fields["messages"] for each in upstream.requests)
    assert after[: len(before)] == before
    assert [each["content"] for each in after[len(before) :]] == ["One.", "b"]
    assert second["output"][-1]["content"][0]["text"] == "Two."
    assert second["usage"]["output_tokens_details"]["reasoning_tokens"] == 1


@pytest.mark.parametrize("fault", ["unavailable", "overloaded"])
async def test_another_model_answers_when_no_engine_can(fault: Any) -> None:
    engine = PlannedEngine([EngineError(fault, "no")])
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(engine, models=("ours",), loaders={"chat": by_messages(upstream)}, fallback="chat") as running,
        running.connect() as ws,
    ):
        says(upstream, "From afar.")
        first = (await turn(ws, model="ours", input="a"))[-1]["response"]
        assert first["output"][-1]["content"][0]["text"] == "From afar."
        assert first["model"] == "ours"
        engine.plan = plan("At home.")  # type: ignore[assignment]
        second = (await turn(ws, model="ours", input="b", previous_response_id=first["id"]))[-1]["response"]
        assert second["output"][-1]["content"][0]["text"] == "At home."
        assert running.gateway.actor.counters.fallbacks == 1
    assert "From afar." in words(engine.seen[-1].prompt)


async def test_nobody_answers_instead_once_something_was_said() -> None:
    engine = PlannedEngine([*plan("Half", end=False), EngineError("unavailable", "gone")])
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(engine, models=("ours",), loaders={"chat": by_messages(upstream)}, fallback="chat") as running,
        running.connect() as ws,
    ):
        events = await turn(ws, model="ours", input="a")
    assert events[-1]["type"] == "response.failed"
    assert not upstream.requests


async def test_a_rate_limit_is_told_with_its_advice_before_and_after_the_first_event() -> None:
    """Bugs.md O-89."""
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"chat": by_messages(upstream)}) as running,
        running.connect() as ws,
    ):
        upstream.answer(status=429, headers={"retry-after": "7"}, body={"message": "slow down", "code": "x"})
        failed = (await turn(ws, model="chat", input="a"))[-1]
        assert (failed["type"], failed["response"]["error"]["code"]) == ("response.failed", "rate_limit_exceeded")
        # What is known by now is told before anything is created.
        (refused,) = await turn(ws, model="chat", input="a")
        assert (refused["status"], refused["error"]["code"]) == (429, "rate_limit_exceeded")
        assert 1 <= int(refused["headers"]["retry-after"]) <= 7
        assert len(upstream.requests) == 1


async def test_closing_the_socket_ends_the_request_at_the_upstream() -> None:
    """Bugs.md O-77, O-78."""
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"chat": by_messages(upstream)}) as running,
    ):
        upstream.answer(chat({"role": "assistant"}), chat({"content": "Well"}), Stall())
        async with running.connect() as ws:
            await create(ws, model="chat", input="a")
            while (await receive(ws))["type"] != "response.output_text.delta":
                pass
        await asyncio.wait_for(upstream.aborted.wait(), 30)


async def test_a_choice_that_the_dialect_lacks_is_refused_before_anything_is_asked() -> None:
    """Bugs.md O-88."""
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(
            PlannedEngine(()), models=("ours",), loaders={"chat": by_messages(upstream), "ids": by_ids(upstream)}
        ) as running,
        running.connect() as ws,
    ):
        for model in ("chat", "ids"):
            (refused,) = await turn(ws, model=model, input="a", tools=[FUNCTION], tool_choice="required")
            assert (refused["status"], refused["error"]["type"]) == (400, "invalid_request_error")
        assert not upstream.requests


async def test_a_warm_up_costs_nothing_at_an_upstream() -> None:
    async with (
        serving(cerebras_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"ids": by_ids(upstream)}) as running,
        running.connect() as ws,
    ):
        warm = (await turn(ws, model="ids", input="a", generate=False))[-1]["response"]
        assert warm["status"] == "completed"
        final = marked("<|channel|>final<|message|>Hi.<|return|>")
        took = {"queue_time": 0.01, "prompt_time": 0.02, "completion_time": 0.03, "total_time": 0.06}
        upstream.answer(
            completion(final), completion([], "stop"), completion(usage=usage(9, 3), time_info={**took, "created": 1})
        )
        end = (await turn(ws, model="ids", input="b", previous_response_id=warm["id"]))[-1]["response"]
        assert json.dumps(end["output"]).count("Hi.") == 1
        figures = (await running.gateway.actor.metrics.render()).decode()
        assert 'limpet_upstream_seconds_total{actor="0123abcd",kind="prompt"} 0.02' in figures
    assert len(upstream.requests) == 1
