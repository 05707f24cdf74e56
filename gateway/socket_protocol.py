"""uvicorn's WebSocket protocol with two of its habits changed. Guarded: the attributes used are checked at import."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

if not {"data_received", "keepalive_timeout", "send"} <= set(dir(WebSocketsSansIOProtocol)):
    raise ImportError("this uvicorn's WebSocket protocol is another one; see gateway/socket_protocol.py")


class SocketProtocol(WebSocketsSansIOProtocol):
    """As uvicorn's, but for two things.

    - Bytes that arrive show that the peer lives. uvicorn waits for the pong alone, which a client cannot send in the
      middle of a frame: a large one over a slow line would be cut with 1011, and sent again, and cut again.
    - A close that cannot be written, because the client does not read, ends the connection. uvicorn waits for room in
      the buffer, which never comes.
    """

    def data_received(self, data: bytes) -> None:
        """Bytes from the peer: its pong is not late while they come."""
        if self.pong_timer is not None and self.ping_timeout is not None:
            self.pong_timer.cancel()
            self.pong_timer = self.loop.call_later(self.ping_timeout, self.keepalive_timeout)
        super().data_received(data)

    async def send(self, message: Any) -> None:
        """One ASGI message."""
        if message["type"] == "websocket.close" and not self.writable.is_set():
            self.transport.abort()
        else:
            await super().send(message)
