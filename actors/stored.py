"""Stored responses (`store: true`): what GET shows, what can be continued, and how much of it one actor keeps.

`SharedResponses` is memory: least recently used responses go first, and what it forgot is not found. `actors.durable`
puts a database under it; `ResponseStore` is all that the rest of the actor knows.

Source: protocol.md 4.1, 4.5, 6.1 and 6.3.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self

import orjson

from actors.adoption import flatten, restore
from actors.conversation import Response
from actors.eventlog import EventLog
from actors.listing import derived_id, size_of
from gateway.protocol.emitter import Event
from gateway.protocol.items import CompactionTrigger, Item, ItemReference
from gateway.protocol.requests import CreateRequest

MIB = 1 << 20
SHARED_ECHO_CHARS = 4096
"""Above this the echo of a request is worth keeping as the value that requests share (agents' tools, mostly)."""
REMEMBERED_DELETIONS = 10_000


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Bounds of one actor's memory. `bytes` counts text and token ids that each response added, not what is shared
    with its parent; `log_bytes` the events of finished background responses."""

    responses: int = 10_000
    bytes: int = 256 * MIB
    log_bytes: int = 64 * MIB


@dataclass(slots=True, eq=False)
class StoredResponse:
    """One response that has ended, whatever its status.

    `own` is the Response object's text, without what `echo` says if that is kept apart. `node` is its place in the
    conversation: None if it can't be continued, since it failed or was cancelled. `given` are the items it was asked
    with. `size` is about how many bytes it holds.
    """

    id: str
    own: str
    echo: Mapping[str, Any] | None
    background: bool
    given: tuple[Item, ...]
    node: Response | None
    size: int
    log: EventLog | None = None
    model: str = ""

    @classmethod
    def of(
        cls, response_id: str, body: str, request: CreateRequest, node: Response | None = None, outputs: int = 0
    ) -> Self:
        """`body` is the Response object as it was last sent; `outputs` is how many items of `node` are output."""
        own, echo = _split(body, request.echo)
        given = _plain(request.input) if node is None else node.items[: len(node.items) - outputs]
        held = size_of(given) if node is None else len(node.tokens.ids) + size_of(node.items)
        return cls(response_id, own, echo, request.background, given, node, len(own) + held, model=request.model)

    @classmethod
    def ended(
        cls, terminal: Event, request: CreateRequest, response_id: str, node: Response | None = None, outputs: int = 0
    ) -> Self:
        """What a turn's terminal event says, so that GET repeats it to the letter. The object is the event's last
        key; nothing before it can hold the words that are looked for."""
        start = terminal.data.index('"response":') + len('"response":')
        return cls.of(response_id, terminal.data[start:-1], request, node, outputs)

    def body(self) -> str:
        """The Response object as JSON text."""
        if self.echo is None:
            return self.own
        return f"{self.own},{orjson.dumps(self.echo).decode()[1:]}"

    def inputs(self) -> list[tuple[str, Item]]:
        """All that the answer was made from, oldest first, under the ids that lists show: the context, then what was
        new. O(history)."""
        turns = [] if self.node is None else list(self.node.lineage())[1:]
        turns.reverse()
        entries = [entry for turn in turns for entry in _entries(turn.id, turn.items)]
        return [*entries, *_entries(self.id, self.given)]

    def export(self) -> dict[str, Any]:
        """For another actor. The events of a background response stay where they are."""
        chain = [] if self.node is None else flatten(self.node)
        return {
            "id": self.id,
            "body": self.body(),
            "background": self.background,
            "model": self.model,
            "given": self.given,
            "chain": chain,
            # Copied, the whole history is this one's own.
            "size": self.size + sum(len(turn.tokens.ids) + size_of(turn.items) for turn in chain[:-1]),
        }

    @classmethod
    def adopt(cls, exported: Mapping[str, Any]) -> Self:
        """The inverse of `export`."""
        chain = exported["chain"]
        return cls(
            exported["id"],
            exported["body"],
            None,
            exported["background"],
            exported["given"],
            restore(chain) if chain else None,
            exported["size"],
            model=exported["model"],
        )


class ResponseStore(Protocol):
    """Where stored responses are. Another tenant's id is simply not found."""

    def put(self, tenant: str, record: StoredResponse) -> None:
        """Remember: found by id from now on. It may become durable later than this returns."""
        ...

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        """The response, or None."""
        ...

    async def body(self, tenant: str, response_id: str) -> str | None:
        """The Response object as JSON text, or None. Does not read what the response continues."""
        ...

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Forget; True if it was there. Responses that continue it keep what they need of it."""
        ...

    def remember(self, tenant: str, record: StoredResponse) -> None:
        """Remember a copy of what another actor keeps."""
        ...

    async def recover(self, owner: str) -> bool:
        """Write what an actor that is gone has left behind on this node; whether there was anything. Raises `ApiError`
        while that can't be done."""
        ...

    def keep_log(self, tenant: str, response_id: str, log: EventLog) -> None:
        """Remember the events of a background response that has ended, as long as there is room."""
        ...


class SharedResponses:
    """A `ResponseStore` in memory, for all sockets and requests of one actor; least recently used responses go first.

    Adopted copies of other actors' responses live here too. A deletion is remembered for a while, so that a copy that
    was on its way when it came does not come back.
    """

    def __init__(self, limits: StoreLimits | None = None) -> None:
        self._limits = limits or StoreLimits()
        self._by_id: OrderedDict[tuple[str, str], StoredResponse] = OrderedDict()
        self._logged: OrderedDict[tuple[str, str], EventLog] = OrderedDict()
        self._deleted: OrderedDict[tuple[str, str], None] = OrderedDict()
        self.size = 0
        self.log_size = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def put(self, tenant: str, record: StoredResponse) -> None:
        key = (tenant, record.id)
        if key in self._deleted:
            return
        self._forget(key)
        self._by_id[key] = record
        self.size += record.size
        while len(self._by_id) > 1 and (len(self._by_id) > self._limits.responses or self.size > self._limits.bytes):
            self._forget(next(iter(self._by_id)))

    def remember(self, tenant: str, record: StoredResponse) -> None:
        """As `put`: all there is is memory."""
        self.put(tenant, record)

    async def recover(self, owner: str) -> bool:  # noqa: ARG002 - an actor's memory goes with it
        return False

    def keep_log(self, tenant: str, response_id: str, log: EventLog) -> None:
        """Beyond the bound the oldest logs are dropped: those responses can be read but not replayed."""
        key = (tenant, response_id)
        record = self._by_id.get(key)
        if record is None:
            return
        record.log = log
        self._logged[key] = log
        self.log_size += log.size
        while self.log_size > self._limits.log_bytes and self._logged:
            self._drop_log(next(iter(self._logged)))

    async def get(self, tenant: str, response_id: str) -> StoredResponse | None:
        key = (tenant, response_id)
        found = self._by_id.get(key)
        if found is not None:
            self._by_id.move_to_end(key)
        return found

    async def body(self, tenant: str, response_id: str) -> str | None:
        found = await self.get(tenant, response_id)
        return None if found is None else found.body()

    async def delete(self, tenant: str, response_id: str) -> bool:
        key = (tenant, response_id)
        known = key in self._by_id
        self._forget(key)
        self._deleted[key] = None
        while len(self._deleted) > REMEMBERED_DELETIONS:
            self._deleted.popitem(last=False)
        return known

    def _forget(self, key: tuple[str, str]) -> None:
        self._drop_log(key)
        record = self._by_id.pop(key, None)
        if record is not None:
            self.size -= record.size

    def _drop_log(self, key: tuple[str, str]) -> None:
        log = self._logged.pop(key, None)
        if log is not None:
            self.log_size -= log.size
            log.clear()


def _split(body: str, echo: Mapping[str, Any]) -> tuple[str, Mapping[str, Any] | None]:
    """The object's text without what it repeats of its request, if that is long. It is then written again on demand
    from the request's own values: agents send the same 26 kB of tools with every turn, and share one copy."""
    repeated = orjson.dumps(echo).decode()
    if len(repeated) < SHARED_ECHO_CHARS or not body.endswith(f",{repeated[1:]}"):
        return body, None
    return body[: -len(repeated)], echo


def _entries(added_by: str, items: Sequence[Item]) -> Iterator[tuple[str, Item]]:
    for index, item in enumerate(items):
        yield item.id or derived_id(item, added_by, index), item


def _plain(items: Sequence[Item]) -> tuple[Item, ...]:
    return tuple(item for item in items if not isinstance(item, ItemReference | CompactionTrigger))
