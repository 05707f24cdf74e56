"""What a checkpoint's `tokenizer.json` says, and how to take its added tokens out of the reach of text."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from functools import cache
from typing import Any


def unknown_token(data: dict[str, Any]) -> str | None:
    """The token that stands for what the vocabulary can't spell, which text may therefore become."""
    model = data["model"]
    if isinstance(model["vocab"], list):
        index = model.get("unk_id")
        return None if index is None else str(model["vocab"][index][0])
    name: str | None = model.get("unk_token")
    return name


def without_added(data: dict[str, Any], byte_level: bool) -> dict[str, Any]:
    """A `tokenizer.json` that knows no added token and can't be made to spell one."""
    model = dict(data["model"])
    unknown = unknown_token(data)
    if byte_level and unknown is not None:  # bytes without a token never reach the library
        unknown = model["unk_token"] = None
    hidden = {token["content"] for token in data.get("added_tokens") or []} - {unknown}
    # No piece of text holds a plain space by the time a byte-level or Metaspace model looks it up, so such a name is
    # out of reach; for others it is at least nothing anyone can guess.
    prefix = f" {secrets.token_hex(8)} "
    if isinstance(model["vocab"], dict):
        model["vocab"] = {f"{prefix}{i}" if name in hidden else name: i for name, i in model["vocab"].items()}
    else:
        pieces = enumerate(model["vocab"])
        model["vocab"] = [[f"{prefix}{i}", score] if name in hidden else [name, score] for i, (name, score) in pieces]
    if model.get("merges"):
        pairs = ((merge, merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"])
        model["merges"] = [merge for merge, pair in pairs if hidden.isdisjoint((*pair, "".join(pair)))]
    return {**data, "added_tokens": [], "post_processor": None, "truncation": None, "padding": None, "model": model}


def is_byte_level(data: dict[str, Any]) -> bool:
    """Whether a token's text is its bytes, spelled in GPT-2's alphabet."""
    decoder = data.get("decoder") or {}
    steps = decoder.get("decoders", [decoder]) if decoder.get("type") == "Sequence" else [decoder]
    return [step.get("type") for step in steps] == ["ByteLevel"]


def absent_bytes(vocabulary: Mapping[str, int]) -> frozenset[int]:
    """Bytes that have no token: SmolLM2 lacks some control characters and the lead bytes of rare planes."""
    return frozenset(byte for char, byte in byte_alphabet().items() if char not in vocabulary)


@cache
def byte_alphabet() -> Mapping[str, int]:
    """GPT-2's alphabet: printable Latin-1 characters are their own bytes, the others follow from U+0100 in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}
