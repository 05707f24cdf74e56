"""Compaction inside: what is kept, what a blob holds, and that every way to continue gives the same ids."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from actors.adoption import flatten, restore
from actors.compaction import INSTRUCTION, _kept
from actors.conversation import Response
from actors.sealing import Sealer
from actors.session import Session
from actors.window import _WINDOW, Window, in_front, linked
from gateway.protocol.items import (
    OURS,
    Compaction,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputImage,
    InputText,
    Item,
    Message,
    OutputText,
    Reasoning,
    ReasoningText,
    Refusal,
    SummaryText,
)
from gateway.protocol.requests import parse_create
from gateway.protocol.tools import Tool
from inference.engine import Chunk, Generation
from inference.formats.chatml import ChatMLFormat, ChatMLOptions
from inference.scripted import Say, Script, ScriptedEngine
from inference.tokenizer import scripted_tokenizer
from tests.support.actors import actor, chat

TOKENIZER = scripted_tokenizer()
FORM = ChatMLFormat(TOKENIZER, ChatMLOptions(thinking=True, keeps_thinking=True))

words = st.text(max_size=30)
ids = st.none() | st.text("abc_", min_size=1, max_size=6)
parts = st.builds(InputText, words) | st.builds(OutputText, words) | st.builds(Refusal, words)
messages = st.builds(
    Message,
    st.sampled_from(["user", "assistant", "system", "developer"]),
    words | st.lists(parts | st.builds(InputImage, image_url=words), max_size=3).map(tuple),
    id=ids,
    status=st.sampled_from([None, "completed", "incomplete"]),
    phase=st.sampled_from([None, "commentary"]),
)
thoughts = st.builds(Reasoning, id=ids, content=st.none() | st.builds(ReasoningText, words).map(lambda part: (part,)))


@st.composite
def rounds(draw: st.DrawFn) -> list[Item]:
    """Calls, side by side or one after the other, and all their outputs."""
    calls: list[Any] = []
    outputs: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        call_id = f"call_{draw(st.integers(0, 10**9))}"
        if draw(st.booleans()):
            calls.append(FunctionCall(call_id, "f", draw(words), namespace=draw(ids)))
            outputs.append(FunctionCallOutput(call_id, draw(words | st.builds(InputText, words).map(lambda p: (p,)))))
        else:
            calls.append(CustomToolCall(call_id, "g", draw(words), id=draw(ids)))
            outputs.append(CustomToolCallOutput(call_id, draw(words)))
    if draw(st.booleans()):
        return [*calls, *draw(st.permutations(outputs))]
    return [item for pair in zip(calls, outputs, strict=True) for item in pair]


contexts = st.lists(messages.map(lambda item: [item]) | thoughts.map(lambda item: [item]) | rounds(), max_size=8).map(
    lambda groups: [item for group in groups for item in group]
)


# What a blob holds


@given(
    words,
    contexts,
    st.none() | words,
    st.lists(
        st.builds(
            Tool,
            st.sampled_from(["function", "custom"]),
            words,
            ids,
            ids,
            st.none() | st.just({"type": "object"}),
            st.booleans(),
            st.none() | st.just(("lark", "x")),
        ),
        max_size=2,
    ),
    st.booleans(),
)
def test_a_window_comes_back_as_it_was(
    summary: str, kept: list[Any], preamble: str | None, tools: list[Tool], alone: bool
) -> None:
    window = Window(summary, tuple(kept), preamble, tuple(tools), alone)
    ring = Sealer([b"k" * 32])
    content = ring.open("compaction", "t", ring.seal("compaction", "t", orjson.dumps(window)))

    assert content is not None
    assert _WINDOW.validate_json(content) == window


# What is kept


@given(contexts, st.integers(0, 120))
@settings(deadline=None)
def test_what_is_kept_is_the_last_user_message_and_whole_newest_items(context: list[Any], room: int) -> None:
    context = [item for item in context if not (isinstance(item, Message) and isinstance(item.content, tuple))]
    kept, _ = _kept(context, FORM, room)
    last = max((n for n, item in enumerate(context) if isinstance(item, Message) and item.role == "user"), default=-1)
    newest = kept[1:] if last >= 0 else kept

    assert last < 0 or kept[0] is context[last]
    assert list(newest) == context[len(context) - len(newest) :]
    assert len(newest) < len(context) - last
    assert sum(len(FORM.body((item,), {})) // 4 for item in newest) <= room
    called = {item.call_id for item in newest if isinstance(item, FunctionCall | CustomToolCall)}
    assert {item.call_id for item in newest if isinstance(item, FunctionCallOutput | CustomToolCallOutput)} <= called


@given(contexts)
@settings(deadline=None)
def test_with_room_everything_since_the_last_user_message_is_kept(context: list[Any]) -> None:
    context = [item for item in context if not (isinstance(item, Message) and isinstance(item.content, tuple))]
    last = max((n for n, item in enumerate(context) if isinstance(item, Message) and item.role == "user"), default=0)

    assert list(_kept(context, FORM, 10**9)[0]) == context[last:]


def test_kept_reasoning_is_not_sealed_twice() -> None:
    thought = Reasoning(content=(ReasoningText("hm"),), encrypted_content="blob")

    assert _kept([Message("user", "x"), thought], FORM, 100)[0] == (
        Message("user", "x"),
        replace(thought, encrypted_content=None),
    )


def test_kept_reasoning_still_has_what_its_upstream_wants_back() -> None:
    thought = Reasoning(summary=(SummaryText("hm"),), foreign="o\nblob")
    window = Window("s", (thought,), None, (), alone=True)

    assert _WINDOW.validate_json(orjson.dumps(window), context=OURS) == window
    assert _WINDOW.validate_json(orjson.dumps(window)).kept == (replace(thought, foreign=None),)  # a client's would be


def test_messages_to_show_are_the_preamble_and_the_newest_that_have_room() -> None:
    said = [Message("system", "S " * 500), *(Message("user", f"{n} " * 100) for n in range(5)), Message("user", "last")]
    everything = _kept(said, FORM, 10**6)[1]
    some = _kept(said, FORM, 250)[1]

    assert list(everything) == said
    assert list(some) == [said[0], said[-2], said[-1]]
    assert list(_kept(said, FORM, 0)[1]) == [said[0], said[-1]]  # the last one, however long


@pytest.mark.parametrize("alone", [False, True])
def test_messages_in_front_of_an_item_count_unless_it_stands_alone(alone: bool) -> None:
    window = Window("s", (Message("user", "b"),), None, (), alone)
    items: list[Item] = [
        Message("user", "b"),
        Message("assistant", "x"),
        FunctionCall("c", "f", "{}"),
        FunctionCallOutput("c", "1"),
        Message("developer", "d"),
        Message("user", (InputText("b"),), id="msg_1"),  # the same words in another form
    ]

    assert in_front(items, window) == ([] if alone else [items[0], items[4]])


# Every way to continue

LONG = "The west pillar needs granite. " * 170
CALL = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
COMMON: dict[str, Any] = {"tools": TOOLS, "instructions": "Be brief."}


class Answering(ScriptedEngine):
    """Summarizes when asked to, calls a tool when told to, and is fine otherwise."""

    calls = False

    async def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        asked = TOKENIZER.encode(INSTRUCTION) in generation.prompt
        said = f"Summary {len(self.received)}." if asked else CALL if self.calls else "Fine."
        self.enqueue(Script([Say(said)]))
        async for chunk in super().generate(generation):
            yield chunk


class Chain:
    """A conversation that is continued by id, and the items that a client without stored state would have of it."""

    def __init__(self, engine: Answering, session: Session, leading: list[dict[str, Any]]) -> None:
        self.items: list[dict[str, Any]] = []
        self.session = session
        self._engine = engine
        self._leading = leading
        self._previous: str | None = None
        self._waiting: str | None = None

    @property
    def newest(self) -> Response | None:
        """None while a call waits for its output: then it can't be continued as it is."""
        return None if self._previous is None or self._waiting else self.session.cache.get(self._previous)

    async def turn(self, kind: str, said: str, threshold: bool) -> None:
        new: list[dict[str, Any]] = [] if self._previous else self._leading
        if self._waiting:
            new = [{"type": "function_call_output", "call_id": self._waiting, "output": said}]
        elif kind != "trigger" or self._previous is None:
            new = [*new, {"role": "user", "content": said}]
        trigger = kind == "trigger" and self._previous is not None
        self._engine.calls = kind == "call" and not trigger
        body: dict[str, Any] = {"input": [*new, {"type": "compaction_trigger"}] if trigger else new, **COMMON}
        if threshold:
            body["context_management"] = [{"type": "compaction", "compact_threshold": 1000}]
        response = await run(self.session, previous_response_id=self._previous, **body)
        # In front of an item that was asked for messages count, so a client that wants what the chain goes on with has
        # none of the older ones.
        before = [item for item in new if "role" in item] if trigger else [*self.items, *new]
        self.items = [*before, *response["output"]]
        self._previous = response["id"]
        self._waiting = response["output"][-1].get("call_id")

    async def prompt_by_id(self) -> bytes:
        await run(self.session, input="And?", previous_response_id=self._previous, **COMMON)
        return self._engine.received[-1].prompt

    async def prompt_of(self, items: list[dict[str, Any]]) -> bytes:
        more = {"role": "user", "content": "And?"}
        await run(self.session.actor.open("t"), input=[*items, more], **COMMON)
        return self._engine.received[-1].prompt


async def run(session: Session, **body: Any) -> dict[str, Any]:
    """A turn; its terminal's response."""
    turn = session.turn(parse_create({"model": "m", "store": False, **body}, transport="websocket"), None)
    last = ""
    async for events in turn.run():
        last = events[-1].data
    response: dict[str, Any] = orjson.loads(last)["response"]
    assert response["status"] == "completed", response["error"]
    return response


def rendered(session: Session, response: Response) -> bytes:
    """The ids that a response's context has if nothing of it is taken from a cache."""
    items = response.context()
    start = max((at for at, item in enumerate(items) if isinstance(item, Compaction)), default=0)
    return chat().body(linked(session, None, items[start:], ()).body, {})


turns = st.tuples(st.sampled_from(["say", "call", "trigger"]), st.sampled_from(["Word.", LONG]), st.booleans())


@given(st.lists(turns, min_size=1, max_size=7), st.booleans())
@settings(max_examples=40, deadline=None)
async def test_every_way_to_continue_gives_the_engine_the_same_ids(
    plan: list[tuple[str, str, bool]], led: bool
) -> None:
    """Turns with compactions wherever they fall. After each the cache holds what a full rendering gives; and all items,
    or those from the last compaction on, make on a new session the very prompt that the id makes on the old one."""
    engine = Answering(TOKENIZER)
    async with actor(engine) as made:
        chain = Chain(engine, made.open("t"), [{"role": "developer", "content": "You are Ada."}] if led else [])
        for number, (kind, said, threshold) in enumerate(plan):
            await chain.turn(kind, f"{number}. {said}", threshold)
            if (newest := chain.newest) is None:
                continue
            assert newest.tokens.tail(0) == rendered(chain.session, newest)
            expected = await chain.prompt_by_id()
            assert await chain.prompt_of(chain.items) == expected
            last = max((at for at, item in enumerate(chain.items) if item.get("type") == "compaction"), default=0)
            assert await chain.prompt_of(chain.items[last:]) == expected


async def test_a_compacted_response_can_move_to_another_actor() -> None:
    """Adoption copies tokens by turn, so the first turn after a compaction has no parent (actors.adoption)."""
    engine = Answering(TOKENIZER)
    async with actor(engine) as made:
        chain = Chain(engine, made.open("t"), [])
        for kind in ("say", "say", "trigger", "say"):
            await chain.turn(kind, "Word.", False)
        newest = chain.newest
        assert newest is not None
        copy = restore(flatten(newest))

    assert copy.tokens.tail(0) == newest.tokens.tail(0)
    assert [turn.id for turn in copy.lineage()] == [turn.id for turn in newest.lineage()]
    assert len(list(copy.lineage())) == 2
