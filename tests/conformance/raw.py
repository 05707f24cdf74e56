"""A WebSocket client byte by byte, that does only what it is told."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from tests.support.gateway import Running

CLOSE, PING, PONG, TEXT = 0x88, 0x89, 0x8A, 0x81


def masked(kind: int, body: bytes) -> bytes:
    """One client frame (RFC 6455 5.2); the mask is zero, which is allowed."""
    size = len(body)
    length = (
        bytes([0x80 | size])
        if size < 126
        else b"\xfe" + struct.pack("!H", size)
        if size < 65536
        else b"\xff" + struct.pack("!Q", size)
    )
    return bytes([kind]) + length + bytes(4) + body


class RawSocket:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def frame(self) -> tuple[int, bytes]:
        """The next frame of the server: first byte and body."""
        head = await self.reader.readexactly(2)
        size = head[1]
        if size == 126:
            (size,) = struct.unpack("!H", await self.reader.readexactly(2))
        elif size == 127:
            (size,) = struct.unpack("!Q", await self.reader.readexactly(8))
        return head[0], await self.reader.readexactly(size)

    async def until(self, kind: str) -> None:
        """Read events up to this type."""
        while True:
            code, body = await asyncio.wait_for(self.frame(), 30)
            assert code in (TEXT, PING), (code, body)
            if code == TEXT and json.loads(body)["type"] == kind:
                return


@asynccontextmanager
async def raw(running: Running) -> AsyncIterator[RawSocket]:
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    key = base64.b64encode(os.urandom(16)).decode()
    writer.write(
        f"GET /v1/responses HTTP/1.1\r\nHost: 127.0.0.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
    )
    assert b"101" in (await reader.readuntil(b"\r\n\r\n")).split(b"\r\n")[0]
    try:
        yield RawSocket(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def create(text: str) -> bytes:
    return json.dumps({"type": "response.create", "model": "m", "store": False, "input": text}).encode()
