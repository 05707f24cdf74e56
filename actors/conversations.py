"""Conversations wherever they live, and the lease a turn has on one.

A conversation lives on the actor that made it, which its id names (`conv_` + the owner's tag + 32 hex digits).

**One turn at a time.** A turn holds a lease from its start to its end; meanwhile another turn, or a change of the
items, is refused with `conversation_locked`, which is also what OpenAI answers. Making it wait instead would need a
queue of requests on the owner, and a client that sends two turns at once has not said which comes first. Clients that
want a queue have one: a lane of a socket. An actor that dies with a lease no longer renews it, and so loses it.

**Adoption.** When the actor that an id names is gone, whoever is asked for the conversation takes it over from the
database (`Shelf.take`, a compare-and-set on its owner), and is asked for it from then on: the others find it in its
memory.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from actors.adoption import flatten, restore
from actors.conversation import Response
from actors.conversation_memory import ConversationMemory, not_found
from actors.durable import UNAVAILABLE
from actors.peers import Switchboard
from actors.store.jobs import StoredConversation
from gateway.protocol.errors import ApiError
from gateway.protocol.items import Item

log = logging.getLogger(__name__)

RENEW_S = 10.0
OPERATIONS = frozenset(
    {"get", "update", "delete", "add", "items", "item", "remove", "begin", "context", "renew", "commit", "release"}
)
_ID = re.compile(r"conv_([0-9a-f]{8})[0-9a-f]{32}\Z")

ADOPTION_PAUSES_S = (0.05, 0.2)


class Shelf(Protocol):
    """Conversations in a database."""

    async def owner(self, tenant: str, conversation_id: str, *, heard: bool) -> str | None:
        """The tag of its owner; None if there is no such conversation. `heard`: who made it has been asked, so nothing
        of it can be on its way here. Raises `ApiError`."""
        ...

    async def take(
        self, tenant: str, conversation_id: str, from_owner: str, to_owner: str
    ) -> tuple[StoredConversation, Response | None] | None:
        """Make `to_owner` its owner if `from_owner` is; the conversation and its head, None if that is no longer so.
        Raises `ApiError`."""
        ...


Spawn = Callable[[Coroutine[Any, Any, Any], str], object]


UNSURE_PAUSES_S = 0.2, 0.5, 1.0, 2.0
"""Between tries to reach an owner that can't be asked, seconds."""


class Conversations:
    """The way to every conversation, from one actor."""

    def __init__(
        self, owner: str, memory: ConversationMemory, peers: Switchboard, spawn: Spawn, shelf: Shelf | None = None
    ) -> None:
        self._owner = owner
        self._peers = peers
        self._shelf = shelf
        self._adopting: dict[str, asyncio.Future[None]] = {}
        self.memory = memory
        self.spawn = spawn
        peers.offer("conversation", self._for_peer)

    def owns(self, conversation_id: str) -> bool:
        """Whether this actor has it, or is the one that the id names. An id that names none is nowhere, so also not
        elsewhere."""
        return self.memory.has(conversation_id) or self._named(conversation_id)

    def _named(self, conversation_id: str) -> bool:
        found = _ID.match(conversation_id)
        return found is None or found[1] == self._owner

    async def call(self, operation: str, tenant: str, conversation_id: str, *args: Any) -> Any:
        """A method of `ConversationMemory`, done by the owner. Raises `ApiError`."""
        for pause in (*ADOPTION_PAUSES_S, None):
            if await self._here(tenant, conversation_id):
                return self._do(operation, tenant, conversation_id, *args)
            maker = conversation_id[5:13]
            answer = await self._peers.ask_about(maker, "conversation", operation, tenant, conversation_id, *args)
            if answer.value is not None:
                return answer.value[0]
            shelf = self._shelf
            owner = None if shelf is None else await shelf.owner(tenant, conversation_id, heard=answer.heard)
            if owner is None:
                break
            # Nobody has it, so its owner seems gone. Asked once more now that it is known who that was: somebody who
            # takes it over after this is not that owner, so that our try then fails.
            found = await self._peers.ask("conversation", operation, tenant, conversation_id, *args)
            if found is not None:
                return found[0]
            if await self._adopt(tenant, conversation_id, owner):
                return self._do(operation, tenant, conversation_id, *args)
            if pause is None:
                break
            await asyncio.sleep(pause)
        raise not_found(conversation_id)

    async def _here(self, tenant: str, conversation_id: str) -> bool:
        """Whether it is for this actor to answer. One of ours that has left memory comes back first."""
        while (adopting := self._adopting.get(conversation_id)) is not None:
            await asyncio.shield(adopting)
        if self.memory.has(conversation_id):
            return True
        if not self._named(conversation_id):
            return False
        if self._shelf is None:
            return True
        owner = await self._shelf.owner(tenant, conversation_id, heard=True)
        if owner == self._owner:
            await self._adopt(tenant, conversation_id, owner)
        return owner is None or owner == self._owner

    async def _adopt(self, tenant: str, conversation_id: str, owner: str) -> bool:
        """Take it over from this owner. Peers that ask meanwhile wait for the outcome."""
        assert self._shelf is not None
        if (adopting := self._adopting.get(conversation_id)) is not None:
            await asyncio.shield(adopting)
            return self.memory.has(conversation_id)
        done = self._adopting[conversation_id] = asyncio.get_running_loop().create_future()
        try:
            stored = await self._shelf.take(tenant, conversation_id, owner, self._owner)
            if stored is not None:
                self.memory.adopt(*stored)
            return stored is not None
        finally:
            del self._adopting[conversation_id]
            done.set_result(None)

    async def begin(self, tenant: str, conversation_id: str) -> Lease:
        """Hold a conversation for one turn."""
        flat = not self.owns(conversation_id)
        begun = await self.call("begin", tenant, conversation_id, flat)
        return Lease(self, tenant, conversation_id, begun, flat)

    async def peek(self, tenant: str, conversation_id: str) -> tuple[Response | None, tuple[Item, ...]]:
        """What a turn would continue and must add before its own input, without holding the conversation."""
        found = await self.call("context", tenant, conversation_id, not self.owns(conversation_id))
        return _whole(found["head"]), tuple(found["waiting"])

    def _do(self, operation: str, *args: Any) -> Any:
        assert operation in OPERATIONS
        return getattr(self.memory, operation)(*args)

    async def _for_peer(self, operation: str, tenant: str, conversation_id: str, *args: Any) -> list[Any] | None:
        """In a list, so that an operation's False is an answer."""
        if not await self._here(tenant, conversation_id):
            return None
        return [self._do(operation, tenant, conversation_id, *args)]


class Lease:
    """One turn's hold of a conversation: what it continues, and where its items go. Release it, whatever happens."""

    def __init__(
        self, conversations: Conversations, tenant: str, conversation_id: str, begun: Mapping[str, Any], flat: bool
    ) -> None:
        self.head = _whole(begun["head"])
        self._waiting: tuple[Item, ...] = tuple(begun["waiting"])
        self._conversations = conversations
        self._at = (tenant, conversation_id, begun["lease"])
        self._renewing = asyncio.create_task(self._renew(), name="renew-lease") if flat else None
        self._released = False

    def given(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """What to link to `head`: what waits and the turn's own input, each item under the id it will be listed by."""
        return (*self._waiting, *self._conversations.memory.named(items))

    async def commit(self, node: Response) -> None:
        """Add what the turn added. If the conversation is gone meanwhile, the turn stands alone."""
        sent: Response | list[Response] = node
        if self._renewing is not None:
            # Only the step, unless the turn started a new chain (compaction): the owner has the rest.
            chain = flatten(node)
            sent = chain[-1] if node.parent is self.head and self.head is not None else chain
        if not await self._told("commit", sent, self._renewing is not None):
            log.warning("a turn was not added to conversation %s, which is gone", self._at[1])

    def release(self) -> None:
        """Let the next turn in. Idempotent."""
        if self._released:
            return
        self._released = True
        if self._renewing is None:
            self._conversations.memory.release(*self._at)
        else:
            self._renewing.cancel()
            self._conversations.spawn(self._give_back(), "release-lease")

    async def _give_back(self) -> None:
        await self._told("release")

    async def _told(self, operation: str, *args: Any) -> bool:
        """The owner's answer, False if the conversation is gone. Asked again while its owner can't be."""
        pauses = iter(UNSURE_PAUSES_S)
        while True:
            try:
                return bool(await self._conversations.call(operation, *self._at, *args))
            except ApiError as error:
                pause = next(pauses, None)
                if error.code != UNAVAILABLE or pause is None:
                    log.info("conversation %s: no %s (%s)", self._at[1], operation, error.code)
                    return False
            await asyncio.sleep(pause)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(RENEW_S)
            try:
                await self._conversations.call("renew", *self._at)
            except ApiError:
                log.info("conversation %s is gone", self._at[1])


def _whole(head: Any) -> Response | None:
    return restore(head) if isinstance(head, list) else head
