"""ChatML: ids equal to the model's own template, output taken apart, control tokens out of reach, choices that hold."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, ReasoningDelta, TextDelta
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    CompactionTrigger,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    InputText,
    Item,
    ItemReference,
    Message,
    Opaque,
    OutputText,
    Reasoning,
    Refusal,
)
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.detokenizer import Detokenizer
from inference.formats.chatml import ChatMLFormat, ChatMLOptions, chatml_format, options_from_template
from inference.formats.format import Brief, Format, Opening
from inference.tokenizer import HubTokenizer, VocabularyError, scripted_tokenizer, unpack_ids
from tests.support.cost import cpu_seconds, ever
from tests.support.vocabulary import CONTROL, MARKUP, reference, write_checkpoint

# SmolLM2-Instruct's template, as published (Apache-2.0).
SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    "You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
# Written for this test after the behaviour of Qwen2.5's template: same output, other text.
QWEN = r"""
{%- set given = messages[0].role == 'system' -%}
{%- set system = messages[0].content if given else 'DEFAULT' -%}
{%- if not given and not tools %}{{ '<|im_start|>system\nDEFAULT<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>system\n' + system }}
{%- if tools %}{{ '\n\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided'
 + ' with function signatures within <tools></tools> XML tags:\n<tools>' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}
{{- '\n</tools>\n\nFor each function call, return a json object with function name and arguments within <tool_call>'
 + '</tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' }}
{%- endif %}{{ '<|im_end|>\n' }}{%- endif %}
{%- for message in messages[(1 if given else 0):] %}
{%- set before = loop.previtem.role if loop.previtem else '' -%}
{%- if message.role == 'tool' %}
{%- if before != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif message.tool_calls %}{{ '<|im_start|>assistant' }}
{%- if message.content %}{{ '\n' + message.content }}{% endif %}
{%- for call in message.tool_calls %}
{{- '\n<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson)
 + '}\n</tool_call>' }}
{%- endfor %}{{ '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".replace("DEFAULT", QWEN_SYSTEM).strip("\n")

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
GET = Tool("function", "get_weather", None, "Weather now", CITY, strict=True)
SEARCH = Tool("function", "search", "docs", None, None)
PATCH = Tool("custom", "apply_patch", None, "Edit files", grammar=("lark", "start: /.+/"))
ALL = ToolSet((GET, SEARCH, PATCH))
NONE = ToolSet()


@functools.cache
def hub(markup: tuple[str, ...] = MARKUP) -> HubTokenizer:
    return HubTokenizer(json.loads(reference(markup).to_str()), "test")


@functools.cache
def formats() -> dict[str, ChatMLFormat]:
    return {
        "smollm2": ChatMLFormat(hub(()), options_from_template(SMOLLM2)),
        "qwen2.5": ChatMLFormat(hub(), options_from_template(QWEN)),
        "qwen3": ChatMLFormat(hub(), ChatMLOptions(thinking=True, keeps_round=True)),
        "scripted": chatml_format(scripted_tokenizer()),
    }


@pytest.fixture(params=["smollm2", "qwen2.5", "qwen3", "scripted"], scope="module")
def form(request: pytest.FixtureRequest) -> ChatMLFormat:
    return formats()[request.param]


def written(form: ChatMLFormat, packed: bytes) -> str:
    return b"".join(map(form.tokenizer.token_bytes, unpack_ids(packed))).decode()


def head(form: ChatMLFormat, instructions: str | None, preamble: str | None, tools: ToolSet) -> bytes:
    return form.head(Brief(instructions, preamble, tools))


def body(form: ChatMLFormat, items: Sequence[Item]) -> bytes:
    return form.body(items, {})


def begin(form: ChatMLFormat, tools: ToolSet = NONE, effort: str | None = None) -> Opening:
    return form.opening(Brief(tools=tools, effort=effort))


def choose(mode: str, *names: str, tools: ToolSet = ALL, parallel: bool = True) -> ToolSet:
    return ToolSet(tools.tools, ToolChoice(mode, names), parallel)


# rendering, against transformers


@functools.cache
def template(name: str) -> Any:
    transformers = importlib.import_module("transformers")
    text, markup = (SMOLLM2, ()) if name == "smollm2" else (QWEN, MARKUP)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=reference(markup), chat_template=text)


# A template's tokenizer would take look-alikes in the text for control tokens, which is the one wanted difference.
plain = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
arguments = st.dictionaries(plain, st.integers() | plain | st.lists(plain, max_size=2), max_size=3)


@st.composite
def conversations(draw: st.DrawFn, with_tools: bool) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for kind in draw(st.lists(st.sampled_from(["user", "system", "assistant", "tools"]), min_size=1, max_size=6)):
        if kind != "tools" or not with_tools:
            messages.append({"role": "user" if kind == "tools" else kind, "content": draw(plain)})
            continue
        calls = draw(st.lists(arguments, min_size=1, max_size=3))
        functions = [{"function": {"name": "get_weather", "arguments": given}} for given in calls]
        # Items can't tell a message and a call of one turn from two turns, of which the second has no text.
        said = draw(plain) or ("x" if messages and messages[-1]["role"] == "assistant" else "")
        messages.append({"role": "assistant", "content": said, "tool_calls": functions})
        messages.extend({"role": "tool", "content": draw(plain)} for _ in calls)
    return messages


def items_of(messages: Sequence[dict[str, Any]]) -> list[Item]:
    items: list[Item] = []
    for message in messages:
        calls = message.get("tool_calls", ())
        if message["role"] == "tool":
            items.append(FunctionCallOutput("c", message["content"]))
        elif message["content"] or not calls:
            items.append(Message(message["role"], message["content"]))
        for call in calls:
            given = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            items.append(FunctionCall("c", call["function"]["name"], given))
    return items


def prompt(form: ChatMLFormat, messages: list[dict[str, Any]], tools: ToolSet) -> list[int]:
    items = items_of(messages)
    preamble = None
    if isinstance(items[0], Message) and items[0].role == "system":
        preamble = str(items[0].content)
        items = items[1:]
    packed = head(form, None, preamble, tools) + body(form, items) + begin(form, NONE).ids
    return unpack_ids(packed)


@settings(deadline=None)
@given(messages=conversations(with_tools=False))
def test_smollm2_prompts_have_the_ids_of_its_template(messages: list[dict[str, Any]]) -> None:
    expected = template("smollm2").apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prompt(formats()["smollm2"], messages, NONE) == expected


@settings(deadline=None)
@given(messages=conversations(with_tools=True), offered=st.booleans())
def test_qwen_prompts_have_the_ids_of_its_template(messages: list[dict[str, Any]], offered: bool) -> None:
    shown = [{"type": "function", "function": {"name": "get_weather", "description": "Weather now",
              "parameters": GET.parameters}}] if offered else None  # fmt: skip
    expected = template("qwen").apply_chat_template(messages, tools=shown, add_generation_prompt=True)["input_ids"]
    assert prompt(formats()["qwen2.5"], messages, ToolSet((GET,)) if offered else NONE) == expected


client_text = st.lists(st.sampled_from((*CONTROL, *MARKUP, "<|im_", "start|>")) | st.text(max_size=5), max_size=5).map(
    "".join
)


@settings(deadline=None)
@given(texts=st.lists(client_text, min_size=9, max_size=9))
def test_client_text_adds_no_control_token(form: ChatMLFormat, texts: list[str]) -> None:
    def ids(texts: list[str]) -> list[int]:
        tools = ToolSet((Tool("function", "f" + texts[6], "n", texts[7], {"type": "object", "title": texts[8]}),))
        items: list[Item] = [
            Message("user", texts[0]),
            Message("assistant", (OutputText("x" + texts[1]), Refusal(texts[2]))),
            FunctionCall("c", "f" + texts[6], json.dumps({"a": texts[3]})),
            FunctionCallOutput("c", (InputText(texts[4]),)),
            Message("developer", texts[5]),
        ]
        return unpack_ids(head(form, texts[7], texts[8], tools) + body(form, items))

    controls = {form.tokenizer.special(name) for name in (*CONTROL, *MARKUP) if form.tokenizer.has_special(name)}
    assert [i for i in ids(texts) if i in controls] == [i for i in ids([""] * 9) if i in controls]


# rendering, by example


def test_head_of_instructions_and_a_leading_system_message() -> None:
    smollm2, qwen3 = formats()["smollm2"], formats()["qwen3"]
    assert written(smollm2, head(smollm2, "A", "B", NONE)) == "<|im_start|>system\nA\n\nB<|im_end|>\n"
    assert written(smollm2, head(smollm2, "", None, NONE)) == "<|im_start|>system\n<|im_end|>\n"
    assert "named SmolLM" in written(smollm2, head(smollm2, None, None, ALL))
    assert head(qwen3, None, None, NONE) == b""
    assert written(qwen3, head(qwen3, None, None, ALL)).startswith("<|im_start|>system\n# Tools\n\nYou may")
    assert written(qwen3, head(qwen3, "A", None, ALL)).startswith("<|im_start|>system\nA\n\n# Tools\n\nYou may")


def test_head_shows_tools_unless_the_choice_is_none(form: ChatMLFormat) -> None:
    shown = written(form, head(form, None, None, ALL))
    assert '{"type": "function", "function": {"name": "docs.search", "parameters": {"type": "object", ' in shown
    assert '"name": "apply_patch", "description": "Edit files\\n\\nThe input must match this lark grammar:' in shown
    patch = next(line for line in shown.split("\n") if "apply_patch" in line)
    assert json.loads(patch)["function"]["description"].endswith(
        '<tool_call>\n{"name": "apply_patch"}\n<input>\n</tool_call>'
    )
    assert "parameters" not in json.loads(patch)["function"]
    assert head(form, None, None, choose("required", "get_weather")) == head(form, None, None, ALL)
    assert head(form, None, None, choose("none")) == head(form, None, None, NONE)


def test_developer_is_system_and_system_messages_stay_in_place(form: ChatMLFormat) -> None:
    items = [Message("user", "a"), Message("developer", "b"), Message("system", "c")]
    roles = ("user\na", "system\nb", "system\nc")
    assert written(form, body(form, items)) == "".join(f"<|im_start|>{role}<|im_end|>\n" for role in roles)


def test_calls_and_outputs_share_turns(form: ChatMLFormat) -> None:
    items: list[Item] = [
        FunctionCall("1", "search", '{"q":1}', namespace="docs"),
        CustomToolCall("2", "apply_patch", 'a"\n'),
        FunctionCallOutput("1", "x"),
        CustomToolCallOutput("2", (InputText("y"), InputText("z"))),
        Message("assistant", "ok"),
        FunctionCall("3", "get_weather", ""),
    ]
    assert written(form, body(form, items)) == (
        '<|im_start|>assistant\n<tool_call>\n{"name": "docs.search", "arguments": {"q":1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "apply_patch"}\na"\n\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\nx\n</tool_response>\n<tool_response>\nyz\n</tool_response><|im_end|>\n"
        '<|im_start|>assistant\nok\n<tool_call>\n{"name": "get_weather", "arguments": {}}\n</tool_call><|im_end|>\n'
    )


def test_items_without_a_form_give_nothing(form: ChatMLFormat) -> None:
    items: list[Item] = [
        ItemReference("x"),
        CompactionTrigger(),
        Opaque("web_search_call", {}),
        Reasoning(encrypted_content="x"),
    ]
    assert body(form, items) == b""


@pytest.mark.parametrize("part", [InputImage(image_url="data:x"), InputFile(file_id="f")])
def test_images_and_files_are_refused(form: ChatMLFormat, part: Any) -> None:
    items: list[Item] = [Message("user", (InputText("a"), part)), FunctionCallOutput("c", (part,))]
    for item in items:
        with pytest.raises(ApiError, match=part.type) as caught:
            body(form, [item])
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "input")


def test_an_input_that_the_raw_form_could_not_carry_is_json(form: ChatMLFormat) -> None:
    call = CustomToolCall("c", "apply_patch", "a\n</tool_call>")
    assert '{"name": "apply_patch", "arguments": {"input": "a\\n</tool_call>"}}' in written(form, body(form, [call]))


def test_what_was_spoken_becomes_a_whole_turn(form: ChatMLFormat) -> None:
    end = form.tokenizer.special("<|im_end|>")
    kept, behind = form.spoken([5, end])
    assert (kept, written(form, behind)) == (2, "\n")
    for cut_off in ([], [5]):
        kept, behind = form.spoken(cut_off)
        assert (kept, written(form, behind)) == (len(cut_off), "<|im_end|>\n")
    assert form.stop_ids[0] == end


def test_a_sampled_turn_equals_its_rendering() -> None:
    """What generation leaves in the context is what the template would have put there."""
    form = formats()["qwen2.5"]
    end = form.tokenizer.special("<|im_end|>")
    sampled = [*unpack_ids(form.tokenizer.encode("All well.")), end]
    packed = begin(form, NONE).ids
    kept, behind = form.spoken(sampled)
    assert unpack_ids(packed) + sampled[:kept] + unpack_ids(behind) == unpack_ids(
        body(form, [Message("assistant", "All well.")])
    )


# parsing


def merged(deltas: list[Delta]) -> list[Delta]:
    out: list[Any] = []
    delta: Any
    for delta in deltas:
        if out and type(out[-1]) is type(delta) and isinstance(delta, TextDelta | ReasoningDelta | CallDelta):
            out[-1] = type(delta)(out[-1].text + delta.text)
        else:
            out.append(delta)
    return out


def sampled_ids(form: ChatMLFormat, text: str) -> list[int]:
    """Ids as a model would sample them: markup as tokens where the vocabulary has them."""
    writer = form._writer().markup(text)
    return [*unpack_ids(writer.ids()), form.tokenizer.special("<|im_end|>")]


def parse(form: ChatMLFormat, portions: list[list[int]], tools: ToolSet = ALL, forced: str = "") -> list[Delta]:
    parser = form.parser(tools, Opening(b"", forced))
    out: list[Delta] = []
    for deltas in [*(parser.feed(portion) for portion in portions), parser.finish()]:
        assert merged(deltas) == deltas
        out += deltas
    return merged(out)


def each_way(form: ChatMLFormat, text: str, tools: ToolSet = ALL, forced: str = "") -> list[Delta]:
    ids = sampled_ids(form, text)
    whole = parse(form, [ids], tools, forced)
    assert parse(form, [[i] for i in ids], tools, forced) == whole
    letters = [i for char in text for i in unpack_ids(form.tokenizer.encode(char))]
    assert parse(form, [[i] for i in letters], tools, forced) == whole  # markup in letters is markup too
    return whole


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CALLED = [CallStart("function", "get_weather"), CallDelta('{"city": "Rome"}'), CallEnd()]


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("Hello <b>world</b>.\n\n", [TextDelta("Hello <b>world</b>.\n\n")]),
        ("\n \n", [TextDelta("\n \n")]),
        ("\n\nHi", [TextDelta("\n\nHi")]),
        (CALL, CALLED),
        ("\n\n" + CALL + "\n", CALLED),
        ("Let me see.\n" + CALL + "\n" + CALL + " \n", [TextDelta("Let me see."), *CALLED, *CALLED]),
        ("a\n\n" + CALL + "\nb\n" + CALL, [TextDelta("a\n"), *CALLED, TextDelta("b"), *CALLED]),
        ("The <tool_call> tag,\n<tool_call>", [TextDelta("The <tool_call> tag,\n<tool_call>")]),
        ("\n<tool_call> x", [TextDelta("\n<tool_call> x")]),
        ("<tool_call>{" + CALL, [TextDelta("<tool_call>{"), *CALLED]),
        ('a\n<tool_call>\n{"name": 5}\n</tool_call>', [TextDelta('a\n<tool_call>\n{"name": 5}\n</tool_call>')]),
        ("x <tool_cal", [TextDelta("x <tool_cal")]),
        ("x\n<", [TextDelta("x\n<")]),
        (CALL + "\n<tool", [*CALLED, TextDelta("<tool")]),
        (CALL.removesuffix("}\n</tool_call>"), CALLED[:2]),
    ],
)
def test_text_and_calls(form: ChatMLFormat, text: str, deltas: list[Delta]) -> None:
    assert each_way(form, text) == deltas


@pytest.mark.parametrize("tools", [NONE, choose("none")])
def test_without_tools_markup_is_text(form: ChatMLFormat, tools: ToolSet) -> None:
    assert each_way(form, "\n" + CALL + "\n", tools) == [TextDelta("\n" + CALL + "\n")]


@pytest.mark.parametrize(
    ("text", "deltas"),
    [
        ("<think>\nhm <b>\n\nso\n</think>\n\nYes", [ReasoningDelta("hm <b>\n\nso"), TextDelta("Yes")]),
        ("<think>\n\n</think>\n\nYes", [TextDelta("Yes")]),
        ("\n<think>a" + CALL + "</think>" + CALL, [ReasoningDelta("a" + CALL), *CALLED]),
        ("<think>a</thin", [ReasoningDelta("a</thin")]),
        ("Yes <think>a</think>b", [TextDelta("Yes "), ReasoningDelta("a"), TextDelta("b")]),
        ("a</think>b", [TextDelta("a</think>b")]),
    ],
)
def test_reasoning(text: str, deltas: list[Delta]) -> None:
    assert each_way(formats()["qwen3"], text) == deltas
    assert merged(each_way(formats()["qwen2.5"], text, NONE)) == [TextDelta(text)]


def test_reasoning_tokens_are_counted() -> None:
    form = formats()["qwen3"]
    parser = form.parser(NONE, Opening(b""))
    ids = sampled_ids(form, "<think>one two</think>three")
    inside = ids.index(form.tokenizer.special("</think>")) + 1
    for i in ids:
        parser.feed([i])
    assert parser.reasoning_tokens == inside
    at_once = form.parser(NONE, Opening(b""))
    at_once.feed(ids)
    assert at_once.reasoning_tokens == inside
    assert each_way(form, "hm</think>Yes", NONE, forced="<think>\n") == [ReasoningDelta("hm"), TextDelta("Yes")]


def test_unfinished_code_point_comes_out_at_the_end(form: ChatMLFormat) -> None:
    ids = unpack_ids(form.tokenizer.encode("x\U0010fffd"))
    assert parse(form, [ids[:-1]])[-1] in (TextDelta("x\ufffd"), TextDelta("x"))


def test_characters_in_pieces_stay_whole(form: ChatMLFormat) -> None:
    """An emoji, a hangul syllable and an accent, a token for each of their bytes, in every kind of output."""
    of_byte = {form.tokenizer.token_bytes(i): i for i in range(600)}
    text = "x😀한é"
    quoted = json.dumps(text, ensure_ascii=False)
    outputs = {
        text: TextDelta(text),
        f'<tool_call>{{"name": "get_weather", "arguments": {{"k": {quoted}}}}}</tool_call>': CallDelta(
            f'{{"k": {quoted}}}'
        ),
        f'<tool_call>{{"name": "apply_patch", "arguments": {{"input": {quoted}}}}}</tool_call>': CallDelta(text),
        f'<tool_call>{{"name": "apply_patch"}}\n{text}\n</tool_call>': CallDelta(text),
    }
    if form.options.thinking:
        outputs[f"<think>{text}</think>"] = ReasoningDelta(text)
    for output, expected in outputs.items():
        ids = [of_byte[bytes([byte])] for byte in output.encode()]
        for portions in ([ids], [[i] for i in ids], [ids[i : i + 3] for i in range(0, len(ids), 3)]):
            assert expected in parse(form, portions)


CHUNKS = (
    '<tool_call>\n{"name": "apply_patch"}\n', *MARKUP, CALL,
    "\n", " ", "<", "{", '{"name": ', '"apply_patch"', ', "arguments": ', '{"input": "', "\\n", '"',
    "}", "}}", "text", "<think>\n", "\n</think>\n\n", "😀",
)  # fmt: skip
chunks = st.lists(st.sampled_from(CHUNKS), max_size=12).map("".join)


@settings(deadline=None, max_examples=200)
@given(text=chunks, cuts=st.lists(st.integers(0, 99), max_size=5))
def test_portions_make_no_difference(form: ChatMLFormat, text: str, cuts: list[int]) -> None:
    ids = sampled_ids(form, text)
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    whole = parse(form, [ids])
    assert parse(form, [[i] for i in ids]) == whole
    assert parse(form, [ids[a:b] for a, b in pairwise(edges)]) == whole


patches = st.text(max_size=20) | st.lists(st.sampled_from([*MARKUP, "\n", "}", " ", "x", "\r"]), max_size=6).map(
    "".join
)
spoken = st.text(max_size=20).map(str.strip).filter(lambda text: "<" not in text)


@settings(deadline=None)
@given(said=spoken, given_arguments=st.lists(arguments, min_size=1, max_size=3), patch=patches)
def test_rendered_calls_are_parsed_back(
    form: ChatMLFormat, said: str, given_arguments: list[dict[str, Any]], patch: str
) -> None:
    calls = [FunctionCall("c", "search", json.dumps(given), namespace="docs") for given in given_arguments]
    items: list[Item] = [
        *([Message("assistant", said)] if said else []),
        *calls,
        CustomToolCall("p", "apply_patch", patch),
    ]
    text = written(form, body(form, items)).removeprefix("<|im_start|>assistant\n").removesuffix("<|im_end|>\n")
    expected: list[Delta] = [TextDelta(said)] if said else []
    for call in calls:
        expected += [CallStart("function", "search", "docs"), CallDelta(call.arguments), CallEnd()]
    expected += [CallStart("custom", "apply_patch"), *([CallDelta(patch)] if patch else []), CallEnd()]
    assert _normal(form, each_way(form, text)) == _normal(form, expected)


def _normal(form: ChatMLFormat, deltas: list[Delta]) -> list[Delta]:
    """A Qwen-like vocabulary normalizes text to NFC, so that is what comes back."""
    if not isinstance(form.tokenizer, HubTokenizer):
        return deltas
    normalize = reference().normalizer.normalize_str
    return [type(d)(normalize(d.text)) if isinstance(d, TextDelta | CallDelta) else d for d in deltas]


def test_plain_text_is_cheap(form: ChatMLFormat) -> None:
    """Looking for markup costs a few times what making text of the ids does."""
    ids = unpack_ids(form.tokenizer.encode("The quick brown fox jumps over the lazy dog, twelve times. " * 300))

    def reading() -> float:
        parser = form.parser(ALL, Opening(b""))
        return cpu_seconds(lambda: [parser.feed([i]) for i in ids])

    def making() -> float:
        detokenizer = Detokenizer(form.tokenizer)
        return cpu_seconds(lambda: [detokenizer.step(i) for i in ids])

    assert ever(lambda: reading() < 30 * making())  # 8 on a quiet machine


# openings and guides


def test_plain_opening(form: ChatMLFormat) -> None:
    for tools in (NONE, ToolSet((SEARCH, Tool("custom", "note"))), choose("none")):
        opening = begin(form, tools)
        assert (written(form, opening.ids), opening.forced, opening.guide) == ("<|im_start|>assistant\n", "", None)


def test_named_function_is_forced(form: ChatMLFormat) -> None:
    opening = begin(form, choose("required", "docs.search"))
    assert opening.forced == '<tool_call>\n{"name": "docs.search", "arguments":'
    assert written(form, opening.ids).endswith(opening.forced)
    thought = "<think>\n\n</think>\n\n" if form.options.thinking else ""
    assert written(form, opening.ids) == "<|im_start|>assistant\n" + thought + opening.forced
    deltas = each_way(form, ' {"q": 1}}\n</tool_call>', choose("required", "docs.search"), opening.forced)
    assert deltas == [CallStart("function", "search", "docs"), CallDelta('{"q": 1}'), CallEnd()]


def test_a_named_freeform_tool_is_forced_in_its_raw_form(form: ChatMLFormat) -> None:
    opening = begin(form, choose("required", "apply_patch"))
    assert opening.forced == '<tool_call>\n{"name": "apply_patch"}\n'
    assert written(form, opening.ids).endswith(opening.forced)
    deltas = each_way(form, 'a "b"\n\n</tool_call>', choose("required", "apply_patch"), opening.forced)
    assert deltas == [CallStart("custom", "apply_patch"), CallDelta('a "b"\n'), CallEnd()]


def test_effort_none_skips_thinking_where_there_is_any() -> None:
    for name, thought in (("qwen3", "<think>\n\n</think>\n\n"), ("qwen2.5", "")):
        form = formats()[name]
        assert written(form, begin(form, NONE, "none").ids) == "<|im_start|>assistant\n" + thought
        assert written(form, begin(form, NONE, "high").ids) == "<|im_start|>assistant\n"
    always = ChatMLFormat(hub(), ChatMLOptions(thinking=True, opens_thinking=True))
    opening = begin(always)
    assert (written(always, opening.ids), opening.forced) == ("<|im_start|>assistant\n<think>\n", "<think>\n")


def test_choice_that_leaves_nothing_is_refused(form: ChatMLFormat) -> None:
    for tools in (choose("required", "nope"), choose("required", tools=NONE)):
        with pytest.raises(ApiError) as caught:
            begin(form, tools)
        assert (caught.value.code, caught.value.param) == ("invalid_value", "tool_choice")


# a checkpoint's options


def test_options_come_from_the_template() -> None:
    assert options_from_template(SMOLLM2) == ChatMLOptions(
        "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    )
    assert options_from_template(QWEN) == ChatMLOptions(QWEN_SYSTEM)
    think = "{{ '<|im_start|>assistant\\n' }}{% if not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    assert options_from_template(think) == ChatMLOptions(thinking=True)
    assert options_from_template(think + "{{ message.reasoning_content }}").keeps_thinking
    rounds = options_from_template(think + "{{ message.reasoning_content }} last_query_index")
    assert rounds == ChatMLOptions(thinking=True, keeps_round=True)
    assert options_from_template("{{ '<|im_start|>assistant\\n<think>\\n' }}").opens_thinking
    quoted = "{{ '<|im_start|>system\\nI\\'m \\\\ here\\n.<|im_end|>\\n' }}"
    assert options_from_template(quoted).default_system == "I'm \\ here\n."
    with pytest.raises(VocabularyError, match="no ChatML"):
        options_from_template("[INST]")


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    form: Format = chatml_format(write_checkpoint(tmp_path / "a", SMOLLM2))
    assert isinstance(form, ChatMLFormat)
    assert form.options.default_system is not None
    folder = write_checkpoint(tmp_path / "b", SMOLLM2)
    (folder / "chat_template.jinja").write_text("{{ '<|im_start|>' }}")
    assert chatml_format(str(folder)).options == ChatMLOptions()
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": QWEN}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chatml_format(folder).options.default_system == QWEN_SYSTEM
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(VocabularyError, match="no chat template"):
        chatml_format(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(VocabularyError, match="can't be read"):
        chatml_format(folder)


def test_the_double_names_what_it_cannot_see() -> None:
    """Open Responses' image-input test wants an answer to an image; only the scripted engine's format does this."""
    chat = ChatMLFormat(scripted_tokenizer(), ChatMLOptions(names_media=True))
    plain = chatml_format(scripted_tokenizer())
    parts = (InputText("What is "), InputImage(image_url="data:,"), InputFile(file_id="f"), InputText("?"))
    assert body(chat, [Message("user", parts)]) == body(plain, [Message("user", "What is [input_image][input_file]?")])
    output = FunctionCallOutput("c", (InputImage(image_url="data:,"),))
    assert body(chat, [output]) == body(plain, [FunctionCallOutput("c", "[input_image]")])
