"""Llama 3: ids equal to the model's own template, control tokens out of reach, choices that hold."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart
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
    ReasoningText,
    Refusal,
)
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.engine import Guide
from inference.formats.format import Brief, Format, Opening
from inference.formats.llama3 import Llama3Format, Llama3Options, llama3_format, options_from_template
from inference.tokenizer import HubTokenizer, VocabularyError, unpack_ids
from tests.support.llama3 import CONTROL, LLAMA30, LLAMA31, reference, write_checkpoint

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
GET = Tool("function", "get_weather", None, "Weather now", CITY, strict=True)
SEARCH = Tool("function", "search", "docs")
PATCH = Tool("custom", "apply_patch", None, "Edit files")
ALL = ToolSet((GET, SEARCH, PATCH))
NONE = ToolSet()
TEMPLATES = {"3.0": LLAMA30, "3.1": LLAMA31}
SHOWN = [{"type": "function", "function": {"name": "get_weather", "description": "Weather now", "parameters": CITY}}]
INTRO = (
    "You have access to the following functions. To call a function, please respond with JSON for a function call."
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and its value}.'
    "Do not use variables.\n\n"
)
DATES = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"


@functools.cache
def hub() -> HubTokenizer:
    return HubTokenizer(json.loads(reference().to_str()), "test")


@functools.cache
def formats() -> dict[str, Llama3Format]:
    return {name: Llama3Format(hub(), options_from_template(text)) for name, text in TEMPLATES.items()}


@pytest.fixture(params=["3.0", "3.1"], scope="module")
def form(request: pytest.FixtureRequest) -> Llama3Format:
    return formats()[request.param]


def written(packed: bytes) -> str:
    return b"".join(map(hub().token_bytes, unpack_ids(packed))).decode()


def turn(role: str, text: str) -> str:
    return f"<|start_header_id|>{role}<|end_header_id|>\n\n{text}<|eot_id|>"


def choose(mode: str, *names: str, tools: ToolSet = ALL, parallel: bool = True) -> ToolSet:
    return ToolSet(tools.tools, ToolChoice(mode, names), parallel)


def opening(tools: ToolSet, text: TextFormat | None = None) -> Opening:
    return formats()["3.1"].opening(Brief(tools=tools, text=text or TextFormat()))


# rendering, against transformers


@functools.cache
def template(name: str) -> Any:
    transformers = importlib.import_module("transformers")
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=reference(), bos_token=CONTROL[0], chat_template=TEMPLATES[name]
    )


# A template's tokenizer would take look-alikes in the text for control tokens, which is the one wanted difference.
plain = st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20)
arguments = st.dictionaries(plain, st.integers() | plain | st.lists(plain, max_size=2), max_size=3)


@st.composite
def conversations(draw: st.DrawFn, with_tools: bool) -> list[dict[str, Any]]:
    """A call is followed by its output, as the template shows one call a message."""
    messages: list[dict[str, Any]] = []
    for kind in draw(st.lists(st.sampled_from(["user", "system", "assistant", "call"]), min_size=1, max_size=6)):
        if kind != "call" or not with_tools:
            messages.append({"role": "user" if kind == "call" else kind, "content": draw(plain)})
            continue
        function = {"name": "get_weather", "arguments": draw(arguments)}
        messages.append({"role": "assistant", "content": "", "tool_calls": [{"function": function}]})
        messages.append({"role": "tool", "content": draw(plain)})
    return messages


def items_of(messages: Sequence[dict[str, Any]]) -> list[Item]:
    items: list[Item] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(FunctionCallOutput("c", message["content"]))
        elif calls := message.get("tool_calls"):
            given = json.dumps(calls[0]["function"]["arguments"], ensure_ascii=False)
            items.append(FunctionCall("c", calls[0]["function"]["name"], given))
        else:
            items.append(Message(message["role"], message["content"]))
    return items


def prompt(form: Llama3Format, messages: list[dict[str, Any]], tools: ToolSet) -> list[int]:
    items = items_of(messages)
    preamble = None
    if isinstance(items[0], Message) and items[0].role == "system":
        preamble = str(items[0].content)
        items = items[1:]
    brief = Brief(preamble=preamble, tools=tools)
    return unpack_ids(form.head(brief) + form.body(items, {}) + form.opening(Brief()).ids)


@settings(deadline=None, max_examples=60)
@given(messages=conversations(with_tools=False))
def test_prompts_without_tools_have_the_ids_of_the_template(form: Llama3Format, messages: list[dict[str, Any]]) -> None:
    name = "3.0" if form.options.knowledge_date is None else "3.1"
    expected = template(name).apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert prompt(form, messages, NONE) == expected


@settings(deadline=None, max_examples=60)
@given(messages=conversations(with_tools=True), offered=st.booleans())
def test_prompts_with_tools_have_the_ids_of_the_template(messages: list[dict[str, Any]], offered: bool) -> None:
    expected = template("3.1").apply_chat_template(
        messages, tools=SHOWN if offered else None, add_generation_prompt=True, tools_in_user_message=False
    )["input_ids"]
    assert prompt(formats()["3.1"], messages, ToolSet((GET,)) if offered else NONE) == expected


@settings(deadline=None, max_examples=60)
@given(messages=conversations(with_tools=True), data=st.data())
def test_a_body_grows_by_its_parts(messages: list[dict[str, Any]], data: st.DataObject) -> None:
    form, items = formats()["3.1"], items_of(messages)
    cut = data.draw(st.integers(0, len(items)))
    assert form.body(items[:cut], {}) + form.body(items[cut:], {}) == form.body(items, {})


client_text = st.lists(st.sampled_from((*CONTROL, "<|start_", "header_id|>")) | st.text(max_size=5), max_size=5).map(
    "".join
)


@settings(deadline=None, max_examples=60)
@given(texts=st.lists(client_text, min_size=9, max_size=9))
def test_client_text_adds_no_control_token(form: Llama3Format, texts: list[str]) -> None:
    def ids(texts: list[str]) -> list[int]:
        tools = ToolSet((Tool("function", "f" + texts[6], "n", texts[7], {"type": "object", "title": texts[8]}),))
        items: list[Item] = [
            Message("user", texts[0]),
            Message("assistant", (OutputText(texts[1]), Refusal(texts[2]))),
            FunctionCall("c", "f" + texts[6], json.dumps({"a": texts[3]})),
            FunctionCallOutput("c", (InputText(texts[4]),)),
            Message("developer", texts[5]),
        ]
        brief = Brief(texts[7], texts[8], ToolSet(tools.tools, ToolChoice("required")))
        return unpack_ids(form.head(brief) + form.body(items, {}) + form.opening(brief).ids)

    controls = {hub().special(name) for name in CONTROL}
    assert [i for i in ids(texts) if i in controls] == [i for i in ids([""] * 9) if i in controls]


# rendering, by example


def test_a_conversation_as_published() -> None:
    """An example of Meta's page on prompt formats (Llama 3.1), with the dates of the template."""
    form = formats()["3.1"]
    asked = Message("user", "Answer who are you in the form of jeopardy?")
    brief = Brief(preamble="You are a helpful assistant")
    packed = form.head(brief) + form.body([asked], {}) + form.opening(brief).ids
    assert written(packed) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
        "You are a helpful assistant<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n"
        "Answer who are you in the form of jeopardy?<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )


def test_heads() -> None:
    old, new = formats()["3.0"], formats()["3.1"]
    assert written(old.head(Brief())) == "<|begin_of_text|>"
    assert written(new.head(Brief())) == "<|begin_of_text|>" + turn("system", DATES)
    both = Brief(" Be brief.\n", "\nBe kind. ")
    assert written(old.head(both)) == "<|begin_of_text|>" + turn("system", "Be brief.\n\nBe kind.")
    assert written(new.head(both)) == "<|begin_of_text|>" + turn("system", DATES + "Be brief.\n\nBe kind.")
    tool = json.dumps(SHOWN[0], indent=4)
    offered = Brief("Be brief.", tools=ToolSet((GET,)))
    assert written(old.head(offered)) == "<|begin_of_text|>" + turn("system", f"{INTRO}{tool}\n\nBe brief.")
    shown = f"Environment: ipython\n{DATES}{INTRO}{tool}\n\nBe brief."
    assert written(new.head(offered)) == "<|begin_of_text|>" + turn("system", shown)


def test_what_must_be_called_is_no_part_of_the_head(form: Llama3Format) -> None:
    heads = [form.head(Brief(tools=tools)) for tools in (ALL, choose("required"), choose("required", "docs.search"))]
    assert heads[0] == heads[1] == heads[2]
    assert form.head(Brief(tools=choose("none"))) == form.head(Brief())


def test_freeform_tools_are_functions_with_an_input(form: Llama3Format) -> None:
    head = written(form.head(Brief(tools=ToolSet((Tool("custom", "p", "ns", grammar=("regex", "a+")),)))))
    start = head.index('{\n    "type"')
    function = json.JSONDecoder().raw_decode(head[start:])[0]["function"]
    assert (function["name"], function["parameters"]["required"]) == ("ns.p", ["input"])
    assert "regex grammar:\na+" in function["description"]


def test_calls_of_a_turn_share_a_message(form: Llama3Format) -> None:
    items: list[Item] = [
        Message("user", "Go"),
        Reasoning(content=(ReasoningText("hm"),)),
        Message("assistant", "Let me see. "),
        FunctionCall("1", "get_weather", ' {"city":"Rome"} '),
        Reasoning(content=(ReasoningText("hm"),)),
        CustomToolCall("2", "apply_patch", 'a "b"\n'),
        FunctionCall("3", "search", "", namespace="docs"),
        FunctionCallOutput("1", '25 °C "now"\n'),
        CustomToolCallOutput("2", (InputText("ok"), InputText("!"))),
        FunctionCallOutput("3", ""),
    ]
    calls = (
        '{"name": "get_weather", "parameters": {"city":"Rome"}}; '
        '{"name": "apply_patch", "parameters": {"input": "a \\"b\\"\\n"}}; {"name": "docs.search", "parameters": {}}'
    )
    assert written(form.body(items, {})) == (
        turn("user", "Go") + turn("assistant", "Let me see.") + turn("assistant", calls)
        + turn("ipython", '"25 °C \\"now\\"\\n"') + turn("ipython", '"ok!"') + turn("ipython", '""')
    )  # fmt: skip


def test_what_has_no_form_gives_nothing(form: Llama3Format) -> None:
    items = [Reasoning(), ItemReference("x"), CompactionTrigger(), Opaque("web_search_call", {})]
    assert form.body(items, {}) == b""
    assert not form.forgets([Reasoning(content=(ReasoningText("hm"),))], [Message("user", "x")])
    assert (form.forgetful, form.appendable) == (False, True)
    said: list[Item] = [Message("user", "x")]
    assert form.whole(Brief("i"), said, {}) == form.head(Brief("i")) + form.body(said, {})


@pytest.mark.parametrize("part", [InputImage(image_url="data:,"), InputFile(file_id="f")])
def test_images_and_files_are_refused(form: Llama3Format, part: InputImage | InputFile) -> None:
    for item in (Message("user", (InputText("a"), part)), FunctionCallOutput("c", (part,))):
        with pytest.raises(ApiError) as caught:
            form.body([item], {})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "input")


def test_spoken(form: Llama3Format) -> None:
    eot, eom, end = (hub().special(f"<|{name}|>") for name in ("eot_id", "eom_id", "end_of_text"))
    assert set(form.stop_ids) == {eot, eom, end}
    closed = [eot]
    for sampled, kept, behind in (
        ([5, eot], 2, []), ([5, eom], 2, []), ([5, end], 1, closed), ([5, 6], 2, closed), ([], 0, closed),
    ):  # fmt: skip
        count, packed = form.spoken(sampled)
        assert (count, unpack_ids(packed)) == (kept, behind)


def test_what_was_spoken_is_what_is_rendered_later(form: Llama3Format) -> None:
    said = 'Rome is warm. {"a": 1}'
    ids = form.opening(Brief()).ids
    sampled = [*unpack_ids(hub().encode(said)), hub().special("<|eot_id|>")]
    assert unpack_ids(ids) + sampled == unpack_ids(form.body([Message("assistant", said)], {}))


# choices and forms of the answer


def test_a_named_function_is_forced(form: Llama3Format) -> None:
    tools = choose("required", "docs.search")
    begun = form.opening(Brief(tools=tools))
    assert begun.forced == '{"name": "docs.search", "parameters":'
    assert written(begun.ids) == "<|start_header_id|>assistant<|end_header_id|>\n\n" + begun.forced
    parser = form.parser(tools, begun)
    assert parser.feed(unpack_ids(hub().encode(' {"q": 1}}'))) + parser.finish() == [
        CallStart("function", "search", "docs"), CallDelta('{"q": 1}'), CallEnd(),
    ]  # fmt: skip


def test_a_free_answer_has_no_guide(form: Llama3Format) -> None:
    for tools in (NONE, choose("none"), ToolSet((SEARCH,))):
        begun = form.opening(Brief(tools=tools))
        assert (written(begun.ids), begun.forced, begun.guide) == (
            "<|start_header_id|>assistant<|end_header_id|>\n\n", "", None,
        )  # fmt: skip


def test_a_choice_that_leaves_nothing_is_refused(form: Llama3Format) -> None:
    for tools in (choose("required", "nope"), choose("required", tools=NONE)):
        with pytest.raises(ApiError) as caught:
            form.opening(Brief(tools=tools))
        assert (caught.value.code, caught.value.param) == ("invalid_value", "tool_choice")


def test_json_formats_are_guided(form: Llama3Format) -> None:
    assert form.opening(Brief(text=TextFormat("json_schema", SCHEMA))).guide == Guide("json", SCHEMA)
    with pytest.raises(ApiError) as caught:
        form.opening(Brief(text=TextFormat("json_schema", '{"type": "strin"}')))
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", "text.format.schema")
    bad = ToolSet((Tool("function", "f", parameters={"type": "x"}, strict=True),))
    with pytest.raises(ApiError) as caught:
        form.opening(Brief(tools=bad))
    assert caught.value.code == "invalid_json_schema"


@functools.cache
def compiler() -> Any:
    xgrammar = importlib.import_module("xgrammar")
    names = [hub().token_bytes(i) for i in range(hub().vocab_size)]
    return xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(names, stop_token_ids=[hub().special("<|eot_id|>")]))


def complete(guide: Guide | None, ids: Sequence[int]) -> bool:
    """Whether the constraint takes exactly these ids, and then allows the model to stop."""
    import xgrammar

    assert guide is not None
    if guide.kind == "structural_tag":
        compiled = compiler().compile_structural_tag(guide.value)
    else:
        compiled = compiler().compile_json_schema(guide.value)
    matcher = xgrammar.GrammarMatcher(compiled)
    return all(matcher.accept_token(i) for i in (*ids, hub().special("<|eot_id|>")))


def ids_of(text: str) -> list[int]:
    """Ids of an output: names of control tokens in it are these tokens."""
    tag = "<|python_tag|>"
    ids: list[int] = []
    for i, piece in enumerate(text.split(tag)):
        ids += [hub().special(tag)] * (i > 0) + unpack_ids(hub().encode(piece))
    return ids


def call(name: str, given: str) -> str:
    return f'{{"name": "{name}", "parameters": {given}}}'


ROME = '{"city": "Rome"}'
SCHEMA = '{"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false}'
FREE = ["", "hi", "\n\nhi", "<b> {}", "<<EOF", 'As JSON: {"name": 1} {"name": "get_weather"}', "a <|b", "é"]
NOT_FREE = ["{", '{"a": 1}', ' {"type": "function"', '\n{"name": "get_weather", "parameters": {}}', "<|python_tag|>{",
            "<<|python_tag|>", "a<|python_tag|>"]  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tools", "accepted", "refused"),
    [
        (
            choose("required", "get_weather"),
            [" " + ROME + "}", ' {"city":"Rome"}}'],
            [" {}}", " " + ROME, ' {"city":  "Rome"}}', "x", " " + ROME + "}; " + call("get_weather", ROME)],
        ),
        (choose("required", "apply_patch"), [' {"input": "a\\n"}}'], [" {}}", ' {"input": 1}}']),
        (
            choose("required"),
            [call("get_weather", ROME), call("get_weather", ROME) + "; " + call("apply_patch", '{"input": ""}')],
            ["", "x", call("get_weather", "{}"), call("nope", "{}"), call("get_weather", ROME) + " x",
             "; ".join([call("docs.search", "{}")] * 17)],
        ),
        (
            choose("required", "get_weather", "docs.search", parallel=False),
            [call("get_weather", ROME), call("docs.search", "{}")],
            [call("apply_patch", '{"input": ""}'), call("docs.search", "{}") + "; " + call("docs.search", "{}")],
        ),
        (
            ALL,
            [*FREE, call("get_weather", ROME), call("docs.search", '{"a": 1}') + "; " + call("get_weather", ROME)],
            [*NOT_FREE, call("get_weather", "{}"), call("get_weather", ROME) + " x", call("nope", "{}")],
        ),
        (
            choose("auto", "docs.search"),
            [*FREE, call("docs.search", '{"any": "thing"}')],
            [*NOT_FREE, call("get_weather", ROME)],
        ),
        (choose("auto", "get_weather"), [*FREE, call("get_weather", ROME)], [*NOT_FREE, call("get_weather", "{}")]),
        (
            choose("auto", parallel=False),
            [*FREE, call("get_weather", ROME)],
            [*NOT_FREE, call("get_weather", ROME) + "; " + call("get_weather", ROME)],
        ),
    ],
)  # fmt: skip
def test_choices_hold(tools: ToolSet, accepted: list[str], refused: list[str]) -> None:
    guide = opening(tools).guide
    assert [text for text in accepted if not complete(guide, ids_of(text))] == []
    assert [text for text in refused if complete(guide, ids_of(text))] == []


@pytest.mark.vllm
@pytest.mark.parametrize("text", FREE)
def test_what_a_guide_takes_for_text_is_text(text: str) -> None:
    """Else a call could slip by the schema of a strict tool."""
    begun = opening(ALL)
    parser = formats()["3.1"].parser(ALL, begun)
    deltas = parser.feed(ids_of(text)) + parser.finish()
    assert not any(isinstance(delta, CallStart) for delta in deltas)


@pytest.mark.vllm
def test_json_text_beside_tools() -> None:
    guide = opening(ALL, TextFormat("json_schema", SCHEMA)).guide
    assert complete(guide, ids_of('{"a": 1}'))
    assert complete(guide, ids_of(call("get_weather", ROME)))
    for text in ('{"a": "x"}', "hello", call("get_weather", "{}")):
        assert not complete(guide, ids_of(text))
    assert complete(opening(NONE, TextFormat("json_schema", SCHEMA)).guide, ids_of('{"a": 1}'))


# a checkpoint's options


def test_options_come_from_the_template() -> None:
    assert options_from_template(LLAMA30) == Llama3Options()
    assert options_from_template(LLAMA31) == Llama3Options("December 2023", "26 Jul 2024", environment=True)
    other = "{% set date_string = '1 May 2025' %}{{ 'Cutting Knowledge Date: March 2025\\n' }}" + LLAMA30
    assert options_from_template(other) == Llama3Options("March 2025", "1 May 2025")
    for text in ("[INST]", "<|im_start|>", "<|start_header_id|>"):
        with pytest.raises(VocabularyError, match="no Llama 3"):
            options_from_template(text)


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    form: Format = llama3_format(write_checkpoint(tmp_path / "a", LLAMA31))
    assert isinstance(form, Llama3Format)
    assert form.options.environment
    assert form.head(Brief("Hi")) == formats()["3.1"].head(Brief("Hi"))
    folder = write_checkpoint(tmp_path / "b", LLAMA31)
    (folder / "chat_template.jinja").write_text(LLAMA30)
    assert llama3_format(str(folder)).options == Llama3Options()
    (folder / "chat_template.jinja").unlink()
    named = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": LLAMA30}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert llama3_format(folder).options == Llama3Options()
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(VocabularyError, match="no chat template"):
        llama3_format(folder)
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(VocabularyError, match="can't be read"):
        llama3_format(folder)


def test_a_vocabulary_of_another_family_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path, LLAMA31)
    data = json.loads((folder / "tokenizer.json").read_bytes())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] != "<|end_header_id|>"]
    (folder / "tokenizer.json").write_text(json.dumps(data))
    with pytest.raises(VocabularyError, match=r"no control token <\|end_header_id\|>"):
        llama3_format(folder)
