"""vLLM's parsers without an engine. What they make of an output id by id must be what they make of all of it at once
(`Parser.parse`, the library's own reference)."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, ReasoningDelta, TextDelta
from inference.detokenizer import Detokenizer
from inference.engine import Chunk, EngineError, Generation, Parsing, Sampling
from inference.link import LinkEngine, serve_link
from inference.tokenizer import HubTokenizer, load_tokenizer, pack_ids, unpack_ids
from inference.vllmparsers import EngineParsers, MessageReader, OutputReader, check_parsers
from tests.support.engines import PlannedEngine
from tests.support.vocabulary import MARKUP, reference, write_checkpoint

real = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # the import takes 15 s
MARKS = (*MARKUP, "<|python_tag|>", "[TOOL_CALLS]")
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = json.dumps(
    [
        {"type": "function", "function": {"name": name, "description": "d", "parameters": PARAMETERS}}
        for name in ("get_weather", "db.find")
    ]
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> HubTokenizer:
    return load_tokenizer(write_checkpoint(tmp_path_factory.mktemp("model"), "x", MARKS))


@pytest.fixture(scope="module")
def library() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=reference(MARKS))


def ids_of(tokenizer: HubTokenizer, text: str) -> list[int]:
    """Markup as the model would sample it."""
    ids: list[int] = []
    for piece in filter(None, re.split(f"({'|'.join(map(re.escape, (*MARKS, '<|im_end|>')))})", text)):
        ids += [tokenizer.special(piece)] if tokenizer.has_special(piece) else unpack_ids(tokenizer.encode(piece))
    return ids


def read(reader: OutputReader, ids: list[int], step: int = 1, stopped: bool = True) -> list[Delta]:
    deltas: list[Delta] = []
    for start in range(0, len(ids), step):
        last = start + step >= len(ids)
        deltas += reader.feed(ids[start : start + step], finished=last, stopped=last and stopped)
    return joined(deltas)


def joined(deltas: list[Delta]) -> list[Delta]:
    """Neighbours of a kind as one."""
    merged: list[Delta] = []
    for delta in deltas:
        if merged and isinstance(delta, TextDelta | ReasoningDelta | CallDelta) and type(merged[-1]) is type(delta):
            merged[-1] = type(delta)(merged[-1].text + delta.text)  # type: ignore[union-attr]
        else:
            merged.append(delta)
    return merged


def call(name: str, arguments: str) -> list[Delta]:
    return [CallStart("function", name), CallDelta(arguments), CallEnd()]


# -- real parsers

HERMES = (
    'Let me see.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich 🌦", "days": 3}}\n</tool_call>\n'
    '<tool_call>\n{"name": "db.find", "arguments": {}}\n</tool_call>'
)
XML = (
    "Looking.\n<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
    "</parameter>\n</function>\n</tool_call>"
)
CASES = [
    ("hermes", None, HERMES),
    ("hermes", None, "No tools: 你好 <tool> é"),
    ("hermes", "deepseek_r1", f"Hm, weather.\n</think>\n\n{HERMES}"),
    ("hermes", "deepseek_r1", f"<think>\nHm, weather.\n</think>\n\n{HERMES}"),
    ("hermes", "qwen3", f"<think>\nHm, weather.\n</think>\n\n{HERMES}"),
    ("hermes", "qwen3", "<think>\nHm.\n</think>\n\nJust words."),
    (None, "qwen3", "<think>\nHm.\n</think>\n\nJust words."),
    ("llama3_json", None, '{"name": "get_weather", "parameters": {"city": "Zürich", "days": 3}}'),
    ("llama3_json", None, "Just words {"),
    ("mistral", None, '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}]'),
    ("qwen3_coder", None, XML),
    ("qwen3_coder", "qwen3", f"<think>\nHm.\n</think>\n\n{XML}"),
    ("pythonic", None, '[get_weather(city="Rome", days=2), get_weather(city="Oslo")]'),
]


def expected(
    library: Any, tokenizer: HubTokenizer, tool: str | None, reasoning: str | None, text: str
) -> tuple[str, str, list[tuple[str, Any]]]:
    """What the library makes of the whole text."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.parser import ParserManager

    form = ParserManager.get_parser(tool, reasoning, enable_auto_tools=True)
    request = ChatCompletionRequest(messages=[], tools=json.loads(TOOLS))
    parser = form(library, request.tools)
    request = parser.adjust_request(request)
    ids = ids_of(tokenizer, text)
    thought, content, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=ids)
    return (
        (thought or "").strip(),
        (content or "").strip(),
        [(each.name, json.loads(each.arguments)) for each in calls or ()],
    )


def summary(deltas: list[Delta]) -> tuple[str, str, list[tuple[str, Any]]]:
    calls, names = [], []
    for delta in deltas:
        if isinstance(delta, CallStart):
            assert delta.kind == "function"
            assert delta.namespace is None
            names.append(delta.name)
        elif isinstance(delta, CallDelta):
            calls.append((names[-1], json.loads(delta.text)))
    assert sum(isinstance(delta, CallEnd) for delta in deltas) == len(calls) == len(names)
    thought = "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    return thought.strip(), text.strip(), calls


class TestRealParsers:
    pytestmark = real

    @pytest.mark.parametrize(("tool", "reasoning", "text"), CASES)
    def test_a_replayed_output_is_what_the_library_makes_of_it(
        self, library: Any, tokenizer: HubTokenizer, tool: str | None, reasoning: str | None, text: str
    ) -> None:
        parsers = EngineParsers(tool, reasoning, library, tokenizer)
        ids = [*ids_of(tokenizer, text), tokenizer.special("<|im_end|>")]
        got = {step: read(parsers.begin(Parsing(TOOLS), [1, 2]), ids, step) for step in (1, 3, 1000)}
        assert summary(got[1]) == expected(library, tokenizer, tool, reasoning, text)
        assert got[3] == got[1000] == got[1]

    def test_reasoning_that_the_prompt_has_ended(self, library: Any, tokenizer: HubTokenizer) -> None:
        parsers = EngineParsers("hermes", "qwen3", library, tokenizer)
        prompt = ids_of(tokenizer, "hi<think>\n\n</think>\n\n")
        assert read(parsers.begin(Parsing(TOOLS), prompt), ids_of(tokenizer, "Words"), stopped=False) == [
            TextDelta("Words")
        ]

    def test_without_tools_there_are_no_calls(self, library: Any, tokenizer: HubTokenizer) -> None:
        parsers = EngineParsers("hermes", None, library, tokenizer)
        assert read(parsers.begin(Parsing(), []), ids_of(tokenizer, HERMES), stopped=False) == [TextDelta(HERMES)]

    @pytest.mark.parametrize("end", range(1, 40, 3))
    def test_a_call_that_is_cut_off_has_no_end(self, library: Any, tokenizer: HubTokenizer, end: int) -> None:
        text = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 3}}\n</tool_call>'
        ids = ids_of(tokenizer, text)[:end]
        parsers = EngineParsers("hermes", None, library, tokenizer)
        deltas = read(parsers.begin(Parsing(TOOLS), []), ids, stopped=False)
        arguments = "".join(delta.text for delta in deltas if isinstance(delta, CallDelta))
        assert '{"city": "Zürich", "days": 3}'.startswith(arguments)
        assert (CallEnd() in deltas) == arguments.endswith("}")

    def test_markup_that_is_special_is_seen(self, tmp_path: Path) -> None:
        folder = write_checkpoint(tmp_path, "x", ())
        data = json.loads((folder / "tokenizer.json").read_text())
        first = max(token["id"] for token in data["added_tokens"]) + 1
        for n, name in enumerate(MARKS):
            flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
            data["added_tokens"].append({"id": first + n, "content": name, **flags})
        (folder / "tokenizer.json").write_text(json.dumps(data))
        tokenizer = load_tokenizer(folder)
        library = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        assert tokenizer.special("<tool_call>") in tokenizer.special_ids
        parsers = EngineParsers("hermes", None, library, tokenizer)
        ids = [*ids_of(tokenizer, HERMES), tokenizer.special("<|im_end|>")]
        assert summary(read(parsers.begin(Parsing(TOOLS), []), ids))[2][0][0] == "get_weather"

    @pytest.mark.parametrize(
        ("tool", "reasoning", "words"),
        [
            ("hermez", None, "tool parser hermez; did you mean hermes"),
            (None, "quen3", "reasoning parser quen3; .*qwen3"),
        ],
    )
    def test_an_unknown_name_lists_those_that_look_like_it(
        self, tool: str | None, reasoning: str | None, words: str
    ) -> None:
        with pytest.raises(EngineError, match=words) as unknown:
            check_parsers(tool, reasoning)
        assert unknown.value.fault == "unavailable"

    def test_a_parser_that_misses_its_tokens_is_known_at_the_start(self, tmp_path: Path) -> None:
        tokenizer = load_tokenizer(write_checkpoint(tmp_path, "x", ()))
        library = transformers.PreTrainedTokenizerFast(tokenizer_object=reference(()))
        with pytest.raises(EngineError, match="deepseek_r1 can't work with this model") as refused:
            EngineParsers(None, "deepseek_r1", library, tokenizer)
        assert refused.value.fault == "unavailable"

    @pytest.mark.parametrize("tools", ["{", '[{"type": "secret"}]'])
    def test_tools_that_are_none_are_invalid(
        self, library: Any, tokenizer: HubTokenizer, tools: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level(logging.INFO)
        parsers = EngineParsers("hermes", None, library, tokenizer)
        with pytest.raises(EngineError) as refused:
            parsers.begin(Parsing(tools), [])
        assert refused.value.fault == "invalid"
        assert "secret" not in refused.value.message + caplog.text


def test_an_engine_without_parsers_gives_text(tokenizer: HubTokenizer) -> None:
    parsers = EngineParsers(None, None, None, tokenizer)
    ids = [*ids_of(tokenizer, f"é<think>{HERMES}"), tokenizer.special("<|im_end|>")]
    for step in (1, 4, 1000):
        assert read(parsers.begin(Parsing(TOOLS), []), ids, step) == [TextDelta(f"é<think>{HERMES}")]


# -- any parser


def message(
    content: str | None = None, reasoning: str | None = None, *calls: tuple[int, str | None, str | None]
) -> Any:
    made = [
        SimpleNamespace(index=index, function=SimpleNamespace(name=name, arguments=text)) for index, name, text in calls
    ]
    return SimpleNamespace(content=content, reasoning=reasoning, tool_calls=made)


class FakeParser:
    """Answers each step with what a function makes of its text."""

    def __init__(self, answer: Callable[[str], Any]) -> None:
        self.answer = answer

    def parse_delta(self, text: str, ids: list[int], request: Any, prompt: list[int], *, finished: bool) -> Any:
        return self.answer(text)


def fails_at(mark: str) -> Callable[[str], Any]:
    """Keeps quiet from a "(" on and breaks at the mark."""
    quiet = False

    def answer(text: str) -> Any:
        nonlocal quiet
        if mark in text:
            raise IndexError(f"list index out of range: {text}")
        quiet = quiet or "(" in text
        return None if quiet else message(text)

    return answer


def test_a_parser_that_fails_loses_nothing_and_is_logged_once(
    tokenizer: HubTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    text = "before (secret ! after ! end"
    reader = OutputReader(FakeParser(fails_at("!")), None, Detokenizer(tokenizer), [])
    assert read(reader, ids_of(tokenizer, text), stopped=False) == [TextDelta(text)]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "IndexError" in caplog.text
    assert "secret" not in caplog.text


def test_an_output_that_a_parser_makes_nothing_of_is_text(tokenizer: HubTokenizer) -> None:
    reader = OutputReader(FakeParser(lambda _: None), None, Detokenizer(tokenizer), [])
    assert read(reader, ids_of(tokenizer, '{"name": "f"'), stopped=False) == [TextDelta('{"name": "f"')]


def test_white_space_between_the_parts_is_dropped_and_that_inside_text_kept() -> None:
    reader = MessageReader()
    deltas = [
        *reader.read(message(None, "\n")),
        *reader.read(message(None, "why\n")),
        *reader.read(message("\n\n")),
        *reader.read(message(" so")),
        *reader.read(message("\n\n")),
        *reader.read(message(None, None, (0, "f", None))),
        *reader.read(message(None, None, (0, None, '{"a": '), (0, None, "1}"))),
        *reader.read(message("\n")),
        *reader.read(message(None, None, (1, "g", ""))),
        *reader.finish(stopped=True),
    ]
    assert joined(deltas) == [
        ReasoningDelta("why\n"),
        TextDelta("so\n\n"),
        *call("f", '{"a": 1}'),
        *call("g", "{}"),
    ]


def test_late_arguments_and_lone_surrogates() -> None:
    reader = MessageReader()
    deltas = reader.read(message("a\ud83d", None, (0, "f", '"\ud800"'), (1, "g", "{}"), (0, None, "late")))
    assert deltas == [TextDelta("a\ufffd"), *call("f", '"\ufffd"'), CallStart("function", "g"), CallDelta("{}")]


pieces = st.one_of(
    st.builds(message, st.text(" \nab", max_size=3)),
    st.builds(message, st.none(), st.text(" \nab", max_size=3)),
    st.builds(
        lambda *calls: message(None, None, *calls),
        st.tuples(st.integers(0, 3), st.none() | st.just("f"), st.none() | st.text("{}1", max_size=3)),
    ),
)


@settings(deadline=None)
@given(st.lists(pieces, max_size=12), st.booleans())
def test_any_messages_give_a_well_formed_run(messages: list[Any], stopped: bool) -> None:
    reader = MessageReader()
    deltas = [delta for each in messages for delta in reader.read(each)]
    tail = reader.finish(stopped)
    is_open = False
    for delta in deltas + tail:
        if isinstance(delta, CallStart):
            assert not is_open
            is_open = True
        elif isinstance(delta, CallDelta | CallEnd):
            assert is_open
            is_open = isinstance(delta, CallDelta)
        else:
            assert not is_open
            assert delta.text  # type: ignore[union-attr]
    said = "".join(each.content or "" for each in messages)
    text = "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))
    assert text.split() == said.split() or "".join(text.split()) == "".join(said.split())


async def test_the_deltas_of_a_parsing_engine_cross_the_link(tokenizer: HubTokenizer) -> None:
    reader = OutputReader(FakeParser(message), None, Detokenizer(tokenizer), [])
    ids = ids_of(tokenizer, "Zürich 🌦")
    plan = [Chunk([token], deltas=reader.feed([token])) for token in ids]
    server = await serve_link(
        PlannedEngine([*plan, Chunk([], "stop", deltas=reader.feed([], finished=True))]), "127.0.0.1", 0, "t"
    )
    link = LinkEngine(server.address, "t")
    generation = Generation("r", "m", (pack_ids([1]),), Sampling(99), parsing=Parsing())
    chunks = [chunk async for chunk in link.generate(generation)]
    assert joined([delta for chunk in chunks for delta in chunk.deltas or ()]) == [TextDelta("Zürich 🌦")]
    assert [token for chunk in chunks for token in chunk.ids] == ids
    await link.close()
    await server.close()
