"""Background responses: turns that nobody needs to wait for (protocol.md 6.3).

    queued -> in_progress -> completed | incomplete | failed      a turn's ordinary end
    queued | in_progress -> cancelled                             POST …/cancel, or DELETE
    queued | in_progress -> failed                                the actor stops before the answer is there

A run is a task of the actor, not of the request that asked for it: its client may leave. Everything is bounded: runs
at once, waiting ones, both per tenant too, the time of one and the bytes of its events. Slots go round the tenants, so
that a thousand requests of one don't keep another waiting. When a run has ended, its response is in the store like any
other.

A cancelled run has no terminal event, as the protocol has none for it: whoever streams it sees the stream end.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from actors.eventlog import EventLog
from actors.halting import OVERDUE
from actors.stored import MIB, StoredResponse
from gateway.protocol.emitter import Emitter, Event
from gateway.protocol.errors import ApiError
from gateway.protocol.requests import CreateRequest
from gateway.protocol.response import ResponseObject

if TYPE_CHECKING:
    from actors.session import SessionActor
    from actors.turn import Turn

log = logging.getLogger(__name__)

TERMINALS = frozenset({"response.completed", "response.incomplete", "response.failed"})
STOPPED = "The gateway stopped before this response was complete; send it again."


@dataclass(frozen=True, slots=True)
class BackgroundLimits:
    """Bounds of one actor. A run takes an engine slot like any turn; a waiting one holds its request only."""

    running: int = 32
    running_per_tenant: int = 16
    queued: int = 1024
    queued_per_tenant: int = 256
    deadline_s: float = 1800.0
    log_bytes: int = 4 * MIB


class Run:
    """One background response that has not ended, and its events."""

    __slots__ = ("_object", "done", "log", "reason", "request", "task", "tenant", "turn")

    def __init__(self, tenant: str, turn: Turn, request: CreateRequest, created_at: int, log_bytes: int) -> None:
        self.tenant = tenant
        self.turn = turn
        self.request = request
        self.log = EventLog(log_bytes)
        self.task: asyncio.Task[None] | None = None
        self.reason = "failed"
        self.done = asyncio.Event()
        self._object = ResponseObject(turn.response_id, created_at, request.echo)

    @property
    def id(self) -> str:
        """The response's id."""
        return self.turn.response_id

    def body(self, status: str | None = None) -> str:
        """The Response object as it is now."""
        return self._object.render(status or ("queued" if self.task is None else "in_progress"))

    def failure(self, actor: SessionActor, code: str, message: str) -> list[Event]:
        """All events of a run that failed before its first one."""
        emitter = Emitter(self._object, actor.ids, None)
        return [*emitter.start(), *emitter.fail(code, message)]


class BackgroundTurns:
    """The runs of one actor."""

    def __init__(self, actor: SessionActor, limits: BackgroundLimits) -> None:
        self._actor = actor
        self._limits = limits
        self._runs: dict[tuple[str, str], Run] = {}
        self._waiting: OrderedDict[str, deque[Run]] = OrderedDict()
        self._running: Counter[str] = Counter()
        self._closed = False
        self._stopping = False

    def __len__(self) -> int:
        return len(self._runs)

    def get(self, tenant: str, response_id: str) -> Run | None:
        """A run of this tenant that has not ended."""
        return self._runs.get((tenant, response_id))

    async def submit(self, tenant: str, request: CreateRequest) -> Run:
        """Queue a request. What can be known to be wrong is refused now: `ApiError`."""
        if not request.store:
            message = "A background response must be stored: leave 'store' out, or set it to true."
            raise ApiError("invalid_value", message, "store")
        session = self._actor.open(tenant)
        if not self._actor.models.knows(request.model):
            await self._actor.models.resolve(request.model)
        await session.find_parent(request)
        if request.conversation is not None:
            await self._actor.conversations.call("get", tenant, request.conversation)
        if self._closed:
            raise ApiError("server_is_overloaded", "This replica is shutting down; try again.", retry_after_s=1)
        waiting = self._waiting.get(tenant, ())
        everyone = sum(map(len, self._waiting.values()))
        if len(waiting) >= self._limits.queued_per_tenant or everyone >= self._limits.queued:
            raise ApiError("rate_limit_exceeded", "Too many background responses are waiting; try later.", None, 5)
        turn = session.turn(request, None)
        run = Run(tenant, turn, request, turn.created_at, self._limits.log_bytes)
        self._runs[tenant, run.id] = run
        self._waiting.setdefault(tenant, deque()).append(run)
        # The caller shows it as queued before it starts: nothing here waits.
        asyncio.get_running_loop().call_soon(self._start_next)
        return run

    async def cancel(self, tenant: str, response_id: str) -> bool:
        """Stop a run and wait for its end; False if there is none (any more)."""
        run = self.get(tenant, response_id)
        if run is None:
            return False
        self._stop(run, "cancelled")
        await run.done.wait()
        return True

    async def drain(self, grace_s: float) -> None:
        """Take no more; what has not ended within the grace fails."""
        self._closed = True
        if self._runs and grace_s > 0:
            ends = [asyncio.ensure_future(run.done.wait()) for run in self._runs.values()]
            await asyncio.wait(ends, timeout=grace_s)
            for end in ends:
                end.cancel()
        await self.close()

    async def close(self) -> None:
        """Fail what has not ended. Idempotent."""
        self._closed = self._stopping = True
        runs = list(self._runs.values())
        for run in runs:
            self._stop(run, "failed")
        for run in runs:
            await run.done.wait()

    def _stop(self, run: Run, reason: str) -> None:
        run.reason = reason
        if run.task is not None:
            run.task.cancel()
        else:
            self._waiting[run.tenant].remove(run)
            self._settle(run)

    def _start_next(self) -> None:
        """Start waiting runs while there are slots, one tenant after the other."""
        while not self._stopping and self._running.total() < self._limits.running:
            run = self._next()
            if run is None:
                return
            self._running[run.tenant] += 1
            run.task = asyncio.get_running_loop().create_task(self._execute(run), name=f"background-{run.id}")
            # Not in the task's own code, which a cancellation before its first step would skip.
            run.task.add_done_callback(partial(self._ended, run))

    def _next(self) -> Run | None:
        for tenant, waiting in list(self._waiting.items()):
            if not waiting:
                del self._waiting[tenant]
            elif self._running[tenant] < self._limits.running_per_tenant:
                self._waiting.move_to_end(tenant)
                return waiting.popleft()
        return None

    async def _execute(self, run: Run) -> None:
        try:
            async with asyncio.timeout(self._limits.deadline_s), aclosing(run.turn.run()) as batches:
                async for events in batches:
                    self._take(run, events)
        except ApiError as error:
            self._fail(run, error.code, error.message)
        except TimeoutError:
            self._fail(run, "server_error", OVERDUE)
        except Exception:
            log.exception("a background turn failed in the gateway itself")
            self._fail(run, "server_error", "The gateway failed on this request; send it again.")

    def _take(self, run: Run, events: Sequence[Event]) -> None:
        run.log.append(events)
        if events[-1].type in TERMINALS:
            run.log.end()

    def _fail(self, run: Run, code: str, message: str) -> None:
        """End a run that has not ended as failed. A turn that had started stores its own end."""
        if run.log.ended:
            return
        events = run.turn.abandon(message)
        if not events:
            events = run.failure(self._actor, code, message)
            self._actor.store.put(run.tenant, StoredResponse.ended(events[-1], run.request, run.id))
        self._take(run, events)

    def _ended(self, run: Run, _: asyncio.Task[None]) -> None:
        self._settle(run)

    def _settle(self, run: Run) -> None:
        """The run's last step, whatever ended it: its response is in the store, its slot is free."""
        if not run.log.ended and run.reason == "cancelled":
            self._actor.store.put(run.tenant, StoredResponse.of(run.id, run.body("cancelled"), run.request))
        elif not run.log.ended:
            self._fail(run, "server_error", STOPPED)
        run.log.end()
        self._actor.store.keep_log(run.tenant, run.id, run.log)
        del self._runs[run.tenant, run.id]
        if run.task is not None:
            self._running[run.tenant] -= 1
            if not self._running[run.tenant]:
                del self._running[run.tenant]
        run.done.set()
        self._start_next()
