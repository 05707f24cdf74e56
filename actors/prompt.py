"""What a turn sends to the engine, and how items become ids.

Only what is new is rendered and encoded: the parent's ids are taken from the token cache, the head from a cache keyed
by its content. `actors.rounds` has the exceptions. A template that can't be rendered in pieces (`Format.appendable`) is
rendered whole every turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from actors.conversation import Continuation, Response, Round, Sent, is_waiting
from actors.listing import size_of
from actors.models import Model
from actors.rounds import KEPT_SHARE, newest_round, remembered, round_of, truncated, without_oldest
from actors.tokencache import EMPTY, ID_BYTES
from actors.window import whole_body
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    InputFile,
    InputImage,
    Item,
    called_name,
    text_of,
)
from inference.engine import Prefix
from inference.formats.format import Brief, Format, Opening
from inference.tokenizer import THREAD_ABOVE_CHARS

if TYPE_CHECKING:
    from actors.session import Session


@dataclass(frozen=True, slots=True)
class Body:
    """The ids that a turn appends to `Continuation.tokens`. Those of its own items start at `begins`, those of its
    newest round at `round` (in ids from the start of these), in front of which `skipped` items are. `encoded` counts
    what was not in the cache."""

    ids: bytes = field(repr=False)
    begins: int = 0
    round: int = 0
    skipped: int = 0
    encoded: int = 0


@dataclass(frozen=True, slots=True)
class Prompt:
    """What goes to the engine, and the pieces that go into the token cache afterwards."""

    model: Model
    link: Continuation
    brief: Brief
    head: bytes = field(repr=False)
    body: Body
    opening: Opening

    @property
    def parts(self) -> list[bytes]:
        """All ids, in pieces."""
        return [self.head, *self.link.tokens.parts(), self.body.ids, self.opening.ids]

    @property
    def length(self) -> int:
        """In tokens."""
        return (len(self.head) + len(self.body.ids) + len(self.opening.ids)) // ID_BYTES + len(self.link.tokens)

    @property
    def known(self) -> Prefix | None:
        """What the engine that answered the parent has of this prompt."""
        sent = None if self.link.parent is None else self.link.parent.sent
        if sent is None or sent.head != self.head or not len(self.link.tokens):
            return None
        return Prefix(sent.request_id, len(self.head) // ID_BYTES + min(sent.ids, len(self.link.tokens)))

    @property
    def replica(self) -> str | None:
        """Which replica has what is known: a conversation over HTTP goes back there, as one on a socket does."""
        sent = None if self.link.parent is None else self.link.parent.sent
        return None if sent is None else sent.replica

    def response(
        self,
        response_id: str,
        new_ids: bytes,
        output: tuple[Item, ...],
        *,
        sent: int | None,
        replica: str | None,
        **facts: object,
    ) -> Response:
        """The node that continues the context by `new_ids`: body, opening and what was said. An engine, this `replica`,
        has seen all but the last `sent` of the ids (None: it has not seen them)."""
        link = self.link
        tokens = link.tokens.extend(new_ids)
        start = len(link.tokens)
        calls = {item.call_id: called_name(item) for item in output if is_waiting(item)}
        before = 0 if link.parent is None else link.parent.size
        return Response(
            id=response_id,
            parent=link.parent,
            items=link.items + output,
            tokens=tokens,
            preamble=link.preamble,
            tools=link.tools,
            pending={**link.pending, **calls},
            kept=start,
            begins=start + self.body.begins,
            round=self._round(len(output)) if self.model.format.forgetful else None,
            size=before + len(new_ids) + size_of((*link.items, *output)),
            sent=None if sent is None else Sent(response_id, self.head, len(tokens) - sent, replica),
            **facts,  # type: ignore[arg-type]
        )

    def _round(self, added: int) -> Round:
        return round_of(self.link, len(self.link.tokens) + self.body.round, self.body.skipped, added)


async def render(
    session: Session, model: Model, link: Continuation, brief: Brief, *, generate: bool, given: Sequence[Item]
) -> Prompt:
    """Head, new body and opening; everything older comes from the token cache as it is. `given` is the request's input,
    for what is said about it. Raises `ApiError`."""
    form, counters = model.format, session.actor.counters
    try:
        if form.appendable:
            head = await session.actor.heads.get(model, brief)
            shown = remembered(link, form)
            if shown is not link:
                counters.cut_backs += 1
                counters.cut_tokens += len(link.tokens) - len(shown.tokens)
            body = await _new_body(form, shown, link)
        else:
            head, shown = b"", replace(link, tokens=EMPTY, body=whole_body(session, link), round=None)
            body = await _whole(form, brief, shown.body)
            counters.whole_renders += 1
    except ApiError as error:
        error.param = exact_param(error.param, given)
        raise
    opening = form.opening(brief) if generate else Opening(b"")
    return Prompt(model, shown, brief, head, body, opening)


async def _whole(form: Format, brief: Brief, items: Sequence[Item]) -> Body:
    ids = await asyncio.to_thread(form.whole, brief, items, {})
    return Body(ids, encoded=len(ids) // ID_BYTES)


async def _new_body(form: Format, shown: Continuation, link: Continuation) -> Body:
    if not form.forgetful:
        items = shown.body if form.speaks_ids else _as_servers_take_it(shown)
        ids = await body_ids(form, items, shown.calls)
        return Body(ids, encoded=len(ids) // ID_BYTES)
    at = newest_round(shown.body, form)
    first = await body_ids(form, shown.body[:at], shown.calls)
    second = await body_ids(form, shown.body[at:], {**shown.calls, **_named(shown.body[:at])})
    ids = first + second
    # What is rendered again stands in front of the turn's own items, whose length tells where they begin.
    own = b"" if shown is link else await body_ids(form, link.body, link.calls)
    begins = 0 if shown is link else (len(ids) - len(own)) // ID_BYTES
    return Body(ids, begins, len(first) // ID_BYTES, at, len(ids) // ID_BYTES)


async def shortened(prompt: Prompt, room: int) -> Prompt:
    """The prompt without the oldest of its conversation (`truncation: auto`), so that `room` tokens are left for the
    answer. Whole turns are dropped, from the cached counts alone; of a request that is too long by itself its oldest
    rounds. What does not help is left as it is."""
    model, form = prompt.model, prompt.model.format
    limit = model.context_length - room
    fixed = (len(prompt.head) + len(prompt.opening.ids)) // ID_BYTES
    new = len(prompt.body.ids) // ID_BYTES
    goal = min(limit, int(model.context_length * KEPT_SHARE))
    if (left := truncated(prompt.link, max(goal - fixed - new, 0))) is not None:
        link, kept = left
        before = len(kept) // ID_BYTES
        body = replace(
            prompt.body,
            ids=kept + prompt.body.ids,
            begins=before + prompt.body.begins,
            round=before + prompt.body.round,
        )
        prompt = replace(prompt, link=link, body=body)
    items: Sequence[Item] = prompt.link.body
    while prompt.length > limit and (items := without_oldest(items)):
        link = replace(prompt.link, body=tuple(items), round=None)
        body = await (_new_body(form, link, link) if form.appendable else _whole(form, prompt.brief, items))
        prompt = replace(prompt, link=link, body=body)
    return prompt


async def body_ids(form: Format, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
    """The ids of these items, none for a template that is rendered whole. Much text is encoded in a thread."""
    if not form.appendable:
        return b""
    chars = sum(len(_rendered_text(item)) for item in items)
    return await asyncio.to_thread(form.body, items, calls) if chars > THREAD_ABOVE_CHARS else form.body(items, calls)


def tokens_in(form: Format, item: Item) -> int:
    """How long an item is, in tokens; without its scaffolding where the template is rendered whole."""
    ids = form.body((item,), {}) if form.appendable else form.tokenizer.encode(_rendered_text(item))
    return len(ids) // ID_BYTES


def too_long(prompt: Prompt) -> ApiError | None:
    """Why this prompt can't be answered, if it leaves the model no room."""
    if prompt.length < prompt.model.context_length:
        return None
    return ApiError(
        "context_length_exceeded",
        f"This model's context is {prompt.model.context_length} tokens; with this input the conversation has "
        f"{prompt.length}. Shorten it or start a new one.",
        "input",
    )


def exact_param(param: str | None, given: Sequence[Item]) -> str | None:
    """Where in a request's input the first image or file is, for a format that has refused one; else what it said."""
    for index, item in enumerate(given):
        for name in ("content", "output"):
            parts = getattr(item, name, None)
            for at, part in enumerate(parts if isinstance(parts, tuple) else ()):
                if isinstance(part, InputImage | InputFile):
                    return f"input[{index}].{name}[{at}]"
    return param


def _named(items: Sequence[Item]) -> dict[str, str]:
    return {item.call_id: called_name(item) for item in items if isinstance(item, FunctionCall | CustomToolCall)}


def _as_servers_take_it(link: Continuation) -> list[Item]:
    """The body for formats of messages and items. Servers want outputs behind their calls and of the same kind, and
    take no call without its output: one that was cut off is left out until somebody answers it, and then said again."""
    calls = {item.call_id: item for item in link.body if isinstance(item, FunctionCall | CustomToolCall)}
    cut = {call.call_id: call for call in link.resumed if call.call_id not in calls}
    front: list[Item] = []
    body: list[Item] = []
    for item in link.body:
        if not isinstance(item, FunctionCallOutput | CustomToolCallOutput):
            body.append(item)
            continue
        name = item.call_id
        call = calls.get(name) or cut.get(name) or (None if link.parent is None else link.parent.call(name))
        kind = CustomToolCallOutput if isinstance(call, CustomToolCall) else FunctionCallOutput
        output = item if isinstance(item, kind) else kind(name, item.output)
        if name in cut:
            body += [replace(cut.pop(name), status="completed"), output]
        else:
            (body if name in calls else front).append(output)
    return [*front, *body]


def _rendered_text(item: Item) -> str:
    for name in ("content", "output", "arguments", "input"):
        value = getattr(item, name, None)
        if value is not None:
            return text_of(value)
    return ""
