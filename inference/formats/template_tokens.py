"""From a template's text to ids, so that only the template's own text can become control tokens.

A template mixes its control tokens with clients' text in one string. Before it runs, the characters that control tokens
begin and end with are replaced in all clients' text by *stand-ins*: private-use characters that occur nowhere in it.
What spells a control token afterwards was written by the template; everything else gets its characters back and is
encoded as text. A stand-in takes one place as the character did, is no white space, and passes through `tojson`, so
trimming, splitting and printing work as they do without it, and text without look-alikes gets the ids it always gets.

Texts can't join forces either: `<|im_` at the end of one and `start|>` at the beginning of the next each hold a
stand-in. Tokens that begin and end with letters are rare; their letters can't be replaced everywhere (a template
compares words), so those are broken where they occur and where a text begins or ends with a part of one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from gateway.protocol.errors import ApiError
from inference.tokenizer import Tokenizer, pack_ids

_PRIVATE = re.compile("[\ue000-\uf8ff]")
_BLANK = re.compile(r"[\s\u2581]*")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """One of a vocabulary's added tokens. `lstrip` and `rstrip`: it takes white space before or behind it along."""

    text: str
    id: int
    lstrip: bool = False
    rstrip: bool = False
    special: bool = True

    @property
    def harmless(self) -> bool:
        """Whether it is only a way to write white space (Gemma has line ends as added tokens): clients' text may
        become such a token, and does so in transformers."""
        return not self.special and _BLANK.fullmatch(self.text) is not None


def added_tokens(data: Mapping[str, Any]) -> tuple[AddedToken, ...]:
    """The added tokens of a `tokenizer.json`."""
    return tuple(
        AddedToken(
            entry["content"],
            entry["id"],
            bool(entry.get("lstrip")),
            bool(entry.get("rstrip")),
            bool(entry.get("special")),
        )
        for entry in data.get("added_tokens") or ()
        if entry["content"]
    )


class Shield:
    """Covers clients' texts for one rendering, and uncovers the result.

    `marks` are two more characters that no text holds, to find places in a rendering by; `characters` are these and the
    stand-ins. `clashes` are the private-use characters that the texts covered so far turned out to hold.
    """

    def __init__(self, encoder: TemplateEncoder, taken: Iterable[str] = ()) -> None:
        taken = set(taken)
        free = (char for char in map(chr, range(0xE000, 0xF900)) if char not in taken)
        needed = (*encoder.edges, *encoder.letters)
        names = [char for _, char in zip(range(len(needed) + 2), free, strict=False)]
        if len(names) < len(needed) + 2:
            raise ApiError("invalid_prompt", "the input uses nearly all private-use characters of Unicode", "input")
        self.marks = (names[0], names[1])
        self.clashes: set[str] = set()
        self._encoder = encoder
        self._stand_ins = dict(zip(needed, names[2:], strict=True))
        self._edges = [(char, self._stand_ins[char]) for char in encoder.edges]
        self._real = {stand_in: char for char, stand_in in self._stand_ins.items()}
        self._uncovered = str.maketrans(self._real)
        self.characters = frozenset((*self.marks, *self._real))

    def cover(self, text: str) -> str:
        """A client's text, unable to spell a control token."""
        if not text.isascii() and (held := _PRIVATE.findall(text)):
            self.clashes.update(held)
        return self.cover_trusted(text)

    def cover_trusted(self, text: str) -> str:
        """The same for a text that may hold marks."""
        for char, stand_in in self._edges:
            if char in text:
                text = text.replace(char, stand_in)
        if self._encoder.letters:
            text = self._break_words(text)
        if self._encoder.glues and text in self._encoder.insides:
            text = self._stand_ins.get(text[:1], text[:1]) + text[1:]
        return text

    def cover_all(self, value: Any) -> Any:
        """Every string in a JSON value, keys included."""
        if isinstance(value, str):
            return self.cover(value)
        if isinstance(value, Mapping):
            return {self.cover(str(key)): self.cover_all(entry) for key, entry in value.items()}
        if isinstance(value, list | tuple):
            return [self.cover_all(entry) for entry in value]
        return value

    def uncover(self, text: str) -> str:
        """The clients' characters again."""
        return text if text.isascii() else text.translate(self._uncovered)

    def _break_words(self, text: str) -> str:
        encoder = self._encoder
        if encoder.words is not None:
            text = encoder.words.sub(lambda match: self._stand_ins[match.group()[0]] + match.group()[1:], text)
        for size in range(min(encoder.longest, len(text)), 0, -1):
            if text[:size] in encoder.word_ends:
                at = next((i for i in range(size) if not text[i].isspace()), 0)
                text = text[:at] + self._stand_ins[text[at]] + text[at + 1 :]
                break
        for size in range(min(encoder.longest, len(text)), 0, -1):
            if text[-size:] in encoder.word_starts:
                at = len(text) - next((i for i in range(1, size + 1) if not text[-i].isspace()), 1)
                text = text[:at] + self._stand_ins[text[at]] + text[at + 1 :]
                break
        return text


class TemplateEncoder:
    """Splits a template's text at its control tokens, and encodes.

    `edges` are the characters that stand-ins replace everywhere; `letters` those of tokens that are words. `glues`: the
    template writes a client's text between the brackets of a control token, so that the inside of one must be covered,
    too (`inference.formats.template_probe` finds out).
    """

    def __init__(self, tokenizer: Tokenizer, added: Iterable[AddedToken], glues: bool = False) -> None:
        self.tokenizer = tokenizer
        self.glues = glues
        self.added = tuple(added)
        self._tokens = {token.text: token for token in self.added}
        guarded = [token.text for token in self.added if not token.harmless]
        marked = [text for text in guarded if _is_sign(text[0]) and _is_sign(text[-1])]
        self.edges = tuple(sorted({char for text in marked for char in (text[0], text[-1])}))
        plain = [text for text in guarded if text not in set(marked)]
        self.longest = max(map(len, plain), default=0)
        self.words = re.compile("|".join(map(re.escape, plain))) if plain else None
        self.word_starts = {text[:size] for text in plain for size in range(1, len(text))}
        self.word_ends = {text[-size:] for text in plain for size in range(1, len(text))}
        chars = {char for text in (guarded if glues else plain) for char in text} - set(self.edges)
        self.letters = tuple(sorted(chars))
        firsts = sorted({token.text[0] for token in self.added})
        self._first = re.compile(f"[{re.escape(''.join(firsts))}]") if firsts else None
        sizes: dict[str, set[int]] = {}
        for token in self.added:
            sizes.setdefault(token.text[0], set()).add(len(token.text))
        self._sizes = {first: sorted(found, reverse=True) for first, found in sizes.items()}

    @cached_property
    def insides(self) -> _Insides:
        """What stands inside control tokens."""
        return _Insides(token.text for token in self.added if not token.harmless)

    def token_at(self, text: str, position: int) -> AddedToken | None:
        """The longest added token that the text spells there."""
        for size in self._sizes.get(text[position : position + 1], ()):
            if (token := self._tokens.get(text[position : position + size])) is not None:
                return token
        return None

    def split(self, rendered: str) -> Iterator[str | AddedToken]:
        """Text and added tokens, in turn; joined again they are the rendering."""
        start = position = 0
        while self._first is not None and (match := self._first.search(rendered, position)) is not None:
            token = self.token_at(rendered, match.start())
            if token is None:
                position = match.start() + 1
                continue
            if start < match.start():
                yield rendered[start : match.start()]
            yield token
            start = position = match.start() + len(token.text)
        if start < len(rendered):
            yield rendered[start:]

    def pieces(self, rendered: str) -> Iterator[str | AddedToken]:
        """The same without the white space that tokens take along."""
        before: str | AddedToken = ""
        swallows = False
        for piece in self.split(rendered):
            if isinstance(before, str):
                text = before.lstrip() if swallows else before
                text = text.rstrip() if isinstance(piece, AddedToken) and piece.lstrip else text
                if text:
                    yield text
            else:
                yield before
            swallows = isinstance(before, AddedToken) and before.rstrip
            before = piece
        last = before.lstrip() if isinstance(before, str) and swallows else before
        if last:
            yield last

    def ids(self, rendered: str, shield: Shield) -> bytes:
        """The ids of a rendering of covered texts."""
        out: list[bytes] = []
        for piece in self.pieces(rendered):
            if isinstance(piece, AddedToken):
                out.append(pack_ids([piece.id]))
            else:
                out.append(self.tokenizer.encode(shield.uncover(piece)))
        return b"".join(out)

    def parts_cleanly(self, before: str, behind: str) -> bool:
        """Whether two texts that follow each other have the same ids apart as together, because a control token stands
        at the joint."""
        if not before or not behind:
            return True
        first = self.token_at(behind, 0)
        if first is not None and not first.harmless:
            return not (first.lstrip and before[-1].isspace())
        last = next((token for token in self.added if not token.harmless and before.endswith(token.text)), None)
        return last is not None and not last.rstrip


class _Insides:
    """Texts that lie within a control token, its ends not included."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._all = "\n".join(token[1:-1] for token in tokens)

    def __contains__(self, text: str) -> bool:
        return bool(text) and text in self._all


def _is_sign(char: str) -> bool:
    """Neither a letter nor white space, nor a character that JSON escapes."""
    return not char.isalnum() and not char.isspace() and char not in '"\\'
