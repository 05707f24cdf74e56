"""Blobs of the store: compressed when that helps, sealed when there are keys.

    flags, 1 byte | payload                                                  without keys
    flags, 1 byte | key id, 4 bytes | nonce, 12 bytes | AES-256-GCM ciphertext and tag

The associated data is all before the nonce and the blob's place (table, column, tenant, row), so that a blob opens only
where it was put. The first key seals and all open, so keys can be replaced without touching old rows; rows from before
there were keys open too. Nonces are random: replace a key before it has sealed 2**32 blobs.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import zstandard
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from actors.store.errors import Unreadable

KEY_BYTES = 32
DIGEST_BYTES = 16

_ID_BYTES = 4
_NONCE_BYTES = 12
_COMPRESSED, _SEALED = 1, 2
_WORTH_COMPRESSING_BYTES = 128
_LEVEL = 3


class Place(NamedTuple):
    """Where a blob is kept."""

    table: str
    column: str
    tenant: str
    row: str


class BlobCodec:
    """Packs and opens blobs; safe to share between threads. Raises ValueError for a key that has not 32 bytes."""

    def __init__(self, keys: Sequence[bytes] = ()) -> None:
        if any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"the store's keys have {KEY_BYTES} bytes each")
        self._first = _key_id(keys[0]) if keys else None
        # Reversed, so that of equal keys the first stays.
        self._ciphers = {_key_id(key): AESGCM(key) for key in reversed(keys)}
        # Digests of short or well-known texts must not tell what was sealed, so they need a key too.
        self._digest_key = hashlib.sha256(b"limpet store digest\0" + keys[0]).digest() if keys else b""
        self._local = threading.local()

    def pack(self, place: Place, content: bytes, *, compress: bool = True) -> bytes:
        """The blob to keep at `place`. Without `compress` it is ready sooner: for what is not kept for long."""
        flags, data = 0, content
        if compress and len(content) >= _WORTH_COMPRESSING_BYTES:
            smaller = self._compressor().compress(content)
            if len(smaller) < len(content):
                flags, data = _COMPRESSED, smaller
        if self._first is None:
            return bytes((flags,)) + data
        header = bytes((flags | _SEALED,)) + self._first
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return header + nonce + self._ciphers[self._first].encrypt(nonce, data, _associated(header, place))

    def open(self, place: Place, blob: bytes) -> bytes:
        """What was packed. Raises `Unreadable`: a key that isn't among ours, another place's blob, a changed one."""
        flags, data = (blob[0], blob[1:]) if blob else (0, b"")
        if flags & _SEALED:
            data = self._unsealed(place, blob)
        if not flags & _COMPRESSED:
            return data
        try:
            return self._decompressor().decompress(data)
        except zstandard.ZstdError:
            raise Unreadable("permanent", f"Content of '{place.table}.{place.column}' is damaged.") from None

    def digest(self, tenant: str, content: bytes) -> bytes:
        """A name for a text that a tenant's rows share: 16 bytes. It differs between tenants and with the first key."""
        owner = hashlib.sha256(tenant.encode(errors="surrogatepass")).digest()
        return hmac.digest(self._digest_key, owner + content, "sha256")[:DIGEST_BYTES]

    def _unsealed(self, place: Place, blob: bytes) -> bytes:
        header, rest = blob[: 1 + _ID_BYTES], blob[1 + _ID_BYTES :]
        cipher = self._ciphers.get(header[1:])
        if cipher is None:
            raise Unreadable(
                "permanent",
                f"Content of '{place.table}.{place.column}' is sealed with key {header[1:].hex()}, which is not among "
                f"the {len(self._ciphers)} keys given.",
            )
        try:
            return cipher.decrypt(rest[:_NONCE_BYTES], rest[_NONCE_BYTES:], _associated(header, place))
        except (InvalidTag, ValueError):
            raise Unreadable(
                "permanent", f"Content of '{place.table}.{place.column}' was changed or belongs elsewhere."
            ) from None

    # zstd's contexts may not be used by two threads at once.

    def _compressor(self) -> zstandard.ZstdCompressor:
        found: zstandard.ZstdCompressor | None = getattr(self._local, "compressor", None)
        if found is None:
            found = self._local.compressor = zstandard.ZstdCompressor(level=_LEVEL)
        return found

    def _decompressor(self) -> zstandard.ZstdDecompressor:
        found: zstandard.ZstdDecompressor | None = getattr(self._local, "decompressor", None)
        if found is None:
            found = self._local.decompressor = zstandard.ZstdDecompressor()
        return found


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"limpet store key id\0" + key).digest()[:_ID_BYTES]


def _associated(header: bytes, place: Place) -> bytes:
    """Lengths included, so that no two places look alike."""
    return header + msgspec.msgpack.encode([part.encode(errors="surrogatepass") for part in place])
