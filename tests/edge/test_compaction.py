"""Compaction as clients meet it: protocol.md 4.6 and S13 of section 10, over real sockets and a scripted engine."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from openai.types.responses import ResponseCompactionItem, ResponseStreamEvent, ResponseUsage
from pydantic import TypeAdapter

from actors.compaction import INSTRUCTION, compact
from actors.sealing import Sealer
from actors.window import HEADLINE
from gateway.protocol.errors import ApiError
from gateway.protocol.items import to_json
from gateway.protocol.requests import parse_compact
from inference.engine import Chunk
from inference.scripted import Drop, Fault, Ids, Say, Script, ScriptedEngine, Stall
from inference.tokenizer import scripted_tokenizer, unpack_ids
from tests.support.engines import PlannedEngine
from tests.support.gateway import Running, create, gateway, receive, text, turn, until_terminal

TOKENIZER = scripted_tokenizer()
END = TOKENIZER.special("<|im_end|>")
SDK_EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
COMPACT: dict[str, Any] = {"context_management": [{"type": "compaction", "compact_threshold": 1000}]}
TRIGGER = {"type": "compaction_trigger"}
SUMMARY = "Ada builds a bridge; the east pillar stands."
LONG = "The west pillar needs granite. " * 200  # more than 1,000 tokens
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}


def engine(**options: Any) -> ScriptedEngine:
    return ScriptedEngine(TOKENIZER, Script([Say("Fine.")]), **options)


def summarizes(double: ScriptedEngine, *steps: Any) -> None:
    """The next generation is a summary."""
    double.enqueue(Script(steps or [Say(SUMMARY)]))


def user(words: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": words}


def chat(*turns: str) -> bytes:
    """What a prompt without a head must be, by the template: roles alternate as given, the last one opens."""
    start, end = (TOKENIZER.special(name).to_bytes(4, "little") for name in ("<|im_start|>", "<|im_end|>"))
    pieces = [start + TOKENIZER.encode(said) + end + TOKENIZER.encode("\n") for said in turns]
    return b"".join(pieces) + start + TOKENIZER.encode("assistant\n")


def written(prompt: bytes) -> str:
    """A prompt as text."""
    return b"".join(map(TOKENIZER.token_bytes, unpack_ids(prompt))).decode()


def last_prompt(running: Running) -> bytes:
    assert isinstance(running.engine, ScriptedEngine)
    return running.engine.received[-1].prompt


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def valid(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events, once the SDK's own types have read them and their numbers are dense."""
    for event in events:
        SDK_EVENT.validate_python(event, strict=False)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


# Automatic, by threshold


async def test_a_context_that_passes_the_threshold_is_compacted_before_the_answer() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input=LONG, **COMPACT))[-1]["response"]
        summarizes(double)
        events = valid(await turn(ws, input="Go on.", previous_response_id=first["id"], **COMPACT))

    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "compaction.compacting",
        "output_item.done",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 2,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    item, message = events[-1]["response"]["output"]
    assert events[4]["item"] == item
    ResponseCompactionItem.model_validate(item, strict=True)
    assert item["id"].startswith("cmp_")
    assert "pillar" not in json.dumps(item)
    assert message["content"][0]["text"] == "Fine."


async def test_the_answer_is_made_from_the_summary_and_the_last_user_message() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input=LONG, **COMPACT))[-1]["response"]
        before = last_prompt(running)
        summarizes(double)
        second = (await turn(ws, input="Go on.", previous_response_id=first["id"], **COMPACT))[-1]["response"]
        asked, answered = list(double.received)[-2:]
        await turn(ws, input="And?", previous_response_id=second["id"], **COMPACT)

    # The summary is asked of the very prefix that the engine has in its cache.
    assert asked.prompt.startswith(before)
    assert INSTRUCTION in written(asked.prompt)
    assert asked.sampling.max_tokens < 1000
    assert answered.prompt == chat(f"user\n{HEADLINE}{SUMMARY}", "user\nGo on.")
    assert last_prompt(running) == chat(f"user\n{HEADLINE}{SUMMARY}", "user\nGo on.", "assistant\nFine.", "user\nAnd?")
    assert running.gateway.actor.counters.compactions == 1


async def test_usage_counts_what_both_generations_took() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input=LONG))[-1]["response"]
        summarizes(double)
        usage = (await turn(ws, input="Go on.", previous_response_id=first["id"], **COMPACT))[-1]["response"]["usage"]
    asked, answered = list(double.received)[-2:]

    ResponseUsage.model_validate(usage, strict=True)
    assert usage["input_tokens"] == (len(asked.prompt) + len(answered.prompt)) // 4
    # Stop ids are sampled, too.
    assert usage["output_tokens"] == len(unpack_ids(TOKENIZER.encode(SUMMARY) + TOKENIZER.encode("Fine."))) + 2
    assert usage["input_tokens_details"]["cached_tokens"] > 1000
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]


async def test_clients_without_stored_state_continue_alike_however_much_they_send() -> None:
    """On the old socket by id; on a new one with all items, or with those from the compaction item on."""
    double = engine()
    head = {"type": "message", "role": "developer", "content": "Be terse."}
    async with gateway(double) as running:
        async with running.connect() as ws:
            first = (await turn(ws, input=[head, user(LONG)], **COMPACT))[-1]["response"]
            summarizes(double)
            second = (await turn(ws, input="Go on.", previous_response_id=first["id"], **COMPACT))[-1]["response"]
            await turn(ws, input="And?", previous_response_id=second["id"], **COMPACT)
            expected = last_prompt(running)
        whole = [head, user(LONG), *first["output"], user("Go on."), *second["output"], user("And?")]
        for items in (whole, [*second["output"], user("And?")], [head, *second["output"], user("And?")]):
            async with running.connect() as ws:
                events = await turn(ws, input=items, **COMPACT)
            assert "compaction.compacting" not in kinds(events)
            assert last_prompt(running) == expected

    assert expected.startswith(chat("system\nBe terse.")[: -len(chat())])
    assert len(expected) < 4 * 200


async def test_below_the_threshold_nothing_happens() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input="Hi.", **COMPACT))[-1]["response"]
        events = await turn(ws, input="Go on.", previous_response_id=first["id"], **COMPACT)

    assert "compaction.compacting" not in kinds(events)
    assert len(double.received) == 2


@pytest.mark.parametrize("leading", [[], [{"type": "message", "role": "system", "content": "Be terse."}]])
async def test_one_long_message_is_not_compacted_as_nothing_could_be_left_out(leading: list[Any]) -> None:
    async with gateway(engine()) as running, running.connect() as ws:
        events = await turn(ws, input=[*leading, user(LONG)], **COMPACT)

    assert "compaction.compacting" not in kinds(events)
    assert events[-1]["type"] == "response.completed"


async def test_in_an_agent_loop_the_task_and_the_newest_round_stay_to_the_letter() -> None:
    """No output is parted from its call, and old rounds are in the summary only."""
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        body: dict[str, Any] = {"input": "Find the pillar.", "tools": [LOOK], "instructions": "Use tools."}
        for number in range(3):
            double.enqueue(Script([Say('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')]))
            response = (await turn(ws, **body, **COMPACT))[-1]["response"]
            call = response["output"][-1]["call_id"]
            said = LONG if number == 1 else f"Nothing {number}."
            output = {"type": "function_call_output", "call_id": call, "output": said}
            body |= {"input": [output], "previous_response_id": response["id"]}
            if number == 1:
                summarizes(double)
        events = valid(await turn(ws, **body, **COMPACT))
        assert kinds(events).count("compaction.compacting") == 0  # it was compacted the turn before
    prompt = written(last_prompt(running))
    task, newest = "user\nFind the pillar.", "<tool_response>\nNothing 2."

    assert "granite" not in prompt
    assert "Nothing 0." not in prompt
    assert prompt.index(SUMMARY) < prompt.index(task) < prompt.index(newest)
    assert "Use tools." in prompt
    assert prompt.count(task) == 1


async def test_a_compacted_context_is_compacted_again() -> None:
    """And the last user message outlives that, though it is only in the blob of the item before."""
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        response = (await turn(ws, input=LONG, **COMPACT))[-1]["response"]
        summarizes(double, Say("First summary."))
        double.enqueue(Script([Say('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')]))
        body: dict[str, Any] = {"tools": [LOOK], **COMPACT}
        response = (await turn(ws, input="Find it.", previous_response_id=response["id"], **body))[-1]["response"]
        call = response["output"][-1]["call_id"]
        output = {"type": "function_call_output", "call_id": call, "output": LONG}
        summarizes(double, Say("Second summary."))
        events = await turn(ws, input=[output], previous_response_id=response["id"], **body)
    asked, answered = list(double.received)[-2:]

    assert "compaction.compacting" in kinds(events)
    assert "First summary." in written(asked.prompt)
    assert "First summary." not in written(answered.prompt)
    assert answered.prompt.endswith(chat(f"user\n{HEADLINE}Second summary.", "user\nFind it."))


async def test_tools_of_the_context_outlive_compaction() -> None:
    """`additional_tools` items are context (protocol.md 2.1); a client that prunes does not send them again."""
    double = engine()
    async with gateway(double) as running:
        async with running.connect() as ws:
            items = [{"type": "additional_tools", "role": "developer", "tools": [LOOK]}, user(LONG)]
            first = (await turn(ws, input=items, **COMPACT))[-1]["response"]
            summarizes(double)
            second = (await turn(ws, input="Go.", previous_response_id=first["id"], **COMPACT))[-1]["response"]
            await turn(ws, input="And?", previous_response_id=second["id"])
            expected = last_prompt(running)
        async with running.connect() as ws:
            choice = {"type": "function", "name": "look"}
            await turn(ws, input=[*second["output"], user("And?")])
            assert last_prompt(running) == expected
            forced = await turn(ws, input=[*second["output"], user("And?")], tool_choice=choice)

    assert '"name": "look"' in written(expected)
    assert forced[-1]["type"] == "response.completed"


FAULTS: dict[str, tuple[list[Any], str]] = {
    "at once": ([Fault("unavailable", "gone")], "server_error"),
    "midway": ([Say("Half a"), Drop()], "server_error"),
    "overloaded": ([Fault("overloaded", "later")], "rate_limit_exceeded"),
    "refused": ([Fault("invalid", "no")], "invalid_prompt"),
    "empty": ([], "server_error"),
    "blank": ([Say(" \n ")], "server_error"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("trigger", [False, True], ids=["threshold", "trigger"])
async def test_a_fault_while_compacting_fails_the_response_and_commits_nothing(fault: str, trigger: bool) -> None:
    steps, code = FAULTS[fault]
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input=LONG))[-1]["response"]["id"]
        double.script = Script(steps)  # and not once: before its first chunk a generation is tried again
        body: dict[str, Any] = {"input": [TRIGGER]} if trigger else {"input": "Go on.", **COMPACT}
        events = valid(await turn(ws, previous_response_id=first, **body))
        double.script = Script([Say("Fine.")])
        failed = events[-1]["response"]
        after = [
            (await turn(ws, input="Hi.", previous_response_id=response_id))[-1] for response_id in (failed["id"], first)
        ]
        assert (await turn(ws, input="Hi."))[-1]["type"] == "response.completed"

    assert events[-1]["type"] == "response.failed"
    assert (failed["error"]["code"], failed["output"]) == (code, [])
    assert "output_item.done" not in kinds(events)
    # The failed continuation took its parent along (protocol.md 4.3).
    assert [error["error"]["code"] for error in after] == ["previous_response_not_found"] * 2


async def test_a_fault_in_the_answer_after_compaction_commits_nothing_either() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input=LONG))[-1]["response"]["id"]
        summarizes(double)
        double.enqueue(Script([Say("Half"), Drop()]))
        events = valid(await turn(ws, input="Go on.", previous_response_id=first, **COMPACT))
        failed = events[-1]["response"]
        again = (await turn(ws, input="Hi.", previous_response_id=failed["id"]))[-1]

    assert events[-1]["type"] == "response.failed"
    assert [item["type"] for item in failed["output"]] == ["compaction"]  # it was finished, and is told as such
    assert failed["usage"]["output_tokens"] > len(unpack_ids(TOKENIZER.encode(SUMMARY)))
    assert again["error"]["code"] == "previous_response_not_found"


async def test_a_client_that_leaves_while_its_context_is_compacted_stops_the_engine() -> None:
    words = [Chunk([token], cached_tokens=0) for token in unpack_ids(TOKENIZER.encode("word " * 500))]
    double = PlannedEngine([*words, 5.0, Chunk([END], finish="stop")])
    async with gateway(double) as running:
        async with running.connect() as ws:
            await create(ws, input=[user(LONG), {**user("Fine."), "role": "assistant"}, user("Go on.")], **COMPACT)
            while (await receive(ws))["type"] != "response.compaction.compacting":
                pass
        for _ in range(100):
            if double.aborted:
                break
            await asyncio.sleep(0.02)

    assert double.aborted == 1
    assert len(double.seen) == 1


async def test_an_interrupt_while_compacting_ends_the_turn_and_the_context_stays_as_it_was() -> None:
    """protocol.md 3.8: what is open is discarded; the response can be continued."""
    double = engine()
    summarizes(double, *[step for _ in range(50) for step in (Say(" word"), Stall(0.1))])
    items = [user(LONG), {**user("Fine."), "role": "assistant"}, user("Go on.")]
    async with gateway(double) as running, running.connect() as ws:
        await create(ws, input=items, **COMPACT)
        response_id = (await receive(ws))["response"]["id"]
        while (await receive(ws))["type"] != "response.compaction.compacting":
            pass
        interrupt = {"type": "response.interrupt", "response_id": response_id, "mode": "discard_partial_items"}
        await ws.send(json.dumps(interrupt))
        events = await until_terminal(ws)
        ended = events[-1]["response"]
        await turn(ws, input="And?", previous_response_id=ended["id"])

    assert "output_item.interrupted" in kinds(events)
    assert (ended["status"], ended["incomplete_details"], ended["output"]) == (
        "incomplete",
        {"reason": "interrupted"},
        [],
    )
    assert double.aborted == 1
    assert ended["usage"]["output_tokens"] > 0
    assert last_prompt(running) == chat(f"user\n{LONG}", "assistant\nFine.", "user\nGo on.", "user\nAnd?")


async def test_signs_of_life_while_the_engine_is_silent() -> None:
    """They are `compacting` events, which every client's types know, and no `keepalive`."""
    double = engine()
    summarizes(double, Stall(0.7), Say(SUMMARY))
    async with gateway(double, {"limits": {"keepalive_s": 0.1}}) as running, running.connect() as ws:
        items = [user(LONG), {**user("Fine."), "role": "assistant"}, user("Go on.")]
        events = valid(await turn(ws, input=items, **COMPACT))

    assert kinds(events).count("compaction.compacting") >= 3
    assert "keepalive" not in kinds(events)


async def test_a_context_as_long_as_the_models_is_saved_by_compaction() -> None:
    """Without it: context_length_exceeded. The oldest turns that do not fit are not summarized."""
    double = engine(context_length=2048)
    async with gateway(double, context_length=2048) as running, running.connect() as ws:
        body: dict[str, Any] = {}
        for words in ("My name is Ada.", LONG[:4400], LONG[:4400]):
            response = (await turn(ws, input=words, **body))[-1]["response"]
            body = {"previous_response_id": response["id"]}
        summarizes(double)
        events = valid(await turn(ws, input=LONG[:2000], **body, **COMPACT))
        refused = (await turn(ws, input=LONG * 2))[-1]

    assert refused["error"]["code"] == "context_length_exceeded"
    assert events[-1]["type"] == "response.completed"
    asked = list(double.received)[-2].prompt
    assert "Ada" not in written(asked)
    assert len(asked) // 4 <= 2048 - 256


@pytest.mark.parametrize("how", ["threshold", "trigger"])
async def test_what_is_too_long_to_be_summarized_is_refused_before_the_response_exists(how: str) -> None:
    async with gateway(engine(context_length=1200), context_length=1200) as running, running.connect() as ws:
        items = [user(LONG), {**user("Fine."), "role": "assistant"}, user("Go on.") if how == "threshold" else TRIGGER]
        (error,) = await turn(ws, input=items, **COMPACT)

    assert (error["status"], error["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_context_that_is_too_long_even_compacted_fails_the_response() -> None:
    """The task alone nearly fills the context."""
    double = engine(context_length=2048)
    async with gateway(double, context_length=2048) as running, running.connect() as ws:
        double.enqueue(Script([Say('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')]))
        tools: dict[str, Any] = {"tools": [LOOK], "tool_choice": "auto"}
        first = (await turn(ws, input=(LONG * 2)[:8600], **tools))[-1]["response"]
        output = {"type": "function_call_output", "call_id": first["output"][-1]["call_id"], "output": LONG[:1600]}
        summarizes(double, Say("word " * 250))
        events = await turn(ws, input=[output], previous_response_id=first["id"], **COMPACT, **tools)
        again = (await turn(ws, input="Hi.", previous_response_id=first["id"]))[-1]
    failed = events[-1]["response"]

    assert events[-1]["type"] == "response.failed"
    assert failed["error"]["code"] == "context_length_exceeded"
    assert failed["usage"]["output_tokens"] == 252
    assert again["error"]["code"] == "previous_response_not_found"


async def test_a_warm_up_compacts_nothing() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        items = [user(LONG), {**user("Fine."), "role": "assistant"}, user("Go on.")]
        events = await turn(ws, input=items, generate=False, **COMPACT)

    assert kinds(events) == ["created", "in_progress", "completed"]


# By trigger


async def test_a_trigger_gives_one_compaction_item_and_nothing_else() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input=LONG))[-1]["response"]
        summarizes(double)
        events = valid(await turn(ws, input=[TRIGGER], previous_response_id=first["id"]))
        response = events[-1]["response"]
        await turn(ws, input="And?", previous_response_id=response["id"])

    assert kinds(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "compaction.compacting",
        "output_item.done",
        "completed",
    ]
    (item,) = response["output"]
    ResponseCompactionItem.model_validate(item, strict=True)
    asked = list(double.received)[-2].prompt
    assert response["usage"]["input_tokens"] == len(asked) // 4
    assert response["usage"]["output_tokens"] == len(unpack_ids(TOKENIZER.encode(SUMMARY))) + 1
    # All that was since the last user message has room, so the answer stays beside it.
    assert last_prompt(running) == chat(f"user\n{HEADLINE}{SUMMARY}", f"user\n{LONG}", "assistant\nFine.", "user\nAnd?")


async def test_codex_keeps_its_own_messages_in_front_of_the_item() -> None:
    """Its new chain: the messages it retains, the compaction item, the next message. None of them is said twice."""
    double = engine()
    retained = [{"type": "message", "role": "developer", "content": "You are Codex."}, user("AGENTS.md"), user("Task.")]
    async with gateway(double) as running:
        async with running.connect() as ws:
            first = (await turn(ws, input=retained))[-1]["response"]
            summarizes(double)
            done = (await turn(ws, input=[TRIGGER], previous_response_id=first["id"]))[-1]["response"]
        async with running.connect() as ws:
            last = (await turn(ws, input=[*retained, *done["output"], user("Next.")]))[-1]

    assert last["type"] == "response.completed"
    assert last_prompt(running) == chat(
        "system\nYou are Codex.",
        "user\nAGENTS.md",
        f"user\n{HEADLINE}{SUMMARY}",
        "user\nTask.",
        "assistant\nFine.",
        "user\nNext.",
    )


async def test_a_trigger_in_a_full_list_and_the_same_list_with_its_item_are_the_same_context() -> None:
    double = engine()
    items = [user("One."), {**user("Eins."), "role": "assistant"}, user("Two."), {**user("Zwei."), "role": "assistant"}]
    async with gateway(double) as running:
        async with running.connect() as ws:
            summarizes(double)
            done = (await turn(ws, input=[*items, TRIGGER]))[-1]["response"]
            await turn(ws, input="Three.", previous_response_id=done["id"])
            expected = last_prompt(running)
        async with running.connect() as ws:
            await turn(ws, input=[*items, *done["output"], user("Three.")])

    assert last_prompt(running) == expected
    assert expected == chat(
        "user\nOne.", f"user\n{HEADLINE}{SUMMARY}", "user\nTwo.", "assistant\nZwei.", "user\nThree."
    )


@pytest.mark.parametrize("items", [[TRIGGER], [{"type": "web_search_call", "id": "ws_1"}, TRIGGER]])
async def test_a_trigger_without_a_conversation_is_refused(items: list[Any]) -> None:
    async with gateway(engine()) as running, running.connect() as ws:
        (error,) = await turn(ws, input=items)

    assert (error["status"], error["error"]["code"], error["error"]["param"]) == (400, "invalid_value", "input")


async def test_a_summary_cut_by_its_limit_is_still_a_summary() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input="Hi."))[-1]["response"]
        summarizes(double, Ids(unpack_ids(TOKENIZER.encode("word " * 5000))))
        done = (await turn(ws, input=[TRIGGER], previous_response_id=first["id"]))[-1]["response"]

    assert done["status"] == "completed"
    assert done["usage"]["output_tokens"] == double.received[-1].sampling.max_tokens == 256


@pytest.mark.parametrize("said", ["<tool_call>\n{}\n</tool_call>", '<tool_call>\n{"name": "look", "arguments": {}}'])
async def test_a_model_that_calls_a_tool_instead_gets_no_call_through(said: str) -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input="Hi.", tools=[LOOK]))[-1]["response"]
        summarizes(double, Say(said))
        done = (await turn(ws, input=[TRIGGER], previous_response_id=first["id"], tools=[LOOK]))[-1]["response"]

    assert [item["type"] for item in done["output"]] == ["compaction"]


# What comes back


async def sealed(running: Running) -> dict[str, Any]:
    """A compaction item of the gateway."""
    assert isinstance(running.engine, ScriptedEngine)
    async with running.connect() as ws:
        summarizes(running.engine)
        done = (await turn(ws, input=[user("One."), TRIGGER]))[-1]["response"]
    item: dict[str, Any] = done["output"][0]
    return item


BROKEN = {
    "foreign": lambda blob: "gAAAAABm" + "x" * 80,
    "tampered": lambda blob: blob[:-3] + ("A" if blob[-3] != "A" else "B") + blob[-2:],
    "cut": lambda blob: blob[:40],
    "empty": lambda blob: "",
}


@pytest.mark.parametrize("kind", BROKEN)
async def test_a_blob_that_does_not_open_is_refused_by_name_and_the_socket_stays(kind: str) -> None:
    """Unlike reasoning it is not dropped: without it the model would answer out of nothing."""
    async with gateway(engine()) as running:
        item = await sealed(running)
        broken = {**item, "encrypted_content": BROKEN[kind](item["encrypted_content"])}
        async with running.connect() as ws:
            (error,) = await turn(ws, input=[user("Zero."), broken, user("Two.")])
            assert (await turn(ws, input=[item, user("Two.")]))[-1]["type"] == "response.completed"
        assert running.gateway.actor.counters.unopened_blobs == 1

    assert (error["status"], error["error"]["code"]) == (400, "invalid_encrypted_content")
    assert error["error"]["param"] == "input[1].encrypted_content"


async def test_a_blob_opens_for_its_tenant_only() -> None:
    double = engine()
    async with gateway(double, {"server": {"api_keys": ["one", "two"]}}) as running:
        ends = []
        item: dict[str, Any] = {}
        for key in ("one", "one", "two"):
            async with running.connect(additional_headers={"Authorization": f"Bearer {key}"}) as ws:
                if not item:
                    summarizes(double)
                    item = (await turn(ws, input=[user("One."), TRIGGER]))[-1]["response"]["output"][0]
                ends.append((await turn(ws, input=[item, user("Two.")]))[-1])

    assert [end["type"] for end in ends] == ["response.completed", "response.completed", "error"]
    assert ends[2]["error"]["code"] == "invalid_encrypted_content"


async def test_keys_can_be_replaced() -> None:
    old, new = b"o" * 32, b"n" * 32
    async with gateway(engine()) as running:
        running.gateway.actor.sealer = Sealer([old])
        item = await sealed(running)
        ends = []
        for keys in ([new, old], [new]):
            running.gateway.actor.sealer = Sealer(keys)
            async with running.connect() as ws:
                ends.append((await turn(ws, input=[item, user("Two.")]))[-1]["type"])

    assert ends == ["response.completed", "error"]


async def test_a_reasoning_blob_is_no_compaction() -> None:
    async with gateway(engine()) as running:
        blob = running.gateway.actor.sealer.seal("reasoning", "local", b"{}")
        async with running.connect() as ws:
            (error,) = await turn(ws, input=[{"type": "compaction", "encrypted_content": blob}, user("Two.")])

    assert error["error"]["code"] == "invalid_encrypted_content"


async def test_of_several_items_the_last_one_counts() -> None:
    double = engine()
    async with gateway(double) as running:
        async with running.connect() as ws:
            summarizes(double, Say("First summary."))
            one = (await turn(ws, input=[user("One."), TRIGGER]))[-1]["response"]["output"]
        async with running.connect() as ws:
            summarizes(double, Say("Second summary."))
            two = (await turn(ws, input=[*one, user("Two."), TRIGGER]))[-1]["response"]["output"]
            await turn(ws, input=[*one, user("Two."), *two, user("Three.")])

    assert last_prompt(running) == chat(f"user\n{HEADLINE}Second summary.", "user\nTwo.", "user\nThree.")


async def test_an_item_sent_to_the_chain_that_made_it_adds_nothing() -> None:
    double = engine()
    async with gateway(double) as running, running.connect() as ws:
        first = (await turn(ws, input="One."))[-1]["response"]
        summarizes(double)
        done = (await turn(ws, input=[TRIGGER], previous_response_id=first["id"]))[-1]["response"]
        for items in ([user("Two.")], [*done["output"], user("Two.")]):
            await turn(ws, input=items, previous_response_id=done["id"])

    assert double.received[-1].prompt == double.received[-2].prompt


async def test_an_item_sent_to_another_chain_starts_it_anew() -> None:
    """State starts at a compaction item wherever it comes from (protocol.md 4.6)."""
    double = engine()
    async with gateway(double) as running:
        item = await sealed(running)
        async with running.connect() as ws:
            other = (await turn(ws, input="Forget me."))[-1]["response"]
            await turn(ws, input=[item, user("Two.")], previous_response_id=other["id"])

    assert last_prompt(running) == chat(f"user\n{HEADLINE}{SUMMARY}", "user\nOne.", "user\nTwo.")


# POST /responses/compact, without its route


async def compacted(running: Running, **body: Any) -> tuple[list[dict[str, Any]], Any]:
    session = running.gateway.actor.open("local")
    items, usage = await compact(session, parse_compact({"model": "m", **body}))
    return [to_json(item) for item in items], usage


async def test_the_window_is_the_users_messages_and_one_item_and_begins_a_new_chain() -> None:
    double = engine()
    items = [
        {"type": "message", "role": "system", "content": "Be terse."},
        user("One."),
        {**user("Eins."), "role": "assistant"},
        user("Two."),
        {**user("Zwei."), "role": "assistant"},
    ]
    async with gateway(double) as running:
        summarizes(double)
        window, usage = await compacted(running, input=items)
        asked = last_prompt(running)
        async with running.connect() as ws:
            events = await turn(ws, input=[*window, user("Three.")])

    *messages, item = window
    assert [(message["role"], message["content"][0]["text"]) for message in messages] == [
        ("system", "Be terse."),
        ("user", "One."),
        ("user", "Two."),
    ]
    # Open Responses wants these in every message it reads (protocol.md 3.6).
    assert all(message["id"].startswith("msg_") and message["status"] == "completed" for message in messages)
    ResponseCompactionItem.model_validate(item, strict=True)
    assert (usage.input_tokens, usage.output_tokens) == (
        len(asked) // 4,
        len(unpack_ids(TOKENIZER.encode(SUMMARY))) + 1,
    )
    assert text(events) == "Fine."
    assert last_prompt(running) == chat(
        "system\nBe terse.",
        "user\nOne.",
        f"user\n{HEADLINE}{SUMMARY}",
        "user\nTwo.",
        "assistant\nZwei.",
        "user\nThree.",
    )


async def test_a_window_can_be_compacted_again() -> None:
    double = engine()
    async with gateway(double) as running:
        summarizes(double, Say("First summary."))
        window, _ = await compacted(running, input=[user("One."), user("Two.")])
        summarizes(double, Say("Second summary."))
        window, _ = await compacted(running, input=[*window, user("Three.")])
        async with running.connect() as ws:
            await turn(ws, input=[*window, user("Four.")])

    assert [entry["type"] for entry in window] == ["message"] * 3 + ["compaction"]
    assert last_prompt(running) == chat(
        "user\nOne.", "user\nTwo.", f"user\n{HEADLINE}Second summary.", "user\nThree.", "user\nFour."
    )


async def test_a_stored_response_can_be_compacted() -> None:
    double = engine()
    async with gateway(double) as running:
        async with running.connect() as ws:
            await ws.send(json.dumps({"type": "response.create", "model": "m", "input": "One.", "store": True}))
            first = (await until_terminal(ws))[-1]["response"]
        summarizes(double)
        window, _ = await compacted(running, previous_response_id=first["id"])

    assert [entry["type"] for entry in window] == ["message", "compaction"]


@pytest.mark.parametrize(
    ("fault", "code", "status"),
    [
        (Fault("unavailable", "gone"), "engine_unavailable", 500),
        (Drop(), "engine_unavailable", 500),
        (Fault("overloaded", "later"), "engine_overloaded", 429),
        (Fault("invalid", "no"), "invalid_prompt", 400),
        (Say("  "), "engine_unavailable", 500),
    ],
)
async def test_what_the_engine_could_not_do_is_an_http_error(fault: Any, code: str, status: int) -> None:
    double = ScriptedEngine(TOKENIZER, Script([fault]))
    async with gateway(double) as running:
        with pytest.raises(ApiError) as refused:
            await compacted(running, input="One.")

    assert (refused.value.code, refused.value.status) == (code, status)


async def test_a_broken_item_in_a_window_is_refused_by_name() -> None:
    async with gateway(engine()) as running:
        with pytest.raises(ApiError) as refused:
            await compacted(running, input=[user("One."), {"type": "compaction", "encrypted_content": "x"}])

    assert (refused.value.code, refused.value.param) == ("invalid_encrypted_content", "input[1].encrypted_content")
