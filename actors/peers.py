"""What the actors of one gateway ask each other.

An id names the actor that made what it stands for, and whoever is asked about an id it doesn't have asks the others:
one question to all of them, answered by those that can. Questions and answers are plain values that survive pickling;
a refusal travels as its fields, since an exception with more than one argument does not.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple, Protocol

from gateway.protocol.errors import ApiError

Operation = Callable[..., Awaitable[Any]]


class Peers(Protocol):
    """The way to the other actors."""

    async def ask(self, operation: str, args: tuple[Any, ...]) -> list[Any]:
        """What `Switchboard.answer` said on every actor that could be reached in time, in any order; a `TimeoutError`
        among them for those that could not. Asking oneself as well is harmless."""
        ...


class Answer(NamedTuple):
    """What became of a question. `value` is None if nobody has it; `heard`: the actor it is about was among those that
    answered, so that what it doesn't have is nowhere in a memory; `complete`: all that run were asked in time."""

    value: Any | None
    heard: bool
    complete: bool


class _Reply(NamedTuple):
    """One actor's answer: which actor's, a value or a refusal's fields or neither."""

    owner: str
    value: Any | None = None
    refusal: tuple[Any, ...] | None = None


_REPLY_FIELDS = 3  # others are of another version, whose actors are on their way in or out


class Switchboard:
    """The operations of one actor, for itself and for its peers. An operation that returns None doesn't have what it
    was asked for."""

    def __init__(self, owner: str, peers: Peers | None) -> None:
        self._owner = owner
        self._peers = peers
        self._operations: dict[str, Operation] = {}

    def offer(self, name: str, operation: Operation) -> None:
        """Let peers call this."""
        self._operations[name] = operation

    async def answer(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """A peer's question, answered from what this actor has."""
        try:
            value = await self._operations[name](*args)
        except ApiError as refusal:
            fields = (refusal.code, refusal.message, refusal.param, refusal.retry_after_s)
            return (self._owner, None, fields)
        return (self._owner, value, None)

    async def ask(self, name: str, *args: Any) -> Any | None:
        """The first answer of a peer that has it; None when no one does. Raises the `ApiError` of the one that
        refused."""
        return (await self.ask_about("", name, *args)).value

    async def ask_about(self, owner: str, name: str, *args: Any) -> Answer:
        """As `ask`, and whether this actor has answered too."""
        replies, complete = await self._ask(name, args)
        heard = any(reply.owner == owner for reply in replies)
        for reply in replies:
            if reply.value is not None:
                return Answer(reply.value, heard, complete)
        for reply in replies:
            if reply.refusal is not None:
                raise ApiError(*reply.refusal)
        return Answer(None, heard, complete)

    async def ask_all(self, name: str, *args: Any) -> list[Any]:
        """Every answer, without the refusals."""
        return [reply.value for reply in (await self._ask(name, args))[0] if reply.value is not None]

    async def _ask(self, name: str, args: tuple[Any, ...]) -> tuple[list[_Reply], bool]:
        """Who has answered, and whether all have."""
        if self._peers is None:
            return [], True
        answers = await self._peers.ask(name, args)
        replies = [_Reply(*answer) for answer in answers if isinstance(answer, tuple) and len(answer) == _REPLY_FIELDS]
        return replies, not any(isinstance(answer, TimeoutError) for answer in answers)
