"""Who may use the gateway."""

from __future__ import annotations

import pytest

from gateway.auth import OPEN_TENANT, Authenticator
from gateway.protocol.errors import ApiError

BEARER = (b"authorization", b"Bearer right")


def refusal(auth: Authenticator, *headers: tuple[bytes, bytes]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        auth.tenant(headers)
    return caught.value


@pytest.mark.parametrize("header", [BEARER, (b"authorization", b"bearer right"), (b"api-key", b"right")])
def test_a_key_is_a_tenant(header: tuple[bytes, bytes]) -> None:
    auth = Authenticator(["right", "other"])

    assert auth.tenant([header]) == Authenticator(["right"]).tenant([BEARER])
    assert auth.tenant([header]) != auth.tenant([(b"api-key", b"other")])
    assert "right" not in auth.tenant([header])


@pytest.mark.parametrize("headers", [(), ((b"authorization", b"Basic right"),), ((b"api-key", b"wrong"),)])
def test_without_a_right_key_it_is_401(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    error = refusal(Authenticator(["right"]), *headers)

    assert (error.status, error.code) == (401, "invalid_api_key")


@pytest.mark.parametrize(
    "headers",
    [
        (),
        ((b"host", b"127.0.0.1:8000"),),
        ((b"host", b"localhost"),),
        ((b"host", b"[::1]:8000"), (b"origin", b"http://localhost:3000")),
        ((b"authorization", b"Bearer anything"),),
    ],
)
def test_a_keyless_gateway_is_open_to_this_machine(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    assert Authenticator([]).tenant(headers) == OPEN_TENANT


@pytest.mark.parametrize(
    "headers",
    [
        ((b"origin", b"https://evil.example"),),
        ((b"host", b"evil.example:8000"),),
        ((b"host", b"127.0.0.1.evil.example"),),
        ((b"origin", b"null"),),
    ],
)
def test_a_keyless_gateway_is_closed_to_web_pages(headers: tuple[tuple[bytes, bytes], ...]) -> None:
    error = refusal(Authenticator([]), *headers)

    assert (error.status, error.code) == (403, "insufficient_permissions")
    assert "server.api_keys" in error.message


def test_with_keys_the_origin_does_not_matter() -> None:
    assert Authenticator(["right"]).tenant([BEARER, (b"origin", b"https://app.example"), (b"host", b"gw.example")])
