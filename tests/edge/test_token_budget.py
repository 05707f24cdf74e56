"""What fits into a model's context: refusals, `truncation: auto`, and counts without generating (protocol.md 2.1)."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import httpx
import pytest

from inference.formats.chatml import ChatMLFormat, ChatMLOptions
from inference.scripted import Say, Script, ScriptedEngine
from inference.tokenizer import scripted_tokenizer
from tests.support.gateway import Running, gateway, turn
from tests.support.plans import words

TOKENIZER = scripted_tokenizer()
LONG = "word " * 60
CONTEXT = 400


def engine(said: str = "Fine.") -> ScriptedEngine:
    return ScriptedEngine(TOKENIZER, Script((Say(said),)), tokens_per_second=0)


def prompts(running: Running) -> list[bytes]:
    assert isinstance(running.engine, ScriptedEngine)
    return [generation.prompt for generation in running.engine.received]


async def chain(ws: Any, turns: int, **body: Any) -> list[dict[str, Any]]:
    """The terminal events of turns that each add a long user message."""
    ends: list[dict[str, Any]] = []
    for number in range(turns):
        parent = {"previous_response_id": ends[-1]["response"]["id"]} if ends else {}
        ends.append((await turn(ws, input=f"turn {number}: {LONG}", **parent, **body))[-1])
        if ends[-1]["type"] == "error":
            break
    return ends


async def test_too_long_is_refused_without_truncation_and_the_turn_before_can_be_continued() -> None:
    async with gateway(engine(), context_length=CONTEXT) as running, running.connect() as ws:
        ends = await chain(ws, 10)
        refusal = ends[-1]
        assert (refusal["error"]["code"], refusal["error"]["param"]) == ("context_length_exceeded", "input")
        assert str(CONTEXT) in refusal["error"]["message"]


async def test_auto_drops_the_oldest_turns_and_goes_on() -> None:
    async with gateway(engine(), context_length=CONTEXT) as running, running.connect() as ws:
        ends = await chain(ws, 12, truncation="auto", instructions="Be kind.", max_output_tokens=20)
        assert [end["type"] for end in ends] == ["response.completed"] * 12
        seen = prompts(running)
        last = words(seen[-1])
        assert all(len(prompt) // 4 + 20 <= CONTEXT for prompt in seen)
        assert last.startswith("<|im_start|>system\nBe kind.")
        assert "turn 11:" in last
        assert "turn 0:" not in last
        # A chat of whole messages that begins with a user's.
        assert last.split("<|im_end|>\n")[1].startswith("<|im_start|>user\nturn ")
        # Dropping breaks the engine's prefix cache, so several turns go at once and the next ones only append.
        appended = sum(later.startswith(earlier) for earlier, later in pairwise(seen))
        assert 4 <= appended < 11
        assert running.gateway.actor.counters.truncations == 11 - appended
        assert ends[-1]["response"]["usage"]["input_tokens"] == len(seen[-1]) // 4


async def test_auto_drops_the_oldest_of_a_history_that_comes_at_once() -> None:
    history: list[dict[str, Any]] = [{"role": "developer", "content": "Be kind."}]
    for number in range(8):
        history += [{"role": "user", "content": f"turn {number}: {LONG}"}, {"role": "assistant", "content": "Fine."}]
    history.append({"role": "user", "content": "And now?"})
    async with gateway(engine(), context_length=CONTEXT) as running, running.connect() as ws:
        assert (await turn(ws, input=history))[-1]["error"]["code"] == "context_length_exceeded"
        end = (await turn(ws, input=history, truncation="auto"))[-1]
        assert end["type"] == "response.completed"
        said = words(prompts(running)[-1])
        assert said.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nturn ")
        assert "turn 7:" in said
        assert "turn 0:" not in said
        assert end["response"]["truncation"] == "auto"


@pytest.mark.parametrize("truncation", ["auto", "disabled"])
async def test_one_message_longer_than_the_context_is_refused_either_way(truncation: str) -> None:
    async with gateway(engine(), context_length=CONTEXT) as running, running.connect() as ws:
        end = (await turn(ws, input="word " * 500, truncation=truncation))[-1]
        assert end["error"]["code"] == "context_length_exceeded"
        assert (await turn(ws, input="Hi."))[-1]["type"] == "response.completed"


async def test_a_truncated_conversation_forgets_its_thoughts_as_any_other() -> None:
    form = ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=True))
    model = engine("<think>\nhm\n</think>\n\nFine.")
    async with (
        gateway(model, context_length=CONTEXT, models=("m",), formats={"m": form}) as running,
        running.connect() as ws,
    ):
        await chain(ws, 12, truncation="auto")
        assert [words(prompt).count("hm") for prompt in prompts(running)] == [0] * 12


async def test_a_count_is_what_the_turn_would_be_charged() -> None:
    async with gateway(engine()) as running, httpx.AsyncClient(base_url=running.http) as client:
        body = {"model": "m", "input": LONG, "instructions": "Be kind."}
        first = (await client.post("/responses", json=body)).json()
        more = {"model": "m", "input": "And?", "previous_response_id": first["id"], "instructions": "Be kind."}
        counts = [(await client.post("/responses/input_tokens", json=each)).json() for each in (body, more)]
        second = (await client.post("/responses", json=more)).json()
        charged = [each["usage"]["input_tokens"] for each in (first, second)]
        assert counts == [{"object": "response.input_tokens", "input_tokens": count} for count in charged]
