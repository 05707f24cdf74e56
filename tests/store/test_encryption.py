"""Blobs of the store: only who has the key reads them, and only where they were put."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from actors.store.encryption import KEY_BYTES, BlobCodec, Place
from actors.store.errors import StoreError, Unreadable

OLD, NEW = b"o" * KEY_BYTES, b"n" * KEY_BYTES
PLACE = Place("responses", "delta", "tenant", "resp_1")
SECRET = b"the launch code is 417; " * 20


@given(st.binary(max_size=2000), st.booleans())
def test_content_comes_back(content: bytes, sealed: bool) -> None:
    codec = BlobCodec([NEW] if sealed else [])

    assert codec.open(PLACE, codec.pack(PLACE, content)) == content


def test_nothing_of_the_content_shows() -> None:
    blob = BlobCodec([NEW]).pack(PLACE, SECRET)

    assert b"launch" not in blob
    assert blob != BlobCodec([NEW]).pack(PLACE, SECRET)


def test_a_key_can_be_replaced() -> None:
    before = BlobCodec([OLD]).pack(PLACE, SECRET)
    both = BlobCodec([NEW, OLD])

    assert both.open(PLACE, before) == SECRET
    assert BlobCodec([NEW]).open(PLACE, both.pack(PLACE, SECRET)) == SECRET


def test_rows_from_before_there_were_keys_open() -> None:
    assert BlobCodec([NEW]).open(PLACE, BlobCodec().pack(PLACE, SECRET)) == SECRET


@pytest.mark.parametrize("keys", [[], [NEW]])
def test_without_the_key_the_error_names_it(keys: list[bytes]) -> None:
    blob = BlobCodec([OLD]).pack(PLACE, SECRET)

    with pytest.raises(Unreadable, match=f"key {blob[1:5].hex()}") as caught:
        BlobCodec(keys).open(PLACE, blob)
    assert isinstance(caught.value, StoreError)
    assert caught.value.kind == "permanent"


@pytest.mark.parametrize(
    "place",
    [
        PLACE._replace(table="echoes"),
        PLACE._replace(column="body"),
        PLACE._replace(tenant="other"),
        PLACE._replace(row="resp_2"),
        PLACE._replace(tenant="tenantresp_", row="1"),
    ],
)
def test_a_blob_opens_only_where_it_was_put(place: Place) -> None:
    codec = BlobCodec([NEW])

    with pytest.raises(Unreadable):
        codec.open(place, codec.pack(PLACE, SECRET))


@given(st.data())
def test_a_changed_blob_does_not_open(data: st.DataObject) -> None:
    codec = BlobCodec([NEW])
    blob = bytearray(codec.pack(PLACE, SECRET))
    blob[data.draw(st.integers(1, len(blob) - 1))] ^= data.draw(st.integers(1, 255))

    with pytest.raises(Unreadable):
        codec.open(PLACE, bytes(blob))


@given(st.binary(max_size=100))
def test_noise_is_named_as_such_or_read_as_plain(noise: bytes) -> None:
    with contextlib.suppress(Unreadable):
        BlobCodec([NEW]).open(PLACE, noise)


def test_digests_differ_by_tenant_and_key() -> None:
    digests = {BlobCodec(keys).digest(tenant, SECRET) for keys in ([], [OLD], [NEW]) for tenant in ("a", "b")}

    assert len(digests) == 6
    assert BlobCodec([NEW, OLD]).digest("a", SECRET) in digests


def test_a_short_key_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        BlobCodec([b"short"])
