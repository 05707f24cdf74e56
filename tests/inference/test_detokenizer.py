"""Ids to text: equality with decoding at once, whatever the portions, and no half code points."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from inference.detokenizer import Detokenizer
from inference.tokenizer import HubTokenizer, TiktokenTokenizer, scripted_tokenizer, unpack_ids
from tests.support.cost import cpu_seconds, ever
from tests.support.vocabulary import reference

HUB = HubTokenizer(json.loads(reference().to_str()), "test")
VOCABULARIES: dict[str, HubTokenizer | TiktokenTokenizer] = {"hub": HUB, "tiktoken": scripted_tokenizer()}


@pytest.fixture(params=VOCABULARIES, scope="module")
def tokenizer(request: pytest.FixtureRequest) -> HubTokenizer | TiktokenTokenizer:
    return VOCABULARIES[request.param]


def portions(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(ids), *(cut % (len(ids) + 1) for cut in cuts)})
    return [ids[a:b] for a, b in pairwise(edges)]


@settings(deadline=None)
@given(data=st.data(), cuts=st.lists(st.integers(0, 60)))
def test_any_portions_give_the_text_of_all_bytes(
    tokenizer: HubTokenizer | TiktokenTokenizer, data: st.DataObject, cuts: list[int]
) -> None:
    # any ids at all, so also bytes that are no UTF-8, special ids and ids outside the vocabulary
    near = st.integers(0, 700) | st.integers(tokenizer.vocab_size - 10, tokenizer.vocab_size + 3)
    ids = data.draw(st.lists(near | st.integers(0, tokenizer.vocab_size), max_size=40))
    shown = [i for i in ids if i not in tokenizer.special_ids]
    expected = b"".join(map(tokenizer.token_bytes, shown)).decode("utf-8", "replace")
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.feed, portions(ids, cuts))) + detokenizer.finish() == expected
    assert detokenizer.feed(ids) + detokenizer.finish() == expected  # and again


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, HUB.vocab_size - 1), max_size=40))
def test_the_reference_decodes_the_same(ids: list[int]) -> None:
    detokenizer = Detokenizer(HUB)
    assert detokenizer.feed(ids) + detokenizer.finish() == reference().decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(text=st.text(max_size=30))
def test_text_survives_and_is_never_half_a_code_point(text: str) -> None:
    tokenizer = scripted_tokenizer()
    detokenizer, so_far = Detokenizer(tokenizer), ""
    for token_id in unpack_ids(tokenizer.encode(text)):
        so_far += detokenizer.step(token_id) or ""
        assert text.startswith(so_far)  # no U+FFFD that is not the text's own
    assert so_far == text
    assert detokenizer.finish() == ""


def byte_ids(tokenizer: HubTokenizer | TiktokenTokenizer, data: bytes) -> list[int]:
    by_bytes = {tokenizer.token_bytes(i): i for i in range(600)}
    return [by_bytes[bytes([byte])] for byte in data]


def test_a_code_point_cut_at_each_byte(tokenizer: HubTokenizer | TiktokenTokenizer) -> None:
    for text in ("😀", "한", "é"):
        ids = byte_ids(tokenizer, text.encode())
        detokenizer = Detokenizer(tokenizer)
        assert [detokenizer.step(i) for i in ids] == [*[""] * (len(ids) - 1), text]
        for cut in range(1, len(ids)):
            assert detokenizer.feed(ids[:cut]) == ""
            assert detokenizer.finish() == "\ufffd"


def test_invalid_bytes_give_replacement_characters_at_once(tokenizer: HubTokenizer | TiktokenTokenizer) -> None:
    detokenizer = Detokenizer(tokenizer)
    ids = byte_ids(tokenizer, b"a\xffb\xe2\x82c")
    assert [detokenizer.step(i) for i in ids] == [
        "a",
        "\ufffd",
        "b",
        "",
        "",
        "\ufffdc",
    ]


def test_special_ids_are_reported_and_silent(tokenizer: HubTokenizer | TiktokenTokenizer) -> None:
    end = tokenizer.special("<|im_end|>")
    first, second = byte_ids(tokenizer, "é".encode())
    assert Detokenizer(tokenizer).step(end) is None
    shown = Detokenizer(tokenizer, {end})
    assert shown.step(end) == "<|im_end|>"
    assert Detokenizer(tokenizer).step(end) is None  # what one shows stays hidden to others
    detokenizer = Detokenizer(tokenizer)
    assert [detokenizer.step(i) for i in (first, end, second)] == ["", None, "é"]


def test_markup_tokens_have_text() -> None:
    assert Detokenizer(HUB).step(HUB.special("<tool_call>")) == "<tool_call>"


def sentencepiece() -> HubTokenizer:
    pieces = {"<unk>": 0, "<s>": 1, "▁hello": 2, "▁": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    plain = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    plain.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    plain.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    return HubTokenizer(json.loads(plain.to_str()), "test")


def test_vocabularies_that_are_not_byte_level() -> None:
    tokenizer = sentencepiece()
    detokenizer = Detokenizer(tokenizer)
    emoji = [4 + byte for byte in "😀".encode()]
    assert detokenizer.feed([2, *emoji, 1, 2]) == " hello😀 hello"
    assert detokenizer.step(1) is None
    assert detokenizer.finish() == ""
    assert detokenizer.feed([2, *emoji[:2]]).strip() == "hello"
    assert set(detokenizer.finish()) == {"\ufffd"}
    assert detokenizer.finish() == ""


def test_bytes_that_are_no_text_come_out_where_a_library_must_decode() -> None:
    tokenizer = sentencepiece()
    for count in (1, 15, 16, 17, 40):
        detokenizer = Detokenizer(tokenizer)
        garbage = [4 + 0x80] * count
        assert detokenizer.feed([2, *garbage, 2]) + detokenizer.finish() == f" hello{chr(0xFFFD) * count} hello"
        assert detokenizer.feed([2, *garbage]) + detokenizer.finish() == f" hello{chr(0xFFFD) * count}"
        assert detokenizer.feed([4 + byte for byte in "é".encode()]) == "é"  # nothing is left of it


def work(tokenizer: HubTokenizer, ids: list[int]) -> float:
    """Seconds for an id."""
    detokenizer = Detokenizer(tokenizer)

    def run() -> None:
        for token_id in ids:
            detokenizer.step(token_id)
        detokenizer.finish()

    return cpu_seconds(run) / len(ids)


def test_a_long_run_of_bytes_that_are_no_text_costs_as_much_as_words() -> None:
    tokenizer = sentencepiece()
    for byte in (0x80, 0xF0):  # holding it all, it was 400 times as much
        assert ever(lambda byte=byte: work(tokenizer, [4 + byte] * 4000) < 20 * work(tokenizer, [2, 3] * 2000))


def test_the_cost_of_a_step_does_not_grow_with_the_context() -> None:
    """At the end as at the start."""
    tokenizer = scripted_tokenizer()
    ids = unpack_ids(tokenizer.encode("The quick brown fox jumps over the lazy dog, 12 times. " * 100))
    old = Detokenizer(tokenizer)
    for token_id in ids * 100:
        old.step(token_id)

    def cost(detokenizer: Detokenizer) -> float:
        return cpu_seconds(lambda: [detokenizer.step(token_id) for token_id in ids])

    assert ever(lambda: cost(old) < 3 * cost(Detokenizer(tokenizer)))
