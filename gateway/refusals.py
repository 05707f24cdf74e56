"""The HTTP form of a refusal, shared by plain requests and by handshakes that never become sockets."""

from __future__ import annotations

from gateway.protocol.errors import ApiError


def refusal_headers(error: ApiError, request_id: str, length: int) -> list[tuple[bytes, bytes]]:
    """Headers of an error answer with a JSON body of `length` bytes."""
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(length).encode()),
        (b"x-request-id", request_id.encode()),
    ]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    if error.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return headers
