"""Stored responses that outlive their actor: memory in front, a database behind, post-work between.

A response is found from the moment its terminal event exists: in memory, in what is still to be written, or in the
database, in this order (design.md decision 10). So its owner answers for what is not durable yet, and whoever else is
asked finds what is.
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
from collections.abc import Awaitable, Callable, Sequence

import orjson

from actors.backpressure import Room
from actors.conversation import Response
from actors.eventlog import EventLog
from actors.listing import size_of
from actors.postwork import Job as Work
from actors.postwork import PostWork, PostWorkLimits
from actors.spill import Spill, Ticket
from actors.spill_replay import ReplayReport, left_by, replay
from actors.store.database import Database
from actors.store.errors import StoreError
from actors.store.jobs import (
    ConversationJob,
    DeleteItem,
    DeleteResponse,
    Job,
    PutItems,
    PutResponse,
    PutUsage,
    StoredConversation,
)
from actors.stored import SharedResponses, StoredResponse
from gateway.protocol.errors import ApiError

log = logging.getLogger(__name__)
audit_log = logging.getLogger("limpet.audit")

SWEEP_S = 600.0
"""About how often what is past its time is deleted, seconds."""
SWEEP_PAUSE_S = 0.2
SWEEP_MOST = 1000
REPLAY_S = 15.0
"""About how often what actors of this node that died have left is looked for, seconds."""
RECOVER_S = 2.0
RECOVER_PAUSE_S = 0.05
FLUSH_S = 10.0
"""How long to wait for writes on a conversation before it is read, seconds."""
KIND = "response"
CONVERSATION = "conversation"
UNAVAILABLE = "store_unavailable"
"""The code of a look-up that the database can't answer now."""
_FACTS = re.compile(r'"created_at":(\d+),"completed_at":[^,]*,"status":"(\w+)"')


class Durability:
    """The database of one actor and what waits to be written to it. Bound to one event loop; `start`, then `close`.

    `ttl_s`: how long a response is kept, seconds; None: until it is deleted. `room_deadline_s`: how long a turn waits
    while nothing more may wait. `audit`: each line of the ledger goes to the logger `limpet.audit` as well, as JSON,
    once it is durable.
    """

    def __init__(
        self,
        database: Database,
        limits: PostWorkLimits | None = None,
        ttl_s: float | None = None,
        room_deadline_s: float = 10.0,
        spill: Spill | None = None,
        spill_keys: Sequence[bytes] = (),
        *,
        audit: bool = False,
    ) -> None:
        self.database = database
        self.ttl_s = ttl_s
        self.post = PostWork(self, limits, self._written, self._settled)
        self.spill = spill
        self._spill_keys = spill_keys
        self._audit = audit
        self.written: Callable[[float], None] | None = None
        """Told of each job that became durable how many seconds that took."""
        self.lost: Callable[[str], None] | None = None
        """Told of each conversation that turned out to be another actor's now."""
        self._room_deadline_s = room_deadline_s
        self._replaying: asyncio.Task[ReplayReport] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to write, to delete what is past its time, and to write what actors that died have left."""
        self.post.start()
        self._tasks = [
            asyncio.create_task(self._sweep(), name="expire-stored"),
            asyncio.create_task(self._replay(), name="replay-now-and-then"),
        ]

    async def write(self, jobs: Sequence[Job]) -> list[ConversationJob]:
        """`postwork.Sink`."""
        outdated = await self.database.write(jobs)
        if self.lost is not None:
            for job in outdated:
                self.lost(_about(job))
        return outdated

    async def room(self) -> Room:
        """What a turn takes before it starts. Raises `ApiError`."""
        return await self.post.room(self._room_deadline_s)

    def put(self, kind: str, name: str, payload: Job, size: int, after: str | None = None) -> None:
        """Have it written. From here on it survives a kill of this process, if there is a spill."""
        ticket = None if self.spill is None else self.spill.append([payload])
        self.post.put(Work(kind, name, payload, size, after, ticket))

    def account(self, entry: PutUsage) -> None:
        """Have one line of the ledger written."""
        self.put("usage", entry.id, entry, 300)

    async def close(self, deadline_s: float) -> None:
        """Write what waits, within the deadline, and let go of the database."""
        tasks = [*self._tasks, *([] if self._replaying is None else [self._replaying])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.post.drain(deadline_s)
        await self.post.close()
        await self.database.close()
        if self.spill is not None:
            self.spill.close()

    def _settled(self, job: Work) -> None:
        if self.spill is not None and isinstance(job.spilled, Ticket):
            self.spill.done(job.spilled)

    def _written(self, job: Work, seconds: float) -> None:
        self._settled(job)
        if self._audit and isinstance(job.payload, PutUsage):
            audit_log.info("%s", orjson.dumps(job.payload).decode())
        if self.written is not None:
            self.written(seconds)

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S * random.uniform(0.5, 1.5))  # noqa: S311  actors take turns
            try:
                for _ in range(SWEEP_MOST):
                    if not await self.database.expire():
                        break
                    await asyncio.sleep(SWEEP_PAUSE_S)
                self.post.retry_failed()
            except StoreError as error:
                log.info("nothing was expired: %s", error)

    async def recover(self, owner: str) -> bool:
        """Write what this actor left if it died on this node; whether there was anything. Tried again up to
        `RECOVER_S`: somebody else may be writing it, the database may refuse it for now, or its owner lives and can't
        be asked. Raises `ApiError` (store_unavailable) if what can be written is not by then."""
        if self.spill is None or owner == self.spill.owner:
            return False
        found, pause = False, RECOVER_PAUSE_S
        try:
            async with asyncio.timeout(RECOVER_S):
                while left := left_by(self.spill.directory, owner):
                    found = True
                    if left <= (await self._replayed(owner)).settled:
                        break
                    await asyncio.sleep(pause)
                    pause *= 2
        except TimeoutError:
            raise unavailable(StoreError("transient", "An actor's last writes are on their way.")) from None
        return found

    async def _replayed(self, first: str = "") -> ReplayReport:
        """Those that come meanwhile wait for the same one; it goes on without them."""
        if self._replaying is None or self._replaying.done():
            self._replaying = asyncio.create_task(self._replay_once(first), name="replay-spills")
        return await asyncio.shield(self._replaying)

    async def _replay_once(self, first: str) -> ReplayReport:
        assert self.spill is not None
        try:
            return await replay(self.spill.directory, self.database, self._spill_keys, first=first)
        except OSError as error:
            log.warning("spill files can't be read: %s", type(error).__name__)
            return ReplayReport()

    async def _replay(self) -> None:
        while self.spill is not None:
            await self._replayed()
            self.spill.tidy()
            await asyncio.sleep(REPLAY_S * random.uniform(0.5, 1.5))  # noqa: S311  actors take turns


class ConversationShelf:
    """`conversations.Shelf`: the database's conversations, and who owns them."""

    def __init__(
        self, durability: Durability, responses: DurableResponses, recover: Callable[[str], Awaitable[None]]
    ) -> None:
        self._durability = durability
        self._recover = recover
        self._database = durability.database
        self._post = durability.post
        self._responses = responses

    def journal(self, job: ConversationJob) -> None:
        """Have a change written, after those of the same conversation that wait."""
        added, name = isinstance(job, PutItems | DeleteItem), _about(job)
        size = 200 + size_of(job.items) if isinstance(job, PutItems) else 200
        self._durability.put(CONVERSATION, name, job, size, name if added else None)

    async def owner(self, tenant: str, conversation_id: str, *, heard: bool) -> str | None:
        """See `conversations.Shelf`."""
        try:
            async with asyncio.timeout(FLUSH_S):
                while not self._post.durable(conversation_id, CONVERSATION):  # noqa: ASYNC110  rare, and short
                    await asyncio.sleep(0.01)  # it left memory a moment ago
            owner = await self._database.owner(tenant, conversation_id)
            if owner is None and not heard:
                await self._recover(conversation_id[5:13])  # who made it
                owner = await self._database.owner(tenant, conversation_id)
        except TimeoutError:
            raise unavailable(StoreError("transient", "Writes wait.")) from None
        except StoreError as error:
            raise unavailable(error) from None
        return owner

    async def take(
        self, tenant: str, conversation_id: str, from_owner: str, to_owner: str
    ) -> tuple[StoredConversation, Response | None] | None:
        """See `conversations.Shelf`."""
        try:
            if from_owner != to_owner:
                # Its last changes come first: once it is not the owner, they would change nothing.
                await self._recover(from_owner)
            if not await self._database.claim(tenant, conversation_id, from_owner, to_owner):
                return None
            stored = await self._database.conversation(tenant, conversation_id)
        except StoreError as error:
            raise unavailable(error) from None
        if stored is None:
            return None
        found = None if stored.head is None else await self._responses.get(tenant, stored.head)
        return stored, None if found is None else found.node


class DurableResponses:
    """A `ResponseStore` with a database under it."""

    def __init__(self, memory: SharedResponses, durability: Durability) -> None:
        self._memory = memory
        self._durability = durability
        self._database = durability.database
        self._post = durability.post

    def put(self, tenant: str, record: StoredResponse) -> None:
        """Remember, and have it written."""
        self._memory.put(tenant, record)
        created_at, status = facts_of(record)
        ttl_s = self._durability.ttl_s
        parent = None if record.node is None or record.node.parent is None else record.node.parent.id
        expires_at = None if ttl_s is None else created_at + int(ttl_s)
        payload = PutResponse(tenant, record, status, record.model, created_at, expires_at)
        self._durability.put(KIND, record.id, payload, record.size, parent)

    def remember(self, tenant: str, record: StoredResponse) -> None:
        """A copy of another actor's, which writes it."""
        self._memory.put(tenant, record)

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response, or None. Raises `ApiError` while the database can't be asked."""
        found, known = await self._held(tenant, response_id)
        if known:
            return found
        try:
            found = await self._database.load(tenant, response_id)
        except StoreError as error:
            raise unavailable(error) from None
        if found is not None:
            self._memory.put(tenant, found)
        return found

    async def body(self, tenant: str, response_id: str) -> str | None:
        """See `ResponseStore`: of the database's rows only the object is read. Raises `ApiError` as `get`."""
        found, known = await self._held(tenant, response_id)
        if known:
            return None if found is None else found.body()
        try:
            return await self._database.body(tenant, response_id)
        except StoreError as error:
            raise unavailable(error) from None

    async def _held(self, tenant: str, response_id: str) -> tuple[StoredResponse | None, bool]:
        """What memory and the waiting writes have of it, and whether that is all there is to know."""
        found = await self._memory.get(tenant, response_id)
        if found is not None:
            return found, True
        waiting = self._post.newest(response_id, KIND)
        if waiting is None:
            return None, False
        if isinstance(waiting, PutResponse) and waiting.tenant == tenant:
            return waiting.record, True
        return None, True

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget it everywhere; True if it was there. What waits to be written is deleted after it was written."""
        waiting = self._post.newest(response_id, KIND)
        known = await self._memory.delete(tenant, response_id)
        if waiting is not None:
            self._durability.put(KIND, response_id, DeleteResponse(tenant, response_id), 100, response_id)
            return known or isinstance(waiting, PutResponse)
        try:
            return await self._database.delete(tenant, response_id) or known
        except StoreError as error:
            raise unavailable(error) from None

    async def recover(self, owner: str) -> bool:
        """See `ResponseStore`."""
        return await self._durability.recover(owner)

    def keep_log(self, tenant: str, response_id: str, log: EventLog) -> None:
        """See `ResponseStore`. Events stay in memory."""
        self._memory.keep_log(tenant, response_id, log)


def _about(job: ConversationJob) -> str:
    """The id of the conversation."""
    return job.conversation_id if isinstance(job, PutItems | DeleteItem) else job.id


def facts_of(record: StoredResponse) -> tuple[int, str]:
    """(created_at, status) of a response, which are among the first keys of its object (`ResponseObject.render`)."""
    facts = _FACTS.search(record.own, 0, 512)
    assert facts is not None
    return int(facts[1]), facts[2]


def unavailable(error: StoreError) -> ApiError:
    """What a client is told while stored responses can't be read."""
    log.warning("the store could not be read: %s", error)
    message = "Stored responses can't be read at the moment; try again shortly."
    return ApiError(UNAVAILABLE, message, "previous_response_id")
