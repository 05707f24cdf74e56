"""Turns, T1 to T14 of protocol.md 10. `tests.support.sdk` checks the grammar of every event besides."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest

from inference.scripted import ScriptedEngine
from tests.conformance.driver import TOKENIZER, call, client, function, prompt_text, says
from tests.support.sdk import RESPONSE_KEYS, TERMINALS

both = pytest.mark.parametrize("transport", ["socket", "sse"])
every = pytest.mark.parametrize("transport", ["socket", "sse", "json"])

HELLO = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


@both
async def test_t1_the_order_of_events(transport: str) -> None:
    async with client(says("Hello"), transport) as one:
        assert (await one.turn(input="hi")).types == HELLO


@both
async def test_t2_sequence_numbers_are_dense_from_0_in_each_response(transport: str) -> None:
    async with client(says("Hello there"), transport) as one:
        for _ in range(2):
            result = await one.turn(input="hi")
            assert [event["sequence_number"] for event in result.events] == list(range(len(result.events)))


@both
async def test_t3_one_terminal_and_nothing_after_it(transport: str) -> None:
    async with client(says("Hello"), transport) as one:
        result = await one.turn(input="hi")
        assert [kind for kind in result.types if kind in TERMINALS] == ["response.completed"]
        if transport == "socket":
            await one.silent(0.2)
            assert (await one.turn(input="again")).types == HELLO


@both
async def test_t4_ids_and_indices_agree_and_the_deltas_are_the_text(transport: str) -> None:
    engine = says("<think>\nhm\n</think>\n\nLook: ", call("get_weather", '{"city": "Göttingen"}'))
    async with client(engine, transport, thinking=True) as one:
        result = await one.turn(input="hi", tools=[function()])
    output = result.completed["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
    for index, item in enumerate(output):
        own = [event for event in result.events if event.get("item_id") == item["id"]]
        assert {event["output_index"] for event in own} == {index}
        added = next(e for e in result.events if e["type"].endswith("item.added") and e["output_index"] == index)
        done = next(e for e in result.events if e["type"].endswith("item.done") and e["output_index"] == index)
        assert (added["item"]["id"], done["item"]) == (item["id"], item)
        streamed = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        assert streamed == (item["arguments"] if "arguments" in item else item["content"][0]["text"])
    assert json.loads(output[2]["arguments"]) == {"city": "Göttingen"}


@both
async def test_t5_created_and_completed_hold_the_whole_response(transport: str) -> None:
    body: dict[str, Any] = {"temperature": 0.5, "tools": [function()], "instructions": "Be brief.", "user": "u"}
    async with client(says("Hello"), transport) as one:
        result = await one.turn(input="hi", **body)
    created, completed = result.events[0]["response"], result.completed
    assert created.keys() >= RESPONSE_KEYS
    assert completed.keys() >= RESPONSE_KEYS
    assert completed["status"] == "completed"
    assert completed["completed_at"] >= completed["created_at"]
    changing = {"status", "output", "usage", "completed_at"}
    assert {k: v for k, v in created.items() if k not in changing} == {
        k: v for k, v in completed.items() if k not in changing
    }
    assert completed["tools"] == [{**function(), "description": None, "strict": None}] or completed["tools"]
    assert (completed["temperature"], completed["instructions"]) == (0.5, "Be brief.")


@every
async def test_t6_usage_sums(transport: str) -> None:
    async with client(says("Hello there"), transport) as one:
        usage = (await one.turn(input="hi")).completed["usage"]
        count = len(one.running.engine.received[0].prompt) // 4
    assert usage["input_tokens"] == count
    assert usage["output_tokens"] == len(TOKENIZER.encode("Hello there")) // 4 + 1  # and the id that ends it
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


@pytest.mark.parametrize("extra", [{"stream": True}, {"stream": False}, {"stream": None}, {"stream": "yes"}])
async def test_t7_stream_is_ignored_on_a_socket(extra: dict[str, Any]) -> None:
    """Codex and openai-agents always send true (8.3)."""
    async with client(says("Hello")) as one:
        assert (await one.turn(input="hi", **extra)).types == HELLO


@every
async def test_t8_input_is_a_string_an_array_or_empty(transport: str) -> None:
    async with client(says("ok"), transport) as one:
        string = await one.turn(input="hi")
        array = await one.turn(input=[{"role": "user", "content": [{"type": "input_text", "text": "hi"}]}])
        empty = await one.turn(input=[], previous_response_id=string.id)
        nothing = await one.turn(previous_response_id=empty.id)
        prompts = [prompt_text(generation) for generation in one.running.engine.received]
        missing = await one.turn(input=[])
    assert array.completed
    assert prompts[0] == prompts[1]
    assert prompts[2] == prompts[0] + "ok<|im_end|>\n<|im_start|>assistant\n"
    assert nothing.completed
    assert missing.error["code"] == "missing_required_parameter"


@every
async def test_t9_unknown_fields_and_tools_are_tolerated(transport: str) -> None:
    """What Codex sends by default (2.1)."""
    tools = [
        {"type": "web_search", "external_web_access": False},
        {"type": "namespace", "name": "mcp__x", "description": "", "tools": [function("look")]},
        {"type": "image_generation"},
        {"type": "tool_of_the_future", "anything": [1]},
        function("shell", strict=None),
    ]
    item = {
        "type": "message",
        "role": "user",
        "id": "msg_0198",
        "content": [{"type": "input_text", "text": "hi", "new": 1}],
        "internal_chat_message_metadata_passthrough": {"turn_id": "x"},
    }
    async with client(says(call("mcp__x.look")), transport) as one:
        result = await one.turn(
            input=[item],
            tools=tools,
            client_metadata={"x-codex-turn-metadata": "{}"},
            brand_new={"a": [None]},
            include=["reasoning.encrypted_content"],
            reasoning={"summary": "auto"},
            prompt_cache_key="k",
        )
    assert [(item["name"], item["namespace"]) for item in result.items("function_call")] == [("look", "mcp__x")]


@both
async def test_t10_function_and_custom_calls_stream(transport: str) -> None:
    engine = says(call("get_weather", '{"city": "Paris"}'), "\n", call("patch", '{"input": "*** Begin\\nx"}'))
    custom = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    async with client(engine, transport) as one:
        result = await one.turn(input="hi", tools=[function(), custom])
    function_call, custom_call = result.completed["output"]
    assert (function_call["name"], json.loads(function_call["arguments"])) == ("get_weather", {"city": "Paris"})
    assert (custom_call["type"], custom_call["input"]) == ("custom_tool_call", "*** Begin\nx")
    order = [kind for kind in result.types if "delta" not in kind][2:-1]
    assert order == [
        "response.output_item.added",
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.output_item.added",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    assert function_call["id"].startswith("fc_")
    assert custom_call["id"].startswith("ctc_")


@every
async def test_t11_parallel_calls(transport: str) -> None:
    calls = "\n".join(call("get_weather", json.dumps({"city": city})) for city in ("Rome", "Oslo", "Bern"))
    async with client(says(calls), transport) as one:
        result = await one.turn(input="hi", tools=[function()])
        found = result.items("function_call")
        outputs = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": f"sun {n}"}
            for n, item in enumerate(found)
        ]
        assert (await one.turn(input=outputs, previous_response_id=result.id, tools=[function()])).completed
        prompt = prompt_text(one.running.engine.received[1])
    assert [json.loads(item["arguments"])["city"] for item in found] == ["Rome", "Oslo", "Bern"]
    assert len({item["call_id"] for item in found} | {item["id"] for item in found}) == 6
    assert prompt.index("sun 0") < prompt.index("sun 1") < prompt.index("sun 2")


@every
async def test_t12_max_output_tokens_ends_as_incomplete(transport: str) -> None:
    async with client(says("word " * 40), transport) as one:
        result = await one.turn(input="hi", max_output_tokens=16)
    assert result.last["type"] == "response.incomplete"
    assert result.response["incomplete_details"] == {"reason": "max_output_tokens"}
    assert result.response["usage"]["output_tokens"] == 16
    assert result.response["output"][-1]["status"] == "incomplete"
    assert result.text == "word " * 15 + "word" or result.text.startswith("word word")


@every
async def test_t13_json_schema_output(transport: str) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "name": "person", "schema": schema, "strict": True}
    async with client(ScriptedEngine(TOKENIZER), transport) as one:
        result = await one.turn(input="Who?", text={"format": form})
        guide = one.running.engine.received[0].sampling.guide
        wrong = await one.turn(input="Who?", text={"format": {**form, "schema": {"type": "nonsense"}}})
    jsonschema.validate(json.loads(result.text), schema)
    assert guide.kind == "json"
    assert json.loads(guide.value) == schema
    assert result.completed["text"]["format"]["name"] == "person"
    assert wrong.error["code"] == "invalid_json_schema"


@every
async def test_t14_metadata_is_echoed(transport: str) -> None:
    metadata = {"run": "7", "k" * 64: "v" * 512}
    async with client(says("ok"), transport) as one:
        assert (await one.turn(input="hi", metadata=metadata)).completed["metadata"] == metadata
        assert (await one.turn(input="hi")).completed["metadata"] == {}
        assert (await one.turn(input="hi", metadata={"a": "b" * 513})).error["param"] == "metadata.a"
        assert (await one.turn(input="hi", metadata={str(n): "" for n in range(17)})).error["param"] == "metadata"
