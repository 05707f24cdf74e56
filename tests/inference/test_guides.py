"""Constraints: what a request asks for holds token by token in xgrammar, and what can't be is refused before."""

from __future__ import annotations

import functools
import importlib
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart
from gateway.protocol.errors import ApiError
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.engine import Guide
from inference.formats.chatml import ChatMLFormat, ChatMLOptions, raw_begin
from inference.formats.format import Brief, Opening
from inference.formats.guides import CallLayout, output_guide
from inference.tokenizer import HubTokenizer, unpack_ids
from tests.support.vocabulary import MARKUP, reference

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
# The language and the constructs of the grammar that Codex and Copilot send with `apply_patch`; other words.
PATCH_GRAMMAR = r"""
start: head file+ foot
head: "*** Begin Patch" LF
foot: "*** End Patch" LF?

file: added | deleted | updated   // one of three
added: "*** Add File: " path LF new_line+
deleted: "*** Delete File: " path LF
updated: "*** Update File: " path LF moved? hunk?

path: /(.+)/
new_line: "+" /(.*)/ LF -> line

moved: "*** Move to: " path LF
hunk: (place | line)+ at_end?
place: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
at_end: "*** End of File" LF

%import common.LF
"""
# As Codex's code mode has it: a first line for settings, then anything.
SOURCE_GRAMMAR = r"""
start: with_settings | SOURCE
with_settings: SETTINGS NEWLINE SOURCE
SETTINGS: /[ \t]*\/\/ @exec:[^\r\n]*/
NEWLINE: /\r?\n/
SOURCE: /[\s\S]+/
"""
GET = Tool("function", "get_weather", None, "Weather now", CITY, strict=True)
LAX = Tool("function", "lax")
SEARCH = Tool("function", "search", "docs", None, None)
PATCH = Tool("custom", "apply_patch", None, "Edit files", grammar=("lark", PATCH_GRAMMAR))
SOURCE = Tool("custom", "exec", grammar=("lark", SOURCE_GRAMMAR))
DATE = Tool("custom", "date", grammar=("regex", r"^\d{4}-\d{2}-\d{2}$"))
NOTE = Tool("custom", "note")
ALL = ToolSet((GET, SEARCH, NOTE))
NONE = ToolSet()
TEXT = TextFormat()


@functools.cache
def hub() -> HubTokenizer:
    return HubTokenizer(json.loads(reference(MARKUP).to_str()), "test")


FORM = ChatMLFormat(hub(), ChatMLOptions("You are Qwen."))


def begin(tools: ToolSet = NONE, text: TextFormat = TEXT) -> Opening:
    return FORM.opening(Brief(tools=tools, text=text))


def guide(tools: ToolSet = NONE, text: TextFormat = TEXT) -> Guide | None:
    return begin(tools, text).guide


def choose(mode: str, *names: str, tools: ToolSet = ALL, parallel: bool = True) -> ToolSet:
    return ToolSet(tools.tools, ToolChoice(mode, names), parallel)


def test_numbers_beyond_64_bits_in_a_schema() -> None:
    tools = ToolSet((Tool("function", "f", parameters={"maximum": 10**30, "title": "\ud800"}),), ToolChoice("required"))
    found = guide(tools)
    assert found is not None
    assert json.loads(found.value)["type"] == "structural_tag"


SCHEMA = '{"type": "object", "properties": {"a": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}'


def test_json_formats_are_guided() -> None:
    assert guide(NONE, TextFormat("json_schema", SCHEMA)) == Guide("json", SCHEMA)
    assert guide(NONE, TextFormat("json_object")) == Guide("json", '{"type": "object"}')


@pytest.mark.parametrize(
    "schema",
    [
        None, "", "{", "[]", "1", "true", '{"type": "strin"}', '{"type": 5}', '{"type": []}', '{"properties": []}',
        '{"properties": {"a": 5}}', '{"items": {"enum": []}}', '{"anyOf": [{"type": "x"}]}', '{"required": "a"}',
        '{"maxLength": -1}', '{"minimum": "1"}', '{"$ref": "http://x/y"}', '{"$ref": "#/$defs/none"}', '{"pattern": 1}',
        '{"not": 3}', '{"$ref": "#"}', '{"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}',
        '{"minimum": 2, "maximum": 1}', '{"minLength": 2, "maxLength": 1}', '{"multipleOf": 0}', '{"format": 1}',
        '{"required": ["a"], "additionalProperties": false}', '{"uniqueItems": 1}', '{"unevaluatedProperties": 1}',
        '{"items": ' * 70 + "{}" + "}" * 70, "[" * 100_000, '{"a": "' + "x" * 40_000 + '", "type": 1}',
    ],
)  # fmt: skip
def test_invalid_schemas_are_refused(schema: str | None) -> None:
    with pytest.raises(ApiError) as caught:
        begin(NONE, TextFormat("json_schema", schema))
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", "text.format.schema")


def test_an_invalid_schema_of_a_forced_tool_is_refused() -> None:
    tools = ToolSet((Tool("function", "f", parameters={"type": "x"}),), ToolChoice("required"))
    with pytest.raises(ApiError) as caught:
        begin(tools)
    assert (caught.value.code, caught.value.param) == ("invalid_json_schema", "tools")


@functools.cache
def compiler() -> Any:
    xgrammar = importlib.import_module("xgrammar")
    names = [hub().token_bytes(i) for i in range(hub().vocab_size)]
    info = xgrammar.TokenizerInfo(names, stop_token_ids=[hub().special("<|im_end|>")])
    return xgrammar.GrammarCompiler(info)


def complete(guide: Guide | None, text: str) -> bool:
    """Whether the constraint takes exactly this output, and then allows the model to stop."""
    import xgrammar

    assert guide is not None
    if guide.kind == "structural_tag":
        compiled = compiler().compile_structural_tag(guide.value)
    else:
        compiled = compiler().compile_json_schema(guide.value)
    matcher = xgrammar.GrammarMatcher(compiled)
    return bool(matcher.accept_string(text) and matcher.accept_token(hub().special("<|im_end|>")))


def block(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def raw(name: str, text: str) -> str:
    return f'<tool_call>\n{{"name": "{name}"}}\n{text}\n</tool_call>'


ROME = '{"city": "Rome"}'


@pytest.mark.vllm
@pytest.mark.parametrize(
    ("tools", "accepted", "refused"),
    [
        (
            choose("required", "get_weather"),
            [" " + ROME + "}\n</tool_call>", ' {"city":"Rome"}}\n</tool_call>'],
            [" {}}\n</tool_call>", " " + ROME + "}", ' {"city":  "Rome"}}\n</tool_call>', "x"],
        ),
        (
            choose("required", "note"),
            ["\n</tool_call>", "a\n</tool_call>", 'a </tool_call> "\n\n</tool_call>'],
            ["a</tool_call>", "a", "a\n</tool_call>\n</tool_call>"],
        ),
        (choose("required", "docs.search"), [" {}}\n</tool_call>"], [" []}\n</tool_call>", ' {"x": 1}}\n</tool_call>']),
        (
            choose("required"),
            [block("get_weather", ROME), block("get_weather", ROME) + "\n" + raw("note", "x\ny")],
            ["", "x", block("get_weather", "{}"), block("nope", "{}"), block("get_weather", ROME) + " x",
             "\n".join([block("docs.search", "{}")] * 17)],
        ),
        (
            choose("required", "get_weather", "docs.search", parallel=False),
            [block("get_weather", ROME), block("docs.search", "{}")],
            [raw("note", ""), block("docs.search", "{}") + "\n" + block("docs.search", "{}")],
        ),
        (
            choose("auto", "docs.search"),
            ["hi", "a <b", block("docs.search", '{"any": "thing"}'), "x\n" + block("docs.search", "{}") + " y"],
            [block("get_weather", ROME)],
        ),
        (
            choose("auto", parallel=False),
            ["hi", "x" + block("get_weather", ROME)],
            [block("get_weather", ROME) + block("get_weather", ROME), block("get_weather", '{"a": 1}')],
        ),
    ],
)  # fmt: skip
def test_choices_hold(tools: ToolSet, accepted: list[str], refused: list[str]) -> None:
    found = guide(tools)
    assert [text for text in accepted if not complete(found, text)] == []
    assert [text for text in refused if complete(found, text)] == []


@pytest.mark.vllm
def test_json_text_beside_tools() -> None:
    found = guide(ALL, TextFormat("json_schema", SCHEMA))
    assert complete(found, '{"a": 1}')
    assert complete(found, block("get_weather", ROME))
    assert not complete(found, '{"a": "x"}')
    assert not complete(found, "hello")
    assert complete(guide(NONE, TextFormat("json_schema", SCHEMA)), '{"a": 1}')


def token_by_token(guide: Guide | None, text: str) -> bool:
    """Whether a model that samples the text's tokens one by one is let through, and may then stop."""
    import xgrammar

    assert guide is not None
    matcher = xgrammar.GrammarMatcher(compiler().compile_structural_tag(guide.value))
    ids = unpack_ids(FORM._writer().markup(text).ids())
    return all(matcher.accept_token(i) for i in [*ids, hub().special("<|im_end|>")])


GOOD_PATCHES = [
    "*** Begin Patch\n*** Add File: a.py\n+x = 1\n+\n*** End Patch",
    "*** Begin Patch\n*** Delete File: a b/é.py\n*** End Patch\n",
    "*** Begin Patch\n*** Update File: a\n*** Move to: b\n@@\n-o\n+</tool_call>\n  \n*** End of File\n*** End Patch",
    "*** Begin Patch\n*** Update File: a\n@@ f\n y\n*** Update File: c\n*** End Patch",
]
BAD_PATCHES = [
    "", "x", "*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a.py\n*** End Patch",
    "*** Begin Patch\n*** Add File: \n+x\n*** End Patch", "*** Begin Patch\n*** Update File: a\nold\n*** End Patch",
    "*** Begin Patch\n*** Add File: a.py\n+x\n", "*** Add File: a.py\n+x\n", '{"input": "*** Begin Patch"}',
]  # fmt: skip


@pytest.mark.vllm
@pytest.mark.parametrize("others", [(), (GET,), (LAX, SEARCH, NOTE)])
def test_a_grammar_holds_whenever_its_tool_may_be_called(others: tuple[Tool, ...]) -> None:
    tools = ToolSet((*others, PATCH))
    auto = guide(tools)
    for text in ("hi", "", "a <tool", *(block(tool.model_name, "{}") for tool in others if tool.kind == "function")):
        assert token_by_token(auto, text) == ("get_weather" not in text)
    for patch in GOOD_PATCHES:
        assert token_by_token(auto, "Let me see.\n" + raw("apply_patch", patch))
        assert token_by_token(auto, raw("apply_patch", patch) + "\n" + raw("apply_patch", patch))
        assert token_by_token(guide(choose("required", "apply_patch", tools=tools)), patch + "\n</tool_call>")
        assert token_by_token(guide(choose("required", tools=tools)), raw("apply_patch", patch))
    for patch in BAD_PATCHES:
        assert not token_by_token(auto, raw("apply_patch", patch))
        assert not token_by_token(guide(choose("required", "apply_patch", tools=tools)), patch + "\n</tool_call>")
        assert not token_by_token(guide(choose("required", tools=tools)), raw("apply_patch", patch))
    assert not token_by_token(auto, block("apply_patch", '{"input": "x"}'))  # the way round the grammar


THOUGHT = "I could write <tool_call> or <tool_call>\n{} here, </tool_call>."


@pytest.mark.vllm
@pytest.mark.parametrize("opens", [False, True])
@pytest.mark.parametrize("parallel", [False, True])
def test_what_a_thought_says_of_calls_is_no_call(opens: bool, parallel: bool) -> None:
    form = ChatMLFormat(hub(), ChatMLOptions(thinking=True, keeps_round=True, opens_thinking=opens))
    tools = ToolSet((GET, PATCH), parallel=parallel)
    opening = form.opening(Brief(tools=tools))
    start = opening.forced.removeprefix("<think>\n") if opens else "<think>\n"
    for behind in ("Hi.", raw("apply_patch", GOOD_PATCHES[0]), "Well.\n" + block("get_weather", ROME)):
        assert token_by_token(opening.guide, f"{start}{THOUGHT}\n</think>\n\n{behind}")
        assert token_by_token(opening.guide, behind)  # no thought at all
    for behind in (raw("apply_patch", "x"), block("get_weather", "{}"), THOUGHT):
        assert not token_by_token(opening.guide, f"{start}{THOUGHT}\n</think>\n\n{behind}")
        assert not token_by_token(opening.guide, behind)


@pytest.mark.vllm
def test_code_mode_takes_any_source() -> None:
    found = guide(ToolSet((SOURCE,)))
    for source in ("// @exec: {}\nfoo()", "x\n", "</tool_call> é😀"):
        assert token_by_token(found, raw("exec", source))
    assert not token_by_token(found, raw("exec", ""))


@pytest.mark.vllm
def test_a_regular_expression_holds() -> None:
    found = guide(ToolSet((DATE, GET)))
    assert token_by_token(found, raw("date", "2026-11-29") + "\n" + block("get_weather", ROME))
    for text in ("2026-11-2", "2026-11-299", "x", "2026-11-29\n"):
        assert not token_by_token(found, raw("date", text))


@pytest.mark.vllm
@settings(deadline=None, max_examples=40)
@given(lines=st.lists(st.text(st.characters(codec="utf-8", exclude_characters="\n"), max_size=12), max_size=4))
def test_what_the_guide_lets_through_is_what_the_client_gets(lines: list[str]) -> None:
    """The parser finds the end where the guide does, whatever stands in the lines of the patch."""
    normalize = reference().normalizer.normalize_str
    patch = normalize(
        "*** Begin Patch\n*** Add File: f\n+\n" + "".join(f"+{line}\n" for line in lines) + "*** End Patch"
    )
    tools = ToolSet((PATCH,))
    text = raw_begin("apply_patch") + patch + "\n</tool_call>"
    assert token_by_token(guide(tools), text)
    parser = FORM.parser(tools, begin(tools))
    deltas = [*parser.feed(unpack_ids(hub().encode(text))), *parser.finish()]
    assert deltas == [CallStart("custom", "apply_patch"), CallDelta(patch), CallEnd()]


BROKEN = [
    ("lark", "", "invalid_value"), ("lark", "a: b", "invalid_value"), ("lark", "start: missing", "invalid_value"),
    ("lark", 'start: "a', "invalid_value"), ("lark", "start: start", "invalid_value"), ("regex", "(", "invalid_value"),
    ("regex", "a**", "invalid_value"), ("regex", "(?=a)b", "unsupported_parameter"),
    ("lark", "%declare X\nstart: X", "unsupported_parameter"), ("lark", "start: /a+?/", "unsupported_parameter"),
    ("regex", "((a{999}){999}){999}", "unsupported_parameter"), ("lark", "s" * 70_000, "unsupported_parameter"),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["auto", "none", "required"])
@pytest.mark.parametrize(("syntax", "definition", "code"), BROKEN)
def test_grammars_that_cannot_hold_are_refused(syntax: str, definition: str, code: str, mode: str) -> None:
    tools = ToolSet((GET, Tool("custom", "bad", "ns", grammar=(syntax, definition))), ToolChoice(mode))
    for _ in range(2):  # also the second time, when it is remembered
        with pytest.raises(ApiError, match=r"ns\.bad") as caught:
            begin(tools)
        assert (caught.value.code, caught.value.param) == (code, "tools[1].format.definition")


def test_layouts_without_a_raw_form_take_the_input_as_json() -> None:
    layout = CallLayout("<call:", lambda tool: f"<call:{tool.name}>", "</call>")
    assert output_guide(ToolSet((PATCH,)), TEXT, layout) == (None, True)
    found, _ = output_guide(ToolSet((PATCH,), ToolChoice("required")), TEXT, layout)
    assert found is not None
    tag = json.loads(found.value)["format"]["elements"][0]["elements"][0]
    assert tag["content"]["json_schema"]["properties"] == {"input": {"type": "string"}}


@pytest.mark.parametrize(
    "schema",
    [
        {}, {"$ref": "#/$defs/n", "$defs": {"n": {"properties": {"next": {"$ref": "#/$defs/n"}}}}},
        {"required": ["a"], "properties": {"a": True}, "additionalProperties": False},
        {"allOf": [{"properties": {"a": {}}}], "required": ["a"], "additionalProperties": False},
        {"exclusiveMinimum": True, "minimum": 1}, {"minItems": 1, "maxItems": 1.0, "uniqueItems": True},
        {"description": "d", "format": "date", "enum": [None]}, {"items": False}, {"const": None, "default": []},
    ],
)  # fmt: skip
def test_sound_schemas_pass(schema: dict[str, Any]) -> None:
    assert guide(NONE, TextFormat("json_schema", json.dumps(schema))) == Guide("json", json.dumps(schema))
