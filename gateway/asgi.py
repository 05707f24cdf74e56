"""One ASGI application for all transports, and what uvicorn must be told to serve it."""

from __future__ import annotations

from typing import Any

from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.gateway import Gateway
from gateway.http import build_http
from gateway.settings import Settings
from gateway.socket_protocol import SocketProtocol
from gateway.websocket import refuse_elsewhere, serve_socket

SOCKET_PATHS = ("/v1/responses", "/responses")


def build_asgi(gateway: Gateway) -> ASGIApp:
    """Sockets on the Responses paths, HTTP for the rest."""
    http = build_http(gateway)

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and scope["path"] in SOCKET_PATHS:
            await serve_socket(gateway, scope, receive, send)
        elif scope["type"] == "websocket":
            await refuse_elsewhere(scope, receive, send)
        else:
            await http(scope, receive, send)

    return application


def uvicorn_options(settings: Settings) -> dict[str, Any]:
    """Limits that are ours to set, never uvicorn's defaults.

    The limit on a message is `protocol.connection`'s. uvicorn's is only a bound on memory, at twice as much: it closes
    without reading the rest, and the reset that follows can overtake its close frame, so the client never sees 1009.
    """
    return {
        "ws": SocketProtocol,
        "ws_max_size": 2 * settings.server.request_max_bytes,
        "ws_ping_interval": settings.limits.ping_interval_s,
        "ws_ping_timeout": settings.limits.ping_timeout_s,
        "ws_per_message_deflate": settings.server.deflate,
        "access_log": False,
    }
