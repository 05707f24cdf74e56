"""Opaque blobs that only this gateway can read: reasoning and compacted windows that a client carries for us.

protocol.md 4.5 and 4.6: a client without stored state gets `encrypted_content` and sends it back, perhaps on another
socket, to another replica, after a restart. docs/decisions/0004-sealed-blobs.md tells why it looks as it does:

    lmp1_ + base64url( key id, 4 bytes | flags, 1 byte | nonce, 12 bytes | AES-256-GCM ciphertext and tag )

The associated data is everything before the nonce, the kind of blob and the tenant, so that a blob opens only for whom
and as what it was made.
"""

from __future__ import annotations

import hashlib
import secrets
import zlib
from base64 import b64decode, urlsafe_b64encode
from collections.abc import Sequence
from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

Kind = Literal["reasoning", "foreign_reasoning", "compaction"]

KEY_BYTES = 32
PREFIX = "lmp1_"
MAX_CONTENT_BYTES = 64 << 20
"""Of one blob's content: what a client's blob, of at most 20 MiB (protocol.md 2.1), may inflate to."""

_ID_BYTES = 4
_NONCE_BYTES = 12
_HEADER_BYTES = _ID_BYTES + 1
_TAG_BYTES = 16
_DEFLATED = 1
_WORTH_DEFLATING_BYTES = 256  # shorter ones save less than the 4/3 of base64 cost anyway
_LEVEL = 1  # text shrinks to 40 %; the highest level takes ten times as long for 5 % more


def new_key() -> bytes:
    """A random key. Blobs made with it are noise once it is gone."""
    return secrets.token_bytes(KEY_BYTES)


class Sealer:
    """A ring of keys: the first one seals, all of them open, so that keys can be replaced without losing blobs.

    Raises ValueError for no key or one that has not 32 bytes.
    """

    __slots__ = ("_ciphers", "_first")

    def __init__(self, keys: Sequence[bytes]) -> None:
        if not keys or any(len(key) != KEY_BYTES for key in keys):
            raise ValueError(f"a sealer needs keys of {KEY_BYTES} bytes, at least one")
        self._first = _key_id(keys[0])
        # Reversed, so that of equal keys the first stays.
        self._ciphers = {_key_id(key): AESGCM(key) for key in reversed(keys)}

    def seal(self, kind: Kind, tenant: str, content: bytes) -> str:
        """A blob that opens with the same kind and tenant. Two blobs of the same content look different."""
        flags, data = 0, content
        if len(content) >= _WORTH_DEFLATING_BYTES:
            deflated = zlib.compress(content, _LEVEL)
            if len(deflated) < len(content):
                flags, data = _DEFLATED, deflated
        header = self._first + bytes((flags,))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        ciphertext = self._ciphers[self._first].encrypt(nonce, data, _associated(header, kind, tenant))
        return PREFIX + urlsafe_b64encode(header + nonce + ciphertext).decode().rstrip("=")

    def open(self, kind: Kind, tenant: str, blob: str) -> bytes | None:
        """What was sealed, or None: another gateway's blob, another tenant's, another kind's, a changed one, or one
        whose key is gone."""
        raw = _decoded(blob)
        if raw is None or len(raw) < _HEADER_BYTES + _NONCE_BYTES + _TAG_BYTES:
            return None
        header, nonce = raw[:_HEADER_BYTES], raw[_HEADER_BYTES : _HEADER_BYTES + _NONCE_BYTES]
        cipher = self._ciphers.get(header[:_ID_BYTES])
        if cipher is None:
            return None
        try:
            data = cipher.decrypt(nonce, raw[_HEADER_BYTES + _NONCE_BYTES :], _associated(header, kind, tenant))
        except InvalidTag:
            return None
        return _inflated(data) if header[_ID_BYTES] & _DEFLATED else data


def _key_id(key: bytes) -> bytes:
    return hashlib.sha256(b"limpet key id\0" + key).digest()[:_ID_BYTES]


def _associated(header: bytes, kind: Kind, tenant: str) -> bytes:
    return b"\0".join((PREFIX.encode(), header, kind.encode(), tenant.encode()))


def _decoded(blob: str) -> bytes | None:
    """The bytes of a blob. Only the one spelling that `seal` writes counts: base64 has several for the same bytes."""
    text = blob.removeprefix(PREFIX)
    if len(text) == len(blob) or not text.isascii():
        return None
    try:
        raw = b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
    except ValueError:
        return None
    return raw if urlsafe_b64encode(raw).decode().rstrip("=") == text else None


def _inflated(data: bytes) -> bytes | None:
    inflater = zlib.decompressobj()
    try:
        content = inflater.decompress(data, MAX_CONTENT_BYTES)
    except zlib.error:
        return None
    return content if inflater.eof else None
