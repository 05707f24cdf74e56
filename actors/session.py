"""The session actor: what one process knows about the conversations of its sockets.

`SessionActor` is one per Serve replica; `Session` is one per socket, or per HTTP request. Both are plain objects: the
Serve deployment around them is `gateway.app`.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakSet

import orjson

from actors.archive import Archive
from actors.background import BackgroundLimits, BackgroundTurns
from actors.conversation import Lane, Response, ResponseCache
from actors.conversation_memory import ConversationLimits, ConversationMemory
from actors.conversations import Conversations
from actors.durable import ConversationShelf, Durability, DurableResponses, unavailable
from actors.engines import PinnedEngine
from actors.guides import CheckedGuides
from actors.ledger import usage_entry
from actors.metrics import Metrics
from actors.models import Model, ModelTable
from actors.peers import Peers, Switchboard
from actors.priority import PRIMING
from actors.scrape import Scrape
from actors.sealing import Sealer, new_key
from actors.store.errors import StoreError
from actors.stored import ResponseStore, SharedResponses, StoreLimits
from actors.turn import Turn
from actors.turn_record import TurnRecord
from actors.watched import watch_counters, watch_engines, watch_post_work, watch_spill
from gateway.protocol.errors import ApiError
from gateway.protocol.ids import IdSource
from gateway.protocol.items import Item
from gateway.protocol.requests import CreateRequest
from gateway.protocol.tooldefs import ToolMemo
from gateway.protocol.tools import Tool
from inference.engine import EngineError, Generation, Sampling
from inference.formats.format import Brief

log = logging.getLogger(__name__)

WEIGH_S = 1.0
"""How often the memory of all sockets is added up, seconds."""
PRIMED_AT_ONCE = 16
"""Warm-ups that an actor has in the engines at once; they must not crowd out turns."""


@dataclass(slots=True)
class Counters:
    """Totals since the actor started. `*_tokens` tell what was encoded and what the token cache saved; `cut_backs` how
    often a template made it forget thoughts, and `cut_tokens` what that took out of the cache."""

    turns: int = 0
    failed_turns: int = 0
    rendered_items: int = 0
    encoded_tokens: int = 0
    reused_tokens: int = 0
    heads_rendered: int = 0
    heads_reused: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    compactions: int = 0
    unopened_blobs: int = 0
    cut_backs: int = 0
    cut_tokens: int = 0
    whole_renders: int = 0
    truncations: int = 0
    guides_checked: int = 0
    released_sessions: int = 0
    fallbacks: int = 0


class Heads:
    """Rendered heads (instructions and tools), shared by all sessions of the actor, least recently used go first.

    Agents send the same tools every turn and every session: they are rendered and encoded once.
    """

    TOOL_LISTS = 64

    def __init__(self, counters: Counters, capacity: int = 256) -> None:
        self._counters = counters
        self._capacity = capacity
        self._known: OrderedDict[bytes, bytes] = OrderedDict()
        # `ToolMemo` gives the same tuple for the same tools, so that their digest (50 us for 26 kB) is made once.
        self._digests: OrderedDict[int, tuple[tuple[Tool, ...], bytes]] = OrderedDict()

    async def get(self, model: Model, brief: Brief) -> bytes:
        """The ids of a head. Which tool must be called is no part of it; that none may be is, as they are not shown."""
        shown = brief.tools.tools if brief.tools.choice.mode != "none" else ()
        text, told = brief.text, (brief.instructions, brief.preamble, brief.effort)
        fields = orjson.dumps([model.name, *told, text.type, text.schema])
        key = hashlib.blake2b(fields + self._digest(shown), digest_size=16).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            self._counters.heads_reused += 1
            return known
        head = await asyncio.to_thread(model.format.head, brief)
        self._counters.heads_rendered += 1
        self._known[key] = head
        while len(self._known) > self._capacity:
            self._known.popitem(last=False)
        return head

    def _digest(self, tools: tuple[Tool, ...]) -> bytes:
        known = self._digests.get(id(tools))
        if known is not None:
            self._digests.move_to_end(id(tools))
            return known[1]
        listed = [[tool.kind, tool.model_name, tool.description, tool.parameters, tool.grammar] for tool in tools]
        digest = hashlib.blake2b(orjson.dumps(listed), digest_size=16).digest()
        self._digests[id(tools)] = tools, digest  # kept, so that no other list gets this id
        while len(self._digests) > self.TOOL_LISTS:
            self._digests.popitem(last=False)
        return digest


class SessionActor:
    """State of one replica. `owner` is its tag in response and conversation ids; `peers` asks the other actors for what
    their tags name; `sealer` has the keys that all replicas share (None: a key of its own).

    `store` has the stored responses, `background` the turns nobody waits for, `archive` finds both by id.

    Bound to one event loop. `close` must be awaited; it ends background turns and what still primes caches.
    """

    def __init__(
        self,
        models: ModelTable,
        owner: str,
        per_lane: int = 16,
        clock: Callable[[], float] = time.time,
        sealer: Sealer | None = None,
        peers: Peers | None = None,
        store: StoreLimits | None = None,
        background: BackgroundLimits | None = None,
        conversations: ConversationLimits | None = None,
        durability: Durability | None = None,
        conversation_bytes: int = 256 << 20,
        memory_bytes: int = 2 << 30,
    ) -> None:
        self.models = models
        self.sealer = sealer or Sealer([new_key()])
        self.ids = IdSource(owner, secrets.token_hex)
        self.counters = Counters()
        self.heads = Heads(self.counters)
        self.guides = CheckedGuides()
        self.peers = Switchboard(owner, peers)
        self.durability = durability
        self.conversation_bytes = conversation_bytes
        self._memory_limit = memory_bytes
        self._weigh_at = 0.0
        responses = SharedResponses(store)
        durable = None if durability is None else DurableResponses(responses, durability)
        self.store: ResponseStore = durable or responses
        self.metrics = Metrics(owner, models.names())
        self.scrape = Scrape(self.peers, self.metrics)
        self.peers.offer("recover", self._recover_here)
        self._watch()
        self.background = BackgroundTurns(self, background or BackgroundLimits())
        self.archive = Archive(self)
        memory = ConversationMemory(self.ids, conversations, self.now)
        shelf = None if durability is None or durable is None else ConversationShelf(durability, durable, self.recover)
        if durability is not None and shelf is not None:
            memory.journal = shelf.journal
            durability.lost = memory.drop
        self.conversations = Conversations(owner, memory, self.peers, self.spawn, shelf)
        self.tool_memo = ToolMemo()
        self.priming = asyncio.Semaphore(PRIMED_AT_ONCE)
        self._per_lane = per_lane
        self._clock = clock
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sessions: WeakSet[Session] = WeakSet()

    def now(self) -> int:
        """Wall clock in whole seconds, for `created_at`."""
        return int(self._clock())

    async def recover(self, owner: str) -> None:
        """Have what an actor that is gone has left behind written, here or by actors on the node where it was. Whoever
        has written it since the last look, the next one finds it. Raises `ApiError` (store_unavailable) while that
        can't be done."""
        if await self.store.recover(owner):
            return
        answer = await self.peers.ask_about(owner, "recover", owner)
        if not answer.value and not answer.complete:
            raise unavailable(StoreError("transient", "Not all session actors could be asked."))

    async def _recover_here(self, owner: str) -> bool | None:
        return await self.store.recover(owner) or None

    def open(self, tenant: str) -> Session:
        """A session for one socket or one HTTP request of a tenant."""
        session = Session(self, tenant, self._per_lane)
        self._sessions.add(session)
        return session

    @property
    def memory_bytes(self) -> int:
        """About what the contexts hold that this actor's sockets remember; contexts that lanes share count for each."""
        return sum(session.memory_bytes for session in self._sessions)

    def _shrink(self) -> None:
        """Contexts that the store has leave the memory of the sockets that used them longest ago, while all hold more
        than they may. Looked at now and then: it takes a microsecond for each socket."""
        now = time.monotonic()
        if self.durability is None or now < self._weigh_at:
            return
        self._weigh_at = now + WEIGH_S
        durable, held = self.durability.post.durable, self.memory_bytes
        if held <= self._memory_limit:
            return
        for session in sorted(self._sessions, key=lambda each: each.last_used):
            before = session.memory_bytes
            session.cache.release(lambda node: node.store and durable(node.id))
            held -= before - session.memory_bytes
            self.counters.released_sessions += 1
            if held <= self._memory_limit:
                return

    def _watch(self) -> None:
        watch_counters(self.metrics, self.counters)
        if self.durability is not None:
            watch_post_work(self.metrics, self.durability.post)
            self.durability.written = self.metrics.post_processed
            if self.durability.spill is not None:
                watch_spill(self.metrics, self.durability.spill)
        watch_engines(self.metrics, self.models)
        self.metrics.watch("gauge", "memory_bytes", "Contexts that sockets remember.", lambda: self.memory_bytes)

    def forget_everywhere(self, tenant: str, response_id: str) -> None:
        """No socket of this actor remembers this response any more."""
        for session in self._sessions:
            if session.tenant == tenant:
                session.forget(response_id)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        """Run something beside the turns; owned and ended by this actor."""
        task = asyncio.ensure_future(work)
        task.set_name(name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def account(self, record: TurnRecord) -> None:
        """Have a turn's line of the ledger written, once: before its terminal event leaves, or when it ends without."""
        if self.durability is not None and not record.accounted and (entry := usage_entry(record)) is not None:
            record.accounted = True
            self.durability.account(entry)

    def turn_ended(self, record: TurnRecord) -> None:
        """Account for a turn, whatever its outcome."""
        self.metrics.turn_ended(record)
        self._shrink()
        self.account(record)
        totals = self.counters
        totals.turns += 1
        totals.failed_turns += record.outcome not in ("completed", "incomplete")
        totals.rendered_items += record.rendered_items
        totals.encoded_tokens += record.encoded_tokens
        totals.reused_tokens += record.reused_tokens
        totals.output_tokens += record.output_tokens
        totals.cached_tokens += record.cached_tokens
        log.debug("turn %s", asdict(record))

    async def flush(self, seconds: float) -> None:
        """No turn starts any more; write what those that ended have left, within this time."""
        if self.durability is not None:
            await self.durability.post.drain(seconds)

    async def close(self, write_s: float = 10.0) -> None:
        """End background work, write what is to be written within `write_s`, and let go of the engines."""
        await self.background.close()
        if self.durability is not None:
            await self.durability.close(write_s)
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.models.close()


class Session:
    """What one socket remembers: its lanes' responses and the engine replicas that hold its prefixes."""

    __slots__ = ("__weakref__", "_engines", "_last_end", "_priming", "actor", "cache", "tenant")

    def __init__(self, actor: SessionActor, tenant: str, per_lane: int) -> None:
        self.actor = actor
        self.tenant = tenant
        self.cache = ResponseCache(per_lane)
        self._engines: dict[str, PinnedEngine] = {}
        self._priming: asyncio.Task[Any] | None = None
        self._last_end: dict[Lane, float] = {}

    @property
    def memory_bytes(self) -> int:
        """About what its lanes' newest contexts hold."""
        return self.cache.size

    @property
    def last_used(self) -> float:
        """When its newest turn ended (monotonic seconds), 0 if none has."""
        return max(self._last_end.values(), default=0.0)

    def ended(self, lane: Lane, when: float) -> None:
        """A turn's terminal event was made (monotonic seconds)."""
        self._last_end[lane] = when

    def since_last_end(self, lane: Lane, when: float) -> float | None:
        """How long its client took for its tools, None for a lane's first turn."""
        last = self._last_end.get(lane)
        return None if last is None else when - last

    def turn(self, request: CreateRequest, lane: Lane) -> Turn:
        """A turn that has not started."""
        return Turn(self, request, lane)

    def engine(self, model: Model) -> PinnedEngine:
        """The way to this model's engine that keeps to one replica."""
        engine = self._engines.get(model.name)
        if engine is None:
            engine = self._engines[model.name] = model.engines.pinned()
        return engine

    async def find_parent(self, request: CreateRequest) -> Response | None:
        """The response a request continues: this socket's memory first, then stored ones. Raises `ApiError`
        previous_response_not_found; another tenant's id gets the same words."""
        wanted = request.previous_response_id
        if wanted is None:
            return None
        found = self.cache.get(wanted)
        if found is None:
            stored = await self.actor.archive.find(self.tenant, wanted)
            found = None if stored is None else stored.node
        if found is None:
            raise ApiError(
                "previous_response_not_found",
                f"Previous response with id '{wanted}' not found.",
                "previous_response_id",
            )
        return found

    async def peek_context(self, request: CreateRequest) -> tuple[Response | None, tuple[Item, ...]]:
        """What a request continues and what it adds, without holding its conversation. Raises `ApiError`."""
        if request.conversation is None:
            return await self.find_parent(request), request.input
        head, waiting = await self.actor.conversations.peek(self.tenant, request.conversation)
        return head, waiting + request.input

    def commit(self, response: Response) -> None:
        """Make a response continuable on this socket."""
        self.cache.commit(response)

    def forget(self, response_id: str) -> None:
        """This response was deleted."""
        if (known := self.cache.get(response_id)) is not None:
            self.cache.evict(response_id, known.lane)

    def forget_parent(self, previous_response_id: object, lane: Lane) -> None:
        """A continuation failed: its parent leaves this socket's memory if it is of the same lane (protocol.md 4.3)."""
        if isinstance(previous_response_id, str):
            self.cache.evict(previous_response_id, lane)

    def prime(self, model: Model, parts: Sequence[bytes], name: str) -> None:
        """Let the engine compute the KV prefix of a warmed-up conversation before its first real turn. One at a time: a
        newer warm-up takes the place of an older one, and none outlives its socket."""
        self.close()
        if any(parts):
            self._priming = self.actor.spawn(self._prime(model, parts, name), "prime-prefix")

    def close(self) -> None:
        """Nothing goes on for this session."""
        if self._priming is not None:
            self._priming.cancel()
            self._priming = None

    async def _prime(self, model: Model, parts: Sequence[bytes], name: str) -> None:
        generation = Generation(
            name, model.name, parts, Sampling(max_tokens=1), priority=PRIMING, cache_salt=self.tenant
        )
        try:
            async with self.actor.priming, aclosing(self.engine(model).generate(generation)) as chunks:
                async for _ in chunks:
                    pass
        except EngineError as error:
            log.info("priming a prefix failed, the first turn will compute it: %s", error.message)
