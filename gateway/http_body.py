"""Request bodies: bounded, and inflated if they come compressed (protocol.md 6.2).

The limit holds for what travels and for what it becomes, and the latter is checked while inflating: at most one step's
output is made beyond it, whatever the ratio. Inflating runs in a thread.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import zstandard
from starlette.requests import Request

from gateway.protocol.decode import decode_object
from gateway.protocol.errors import ApiError

STEP_BYTES = 256 * 1024
ZSTD_SLICE_BYTES = 256
"""A zstd block takes 4 bytes or more and becomes 128 KiB or less: 8 MiB a step at worst."""
ZSTD_WINDOW_BYTES = 8 << 20
"""What HTTP allows (RFC 9659)."""
SUPPORTED = ("gzip", "deflate", "zstd", "identity")


async def read_object(request: Request, limit: int) -> dict[str, Any]:
    """The JSON object in a body. Raises `ApiError`."""
    return decode_object(await read_body(request, limit))


async def read_body(request: Request, limit: int) -> bytes:
    """The body as it was before it was encoded. Raises `ApiError`: request_too_large before reading or making much more
    than `limit` bytes, unsupported_media_type, invalid_value for data that is not what the header says."""
    coding = _coding(request.headers.getlist("content-encoding"))
    announced = request.headers.get("content-length", "")
    if announced.isascii() and announced.isdigit() and len(announced) < 20 and int(announced) > limit:
        raise _too_large(limit)
    pieces: list[bytes] = []
    size = 0
    async for piece in request.stream():
        size += len(piece)
        if size > limit:
            raise _too_large(limit)
        pieces.append(piece)
    body = b"".join(pieces)
    if coding == "identity" or not body:
        return body
    return await asyncio.to_thread(_inflate, coding, body, limit)


def _coding(headers: list[str]) -> str:
    """The one content coding of a request. `identity` beside another says nothing, two codings are one too many."""
    named = [name.strip().lower().removeprefix("x-") for header in headers for name in header.split(",")]
    codings = [name for name in named if name not in ("", "identity")]
    if len(codings) > 1:
        raise ApiError("unsupported_media_type", "The request body has several content encodings; send it with one.")
    coding = codings[0] if codings else "identity"
    if coding not in SUPPORTED:
        raise ApiError(
            "unsupported_media_type", f"This content encoding is not supported. Supported: {', '.join(SUPPORTED)}."
        )
    return coding


def _inflate(coding: str, body: bytes, limit: int) -> bytes:
    steps: Callable[[bytes], Iterator[bytes]] = {"gzip": _gzip, "deflate": _deflate, "zstd": _zstd}[coding]
    pieces: list[bytes] = []
    size = 0
    try:
        for piece in steps(body):
            size += len(piece)
            if size > limit:
                raise _too_large(limit)
            pieces.append(piece)
    except (zlib.error, zstandard.ZstdError, EOFError):
        raise ApiError("invalid_value", f"The request body is not valid {coding} data, or not all of it.") from None
    return b"".join(pieces)


def _gzip(body: bytes) -> Iterator[bytes]:
    """One member after the other."""
    while body:
        reader = zlib.decompressobj(wbits=31)
        yield from _zlib(reader, body)
        body = reader.unused_data


def _deflate(body: bytes) -> Iterator[bytes]:
    """With zlib's header, as the standard says, or without it, as some clients understood it."""
    wrapped = len(body) >= 2 and body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0
    reader = zlib.decompressobj(wbits=15 if wrapped else -15)
    yield from _zlib(reader, body)
    if reader.unused_data:
        raise EOFError


def _zlib(reader: Any, body: bytes) -> Iterator[bytes]:
    while True:
        made = reader.decompress(body, STEP_BYTES)
        yield made
        body = reader.unconsumed_tail
        if reader.eof:
            return
        if not made and not body:
            raise EOFError


def _zstd(body: bytes) -> Iterator[bytes]:
    """One frame after the other, in slices, since a frame's reader has no bound on its output."""
    frames = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES)
    reader = frames.decompressobj()
    at = 0
    while at < len(body):
        piece = body[at : at + ZSTD_SLICE_BYTES]
        yield reader.decompress(piece)
        at += len(piece)
        if reader.eof:
            at -= len(reader.unused_data)
            if at < len(body):
                reader = frames.decompressobj()
    if not reader.eof:
        raise EOFError


def _too_large(limit: int) -> ApiError:
    return ApiError("request_too_large", f"The request body is larger than {limit} bytes.")
