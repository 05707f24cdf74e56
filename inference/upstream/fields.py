"""Fields of upstreams' events, read with care: servers put in what they like. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.protocol.deltas import Logprob


def text_in(value: Any) -> str:
    """A field's text, or that of its text parts, without lone surrogates, which no frame can carry."""
    if isinstance(value, list):
        parts = [part.get("text") for part in value if isinstance(part, dict)]
        value = "".join(part for part in parts if isinstance(part, str))
    if not isinstance(value, str):
        return ""
    return value if value.isascii() else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def objects_in(value: Any) -> list[Mapping[str, Any]]:
    """The objects of a list."""
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []


def logprobs_in(value: Any) -> tuple[Logprob, ...]:
    """A list of tokens' log-probabilities."""
    return tuple(
        Logprob(_bytes(entry), float(entry["logprob"]), _others(entry.get("top_logprobs")))
        for entry in objects_in(value)
        if isinstance(entry.get("logprob"), int | float)
    )


def _others(value: Any) -> tuple[tuple[bytes, float], ...]:
    found = [entry for entry in objects_in(value) if isinstance(entry.get("logprob"), int | float)]
    return tuple((_bytes(entry), float(entry["logprob"])) for entry in found)


def _bytes(entry: Mapping[str, Any]) -> bytes:
    given = entry.get("bytes")
    if isinstance(given, list) and all(isinstance(each, int) and 0 <= each < 256 for each in given):
        return bytes(given)
    return str(entry.get("token", "")).encode("utf-8", "replace")
