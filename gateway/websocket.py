"""The WebSocket shell: frames in, actions out. All decisions are `protocol.connection`'s; this moves bytes.

There is no writer task: every turn sends its own events (`gateway.socket_turns`). uvicorn's send returns at once while
the client reads and waits while it does not, so a slow reader stops its turns (and only them) at the transport's
high-water mark; if nothing moves for `send_timeout_s`, the socket ends with 1013 (protocol.md 4.7). Order within a lane
is the turn's own order, and lanes interleave at frame granularity as the loop schedules them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing, suppress
from typing import Any

from actors.conversation import Lane
from actors.rollout import Rollout
from actors.turn import Turn
from gateway.gateway import Gateway
from gateway.protocol.actions import Action, Cancel, Close, Control, Send, Start
from gateway.protocol.connection import Connection
from gateway.protocol.controls import asks_rollout
from gateway.protocol.decode import encode
from gateway.protocol.errors import ApiError
from gateway.protocol.requests import parse_create
from gateway.refusals import refusal_headers
from gateway.socket_turns import RunningTurn
from gateway.timer import Every

log = logging.getLogger(__name__)

LAST_WORDS_S = 5.0
"""How long a turn that is stopped, or a close, may take to get out to a client that reads slowly."""

CLOSE_S = 15.0
"""How long a client may take to answer a close before its socket is let go. uvicorn gives it 10 s."""

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
SendMessage = Callable[[Message], Awaitable[None]]


async def serve_socket(gateway: Gateway, scope: Message, receive: Receive, send: SendMessage) -> None:
    """One WebSocket from handshake to close, as an ASGI application."""
    await receive()  # websocket.connect
    request_id = f"req_{secrets.token_hex(12)}"
    try:
        gateway.admit_socket()
        tenant = gateway.auth.tenant(scope["headers"])
    except ApiError as error:
        await _refuse(error, request_id, send)
        return
    limit = str(gateway.settings.server.request_max_bytes).encode()
    headers = [(b"x-request-id", request_id.encode()), (b"x-codex-websocket-max-message-bytes", limit)]
    # Known to the gateway before it is open, so that a drain that begins meanwhile finds it.
    socket = Socket(gateway, tenant, receive, send)
    try:
        await send({"type": "websocket.accept", "headers": headers})
    except BaseException:
        await socket.end()
        raise
    await socket.run()


async def refuse_elsewhere(scope: Message, receive: Receive, send: SendMessage) -> None:
    """A handshake at a path that has no socket, as an ASGI application: 404, as a GET there."""
    await receive()
    message = f"There is no WebSocket at {scope['path'][:128]}. Connect to /v1/responses."
    await _refuse(ApiError("not_found", message), f"req_{secrets.token_hex(12)}", send)


async def _refuse(error: ApiError, request_id: str, send: SendMessage) -> None:
    """An ordinary HTTP answer before 101, so that clients can tell a bad key from a missing server."""
    body = encode(error.body()).encode()
    await send(
        {
            "type": "websocket.http.response.start",
            "status": error.status,
            "headers": refusal_headers(error, request_id, len(body)),
        }
    )
    await send({"type": "websocket.http.response.body", "body": body})


class Socket:
    """One open socket. Its tasks are the reader (the caller of `run`) and one per running turn, all ended by `run`."""

    def __init__(self, gateway: Gateway, tenant: str, receive: Receive, send: SendMessage) -> None:
        self._gateway = gateway
        self._receive = receive
        self._send_message = send
        self._loop = asyncio.get_running_loop()
        self._connection = Connection(
            gateway.connection_limits,
            self._loop.time(),
            jitter_s=-gateway.jitter_s(),
            steer_id=lambda: gateway.actor.ids.item("steer"),
            rollouts=gateway.settings.server.rollout_extension,
        )
        self._session = gateway.actor.open(tenant)
        self._turns: dict[Lane, RunningTurn] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._reader: asyncio.Task[Any] | None = None
        # Each input's actions are carried out whole and in the order of the inputs.
        self._acting = asyncio.Lock()
        self._deadline: asyncio.TimerHandle | None = None
        self._last_sent = self._loop.time()
        self._sending = 0
        self._blocked_since = self._last_sent
        self._open = True
        self._muted = False
        self._memo = gateway.actor.tool_memo
        self.closed = asyncio.Event()
        gateway.sockets.add(self)

    async def run(self) -> None:
        """Read frames until the socket ends. Whatever the reason, running turns are stopped and awaited."""
        self._reader = asyncio.current_task()
        self._rearm()
        try:
            while self._open:
                message = await self._receive()
                if message["type"] == "websocket.disconnect":
                    break
                text = message.get("text")
                self._report_endings()
                now = self._loop.time()
                if text is None:
                    await self._do(self._connection.receive_binary(now))
                else:
                    await self._do(self._connection.receive_text(text, now))
        finally:
            # In HAProxy mode Serve cancels this task when the client vanishes: the clean-up is the same.
            await self.end()

    async def drain(self, code: int, reason: str, grace_s: float | None = None) -> None:
        """Close now if idle, else when the running turns have ended, at most after the grace."""
        await self._do(self._connection.drain(code, reason, self._loop.time(), grace_s))

    async def end(self) -> None:
        """Nothing of this socket goes on: its turns are stopped and awaited, its memory let go."""
        self._open = False
        if self._deadline is not None:
            self._deadline.cancel()
        self._connection.lost(self._loop.time())
        while self._tasks:
            for running in self._turns.values():
                running.stop()
            await asyncio.wait(self._tasks)
        self._session.close()
        self._gateway.sockets.discard(self)
        self.closed.set()

    def _report_endings(self) -> None:
        """Tell the connection which responses have their terminal event, so that it decides by what is."""
        for lane, running in self._turns.items():
            if not running.reported and running.turn is not None and (ending := running.turn.ending) is not None:
                running.reported = True
                self._connection.turn_over(lane, ending)

    async def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, Control):
                self._turns[action.lane].obey(action)
        waiting = [*self._connection.queued_frames(), *(act.frame for act in actions if isinstance(act, Start))]
        parents = (frame.get("previous_response_id") for frame in waiting)
        self._session.cache.protect(frozenset(parent for parent in parents if isinstance(parent, str)))
        async with self._acting:
            for action in actions:
                await self._act(action)
        self._rearm()

    async def _act(self, action: Action) -> None:
        if isinstance(action, Start):
            self._start(action)
        elif isinstance(action, Send):
            await self._say(encode(action.frame))
        elif isinstance(action, Cancel):
            if (stopping := self._turns.get(action.lane)) is not None:
                stopping.stop()
                # Its stream ends before the words that follow; a client that does not read must not hold that up.
                with suppress(TimeoutError):
                    async with asyncio.timeout(LAST_WORDS_S):
                        await stopping.ended.wait()
        elif isinstance(action, Close):
            await self._close(action)

    def _start(self, action: Start) -> None:
        if not self._open:  # the socket ended while this waited for its turn
            self._connection.turn_ended(action.lane, self._loop.time(), None)
            return
        running = self._turns[action.lane] = RunningTurn(action, self._send)
        running.task = asyncio.create_task(self._run_turn(running, action.lane, action.frame), name="socket-turn")
        self._tasks.add(running.task)
        running.task.add_done_callback(self._tasks.discard)

    async def _run_turn(self, running: RunningTurn, lane: Lane, frame: dict[str, Any]) -> None:
        watch: Every | None = None
        refusal: ApiError | None = None
        try:
            running.enter()
            turn = running.turn = self._turn(running, lane, frame)
            watch = self._watch(running)
            self._limit(running)
            async with aclosing(turn.run()) as batches:
                created = await anext(batches)
                if actions := self._connection.turn_started(lane, turn.response_id):
                    await self._do(actions)
                await running.write(created)
                async for events in batches:
                    await running.write(events)
        except ApiError as error:
            refusal = await self._give_up(running, error)
        except asyncio.CancelledError:
            if not running.stopped:
                raise
            words = "The turn was stopped, as its connection ends; send it again."
            refusal = await self._give_up(running, _fault(words))
        except Exception:
            log.exception("a turn failed in the gateway itself")
            refusal = await self._give_up(running, _fault("The gateway failed on this request; try again."))
        finally:
            if watch is not None:
                watch.stop()
            if running.limit is not None:
                running.limit.cancel()
            await self._turn_ended(running, refusal)

    def _turn(self, running: RunningTurn, lane: Lane, frame: dict[str, Any]) -> Turn:
        """What this create asks for. Raises `ApiError`."""
        request = parse_create(frame, transport="websocket", memo=self._memo)
        if self._gateway.settings.server.rollout_extension and asks_rollout(frame):
            return Rollout(self._session, request, lane, lambda: self._limit(running))
        return self._session.turn(request, lane)

    def _limit(self, running: RunningTurn) -> None:
        """From now on the turn has as long as a turn may take."""
        if running.limit is not None:
            running.limit.cancel()
        assert running.turn is not None
        running.limit = running.turn.expire_after(self._gateway.settings.limits.turn_deadline_s)

    async def _turn_ended(self, running: RunningTurn, refusal: ApiError | None) -> None:
        """Its last frame goes out, then the lane is free."""
        lane = running.start.lane
        try:
            if refusal is not None and not running.start.automatic:
                self._session.forget_parent(running.start.frame.get("previous_response_id"), lane)
                await self._send(encode(refusal.frame(stream_id=lane)))
            await running.finish()
        finally:
            self._report_endings()
            self._turns.pop(lane, None)
            running.ended.set()
            why = None if refusal is None else refusal.message
            await self._do(self._connection.turn_ended(lane, self._loop.time(), why))

    async def _give_up(self, running: RunningTurn, error: ApiError) -> ApiError | None:
        """Before `response.created` it is refused, after it the response fails (design decision 9)."""
        if running.turn is None or not running.turn.started:
            return error
        await running.write(running.turn.abandon(error.message))
        return None

    async def _say(self, text: str) -> None:
        """One text frame that belongs to no turn. A client that does not take it in time is gone for us: nothing else
        would notice while no turn runs."""
        try:
            async with asyncio.timeout(self._gateway.settings.limits.send_timeout_s):
                await self._send(text)
        except TimeoutError:
            self._gateway.actor.spawn(self._overflow(), "slow-reader")

    async def _send(self, text: str) -> None:
        """One text frame. After the end nothing is sent, silently: the turn will be cancelled."""
        if not self._open or self._muted:
            return
        if not self._sending:
            self._blocked_since = self._loop.time()
        self._sending += 1
        try:
            await self._send_message({"type": "websocket.send", "text": text})
        except OSError:  # uvicorn: the client is gone; the reader learns it as well
            self._open = False
        finally:
            self._sending -= 1
        self._last_sent = self._blocked_since = self._loop.time()

    async def _close(self, action: Close) -> None:
        if not self._open:
            return
        self._open = False
        if self._reader is not None:
            # The client answers a close with its own. One that does not is gone all the same.
            self._loop.call_later(CLOSE_S, self._reader.cancel)
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                await self._send_message({"type": "websocket.close", "code": action.code, "reason": action.reason})
        except (OSError, TimeoutError):
            pass

    def _rearm(self) -> None:
        """Have `tick` called when the connection's next deadline comes."""
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        due = self._connection.next_deadline
        if due is not None and self._open:
            self._deadline = self._loop.call_at(due, self._spawn_tick)

    def _spawn_tick(self) -> None:
        self._gateway.actor.spawn(self._do(self._connection.tick(self._loop.time())), "socket-tick")

    def _watch(self, running: RunningTurn) -> Every:
        """Look after one turn: a sign of life when the model is silent, an end when the client does not read."""
        limits = self._gateway.settings.limits

        def look() -> None:
            now = self._loop.time()
            if self._sending and now - self._blocked_since >= limits.send_timeout_s:
                self._gateway.actor.spawn(self._overflow(), "slow-reader")
            elif not self._sending and now - self._last_sent >= limits.keepalive_s:
                event = None if running.turn is None else running.turn.keepalive()
                if event is not None:
                    running.tell(event)

        # Often enough that neither limit is overrun by more than half.
        return Every(min(limits.keepalive_s, limits.send_timeout_s) / 2, look)

    async def _overflow(self) -> None:
        """The client reads nothing: no more words for it, only the close (docs/decisions/0001)."""
        if self._muted:
            return
        actions = self._connection.overflow(self._loop.time())
        self._muted = True
        await self._do(actions)


def _fault(message: str) -> ApiError:
    return ApiError("server_error", message)
