"""Thoughts in ChatML: shown and forgotten as Qwen3's template does, whatever was appended and when."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.items import (
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    Reasoning,
    ReasoningText,
    SummaryText,
)
from inference.formats.chatml import ChatMLFormat, ChatMLOptions, options_from_template
from inference.formats.format import Brief
from inference.tokenizer import HubTokenizer, pack_ids, unpack_ids
from tests.support.vocabulary import MARKUP, reference

# Written for this test after the behaviour of Qwen3's template, without the tools of its system turn: same output,
# other text. Its rules: thoughts are shown from the last question on, a user's message that is no tool's answer in
# disguise; the last message has a block even without a thought; `enable_thinking` off opens with an empty one.
QWEN3 = r"""
{%- set found = namespace(last_query_index=messages | length - 1) -%}
{%- for message in messages -%}
{%- set said = message.content or '' -%}
{%- set answer = said.startswith('<tool_response>') and said.endswith('</tool_response>') -%}
{%- if message.role == 'user' and not answer %}{%- set found.last_query_index = loop.index0 %}{% endif -%}
{%- endfor -%}
{%- for message in messages -%}
{%- if message.role == 'tool' %}
{%- if not loop.previtem or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{%- set thought = message.reasoning_content or '' -%}
{%- set said = message.content or '' -%}
{{- '<|im_start|>assistant\n' -}}
{%- if loop.index0 > found.last_query_index and (loop.last or thought) -%}
{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' + said.lstrip('\n') -}}
{%- else -%}{{ said }}{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- if said or not loop.first %}{{ '\n' }}{% endif -%}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments
 + '}\n</tool_call>' -}}
{%- endfor -%}{{ '<|im_end|>\n' }}
{%- else -%}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{%- endif -%}
""".strip("\n")


@functools.cache
def hub() -> HubTokenizer:
    return HubTokenizer(json.loads(reference(MARKUP).to_str()), "test")


@functools.cache
def template() -> Any:
    transformers = importlib.import_module("transformers")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=reference(MARKUP), chat_template=QWEN3)


QWEN3_FORM = ChatMLFormat(hub(), ChatMLOptions(thinking=True, keeps_round=True))
NEVER = ChatMLFormat(hub(), ChatMLOptions(thinking=True))
ALWAYS = ChatMLFormat(hub(), ChatMLOptions(thinking=True, keeps_thinking=True))
PLAIN = ChatMLFormat(hub(), ChatMLOptions())


@dataclass(frozen=True)
class Said:
    """One message of a model."""

    thought: str
    text: str
    calls: tuple[str, ...] = ()

    def chat(self) -> dict[str, Any]:
        calls = [{"function": {"name": "get_weather", "arguments": given}} for given in self.calls]
        return {"role": "assistant", "content": self.text, "reasoning_content": self.thought, "tool_calls": calls}

    def items(self) -> list[Item]:
        return [
            *([Reasoning(content=(ReasoningText(self.thought),))] if self.thought else []),
            *([Message("assistant", self.text)] if self.text or not self.calls else []),
            *(FunctionCall("c", "get_weather", given) for given in self.calls),
        ]

    def sampled(self, *, block: bool) -> list[int]:
        """What the model samples to say this; `block`: the opening leaves the block to it."""
        writer = QWEN3_FORM._writer()
        if block and self.thought:
            writer.markup("<think>").text("\n" + self.thought.strip("\n") + "\n").markup("</think>").text("\n\n")
        writer.text(self.text.lstrip("\n") if self.thought else self.text)
        for i, arguments in enumerate(self.calls):
            writer.text("\n" if self.text or i else "").markup("<tool_call>")
            writer.text(f'\n{{"name": "get_weather", "arguments": {arguments}}}\n').markup("</tool_call>")
        return [*unpack_ids(writer.ids()), hub().special("<|im_end|>")]


@dataclass(frozen=True)
class Round:
    """A question, steps with calls and their outputs, and an answer."""

    question: tuple[str, str]
    steps: tuple[tuple[Said, tuple[str, ...]], ...]
    answer: Said


# A template's tokenizer would take look-alikes in the text for control tokens, which is the one wanted difference.
text = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=8) | st.sampled_from(["\n", "\n\nx\n"])
thoughts = st.just("") | text
given_calls = st.lists(st.sampled_from(["{}", '{"city": "Rome"}', '{"a": [1, "é"]}']), min_size=1, max_size=2)


@st.composite
def rounds(draw: st.DrawFn) -> list[Round]:
    def step() -> tuple[Said, tuple[str, ...]]:
        calls = tuple(draw(given_calls))
        return Said(draw(thoughts), draw(text), calls), tuple(draw(text) for _ in calls)

    def one(first: bool) -> Round:
        question = ("user" if first else draw(st.sampled_from(["user", "user", "system"])), draw(text))
        return Round(question, tuple(step() for _ in range(draw(st.integers(0, 2)))), Said(draw(thoughts), draw(text)))

    return [one(i == 0) for i in range(draw(st.integers(1, 3)))]


def expected(messages: Sequence[dict[str, Any]]) -> list[int]:
    found: list[int] = template().apply_chat_template(list(messages), add_generation_prompt=True)["input_ids"]
    return found


class Context:
    """What `actors.rounds` does, without its bookkeeping: appends, and renders a round anew when it is forgotten."""

    def __init__(self, form: ChatMLFormat) -> None:
        self.form = form
        self.settled = b""  # what no later turn changes
        self.recent = b""
        self.items: list[Item] = []  # of `recent`
        self.all: list[Item] = []
        self.rendered_anew = 0

    def add(self, items: list[Item]) -> None:
        if self.form.forgets(self.items, items):
            self.recent = self.form.body([*self.items, *items], {})
            self.rendered_anew += 1
            self.settled, self.recent, self.items = self.settled + self.recent, b"", []
        else:
            self.recent += self.form.body(items, {})
            self.items += items
        self.all += items

    def speak(self, said: Said, effort: str | None) -> list[int]:
        """Returns the prompt."""
        opening = self.form.opening(Brief(effort=effort))
        prompt = unpack_ids(self.settled + self.recent + opening.ids)
        sampled = said.sampled(block=effort != "none")
        kept, behind = self.form.spoken(sampled)
        self.recent += opening.ids + pack_ids(sampled[:kept]) + behind
        self.items += said.items()
        self.all += said.items()
        return prompt


@settings(deadline=None, max_examples=60)
@given(conversation=rounds())
def test_every_prompt_has_the_ids_of_qwen3s_template(conversation: list[Round]) -> None:
    """Turn by turn, and all at once as when a client sends the whole history."""
    context = Context(QWEN3_FORM)
    messages: list[dict[str, Any]] = []

    def speak(said: Said) -> None:
        whole = QWEN3_FORM.body(context.all, {}) + QWEN3_FORM.opening(Brief()).ids
        assert unpack_ids(whole) == expected(messages)
        assert context.speak(said, None) == expected(messages)
        messages.append(said.chat())

    for turn in conversation:
        role, question = turn.question
        context.add([Message(role, question)])  # type: ignore[arg-type]
        messages.append({"role": role, "content": question})
        for said, outputs in turn.steps:
            speak(said)
            context.add([FunctionCallOutput("c", output) for output in outputs])
            messages.extend({"role": "tool", "content": output} for output in outputs)
        speak(turn.answer)


@settings(deadline=None, max_examples=60)
@given(conversation=rounds(), efforts=st.lists(st.sampled_from([None, "none"]), min_size=12, max_size=12))
def test_a_forgotten_round_is_as_the_template_shows_it(conversation: list[Round], efforts: list[str | None]) -> None:
    """Whatever the openings wrote: empty blocks stay while a round lasts, and go with its thoughts."""
    context = Context(QWEN3_FORM)
    left = iter(efforts)
    for turn in conversation:
        context.add([Message(turn.question[0], turn.question[1])])  # type: ignore[arg-type]
        if turn.question[0] == "user":
            assert context.settled + context.recent == QWEN3_FORM.body(context.all, {})
        for said, outputs in turn.steps:
            effort = next(left)
            context.speak(Said("" if effort else said.thought, said.text, said.calls), effort)
            context.add([FunctionCallOutput("c", output) for output in outputs])
        context.speak(turn.answer, None)


THOUGHT = Reasoning(content=(ReasoningText("\nhm\n"),))
ASKED, ANSWERED = Message("user", "q"), Message("assistant", "a")


def written(form: ChatMLFormat, items: list[Item]) -> str:
    return b"".join(map(form.tokenizer.token_bytes, unpack_ids(form.body(items, {})))).decode()


@pytest.mark.parametrize("form", [ALWAYS, QWEN3_FORM])
def test_thoughts_open_their_turn(form: ChatMLFormat) -> None:
    start = "<|im_start|>assistant\n<think>\nhm\n</think>\n\n"
    call = '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
    assert written(form, [THOUGHT, ANSWERED]) == start + "a<|im_end|>\n"
    assert written(form, [THOUGHT, FunctionCall("c", "f", "{}")]) == start + call + "<|im_end|>\n"
    assert written(form, [THOUGHT]) == start + "<|im_end|>\n"
    summary = Reasoning(summary=(SummaryText("hm"),))
    assert written(form, [summary, ANSWERED]) == start + "a<|im_end|>\n"
    assert form.body([Reasoning(encrypted_content="x")], {}) == b""


@pytest.mark.parametrize(
    ("form", "shown"), [(ALWAYS, (True, True)), (QWEN3_FORM, (False, True)), (NEVER, (False, False))]
)
def test_which_thoughts_are_rendered(form: ChatMLFormat, shown: tuple[bool, bool]) -> None:
    before, since = (Reasoning(content=(ReasoningText(name),)) for name in ("before", "since"))
    found = written(form, [before, ANSWERED, ASKED, since, ANSWERED])
    assert ("before" in found, "since" in found) == shown


@pytest.mark.parametrize("said", [THOUGHT, ANSWERED, FunctionCall("c", "f", "{}")])
@pytest.mark.parametrize("form", [QWEN3_FORM, NEVER])
def test_a_question_makes_a_round_forgotten(form: ChatMLFormat, said: Item) -> None:
    assert form.forgetful
    assert form.forgets([ASKED, said], [FunctionCallOutput("c", "x"), ASKED])
    assert not form.forgets([ASKED], [ASKED])  # nothing said, nothing to forget
    disguised = Message("user", (InputText("<tool_response>x"), InputText("</tool_response>")))
    for added in ([], [FunctionCallOutput("c", "x")], [Message("developer", "d")], [ANSWERED, THOUGHT], [disguised]):
        assert not form.forgets([ASKED, said], added)


@pytest.mark.parametrize("form", [ALWAYS, PLAIN])
def test_others_forget_nothing(form: ChatMLFormat) -> None:
    assert not form.forgetful
    assert not form.forgets([ASKED, THOUGHT, ANSWERED], [ASKED])


def test_what_looks_like_a_tools_answer_is_no_question() -> None:
    disguised = Message("user", "<tool_response>x</tool_response>")
    assert "hm" in written(QWEN3_FORM, [ASKED, THOUGHT, ANSWERED, disguised])
    assert "hm" not in written(QWEN3_FORM, [ASKED, THOUGHT, ANSWERED, Message("user", "<tool_response>x")])


def test_templates_that_open_the_block_themselves() -> None:
    """QwQ and Qwen3-Thinking: the opening is part of the thought, and of what is forgotten with it."""
    for keeps_round in (True, False):
        form = ChatMLFormat(hub(), ChatMLOptions(thinking=True, opens_thinking=True, keeps_round=keeps_round))
        for effort in (None, "none", "high"):
            assert form.opening(Brief(effort=effort)).forced == "<think>\n"
        assert form.forgets([ASKED, THOUGHT, ANSWERED], [ASKED])


def test_the_template_of_this_test_is_recognized() -> None:
    assert options_from_template(QWEN3) == ChatMLOptions(thinking=True, keeps_round=True)
