"""The Conversations objects of one actor, in memory (protocol.md 2.1 `conversation`, 6.1).

A conversation is a list of items and the node of the last turn that was made on it, so that the next turn finds the
whole context in the token cache and renders only what was added since. Deleting an item that is already rendered gives
that up: the next turn starts from the items.

`ConversationMemory` knows nothing of other actors and never waits; its public methods take and return plain values, so
that they can be asked for from elsewhere, and so that a database can take its place. All of them raise `ApiError`:
not_found (another tenant's id too), conversation_locked, invalid_value.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actors.adoption import flatten, restore
from actors.conversation import Response
from actors.listing import Page, list_object, listed, page_of, prefix_of, size_of, with_id
from actors.store.jobs import (
    ConversationJob,
    DeleteConversation,
    DeleteItem,
    PutConversation,
    PutItems,
    StoredConversation,
)
from gateway.protocol.errors import ApiError
from gateway.protocol.ids import IdSource
from gateway.protocol.items import CompactionTrigger, Item, ItemReference

LEASE_S = 30.0
"""How long another actor's lease lasts without being renewed."""


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Bounds of one actor's memory; the least recently used conversations go first."""

    conversations: int = 10_000
    items: int = 10_000
    bytes: int = 256 << 20


@dataclass(slots=True, eq=False)
class Conversation:
    """`items` by id, oldest first; the first `rendered` of them are in `head`, the node of the last turn."""

    id: str
    tenant: str
    created_at: int
    metadata: Mapping[str, str]
    items: dict[str, Item] = field(default_factory=dict)
    head: Response | None = None
    rendered: int = 0
    size: int = 0
    holder: str | None = None
    held_until: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """The object as it is answered."""
        return {
            "id": self.id,
            "object": "conversation",
            "created_at": self.created_at,
            "metadata": dict(self.metadata),
        }


class ConversationMemory:
    """`ids` makes the ids of conversations, items and leases."""

    def __init__(
        self,
        ids: IdSource,
        limits: ConversationLimits | None = None,
        now: Callable[[], int] = lambda: int(time.time()),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ids = ids
        self._limits = limits or ConversationLimits()
        self._now = now
        self._clock = clock
        self._known: OrderedDict[str, Conversation] = OrderedDict()
        self.size = 0
        self.journal: Callable[[ConversationJob], None] | None = None
        """Told of each change, for a database."""

    def __len__(self) -> int:
        return len(self._known)

    def named(self, items: Sequence[Item]) -> tuple[Item, ...]:
        """The items with ids, so that they can be listed and referred to."""
        return tuple(with_id(item, self._ids.item(prefix_of(item))) for item in items)

    def create(self, tenant: str, metadata: Mapping[str, str], items: Sequence[Item]) -> dict[str, Any]:
        """A new conversation."""
        digits = self._ids.item("conv").removeprefix("conv_")
        made = Conversation(f"conv_{self._ids.owner}{digits}", tenant, self._now(), metadata)
        added = self._extend(made, items)
        self._known[made.id] = made
        self.size += made.size
        self._shrink()
        self._record(PutConversation(tenant, made.id, self._ids.owner, made.created_at, metadata))
        self._record_items(made, [item for _, item in added])
        return made.to_json()

    def has(self, conversation_id: str) -> bool:
        """Whether it is here."""
        return conversation_id in self._known

    def adopt(self, stored: StoredConversation, head: Response | None) -> None:
        """Take over what the database has; `head` is the node that it names, if that was found."""
        items = {item.id: item for item in stored.items if item.id is not None}
        rendered = 0 if head is None else stored.rendered
        made = Conversation(stored.id, stored.tenant, stored.created_at, stored.metadata, items, head, rendered)
        made.size = size_of(stored.items)
        self._known[made.id] = made
        self.size += made.size
        self._shrink()

    def drop(self, conversation_id: str) -> None:
        """It is another actor's now, or gone."""
        if (found := self._known.get(conversation_id)) is not None:
            self._forget(found)

    def get(self, tenant: str, conversation_id: str) -> dict[str, Any]:
        """The conversation object."""
        return self._find(tenant, conversation_id).to_json()

    def update(self, tenant: str, conversation_id: str, metadata: Mapping[str, str]) -> dict[str, Any]:
        """Replace the metadata."""
        found = self._find(tenant, conversation_id)
        found.metadata = metadata
        self._record(PutConversation(tenant, found.id, self._ids.owner, found.created_at, metadata))
        return found.to_json()

    def delete(self, tenant: str, conversation_id: str) -> dict[str, Any]:
        """Delete it, with a turn on it or not: that turn then stands alone."""
        self._forget(self._find(tenant, conversation_id))
        self._record(DeleteConversation(tenant, conversation_id, self._ids.owner))
        return {"id": conversation_id, "object": "conversation.deleted", "deleted": True}

    def add(self, tenant: str, conversation_id: str, items: Sequence[Item]) -> dict[str, Any]:
        """Add items at the end, all or none; the list of them."""
        found = self._unlocked(tenant, conversation_id)
        before = found.size
        added = self._extend(found, items)
        self.size += found.size - before
        self._shrink()
        self._record_items(found, [item for _, item in added])
        return list_object(added)

    def items(self, tenant: str, conversation_id: str, page: Page) -> dict[str, Any]:
        """A page of the items."""
        return page_of(list(self._find(tenant, conversation_id).items.items()), page)

    def item(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """One item."""
        found = self._find(tenant, conversation_id).items.get(item_id)
        if found is None:
            raise _item_not_found(item_id)
        return listed(item_id, found)

    def remove(self, tenant: str, conversation_id: str, item_id: str) -> dict[str, Any]:
        """Delete one item; the conversation object."""
        found = self._unlocked(tenant, conversation_id)
        if item_id not in found.items:
            raise _item_not_found(item_id)
        if list(found.items).index(item_id) < found.rendered:
            found.head, found.rendered = None, 0
        self._grow(found, -size_of(found.items.pop(item_id)))
        self._record(DeleteItem(tenant, found.id, self._ids.owner, item_id, *_place(found)))
        return found.to_json()

    def begin(self, tenant: str, conversation_id: str, flat: bool) -> dict[str, Any]:
        """Hold it for one turn: the lease, and the context as `context` has it.

        `flat`: for another actor, whose lease ends when it isn't renewed. One of this process needs no clock, as the
        turn gives it back when it ends, in whatever way."""
        found = self._unlocked(tenant, conversation_id)
        if len(found.items) >= self._limits.items:
            raise self._full("conversation")
        found.holder = self._ids.item("lease")
        found.held_until = self._clock() + LEASE_S if flat else float("inf")
        return {"lease": found.holder, **self.context(tenant, conversation_id, flat)}

    def context(self, tenant: str, conversation_id: str, flat: bool) -> dict[str, Any]:
        """`head`, the node that a turn continues (`flat`: as a chain that can travel), and the items `waiting` to be
        rendered after it."""
        found = self._find(tenant, conversation_id)
        head = flatten(found.head) if flat and found.head is not None else found.head
        return {"head": head, "waiting": tuple(found.items.values())[found.rendered :]}

    def renew(self, tenant: str, conversation_id: str, lease: str) -> bool:
        """Another actor's turn still runs."""
        found = self._find(tenant, conversation_id)
        if found.holder != lease:
            return False
        found.held_until = self._clock() + LEASE_S
        return True

    def commit(
        self, tenant: str, conversation_id: str, lease: str, sent: Response | list[Response], flat: bool
    ) -> bool:
        """Add what a turn added, and let the next turn in. `flat`: it came from another actor, as a step without its
        history, or as a whole chain if it does not continue `head`. False if the lease was lost."""
        found = self._find(tenant, conversation_id)
        if found.holder != lease:
            return False
        node = restore(sent) if isinstance(sent, list) else sent
        if flat and not isinstance(sent, list) and found.head is not None:
            node = replace(node, parent=found.head, tokens=found.head.tokens.cut(node.kept).extend(node.tokens.ids))
        added = [item for item in node.items if item.id is not None and item.id not in found.items]
        for item in added:
            found.items[str(item.id)] = item
            self._grow(found, size_of(item))
        found.head, found.rendered, found.holder = node, len(found.items), None
        self._grow(found, len(node.tokens.ids))
        self._shrink()
        self._record_items(found, added)
        return True

    def release(self, tenant: str, conversation_id: str, lease: str) -> bool:
        """Let the next turn in; harmless if the lease is not held any more."""
        found = self._known.get(conversation_id)
        if found is None or found.tenant != tenant or found.holder != lease:
            return False
        found.holder = None
        return True

    def _record(self, job: ConversationJob) -> None:
        if self.journal is not None:
            self.journal(job)

    def _record_items(self, found: Conversation, added: Sequence[Item]) -> None:
        if added or found.head is not None:
            self._record(PutItems(found.tenant, found.id, self._ids.owner, tuple(added), *_place(found)))

    def _find(self, tenant: str, conversation_id: str) -> Conversation:
        found = self._known.get(conversation_id)
        if found is None or found.tenant != tenant:
            raise not_found(conversation_id)
        self._known.move_to_end(conversation_id)
        return found

    def _unlocked(self, tenant: str, conversation_id: str) -> Conversation:
        found = self._find(tenant, conversation_id)
        if found.holder is not None and self._clock() < found.held_until:
            raise ApiError(
                "conversation_locked",
                "Another turn is running on this conversation. Wait for its end, then send this again.",
                "conversation",
            )
        return found

    def _extend(self, conversation: Conversation, items: Sequence[Item]) -> list[tuple[str, Item]]:
        named = self.named(items)
        if len(conversation.items) + len(named) > self._limits.items:
            raise self._full("items")
        added: dict[str, Item] = {}
        for index, item in enumerate(named):
            if isinstance(item, ItemReference | CompactionTrigger) or item.id is None:
                raise ApiError("invalid_value", f"A conversation can't hold a '{item.type}'.", f"items[{index}]")
            if item.id in conversation.items or item.id in added:
                message = "An item with this id is already in the conversation."
                raise ApiError("invalid_value", message, f"items[{index}].id")
            added[item.id] = item
        conversation.items |= added
        conversation.size += size_of(tuple(added.values()))
        return list(added.items())

    def _full(self, param: str) -> ApiError:
        message = f"A conversation holds at most {self._limits.items} items. Delete some, or start a new one."
        return ApiError("array_above_max_length", message, param)

    def _grow(self, conversation: Conversation, size: int) -> None:
        conversation.size += size
        self.size += size

    def _forget(self, conversation: Conversation) -> None:
        del self._known[conversation.id]
        self.size -= conversation.size

    def _shrink(self) -> None:
        """Back below the bounds. The one that was used last stays, and those with a turn do."""
        for conversation in list(self._known.values())[:-1]:
            if len(self._known) <= self._limits.conversations and self.size <= self._limits.bytes:
                return
            if conversation.holder is None:
                self._forget(conversation)


def _place(found: Conversation) -> tuple[str | None, int]:
    """(id of the stored response whose context the first items are, how many): what another actor may go on from."""
    head = found.head
    return (None, 0) if head is None or not head.store else (head.id, found.rendered)


def not_found(conversation_id: str) -> ApiError:
    """The words for every id that this tenant doesn't have."""
    return ApiError("not_found", f"Conversation with id '{conversation_id[:128]}' not found.")


def _item_not_found(item_id: str) -> ApiError:
    return ApiError("not_found", f"Item with id '{item_id[:128]}' not found in this conversation.")
