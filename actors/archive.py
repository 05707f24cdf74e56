"""Responses by id, wherever they are: running in the background here, stored here, or on another actor.

Source: protocol.md 6.1 and 6.3. Another tenant's id, an id that was deleted and one that never was get the same words.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from actors.durable import UNAVAILABLE
from actors.listing import Page, page_of
from actors.stored import StoredResponse
from gateway.protocol.emitter import Event
from gateway.protocol.errors import ApiError
from gateway.protocol.ids import owner_of

if TYPE_CHECKING:
    from actors.session import SessionActor

_Found = TypeVar("_Found")

BATCH = 64
"""Events handed out at once: clients have bounded queues (protocol.md 1.4)."""
POLL_S = 5.0
"""How long one question for more events waits on another actor, well within the deadline of a question."""


class Archive:
    """The look-ups of one actor. Each method that takes an id raises `ApiError` not_found."""

    def __init__(self, actor: SessionActor) -> None:
        self._actor = actor
        for name in ("export", "retrieve", "delete", "cancel", "input_items", "events"):
            actor.peers.offer(f"response.{name}", getattr(self, f"_{name}"))

    async def find(self, tenant: str, response_id: str) -> StoredResponse | None:
        """A stored response; another actor's is copied here, so that the next look is local."""
        store = self._actor.store

        def look() -> Awaitable[StoredResponse | None]:
            return store.get(tenant, response_id)

        async def copied(exported: dict[str, Any]) -> StoredResponse | None:
            store.remember(tenant, StoredResponse.adopt(exported))
            return await look()  # not if it was deleted meanwhile

        return await self._look_up(response_id, look, "export", (tenant, response_id), copied)

    async def retrieve(self, tenant: str, response_id: str) -> str:
        """The Response object as JSON text, with the status it has now."""
        found: str = await self._anywhere("retrieve", tenant, response_id)
        return found

    async def delete(self, tenant: str, response_id: str) -> None:
        """Delete it everywhere: no socket of any actor can continue it any more. A running one is cancelled first."""
        known = await self._delete(tenant, response_id)
        foreign = self._foreign(response_id)
        if foreign or known:
            owner = owner_of(response_id) or ""
            answer = await self._actor.peers.ask_about(owner, "response.delete", tenant, response_id)
            known = bool(answer.value) or known
            # What its owner has left would be written behind the deletion.
            if foreign and not answer.heard:
                await self._actor.recover(owner)
                known = await self._delete(tenant, response_id) or known
        if not known:
            raise not_found(response_id)

    async def cancel(self, tenant: str, response_id: str) -> str:
        """Stop a background response; one that has ended stays as it is. The Response object."""
        found: str = await self._anywhere("cancel", tenant, response_id)
        return found

    async def input_items(self, tenant: str, response_id: str, page: Page) -> dict[str, Any]:
        """A page of what the answer was made from, the context included."""
        found: dict[str, Any] = await self._anywhere("input_items", tenant, response_id, page)
        return found

    async def events(self, tenant: str, response_id: str, after: int, wait_s: float) -> tuple[list[Event], bool]:
        """Events of a background response after this sequence number, and whether they are the last ever. Waits up to
        `wait_s` if there are none yet."""
        found: tuple[list[Event], bool] = await self._anywhere("events", tenant, response_id, after, wait_s)
        return found

    async def follow(self, tenant: str, response_id: str, after: int) -> AsyncGenerator[list[Event], None]:
        """All events after this sequence number, until there are no more."""
        while True:
            events, last = await self.events(tenant, response_id, after, POLL_S)
            if events:
                after += len(events)
                yield [Event(*event) for event in events]
            if last:
                return

    def _foreign(self, response_id: str) -> bool:
        return owner_of(response_id) not in (None, self._actor.ids.owner)

    async def _anywhere(self, name: str, tenant: str, response_id: str, *args: Any) -> Any:
        asked = (tenant, response_id, *args)

        async def as_told(value: Any) -> Any:
            return value

        found = await self._look_up(response_id, lambda: getattr(self, f"_{name}")(*asked), name, asked, as_told)
        if found is None:
            raise not_found(response_id)
        return found

    async def _look_up(
        self,
        response_id: str,
        look: Callable[[], Awaitable[_Found | None]],
        name: str,
        asked: tuple[Any, ...],
        told: Callable[[Any], Awaitable[_Found | None]],
    ) -> _Found | None:
        """By `look` here, then by what others answer to `asked`, then here again: it may have been written meanwhile,
        and what an owner that is gone has left is. Raises `ApiError` as those do, and store_unavailable as long as it
        can't be known."""
        found: _Found | None
        found, fault = await self._mine(look(), response_id)
        if found is None and self._foreign(response_id):
            owner = owner_of(response_id) or ""
            answer = await self._actor.peers.ask_about(owner, f"response.{name}", *asked)
            if answer.value is not None:
                return await told(answer.value)
            if fault is None:
                if not answer.heard:
                    await self._actor.recover(owner)
                return await look()
        if fault is not None:
            raise fault
        return found

    async def _mine(self, look: Awaitable[Any], response_id: str) -> tuple[Any, ApiError | None]:
        """What this actor has, and why it can't tell: while the database is away, another's response may still be in
        its owner's memory (design.md decision 10)."""
        try:
            return await look, None
        except ApiError as error:
            if error.code != UNAVAILABLE or not self._foreign(response_id):
                raise
            return None, error

    # What this actor has, for itself and for its peers: None when it has nothing.

    async def _export(self, tenant: str, response_id: str) -> dict[str, Any] | None:
        found = await self._actor.store.get(tenant, response_id)
        return None if found is None else found.export()

    async def _retrieve(self, tenant: str, response_id: str) -> str | None:
        run = self._actor.background.get(tenant, response_id)
        if run is not None and not run.log.ended:
            return run.body()
        return await self._actor.store.body(tenant, response_id)

    async def _delete(self, tenant: str, response_id: str) -> bool | None:
        await self._actor.background.cancel(tenant, response_id)
        self._actor.forget_everywhere(tenant, response_id)
        return await self._actor.store.delete(tenant, response_id) or None

    async def _cancel(self, tenant: str, response_id: str) -> str | None:
        await self._actor.background.cancel(tenant, response_id)
        found = await self._actor.store.get(tenant, response_id)
        if found is not None and not found.background:
            message = "Only a response that was created with 'background' set to true can be cancelled."
            raise ApiError("invalid_value", message)
        return None if found is None else found.body()

    async def _input_items(self, tenant: str, response_id: str, page: Page) -> dict[str, Any] | None:
        run = self._actor.background.get(tenant, response_id)
        if run is not None and not run.log.ended:
            return page_of(StoredResponse.of(run.id, run.body(), run.request).inputs(), page)
        found = await self._actor.store.get(tenant, response_id)
        return None if found is None else page_of(found.inputs(), page)

    async def _events(
        self, tenant: str, response_id: str, after: int, wait_s: float
    ) -> tuple[list[Event], bool] | None:
        run = self._actor.background.get(tenant, response_id)
        log = None if run is None else run.log
        if log is None:
            found = await self._actor.store.get(tenant, response_id)
            if found is None:
                return None
            if found.log is None:
                # A background response that was adopted has its events on another actor only.
                if found.background and self._foreign(response_id):
                    return None
                message = "Only a response that was created with 'background' set to true can be streamed again."
                raise ApiError("invalid_value", message, "stream")
            log = found.log
        await log.more(after, wait_s)
        return log.since(after, BATCH)


def not_found(response_id: str) -> ApiError:
    """The words for every id that this tenant doesn't have."""
    return ApiError("not_found", f"Response with id '{response_id[:128]}' not found.")
