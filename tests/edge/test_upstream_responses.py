"""Models at a server of the Responses API, through the whole gateway: chains, sealed thoughts, calls that were cut off,
and a gateway like this one at the other end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from gateway.model_loading import upstream_loader
from gateway.settings import ModelSettings
from inference.engine import Chunk
from tests.support.engines import PlannedEngine
from tests.support.gateway import create, gateway, receive, text, turn
from tests.support.plans import CALL, FUNCTION, Plans, plan, types, words
from tests.support.responses_upstream import SEALED, call, message, responses_upstream, streamed, thought, used
from tests.support.upstreams import KEY, MODEL, Stall, Upstream, cerebras_upstream, chat, serving

BLOB = ["reasoning.encrypted_content"]


def by_items(upstream: Upstream, dialect: str = "openai", **more: Any) -> Any:
    """A model at an upstream, by the Responses API."""
    settings = {"url": upstream.base_url, "model": MODEL, "keys": [KEY], "dialect": dialect, **more}
    model = {"name": "afar", "engine": "responses", "context_length": 65_536, "upstream": settings}
    return upstream_loader(ModelSettings.model_validate(model))


def by_messages(upstream: Upstream) -> Any:
    """Another by chat completions."""
    settings = {"url": upstream.base_url, "model": MODEL, "keys": [KEY], "dialect": "cerebras-gpt-oss"}
    model = {"name": "chat", "engine": "chat", "context_length": 65_536, "upstream": settings}
    return upstream_loader(ModelSettings.model_validate(model))


def output_of(call_id: str, said: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": said}


async def test_a_chain_goes_there_and_back_and_there_again_with_its_sealed_thoughts() -> None:
    engine = Plans(plan("Looking.\n", CALL), plan("Done."))
    async with (
        serving(responses_upstream()) as upstream,
        gateway(engine, models=("ours",), loaders={"afar": by_items(upstream)}) as running,
        running.connect() as ws,
    ):
        options = {"tools": [FUNCTION], "instructions": "Be kind."}
        one = (await turn(ws, model="ours", input="First.", **options))[-1]["response"]

        output = [thought("Checking.", sealed="A"), call("f", '{"a": 1}', "their_id")]
        upstream.answer(*streamed(output, usage=used(200, 9, 64, 5)))
        given = [output_of(one["output"][-1]["call_id"], "sunny")]
        two = (await turn(ws, model="afar", input=given, previous_response_id=one["id"], **options))[-1]["response"]

        upstream.answer(*streamed([thought(sealed="B"), message("Second.", phase="final_answer")]))
        given = [output_of(two["output"][-1]["call_id"], "rainy")]
        three = (await turn(ws, model="afar", input=given, previous_response_id=two["id"], **options))[-1]["response"]

        four = (await turn(ws, model="ours", input="Third.", previous_response_id=three["id"]))[-1]["response"]
        upstream.answer(*streamed([message("Fourth.")]))
        five = (await turn(ws, model="afar", input="Fifth.", previous_response_id=four["id"]))[-1]["response"]

    assert [each["status"] for each in (one, two, three, four, five)] == ["completed"] * 5
    assert [item["type"] for item in two["output"]] == ["reasoning", "function_call"]
    assert two["output"][0]["summary"] == [{"type": "summary_text", "text": "Checking."}]
    assert SEALED not in json.dumps([two, three])
    assert (two["usage"]["input_tokens"], two["usage"]["output_tokens_details"]["reasoning_tokens"]) == (200, 5)
    ours, theirs = one["output"][-1]["call_id"], two["output"][-1]["call_id"]
    first, second, third = (each.fields["input"] for each in upstream.requests)
    conversation = [
        {"type": "message", "role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": "First."},
        {"type": "message", "role": "assistant", "content": "Looking."},
        {"type": "function_call", "call_id": ours, "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": ours, "output": "sunny"},
        {
            "type": "reasoning",
            "summary": [{"type": "summary_text", "text": "Checking."}],
            "encrypted_content": SEALED + "A",
        },
        {"type": "function_call", "call_id": theirs, "name": "f", "arguments": '{"a": 1}'},
        {"type": "function_call_output", "call_id": theirs, "output": "rainy"},
        {"type": "reasoning", "summary": [], "encrypted_content": SEALED + "B"},
        {"type": "message", "role": "assistant", "content": "Second.", "phase": "final_answer"},
        {"type": "message", "role": "user", "content": "Third."},
        {"type": "message", "role": "assistant", "content": "Done."},
        {"type": "message", "role": "user", "content": "Fifth."},
    ]
    assert (first, second, third) == (conversation[:5], conversation[:8], conversation[1:])
    prompt = words(engine.seen[-1].prompt)
    said = ("First.", "Looking.", "sunny", '"a": 1', "rainy", "Second.", "Third.")
    positions = [prompt.find(part) for part in said]
    assert -1 not in positions
    assert positions == sorted(positions)
    assert SEALED not in prompt


async def test_a_client_without_stored_state_carries_the_upstreams_thoughts_inside_ours() -> None:
    async with (
        serving(responses_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"afar": by_items(upstream)}) as running,
    ):
        upstream.answer(*streamed([thought("Sum.", sealed="A"), message("One.")]))
        question = {"role": "user", "content": "a"}
        async with running.connect() as ws:
            first = (await turn(ws, model="afar", input=[question], include=BLOB))[-1]["response"]
        blob = first["output"][0]["encrypted_content"]
        assert SEALED not in blob
        replayed = [question, *first["output"], {"role": "user", "content": "b"}]
        for items, sealed in ((replayed, True), (spoilt(replayed), False)):
            upstream.answer(*streamed([message("Two.")]))
            async with running.connect() as ws:
                assert (await turn(ws, model="afar", input=items))[-1]["type"] == "response.completed"
            thoughts = [item for item in upstream.requests[-1].fields["input"] if item["type"] == "reasoning"]
            summary = [{"type": "summary_text", "text": "Sum."}]
            expected = {"type": "reasoning", "summary": summary, "encrypted_content": SEALED + "A"}
            assert thoughts == ([expected] if sealed else [])


def spoilt(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The same with blobs that don't open, and what a client would like to put in their place."""
    forged = {"encrypted_content": "lmp1_AAAA", "foreign": f"x\n{SEALED}Z"}
    return [{**item, **forged} if item.get("type") == "reasoning" else item for item in items]


@pytest.mark.parametrize("model", ["afar", "chat"])
async def test_a_call_that_was_cut_off_needs_no_output_and_may_get_one(model: str) -> None:
    """Servers take no call without its output, and such a one has none."""
    half = plan("Well. ", CALL[:40], Chunk([], finish="length"), end=False)
    async with (
        serving(responses_upstream()) as items,
        serving(cerebras_upstream()) as messages,
        gateway(
            Plans(half), models=("ours",), loaders={"afar": by_items(items), "chat": by_messages(messages)}
        ) as running,
        running.connect() as ws,
    ):
        first = (await turn(ws, model="ours", input="a", tools=[FUNCTION]))[-1]["response"]
        cut = first["output"][-1]
        assert (cut["type"], cut["status"]) == ("function_call", "incomplete")
        for given in ([{"role": "user", "content": "b"}], [output_of(cut["call_id"], "late")]):
            items.answer(*streamed([message("x")]))
            messages.answer(chat({"content": "x"}, "stop"))
            events = await turn(ws, model=model, input=given, previous_response_id=first["id"], tools=[FUNCTION])
            assert events[-1]["type"] == "response.completed", events[-1]
            # And behind a turn of the same kind, which is not rendered again.
            items.answer(*streamed([message("y")]))
            messages.answer(chat({"content": "y"}, "stop"))
            more = {"input": "c", "previous_response_id": events[-1]["response"]["id"]}
            assert (await turn(ws, model=model, **more))[-1]["type"] == "response.completed"
        assert items.refused == messages.refused == []


@pytest.mark.parametrize("model", ["afar", "chat"])
async def test_a_call_that_the_upstream_cut_off_may_be_answered(model: str) -> None:
    async with (
        serving(responses_upstream()) as items,
        serving(cerebras_upstream()) as messages,
        gateway(
            PlannedEngine(()), models=("ours",), loaders={"afar": by_items(items), "chat": by_messages(messages)}
        ) as running,
        running.connect() as ws,
    ):
        cut = {**call("f", '{"a'), "status": "incomplete"}
        details = {"reason": "max_output_tokens"}
        items.answer(*streamed([cut], "incomplete", incomplete_details=details))
        fragment = {"index": 0, "id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a'}}
        messages.answer(chat({"tool_calls": [fragment]}), chat({}, "length"))
        first = (await turn(ws, model=model, input="a", tools=[FUNCTION]))[-1]["response"]
        assert first["output"][-1]["status"] == "incomplete"
        items.answer(*streamed([message("x")]))
        messages.answer(chat({"content": "x"}, "stop"))
        given = [output_of(first["output"][-1]["call_id"], "late")]
        events = await turn(ws, model=model, input=given, previous_response_id=first["id"], tools=[FUNCTION])
        assert events[-1]["type"] == "response.completed"
        assert "late" in json.dumps((items.requests or messages.requests)[-1].fields)
        assert items.refused == messages.refused == []


async def test_outputs_stand_behind_their_calls_and_are_of_their_kind() -> None:
    """Agent frameworks answer freeform tools as functions, and send what they please in between."""
    cut = {
        "type": "function_call",
        "id": "fc_1",
        "call_id": "c1",
        "name": "f",
        "arguments": '{"a',
        "status": "incomplete",
    }
    history: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        cut,
        {"role": "user", "content": "b"},
        output_of("c1", "late"),
        {"role": "user", "content": "c"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "abc"},
        {"type": "function_call", "call_id": "c3", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c2", "output": "done"},
        {"role": "user", "content": "d"},
        {"type": "custom_tool_call_output", "call_id": "c3", "output": "done, too"},
    ]
    async with (
        serving(responses_upstream()) as items,
        serving(cerebras_upstream()) as messages,
        gateway(
            PlannedEngine(()), models=("ours",), loaders={"afar": by_items(items), "chat": by_messages(messages)}
        ) as running,
        running.connect() as ws,
    ):
        for model in ("afar", "chat"):
            items.answer(*streamed([call("patch", "xyz", kind="custom_tool_call")]))
            fragment = {"index": 0, "id": "x", "type": "function"}
            arguments = {"name": "patch", "arguments": '{"input": "xyz"}'}
            messages.answer(chat({"tool_calls": [{**fragment, "function": arguments}]}), chat({}, "tool_calls"))
            first = (await turn(ws, model=model, input=history, tools=[FUNCTION, PATCH]))[-1]["response"]
            assert first["status"] == "completed"
            items.answer(*streamed([message("x")]))
            messages.answer(chat({"content": "x"}, "stop"))
            answer = [{"role": "user", "content": "e"}, output_of(first["output"][0]["call_id"], "fine")]
            last = (await turn(ws, model=model, input=answer, previous_response_id=first["id"]))[-1]
            assert last["type"] == "response.completed"
    assert items.refused == messages.refused == []


async def test_a_conversation_over_http_stays_with_its_key() -> None:
    """What an organization has sealed or cached is no use to another one."""
    async with (
        serving(responses_upstream()) as upstream,
        gateway(
            PlannedEngine(()), models=("ours",), loaders={"afar": by_items(upstream, keys=[KEY, "k2", "k3", "k4"])}
        ) as running,
        httpx.AsyncClient(base_url=running.http) as client,
    ):
        upstream.keys |= {"k2", "k3", "k4"}

        async def conversation(name: str) -> None:
            parent: dict[str, Any] = {}
            for _ in range(4):
                upstream.answer(*streamed([thought(), message("x")]), delay_s=0.02)
                answer = await client.post("responses", json={"model": "afar", "input": name, **parent})
                parent = {"previous_response_id": answer.json()["id"]}

        names = [f"conversation {number}" for number in range(6)]
        await asyncio.gather(*map(conversation, names))
    keys: dict[str, set[str]] = {name: set() for name in names}
    for seen in upstream.requests:
        keys[seen.fields["input"][0]["content"]].add(seen.headers["authorization"])
    assert [len(found) for found in keys.values()] == [1] * 6
    assert len(set.union(*keys.values())) == 4


async def test_a_thought_may_be_repeated_with_what_the_client_has_of_it() -> None:
    async with (
        serving(responses_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"afar": by_items(upstream)}) as running,
        running.connect() as ws,
    ):
        for include in ([], BLOB):
            for item in (thought("Sum."), thought("Sum.", sealed=None), thought(text="Raw.")):
                upstream.answer(*streamed([item, message("x")]))
                first = (await turn(ws, model="afar", input="a", include=include))[-1]["response"]
                upstream.answer(*streamed([message("y")]))
                again = [*first["output"], {"role": "user", "content": "b"}]
                events = await turn(ws, model="afar", input=again, previous_response_id=first["id"], include=include)
                assert events[-1]["type"] == "response.completed", events[-1]
                assert len(upstream.requests[-1].fields["input"]) == 3 + ("encrypted_content" in item)


async def test_compaction_costs_what_the_upstream_says_and_keeps_its_thoughts() -> None:
    async with (
        serving(responses_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"afar": by_items(upstream)}) as running,
        running.connect() as ws,
    ):
        upstream.answer(*streamed([thought(sealed="A"), call("f", "{}", "x")]))
        first = (await turn(ws, model="afar", input="Question. " * 50, tools=[FUNCTION]))[-1]["response"]
        upstream.answer(*streamed([message("In short.")], usage=used(500, 40)))
        upstream.answer(*streamed([message("Done.")], usage=used(60, 7)))
        given = [output_of(first["output"][-1]["call_id"], "sunny")]
        compact = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
        more = {"previous_response_id": first["id"], "tools": [FUNCTION], **compact}
        second = (await turn(ws, model="afar", input=[*given, {"role": "user", "content": "x" * 4000}], **more))[-1]
        assert [item["type"] for item in second["response"]["output"]] == ["compaction", "message"], second
        assert second["response"]["usage"]["output_tokens"] == 47
        assert "effort" not in json.dumps(upstream.requests[1].fields)


async def test_closing_the_socket_ends_the_request_at_the_upstream() -> None:
    async with (
        serving(responses_upstream()) as upstream,
        gateway(PlannedEngine(()), models=("ours",), loaders={"afar": by_items(upstream)}) as running,
    ):
        upstream.answer(*streamed([message("Well, well.")])[:6], Stall())
        async with running.connect() as ws:
            await create(ws, model="afar", input="a")
            while (await receive(ws))["type"] != "response.output_text.delta":
                pass
        await asyncio.wait_for(upstream.aborted.wait(), 30)


PATCH = {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "regex", "definition": "[a-z]+"}}
PATCH_CALL = '<tool_call>\n{"name": "patch", "arguments": {"input": "abc"}}\n</tool_call>'


async def test_a_gateway_like_this_one_at_the_other_end() -> None:
    """Its answers are not written by a test. Calls of both kinds, and a refusal."""
    engine = Plans(plan("Looking.\n", CALL), plan(PATCH_CALL), plan("Done."), plan("Short"))
    async with gateway(engine) as inner:
        afar = Upstream({}, wrapped=True, unknown_status=400, integration=False)
        afar.base_url = inner.http
        async with (
            gateway(
                PlannedEngine(()), models=("ours",), loaders={"afar": by_items(afar, "limpet", model="m")}
            ) as outer,
            outer.connect() as ws,
        ):
            options: dict[str, Any] = {"model": "afar", "tools": [FUNCTION, PATCH], "instructions": "Be kind."}
            events = await turn(ws, input="First.", **options)
            one = events[-1]["response"]
            assert text(events) == "Looking."
            assert types(events)[-1] == "completed"
            given = [output_of(one["output"][-1]["call_id"], "sunny")]
            two = (await turn(ws, input=given, previous_response_id=one["id"], **options))[-1]["response"]
            assert (two["output"][0]["type"], two["output"][0]["input"]) == ("custom_tool_call", "abc")
            answer = {"type": "custom_tool_call_output", "call_id": two["output"][0]["call_id"], "output": "rainy"}
            three = (await turn(ws, input=[answer], previous_response_id=two["id"], **options))[-1]["response"]
            assert three["output"][0]["content"][0]["text"] == "Done."
            assert three["usage"]["input_tokens"] > one["usage"]["input_tokens"] > 10  # as counted there
            thoughts = [
                {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": said}]}
                for said in ("One.", "Two.")
            ]
            replayed = [{"role": "user", "content": "a"}, *thoughts, {"role": "user", "content": "b"}]
            assert (await turn(ws, model="afar", input=replayed))[-1]["type"] == "response.completed"
            (refused,) = await turn(ws, model="afar", input="x", text={"format": {"type": "json_schema", "name": "n",
                                    "schema": {"type": "nothing"}}})  # fmt: skip
            assert (refused["status"], refused["error"]["type"]) == (400, "invalid_request_error")
    prompt = words(engine.seen[2].prompt)
    positions = [prompt.find(part) for part in ("Be kind.", "First.", "Looking.", "sunny", "abc", "rainy")]
    assert -1 not in positions
    assert positions == sorted(positions)
