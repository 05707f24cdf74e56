"""What is remembered, S1 to S15 of protocol.md 10."""

from __future__ import annotations

from typing import Any

import pytest

from inference.scripted import Fault
from tests.conformance.driver import (
    Client,
    Event,
    call,
    client,
    connected,
    function,
    prompt_text,
    says,
    script,
    serving,
)

both = pytest.mark.parametrize("transport", ["socket", "sse"])
every = pytest.mark.parametrize("transport", ["socket", "sse", "json"])
NOT_FOUND = {"status": 400, "code": "previous_response_not_found", "param": "previous_response_id"}
ENCRYPTED = {"include": ["reasoning.encrypted_content"]}
THOUGHT = "<think>\nsecret plan\n</think>\n\nanswer"


def shape(error: Event) -> Event:
    return {key: error[key] for key in NOT_FOUND}


def output(call_id: str = "call_unknown") -> Event:
    return {"type": "function_call_output", "call_id": call_id, "output": "1"}


def prompts(one: Client) -> list[str]:
    return [prompt_text(generation) for generation in one.running.engine.received]  # type: ignore[attr-defined]


@every
async def test_s1_a_continuation_sees_all_earlier_turns(transport: str) -> None:
    async with client(says("ok"), transport) as one:
        previous = None
        for word in ("my code is 417", "add one", "what was my code?"):
            result = await one.turn(input=word, previous_response_id=previous)
            assert result.completed["previous_response_id"] == previous
            previous = result.id
        seen = prompts(one)
    turn = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\nok<|im_end|>\n"
    history = turn.format("my code is 417") + turn.format("add one")
    assert seen[2] == history + "<|im_start|>user\nwhat was my code?<|im_end|>\n<|im_start|>assistant\n"


@every
async def test_s2_instructions_and_tools_are_not_inherited(transport: str) -> None:
    async with client(says("ok"), transport) as one:
        first = await one.turn(input="a", instructions="Speak Latin.", tools=[function()])
        second = await one.turn(input="b", previous_response_id=first.id)
        await one.turn(input="c", previous_response_id=second.id, instructions="Speak Greek.")
        seen = prompts(one)
    assert "Speak Latin." in seen[0]
    assert "get_weather" in seen[0]
    assert "Latin" not in seen[1] + seen[2]
    assert "get_weather" not in seen[1] + seen[2]
    assert seen[2].startswith("<|im_start|>system\nSpeak Greek.<|im_end|>\n<|im_start|>user\na<|im_end|>")


@every
async def test_s3_a_wrong_id_is_told_and_what_follows_works(transport: str) -> None:
    async with client(says("ok"), transport) as one:
        for wrong in ("resp_nowhere", "x", "resp_" + "0" * 40):
            result = await one.turn(input="hi", previous_response_id=wrong)
            assert shape(result.error) == NOT_FOUND
            assert result.error["type"] == "invalid_request_error"
        assert not one.running.engine.received
        assert (await one.turn(input="hi")).completed


@pytest.mark.parametrize("fault", ["refused", "failed"])
async def test_s4_a_failed_continuation_evicts_its_parent(fault: str) -> None:
    """4.3; Open Responses tests the first. `response.failed` counts too (8.10)."""
    engine = says("ok")
    async with client(engine) as one:
        first = await one.turn(input="hi")
        if fault == "refused":
            assert (await one.turn(input=[output()], previous_response_id=first.id)).error["param"] == "input"
        else:
            engine.enqueue(script("o", Fault("unavailable", "gone")))
            result = await one.turn(input="go on", previous_response_id=first.id)
            assert result.last["type"] == "response.failed"
        assert shape((await one.turn(input="hi", previous_response_id=first.id)).error) == NOT_FOUND


async def test_s4_what_is_stored_survives_a_failed_continuation() -> None:
    """4.3: eviction is about the memory of the socket; a stored parent can still be read."""
    async with client(says("ok")) as one:
        first = await one.turn(input="hi", store=True)
        assert (await one.turn(input=[output()], previous_response_id=first.id)).error["param"] == "input"
        assert (await one.turn(input="hi", previous_response_id=first.id)).completed


async def test_s4_errors_before_admission_evict_nothing() -> None:
    async with client(says("ok")) as one:
        first = await one.turn(input="hi")
        await one.send({"type": "response.create", "stream_id": "", "previous_response_id": first.id, "input": []})
        assert (await one.receive())["error"]["code"] == "invalid_stream_id"
        await one.send("{")
        assert (await one.receive())["error"]["code"] == "invalid_json"
        assert (await one.turn(input="hi", previous_response_id=first.id)).completed


async def test_s5_a_failed_fork_keeps_its_parent() -> None:
    async with client(says("ok")) as one:
        first = await one.turn(input="hi", stream_id="main")
        fork = await one.turn(input=[output()], previous_response_id=first.id, stream_id="side")
        assert fork.error["status"] == 400
        assert fork.last["stream_id"] == "side"
        assert (await one.turn(input="on", previous_response_id=first.id, stream_id="main")).completed


async def test_s6_another_socket_does_not_know_what_was_not_stored() -> None:
    async with serving(says("ok")) as running:
        async with connected(running) as one:
            first = await one.turn(input="hi", store=False)
            async with connected(running) as other:  # while the first is open, too (8.25)
                assert shape((await other.turn(input="x", previous_response_id=first.id)).error) == NOT_FOUND
        async with connected(running) as again:
            assert shape((await again.turn(input="x", previous_response_id=first.id)).error) == NOT_FOUND
            assert (await again.turn(input="all of it")).completed


async def test_s7_another_socket_continues_what_was_stored() -> None:
    async with serving(says("ok")) as running:
        async with connected(running) as one:
            first = await one.turn(input="hi", store=True)
        async with connected(running) as again:
            assert (await again.turn(input="on", previous_response_id=first.id, store=False)).completed
            assert "hi<|im_end|>" in prompts(again)[1]


@pytest.mark.parametrize(("first", "second"), [("sse", "socket"), ("json", "socket"), ("socket", "json")])
async def test_s8_stored_ids_cross_transports(first: str, second: str) -> None:
    async with serving(says("ok")) as running, connected(running, first) as one, connected(running, second) as two:
        started = await one.turn(input="hi", store=True)
        continued = await two.turn(input="on", previous_response_id=started.id, store=True)
        assert (await one.turn(input="back", previous_response_id=continued.id, store=True)).completed
        assert prompts(one)[2].count("<|im_start|>user") == 3


async def test_s8_an_unstored_id_of_a_socket_is_unknown_to_http() -> None:
    """8.20."""
    async with serving(says("ok")) as running, connected(running) as one, connected(running, "json") as two:
        first = await one.turn(input="hi", store=False)
        assert shape((await two.turn(input="on", previous_response_id=first.id)).error) == NOT_FOUND


@every
async def test_s9_another_keys_id_is_not_found_in_the_same_words(transport: str) -> None:
    keys = {"server": {"api_keys": ["one", "two"]}}
    async with (
        serving(says("ok"), keys) as running,
        connected(running, transport, "one") as mine,
        connected(running, transport, "two") as theirs,
    ):
        first = await mine.turn(input="hi", store=True)
        refused = await theirs.turn(input="x", previous_response_id=first.id)
        made_up = await theirs.turn(input="x", previous_response_id="resp_x")
        assert shape(refused.error) == NOT_FOUND
        assert refused.error["message"] == made_up.error["message"].replace("resp_x", first.id)
        assert (await mine.turn(input="x", previous_response_id=first.id)).completed


WARM = ["response.created", "response.in_progress", "response.completed"]


@pytest.mark.parametrize("ask", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
async def test_s10_a_warm_up_id_continues_twice(ask: dict[str, Any]) -> None:
    async with client(says("ok")) as one:
        warm = await one.turn(input=[{"role": "developer", "content": "Be terse."}], **ask)
        assert warm.types == WARM
        assert (warm.completed["output"], warm.completed["usage"]["output_tokens"]) == ([], 0)
        assert warm.completed["usage"]["input_tokens"] > 0
        for word in ("first", "second"):
            result = await one.turn(input=word, previous_response_id=warm.id)
            assert result.completed["previous_response_id"] == warm.id
        seen = [prompt for prompt in prompts(one) if "<|im_start|>user" in prompt]
    assert seen[1] == seen[0].replace("first", "second")
    assert "Be terse." in seen[1]


async def test_s10_a_warm_up_may_be_empty() -> None:
    """Codex Lite warms up with `input: []`."""
    async with client(says("ok")) as one:
        warm = await one.turn(input=[], generate=False, instructions="x", tools=[function()])
        assert (await one.turn(input="hi", previous_response_id=warm.id)).completed


async def test_s11_a_chain_goes_on_after_a_warm_up_in_the_middle() -> None:
    async with client(says("ok")) as one:
        first = await one.turn(input="one")
        warm = await one.turn(input="two", previous_response_id=first.id, generate=False)
        assert warm.types == WARM
        await one.turn(input="three", previous_response_id=warm.id)
        last = next(prompt for prompt in prompts(one) if "three" in prompt)
        beside = await one.turn(input="four", previous_response_id=first.id)
    assert last.index("one") < last.index("ok") < last.index("two") < last.index("three")
    assert beside.completed


@every
async def test_s12_an_incomplete_response_is_continuable(transport: str) -> None:
    async with client(says("word " * 40), transport) as one:
        cut = await one.turn(input="hi", max_output_tokens=16)
        assert cut.last["type"] == "response.incomplete"
        assert (await one.turn(input="go on", previous_response_id=cut.id)).completed
        assert prompts(one)[1].startswith(prompts(one)[0] + cut.text + "<|im_end|>\n<|im_start|>user\ngo on")


@every
async def test_s13_a_compaction_trigger_gives_one_compaction_item(transport: str) -> None:
    """4.6: Codex's remote compaction v2; the item starts a new chain."""
    async with client(says("ok"), transport) as one:
        first = await one.turn(input="my code is 417")
        result = await one.turn(input=[{"type": "compaction_trigger"}], previous_response_id=first.id)
        (item,) = result.completed["output"]
        assert (item["type"], bool(item["encrypted_content"])) == ("compaction", True)
        fresh = await one.turn(input=[item, {"role": "user", "content": "what was it?"}])
        assert fresh.completed
        assert prompts(one)[-1].endswith("what was it?<|im_end|>\n<|im_start|>assistant\n")
        first_of_two = [{"type": "compaction_trigger"}, {"role": "user", "content": "x"}]
        assert (await one.turn(input=first_of_two)).error["code"] == "invalid_value"


@every
async def test_s13_past_the_threshold_the_turn_compacts_first(transport: str) -> None:
    management = [{"type": "compaction", "compact_threshold": 1000}]
    async with client(says("ok"), transport) as one:
        previous = None
        for _ in range(2):
            small = await one.turn(input="word " * 400, previous_response_id=previous, context_management=management)
            assert [item["type"] for item in small.completed["output"]] == ["message"]
            previous = small.id
        large = await one.turn(input="word " * 400, previous_response_id=previous, context_management=management)
        assert [item["type"] for item in large.completed["output"]] == ["compaction", "message"]
        again = await one.turn(input="and?", previous_response_id=large.id)
        assert again.completed["usage"]["input_tokens"] < 1000


async def test_s13_the_compact_endpoints_window_starts_a_new_chain() -> None:
    async with serving(says("ok")) as running, connected(running, "json") as http, connected(running) as one:
        first = await http.turn(input="my code is 417")
        answer = await http.http.post("/responses/compact", json={"model": "m", "previous_response_id": first.id})
        assert answer.status_code == 200, answer.text
        window = answer.json()
        assert window["object"] == "response.compaction"
        assert window["usage"]["total_tokens"] >= 0
        user = {"role": "user", "content": "go on"}
        assert (await one.turn(input=[*window["output"], user])).completed
        missing = await http.http.post("/responses/compact", json={"input": "x"})
        assert (missing.status_code, missing.json()["error"]["param"]) == (400, "model")


@every
async def test_s14_encrypted_reasoning_comes_back_on_a_new_socket(transport: str) -> None:
    """4.5: stateless clients ask for it and replay it."""
    async with serving(says(THOUGHT), thinking=True) as running:
        async with connected(running, transport) as one:
            first = await one.turn(input="hi", **ENCRYPTED)
            (reasoning,) = first.items("reasoning")
            assert reasoning["encrypted_content"]
            assert "secret" not in reasoning["encrypted_content"]
        replay = {key: value for key, value in reasoning.items() if key != "content"}
        user = {"role": "user", "content": "hi"}
        async with connected(running, transport) as again:
            items = [user, replay, *first.items("message"), {"role": "user", "content": "on"}]
            assert (await again.turn(input=items, **ENCRYPTED)).completed
            assert "secret plan" in prompts(again)[1]
            spoilt = {**replay, "encrypted_content": "nonsense"}
            assert (await again.turn(input=[user, spoilt, {"role": "user", "content": "on"}])).completed


@every
async def test_s14_it_is_left_out_when_nobody_asks(transport: str) -> None:
    async with client(says(THOUGHT), transport, thinking=True) as one:
        (reasoning,) = (await one.turn(input="hi")).items("reasoning")
    assert "encrypted_content" not in reasoning


async def test_s15_a_deleted_parent_is_not_found_on_the_next_socket() -> None:
    async with serving(says("ok")) as running, connected(running, "json") as http:
        async with connected(running) as one:
            first = await one.turn(input="hi", store=True)
        answer = await http.http.delete(f"/responses/{first.id}")
        assert answer.status_code == 200, answer.text
        assert answer.json() == {"id": first.id, "object": "response", "deleted": True}
        async with connected(running) as again:
            assert shape((await again.turn(input="x", previous_response_id=first.id)).error) == NOT_FOUND
        assert shape((await http.turn(input="x", previous_response_id=first.id)).error) == NOT_FOUND
        assert (await http.http.delete(f"/responses/{first.id}")).status_code == 404


@every
async def test_s_calls_must_be_answered_and_a_refusal_leaves_no_trace(transport: str) -> None:
    """4.2: both texts name the call. The parent is stored, so that it outlives the eviction."""
    async with client(says(call("get_weather")), transport) as one:
        first = await one.turn(input="hi", tools=[function()], store=True)
        (made,) = first.items("function_call")
        unanswered = await one.turn(input="well?", previous_response_id=first.id)
        assert made["call_id"] in unanswered.error["message"]
        unknown = await one.turn(input=[output()], previous_response_id=first.id)
        assert "call_unknown" in unknown.error["message"]
        assert (await one.turn(input=[output(made["call_id"])], previous_response_id=first.id)).completed
