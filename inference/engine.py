"""The interface to whatever turns prompt ids into sampled ids.

Implementations: `inference.vllm` (real), `inference.scripted` (public double), and `inference.link`'s client, which
makes a remote engine look like a local one. Everything above this line knows nothing of vLLM or Ray.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from gateway.protocol.deltas import Delta
from gateway.protocol.response import Usage

Finish = Literal["stop", "length", "abort"]
GuideKind = Literal["json", "regex", "grammar", "structural_tag"]


@dataclass(frozen=True, slots=True)
class Guide:
    """A constraint on the output. `value` is a JSON schema, a regex, a Lark or EBNF grammar, or an xgrammar
    structural tag, as text."""

    kind: GuideKind
    value: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How to sample. `max_tokens` >= 1 counts every sampled id, stop ids included. Sampling ends after an id of
    `stop_token_ids`, which is itself delivered. `logprobs`: how many alternatives, None for none at all. `bounded`: the
    limit is a wish, and not only all that the context leaves."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    guide: Guide | None = None
    bounded: bool = True


@dataclass(frozen=True, slots=True)
class Prefix:
    """What an engine may remember of an earlier generation: the first `length` ids of a prompt are the first ids of the
    prompt of generation `request_id` followed by all that it sampled. A hint, so that a link need not carry them again;
    the prompt is always complete without it."""

    request_id: str
    length: int


@dataclass(frozen=True, slots=True)
class Parsing:
    """The engine is to take its output apart itself, with the parsers it was started with. `tools` is the JSON text of
    the tools in the form of chat completions, `[]` for none."""

    tools: str = "[]"


@dataclass(frozen=True, slots=True)
class Generation:
    """One request. `parts` together are the prompt: token ids as little-endian unsigned 32-bit integers, so that
    100,000 of them are a few objects and travel as they are. `cache_salt` separates tenants in the engine's prefix
    cache. `known` is what this engine may have of the prompt already."""

    request_id: str
    model: str
    parts: Sequence[bytes]
    sampling: Sampling
    priority: int = 0
    cache_salt: str | None = None
    known: Prefix | None = None
    parsing: Parsing | None = None

    @property
    def prompt(self) -> bytes:
        """All ids in one piece. O(prompt) each time."""
        return b"".join(self.parts)

    @property
    def prompt_tokens(self) -> int:
        """How many ids the prompt has."""
        return sum(map(len, self.parts)) // 4


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one sampled id and of its alternatives, most likely first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Counted:
    """What an engine that takes messages counted itself; None for what it does not tell."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None

    def usage(self, reasoning_tokens: int) -> Usage:
        """As it is told and billed, with so many tokens of reasoning if the engine does not tell."""
        reasoning = reasoning_tokens if self.reasoning_tokens is None else self.reasoning_tokens
        return Usage(self.input_tokens, self.output_tokens, self.cached_tokens or 0, reasoning)


@dataclass(slots=True)
class Chunk:
    """Newly sampled ids, in order, possibly none. Exactly the last chunk has `finish`. `cached_tokens` is the part of
    the prompt that came from the engine's prefix cache: set in the first chunk, None later (and where unknown).
    `deltas` is what the ids mean, if the generation asked for parsing; together those of all chunks are the output.
    `counted` is the usage as the engine counts it, where no ids travel: set in the last chunk."""

    ids: list[int]
    finish: Finish | None = None
    cached_tokens: int | None = None
    logprobs: list[TokenLogprob] | None = None
    deltas: list[Delta] | None = None
    counted: Counted | None = None


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has in hand, for routing and scaling. `kv_usage` is 0 to 1."""

    running: int
    waiting: int
    kv_usage: float = 0.0


EngineFault = Literal["invalid", "overloaded", "unavailable"]


class EngineError(Exception):
    """The engine did not do it. `invalid`: the request can never work (a bad schema, a too long prompt);
    `overloaded`: later; `unavailable`: this engine is gone, another replica may do. The message is for the client.
    `retry_after_s` is how long it should wait, None where the engine has no advice; `code` a row of the error table
    that says more than the fault."""

    def __init__(self, fault: EngineFault, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.fault: EngineFault = fault
        self.message = message
        self.retry_after_s = retry_after_s
        self.code: str | None = None


class Engine(Protocol):
    """Prompt ids in, sampled ids out."""

    def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """Stream the answer. Raises `EngineError`. Closing the iterator (or cancelling the task that reads it) aborts
        the generation in the engine within one step; nothing keeps running behind it."""
        ...

    async def check(self, guide: Guide) -> None:
        """Raises `EngineError("invalid", …)` for a constraint that this engine can't hold, with what is wrong with it.
        May take seconds for a guide it has not met, as it is compiled."""
        ...

    async def load(self) -> Load:
        """What is running and waiting now."""
        ...

    async def check_health(self) -> None:
        """Raises `EngineError("unavailable", …)` when the engine can no longer work."""
        ...

    async def close(self) -> None:
        """Stop, aborting what runs. Idempotent."""
        ...
