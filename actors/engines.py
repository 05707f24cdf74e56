"""Which engine replica answers: discovery, pinning, and the one retry that is safe.

A conversation stays on the replica that holds its KV prefix and moves only when that replica is gone or draining
(design.md section 2). A generation is tried again elsewhere only before its first chunk (decision 8): afterwards the
client has seen output that a second run would not repeat.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from actors.breaker import OUTCOMES, CircuitBreaker, Outcome
from actors.hedging import hedged
from actors.retrying import Hedging, Next, after_failure
from actors.routing import Candidate, route
from inference.engine import Chunk, Engine, EngineError, Generation, Guide

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
"""Tries of one generation. A request that kills its engine must not go on to kill all of them."""

Discover = Callable[[], Awaitable[Sequence["Endpoint"]]]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine replica: where its token link listens, whether it takes new generations, and what it had in hand when
    it was asked. `load` counts the turns of all actors; 0 for upstreams, which tell nobody."""

    replica: str
    host: str
    port: int
    draining: bool = False
    load: int = 0
    waiting: int = 0


class _Replica:
    __slots__ = ("active", "breaker", "endpoint", "engine")

    def __init__(self, endpoint: Endpoint, engine: Engine) -> None:
        self.endpoint = endpoint
        self.engine = engine
        self.active = 0
        self.breaker = CircuitBreaker()

    def candidate(self) -> Candidate:
        """Its load now: what it said, or what we alone have there if that is more by now."""
        return Candidate(max(self.endpoint.load, self.active), self.endpoint.waiting)


class EnginePool:
    """All replicas of one model's engine, as one actor sees them.

    `refresh_s` is how old the list of replicas may get; `discover_timeout_s` bounds one look-up; `patience_s` is how
    long a turn waits when no replica can take it: a restarted engine is worth the wait, as an error would cost the
    client its `store: false` conversation.
    """

    def __init__(
        self,
        discover: Discover,
        connect: Callable[[Endpoint], Engine],
        refresh_s: float = 5.0,
        discover_timeout_s: float = 20.0,
        patience_s: float = 60.0,
        hedging: Hedging | None = None,
    ) -> None:
        self._discover = discover
        self._connect = connect
        self._refresh_s = refresh_s
        self._discover_timeout_s = discover_timeout_s
        self._patience_s = patience_s
        self._replicas: dict[str, _Replica] = {}
        self.hedging = hedging
        self.hedges = 0
        """How often a second replica was asked beside a silent one."""
        self.moves = 0
        """How often a conversation left its replica, and with it its prefix."""
        self._look: asyncio.Task[None] | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Find the replicas now and keep looking. Raises `EngineError` when there is none."""
        await self.refresh()
        if not self.usable:
            raise EngineError("unavailable", "No engine replica is running for this model yet; try again shortly.")
        self._task = asyncio.create_task(self._keep_fresh(), name="engine-discovery")

    async def close(self) -> None:
        """Stop looking and close every connection."""
        tasks = [task for task in (self._task, self._look) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for replica in self._replicas.values():
            await replica.engine.close()
        self._replicas.clear()

    @property
    def usable(self) -> bool:
        """Whether any replica takes new turns, as far as is known."""
        return any(not replica.endpoint.draining for replica in self._replicas.values())

    def pinned(self) -> PinnedEngine:
        """A view for one conversation: remembers the replica it used."""
        return PinnedEngine(self)

    def timings(self) -> dict[str, float]:
        """What upstreams say their answers took, seconds by kind; nothing for engines that say nothing."""
        found: Counter[str] = Counter()
        for replica in self._replicas.values():
            if (told := getattr(replica.engine, "timings", None)) is not None:
                found.update(told.seconds())
        return dict(found)

    def active(self) -> dict[str, int]:
        """Turns of this actor by replica."""
        return {name: replica.active for name, replica in self._replicas.items()}

    async def refresh(self) -> None:
        """Ask which replicas there are; whoever asks meanwhile shares the answer. A failed look-up changes nothing."""
        await asyncio.shield(self.look())

    def look(self) -> asyncio.Task[None]:
        """The look-up that runs; one begins if there is none. Whoever found a replica dead begins one, so that others
        do not lose a try to it."""
        if self._look is None or self._look.done():
            self._look = asyncio.create_task(self._find(), name="engine-look-up")
        return self._look

    async def choose(self, wanted: str | None, not_these: set[str]) -> tuple[str, _Replica]:
        """The wanted replica if it takes work, else the one with the fewest turns of ours; waits for one if there is
        none. Raises `EngineError` when patience ends."""
        deadline = _now() + self._patience_s
        pause = 0.0
        while True:
            if (name := self._routed(wanted, not_these)) is not None:
                self.moves += wanted is not None and name != wanted
                return name, self._replicas[name]
            if _now() >= deadline:
                raise EngineError("unavailable", "No engine replica can take this turn now; try again shortly.")
            await asyncio.sleep(pause)
            pause = min(0.1 + 2 * pause, 2.0)
            await self.refresh()
            not_these.clear()  # a replica that is still listed lives; only its link was lost

    def another(self, name: str) -> _Replica | None:
        """The least loaded other replica that may be asked now."""
        other = self._routed(None, {name})
        return None if other is None else self._replicas[other]

    def likely(self, wanted: str | None) -> Engine | None:
        """The engine that a turn would be given now, if there is one. Never waits."""
        name = self._routed(wanted, ())
        return None if name is None else self._replicas[name].engine

    def _routed(self, wanted: str | None, not_these: Collection[str]) -> str | None:
        """Which replica gets a turn, of those that may be asked now."""
        now = _now()
        candidates = {
            name: replica.candidate()
            for name, replica in self._replicas.items()
            if name not in not_these and not replica.endpoint.draining and replica.breaker.allows(now)
        }
        return route(wanted, candidates) if candidates else None

    def others(self, failed: set[str]) -> int:
        """How many replicas have not failed and might take a turn."""
        return sum(name not in failed and not each.endpoint.draining for name, each in self._replicas.items())

    async def _find(self) -> None:
        try:
            async with asyncio.timeout(self._discover_timeout_s):
                endpoints = await self._discover()
        except Exception as error:  # noqa: BLE001 - Ray raises many kinds; none is fatal while a replica is known
            log.warning("engine discovery failed: %s", type(error).__name__)
        else:
            await self._adopt(endpoints)

    async def _adopt(self, endpoints: Sequence[Endpoint]) -> None:
        found = {endpoint.replica: endpoint for endpoint in endpoints}
        for name in list(self._replicas):
            known = self._replicas[name]
            if name in found:
                known.endpoint = found[name]
            elif known.active:
                known.endpoint = replace(known.endpoint, draining=True)
            else:
                del self._replicas[name]
                await known.engine.close()
        for name, endpoint in found.items():
            if name not in self._replicas:
                self._replicas[name] = _Replica(endpoint, self._connect(endpoint))

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(self._refresh_s)
            await self.refresh()


class PinnedEngine:
    """One conversation's way to the engine. Safe for several lanes at once."""

    __slots__ = ("_pool", "replica")

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self.replica: str | None = None

    def refusal(self, generation: Callable[[], Generation]) -> EngineError | None:
        """Why the engine would refuse this now, if it can tell beforehand: upstreams know their rate limits. Others are
        not asked, so that a turn's generation is made once."""
        engine = self._pool.likely(self.replica)
        known = getattr(engine, "refusal", None)
        found: EngineError | None = known(generation()) if callable(known) else None
        return found

    def prefer(self, replica: str | None) -> None:
        """Where the conversation was before, for a view that has not chosen yet."""
        if self.replica is None:
            self.replica = replica

    async def check(self, guide: Guide) -> None:
        """As `Engine.check`, by a replica that can be reached."""
        failed: set[str] = set()
        while True:
            name, replica = await self._pool.choose(self.replica, failed)
            try:
                return await replica.engine.check(guide)
            except EngineError as error:
                failed.add(name)
                if error.fault != "unavailable" or len(failed) == MAX_ATTEMPTS:
                    raise

    async def generate(self, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """Stream one generation; the module's text tells about pinning and retry. Raises `EngineError`. Closing the
        iterator aborts the generation at the engine."""
        failed: set[str] = set()
        attempts = 0
        while True:
            name, replica = await self._pool.choose(self.replica, failed)
            self.replica = name
            started = False
            try:
                async with aclosing(self._hedged(name, replica, generation)) as stream:
                    async for chunk in stream:
                        started = True
                        yield chunk
                return
            except EngineError as error:
                if error.fault == "unavailable":
                    self._pool.look()
                attempts += 1
                failed.add(name)
                left = self._pool.others(failed)
                step = after_failure(error.fault, started=started, attempts=attempts, most=MAX_ATTEMPTS, untried=left)
                if step is Next.FAIL:
                    raise
                log.warning("engine replica %s is unavailable, trying another", name)

    def _hedged(self, name: str, replica: _Replica, generation: Generation) -> AsyncGenerator[Chunk, None]:
        hedging = self._pool.hedging
        delay_s = None if hedging is None else hedging.begin()
        attempt = self._attempt(replica, generation)
        if hedging is None or delay_s is None:
            return attempt

        def second() -> AsyncGenerator[Chunk, None] | None:
            other = self._pool.another(name)
            if other is None or not hedging.spend():
                return None
            self._pool.hedges += 1
            return self._attempt(other, generation)

        return hedged(attempt, delay_s, second)

    async def _attempt(self, replica: _Replica, generation: Generation) -> AsyncGenerator[Chunk, None]:
        """One try at one replica, accounted for there. The conversation stays where the first chunk came from."""
        outcome, begun, hedging = Outcome.NEUTRAL, _now(), self._pool.hedging
        replica.active += 1
        ticket = replica.breaker.begin(begun)
        try:
            started = False
            stream = replica.engine.generate(generation)
            async with aclosing(stream):  # type: ignore[type-var]
                async for chunk in stream:
                    if not started:
                        started = True
                        self.replica = replica.endpoint.replica
                        if hedging is not None:
                            hedging.first_output(_now() - begun)
                    yield chunk
            outcome = OUTCOMES[None]
        except EngineError as error:
            outcome = OUTCOMES[error.fault]
            raise
        finally:
            replica.active -= 1
            replica.breaker.end(ticket, outcome, _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
