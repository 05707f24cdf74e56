"""Keys to tenants. A key is checked once, before the socket opens or the request is read."""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable, Sequence
from urllib.parse import urlsplit

from gateway.protocol.errors import ApiError

OPEN_TENANT = "local"


class Authenticator:
    """Knows the keys' digests, never the keys. Without keys everybody is the one local tenant (loopback only: settings
    refuse anything else)."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant(self, headers: Sequence[tuple[bytes, bytes]]) -> str:
        """The tenant of a request, from `Authorization: Bearer …` or Azure's `api-key`. Raises `ApiError`
        invalid_api_key, or insufficient_permissions for a stranger at a gateway without keys. The tenant is a digest of
        the key, so it can be logged."""
        if not self._digests:
            _require_local(headers)
            return OPEN_TENANT
        given = _key(headers)
        if given is None:
            raise ApiError(
                "invalid_api_key", "No API key was given. Send it in the header 'Authorization: Bearer YOUR_KEY'."
            )
        digest = hashlib.sha256(given).digest()
        # Every key is compared, so that timing tells nothing about which one was nearly right.
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if not any(matches):
            raise ApiError("invalid_api_key", "The API key is not one of this gateway's keys.")
        return _tenant(digest)


def tenant_of(key: str) -> str:
    """The tenant whose key this is."""
    return _tenant(hashlib.sha256(key.encode()).digest())


def _tenant(digest: bytes) -> str:
    return digest.hex()[:16]


def _require_local(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Without keys the gateway listens on loopback only, which every web page in a browser of this machine can reach
    too: a page names its origin, a rebound DNS name shows in `Host`. Raises `ApiError` insufficient_permissions."""
    for name, value in headers:
        if name in (b"origin", b"host"):
            host = urlsplit(value.decode("latin-1") if name == b"origin" else "//" + value.decode("latin-1")).hostname
            if not _is_loopback(host or ""):
                raise ApiError(
                    "insufficient_permissions",
                    "Without API keys this gateway answers local programs only, not web pages or other hosts. Set "
                    "server.api_keys to use it from elsewhere.",
                )


def _is_loopback(host: str) -> bool:
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _key(headers: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip()
        if name == b"api-key":
            return value.strip()
    return None
