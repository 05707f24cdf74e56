"""What precedes a turn: model, parent, room for what it leaves, rules, ids. What can be refused is refused here.

`fall_back` does it again for another model, when no engine of the first can answer.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from actors.backpressure import Room
from actors.compaction import Plan, plan
from actors.conversation import Continuation, Response
from actors.models import Model
from actors.prompt import Prompt, render, shortened, too_long
from actors.tokencache import ID_BYTES
from actors.turn_record import TurnRecord
from actors.window import linked
from gateway.protocol.errors import ApiError
from gateway.protocol.items import CompactionTrigger, Item
from gateway.protocol.requests import CreateRequest
from gateway.protocol.tooldefs import merge
from gateway.protocol.tools import ToolSet
from inference.engine import EngineError
from inference.formats.format import Brief

if TYPE_CHECKING:
    from actors.conversations import Lease
    from actors.session import Session

log = logging.getLogger(__name__)

_Context = tuple[Response | None, tuple[Item, ...]]


class Preparation:
    """Of one turn. What it holds meanwhile, `release` gives back. All that waits or looks up raises `ApiError`."""

    __slots__ = ("_context", "_record", "_request", "_room", "_session", "lease", "planned")

    def __init__(self, session: Session, request: CreateRequest, record: TurnRecord) -> None:
        self._session = session
        self._request = request
        self._record = record
        self._context: _Context = None, ()
        self._room: Room | None = None
        self.lease: Lease | None = None
        self.planned: Plan | None = None

    @property
    def triggered(self) -> bool:
        """Whether compaction is all that is asked for."""
        return bool(self._request.input) and isinstance(self._request.input[-1], CompactionTrigger)

    async def begin(self) -> Prompt:
        """The prompt; `planned` is set if its context is to be compacted first."""
        request, session = self._request, self._session
        model = await session.actor.models.resolve(request.model)
        if (durability := session.actor.durability) is not None:
            self._room = await durability.room()
        if request.conversation is not None:
            self.lease = await session.actor.conversations.begin(session.tenant, request.conversation)
            self._context = self.lease.head, self.lease.given(request.input)
        else:
            self._context = await session.find_parent(request), request.input
        prompt = await self._assemble(model, self._context)
        self.planned = await self._plan(prompt)
        if self.planned is None and (fault := too_long(prompt)) is not None:
            raise fault
        return prompt

    async def count(self) -> int:
        """The tokens that the turn would send to the engine."""
        model = await self._session.actor.models.resolve(self._request.model)
        return (await self._assemble(model, await self._session.peek_context(self._request))).length

    async def fall_back(self, model: Model, error: EngineError) -> Prompt | None:
        """The prompt for the model that answers instead of this one, as nothing was said yet (design decision 8)."""
        if model.fallback is None or error.fault == "invalid":
            return None
        try:
            other = await self._session.actor.models.resolve(model.fallback)
            prompt = await self._assemble(other, self._context)
        except ApiError as refused:
            log.warning("model %s can't fall back to %s: %s", model.name, model.fallback, refused.code)
            return None
        if too_long(prompt) is not None:
            return None
        log.warning("model %s is %s, %s answers", model.name, error.fault, other.name)
        self._session.actor.counters.fallbacks += 1
        return prompt

    async def render(self, model: Model, link: Continuation, tools: ToolSet) -> Prompt:
        """The prompt for a context that is linked already."""
        request, record = self._request, self._record
        brief = Brief(request.instructions, link.preamble, tools, request.text, request.effort, request.summary)
        prompt = await render(self._session, model, link, brief, generate=request.generate, given=request.input)
        record.head_tokens = len(prompt.head) // ID_BYTES
        record.reused_tokens = len(prompt.link.tokens)
        record.rendered_items = len(prompt.link.body)
        record.encoded_tokens = prompt.body.encoded
        return prompt

    def release(self) -> None:
        """The turn is over, in whatever way. Idempotent."""
        if self._room is not None:
            self._room.close()
        if self.lease is not None:
            self.lease.release()

    async def _plan(self, prompt: Prompt) -> Plan | None:
        """Whether and how the context is compacted first (protocol.md 4.6)."""
        request, threshold = self._request, self._request.compact_threshold
        if not request.generate or not (self.triggered or (threshold is not None and prompt.length > threshold)):
            return None
        name = self._record.response_id
        return await plan(self._session, prompt, request, request_id=name, alone=not self.triggered)

    async def _assemble(self, model: Model, context: _Context) -> Prompt:
        """The prompt for what is continued and the items that are added to it."""
        parent, items = context
        self._record.model = model.name
        self._check_size(parent)
        if parent is not None and parent.model != model.name:
            # Another model has other ids for the same text: the context is rendered anew, as for a client that sends it
            # all (protocol.md 8.18 allows the change).
            items = (*parent.context(), *items)
            parent = None
        link = linked(self._session, parent, items, self._request.input)
        tools = merge(self._request.tools, link.tools) if link.tools else self._request.tools
        prompt = await self.render(model, link, tools)
        room = min(self._request.max_output_tokens or 1, model.context_length // 2)
        if self._request.truncation == "auto" and prompt.length + room > model.context_length:
            prompt = await shortened(prompt, room)
            self._session.actor.counters.truncations += 1
        return prompt

    def _check_size(self, parent: Response | None) -> None:
        limit = self._session.actor.conversation_bytes
        if parent is None or parent.store or parent.size <= limit or self.triggered:
            return
        message = (
            f"This conversation lives in memory only and has reached the {limit} bytes that one may hold. "
            "Compact it, or start a new one."
        )
        raise ApiError("conversation_too_large", message, "previous_response_id")
