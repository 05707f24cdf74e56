"""What a Llama 3 model says: bare JSON calls, text to the letter, the same however it is portioned."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, TextDelta
from gateway.protocol.tools import Tool, ToolChoice, ToolSet
from inference.engine import Guide
from inference.formats.format import Opening
from inference.formats.llama3_parser import Llama3Parser
from inference.tokenizer import HubTokenizer, unpack_ids
from tests.support.cost import cpu_seconds, ever
from tests.support.llama3 import CONTROL, reference

TOOLS = ToolSet(
    (
        Tool("function", "get_weather"),
        Tool("function", "search", "docs"),
        Tool("custom", "apply_patch"),
        Tool("function", "name-with.dots"),
    )
)
NONE = ToolSet()
GUIDE = Guide("structural_tag", "")  # what is in it is the engine's business
FORCED = '{"name": "docs.search", "parameters":'
EOT = "<|eot_id|>"
TAG = "<|python_tag|>"


@functools.cache
def hub() -> HubTokenizer:
    return HubTokenizer(json.loads(reference().to_str()), "test")


def ids_of(output: str) -> list[int]:
    """Ids of an output as a model samples it: names of control tokens in it are these tokens."""
    ids: list[int] = []
    while output:
        at = {output.index(name): name for name in CONTROL if name in output}
        first = min(at, default=len(output))
        ids += unpack_ids(hub().encode(output[:first]))
        ids += [hub().special(at[first])] if at else []
        output = output[first + len(at.get(first, "")) :]
    return ids


def merged(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of a kind as one."""
    out: list[Delta] = []
    for delta in deltas:
        if out and isinstance(delta, TextDelta | CallDelta) and type(out[-1]) is type(delta):
            out[-1] = type(delta)(out[-1].text + delta.text)
        else:
            out.append(delta)
    return out


@functools.cache
def byte_ids() -> dict[int, int]:
    """The id of every single byte."""
    named = {hub().token_bytes(i): i for i in range(hub().vocab_size)}
    return {byte: named[bytes([byte])] for byte in range(256)}


def parsed(portions: Iterable[Sequence[int]], tools: ToolSet, opening: Opening) -> list[Delta]:
    parser = Llama3Parser(hub(), tools, opening)
    deltas = [delta for portion in portions for delta in parser.feed(portion)] + parser.finish()
    assert parser.reasoning_tokens == 0
    return merged(deltas)


def each_way(output: str, tools: ToolSet = TOOLS, opening: Opening | None = None) -> list[Delta]:
    """What the parser makes of an output: the same whole, id by id and byte by byte."""
    ids, opening = ids_of(output), opening or Opening(b"")
    deltas = parsed([ids], tools, opening)
    assert parsed(([i] for i in ids), tools, opening) == deltas
    special = hub().special_ids
    spelled = [[i] if i in special else [byte_ids()[byte] for byte in hub().token_bytes(i)] for i in ids]
    assert parsed(([i] for run in spelled for i in run), tools, opening) == deltas
    return deltas


def called(name: str, arguments: str, namespace: str | None = None) -> list[Delta]:
    return [CallStart("function", name, namespace), CallDelta(arguments), CallEnd()]


ROME = '{"city": "Rome"}'
GET = f'{{"name": "get_weather", "parameters": {ROME}}}'
ROME_CALL = called("get_weather", ROME)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (GET + EOT, ROME_CALL),
        (GET, ROME_CALL),
        (TAG + GET + "<|eom_id|>", ROME_CALL),
        ("\n " + GET + "\n" + EOT, ROME_CALL),
        (GET.replace("parameters", "arguments") + EOT, ROME_CALL),
        ('{"type": "function", ' + GET[1:] + EOT, ROME_CALL),
        (f'{{"parameters": {ROME}, "type": "function", "name": "get_weather"}}' + EOT, ROME_CALL),
        (f'{{"name": "get_weather", "parameters": {ROME}, "id": 3, "arguments": {{}}}}' + EOT, ROME_CALL),
        # several
        (f"{GET}; {GET}" + EOT, ROME_CALL * 2),
        (f"{GET};{GET}\n{GET}" + EOT, ROME_CALL * 3),
        (TAG + GET + TAG + GET + "<|eom_id|>", ROME_CALL * 2),
        (GET + "; " + EOT, ROME_CALL),
        # names
        ('{"name": "docs.search", "parameters": {}}', called("search", "{}", "docs")),
        ('{"name": "search", "parameters": {}}', called("search", "{}", "docs")),
        ('{"name": "name-with.dots", "parameters": {}}', called("name-with.dots", "{}")),
        ('{"name": "get\\u005fweather", "parameters": {}}', called("get_weather", "{}")),
        ('{"name": "unknown", "parameters": {"a": 1}}', called("unknown", '{"a": 1}')),
        # arguments that are none, a string, no object
        ('{"name": "get_weather"}' + EOT, called("get_weather", "{}")),
        ('{"name": "get_weather", "parameters": "{\\"city\\": \\"Rome\\"}"}', ROME_CALL),
        ('{"name": "get_weather", "parameters": null}', called("get_weather", "null")),
        # freeform tools
        (
            '{"name": "apply_patch", "parameters": {"input": "a\\n\\"b\\" \\u00e9"}}',
            [CallStart("custom", "apply_patch"), CallDelta('a\n"b" é'), CallEnd()],
        ),
        ('{"name": "apply_patch"}', [CallStart("custom", "apply_patch"), CallEnd()]),
        # the model ends its message too early, or writes too much
        (GET[:-1] + EOT, ROME_CALL),
        (GET[:-2] + EOT, called("get_weather", ROME[:-1])),
        (GET + "}" + EOT, ROME_CALL),
        ('{"name": "get_weather"' + EOT, called("get_weather", "{}")),
        (GET[:-1] + " and so on", [*ROME_CALL, TextDelta("and so on")]),
        (GET + "\n\nDone: {}", [*ROME_CALL, TextDelta("Done: {}")]),
        (f'{GET}; {{"a": 1}}', [*ROME_CALL, TextDelta('; {"a": 1}')]),
    ],
)
def test_calls(output: str, expected: list[Delta]) -> None:
    assert each_way(output) == expected


@pytest.mark.parametrize(
    "text",
    [
        "Hello.", "  Hello.\n", "\n\n", "{", "{}", "{ }", '{"', '{"na', '{"name', '{"name": ', '{"name": "get_wea',
        '{"name": "unknown"}', '{"name": "unknown"', '{"name": 5, "parameters": {}}', '{"name": "", "parameters": {}}',
        '{"name": ["get_weather"], "parameters": {}}', '{"parameters": {"city": "Rome"}}', '{"parameters": {"a',
        '{"city": "Rome", "name": "get_weather", "parameters": {}}', '{"name": "Bob", "age": 7, "parameters": {}}',
        '{"type": "object", "name": "get_weather", "parameters": {}}', '{"type": "func", "name": "x"}', '{"type": "fu',
        '{"name" <b>', '{"name": "get_weather" x, "parameters": {}}', '{"name": "get_weather", "parameters": )}',
        f'{{"name": "{"x" * 800}", "parameters": {{}}}}', '[{"name": "get_weather", "parameters": {}}]',
        f"Sure: {GET}", f"```json\n{GET}\n```", f"{{}} {GET}", " " * 65 + GET, "def f(x):\n    return {}",
        "naïve {\"é\": '漢字 👩‍👩‍👧‍👦'}",
    ],
)  # fmt: skip
def test_text_comes_back_to_the_letter(text: str) -> None:
    assert each_way(text + EOT) == [TextDelta(text)]
    assert each_way(text) == [TextDelta(text)]


def test_the_published_examples() -> None:
    """Answers on Meta's pages about prompt formats (Llama 3.1 and 3.2)."""
    tools = ToolSet((Tool("function", "trending_songs"),))
    parameters = '{\n        "n": "10",\n        "genre": "all"\n    }'
    songs = f'{{\n    "type": "function",\n    "name": "trending_songs",\n    "parameters": {parameters}\n}}'
    assert each_way(f"{TAG}{songs}<|eom_id|>", tools) == called("trending_songs", parameters)
    code = "def is_prime(n):\n    return {}\n\nprint(is_prime(7))  # Output: True"
    assert each_way(f"{TAG}{code}<|eom_id|>", tools) == [TextDelta(code)]
    search = 'brave_search.call(query="latest price of 1oz gold")'
    assert each_way(f"{TAG}{search}<|eom_id|>", tools) == [TextDelta(search)]
    assert each_way(f'"What is a helpful assistant?"{EOT}', tools) == [TextDelta('"What is a helpful assistant?"')]


def test_a_tag_opens_a_call_behind_text() -> None:
    assert each_way(f"Let me see.{TAG}{GET}<|eom_id|>") == [TextDelta("Let me see."), *ROME_CALL]
    assert each_way(f'{{"a{TAG}{GET}') == [TextDelta('{"a'), *ROME_CALL]


def test_a_tag_that_is_spelled_is_text() -> None:
    parser = Llama3Parser(hub(), TOOLS, Opening(b""))
    ids = unpack_ids(hub().encode(TAG + GET))
    assert merged(parser.feed(ids) + parser.finish()) == [TextDelta(TAG + GET)]


def test_without_tools_all_is_text() -> None:
    for tools in (NONE, ToolSet(TOOLS.tools, ToolChoice("none"))):
        assert each_way(GET + EOT, tools) == [TextDelta(GET)]
        assert each_way(TAG + GET + EOT, tools) == [TextDelta(GET)]


def test_a_call_that_is_cut_off_stays_open() -> None:
    """Sampling ended without an end of the message: at the token limit."""
    start = CallStart("function", "get_weather")
    assert each_way('{"name": "get_weather"') == [start]
    assert each_way(GET[:-4]) == [start, CallDelta(ROME[:-3])]
    assert each_way('{"name": "apply_patch", "parameters": {"input": "a\\') == [
        CallStart("custom", "apply_patch"), CallDelta("a"),
    ]  # fmt: skip


def test_a_forced_call() -> None:
    opening = Opening(b"", FORCED)
    assert each_way(' {"q": 1}}' + EOT, TOOLS, opening) == called("search", '{"q": 1}', "docs")
    assert each_way(f' {{"q": 1}}}}; {GET}', TOOLS, opening) == [*called("search", '{"q": 1}', "docs"), *ROME_CALL]


def test_under_a_guide_a_call_has_a_known_name() -> None:
    """With a schema for the text beside tools, an object with a name and parameters can be the answer."""
    opening = Opening(b"", guide=GUIDE)
    answer = '{"name": "Bob", "parameters": {}}'
    assert each_way(answer + EOT, TOOLS, opening) == [TextDelta(answer)]
    assert each_way(GET + EOT, TOOLS, opening) == ROME_CALL


def test_nothing_is_held_back_for_long() -> None:
    def after(text: str) -> list[Delta]:
        return merged(Llama3Parser(hub(), TOOLS, Opening(b"")).feed(ids_of(text)))

    assert after("Hel") == [TextDelta("Hel")]
    assert after('{"city": "') == [TextDelta('{"city": "')]
    assert after('{"name": "get_weather", "parameters": {') == [CallStart("function", "get_weather"), CallDelta("{")]
    assert after('{"name": "get_weather", "parameters": {"city": "Ro') == [
        CallStart("function", "get_weather"), CallDelta('{"city": "Ro'),
    ]  # fmt: skip
    assert after('{"name": "apply_patch", "parameters": {"input": "a\\nb') == [
        CallStart("custom", "apply_patch"), CallDelta("a\nb"),
    ]  # fmt: skip
    assert after(GET) == ROME_CALL


def test_half_a_code_point_is_held_back() -> None:
    parser = Llama3Parser(hub(), TOOLS, Opening(b""))
    ids = ids_of("é")
    assert len(ids) == 2
    assert parser.feed(ids[:1]) == []
    assert parser.finish() == [TextDelta("\ufffd")]


pieces = st.sampled_from(
    (GET, GET[:-1], GET[:20], ROME, "; ", ";", " ", "\n", "}", "{", '{"name": "', '"', "\\", "<", TAG, EOT, "text", "é",
     '"parameters": ', '{"type": "function", ', ",", ":", "</tool_call>", "<tool_call>")
) | st.text(max_size=4)  # fmt: skip


@settings(deadline=None, max_examples=200)
@given(output=st.lists(pieces, max_size=8).map("".join))
def test_any_output_is_well_formed_and_portions_do_not_matter(output: str) -> None:
    open_call = False
    for delta in each_way(output):
        assert not (isinstance(delta, TextDelta | CallDelta) and not delta.text)
        assert open_call == isinstance(delta, CallDelta | CallEnd)
        open_call = isinstance(delta, CallStart | CallDelta)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=100)
@given(
    calls=st.lists(
        st.tuples(
            st.sampled_from(["get_weather", "docs.search", "nope"]),
            st.dictionaries(st.text(max_size=4), json_values, max_size=3),
            st.booleans(),
        ),
        min_size=1,
        max_size=3,
    )
)
def test_any_calls_are_read_back(calls: list[tuple[str, dict[str, object], bool]]) -> None:
    written = [
        json.dumps({"name": name, "parameters": given}, ensure_ascii=escaped, indent=2 if escaped else None)
        for name, given, escaped in calls
    ]
    parser = Llama3Parser(hub(), TOOLS, Opening(b""))
    deltas = merged(parser.feed(unpack_ids(hub().encode("; ".join(written)))) + parser.finish())
    found = [(start.name, json.loads(text.text)) for start, text in zip(deltas[::3], deltas[1::3], strict=True)]
    assert found == [(name.removeprefix("docs."), given) for name, given, _ in calls]
    assert deltas[2::3] == [CallEnd()] * len(calls)


@pytest.mark.parametrize(
    "begin",
    ['{"name": "get_weather", "parameters": {"a": "', '{"parameters": {"a": "', '{"', "{ ", " ", "{", "[[", TAG],
)
def test_a_long_output_costs_as_much_as_text(begin: str) -> None:
    """Twenty times the text's time leaves room for two readers in Python, and none for a quadratic one."""

    def seconds(ids: list[int]) -> float:
        parser = Llama3Parser(hub(), TOOLS, Opening(b""))

        def run() -> None:
            for at in range(0, len(ids), 3):
                parser.feed(ids[at : at + 3])
            parser.finish()

        return cpu_seconds(run)

    letters = unpack_ids(hub().encode("a b" * 60_000))
    assert ever(lambda: seconds(ids_of(begin) + letters) < 20 * max(seconds(letters), 0.02))
