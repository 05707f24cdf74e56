"""One turn: a validated request becomes a stream of events and, at its end, a response that can be continued.

Only what is new is linked, rendered and encoded: the parent's ids are taken from the token cache, the head from a
cache keyed by its content, and sampled ids are appended as they came from the engine (design.md sections 1 and 4).
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from actors.compaction import Compacting, Plan
from actors.conversation import Lane, Response
from actors.halting import OVERDUE, Halt, Where
from actors.output import EngineOutput, Output, special_output
from actors.preparation import Preparation
from actors.priority import priority_of
from actors.prompt import Prompt, body_ids, too_long
from actors.reasoning import reasoning_seal
from actors.stored import StoredResponse
from actors.tokencache import ID_BYTES
from actors.turn_record import TurnRecord
from actors.window import restarted
from gateway.protocol.deltas import Delta
from gateway.protocol.emitter import Emitter, Event
from gateway.protocol.errors import ApiError
from gateway.protocol.items import Compaction, Item
from gateway.protocol.requests import CreateRequest
from gateway.protocol.response import ResponseObject, Usage
from gateway.protocol.steer_table import Ending
from gateway.protocol.steered_emitter import SteeredEmitter
from inference.engine import Counted, EngineError, Finish, Generation, Sampling
from inference.tokenizer import pack_ids

if TYPE_CHECKING:
    from actors.session import Session

log = logging.getLogger(__name__)

_FAULT_CODES = {"invalid": "invalid_prompt", "overloaded": "rate_limit_exceeded", "unavailable": "server_error"}


class Turn:
    """One request on one lane of a session. Use once: iterate `run`.

    Refusals before `response.created` are raised by `run` as `ApiError`; whatever goes wrong afterwards ends the stream
    with `response.failed`. Cancelling the task that iterates, or closing the iterator, stops the engine's work and
    commits nothing.
    """

    __slots__ = (
        "_counted",
        "_emitter",
        "_expired",
        "_generating",
        "_halt",
        "_next",
        "_node",
        "_preparation",
        "_request",
        "_session",
        "_spent",
        "_steered",
        "created_at",
        "lane",
        "record",
        "response_id",
    )

    def __init__(self, session: Session, request: CreateRequest, lane: Lane) -> None:
        self._session = session
        self._request = request
        self.lane = lane
        self.response_id = session.actor.ids.response()
        self.created_at = session.actor.now()
        started = time.monotonic()
        self.record = TurnRecord(
            self.response_id, session.tenant, session.tenant, request.model, self.created_at, started
        )
        if request.previous_response_id is not None:
            self.record.tool_s = session.since_last_end(lane, started)
        self._emitter: SteeredEmitter | None = None
        self._halt = Halt()
        self._steered = False
        self._expired: str | None = None
        self._preparation = Preparation(session, request, self.record)
        self._node: Response | None = None
        self._generating: tuple[Prompt, list[int], Output] | None = None
        self._next: Prompt | None = None
        self._spent = Usage(0, 0)
        self._counted: Counted | None = None

    @property
    def started(self) -> bool:
        """Whether `response.created` was made, so that only its own terminal event may follow."""
        return self._emitter is not None

    @property
    def ending(self) -> Ending | None:
        """How the response ended, from the moment its terminal event exists."""
        return None if self._emitter is None else self._emitter.ending

    def control(self, kind: str, fields: Mapping[str, Any]) -> Event:
        """An event about the running response (protocol.md 3.8), numbered: send it before what `run` yields next."""
        assert self._emitter is not None
        return self._emitter.control(kind, fields)

    def interrupt(self) -> None:
        """End the running response now (3.8). The engine is aborted, even while nobody reads `run`."""
        self._halt.halt("interrupted")

    def steer(self) -> None:
        """End the running response at its next safe boundary, which may be now (3.8)."""
        self._steered = True
        if self._emitter is not None and self._emitter.at_boundary:
            self._halt.halt("steered")

    def expire(self, message: str) -> None:
        """End the running response as failed now, for a reason that is the gateway's. `run` delivers that, however
        slowly its client reads."""
        self._expired = message
        self._halt.halt("expired")

    def expire_after(self, seconds: float) -> asyncio.TimerHandle:
        """`expire` when that long has passed, unless the handle is cancelled."""
        return asyncio.get_running_loop().call_later(seconds, self.expire, OVERDUE)

    def keepalive(self) -> Event | None:
        """An event that shows life while the model is silent; None before the response exists and after its end."""
        return self._emitter.keepalive() if self._emitter is not None and not self._emitter.ended else None

    def abandon(self, message: str) -> list[Event]:
        """End a started response as failed, after `run` was closed early. Empty if it had not started or had ended."""
        if self._emitter is None or self._emitter.ended:
            return []
        self.record.outcome = "abandoned"
        self._session.forget_parent(self._request.previous_response_id, self.lane)
        return self._keep(self._emitter.fail("server_error", message))

    async def run(self) -> AsyncGenerator[list[Event], None]:
        """Batches of events, each to be sent as soon as it comes. One generator from chunk to event: every level of
        nesting costs each token a microsecond."""
        record, session, halt = self.record, self._session, self._halt
        with self._accounted():
            prompt = await self._prepare()
            emitter = self._emitter = SteeredEmitter(
                ResponseObject(self.response_id, self.created_at, self._request.echo),
                session.actor.ids,
                self.lane,
                reasoning_seal(session, self._request),
            )
            async with aclosing(self._before(prompt, emitter)) as batches:
                async for events in batches:
                    yield events
            while not emitter.ended:
                prompt, self._next = self._next or prompt, None
                parser = prompt.model.format.parser(prompt.brief.tools, prompt.opening)
                special = special_output(prompt, parser, scored=self._scored)
                output: Output = special or parser
                sampled: list[int] = []
                finish: Finish | None = None
                started, submitted, self._counted = False, time.monotonic(), None
                record.submitted = record.submitted or submitted
                self._generating = prompt, sampled, output
                engine = session.engine(prompt.model)
                engine.prefer(prompt.replica)
                chunks = engine.generate(self._generation(prompt))
                try:
                    async with halt.reading(chunks):
                        async for chunk in chunks:
                            if not started:
                                started = True
                                record.first_chunk = record.first_chunk or time.monotonic()
                                record.cached_tokens = chunk.cached_tokens or 0
                            sampled += chunk.ids
                            finish, self._counted = chunk.finish, chunk.counted
                            deltas = parser.feed(chunk.ids) if special is None else special.read(chunk)
                            if events := self._feed_steered(emitter, deltas) if self._steered else emitter.feed(deltas):
                                halt.where = Where.SENDING
                                yield events
                                halt.where = Where.WAITING
                            if halt.reason is not None:
                                break
                    if halt.reason is None and (events := emitter.feed(output.finish())):
                        yield events
                except EngineError as error:
                    submitted = record.worked(submitted)
                    if started or not await self._fall_back(prompt, error):
                        yield self._fail(emitter, error, self._usage(prompt, sampled, output))
                        return
                    continue
                finally:
                    submitted = record.worked(submitted)
                yield await self._last(prompt, emitter, output, sampled, finish)
                while self.ending is None and self._next is None:
                    yield await self._resume(prompt, emitter)

    async def _before(self, prompt: Prompt, emitter: SteeredEmitter) -> AsyncGenerator[list[Event], None]:
        """What precedes the first token: the first events, and a compaction, if there is one. Ends a warm-up."""
        yield emitter.start()
        if not self._request.generate:
            yield await self._added(self._warm_up(prompt, emitter))
        elif self._preparation.planned is not None:
            async with aclosing(self._compact(prompt, self._preparation.planned, emitter)) as batches:
                async for events in batches:
                    yield events

    @contextmanager
    def _accounted(self) -> Iterator[None]:
        """Whatever becomes of the turn, it is accounted for once."""
        try:
            yield
        except ApiError as error:
            self.record.outcome = error.code
            raise
        except (asyncio.CancelledError, GeneratorExit):
            if self.record.outcome == "running":
                self.record.outcome = "cancelled"
                if self._generating is not None:
                    self._usage(*self._generating)
            raise
        finally:
            self.record.ended = time.monotonic()
            self._preparation.release()
            self._session.actor.turn_ended(self.record)

    async def count(self) -> int:
        """The tokens that this turn would send to the engine, instead of running it. Raises `ApiError`."""
        return await self._preparation.count()

    async def _fall_back(self, prompt: Prompt, error: EngineError) -> bool:
        """Whether another model answers; its prompt is `_next`. Not behind a compaction, whose usage is this one's."""
        if not self._spent.input_tokens:
            self._next = await self._preparation.fall_back(prompt.model, error)
        return self._next is not None

    async def _prepare(self) -> Prompt:
        """Everything before `response.created`. Raises `ApiError`."""
        session, preparation = self._session, self._preparation
        prompt = await preparation.begin()
        if (refusal := session.engine(prompt.model).refusal(lambda: self._generation(prompt))) is not None:
            prompt = await preparation.fall_back(prompt.model, refusal) or _refused(refusal)
        if (guide := prompt.opening.guide) is not None:
            engine = session.engine(prompt.model)
            asked = await session.actor.guides.check(prompt.model.name, guide, self._request.text, engine)
            session.actor.counters.guides_checked += asked
        return prompt

    async def _compact(self, prompt: Prompt, planned: Plan, emitter: Emitter) -> AsyncGenerator[list[Event], None]:
        """The compaction item. After it the response has ended, or `_next` is what to answer from; neither if the
        turn was halted meanwhile."""
        session, work = self._session, Compacting(self._session, prompt.model, planned)
        try:
            async with aclosing(work.events(emitter)) as batches:
                async for events in batches:
                    if events:
                        yield events
                    if self._halt.reason is not None:
                        return
        except EngineError as error:
            yield self._fail(emitter, error, work.usage)
            return
        finally:
            self._spent = work.usage
        item = emitter.output[-1]
        assert isinstance(item, Compaction)
        compacted = await self._preparation.render(
            prompt.model, restarted(prompt.link, item, work.window), prompt.brief.tools
        )
        if self._preparation.triggered:
            last = emitter.complete(self.record.spent(self._spent), session.actor.now())
            self.record.outcome = "completed"
            self._commit(self._response(compacted, compacted.body.ids, (item,)), last, 1)
            yield await self._added(last)
        elif (fault := too_long(compacted)) is not None:
            self.record.outcome = fault.code
            session.forget_parent(self._request.previous_response_id, self.lane)
            yield self._keep(emitter.fail(fault.code, fault.message, self._spent))
        else:
            self._next = compacted

    def _generation(self, prompt: Prompt) -> Generation:
        request, model = self._request, prompt.model
        room = model.context_length - prompt.length
        # Clients ask for more than a model can do (Copilot: 128,000); that is no error (protocol.md 8.22).
        most = min(room, request.max_output_tokens or room, model.max_output_tokens or room)
        sampling = Sampling(
            most,
            request.temperature,
            request.top_p,
            model.format.stop_ids,
            request.top_logprobs if self._scored else None,
            prompt.opening.guide,
            bounded=most < room,
        )
        return Generation(
            self.response_id,
            model.name,
            prompt.parts,
            sampling,
            priority=priority_of(request),
            cache_salt=self._session.tenant,
            known=prompt.known,
            parsing=prompt.opening.parsing,
        )

    @property
    def _scored(self) -> bool:
        """Whether log-probabilities are asked for."""
        return self._request.top_logprobs > 0 or "message.output_text.logprobs" in self._request.include

    def _warm_up(self, prompt: Prompt, emitter: Emitter) -> list[Event]:
        session = self._session
        if prompt.model.primes:
            session.prime(prompt.model, prompt.parts, self.response_id)
        last = emitter.complete(self.record.spent(Usage(prompt.length, 0)), session.actor.now())
        self.record.outcome = "completed"
        self._commit(self._response(prompt, prompt.body.ids, (), sent=0), last)
        return last

    async def _last(
        self, prompt: Prompt, emitter: SteeredEmitter, output: Output, sampled: list[int], finish: Finish | None
    ) -> list[Event]:
        """The terminal event and what precedes it: of a response that was cut short, or of one that ended by itself."""
        if self._halt.reason is None:
            return await self._added(self._finish(prompt, emitter, output, sampled, finish))
        if self._expired is not None:
            return self._fail(emitter, EngineError("unavailable", self._expired), self._usage(prompt, sampled, output))
        return await self._added(await self._cut(prompt, emitter, self._usage(prompt, sampled, output)))

    def _finish(
        self, prompt: Prompt, emitter: SteeredEmitter, output: Output, sampled: list[int], finish: Finish | None
    ) -> list[Event]:
        """The terminal's events are built first, as only they know the finished items. Nothing awaits before the
        commit: it can be continued from the moment its terminal event is sent (design decision 10)."""
        usage = self._usage(prompt, sampled, output)
        if finish == "abort" or finish is None:
            stopped = EngineError("unavailable", "The engine stopped before the answer was complete.")
            return self._fail(emitter, stopped, usage)
        if finish == "length":
            last = emitter.incomplete("max_output_tokens", usage)
        else:
            last = emitter.complete(usage, self._session.actor.now())
        self.record.outcome = "completed" if finish == "stop" else "incomplete"
        self._commit(self._spoken(prompt, emitter, sampled), last, len(emitter.output))
        return last

    def _spoken(self, prompt: Prompt, emitter: SteeredEmitter, sampled: list[int]) -> Response:
        """Where the conversation stands after what was sampled, all of it."""
        output, form = tuple(emitter.output[emitter.answered :]), prompt.model.format
        if not form.speaks_ids:
            # The engine has said it, so it has seen it.
            return self._response(prompt, prompt.body.ids + form.body(output, {}), output, sent=0)
        kept, closing = form.spoken(sampled)
        new_ids = b"".join((prompt.body.ids, prompt.opening.ids, pack_ids(sampled[:kept]), closing))
        return self._response(prompt, new_ids, output, sent=len(closing) // ID_BYTES)

    async def _resume(self, prompt: Prompt, emitter: SteeredEmitter) -> list[Event]:
        """`_last` has not ended the response: wait, then end it or set `_next`, or neither to be asked again."""
        raise NotImplementedError("only rollouts wait")

    def _feed_steered(self, emitter: SteeredEmitter, deltas: Sequence[Delta]) -> list[Event]:
        events, at_boundary = emitter.feed_to_boundary(deltas)
        if at_boundary and self._halt.reason is None:
            self._halt.reason = "steered"
        return events

    async def _cut(self, prompt: Prompt, emitter: SteeredEmitter, usage: Usage) -> list[Event]:
        """End early, as interrupted or steered. The context goes on from the finished items: what was sampled of an
        unfinished one is in no item, so they are rendered anew. Nothing awaits once the first event is numbered."""
        output = tuple(emitter.output[emitter.answered :])
        added = await body_ids(prompt.model.format, output, {})
        last = emitter.withdraw() + emitter.incomplete(self._halt.reason or "interrupted", usage)
        self.record.outcome = "incomplete"
        self._commit(self._response(prompt, prompt.body.ids + added, output), last, len(emitter.output))
        return last

    def _fail(self, emitter: Emitter, error: EngineError, usage: Usage) -> list[Event]:
        self.record.outcome = f"engine_{error.fault}"
        self._session.forget_parent(self._request.previous_response_id, self.lane)
        return self._keep(emitter.fail(error.code or _FAULT_CODES[error.fault], error.message, usage))

    def _commit(self, node: Response, last: list[Event], outputs: int = 0) -> None:
        """Make the response continuable, and what its terminal event says retrievable."""
        self._node = node
        self._session.commit(node)
        self._keep(last, node, outputs)

    def _keep(self, last: list[Event], node: Response | None = None, outputs: int = 0) -> list[Event]:
        request, session = self._request, self._session
        self.record.finished = time.monotonic()
        session.ended(self.lane, self.record.finished)
        session.actor.account(self.record)
        if request.store:
            record = StoredResponse.ended(last[-1], request, self.response_id, node, outputs)
            session.actor.store.put(session.tenant, record)
        return last

    async def _added(self, last: list[Event]) -> list[Event]:
        """The turn's items are in its conversation before its client hears of the end."""
        if self._preparation.lease is not None and self._node is not None:
            await self._preparation.lease.commit(self._node)
        return last

    def _usage(self, prompt: Prompt, sampled: list[int], output: Output) -> Usage:
        said = self._said_tokens(sampled, output)
        usage = Usage(prompt.length, said, self.record.cached_tokens, output.reasoning_tokens)
        if (told := self._counted) is not None:
            usage = told.usage(output.reasoning_tokens)
            self.record.cached_tokens = usage.cached_tokens
        return self.record.spent(usage + self._spent)

    def _said_tokens(self, sampled: list[int], output: Output) -> int:
        """What the model has said, as its engine counts it if that has told yet."""
        if self._counted is not None:
            return self._counted.output_tokens
        return output.said_tokens if isinstance(output, EngineOutput) and not sampled else len(sampled)

    def _response(
        self, prompt: Prompt, new_ids: bytes, output: tuple[Item, ...], *, sent: int | None = None
    ) -> Response:
        return prompt.response(
            self.response_id,
            new_ids,
            output,
            sent=sent,
            replica=self._session.engine(prompt.model).replica,
            lane=self.lane,
            model=self.record.model,
            store=self._request.store,
        )


def _refused(refusal: EngineError) -> NoReturn:
    code = refusal.code or ("engine_overloaded" if refusal.fault == "overloaded" else "engine_unavailable")
    retry_after_s = None if refusal.retry_after_s is None else math.ceil(refusal.retry_after_s)
    raise ApiError(code, refusal.message, retry_after_s=retry_after_s)
