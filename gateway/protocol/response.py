"""The Response object: all keys of protocol.md 3.6, in every event that carries it.

What only repeats the request is encoded once per turn (tools alone are 26 kB in some clients and go out three
times); the rest is added at each rendering.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from gateway.protocol.items import Item, to_json


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one response. `input_tokens` is the whole effective context, not only what was new."""

    input_tokens: int
    output_tokens: int
    cached_tokens: int = 0
    reasoning_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        """What two generations of one response took together."""
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
        )

    def to_json(self) -> dict[str, Any]:
        """The wire form; every key is required by some client (protocol.md 3.5)."""
        return {
            "input_tokens": self.input_tokens,
            "input_tokens_details": {
                "cached_tokens": self.cached_tokens,
                "cache_write_tokens": max(0, self.input_tokens - self.cached_tokens),
            },
            "output_tokens": self.output_tokens,
            "output_tokens_details": {"reasoning_tokens": self.reasoning_tokens},
            "total_tokens": self.input_tokens + self.output_tokens,
        }


class ResponseObject:
    """One response's identity and echo of its request. `echo` holds every key that only repeats the request."""

    __slots__ = ("_echo", "created_at", "id")

    def __init__(self, response_id: str, created_at: int, echo: Mapping[str, Any]) -> None:
        self.id = response_id
        self.created_at = created_at
        encoded = orjson.dumps(echo).decode()
        self._echo = encoded[1:-1]

    def render(
        self,
        status: str,
        output: Sequence[Item] = (),
        usage: Usage | None = None,
        completed_at: int | None = None,
        reason: str | None = None,
        error: Mapping[str, Any] | None = None,
    ) -> str:
        """The object as JSON text. `reason` fills `incomplete_details`."""
        own = orjson.dumps(
            {
                "id": self.id,
                "object": "response",
                "created_at": self.created_at,
                "completed_at": completed_at,
                "status": status,
                "incomplete_details": None if reason is None else {"reason": reason},
                "error": error,
                "output": [to_json(item) for item in output],
                "usage": None if usage is None else usage.to_json(),
            }
        ).decode()
        return f"{own[:-1]},{self._echo}}}" if self._echo else own
