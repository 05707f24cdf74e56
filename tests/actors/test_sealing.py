"""Sealed blobs: they open for whom and as what they were made, and for nobody else, whatever is done to them."""

from __future__ import annotations

import re
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors import sealing
from actors.sealing import PREFIX, Kind, Sealer, new_key

OLD, NEW, OTHER = (bytes([n]) * 32 for n in (1, 2, 3))
KINDS: tuple[Kind, ...] = ("reasoning", "compaction")
contents = st.binary(max_size=2000) | st.text(max_size=500).map(str.encode) | st.just(b"the same words " * 200)
tenants = st.text(max_size=20)
URL_SAFE = re.compile(r"[A-Za-z0-9_-]+\Z")


@given(contents, st.sampled_from(KINDS), tenants)
def test_what_was_sealed_comes_back(content: bytes, kind: Kind, tenant: str) -> None:
    ring = Sealer([OLD])
    blob = ring.seal(kind, tenant, content)

    assert URL_SAFE.match(blob)
    assert ring.open(kind, tenant, blob) == content


@given(contents, st.floats(0, 1, exclude_max=True), st.sampled_from("ABCabc019-_=+/ é\n"))
def test_a_blob_with_any_character_changed_does_not_open(content: bytes, place: float, other: str) -> None:
    ring = Sealer([OLD])
    blob = ring.seal("reasoning", "t", content)
    at = int(place * len(blob))
    opened = ring.open("reasoning", "t", blob[:at] + other + blob[at + 1 :])

    assert opened == (content if other == blob[at] else None)


@pytest.mark.parametrize("content", [b"", b"x", b"xy", b"xyz"])
def test_every_character_counts(content: bytes) -> None:
    """Also the last one, whose spare bits a lenient base64 decoder ignores."""
    ring = Sealer([OLD])
    blob = ring.seal("reasoning", "t", content)
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    for at in range(len(blob)):
        for other in alphabet:
            if other != blob[at]:
                assert ring.open("reasoning", "t", blob[:at] + other + blob[at + 1 :]) is None


@given(contents, st.integers(0, 40), st.binary(max_size=8))
def test_a_cut_or_longer_blob_does_not_open(content: bytes, cut: int, more: bytes) -> None:
    ring = Sealer([OLD])
    blob = ring.seal("reasoning", "t", content)

    assert ring.open("reasoning", "t", blob[: -1 - cut]) is None
    assert ring.open("reasoning", "t", blob + "A" * (1 + len(more))) is None


@given(tenants, tenants)
def test_another_tenants_blob_does_not_open(mine: str, theirs: str) -> None:
    ring = Sealer([OLD])
    opened = ring.open("reasoning", theirs, ring.seal("reasoning", mine, b"secret"))

    assert opened == (b"secret" if mine == theirs else None)


@pytest.mark.parametrize(("made", "wanted"), [KINDS, KINDS[::-1]])
def test_another_kinds_blob_does_not_open(made: Kind, wanted: Kind) -> None:
    ring = Sealer([OLD])

    assert ring.open(wanted, "t", ring.seal(made, "t", b"x")) is None


def test_the_first_key_seals_and_all_of_them_open() -> None:
    before, between, after = Sealer([OLD]), Sealer([NEW, OLD]), Sealer([NEW])
    old, new = before.seal("reasoning", "t", b"old"), between.seal("reasoning", "t", b"new")

    assert between.open("reasoning", "t", old) == b"old"
    assert after.open("reasoning", "t", new) == b"new"
    assert after.open("reasoning", "t", old) is None
    assert before.open("reasoning", "t", new) is None


def test_a_key_given_twice_is_one_key() -> None:
    ring = Sealer([OLD, NEW, OLD])

    assert Sealer([OLD]).open("reasoning", "t", ring.seal("reasoning", "t", b"x")) == b"x"


def test_replicas_with_the_same_keys_agree_and_others_do_not() -> None:
    blob = Sealer([OLD]).seal("compaction", "t", b"x")

    assert Sealer([OLD]).open("compaction", "t", blob) == b"x"
    assert Sealer([OTHER]).open("compaction", "t", blob) is None
    assert Sealer([new_key()]).open("compaction", "t", blob) is None


def test_the_same_content_never_looks_the_same() -> None:
    ring = Sealer([OLD])

    assert len({ring.seal("reasoning", "t", b"x" * 1000) for _ in range(50)}) == 50


def test_text_is_compressed_and_noise_is_not_made_longer() -> None:
    ring, noise = Sealer([OLD]), new_key() * 8
    text = ("I should look at the file first, and then at the test. " * 50).encode()

    assert len(ring.seal("reasoning", "t", text)) < len(text) / 3
    assert ring.open("reasoning", "t", ring.seal("reasoning", "t", noise)) == noise


@pytest.mark.parametrize(
    "text", ["", PREFIX, PREFIX + "A", PREFIX + "A" * 44, "gAAAAAB" + "x" * 100, "lmp2_" + "A" * 99]
)
def test_what_was_never_ours_does_not_open(text: str) -> None:
    assert Sealer([OLD]).open("reasoning", "t", text) is None


@given(st.text(max_size=100))
def test_no_text_breaks_it(text: str) -> None:
    assert Sealer([OLD]).open("reasoning", "t", text) is None
    assert Sealer([OLD]).open("reasoning", "t", PREFIX + text) is None


def test_inflation_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A blob of ours that is too large to read back is none; and a broken one is no crash."""
    ring = Sealer([OLD])
    blob = ring.seal("reasoning", "t", b"a" * 10_000)
    monkeypatch.setattr(sealing, "MAX_CONTENT_BYTES", 9_999)
    assert ring.open("reasoning", "t", blob) is None
    monkeypatch.setattr(sealing, "MAX_CONTENT_BYTES", 10_000)
    assert ring.open("reasoning", "t", blob) == b"a" * 10_000
    monkeypatch.setattr(zlib, "compress", lambda data, level: b"no deflate stream")
    assert ring.open("reasoning", "t", ring.seal("reasoning", "t", b"a" * 10_000)) is None


@pytest.mark.parametrize("keys", [[], [b""], [b"x" * 31], [OLD, b"x" * 33]])
def test_keys_have_32_bytes(keys: list[bytes]) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        Sealer(keys)
