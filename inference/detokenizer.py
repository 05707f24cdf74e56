"""Token ids to text, one id at a time.

A byte-level vocabulary needs no history: every id is a fixed string of bytes, and an incremental UTF-8 decoder keeps
what is not yet a whole code point. So a step costs the same however long the context is. Other vocabularies
(SentencePiece, byte fallback) go through `tokenizers.decoders.DecodeStream`, which looks back a few ids.
"""

from __future__ import annotations

import codecs
import weakref
from collections.abc import Collection, Iterable
from typing import Any

from inference.tokenizer import Tokenizer

# Texts of ids that are whole code points by themselves, and bytes of the others, filled as ids turn up; bounded by the
# vocabulary.
_WHOLE: weakref.WeakKeyDictionary[Tokenizer, dict[int, str]] = weakref.WeakKeyDictionary()
_PARTS: weakref.WeakKeyDictionary[Tokenizer, dict[int, bytes]] = weakref.WeakKeyDictionary()

_MOST_HELD = 16  # ids; four can make a code point

_UTF8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns one turn's sampled ids into text. Never half a code point; U+FFFD only for bytes that can't be UTF-8, or at
    the end. Special ids give no text, except those in `shown`, which give their name. Fed in any portions, the result
    is the text of all the ids' bytes decoded at once. Not thread-safe."""

    __slots__ = ("_bytes", "_hidden", "_parts", "_pending", "_special", "_stream", "_utf8", "_whole")

    def __init__(self, tokenizer: Tokenizer, shown: Collection[int] = ()) -> None:
        self._special = special = tokenizer.special_ids
        self._hidden = frozenset(i for i in special if i not in shown) if shown else special
        self._bytes = tokenizer.token_bytes
        self._whole = _WHOLE.setdefault(tokenizer, {})
        self._parts = _PARTS.setdefault(tokenizer, {})
        self._utf8 = _UTF8(errors="replace")
        self._pending = False
        self._stream = None if tokenizer.hub is None else _HubStream(tokenizer.hub)

    def step(self, token_id: int) -> str | None:
        """The text this id completes, possibly none; None for a special id."""
        if not self._pending:
            text = self._whole.get(token_id)
            if text is not None:
                return text
        return self._step(token_id)

    def feed(self, ids: Iterable[int]) -> str:
        """The text these ids complete."""
        step = self.step
        return "".join([step(token_id) or "" for token_id in ids])

    def finish(self) -> str:
        """No more ids: U+FFFD for an unfinished code point, else nothing. The detokenizer can be used again."""
        if self._stream is not None:
            return self._stream.finish()
        self._pending = False
        text = self._utf8.decode(b"", final=True)
        self._utf8.reset()
        return text

    def _step(self, token_id: int) -> str | None:
        if token_id in self._hidden:
            return None
        if self._stream is not None:
            return self._stream.step(token_id)
        piece = self._parts.get(token_id)
        if piece is None:
            piece = self._bytes(token_id)
            if token_id not in self._whole:
                self._parts[token_id] = piece
        if self._pending:
            text = self._utf8.decode(piece)
            self._pending = bool(self._utf8.getstate()[0])
            return text
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            text = self._utf8.decode(piece)
            self._pending = bool(self._utf8.getstate()[0])
        else:
            # A shown special id is hidden to other detokenizers of this vocabulary, so it stays out of the table.
            if token_id not in self._special:
                self._whole[token_id] = text
        return text


class _HubStream:
    """`DecodeStream` plus what it lacks: an end, and a bound. It holds back all text that ends with U+FFFD, and decodes
    everything it holds at each step; a model that samples byte after byte that is no UTF-8 would take minutes."""

    def __init__(self, hub: Any) -> None:
        self._hub = hub
        self._finished: list[int] = []  # the last ids that made text
        self._unfinished: list[int] = []
        self._stream = self._open()

    def step(self, token_id: int) -> str:
        text = self._stream.step(self._hub, token_id) or ""
        self._unfinished.append(token_id)
        if text:
            self._finished, self._unfinished = self._unfinished, []
        elif len(self._unfinished) >= _MOST_HELD:
            text = self.finish()
        return text

    def finish(self) -> str:
        """Held ids that never became text: a cut-off code point, decoded without its context."""
        if not self._unfinished:
            return ""
        text: str = self._hub.decode(self._unfinished, skip_special_tokens=False)
        self._unfinished.clear()
        self._stream = self._open()
        return text if "\ufffd" in text else ""

    def _open(self) -> Any:
        from tokenizers.decoders import DecodeStream

        # What went before decides whether a word keeps the space before it.
        return DecodeStream(ids=self._finished, skip_special_tokens=False)
