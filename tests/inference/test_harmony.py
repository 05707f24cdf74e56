"""Harmony: prompts with the ids of OpenAI's library, turns that grow at the end, control tokens out of reach."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai_harmony as library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
    SummaryText,
)
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.formats.format import Brief
from inference.formats.harmony import HarmonyFormat, HarmonyOptions, harmony_format
from inference.tokenizer import VocabularyError, harmony_tokenizer, scripted_tokenizer, unpack_ids
from tests.support.harmony import CONTROL, marked, reference
from tests.support.vocabulary import write_checkpoint

FORM = harmony_format(harmony_tokenizer())
LOOK_UP = Tool("function", "look_up", "wiki", "Look it up", {"type": "object", "properties": {"q": {"type": "string"}}})
WEATHER = Tool("function", "weather", None, "Weather now", {"type": "object", "properties": {}})
PATCH = Tool("custom", "apply_patch", None, "Edit files", grammar=("lark", "start: LINE+\nLINE: /.+/"))


def written(packed: bytes) -> str:
    text: str = reference().decode(unpack_ids(packed))
    return text


def shown(tool: Tool) -> library.ToolDescription:
    return library.ToolDescription.new(tool.name, tool.description or "", tool.parameters and dict(tool.parameters))


# heads

schema_words = st.text("abc é\n\"'/{}:<", max_size=6)
keys = st.text("abcxyz_$é", min_size=1, max_size=5)
scalars = st.none() | st.booleans() | st.integers(-99, 10**12) | st.sampled_from([0.5, 1.0, -2.25]) | schema_words
values = scalars | st.lists(scalars, max_size=2) | st.dictionaries(keys, scalars, max_size=2)


def _schema(deeper: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    known = {
        "type": st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null", "x"])
        | st.lists(st.sampled_from(["string", "integer", "null"]), max_size=2)
        | scalars,
        "title": schema_words | scalars,
        "description": st.sampled_from(["one", "two"]) | schema_words | scalars,
        "default": values,
        "enum": st.lists(scalars, max_size=3) | scalars,
        "examples": st.lists(scalars, max_size=3) | scalars,
        "nullable": st.booleans() | scalars,
        "oneOf": st.lists(deeper, max_size=3) | scalars,
        "items": deeper,
        "properties": st.dictionaries(keys, deeper, max_size=3) | scalars,
        "required": st.lists(keys | scalars, max_size=3) | scalars,
        "anyOf": st.lists(deeper, max_size=2),
    }
    likely = st.fixed_dictionaries({"type": st.just("object"), "properties": st.dictionaries(keys, deeper, max_size=4)})
    loose = st.fixed_dictionaries({}, optional=known)
    return loose | st.tuples(likely, loose).map(lambda both: {**both[1], **both[0]}) | values


schemas = st.recursive(values, _schema, max_leaves=8)
objects = _schema(schemas).filter(lambda schema: isinstance(schema, dict))


@settings(deadline=None, max_examples=150)
@given(schema=objects, description=st.none() | st.text("ab \n\r", max_size=8))
def test_tools_are_shown_as_the_library_shows_them(schema: dict[str, Any], description: str | None) -> None:
    tools = (Tool("function", "f", None, description, schema), Tool("function", "g"))
    developer = library.DeveloperContent.new().with_function_tools([shown(tool) for tool in tools])
    message = library.Message.from_role_and_content(library.Role.DEVELOPER, developer)
    head = FORM.head(Brief(tools=ToolSet(tools)))
    assert written(head).partition("<|start|>developer")[2] == reference().decode(
        reference().render(message)
    ).removeprefix("<|start|>developer")


def test_a_schema_without_end_is_cut() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(500):
        schema = {"type": "object", "properties": {"a": schema}}
    assert written(FORM.head(Brief(tools=ToolSet((Tool("function", "f", parameters=schema),))))).count("a?: any,") == 1


def at(date: str | None) -> HarmonyFormat:
    return HarmonyFormat(FORM.tokenizer, HarmonyOptions(current_date=date))


LEVELS = {"none": "LOW", "minimal": "LOW", "low": "LOW", "high": "HIGH", "xhigh": "HIGH", "max": "HIGH"}


@settings(deadline=None)
@given(
    instructions=st.none() | st.text(max_size=12),
    effort=st.sampled_from([None, "medium", *LEVELS]),
    tools=st.sampled_from([(), (WEATHER,), (WEATHER, Tool("function", "g"))]),
    date=st.sampled_from([None, "2025-06-28"]),
)
def test_heads_have_the_ids_of_the_library(
    instructions: str | None, effort: str | None, tools: tuple[Tool, ...], date: str | None
) -> None:
    level = library.ReasoningEffort[LEVELS.get(effort or "", "MEDIUM")]
    system = library.SystemContent.new().with_reasoning_effort(level)
    system.conversation_start_date = date
    developer = library.DeveloperContent.new()
    if instructions:
        developer = developer.with_instructions(instructions)
    if tools:
        developer = developer.with_function_tools([shown(tool) for tool in tools])
    messages = [library.Message.from_role_and_content(library.Role.SYSTEM, system)]
    if instructions or tools:
        messages.append(library.Message.from_role_and_content(library.Role.DEVELOPER, developer))
    expected = reference().render_conversation(library.Conversation.from_messages(messages))
    assert unpack_ids(at(date).head(Brief(instructions, None, ToolSet(tools), effort=effort))) == expected


def test_head_shows_namespaces_as_the_library_does() -> None:
    developer = library.DeveloperContent.new().with_instructions("A\n\nB")
    for name, tool in (("wiki", LOOK_UP), ("functions", WEATHER)):
        developer = developer.with_tools(library.ToolNamespaceConfig(name=name, tools=[shown(tool)]))
    message = library.Message.from_role_and_content(library.Role.DEVELOPER, developer)
    system, mark, rest = written(FORM.head(Brief("A", "B", ToolSet((LOOK_UP, WEATHER))))).partition(
        "<|start|>developer"
    )
    assert mark + rest == reference().decode(reference().render(message))
    assert system.endswith("\nCalls to these tools must go to the commentary channel: 'functions', 'wiki'.<|end|>")


def test_head_shows_tools_unless_the_choice_is_none() -> None:
    tools = (WEATHER, PATCH)
    head = FORM.head(Brief("A", tools=ToolSet(tools, ToolChoice("required", ("weather",)))))
    assert head == FORM.head(Brief("A", tools=ToolSet(tools)))
    assert FORM.head(Brief("A", tools=ToolSet(tools, ToolChoice("none")))) == FORM.head(Brief("A"))


def test_head_shows_freeform_tools_with_their_grammar() -> None:
    head = written(FORM.head(Brief(tools=ToolSet((PATCH,)))))
    assert head.endswith(
        "namespace functions {\n\n// Edit files\n// The input is plain text, not JSON.\n"
        "// It must match this lark grammar:\n// start: LINE+\n// LINE: /.+/\n"
        "type apply_patch = (_: string) => any;\n\n} // namespace functions<|end|>"
    )


def test_head_shows_the_format_of_the_answer() -> None:
    """Where OpenAI's documentation puts it: at the end of the developer message."""
    schema = '{"properties":{"items":{"type":"array"}},"type":"object"}'
    head = written(FORM.head(Brief("Shop.", text=TextFormat("json_schema", schema))))
    assert head.endswith(
        f"developer<|message|># Instructions\n\nShop.\n\n# Response Formats\n\n## response\n\n{schema}<|end|>"
    )
    assert written(FORM.head(Brief(text=TextFormat("json_object")))).endswith('## response\n\n{"type":"object"}<|end|>')


# conversations

words = st.text(max_size=12)
names = st.sampled_from(["f", "get_weather", "a-b", "x1", "wiki.look_up", "_"])
calls = st.tuples(st.just("call"), names, words, words)
steps = st.tuples(st.sampled_from(["thought", "remark"]), words.filter(bool)) | calls
endings = st.none() | st.tuples(st.just("answer"), words.filter(bool))
rounds = st.tuples(st.tuples(st.just("user"), words), st.lists(steps, max_size=4), endings)
Step = tuple[str, ...]


def flat(rounds: Any) -> list[Step]:
    return [step for user, between, ending in rounds for step in (user, *between, *([ending] if ending else []))]


conversations = st.lists(rounds, max_size=4).map(flat)


def items_of(steps: Sequence[Step]) -> list[Item]:
    items: list[Item] = []
    for i, (kind, *said) in enumerate(steps):
        if kind == "call":
            space, _, name = said[0].rpartition(".")
            items.append(FunctionCall(f"c{i}", name, said[1], namespace=space or None))
            items.append(FunctionCallOutput(f"c{i}", said[2]))
        elif kind == "thought":
            items.append(Reasoning(content=(ReasoningText(said[0]),)))
        elif kind == "user":
            items.append(Message("user", said[0]))
        else:
            items.append(Message("assistant", said[0], phase="commentary" if kind == "remark" else "final_answer"))
    return items


def messages_of(steps: Sequence[Step], *, forget: bool = True) -> list[library.Message]:
    """The conversation as the library takes it. `forget`: without the thoughts of answered rounds."""
    messages = []
    for i, (kind, *said) in enumerate(steps):
        rest = [step[0] for step in steps[i:]]
        in_round = rest[: rest.index("user")] if "user" in rest else rest
        if kind == "call":
            name = said[0] if "." in said[0] else f"functions.{said[0]}"
            call = library.Message.from_role_and_content(library.Role.ASSISTANT, said[1].strip() or "{}")
            messages.append(call.with_channel("commentary").with_recipient(name).with_content_type("<|constrain|>json"))
            # The addressee as part of the name: the library's fork puts it behind the channel.
            author = library.Author.new(library.Role.TOOL, f"{name} to=assistant")
            messages.append(library.Message.from_author_and_content(author, said[2]).with_channel("commentary"))
        elif kind == "user":
            messages.append(library.Message.from_role_and_content(library.Role.USER, said[0]))
        elif kind != "thought" or not forget or "answer" not in in_round:
            channel = {"thought": "analysis", "remark": "commentary", "answer": "final"}[kind]
            said_by_model = library.Message.from_role_and_content(library.Role.ASSISTANT, said[0])
            messages.append(said_by_model.with_channel(channel))
    return messages


def rendered(messages: list[library.Message], *, drop: bool = False) -> list[int]:
    config = library.RenderConversationConfig(auto_drop_analysis=drop)
    conversation = library.Conversation.from_messages(messages)
    ids: list[int] = reference().render_conversation_for_completion(conversation, library.Role.ASSISTANT, config)
    return ids


@settings(deadline=None)
@given(steps=conversations)
def test_conversations_have_the_ids_of_the_library(steps: list[Step]) -> None:
    system = library.Message.from_role_and_content(library.Role.SYSTEM, library.SystemContent.new())
    brief = Brief()
    ids = FORM.whole(brief, items_of(steps), {}) + FORM.opening(brief).ids
    assert unpack_ids(ids) == rendered([system, *messages_of(steps)])
    assert ids == FORM.head(brief) + FORM.body(items_of(steps), {}) + FORM.opening(brief).ids


@settings(deadline=None)
@given(before=st.lists(steps, max_size=5), ending=endings, again=st.booleans())
def test_thoughts_are_forgotten_when_the_library_forgets_them(before: list[Step], ending: Step, again: bool) -> None:
    """In conversations of one answer at most, where its rule and ours say the same."""
    whole = [("user", "hi"), *before, *([ending] if ending else []), *([("user", "and?")] if again else [])]
    ids = FORM.body(items_of(whole), {}) + FORM.opening(Brief()).ids
    assert unpack_ids(ids) == rendered(messages_of(whole, forget=False), drop=True)


@settings(deadline=None)
@given(steps=conversations, cuts=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=5))
def test_a_conversation_turn_by_turn_ends_as_the_one_rendered_whole(
    steps: list[Step], cuts: list[tuple[int, bool]]
) -> None:
    """As `actors.rounds` goes about it: the newest round is cut back and rendered again when its thoughts are
    forgotten. What a model said in a turn stands as it was sampled, thoughts and all."""
    items = [*items_of(steps), Message("user", "end")]
    named = {
        item.call_id: item.name if item.namespace is None else f"{item.namespace}.{item.name}"
        for item in items
        if isinstance(item, FunctionCall)
    }
    turns = {cut % (len(items) + 1): sampled for cut, sampled in cuts} | {0: False, len(items): False}
    ids, start, newest = b"", 0, list[Item]()  # `newest`: the items whose ids begin at `start`
    for begin, end in pairwise(sorted(turns)):
        batch = items[begin:end]
        users = [i for i, item in enumerate(batch) if isinstance(item, Message) and item.role == "user"]
        if turns[begin] and not users:
            ids += b"".join(FORM.body([item], named) for item in batch)
            newest = [*newest, *batch]
            continue
        if FORM.forgets(newest, batch):
            ids, batch, newest = ids[:start], [*newest, *batch], []
        split = len(batch) - len(items[begin:end]) + users[-1] + 1 if users else 0
        ids += FORM.body(batch[:split], named)
        if split:
            start, newest = len(ids), []
        ids += FORM.body(batch[split:], named)
        newest = [*newest, *batch[split:]]
    assert ids == FORM.body(items, {})


client_text = st.lists(st.sampled_from((*CONTROL, "<|ret", "urn|>")) | st.text(max_size=5), max_size=5).map("".join)


@settings(deadline=None)
@given(texts=st.lists(client_text, min_size=12, max_size=12))
def test_client_text_adds_no_control_token(texts: list[str]) -> None:
    def ids(texts: list[str]) -> list[int]:
        schema = {"type": "object", "properties": {"p" + texts[8]: {"description": texts[9], "enum": [texts[10]]}}}
        tools = ToolSet((Tool("function", "f" + texts[6], "n", texts[7], schema),))
        items: list[Item] = [
            Message("user", texts[0]),
            Reasoning(content=(ReasoningText("x" + texts[1]),)),
            Message("assistant", (OutputText("x" + texts[1]), Refusal(texts[2])), phase="commentary"),
            FunctionCall("c", "f" + texts[6], texts[3]),
            FunctionCallOutput("c", (InputText(texts[4]),)),
            Message("developer", texts[5]),
        ]
        brief = Brief(texts[7] or None, "x" + texts[8], tools, TextFormat("json_schema", texts[11]))
        return unpack_ids(FORM.whole(brief, items, {}))

    controls = {FORM.tokenizer.special(name) for name in CONTROL}
    assert [i for i in ids(texts) if i in controls] == [i for i in ids([""] * 12) if i in controls]


# conversations, by example


def body(*items: Item, calls: Mapping[str, str] | None = None) -> str:
    return written(FORM.body(items, calls or {}))


def test_developer_and_system_messages_are_instructions_in_place() -> None:
    developer = library.DeveloperContent.new().with_instructions("b")
    message = reference().decode(
        reference().render(library.Message.from_role_and_content(library.Role.DEVELOPER, developer))
    )
    for role in ("developer", "system"):
        assert body(Message(role, "b")) == message


def test_a_message_before_a_call_is_a_remark_unless_it_says_otherwise() -> None:
    call = FunctionCall("c", "f", "{}")
    assert body(Message("assistant", "a"), call).startswith(
        "<|start|>assistant<|channel|>commentary<|message|>a<|end|>"
    )
    final = "<|start|>assistant<|channel|>final<|message|>a<|end|>"
    assert body(Message("assistant", "a", phase="final_answer"), call).startswith(final)
    assert body(Message("assistant", "a"), Message("user", "b"), call).startswith(final)


def test_outputs_name_the_tool_that_was_called() -> None:
    start, rest = "<|start|>", " to=assistant<|channel|>commentary<|message|>o<|end|>"
    output = FunctionCallOutput("c", "o")
    assert body(output, calls={"c": "f"}) == f"{start}functions.f{rest}"
    assert body(output, calls={"c": "wiki.look_up"}) == f"{start}wiki.look_up{rest}"
    assert body(output) == f"{start}tool{rest}"
    called = body(FunctionCall("c", "g", "{}", namespace="n"), output, calls={"c": "old"})
    assert called.endswith(f"<|call|>{start}n.g{rest}")


def test_calls_of_freeform_tools_are_bare_text() -> None:
    text = body(CustomToolCall("c", "apply_patch", ' a"\n'), CustomToolCallOutput("c", "ok"))
    assert text == (
        '<|start|>assistant<|channel|>commentary to=functions.apply_patch<|message|> a"\n<|call|>'
        "<|start|>functions.apply_patch to=assistant<|channel|>commentary<|message|>ok<|end|>"
    )


def test_reasoning_is_raw_or_its_summary() -> None:
    start = "<|start|>assistant<|channel|>analysis<|message|>"
    assert body(Reasoning(summary=(SummaryText("s"),), content=(ReasoningText("r"),))) == f"{start}r<|end|>"
    assert body(Reasoning(summary=(SummaryText("s"),))) == f"{start}s<|end|>"


def test_items_without_a_form_give_nothing() -> None:
    nothing = Message("assistant", "")
    opaque = Opaque("web_search_call", {})
    assert body(ItemReference("x"), CompactionTrigger(), opaque, Reasoning(encrypted_content="x"), nothing) == ""


def test_an_answer_makes_a_model_forget_its_thoughts() -> None:
    thought, call = Reasoning(content=(ReasoningText("t"),)), FunctionCall("c", "f", "{}")
    output, answer, user = FunctionCallOutput("c", "o"), Message("assistant", "a"), Message("user", "u")
    assert not FORM.forgets([thought, call], [output])
    assert FORM.forgets([thought, call], [output, answer])
    assert FORM.forgets([thought, call, output, thought, answer], [user])
    assert not FORM.forgets([call, output, answer], [user])
    assert not FORM.forgets([answer, thought], [user])
    assert not FORM.forgets([thought], [user, answer])
    remark = Message("assistant", "a", phase="commentary")
    assert not FORM.forgets([thought, remark], [user])


@pytest.mark.parametrize("part", [InputImage(image_url="data:x"), InputFile(file_id="f")])
def test_images_and_files_are_refused(part: Any) -> None:
    items: list[Item] = [Message("user", (InputText("a"), part)), FunctionCallOutput("c", (part,))]
    for item in items:
        with pytest.raises(ApiError, match=part.type) as caught:
            FORM.body([item], {})
        assert (caught.value.code, caught.value.param) == ("unsupported_parameter", "input")


def test_other_vocabularies_are_refused() -> None:
    with pytest.raises(VocabularyError, match=r"no control token <\|start\|>"):
        harmony_format(scripted_tokenizer())


def test_a_checkpoint_is_read(tmp_path: Path) -> None:
    form = harmony_format(write_checkpoint(tmp_path, "", CONTROL))
    tokenizer = form.tokenizer
    ids = unpack_ids(form.body([Message("user", "Hi")], {}))
    assert ids[0] == tokenizer.special("<|start|>")
    assert b"".join(map(tokenizer.token_bytes, ids)) == b"<|start|>user<|message|>Hi<|end|>"


def test_stop_ids_are_those_of_the_library() -> None:
    assert {*FORM.stop_ids} == {*reference().stop_tokens_for_assistant_actions(), *marked("<|endoftext|>")}


# what was sampled, in the context


@pytest.mark.parametrize(
    ("sampled", "stands"),
    [
        # As in OpenAI's documentation: the token that ends a turn becomes the one that ends a message (O-67).
        ("<|channel|>final<|message|>4<|return|>", "<|channel|>final<|message|>4<|end|>"),
        ("<|channel|>final<|message|>4<|endoftext|>", "<|channel|>final<|message|>4<|end|>"),
        ("<|channel|>final<|message|>4", "<|channel|>final<|message|>4<|end|>"),
        ("<|channel|>analysis<|message|>x<|end|>", "<|channel|>analysis<|message|>x<|end|>"),
        (
            "<|channel|>analysis<|message|>x<|end|><|start|>assistant<|channel|>fi",
            "<|channel|>analysis<|message|>x<|end|>",
        ),
        ("<|channel|>commentary to=functions.f<|message|>{}<|call|>",) * 2,
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|return|>",
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        ),
        (
            " to=functions.f<|channel|>commentary<|message|>{",
            " to=functions.f<|channel|>commentary<|message|>{<|call|>",
        ),
        (
            "<|channel|>commentary to=f<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>a",
            "<|channel|>commentary to=f<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>a<|end|>",
        ),
        ("<|channel|>fi", "<|channel|>fi<|message|><|end|>"),
        ("Hello", "Hello<|end|>"),
        ("", "<|end|>"),
    ],
)
def test_what_was_sampled_is_completed(sampled: str, stands: str) -> None:
    ids = marked(sampled)
    kept, more = FORM.spoken(ids)
    assert [*ids[:kept], *unpack_ids(more)] == marked(stands)


@settings(deadline=None)
@given(steps=st.lists(steps, max_size=3), ending=st.tuples(st.just("answer"), words.filter(bool)) | calls)
def test_a_sampled_turn_is_as_the_library_renders_it(steps: list[Step], ending: Step) -> None:
    turn = messages_of([*(step for step in steps if step[0] != "call"), ending], forget=False)
    turn = turn[:-1] if ending[0] == "call" else turn  # without the output
    conversation, config = library.Conversation.from_messages(turn), library.RenderConversationConfig
    # This ends as the model ends its turn, with <|return|> or <|call|>.
    sampled = reference().render_conversation_for_training(conversation, config(auto_drop_analysis=False))
    opening = unpack_ids(FORM.opening(Brief()).ids)
    assert sampled[: len(opening)] == opening
    kept, more = FORM.spoken(sampled[len(opening) :])
    whole = reference().render_conversation(conversation, config(auto_drop_analysis=False))
    assert [*sampled[: len(opening) + kept], *unpack_ids(more)] == whole


# the complete example of OpenAI's documentation of the format (Apache-2.0)

DOCUMENTED = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-06-28

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message.
Calls to these tools must go to the commentary channel: 'functions'.<|end|><|start|>developer<|message|># Instructions

Use a friendly tone.

# Tools

## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets the current weather in the provided location.
type get_current_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

// Gets the current weather in the provided list of locations.
type get_multiple_weathers = (_: {
// List of city and state, e.g. ["San Francisco, CA", "New York, NY"]
locations: string[],
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

} // namespace functions<|end|><|start|>user<|message|>What is the weather like in SF?<|end|>\
<|start|>assistant<|channel|>analysis<|message|>Need to use function get_weather.<|end|>\
<|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>\
{"location":"San Francisco"}<|call|><|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>\
{"sunny": true, "temperature": 20}<|end|><|start|>assistant"""


def test_the_documented_example() -> None:
    units = {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
    city = {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
    many = 'List of city and state, e.g. ["San Francisco, CA", "New York, NY"]'
    cities = {"type": "array", "items": {"type": "string"}, "description": many}

    def taking(**properties: Any) -> dict[str, Any]:
        return {"type": "object", "properties": properties | {"format": units}, "required": [*properties]}

    what = "Gets the current weather in the provided"
    tools = (
        Tool("function", "get_location", None, "Gets the location of the user."),
        Tool("function", "get_current_weather", None, f"{what} location.", taking(location=city)),
        Tool("function", "get_multiple_weathers", None, f"{what} list of locations.", taking(locations=cities)),
    )
    brief = Brief("Use a friendly tone.", tools=ToolSet(tools), effort="high")
    items: list[Item] = [
        Message("user", "What is the weather like in SF?"),
        Reasoning(content=(ReasoningText("Need to use function get_weather."),)),
        FunctionCall("c", "get_weather", '{"location":"San Francisco"}'),
        FunctionCallOutput("c", '{"sunny": true, "temperature": 20}'),
    ]
    form = at("2025-06-28")
    ids = unpack_ids(form.whole(brief, items, {}) + form.opening(brief).ids)
    assert ids == marked(DOCUMENTED)


def test_the_documented_next_turn() -> None:
    thought = 'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.'
    items: list[Item] = [
        Message("user", "What is 2 + 2?"),
        Reasoning(content=(ReasoningText(thought),)),
        Message("assistant", "2 + 2 = 4."),
        Message("user", "What about 9 / 2?"),
    ]
    expected = (
        "<|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|end|>"
        "<|start|>user<|message|>What about 9 / 2?<|end|><|start|>assistant"
    )
    assert unpack_ids(FORM.body(items, {}) + FORM.opening(Brief()).ids) == marked(expected)
