"""The main job for real: one socket, real Serve and HAProxy, real vLLM with real weights, the official SDK."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from openai import OpenAI
from openai.types.responses import Response

from tests.cluster.conftest import SMALL
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.ray, pytest.mark.vllm, pytest.mark.timeout(400)]
BLOCK = 32
TERMINALS = ("response.completed", "response.incomplete", "response.failed", "error")
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city.",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Rome", "Paris"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def client(cluster: Cluster) -> Iterator[OpenAI]:
    with OpenAI(base_url=cluster.http, api_key="k", timeout=120, max_retries=0) as made:
        cluster.records(SMALL)
        yield made


def ended(connection: Any, **body: Any) -> Response:
    """Run one turn on a socket; its final response."""
    connection.response.create(model=SMALL, store=False, temperature=0, **body)
    for event in connection:
        if event.type in TERMINALS:
            assert event.type != "error", event
            response: Response = event.response
            return response
    raise AssertionError("the socket ended")


def total(counters: list[dict[str, int]], name: str) -> int:
    return sum(part[name] for part in counters)


def test_three_turns_on_one_socket_from_the_actors_memory(cluster: Cluster, client: OpenAI) -> None:
    before = cluster.counters()
    words = ["My name is Ada.", "What is the capital of France?", "Thank you."]
    previous, seen = None, []
    with client.responses.connect() as connection:
        for word in words:
            response = ended(connection, input=word, previous_response_id=previous, max_output_tokens=16)
            previous = response.id
            seen.append(response)

    records = cluster.records(SMALL)
    assert len(records) == 3
    for earlier, later, response in zip(records, records[1:], seen[1:], strict=False):
        known = earlier.prompt + earlier.sampled
        # What the engine got is what it was given and had sampled before, id for id, and then something new.
        assert later.prompt[: len(known)] == known
        assert len(later.prompt) > len(known)
        # It had the KV blocks of all of that, up to its block size; the id sampled last has none yet.
        assert later.cached_tokens == (len(known) - 1) // BLOCK * BLOCK
        assert response.usage is not None
        assert response.usage.input_tokens == len(later.prompt)
        assert response.usage.input_tokens_details.cached_tokens == later.cached_tokens
    after = cluster.counters()
    assert total(after, "rendered_items") - total(before, "rendered_items") == len(words)
    encoded = total(after, "encoded_tokens") - total(before, "encoded_tokens")
    assert encoded < len(records[2].prompt) - len(records[1].prompt) + 40


def test_a_named_function_is_called_and_its_output_ends_the_loop(cluster: Cluster, client: OpenAI) -> None:
    with client.responses.connect() as connection:
        first = ended(
            connection,
            input="How is the weather in Rome?",
            tools=[TOOL],
            tool_choice={"type": "function", "name": "get_weather"},
        )
        (call,) = first.output
        assert call.type == "function_call"
        assert (call.name, first.status) == ("get_weather", "completed")
        assert json.loads(call.arguments)["city"] in ("Rome", "Paris")
        output = {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}
        last = ended(connection, input=[output], previous_response_id=first.id, tools=[TOOL], max_output_tokens=24)

    assert [item.type for item in last.output] == ["message"]
    called, answered = cluster.records(SMALL)
    known = called.prompt + called.sampled
    assert answered.prompt[: len(known)] == known
    assert answered.cached_tokens == (len(known) - 1) // BLOCK * BLOCK


def test_the_same_by_post_and_by_sse(cluster: Cluster, client: OpenAI) -> None:
    first = client.responses.create(model=SMALL, input="My name is Ada.", max_output_tokens=16, temperature=0)
    stream = client.responses.create(
        model=SMALL, input="And yours?", previous_response_id=first.id, max_output_tokens=16, temperature=0, stream=True
    )
    with stream:
        events = list(stream)
    forced = client.responses.create(
        model=SMALL,
        input="How is the weather in Rome?",
        previous_response_id=events[-1].response.id,  # type: ignore[union-attr]
        tools=[TOOL],  # type: ignore[list-item]
        tool_choice={"type": "function", "name": "get_weather"},
        temperature=0,
    )

    (call,) = forced.output
    assert call.type == "function_call"
    last = client.responses.create(
        model=SMALL,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "Sunny."}],
        previous_response_id=forced.id,
        tools=[TOOL],  # type: ignore[list-item]
        max_output_tokens=16,
        temperature=0,
    )

    assert [item.type for item in last.output] == ["message"]
    one, two, three, four = cluster.records(SMALL)
    assert two.prompt[: len(one.prompt + one.sampled)] == one.prompt + one.sampled
    assert four.prompt[: len(three.prompt + three.sampled)] == three.prompt + three.sampled
    # Between the second and the third the tools came into the head, which is before everything else; the rest is the
    # same conversation, id for id.
    conversation = (two.prompt + two.sampled)[-len(two.sampled) - 20 :]
    assert any(three.prompt[at : at + len(conversation)] == conversation for at in range(len(three.prompt)))


def test_json_output_is_what_the_schema_says(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"blue": {"type": "boolean"}},
        "required": ["blue"],
        "additionalProperties": False,
    }
    form: Any = {"format": {"type": "json_schema", "name": "sky", "schema": schema, "strict": True}}
    response = client.responses.create(model=SMALL, input="Is the sky blue?", text=form, temperature=0)

    assert isinstance(json.loads(response.output_text)["blue"], bool)


def test_a_client_that_leaves_frees_the_engine(cluster: Cluster, client: OpenAI) -> None:
    with client.responses.connect() as connection:
        connection.response.create(model=SMALL, input="Tell a very long story.", store=False, max_output_tokens=2000)
        for event in connection:
            if event.type == "response.output_text.delta":
                break
    found = cluster.settings.model_named(SMALL)
    assert found is not None
    for _ in range(50):
        (stats,) = cluster.ask(found.deployment, "record_autoscaling_stats")
        if stats["turns"] == 0:
            break
    assert stats["turns"] == 0
    (record,) = cluster.records(SMALL)
    assert record.finish is None
    assert len(record.sampled) < 200


def test_too_long_a_conversation_is_refused_with_the_numbers(cluster: Cluster) -> None:
    answer = httpx.post(f"{cluster.http}/responses", json={"model": SMALL, "input": "word " * 9000}, timeout=60)

    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "8192" in answer.json()["error"]["message"]
