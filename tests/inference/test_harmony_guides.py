"""Constraints on Harmony's output: what is asked for is all that can be sampled, and thoughts may always come first."""

from __future__ import annotations

import functools
import importlib
import json
import re
from typing import Any

import pytest

from gateway.protocol.errors import ApiError
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.engine import Guide
from inference.formats.format import Brief
from inference.formats.harmony import HarmonyFormat
from inference.tokenizer import HubTokenizer, unpack_ids
from tests.support.harmony import CONTROL
from tests.support.vocabulary import reference

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = Tool("function", "get_weather", None, "Weather now", CITY, strict=True)
LOOK_UP = Tool("function", "look_up", "wiki")
PATCH = Tool("custom", "apply_patch")
LINE = Tool("custom", "line", grammar=("regex", "[a-z]+;"))
ALL = ToolSet((WEATHER, LOOK_UP, PATCH))
SCHEMA = TextFormat("json_schema", json.dumps(CITY))
ROME = '{"city": "Rome"}'


@functools.cache
def form() -> HarmonyFormat:
    return HarmonyFormat(HubTokenizer(json.loads(reference(CONTROL).to_str()), "test"))


@functools.cache
def compiler() -> Any:
    xgrammar = importlib.import_module("xgrammar")
    tokenizer = form().tokenizer
    names = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(names, stop_token_ids=list(form().stop_ids)))


def complete(guide: Guide | None, text: str) -> bool:
    """Whether the constraint takes this output, in which control tokens are spelled out, to its stop token."""
    import xgrammar

    assert guide is not None
    assert guide.kind == "structural_tag"
    matcher = xgrammar.GrammarMatcher(compiler().compile_structural_tag(guide.value))
    tokenizer = form().tokenizer
    ids = []
    controls = (*CONTROL, "<|endoftext|>")
    for piece in re.split(f"({'|'.join(map(re.escape, controls))})", text):
        ids += [tokenizer.special(piece)] if piece in controls else unpack_ids(tokenizer.encode(piece))
    return all(matcher.accept_token(i) for i in ids) and matcher.is_terminated()


def choose(mode: str, *names: str, tools: ToolSet = ALL) -> ToolSet:
    return ToolSet(tools.tools, ToolChoice(mode, names))


def guide_of(tools: ToolSet, text: TextFormat | None = None) -> Guide | None:
    return form().opening(Brief(tools=tools, text=text or TextFormat())).guide


def calls(name: str, arguments: str) -> list[str]:
    """A call in the forms that gpt-oss writes."""
    rest = f"<|message|>{arguments}<|call|>"
    return [
        f"<|channel|>commentary to={name} <|constrain|>json{rest}",
        f"<|channel|>commentary to={name}<|constrain|>json{rest}",
        f"<|channel|>commentary to={name} json{rest}",
        f" to={name}<|channel|>commentary <|constrain|>json{rest}",
        f" to={name}<|channel|>commentary json{rest}",
    ]


NEXT = "<|end|><|start|>assistant"
THOUGHT = f"<|channel|>analysis<|message|>I <b>think</b> {{\n{NEXT}"
REMARK = f"<|channel|>commentary<|message|>Plan: look{NEXT}"
ANSWER = "<|channel|>final<|message|>Hi {there}<|return|>"
RAW = "<|channel|>commentary to=functions.apply_patch<|message|>*** a\n{<|call|>"


def test_nothing_is_constrained_unless_something_is_asked_for() -> None:
    for tools in (ToolSet(), ToolSet((LOOK_UP, PATCH)), choose("none")):
        assert guide_of(tools) is None
    opening = form().opening(Brief())
    assert opening.ids == form().opening(Brief(tools=choose("required"))).ids
    assert opening.forced == ""


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tools", "text", "accepted", "refused"),
    [
        (
            choose("required", "get_weather"), None,
            [*calls("functions.get_weather", ROME), THOUGHT + calls("functions.get_weather", ROME)[0],
             THOUGHT + REMARK + THOUGHT + calls("functions.get_weather", '{"city":"Rome"}')[3]],
            ["", ANSWER, THOUGHT + ANSWER, *calls("functions.get_weather", "{}"), *calls("wiki.look_up", "{}"), RAW,
             calls("functions.get_weather", '{"city":  "Rome"}')[0], THOUGHT.removesuffix(NEXT) + "<|return|>",
             THOUGHT.removesuffix(NEXT) + "<|endoftext|>"],
        ),
        (
            choose("required"), None,
            [*calls("functions.get_weather", ROME), *calls("wiki.look_up", "{}"), RAW, THOUGHT + RAW],
            [ANSWER, *calls("functions.get_weather", '{"city": "Oslo"}'), *calls("functions.nope", "{}"),
             calls("functions.get_weather", ROME)[0].replace("<|call|>", NEXT) + calls("wiki.look_up", "{}")[0]],
        ),
        (
            choose("auto"), None,
            [ANSWER, THOUGHT + ANSWER, REMARK + ANSWER, THOUGHT + REMARK + calls("functions.get_weather", ROME)[0],
             *calls("wiki.look_up", '{"any": "thing"}'), RAW],
            ["Hi<|return|>", calls("functions.get_weather", "{}")[0], calls("wiki.look_up", "[]")[0],
             THOUGHT.replace("analysis", "other") + ANSWER],
        ),
        (
            choose("auto", "wiki.look_up"), None,
            [ANSWER, *calls("wiki.look_up", "{}")],
            [calls("functions.get_weather", ROME)[0], RAW],
        ),
        (
            ToolSet(), SCHEMA,
            [f"{THOUGHT}<|channel|>final{mark}<|message|>{ROME}<|return|>"
             for mark in ("", " json", " <|constrain|>json", "<|constrain|>json")],
            [ANSWER, "<|channel|>final<|message|>{}<|return|>",
             REMARK + f"<|channel|>final<|message|>{ROME}<|return|>"],
        ),
        (
            choose("auto"), SCHEMA,
            [f"{THOUGHT}<|channel|>final<|message|>{ROME}<|return|>", *calls("functions.get_weather", ROME)],
            [ANSWER, "<|channel|>final<|message|>{}<|return|>"],
        ),
        (
            ToolSet(), TextFormat("json_object"),
            ['<|channel|>final<|message|>{"a": [1]}<|return|>'],
            ["<|channel|>final<|message|>[]<|return|>"],
        ),
        (
            ToolSet((LINE,)), None,
            [ANSWER, "<|channel|>commentary to=functions.line<|message|>abc;<|call|>"],
            ["<|channel|>commentary to=functions.line<|message|>ABC;<|call|>",
             "<|channel|>commentary to=functions.line<|message|>abc<|call|>"],
        ),
    ],
)  # fmt: skip
def test_choices_hold(tools: ToolSet, text: TextFormat | None, accepted: list[str], refused: list[str]) -> None:
    guide = guide_of(tools, text)
    assert [output for output in accepted if not complete(guide, output)] == []
    assert [output for output in refused if complete(guide, output)] == []


@pytest.mark.vllm
def test_the_end_of_a_message_in_letters_is_text() -> None:
    """For the constraint as for the parser: a message that is ended so goes on."""
    xgrammar = importlib.import_module("xgrammar")
    guide = guide_of(choose("required", "get_weather"))
    assert guide is not None
    matcher = xgrammar.GrammarMatcher(compiler().compile_structural_tag(guide.value))
    tokenizer = form().tokenizer
    control = {name: tokenizer.special(name) for name in CONTROL}
    in_letters = unpack_ids(tokenizer.encode("<|end|><|start|>assistant"))
    start = [control["<|channel|>"], *unpack_ids(tokenizer.encode("analysis")), control["<|message|>"], *in_letters]
    assert all(matcher.accept_token(i) for i in start)
    assert not matcher.accept_token(control["<|channel|>"])
    assert matcher.accept_token(control["<|end|>"])


def test_choice_that_leaves_nothing_is_refused() -> None:
    for tools in (choose("required", "nope"), choose("required", tools=ToolSet())):
        with pytest.raises(ApiError) as caught:
            guide_of(tools)
        assert (caught.value.code, caught.value.param) == ("invalid_value", "tool_choice")


@pytest.mark.parametrize(
    ("tools", "text", "code", "param"),
    [
        (ToolSet(), TextFormat("json_schema", '{"type": "strin"}'), "invalid_json_schema", "text.format.schema"),
        (ToolSet((Tool("function", "f", parameters={"type": "x"}, strict=True),)), TextFormat(),
         "invalid_json_schema", "tools"),
        (ToolSet((Tool("custom", "f", grammar=("lark", "start: (")),)), TextFormat(),
         "invalid_value", "tools[0].format.definition"),
    ],
)  # fmt: skip
def test_broken_schemas_and_grammars_are_refused(tools: ToolSet, text: TextFormat, code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        guide_of(tools, text)
    assert (caught.value.code, caught.value.param) == (code, param)
