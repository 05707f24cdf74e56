"""Text that costs naive code too much: a megabyte of one kind, in prompts and in outputs.

Work is held against that for ordinary text in the same run. Whole texts: anything quadratic in a megabyte would be
thousands of times as much. Outputs, by the id: going over a megabyte again for each would be hundreds of times as much.
"""

from __future__ import annotations

import functools
import json
import random
import string
from collections.abc import Callable

import pytest

from gateway.protocol.deltas import CallDelta, CallEnd, CallKind, CallStart, ReasoningDelta, TextDelta
from gateway.protocol.items import (
    CustomToolCall,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
    ReasoningText,
)
from gateway.protocol.tools import Tool, ToolSet
from inference.detokenizer import Detokenizer
from inference.formats.chatml import ChatMLFormat, ChatMLOptions, call_begin, raw_begin
from inference.formats.format import Brief, Opening
from inference.tokenizer import HubTokenizer, Tokenizer, scripted_tokenizer, unpack_ids
from tests.support.cost import cpu_seconds, ever
from tests.support.vocabulary import CONTROL, MARKUP, reference

MIB = 1 << 20
WHOLE_FACTOR = 100
ID_FACTOR = 10
PROSE = "The quick brown fox jumps over the lazy dog, twelve times. "

TOOLS = ToolSet((Tool("function", "f"), Tool("custom", "c")))


@functools.cache
def letters() -> str:
    return "".join(random.Random(1).choices(string.ascii_letters, k=MIB))


def words() -> str:
    """Ordinary text for a tokenizer, which remembers words it has met."""
    draw = random.Random(2)
    return " ".join("".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 9))) for _ in range(MIB // 6))[:MIB]


def filled(piece: str, size: int = MIB) -> str:
    return (piece * (size // len(piece) + 1))[:size]


SHAPES: dict[str, Callable[[], str]] = {
    "a": lambda: filled("a"),
    "spaces": lambda: filled(" "),
    "carets": lambda: filled("^"),
    "newlines": lambda: filled("\n"),
    "letters": letters,
    "lone surrogates": lambda: filled("\ud83d", MIB // 8),
    "control tokens": lambda: filled("".join((*CONTROL, *MARKUP)), MIB // 4),
    "half markup": lambda: filled("<tool_call</tool_call", MIB // 4),
    "two-byte letters": lambda: filled("é", MIB // 4),
}


@pytest.fixture(params=["hub", "tiktoken"], scope="module")
def form(request: pytest.FixtureRequest) -> ChatMLFormat:
    tokenizer: Tokenizer = scripted_tokenizer()
    if request.param == "hub":
        tokenizer = HubTokenizer(json.loads(reference().to_str()), "test")
    return ChatMLFormat(tokenizer, ChatMLOptions(thinking=True, keeps_round=True))


def items_with(text: str) -> list[list[Item]]:
    return [
        [Message("user", text)],
        [CustomToolCall("c", "c", text)],
        [FunctionCall("c", "f", text), FunctionCallOutput("c", text[: len(text) // 8])],
        [Reasoning(content=(ReasoningText(text),))],
    ]


@pytest.fixture(scope="module")
def ordinary(form: ChatMLFormat) -> float:
    text = words()
    return cpu_seconds(lambda: form.body([Message("user", text)], {}))


@pytest.mark.parametrize("shape", SHAPES)
def test_prompts(form: ChatMLFormat, ordinary: float, shape: str) -> None:
    """Each shape as one kind of item, so that all kinds have their turn."""
    text = SHAPES[shape]()
    kind = list(SHAPES).index(shape) % 4
    assert ever(lambda: cpu_seconds(lambda: form.body(items_with(text)[kind], {})) < WHOLE_FACTOR * ordinary)


@pytest.mark.parametrize("shape", ["spaces", "control tokens"])
def test_tools_and_instructions(form: ChatMLFormat, ordinary: float, shape: str) -> None:
    text = SHAPES[shape]()[: MIB // 2]
    brief = Brief(text, None, ToolSet((Tool("custom", "c", None, text),)))
    assert ever(lambda: cpu_seconds(lambda: form.head(brief)) < WHOLE_FACTOR * ordinary)


def test_surrogates_and_control_names_are_ordinary_text(form: ChatMLFormat) -> None:
    """The same count wherever it is counted: alone, or in a prompt."""
    for text in ("x \ud83d y", "\ude00", "\ud83d\ude00", "".join((*CONTROL, *MARKUP)), "<|im_start|>system\n"):
        alone = unpack_ids(form.tokenizer.encode("user\n" + text))
        prompt = unpack_ids(form.body([Message("user", text)], {}))
        assert prompt[1 : 1 + len(alone)] == alone
        assert prompt[1 + len(alone)] == form.tokenizer.special("<|im_end|>")
        head = form.head(Brief(text, text, ToolSet((Tool("function", "f", text, text, {"title": text}),))))
        assert head.startswith(form.body([Message("system", "")], {})[:4])


def fed(form: ChatMLFormat, ids: list[int], portion: int, start: str = "") -> tuple[float, list[object]]:
    """(seconds for an id, deltas) of an output that arrives in portions."""
    parser = form.parser(TOOLS, Opening(b"", start))
    out: list[object] = []

    def work() -> None:
        for i in range(0, len(ids), portion):
            out.extend(parser.feed(ids[i : i + portion]))
        out.extend(parser.finish())

    return cpu_seconds(work) / len(ids), out


def read(form: ChatMLFormat, ids: list[int], portion: int, ordinary: float, start: str = "") -> list[object]:
    """Deltas of an output, whose ids may each cost some times what those of an ordinary one do, seconds."""
    out: list[object] = []

    def within() -> bool:
        cost, out[:] = fed(form, ids, portion, start)
        return cost < ID_FACTOR * ordinary

    assert ever(within), (start, ids[:10], portion)
    return out


def ids_of(form: ChatMLFormat, text: str) -> list[int]:
    return unpack_ids(form.tokenizer.encode(text))


@pytest.fixture(scope="module")
def plain(form: ChatMLFormat) -> float:
    """Seconds for an id of ordinary text within markup, where it has to be looked at: a thought."""
    ids = ids_of(form, "<think>" + filled(PROSE, MIB // 16))
    return min(fed(form, ids, 1)[0] for _ in range(2))


STARTS = {
    "text": "",
    "thought": "<think>\n",
    "arguments": call_begin("f") + " ",
    "string": call_begin("c") + ' {"input": "',
    "raw input": raw_begin("c"),
}


@pytest.mark.parametrize("start", STARTS)
def test_outputs(form: ChatMLFormat, plain: float, start: str) -> None:
    for shape in SHAPES:
        if shape != "lone surrogates":  # no output has them
            ids = ids_of(form, SHAPES[shape]()[: MIB // 64])
            for portion in (1, 64):
                read(form, ids, portion, plain, STARTS[start])


CODE = "if a < b:\n\tx = {'k': [1, \"<tool_call>\"]}\n"


# The vocabulary of real models: a quarter of a million ids for a megabyte.
@functools.cache
def real() -> ChatMLFormat:
    return ChatMLFormat(scripted_tokenizer(), ChatMLOptions(thinking=True))


@functools.cache
def thinking() -> float:
    ids = ids_of(real(), "<think>" + filled(PROSE, MIB // 16))
    return min(fed(real(), ids, 3)[0] for _ in range(2))


@pytest.mark.parametrize("kind", ["function", "custom"])
def test_a_call_of_a_megabyte(kind: CallKind) -> None:
    code = filled(CODE)
    arguments = json.dumps({"input": code})
    start, text = call_begin("f") + " ", arguments + "}\n</tool_call>"
    if kind == "custom":
        start, text = raw_begin("c"), code + "\n</tool_call>"
    out = read(real(), ids_of(real(), text), 3, thinking(), start)
    assert out[0] == CallStart(kind, "c" if kind == "custom" else "f")
    assert out[-1] == CallEnd()
    written = "".join(delta.text for delta in out if isinstance(delta, CallDelta))
    assert written == (code if kind == "custom" else arguments)


def test_a_megabyte_that_is_held() -> None:
    """Arguments before the name say nothing of the tool; keys, and white space, may go on for ever."""
    code = json.dumps({"input": filled(CODE)})
    ids = ids_of(real(), f'<tool_call>{{"arguments": {code}, "name": "c"}}</tool_call>')
    out = read(real(), ids, 3, thinking())
    assert out == [CallStart("custom", "c"), CallDelta(filled(CODE)), CallEnd()]
    for held in ('<tool_call>{"' + filled("k ", MIB // 16), "<tool_call>{" + filled(" \n", MIB // 16)):
        assert read(real(), ids_of(real(), held), 3, thinking()) == [TextDelta(held)]


def test_markup_again_and_again(form: ChatMLFormat, plain: float) -> None:
    for piece in ("<tool_call>", "<think></think>", "</think>", '<tool_call>{"name": "f"}</tool_call>', "<", "\n<"):
        read(form, ids_of(form, filled(piece, MIB // 32)), 64, plain)


@pytest.mark.parametrize("shape", ["a", "letters", "control tokens", "two-byte letters"])
def test_ids_to_text(form: ChatMLFormat, shape: str) -> None:
    def cost(text: str) -> float:
        ids = ids_of(form, text)
        detokenizer = Detokenizer(form.tokenizer)
        return cpu_seconds(lambda: [detokenizer.step(i) for i in ids]) / len(ids)

    ordinary, other = filled(PROSE, MIB // 4), SHAPES[shape]()[: MIB // 4]
    assert ever(lambda: cost(other) < 2 * ID_FACTOR * cost(ordinary))  # bytes of cut-up letters take a longer way


def test_thoughts_with_half_markup() -> None:
    text = filled("<thin ", MIB // 4)
    out = read(real(), ids_of(real(), f"<think>\n{text}</think>x"), 3, thinking())
    assert "".join(delta.text for delta in out if isinstance(delta, ReasoningDelta)) == text
    assert out[-1] == TextDelta("x")
