"""Harmony's output taken apart: as OpenAI's library does where it is well-formed, by our rules where it is not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise

import openai_harmony as library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Delta,
    MessageStart,
    ReasoningDelta,
    TextDelta,
)
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.formats.format import Brief, Opening
from inference.formats.harmony import harmony_format
from inference.formats.harmony_parser import MAX_HEADER_IDS
from inference.tokenizer import harmony_tokenizer, unpack_ids
from tests.support.cost import cpu_seconds, ever
from tests.support.harmony import CONTROL, marked, reference

FORM = harmony_format(harmony_tokenizer())
WEATHER = Tool("function", "get_weather")
LOOK_UP = Tool("function", "look_up", "wiki")
PATCH = Tool("custom", "apply_patch")
TOOLS = ToolSet((WEATHER, LOOK_UP, PATCH))


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind in one."""
    out: list[Delta] = []
    for delta in deltas:
        before = out[-1] if out else None
        if isinstance(delta, TextDelta) and isinstance(before, TextDelta):
            out[-1] = TextDelta(before.text + delta.text)
        elif isinstance(delta, ReasoningDelta) and isinstance(before, ReasoningDelta):
            out[-1] = ReasoningDelta(before.text + delta.text)
        elif isinstance(delta, CallDelta) and isinstance(before, CallDelta):
            out[-1] = CallDelta(before.text + delta.text)
        else:
            out.append(delta)
    return out


def parse(portions: Sequence[Sequence[int]], tools: ToolSet = TOOLS) -> list[Delta]:
    parser = FORM.parser(tools, Opening(b""))
    out: list[Delta] = []
    for portion in portions:
        out += parser.feed(portion)
    return merged(out + parser.finish())


def each_way(text: str, tools: ToolSet = TOOLS) -> list[Delta]:
    """The deltas of a text in which control tokens are spelled out, fed whole and id by id."""
    ids = marked(text)
    whole = parse([ids], tools)
    assert parse([[i] for i in ids], tools) == whole
    return whole


def call(arguments: str, name: str = "get_weather", space: str | None = None) -> list[Delta]:
    return [CallStart("function", name, space), *([CallDelta(arguments)] if arguments else []), CallEnd()]


def answer(text: str) -> list[Delta]:
    return [MessageStart("final_answer"), TextDelta(text)]


def remark(text: str) -> list[Delta]:
    return [MessageStart("commentary"), TextDelta(text)]


ROME = '{"city": "Rome"}'
THOUGHT = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
PLAN = "<|channel|>commentary<|message|>Plan<|end|><|start|>assistant"
USER = "<|start|>user<|message|>b<|end|>"
OUTPUT = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>c<|end|>"


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("<|channel|>final<|message|>4<|return|>", answer("4")),
        (f"{THOUGHT}<|channel|>final<|message|>4<|return|>", [ReasoningDelta("hm"), *answer("4")]),
        ("<|channel|>final <|constrain|>json<|message|>{}<|return|>", answer("{}")),
        (f"<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{ROME}<|call|>", call(ROME)),
        (f" to=functions.get_weather<|channel|>commentary json<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>analysis to=functions.get_weather code<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary to=wiki.look_up<|message|>{ROME}<|call|>", call(ROME, "look_up", "wiki")),
        (f"{THOUGHT} to=functions.get_weather<|channel|>commentary<|message|>{ROME}<|end|>",
         [ReasoningDelta("hm"), *call(ROME)]),
        (f"{THOUGHT}{PLAN}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>",
         [ReasoningDelta("hm"), *remark("Plan"), *call(ROME)]),
        (f"{PLAN}<|channel|>final<|message|>Done<|return|>", [*remark("Plan"), *answer("Done")]),
        (f"{THOUGHT}{THOUGHT}<|channel|>final<|message|>4<|return|>",
         [ReasoningDelta("hm"), MessageStart(), ReasoningDelta("hm"), *answer("4")]),
        ("<|channel|>final<|message|><|return|>", [MessageStart("final_answer")]),
        # cut off by the limit
        ("<|channel|>final<|message|>4", answer("4")),
        ("<|channel|>fin", []),
        (" to=fun", []),
        ("<|channel|>commentary to=functions.get_weather", []),
        (f"<|channel|>commentary to=functions.get_weather<|message|>{ROME[:5]}", call(ROME[:5])[:2]),
        ("<|channel|>commentary to=functions.get_weather<|message|>", call("")[:1]),
        (THOUGHT[:-1], [ReasoningDelta("hm")]),
    ],
)  # fmt: skip
def test_messages(text: str, deltas: list[Delta]) -> None:
    assert each_way(text) == deltas


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        # junk between channel and message
        ("<|channel|>final blah <|constrain|>x y<|message|>4<|return|>", answer("4")),
        ("<|channel|>the final one<|message|>4<|return|>", answer("4")),
        ("<|channel|>analysis<|channel|>analysis<|message|>hm<|end|>", [ReasoningDelta("hm")]),
        # no channel, or none that there is
        ("<|message|>4<|return|>", answer("4")),
        ("<|channel|><|message|>4<|return|>", answer("4")),
        ("<|channel|>comments<|message|>4<|return|>", answer("4")),
        (f" to=functions.get_weather<|message|>{ROME}<|call|>", call(ROME)),
        # starts where none should be
        ("<|start|>assistant<|channel|>final<|message|>4<|return|>", answer("4")),
        ("<|channel|>fi<|start|>assistant<|channel|>final<|message|>4<|return|>", [*answer("4")]),
        ("<|channel|>analysis<|message|>hm<|start|>assistant<|channel|>final<|message|>4<|return|>",
         [ReasoningDelta("hm"), *answer("4")]),
        ("<|channel|>analysis<|message|>hm<|channel|>final<|message|>4<|return|>",
         [ReasoningDelta("hm"), *answer("4")]),
        ("<|channel|>analysis<|message|>hm<|end|>assistant<|channel|>final<|message|>4<|return|>",
         [ReasoningDelta("hm"), *answer("4")]),
        ("<|channel|>analysis<|message|>hm<|end|><|channel|>final<|message|>4<|return|>",
         [ReasoningDelta("hm"), *answer("4")]),
        ("<|channel|>final<|message|>a<|message|>b<|constrain|>c<|return|>", answer("abc")),
        # whom a call is to
        (f"<|channel|>commentary to= functions.get_weather<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary to=functions. get_weather json<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary to=functions.get weather<|message|>{ROME}<|call|>", call(ROME, "get")),
        (f"<|channel|>commentaryto=functions.get_weather<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary functions.get_weather<|message|>{ROME}<|call|>", call(ROME)),
        (f" to=functions.get_weather<|channel|>analysis to=functions.get_weather<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary to=get_weather<|message|>{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary to=functions.look_up<|message|>{ROME}<|call|>", call(ROME, "look_up", "wiki")),
        (f"<|channel|>commentary to=functions.nope<|message|>{ROME}<|call|>", call(ROME, "nope")),
        (f"<|channel|>analysis to=browser.search<|message|>{ROME}<|call|>", call(ROME, "browser.search")),
        (f"<|channel|>commentary to=functions.{'x' * 200}<|message|>{ROME}<|call|>", call(ROME, "x" * 128)),
        ("<|channel|>commentary to=user<|message|>a<|end|>", remark("a")),
        ("<|channel|>commentary to=functions.<|message|>a<|end|>", remark("a")),
        ("<|channel|>commentary to=<|message|>a<|end|>", remark("a")),
        # headers without an end
        ("Hello there<|return|>", answer("Hello there")),
        ("Hello there", answer("Hello there")),
        ("user interfaces<|return|>", answer("user interfaces")),
        ("<|channel|>final Hello<|return|>", answer("Hello")),
        ("<|channel|>analysis I think of functions.get_weather<|end|><|start|>assistant<|channel|>final<|message|>4",
         [ReasoningDelta("I think of functions.get_weather"), *answer("4")]),
        (f"<|channel|>commentary to=functions.get_weather <|constrain|>json{ROME}<|call|>", call(ROME)),
        (f"<|channel|>commentary to=functions.get_weather json {ROME}<|call|>", call(ROME)),
        ("<|channel|>commentary to=functions.get_weather<|call|>", call("{}")),
        ("<|channel|>commentary to=functions.get_weather<|start|>assistant<|channel|>final<|message|>4", answer("4")),
        # somebody else's part
        (f"<|channel|>final<|message|>a<|end|>{USER}{OUTPUT}<|start|>assistant<|channel|>final<|message|>d<|return|>",
         [*answer("a"), *answer("d")]),
    ],
)  # fmt: skip
def test_what_is_malformed_is_salvaged(text: str, deltas: list[Delta]) -> None:
    assert each_way(text) == deltas


def test_a_header_that_never_ends_becomes_content() -> None:
    words = " word" * (3 * MAX_HEADER_IDS)
    assert each_way(words) == answer(words)
    assert each_way("<|channel|>analysis" + words) == [ReasoningDelta(words.lstrip())]
    parser = FORM.parser(TOOLS, Opening(b""))
    assert parser.feed(marked(words)[: MAX_HEADER_IDS + 1]) != []
    assert FORM.parser(TOOLS, Opening(b"")).feed(marked(words)[:MAX_HEADER_IDS]) == []


@pytest.mark.parametrize("tools", [ToolSet(), ToolSet(TOOLS.tools, ToolChoice("none"))])
def test_without_tools_nobody_can_be_called(tools: ToolSet) -> None:
    text = f"to=functions.get_weather <|constrain|>json<|message|>{ROME}<|call|>"
    assert each_way("<|channel|>commentary " + text, tools) == remark(ROME)
    assert each_way("<|channel|>analysis " + text, tools) == [ReasoningDelta(ROME)]


@pytest.mark.parametrize(
    ("header", "content", "given"),
    [
        ("functions.apply_patch", " a\n", " a\n"),
        ("functions.apply_patch", '{"a"', '{"a"'),
        ("functions.apply_patch", "", ""),
        ("functions.apply_patch <|constrain|>json", json.dumps("a\n"), "a\n"),
        ("functions.apply_patch <|constrain|>json", json.dumps({"input": "a\n", "x": 1}), "a\n"),
        ("functions.apply_patch json", json.dumps({"patch": "a\n"}), "a\n"),
        ("functions.apply_patch <|constrain|>json", ' {"input": 1}', ' {"input": 1}'),
        ("functions.apply_patch <|constrain|>json", '{"input": ', '{"input": '),
        ("functions.apply_patch <|constrain|>json", " *** x", " *** x"),
        ("functions.get_weather <|constrain|>json", json.dumps(ROME), ROME),
        ("functions.get_weather <|constrain|>json", "\n" + ROME + "\n", ROME + "\n"),
        ("functions.get_weather <|constrain|>json", '"x', '"x'),
        ("functions.get_weather <|constrain|>json", " \n", "{}"),
    ],
)
def test_input_of_calls(header: str, content: str, given: str) -> None:
    deltas = each_way(f"<|channel|>commentary to={header}<|message|>{content}<|call|>")
    assert [delta for delta in deltas if isinstance(delta, CallDelta)] == ([CallDelta(given)] if given else [])
    assert deltas[-1] == CallEnd()


def test_held_input_comes_out_if_the_call_is_cut_off() -> None:
    start = "<|channel|>commentary to=functions.apply_patch json<|message|>"
    assert each_way(start + '{"input": "a') == [CallStart("custom", "apply_patch"), CallDelta('{"input": "a')]


def test_reasoning_tokens_are_those_of_the_thoughts() -> None:
    thought = "<|channel|>analysis<|message|>one two<|end|>"
    text = thought + "<|start|>assistant<|channel|>final<|message|>three<|return|>"
    ids = marked(text)
    whole, single = FORM.parser(TOOLS, Opening(b"")), FORM.parser(TOOLS, Opening(b""))
    whole.feed(ids)
    for i in ids:
        single.feed([i])
    assert whole.reasoning_tokens == single.reasoning_tokens == len(marked(thought))


def test_an_id_of_text_gives_its_text_alone() -> None:
    """So that the log-probability of the id can be put to it."""
    parser = FORM.parser(TOOLS, Opening(b""))
    header = marked("<|channel|>final<|message|>")
    assert [parser.feed([i]) for i in header] == [[], [], [MessageStart("final_answer")]]
    assert [parser.feed([i]) for i in marked("Hi there")] == [[TextDelta("Hi")], [TextDelta(" there")]]
    assert parser.feed(marked("<|return|>")) == parser.finish() == []


def test_text_cannot_forge_control_tokens() -> None:
    forged = "".join(CONTROL)
    ids = [*marked("<|channel|>final<|message|>"), *unpack_ids(FORM.tokenizer.encode(forged)), *marked("<|return|>")]
    assert parse([ids]) == answer(forged)


# properties

words = st.text(max_size=10)
spoken = st.tuples(st.sampled_from(["analysis", "commentary", "final"]), words)
called = st.tuples(st.sampled_from(["functions.get_weather", "functions.nope", "wiki.look_up"]), words)


@settings(deadline=None)
@given(said=st.lists(spoken, max_size=3), last=spoken | called)
def test_turns_are_read_as_the_library_reads_them(said: list[tuple[str, str]], last: tuple[str, str]) -> None:
    messages = []
    for channel, text in (*said, last):
        message = library.Message.from_role_and_content(library.Role.ASSISTANT, text)
        if "." in channel:
            message = message.with_recipient(channel).with_content_type("<|constrain|>json")
        messages.append(message.with_channel("commentary" if "." in channel else channel))
    config = library.RenderConversationConfig(auto_drop_analysis=False)
    ids = reference().render_conversation_for_training(library.Conversation.from_messages(messages), config)
    ids = ids[len(unpack_ids(FORM.opening(Brief()).ids)) :]
    expected: list[Delta] = []
    for message in reference().parse_messages_from_completion_tokens(ids, library.Role.ASSISTANT):
        text = message.content[0].text
        if message.recipient is not None:
            space, _, name = message.recipient.rpartition(".")
            expected += call(_arguments(text), name, None if space == "functions" else space)
        elif message.channel == "analysis":
            given = [delta for delta in expected if not isinstance(delta, MessageStart)]
            expected += [MessageStart()] if given and isinstance(given[-1], ReasoningDelta) else []
            expected += [ReasoningDelta(text)] if text else []
        else:
            expected += (answer(text) if message.channel == "final" else remark(text))[: 2 if text else 1]
    assert parse([ids]) == expected


def _arguments(text: str) -> str:
    """What we make of arguments that are no plain JSON object."""
    text = text.lstrip()
    if text.startswith('"'):
        try:
            value = json.loads(text, strict=False)
        except ValueError:
            return text
        return str(value)
    return text or "{}"


FRAGMENTS = (
    *CONTROL, *CONTROL, "<|endoftext|>", "<|reserved_200004|>", "assistant", "analysis", "commentary", "final", " to=",
    "functions.", "get_weather", "functions.apply_patch", "wiki.look_up", " json", "json", '{"a": ', '"', "}", "x", " ",
    "user", "\n", "😀", "漢",
)  # fmt: skip
outputs = st.lists(st.sampled_from(FRAGMENTS), max_size=25).map("".join)


@settings(deadline=None, max_examples=300)
@given(
    text=outputs,
    cuts=st.lists(st.integers(0, 99), max_size=5),
    lost=st.integers(0, 3),
    tools=st.sampled_from([TOOLS, ToolSet()]),
)
def test_whatever_comes_portions_make_no_difference(text: str, cuts: list[int], lost: int, tools: ToolSet) -> None:
    ids = [i for piece in text for i in unpack_ids(FORM.tokenizer.encode(piece))] if lost == 3 else marked(text)
    ids = ids[: len(ids) - lost]
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    whole = parse([ids], tools)
    assert parse([[i] for i in ids], tools) == whole
    assert parse([ids[a:b] for a, b in pairwise(edges)], tools) == whole
    calling = False
    for delta in whole:  # the grammar of `gateway.protocol.deltas`
        assert isinstance(delta, CallDelta | CallEnd) == calling
        calling = isinstance(delta, CallStart | CallDelta)
        assert getattr(delta, "text", "x")


@settings(deadline=None, max_examples=200)
@given(text=outputs)
def test_whatever_was_sampled_the_context_ends_with_a_whole_message(text: str) -> None:
    ids = marked(text)
    kept, more = FORM.spoken(ids)
    after = [*ids[:kept], *unpack_ids(more)]
    assert 0 <= kept <= len(ids)
    assert reference().decode(after).endswith(("<|end|>", "<|call|>"))
    assert FORM.spoken(after) == (len(after), b"")


def test_a_long_text_takes_linear_time() -> None:
    def cost(words: int) -> float:
        parser = FORM.parser(TOOLS, Opening(b""))
        ids = marked("<|channel|>final<|message|>" + "twelve times " * words)
        return cpu_seconds(lambda: [parser.feed([i]) for i in ids])

    # quadratic time would be 64 times as much
    assert ever(lambda: cost(16_000) < 24 * cost(2_000))
