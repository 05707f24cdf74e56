"""What the transports of one replica share: settings, keys, the session actor, and the sockets that are open."""

from __future__ import annotations

import asyncio
import logging
import random
from typing import TYPE_CHECKING

from actors.session import SessionActor
from gateway.auth import Authenticator
from gateway.http_turns import HttpTurns
from gateway.protocol.connection import ConnectionLimits
from gateway.protocol.errors import ApiError
from gateway.protocol.lanes import LaneLimits
from gateway.settings import Settings

if TYPE_CHECKING:
    from gateway.websocket import Socket

log = logging.getLogger(__name__)

CLOSING_S = 20.0
"""How long sockets may take to say their last words and close, after the grace."""

LAST_WORDS_S = 1.0
"""How long the HTTP streams of what was cut off may take to say so."""


class Gateway:
    """One replica's edge."""

    def __init__(self, settings: Settings, actor: SessionActor) -> None:
        self.settings = settings
        self.actor = actor
        self.auth = Authenticator(settings.server.api_keys)
        self.sockets: set[Socket] = set()
        self.http_turns = HttpTurns()
        self.draining = False
        self._random = random.Random()  # noqa: S311 - spreads lifetimes, guards nothing
        self.connection_limits = _connection_limits(settings)
        actor.metrics.watch("gauge", "sockets", "Open sockets.", lambda: len(self.sockets))

    def jitter_s(self) -> float:
        """By how much to shorten one socket's lifetime, seconds."""
        return self._random.random() * self.settings.limits.lifetime_jitter_s

    def admit(self) -> None:
        """Raises `ApiError` while this replica lets nobody in."""
        if self.draining:
            raise ApiError("server_is_overloaded", "This replica is shutting down; connect again.", retry_after_s=1)

    def admit_socket(self) -> None:
        """As `admit`, for a handshake. 426 has Codex use HTTP at once instead of trying again; 429 would be fatal to it
        (protocol.md 1.3)."""
        self.admit()
        if len(self.sockets) >= self.settings.sessions.max_sockets_per_replica:
            raise ApiError("server_is_overloaded", "This replica has as many sockets as it may; connect again shortly.")
        if not self.settings.server.websocket:
            raise ApiError("websocket_disabled", "WebSockets are switched off here; use POST /v1/responses.")

    async def drain(self, code: int, reason: str, grace_s: float | None = None) -> None:
        """Let running turns end and close every socket: idle ones now, busy ones after their turn. Returns when none is
        left; what is not over after the grace (`limits.drain_grace_s` if None) fails. Calling it again is harmless."""
        self.draining = True
        log.info("draining %d sockets and %d HTTP turns", len(self.sockets), len(self.http_turns.tasks))
        grace_s = self.settings.limits.drain_grace_s if grace_s is None else grace_s
        background = asyncio.create_task(self.actor.background.drain(grace_s), name="drain-background")
        await asyncio.gather(
            *(socket.drain(code, reason, grace_s) for socket in list(self.sockets)), return_exceptions=True
        )
        late = set(self.http_turns.tasks)
        if late:
            _, late = await asyncio.wait(late, timeout=grace_s)
        await background
        if late:
            # Whoever waits still hears how it ended.
            for turn in self.http_turns.running:
                turn.expire("The server is shutting down; send the request again.")
            _, late = await asyncio.wait(late, timeout=LAST_WORDS_S)
            for task in late:
                task.cancel()
        if self.sockets:
            closing = [asyncio.ensure_future(socket.closed.wait()) for socket in self.sockets]
            _, left = await asyncio.wait(closing, timeout=grace_s + CLOSING_S)
            for waiter in left:
                waiter.cancel()
            if left:
                log.warning("%d sockets did not close in time", len(left))


def _connection_limits(settings: Settings) -> ConnectionLimits:
    limits = settings.limits
    return ConnectionLimits(
        lifetime_s=limits.socket_lifetime_s,
        grace_s=limits.lifetime_grace_s,
        drain_grace_s=limits.drain_grace_s,
        max_message_bytes=settings.server.request_max_bytes,
        lanes=LaneLimits(limits.active_turns, limits.named_lanes, limits.queued_turns, limits.queued_bytes),
    )
