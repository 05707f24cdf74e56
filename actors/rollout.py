"""A rollout: one response that waits for its tools and then goes on (docs/rollout-extension.md; ours, off by default).

Where an ordinary turn would end with calls, this one says `response.done` and waits for a `response.append`. What
was said so far is a `Response` of its own that nobody is told of: the appended items are linked to it and its ids are
continued as in any later turn, so nothing is rendered twice. One response of all of it is committed at the end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from actors.conversation import Lane, Response, continue_from, is_waiting
from actors.output import Output
from actors.prompt import Prompt, render, too_long
from actors.tokencache import EMPTY
from actors.turn import Turn
from gateway.protocol.controls import append_failed, append_items
from gateway.protocol.decode import encode
from gateway.protocol.emitter import Event
from gateway.protocol.errors import ApiError
from gateway.protocol.items import FunctionCall, Item
from gateway.protocol.requests import CreateRequest
from gateway.protocol.steered_emitter import SteeredEmitter
from inference.engine import EngineError, Finish, Generation

if TYPE_CHECKING:
    from actors.session import Session

# Theory
# ------
#   state        told by                                leaves by
#   generating   neither of the others                  calls: waiting; else the terminal event, as any turn
#   waiting      `_waiting`, nothing in `_frame`        append: taking; interrupt, deadline: the terminal event
#   taking       `_waiting`, an append in `_frame`      good: generating; bad: waiting, after response.append.failed
#
# An interrupt or the deadline that comes while an append is taken ends what follows: the wait, or the generation before
# its first token. One that comes before the turn's task has looked at the append ends the wait, without it.


def not_waiting(turn: Turn) -> Event:
    """The answer to an append that this turn has no use for now."""
    message = "This response doesn't wait for an append now. Send one after its response.done."
    return _failed(turn, ("response_not_waiting", message))


def _failed(turn: Turn, error: ApiError | tuple[str, str]) -> Event:
    frame = append_failed(turn.response_id, turn.lane, error)
    return Event(frame["type"], encode(frame))


class Rollout(Turn):
    """As `Turn`. `renew` is called when a wait or another generation begins: each may take as long as a turn."""

    __slots__ = ("_done", "_frame", "_given", "_renew", "_sampled", "_waiting", "_woken")

    def __init__(self, session: Session, request: CreateRequest, lane: Lane, renew: Callable[[], None]) -> None:
        super().__init__(session, request, lane)
        self._renew = renew
        self._done: Response | None = None
        self._given = 0
        self._sampled = 0
        self._waiting = False
        self._frame: dict[str, Any] | None = None
        self._woken = asyncio.Event()

    def append(self, frame: dict[str, Any]) -> Event | None:
        """Go on with this. Returns the refusal if nothing is waited for; what is wrong with the frame itself is said
        in the stream."""
        if not self._waiting or self._frame is not None:
            return not_waiting(self)
        self._frame = frame
        self._woken.set()
        return None

    def interrupt(self) -> None:
        super().interrupt()
        self._woken.set()

    def expire(self, message: str) -> None:
        super().expire(message)
        self._woken.set()

    def _generation(self, prompt: Prompt) -> Generation:
        """The request's bound on output is one for all generations."""
        generation, most = super()._generation(prompt), self._request.max_output_tokens
        if most is None:
            return generation
        left = min(generation.sampling.max_tokens, most - self._sampled)
        return replace(generation, sampling=replace(generation.sampling, max_tokens=left))

    async def _last(
        self, prompt: Prompt, emitter: SteeredEmitter, output: Output, sampled: list[int], finish: Finish | None
    ) -> list[Event]:
        events = await super()._last(prompt, emitter, output, sampled, finish)
        self._sampled += self._said_tokens(sampled, output)
        return events

    def _finish(
        self, prompt: Prompt, emitter: SteeredEmitter, output: Output, sampled: list[int], finish: Finish | None
    ) -> list[Event]:
        """`response.done` instead of the terminal event if the model waits for outputs and may say more after them."""
        if finish != "stop":
            return super()._finish(prompt, emitter, output, sampled, finish)
        events = emitter.settle()
        calls = [item for item in emitter.output[emitter.answered :] if is_waiting(item)]
        most = self._request.max_output_tokens
        spent = most is not None and self._sampled + self._said_tokens(sampled, output) >= most
        if not calls or spent:
            return events + super()._finish(prompt, emitter, output, sampled, "length" if calls else "stop")
        if self._done is None:
            self._given = len(prompt.link.items)
        self._spent = self._usage(prompt, sampled, output)
        self._done = self._spoken(prompt, emitter, sampled)
        required = [
            {
                "type": f"{'function' if isinstance(call, FunctionCall) else 'custom_tool'}_call_output",
                "call_id": call.call_id,
                "name": call.name,
            }
            for call in calls
        ]
        fields = {"response_id": self.response_id, "required_input": required, "usage": self._spent.to_json()}
        events.append(emitter.control("response.done", fields))
        self._waiting = True
        self._renew()
        return events

    async def _resume(self, prompt: Prompt, emitter: SteeredEmitter) -> list[Event]:
        if self._halt.reason is None:
            waited = time.monotonic()
            await self._woken.wait()
            self.record.away_s += time.monotonic() - waited
        self._woken.clear()
        if self._halt.reason is not None:
            self._waiting = False
            return await self._stop(emitter)
        assert self._frame is not None
        try:
            self._next = await self._continued(prompt, append_items(self._frame))
        except ApiError as error:
            self._frame = None
            return [_failed(self, error)]
        self._waiting, self._frame = False, None
        emitter.answered = len(emitter.output)
        # This is the latest generation's; what the others took is in `_spent`.
        self.record.cached_tokens = 0
        self._renew()
        return []

    async def _continued(self, prompt: Prompt, items: tuple[Item, ...]) -> Prompt:
        """The prompt so far, what the model said to it, and these. Raises `ApiError`."""
        if self._preparation.lease is not None:  # a conversation lists them under ids
            items = self._session.actor.conversations.memory.named(items)
        link = continue_from(self._done, items)
        following = await render(self._session, prompt.model, link, prompt.brief, generate=True, given=items)
        if (fault := too_long(following)) is not None:
            raise fault
        return following

    async def _stop(self, emitter: SteeredEmitter) -> list[Event]:
        """End while waiting: nothing is generated, and all that was said is whole."""
        assert self._done is not None
        if self._expired is not None:
            return self._fail(emitter, EngineError("unavailable", self._expired), self._spent)
        last = emitter.incomplete(self._halt.reason or "interrupted", self._spent)
        self.record.outcome = "incomplete"
        self._commit(self._done, last)
        return await self._added(last)

    def _response(
        self, prompt: Prompt, new_ids: bytes, output: tuple[Item, ...], *, sent: int | None = None
    ) -> Response:
        """One response of everything so far: as with any other, one step behind its parent, of ids too."""
        node, done = super()._response(prompt, new_ids, output, sent=sent), self._done
        if done is None:
            return node
        kept = min(done.kept, node.kept)
        before = EMPTY if done.parent is None else done.parent.tokens.cut(kept)
        return replace(
            node,
            parent=done.parent,
            items=done.items + node.items,
            tokens=before.extend(node.tokens.tail(kept)),
            kept=kept,
            begins=min(done.begins, node.begins),
        )

    def _commit(self, node: Response, last: list[Event], outputs: int = 0) -> None:
        """The items that a stored rollout was asked with are those of its create."""
        super()._commit(node, last, outputs if self._done is None else len(node.items) - self._given)
