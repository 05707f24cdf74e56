"""The scripted engine, answering with as many tokens as the newest user message asks for."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator

from inference.engine import Chunk, Generation
from inference.scripted import Ids, Script, ScriptedEngine
from inference.tokenizer import scripted_tokenizer, unpack_ids


class CountingEngine(ScriptedEngine):
    """`… 200` in the newest user message: 200 tokens of English, then the stop id."""

    def __init__(self, tokens_per_second: float) -> None:
        self._vocabulary = scripted_tokenizer()
        super().__init__(self._vocabulary, tokens_per_second=tokens_per_second)
        words = "The quick brown fox jumps over the lazy dog and runs on through the woods until night falls. "
        self._text = unpack_ids(self._vocabulary.encode(words * 10))

    def generate(self, generation: Generation) -> AsyncIterator[Chunk]:
        """As the base class, with a script for this prompt."""
        tail = unpack_ids(generation.prompt[-4 * 40 :])
        said = b"".join(self._vocabulary.token_bytes(token) for token in tail).decode(errors="ignore")
        count = int(re.findall(r"\d+", said)[-1])
        ids = (self._text * (count // len(self._text) + 1))[:count]
        self.enqueue(Script([Ids(ids)]))
        return super().generate(generation)
