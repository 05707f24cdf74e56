"""What is written: small values that can wait in a queue, be sent again, and be carried out more than once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from actors.stored import StoredResponse
from gateway.protocol.items import Item


@dataclass(frozen=True, slots=True)
class PutResponse:
    """Keep a response that has ended. Times are seconds since 1970; without `expires_at` it stays until deleted.

    Nothing happens when it is there, or was: one that was deleted does not come back with a late retry. What the
    response continues is written with it if the store lacks it. If any of that is `store: false`, it is not written:
    the response can then be read but not continued.
    """

    tenant: str
    record: StoredResponse
    status: str
    model: str
    created_at: int
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class DeleteResponse:
    """Delete a response if it is there. What continues it keeps what it needs."""

    tenant: str
    id: str


@dataclass(frozen=True, slots=True)
class PutUsage:
    """One line of the ledger. `id` is the response's and occurs once, so a line that is written again changes nothing.
    `key` names whose key it was, never the key itself; `status` is `TurnRecord.outcome`. Times are milliseconds: to the
    first token and in total from the request, then the buckets of `actors.ledger`."""

    tenant: str
    id: str
    key: str
    model: str
    status: str
    created_at: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
    first_token_ms: int | None = None
    total_ms: int | None = None
    inference_ms: int | None = None
    overhead_ms: int | None = None
    tool_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PutConversation:
    """Create a conversation, or replace its metadata."""

    tenant: str
    id: str
    owner: str
    created_at: int
    metadata: Mapping[str, str] = field(default_factory=dict)
    expires_at: int | None = None


@dataclass(frozen=True, slots=True)
class PutItems:
    """Add items, which all have ids, at the end of a conversation. `head` is the stored response whose context the
    first `rendered` items are, or None."""

    tenant: str
    conversation_id: str
    owner: str
    items: tuple[Item, ...]
    head: str | None = None
    rendered: int = 0


@dataclass(frozen=True, slots=True)
class DeleteItem:
    """Take an item out of a conversation. `head` and `rendered` are as they are after it."""

    tenant: str
    conversation_id: str
    owner: str
    item_id: str
    head: str | None = None
    rendered: int = 0


@dataclass(frozen=True, slots=True)
class DeleteConversation:
    """Delete a conversation with its items; responses made on it stay."""

    tenant: str
    id: str
    owner: str


ConversationJob = PutConversation | PutItems | DeleteItem | DeleteConversation
"""They change nothing when another actor has become the conversation's owner (`Database.claim`)."""

Job = PutResponse | DeleteResponse | PutUsage | ConversationJob


@dataclass(frozen=True, slots=True)
class StoredConversation:
    """A conversation as it was kept, `items` oldest first."""

    id: str
    tenant: str
    owner: str
    created_at: int
    metadata: Mapping[str, str]
    items: tuple[Item, ...]
    head: str | None
    rendered: int


@dataclass(frozen=True, slots=True)
class UsageTotal:
    """What one model was used for by one tenant in a span of time."""

    tenant: str
    model: str
    responses: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    reasoning_tokens: int
