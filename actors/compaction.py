"""Compaction: the model summarizes its conversation, which from then on starts at one item (protocol.md 4.6).

1. `plan`: before `response.created`, so that refusals are ordinary ones. What is kept, and the prompt of the summary.
2. `Compacting.run`: one generation through the ordinary engine path.
3. `window.restarted`, or `window.linked` when the item comes back in a request: the context that starts at the item.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from actors.models import Model
from actors.priority import priority_of
from actors.prompt import Prompt, render, tokens_in
from actors.tokencache import ID_BYTES
from actors.window import Kept, Window, effective_items, is_preamble, linked, messages_of
from gateway.protocol.deltas import Delta, TextDelta
from gateway.protocol.emitter import Emitter, Event
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    Compaction,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputText,
    Item,
    Message,
    Reasoning,
)
from gateway.protocol.open_items import CompactionBeat, CompactionEnd, CompactionStart
from gateway.protocol.requests import CreateRequest
from gateway.protocol.response import Usage
from gateway.protocol.tooldefs import merge
from gateway.protocol.tools import ToolSet
from inference.engine import Counted, EngineError, Finish, Generation, Sampling
from inference.formats.format import Brief, Format, Opening

if TYPE_CHECKING:
    from actors.session import Session

# Ours. It asks for what an agent can't find again (intent, findings, names, the next step) and forbids what a model
# does instead of summarizing: answering, calling a tool, talking about the task. As a user's message it is the one form
# that every chat template knows, and, being last, it leaves the conversation's KV prefix as it is.
INSTRUCTION = (
    "Stop here and summarize this conversation for someone who continues it and will see only your summary and the "
    "newest messages. Write down, as plain text: what the user wants, with every constraint and preference; what was "
    "done and found out, with exact names, paths, numbers, identifiers and error messages that are still needed; what "
    "was decided and why; what failed; what is left to do, and the next step. Leave out what no longer matters. Do not "
    "continue the task, do not answer the user, do not call tools, and do not mention this request."
)

SUMMARY_TOKENS = 4096
"""Longest summary. Four pages hold what an agent needs; a longer one costs every later turn."""
LEAST_TOKENS = 256
"""Room for a summary, and for what is kept beside it, of however short a conversation."""
BEAT_S = 2.0
"""Pause between signs of life while the summary is written, seconds."""

_Output = FunctionCallOutput | CustomToolCallOutput
_FAULTS = {"invalid": "invalid_prompt", "overloaded": "engine_overloaded", "unavailable": "engine_unavailable"}


@dataclass(frozen=True, slots=True)
class Plan:
    """One compaction to be done. `window` still lacks its summary; `messages` are those of the context that are worth
    showing to a client beside the item."""

    format: Format
    opening: Opening
    generation: Generation
    window: Window
    messages: tuple[Message, ...]


async def plan(
    session: Session, prompt: Prompt, request: CreateRequest, *, request_id: str, alone: bool
) -> Plan | None:
    """What to do to compact the context of this prompt.

    None where an automatic compaction (`alone`) would gain nothing, as all there is would be kept. Raises `ApiError`:
    nothing to compact, or a context that does not even fit for being summarized.
    """
    model, link, form = prompt.model, prompt.link, prompt.model.format
    length = prompt.length - len(prompt.opening.ids) // ID_BYTES
    # A quarter each for the summary and for what is kept: half of the window is won, at least.
    room = max(LEAST_TOKENS, min(request.compact_threshold or model.context_length, length) // 4)
    context = effective_items(session, link)
    if not context:
        if alone:
            return None
        raise ApiError("invalid_value", "There is no conversation to compact yet.", "input")
    kept, messages = await asyncio.to_thread(_kept, context, form, room)
    if alone and len(kept) + is_preamble(context[0]) == len(context):
        return None
    ask = Message("user", INSTRUCTION)
    # Without tools to call and without thoughts. The head stays as it is: it begins the prefix that the engine knows.
    # Models that are asked by items or messages may not know "none", and their own default is no harm.
    opening = form.opening(Brief(effort="none" if form.speaks_ids else None))
    if form.appendable:
        head, older, asked = prompt.head, [*link.tokens.parts(), prompt.body.ids], form.body((ask,), {})
    else:
        head, older, asked = b"", [], await asyncio.to_thread(form.whole, prompt.brief, (*link.body, ask), {})
    parts = _parts(head, older, asked + opening.ids, model.context_length)
    most = min(SUMMARY_TOKENS, room, model.context_length - sum(map(len, parts)) // ID_BYTES)
    sampling = Sampling(min(most, model.max_output_tokens or most), request.temperature, request.top_p, form.stop_ids)
    generation = Generation(
        f"{request_id}-compact",
        model.name,
        parts,
        sampling,
        priority=priority_of(request),
        cache_salt=session.tenant,
        parsing=opening.parsing,
    )
    return Plan(form, opening, generation, Window("", kept, link.preamble, link.tools, alone), messages)


class Compacting:
    """A summary being written. Use once: iterate `run`, then take `item` and `window`. `usage` is what it took so
    far."""

    __slots__ = ("_cached", "_counted", "_model", "_pieces", "_plan", "_reasoning", "_sampled", "_session")

    def __init__(self, session: Session, model: Model, planned: Plan) -> None:
        self._session = session
        self._model = model
        self._plan = planned
        self._pieces: list[str] = []
        self._sampled = self._cached = self._reasoning = 0
        self._counted: Counted | None = None

    @property
    def usage(self) -> Usage:
        """Tokens of this generation, as the engine counts them if it does."""
        if (told := self._counted) is not None:
            return told.usage(self._reasoning)
        return Usage(self._plan.generation.prompt_tokens, self._sampled, self._cached, self._reasoning)

    @property
    def window(self) -> Window:
        """What the context is from now on."""
        return replace(self._plan.window, summary="".join(self._pieces).strip())

    def sealed(self) -> str:
        """The window as `encrypted_content`."""
        return self.window.sealed(self._session)

    async def run(self) -> AsyncGenerator[None, None]:
        """One step for each chunk. Raises `EngineError`, also for a summary that is cut off or empty. Closing it aborts
        the generation."""
        session, planned = self._session, self._plan
        parser = planned.format.parser(ToolSet(), planned.opening)
        finish: Finish | None = None
        async with aclosing(session.engine(self._model).generate(planned.generation)) as chunks:
            async for chunk in chunks:
                self._cached += chunk.cached_tokens or 0
                self._sampled += len(chunk.ids)
                self._take(parser.feed(chunk.ids) if chunk.deltas is None else chunk.deltas)
                self._reasoning = parser.reasoning_tokens
                finish, self._counted = chunk.finish, chunk.counted
                yield
        self._take(parser.finish())
        if finish not in {"stop", "length"}:
            raise EngineError("unavailable", "The engine stopped before the conversation was compacted.")
        if not self.window.summary:
            raise EngineError("unavailable", "The model wrote no summary of the conversation; try again.")
        session.actor.counters.compactions += 1

    async def events(self, emitter: Emitter) -> AsyncGenerator[list[Event], None]:
        """`run` as the events of a compaction item, which may be none for a step. What is open when it raises, or is
        closed early, is the emitter's to drop."""
        yield emitter.feed((CompactionStart(), CompactionBeat()))
        due = time.monotonic() + BEAT_S
        async with aclosing(self.run()) as steps:
            async for _ in steps:
                silent = time.monotonic() < due
                due = due if silent else time.monotonic() + BEAT_S
                yield [] if silent else emitter.feed((CompactionBeat(),))
        yield emitter.feed((CompactionEnd(self.sealed()),))

    def _take(self, deltas: Sequence[Delta]) -> None:
        self._pieces += [delta.text for delta in deltas if isinstance(delta, TextDelta)]


async def compact(session: Session, request: CreateRequest) -> tuple[list[Item], Usage]:
    """`POST /responses/compact`: the window that a new chain may begin with, and what it took. Nothing is committed.

    The window is what upstream's is: the user's messages (and a system or developer one), then one compaction item.
    Raises `ApiError`, also for what the engine could not do.
    """
    model = await session.actor.models.resolve(request.model)
    link = linked(session, await session.find_parent(request), request.input, request.input)
    tools = merge(request.tools, link.tools) if link.tools else request.tools
    brief = Brief(request.instructions, link.preamble, tools, request.text, request.effort)
    prompt = await render(session, model, link, brief, generate=False, given=request.input)
    ids = session.actor.ids
    planned = await plan(session, prompt, request, request_id=ids.item("cmp"), alone=False)
    assert planned is not None
    work = Compacting(session, model, planned)
    try:
        async with aclosing(work.run()) as steps:
            async for _ in steps:
                pass
    except EngineError as error:
        raise ApiError(_FAULTS[error.fault], error.message) from None
    shown = (
        replace(
            message,
            content=(InputText(message.content),) if isinstance(message.content, str) else message.content,
            id=message.id or ids.item("msg"),
            status="completed",
        )
        for message in planned.messages
    )
    return [*shown, Compaction(work.sealed(), id=ids.item("cmp"))], work.usage


def _kept(context: Sequence[Kept], form: Format, room: int) -> tuple[tuple[Kept, ...], tuple[Message, ...]]:
    """(what stays inside the item, which messages may stand in front of it).

    Inside stay the last user message, however long, and as much of the newest items behind it as has room: whole, with
    no output parted from its call. In front stand a leading preamble and the newest messages that have room.
    """
    last = next((at for at in reversed(range(len(context))) if _is_from_user(context[at])), -1)
    start, left = len(context), room
    waiting: set[str] = set()
    for at in range(len(context) - 1, last, -1):
        item = context[at]
        left -= tokens_in(form, item)
        if left < 0:
            break
        if isinstance(item, _Output):
            waiting.add(item.call_id)
        elif isinstance(item, FunctionCall | CustomToolCall):
            waiting.discard(item.call_id)
        if not waiting:
            start = at
    kept = tuple(
        replace(item, encrypted_content=None) if isinstance(item, Reasoning) else item
        for item in (*context[max(last, 0) : last + 1], *context[start:])
    )
    return kept, _shown(messages_of(context), form, room)


def _shown(messages: list[Message], form: Format, room: int) -> tuple[Message, ...]:
    leading = messages[:1] if messages and is_preamble(messages[0]) else []
    shown: list[Message] = []
    for message in reversed(messages[len(leading) :]):
        room -= tokens_in(form, message)
        if room < 0 and shown:
            break
        shown.append(message)
    return (*leading, *reversed(shown))


def _is_from_user(item: Item) -> bool:
    return isinstance(item, Message) and item.role == "user"


def _parts(head: bytes, parts: list[bytes], tail: bytes, context_length: int) -> list[bytes]:
    """The prompt of a summary. If it leaves no room for one, the oldest turns are left out: a summary of the rest is
    better than none."""
    least = min(LEAST_TOKENS, context_length // 4) * ID_BYTES
    size = len(head) + sum(map(len, parts)) + len(tail) + least
    while size > context_length * ID_BYTES and len(parts) > 1:
        size -= len(parts.pop(0))
    if size > context_length * ID_BYTES:
        raise ApiError(
            "context_length_exceeded",
            f"This model's context is {context_length} tokens, and what was sent at once is too long to be summarized "
            "in it. Shorten it or start a new conversation.",
            "input",
        )
    return [head, *parts, tail]
