"""The general path: ids equal to transformers', in pieces and whole; control tokens out of reach; bounds; settings."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, ReasoningDelta, TextDelta
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    InputText,
    Item,
    Message,
    Reasoning,
    ReasoningText,
)
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.engine import Guide, Parsing
from inference.formats import template_environment
from inference.formats.format import Brief, Format
from inference.formats.template import TemplateFormat, template_format
from inference.formats.template_environment import ChatTemplate
from inference.formats.template_tokens import added_tokens
from inference.tokenizer import HubTokenizer, VocabularyError, pack_ids, unpack_ids
from tests.inference.test_guides import complete
from tests.support.template_families import (
    APPENDABLE,
    BARE,
    CHATML,
    CONTROLS,
    HEADERS,
    INST,
    MARKUP,
    MODEL_ROLE,
    NASTY,
    OPENED,
    PARTS,
    SHOWN,
    SPECIAL,
    SWALLOWERS,
    SWALLOWING,
    THINKING,
    THOUGHTLESS,
    TOOL,
    WHOLE,
    brief_of,
    conversations,
    hugging_face,
    items_of,
    vocabulary,
    write_model,
)

ALL = {**APPENDABLE, **WHOLE, **NASTY}
SCHEMA = '{"type": "object"}'
TOOLS = ToolSet((TOOL,))


@functools.cache
def hub(swallow: bool = False) -> tuple[HubTokenizer, Any]:
    data = json.loads(vocabulary(swallow).to_str())
    return HubTokenizer(data, "test"), data


@functools.cache
def form(template: str, engine_parses: bool = False, now: datetime | None = None) -> TemplateFormat:
    tokenizer, data = hub(template == SWALLOWING)
    chat = ChatTemplate(template, SPECIAL, now=now)
    return TemplateFormat(tokenizer, chat, added_tokens(data), (), engine_parses)


def expected(template: str, messages: Sequence[dict[str, Any]], offered: bool = False, **switches: Any) -> list[int]:
    """transformers' ids of the prompt."""
    shown = [_in_parts(message) for message in messages] if template == PARTS else list(messages)
    if template == OPENED:
        shown = [_with_text_arguments(message) for message in shown]
    reference = hugging_face(template, template == SWALLOWING)
    ids: list[int] = reference.apply_chat_template(
        shown, tools=SHOWN if offered else None, add_generation_prompt=True, **switches
    )["input_ids"]
    return ids


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    return {**message, "content": [{"type": "text", "text": message["content"]}]}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """This template wants the arguments as the client has sent them."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    made = [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": json.dumps(call["function"]["arguments"], ensure_ascii=False),
            },
        }
        for call in calls
    ]
    return {**message, "tool_calls": made}


def whole(chat: TemplateFormat, brief: Brief, items: Sequence[Item]) -> list[int]:
    return unpack_ids(chat.whole(brief, items, {}) + chat.opening(brief).ids)


def pieces(chat: TemplateFormat, brief: Brief, items: Sequence[Item]) -> list[int]:
    return unpack_ids(chat.head(brief) + chat.body(items, {}) + chat.opening(brief).ids)


def written(chat: Format, packed: bytes) -> str:
    return b"".join(map(chat.tokenizer.token_bytes, unpack_ids(packed))).decode()


# ids, against transformers


def _kinds(template: str) -> dict[str, bool]:
    """What conversations this template can be asked for in transformers, too."""
    tools = template not in (MODEL_ROLE, SWALLOWING, BARE)
    return {"tools": tools, "system": template != MODEL_ROLE, "repeats": template not in (INST, MODEL_ROLE)}


@pytest.mark.parametrize("name", [*APPENDABLE, *WHOLE])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_prompts_have_the_ids_of_the_template(name: str, data: st.DataObject) -> None:
    template = ALL[name]
    kinds = _kinds(template)
    messages = data.draw(conversations(**kinds, thoughts=template == THINKING))
    offered = kinds["tools"] and template != OPENED and data.draw(st.booleans())
    chat, brief, items = form(template), brief_of(messages, offered), items_of(messages)
    ids = expected(template, messages, offered)
    assert whole(chat, brief, items) == ids
    if chat.appendable:
        assert pieces(chat, brief, items) == ids


@pytest.mark.parametrize("name", NASTY)
@settings(deadline=None, max_examples=12)
@given(data=st.data())
def test_nasty_templates_are_rendered_whole_and_right(name: str, data: st.DataObject) -> None:
    chat = form(NASTY[name])
    assert not chat.appendable
    assert chat.why_whole
    # these two would cut between calls and their outputs, which the rest of the template can't show
    tools = name not in ("keeps the newest", "reverses")
    messages, offered = data.draw(conversations(tools=tools)), data.draw(st.booleans())
    ids = expected(NASTY[name], messages, offered)
    assert whole(chat, brief_of(messages, offered), items_of(messages)) == ids


def test_templates_are_told_apart() -> None:
    assert [name for name in APPENDABLE if not form(APPENDABLE[name]).appendable] == []
    assert [name for name in WHOLE if form(WHOLE[name]).appendable] == []
    for name, template in WHOLE.items():
        chat = form(template)
        assert chat.head(Brief("x")) == b""
        assert not chat.forgetful
        assert not chat.forgets([Reasoning(content=(ReasoningText("r"),))], [Message("user", "x")]), name
        with pytest.raises(TypeError, match="whole"):
            chat.body([Message("user", "x")], {})


@pytest.mark.parametrize("name", ["chatml", "thinking", "headers", "swallowing", "thoughtless"])
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_turn_by_turn_equals_at_once(name: str, data: st.DataObject) -> None:
    """As a session does it: what was sampled stays, new items follow, and a round whose thoughts are forgotten is cut
    off and rendered again."""
    template = ALL[name]
    chat = form(template)
    tools = template != SWALLOWING
    messages = data.draw(conversations(tools=tools, thoughts=template in (THINKING, THOUGHTLESS)))
    if template == SWALLOWING:  # it trims what was said; what was sampled stays
        messages = [{**message, "content": message["content"].strip()} for message in messages]
    brief = brief_of(messages, False)
    talk = messages[1:] if messages[0]["role"] == "system" else messages
    context, start, round_items = b"", 0, []  # ids, where the newest round begins, its items
    at = 0
    while at < len(talk):
        said = [] if at == 0 else [talk[at]]
        added = []
        for message in talk[at + len(said) :]:
            if message["role"] == "assistant":
                break
            added.append(message)
        if said:
            context += chat.opening(brief).ids + sampled(chat, template, said[0])
            round_items += items_of(said)
        new = items_of(added)
        if chat.forgets(round_items, new):
            context = context[:start]
            new = [*round_items, *new]
            round_items = []
        split = max(
            (i + 1 for i, item in enumerate(new) if isinstance(item, Message) and item.role == "user"), default=0
        )
        pending = {c["id"]: c["function"]["name"] for message in said for c in message.get("tool_calls", ())}
        first = chat.body(new[:split], pending if said and not isinstance(new[0], Reasoning) else {})
        second = chat.body(new[split:], pending)
        if split:
            start, round_items = len(context) + len(first), list(new[split:])
        else:
            round_items = [*round_items, *new]
        context += first + second
        at += len(said) + len(added)
        whole_talk = [*messages[: len(messages) - len(talk)], *talk[:at]]
        prompt = chat.head(brief) + context + chat.opening(brief).ids
        assert unpack_ids(prompt) == expected(template, whole_talk)


def sampled(chat: TemplateFormat, template: str, message: dict[str, Any]) -> bytes:
    """What the model says for this message, and what completes it."""
    thought = message.get("reasoning_content")
    text = message["content"]
    if thought:
        opened = "" if template == THOUGHTLESS else "<think>\n"
        text = f"{opened}{thought}\n</think>\n\n{text}"
    for i, call in enumerate(message.get("tool_calls", ())):
        made = call["function"]
        given = json.dumps(made["arguments"], ensure_ascii=False)
        if template == HEADERS:
            lines = [
                f"<arg>{key}</arg>{json.dumps(value, ensure_ascii=False)}\n" for key, value in made["arguments"].items()
            ]
            text += f"\n{made['name']}\n" + "".join(lines)
        else:
            joint = "\n" if message["content"] or i else ""
            text += joint + f'<tool_call>\n{{"name": "{made["name"]}", "arguments": {given}}}\n</tool_call>'
    shield = chat.renderer.shielded(lambda shield: "")[1]
    ids = [*unpack_ids(chat.renderer.encoder.ids(text, shield)), chat.stop_ids[0]]
    kept, closing = chat.spoken(ids)
    return pack_ids(ids[:kept]) + closing


# client text


LURES = (*CONTROLS, *SWALLOWERS, *MARKUP)
client_text = st.lists(
    st.sampled_from(
        (
            *LURES,
            "<|im_",
            "start|>",
            "<",
            "|im_end|>",
            "im_end",
            "[IN",
            "ST]",
            "\ue000",
            "\ue002",
            "\ue003",
            "\\ue001",
            " ",
        )
    )
    | st.text(max_size=4),
    max_size=5,
).map("".join)


def everywhere(texts: Sequence[str]) -> tuple[Brief, list[Item]]:
    schema = {"type": "object", "title": texts[3], "properties": {"k" + texts[4]: {"description": texts[5]}}}
    tools = ToolSet((Tool("function", "f" + texts[0], "n" + texts[1], texts[2], schema),))
    items: list[Item] = [
        Message("user", texts[6]),
        Reasoning(content=(ReasoningText("r" + texts[7]),)),
        Message("assistant", "x" + texts[8]),
        FunctionCall("a" + texts[9], "f" + texts[0], json.dumps({"k" + texts[4]: [texts[10]]}, ensure_ascii=False)),
        CustomToolCall("b", "f" + texts[0], texts[11]),
        FunctionCallOutput("a" + texts[9], (InputText(texts[12]), InputText(texts[13]))),
        CustomToolCallOutput("b", texts[14]),
        Message("assistant", texts[15]),
        Message("user", "x" + texts[16]),
    ]
    return Brief("i" + texts[17], texts[18], tools), items


def spelled(chat: TemplateFormat, ids: Sequence[int]) -> list[str]:
    """The control tokens among them."""
    names = {chat.tokenizer.special(name): name for name in LURES}
    return [names[i] for i in ids if i in names]


@pytest.mark.parametrize("name", [*APPENDABLE, *WHOLE])
@settings(deadline=None, max_examples=25)
@given(texts=st.lists(client_text, min_size=19, max_size=19))
def test_client_text_adds_no_control_token(name: str, texts: list[str]) -> None:
    chat = form(ALL[name])
    plain_brief, plain_items = everywhere(["q"] * 19)
    brief, items = everywhere(texts)
    ids = whole(chat, brief, items)
    assert spelled(chat, ids) == spelled(chat, whole(chat, plain_brief, plain_items))
    if chat.appendable:
        assert pieces(chat, brief, items) == ids


@settings(deadline=None, max_examples=30)
@given(text=client_text, again=client_text)
def test_client_text_comes_back_as_it_was(text: str, again: str) -> None:
    for chat in (form(CHATML), form(BARE)):
        items = [Message("user", "(" + text + ")"), Message("assistant", "x" + again + "x")]
        normalize = vocabulary().normalizer.normalize_str
        shown = written(chat, chat.whole(Brief("("), items, {}))
        assert normalize("(" + text + ")") in shown
        assert normalize("x" + again + "x") in shown


GLUING = CHATML.replace("'\\n<tool_response>", "'<|' + message.name + '|>\\n<tool_response>")


def test_a_template_that_writes_names_into_brackets() -> None:
    chat = form(GLUING)
    assert chat.renderer.encoder.glues
    assert not form(CHATML).renderer.encoder.glues

    def controls(name: str) -> list[str]:
        items = [Message("user", "x"), FunctionCall("c", name, "{}"), FunctionCallOutput("c", "x")]
        return spelled(chat, whole(chat, Brief(), items))

    assert controls("im_end") == controls("user") == controls("q")


def test_marks_can_not_be_spelled() -> None:
    """A text that holds a mark's escape, whole or in two halves, gets no other text out of its place."""
    for template in (CHATML, HEADERS, BARE):
        chat = form(template)
        for texts in (["\\ue000", "x"], ["\\ue0", "00"], ["\\", "ue001"], ["\\ue001\ue000", "\ue001"]):
            items = [FunctionCall("c", texts[0], json.dumps({texts[1]: texts[0]})), FunctionCallOutput("c", texts[1])]
            tools = ToolSet((Tool("function", texts[0], None, texts[1], {"title": texts[0], texts[1]: texts[1]}),))
            ids = whole(chat, Brief(texts[0], texts[1], tools), [Message("user", texts[0]), *items])
            for text in texts:
                assert text in written(chat, pack_ids(ids))
            if chat.appendable:
                assert pieces(chat, Brief(texts[0], texts[1], tools), [Message("user", texts[0]), *items]) == ids


def test_added_tokens_that_are_words() -> None:
    """Vocabularies have such: they are broken where a text holds one, begins or ends with a part of one."""
    data = json.loads(vocabulary().to_str())
    top = max(token["id"] for token in data["added_tokens"]) + 1
    word = {**data["added_tokens"][-1], "content": "magic word", "id": top, "special": True}
    data["added_tokens"].append(word)
    chat = TemplateFormat(HubTokenizer(data, "test"), ChatTemplate(CHATML, SPECIAL), added_tokens(data))
    for text in ("magic word", "a magic word b", "magic", "word", "ma", "c word"):
        ids = whole(chat, Brief("magic "), [Message("user", text)])
        assert top not in ids
        assert text in written(chat, pack_ids(ids))
    shield = chat.renderer.shielded(lambda shield: "")[1]
    for cut in range(1, len("magic word")):
        both = shield.cover("magic word"[:cut]) + shield.cover("magic word"[cut:])
        assert top not in unpack_ids(chat.renderer.encoder.ids(both, shield))


def test_white_space_tokens_are_text() -> None:
    """Gemma has line ends as added tokens; a client's become such as in transformers, and nothing else does."""
    tokenizer = type(vocabulary()).from_str(vocabulary().to_str())
    tokenizer.add_tokens(["\n\n"])
    data = json.loads(tokenizer.to_str())
    chat = TemplateFormat(HubTokenizer(data, "test"), ChatTemplate(CHATML, SPECIAL), added_tokens(data))
    from transformers import PreTrainedTokenizerFast

    reference = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHATML, **SPECIAL)
    messages = [{"role": "user", "content": "a\n\n\nb\n\n"}]
    ids = reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert ids.count(tokenizer.token_to_id("\n\n")) == 2
    assert pieces(chat, Brief(), items_of(messages)) == ids


def test_a_text_with_all_private_characters_is_refused() -> None:
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(ApiError) as caught:
        form(CHATML).body([Message("user", everything)], {})
    assert (caught.value.code, caught.value.param) == ("invalid_prompt", "input")
    most = everything[:-200]
    assert most in written(form(CHATML), form(CHATML).body([Message("user", most)], {}))


# messages


def test_what_a_template_has_no_place_for() -> None:
    chat = form(MODEL_ROLE)
    items: list[Item] = [
        Message("user", "a"),
        Message("assistant", "b"),
        FunctionCall("c", "f", '{"x": 1}'),
        FunctionCallOutput("c", "out"),
        Message("developer", "late"),
    ]
    text = written(chat, chat.whole(Brief("Be kind.", None, TOOLS), items, {}))
    assert text.startswith("<s><start_of_turn>user\nBe kind.\n\nYou can call these functions.")
    assert '"name": "get_weather"' in text
    assert text.endswith(
        '<start_of_turn>model\nb\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>user\n<tool_response>\nout\n</tool_response>\n\nlate<end_of_turn>\n<start_of_turn>model\n"
    )


def test_arguments_that_are_no_object_are_shown() -> None:
    for template in (CHATML, HEADERS, OPENED):
        chat = form(template)
        items = [Message("user", "a"), FunctionCall("c", "f", '{"half": '), FunctionCallOutput("c", "out")]
        assert "half" in written(chat, chat.whole(Brief(), items, {}))


def test_thoughts_in_several_items() -> None:
    thoughts = [Reasoning(content=(ReasoningText(text),)) for text in ("a\n", "b")]
    chat = form(THINKING)
    text = written(chat, chat.body([*thoughts, Message("assistant", "c")], {}))
    assert text == "<|im_start|>assistant\n<think>\na\n\nb\n</think>\n\nc<|im_end|>\n"
    assert form(CHATML).body(thoughts, {}) == b""


def test_lone_surrogates_are_replaced() -> None:
    chat = form(CHATML)
    items = [Message("user", "a\ud800b"), FunctionCall("c", "f\udc00", '{"x": "\\ud800"}')]
    text = written(chat, chat.body(items, {}))
    assert "a\ufffdb" in text
    assert '{"x": "\ufffd"}' in text


def test_broken_grammars_are_refused() -> None:
    broken = Tool("custom", "edit", None, None, grammar=("lark", "start: nowhere"))
    for template in (CHATML, HEADERS):
        with pytest.raises(ApiError) as caught:
            form(template).opening(Brief(None, None, ToolSet((broken,))))
        assert caught.value.param == "tools[0].format.definition"


def test_long_call_ids_where_short_ones_are_wanted() -> None:
    chat = form(INST)
    ids = ["call_0123456789", "call_abcdef"]
    items: list[Item] = [Message("user", "a"), *(FunctionCall(i, "f", "{}") for i in ids)]
    items += [FunctionCallOutput(i, "out") for i in ids]
    text = written(chat, chat.whole(Brief(), items, {}))
    found = [text.split('"call_id": "')[i].split('"')[0] for i in (1, 2)]
    assert len(set(found)) == 2
    for call_id in found:
        assert len(call_id) == 9
        assert call_id.isalnum()
        assert text.count(call_id) == 2


@pytest.mark.parametrize("part", [InputImage(image_url="data:x"), InputFile(file_id="f")])
def test_images_and_files_are_refused(part: Any) -> None:
    for items in ([Message("user", (InputText("a"), part))], [FunctionCallOutput("c", (part,))]):
        with pytest.raises(ApiError, match=part.type) as caught:
            form(CHATML).body(items, {})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "input")


def test_names_of_calls_before_the_items() -> None:
    named = HEADERS.replace("'<|observation|>\\n' + message", "'<|observation|>' + message.name + '\\n' + message")
    chat = form(named)
    assert chat.appendable
    assert written(chat, chat.body([FunctionCallOutput("c", "out")], {"c": "ns.f"})) == "<|observation|>ns.f\nout"


def test_a_template_that_refuses_says_why_in_its_own_words() -> None:
    with pytest.raises(ApiError, match="Roles must take turns") as caught:
        form(INST).whole(Brief(), [Message("assistant", "a"), Message("user", "b")], {})
    assert caught.value.code == "invalid_prompt"
    echoing = INST.replace("raise_exception('Roles must take turns')", "raise_exception(message.content)")
    with pytest.raises(ApiError, match="can't show this") as caught:
        form(echoing).whole(Brief(), [Message("assistant", "secret"), Message("user", "b")], {})
    assert "secret" not in caught.value.message


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, Any] = {}
    for _ in range(5000):
        schema = {"not": schema}
    brief = Brief(None, None, ToolSet((Tool("function", "f", None, None, schema),)))
    with pytest.raises(ApiError, match="nested"):
        form(CHATML).head(brief)


# time


SLOW = (
    CHATML
    + "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = messages[0].role %}{% endfor %}{% endfor %}"
)


def test_a_rendering_is_bounded_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_environment, "RENDER_S", 0.05)
    start = time.monotonic()
    with pytest.raises(template_environment.TemplateFailure, match="too long"):
        ChatTemplate(SLOW).render([{"role": "user", "content": "x"}])
    assert time.monotonic() - start < 30  # whole, it would take minutes


def test_a_rendering_is_bounded_in_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_environment, "MAX_RENDERED_CHARS", 10_000)
    template = ChatTemplate("{% for a in range(9999) %}{{ messages[0].content }}{% endfor %}")
    with pytest.raises(template_environment.TemplateFailure, match="too much"):
        template.render([{"role": "user", "content": "x" * 100}])


def test_new_items_cost_the_same_behind_any_history() -> None:
    """Bodies are rendered alone, so a template never sees what was before."""
    seen: list[int] = []
    chat = form(CHATML)
    render = chat.renderer.template.render

    def counting(messages: Sequence[Any], *rest: Any) -> str:
        seen.append(len(messages))
        return render(messages, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(chat.renderer.template, "render", counting)
        chat.body([Message("user", "x")], {})
        chat.body([FunctionCallOutput("c", "x")], {"c": "f"})
    assert max(seen) <= 3


# dates and switches


def test_dates_stand_still() -> None:
    brief = Brief("x")
    head = written(form(HEADERS, now=datetime(2024, 2, 29)), form(HEADERS, now=datetime(2024, 2, 29)).head(brief))  # noqa: DTZ001
    assert "29 Feb 2024" in head


def test_switches_follow_the_effort() -> None:
    chat = form(THINKING)
    assert chat.stop_ids == (chat.tokenizer.special("<|im_end|>"),)
    closed = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    for effort, opening in ((None, closed[:22]), ("high", closed[:22]), ("none", closed), ("minimal", closed)):
        assert written(chat, chat.opening(Brief(effort=effort)).ids) == opening
    efforts = CHATML.replace("You are helpful.", "Effort: {{ reasoning_effort or 'usual' }}").replace(
        "'<|im_start|>system\\nEffort: {{ reasoning_effort or 'usual' }}<|im_end|>\\n'",
        "'<|im_start|>system\\nEffort: ' ~ (reasoning_effort or 'usual') ~ '<|im_end|>\\n'",
    )
    assert form(efforts).appendable
    assert "Effort: usual" in written(form(efforts), form(efforts).head(Brief()))
    assert "Effort: low" in written(form(efforts), form(efforts).head(Brief(effort="low")))


@settings(deadline=None, max_examples=30)
@given(messages=conversations(thoughts=True), on=st.booleans())
def test_switched_prompts_have_the_ids_of_the_template(messages: list[dict[str, Any]], on: bool) -> None:
    brief = brief_of(messages, True, "high" if on else "none")
    ids = expected(THINKING, messages, True, enable_thinking=on)
    assert whole(form(THINKING), brief, items_of(messages)) == ids
    assert pieces(form(THINKING), brief, items_of(messages)) == ids


# output


def each(chat: TemplateFormat, text: str, brief: Brief = Brief()) -> list[Any]:  # noqa: B008  frozen
    parser = chat.parser(brief.tools, chat.opening(brief))
    shield = chat.renderer.shielded(lambda shield: "")[1]
    ids = unpack_ids(chat.renderer.encoder.ids(text, shield))
    return parser.feed([*ids, chat.stop_ids[0]]) + parser.finish()


CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def test_output_is_taken_apart_as_far_as_the_template_tells() -> None:
    brief = Brief(None, None, TOOLS)
    called = [CallStart("function", "get_weather"), CallDelta('{"city": "Rome"}'), CallEnd()]
    assert each(form(CHATML), CALL, brief) == called
    assert each(form(CHATML), "<think>a</think>b", brief) == [TextDelta("<think>a</think>b")]
    assert each(form(THINKING), "<think>\na\n</think>\n\n" + CALL, brief) == [ReasoningDelta("a"), *called]
    assert each(form(THOUGHTLESS), "a\n</think>\n\nb", brief) == [ReasoningDelta("a"), TextDelta("b")]
    assert each(form(HEADERS), CALL, brief) == [TextDelta(CALL)]
    assert each(form(MODEL_ROLE), CALL, brief) == called


def test_the_engine_may_take_it_apart() -> None:
    custom = Tool("custom", "patch", "ns", "Edit")
    for template in (CHATML, HEADERS, OPENED):
        chat = form(template, True)
        opening = chat.opening(Brief(None, None, ToolSet((TOOL, custom))))
        assert isinstance(opening.parsing, Parsing)
        shown = json.loads(opening.parsing.tools)
        assert shown[0] == SHOWN[0]
        assert shown[1]["function"]["name"] == "ns.patch"
        assert shown[1]["function"]["parameters"]["required"] == ["input"]
        assert chat.opening(Brief()).parsing == Parsing("[]")
        assert chat.opening(Brief(None, None, ToolSet((TOOL,), ToolChoice("none")))).parsing == Parsing("[]")
    assert form(CHATML).opening(Brief()).parsing is None


def test_choices_hold_where_calls_are_known() -> None:
    named = Brief(None, None, ToolSet((TOOL,), ToolChoice("required", ("get_weather",))))
    opening = form(CHATML).opening(named)
    assert written(form(CHATML), opening.ids).endswith(
        '<|im_start|>assistant\n<tool_call>\n{"name": "get_weather", "arguments":'
    )
    assert form(CHATML).tokenizer.special("<tool_call>") in unpack_ids(opening.ids)
    assert opening.forced == '<tool_call>\n{"name": "get_weather", "arguments":'
    assert opening.guide is not None
    parsed = form(CHATML, True).opening(named)
    assert parsed.forced == ""
    assert written(form(CHATML), parsed.ids) == "<|im_start|>assistant\n"
    assert parsed.guide is not None
    assert '"begin":"<tool_call>\\n{\\"name\\": \\"get_weather\\"' in parsed.guide.value.replace(
        '"begin": ', '"begin":'
    )
    # the thought that the template would open is closed, or switched off
    assert "<think>\n\n</think>\n\n<tool_call>" in written(form(THINKING), form(THINKING).opening(named).ids)
    assert "<think>\n\n</think>\n\n<tool_call>" in written(form(THOUGHTLESS), form(THOUGHTLESS).opening(named).ids)


@pytest.mark.vllm
def test_one_call_where_the_engine_reads_it() -> None:
    named = Brief(None, None, ToolSet((TOOL,), ToolChoice("required", ("get_weather",))))
    guide = form(CHATML, True).opening(named).guide
    assert complete(guide, CALL)
    assert [text for text in ("", "Rome", CALL + "\n" + CALL, CALL[:-1]) if complete(guide, text)] == []


@pytest.mark.vllm
def test_input_of_a_freeform_tool_is_json() -> None:
    """As the template shows the tool, so the model calls it."""
    edit = Tool("custom", "edit", None, "Edit files")
    brief = Brief(None, None, ToolSet((edit,), ToolChoice("required", ("edit",))))
    opening = form(CHATML).opening(brief)
    assert opening.forced == '<tool_call>\n{"name": "edit", "arguments":'
    assert complete(opening.guide, ' {"input": "a\\nb"}}\n</tool_call>')
    parser = form(CHATML).parser(brief.tools, opening)
    ids = unpack_ids(form(CHATML).tokenizer.encode(' {"input": "a\\nb"}}\n</tool_call>'))
    assert parser.feed(ids) + parser.finish() == [CallStart("custom", "edit"), CallDelta("a\nb"), CallEnd()]


def test_choices_are_refused_where_calls_are_unknown() -> None:
    for parses in (True, False):
        chat = form(HEADERS, parses)
        for choice in (
            ToolChoice("required"),
            ToolChoice("required", ("get_weather",)),
            ToolChoice("auto", ("get_weather",)),
        ):
            with pytest.raises(ApiError) as caught:
                chat.opening(Brief(None, None, ToolSet((TOOL,), choice)))
            assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "tool_choice")
        with pytest.raises(ApiError) as caught:
            chat.opening(Brief(None, None, TOOLS, TextFormat("json_schema", SCHEMA)))
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "text.format")
        with pytest.raises(ApiError) as caught:
            chat.opening(Brief(None, None, ToolSet((TOOL,), ToolChoice("required", ("nope",)))))
        assert caught.value.code == "invalid_value"
        assert chat.opening(Brief(None, None, TOOLS)).guide is None
        assert chat.opening(Brief(text=TextFormat("json_schema", SCHEMA))).guide == Guide("json", SCHEMA)


def test_a_json_answer_leaves_no_room_for_thoughts() -> None:
    brief = Brief(text=TextFormat("json_schema", SCHEMA))
    assert written(form(THINKING), form(THINKING).opening(brief).ids).endswith("</think>\n\n")
    assert written(form(THOUGHTLESS), form(THOUGHTLESS).opening(brief).ids).endswith("<think>\n\n</think>\n\n")
    assert form(THOUGHTLESS).opening(brief).forced == ""
    assert written(form(THINKING, True), form(THINKING, True).opening(brief).ids) == "<|im_start|>assistant\n"


def test_how_turns_are_completed() -> None:
    chat = form(CHATML)
    end = chat.tokenizer.special("<|im_end|>")
    newline, both = chat.tokenizer.encode("\n"), pack_ids([end]) + chat.tokenizer.encode("\n")
    assert chat.spoken([5, end]) == (2, newline)
    assert chat.spoken([5, 6]) == (2, both)
    assert chat.spoken([]) == (0, both)
    headers = form(HEADERS)
    assert headers.spoken([5, headers.tokenizer.special("<|user|>")]) == (1, b"")
    assert headers.spoken([5]) == (1, b"")


# checkpoints


def test_a_checkpoint_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "a", CHATML)
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (folder / "config.json").write_text('{"eos_token_id": 4, "text_config": {"eos_token_id": 7}}')
    chat: Format = template_format(str(folder))
    special = chat.tokenizer.special
    assert chat.stop_ids == (special("<|im_end|>"), 3, 4, 7, special("</s>"))
    assert isinstance(chat, TemplateFormat)
    given = template_format(folder, True, hub()[0])
    assert given.tokenizer is hub()[0]
    assert given.engine_parses


def test_values_printed_as_python_does() -> None:
    template = "{{ tools }}{{ '' + tools | string }}{% for m in messages %}{{ '<|im_start|>' + m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "a"}]
    assert whole(form(template), brief_of(messages, True), items_of(messages)) == expected(template, messages, True)


def test_special_tokens_and_named_templates(tmp_path: Path) -> None:
    named = [
        {
            "name": "default",
            "template": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
        },
        {"name": "tool_use", "template": "{{ tools | tojson }}{% for m in messages %}{{ m.content }}{% endfor %}"},
    ]
    folder = write_model(tmp_path, CHATML, chat_template=named, eos_token={"content": "</s>", "special": True})
    (folder / "chat_template.jinja").unlink()
    (folder / "special_tokens_map.json").write_text('{"bos_token": {"content": "[gMASK]"}}')
    chat = template_format(folder)
    items = [Message("user", "hello")]
    assert written(chat, chat.whole(Brief(), items, {})) == "[gMASK]hello</s>"
    assert written(chat, chat.whole(Brief(None, None, TOOLS), items, {})).startswith('[{"type": "function"')


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{% for %}", "can't be compiled"),
        ("{{ 'hello' }}", "doesn't show what a user says"),
        ("{{ raise_exception('no') }}", "doesn't show what a user says"),
    ],
)
def test_templates_that_are_none(tmp_path: Path, template: str, reason: str) -> None:
    with pytest.raises(VocabularyError, match=reason):
        template_format(write_model(tmp_path, template))


def test_a_checkpoint_without_an_end(tmp_path: Path) -> None:
    folder = write_model(tmp_path, BARE)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(VocabularyError, match="what ends a generation"):
        template_format(folder)
    (folder / "config.json").write_text('{"eos_token_id": 2}')
    assert template_format(folder).stop_ids == (2,)


def test_files_that_can_not_be_read(tmp_path: Path) -> None:
    folder = write_model(tmp_path, CHATML)
    (folder / "tokenizer.json").write_text("[]")
    with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
        template_format(folder)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(VocabularyError, match=r"tokenizer\.json"):
        template_format(folder)
    (folder / "config.json").write_text("[]")
    vocabulary().save(str(folder / "tokenizer.json"))
    with pytest.raises(VocabularyError, match=r"config\.json"):
        template_format(folder)
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(VocabularyError, match="no chat template"):
        template_format(folder)


@pytest.mark.parametrize(
    "attempt", ["messages.append(1)", "''.__class__.__mro__[1]", "cycler.__init__.__globals__['os']"]
)
def test_a_template_stays_in_its_sandbox(attempt: str) -> None:
    with pytest.raises(template_environment.TemplateFailure):
        ChatTemplate("{{ " + attempt + " }}{{ messages[0].content }}").render([{"role": "user", "content": "x"}])
