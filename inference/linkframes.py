"""Frames of the token link, as bytes. Pure: no sockets, no clocks.

A frame is `length` (u32, of what follows), `kind` (u8), `number` (u32), body; all integers little-endian. `number`
names a stream or a question, chosen by the client; 0 for frames about the connection itself. Bodies:

| kind | from | body |
|---|---|---|
| HELLO | client | magic, version u16, shared secret |
| WELCOME | server | version u16 |
| REFUSE | server | reason as UTF-8; the connection ends |
| OPEN | client | header length u32, header (msgpack), ids of the prompt that the server lacks |
| UNKNOWN | server | empty: the server lacks more; the client sends OPEN again, with the whole prompt |
| CHUNK | server | flags u8, [cached u32], [id count u32], ids, [logprobs and deltas as msgpack] |
| ERROR | server | (fault, message) as msgpack |
| CANCEL | client | empty |
| ASK | client | question u8, for CHECK then the guide (msgpack) |
| ANSWER | server | running u32, waiting u32, kv_usage f64; zeros for HEALTH and CHECK |
| PING, PONG | both | empty |

HELLO, WELCOME and REFUSE keep their form in every version, so that two versions can tell each other apart.

A prompt mostly repeats an earlier one and its answer, which the server has seen. OPEN then names that generation
(`Base`) and carries only the rest. So that a disagreement about what was seen can't go unnoticed, it also says how long
the whole prompt is and what the CRC-32 of the repeated part is: of all of it, which takes 0.15 ms for 100,000 ids, so
that an edit anywhere (other tools in the head) is found.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from struct import Struct, error, pack
from typing import Final

from msgspec import MsgspecError, msgpack

from inference.engine import (
    Chunk,
    EngineError,
    EngineFault,
    Finish,
    Generation,
    Guide,
    GuideKind,
    Load,
    Parsing,
    Sampling,
    TokenLogprob,
)
from inference.linkdeltas import DeltaRow, pack_deltas, unpack_deltas
from inference.tokenizer import unpack_ids

MAGIC = b"LIMPET\0L"
VERSION = 2
MAX_FRAME_BYTES = 64 * 2**20
"""Largest frame, without its length field: a prompt of 16 million ids."""
MAX_HELLO_BYTES = 4096
"""Largest frame before the peer has shown the shared secret."""


class Kind:
    """What a frame is. Plain ints: looking up an enum's member costs more than packing a frame."""

    HELLO: Final = 1
    WELCOME: Final = 2
    REFUSE: Final = 3
    OPEN: Final = 4
    CHUNK: Final = 5
    ERROR: Final = 6
    CANCEL: Final = 7
    ASK: Final = 8
    ANSWER: Final = 9
    PING: Final = 10
    PONG: Final = 11
    UNKNOWN: Final = 12


class Question:
    """What an ASK asks. Each is answered with an ANSWER or an ERROR."""

    LOAD: Final = 1
    HEALTH: Final = 2
    CHECK: Final = 3


class LinkProtocolError(Exception):
    """The peer sent what is no frame of this protocol. The connection is of no more use."""


Frame = tuple[int, int, bytes]
"""kind, number, body"""


@dataclass(frozen=True, slots=True)
class Base:
    """What a prompt begins with: the first `length` ids of the prompt and the answer of generation `request_id`, whose
    CRC-32 is `checksum`. With the rest that is sent the prompt has `total` ids."""

    request_id: str
    length: int
    checksum: int
    total: int


_CACHED = 1
_EXTRAS = 2  # logprobs, deltas or both
_FINISH_SHIFT = 2
_FINISHES: tuple[Finish | None, ...] = (None, "stop", "length", "abort")
_FINISH_FLAGS = {finish: index << _FINISH_SHIFT for index, finish in enumerate(_FINISHES)}

_HEAD = Struct("<IBI")
_HEAD_BODY = 5  # of the header, the part that `length` counts
_ONE_ID = Struct("<IBIBI")
_ONE_ID_BYTES = 10
_CHUNK_START = Struct("<BI")
_U32 = Struct("<I")
_U16 = Struct("<H")
_LOAD = Struct("<IId")

_Header = tuple[str, str, Sampling, int, str | None, str | None, tuple[str, int, int, int] | None]
_LogprobRow = tuple[int, float, tuple[tuple[int, float], ...]]
_header_decoder = msgpack.Decoder(_Header)
_guide_decoder = msgpack.Decoder(tuple[GuideKind, str])
_error_decoder = msgpack.Decoder(tuple[EngineFault, str])
_extras_decoder = msgpack.Decoder(tuple[list[_LogprobRow] | None, list[DeltaRow] | None])
_encoder = msgpack.Encoder()


class FrameSplitter:
    """Cuts a byte stream into frames. Holds at most one unfinished frame, so at most `limit` bytes."""

    __slots__ = ("_held", "_needed", "limit")

    def __init__(self, limit: int = MAX_FRAME_BYTES) -> None:
        self.limit = limit
        self._held = bytearray()
        self._needed = 0  # size at which `_held` is worth looking at again

    def feed(self, data: bytes) -> list[Frame]:
        """Frames that `data` completes. Raises `LinkProtocolError` for a length over the limit."""
        if self._held:
            self._held += data
            if len(self._held) < self._needed:
                return []
            data = bytes(self._held)
            self._held.clear()
        frames: list[Frame] = []
        position, size, unpack, head_size = 0, len(data), _HEAD.unpack_from, _HEAD.size
        while size - position >= head_size:
            length, kind, number = unpack(data, position)
            if not _HEAD_BODY <= length <= self.limit:
                raise LinkProtocolError(f"a frame of {length} bytes; the limit is {self.limit}")
            end = position + 4 + length
            if end > size:
                self._needed = end - position
                break
            frames.append((kind, number, data[position + head_size : end]))
            position = end
        else:
            self._needed = head_size
        if position < size:
            self._held += data[position:]
        return frames


def encode(kind: int, number: int = 0, body: bytes = b"") -> bytes:
    """Any frame. Raises `EngineError("invalid", …)` for one that is too large."""
    return _head(kind, number, len(body)) + body


def _head(kind: int, number: int, size: int) -> bytes:
    length = _HEAD_BODY + size
    if length > MAX_FRAME_BYTES:
        raise EngineError("invalid", f"The request has {length} bytes, more than the engine link's {MAX_FRAME_BYTES}.")
    return _HEAD.pack(length, kind, number)


def encode_hello(token: str, version: int = VERSION) -> bytes:
    """The client's first frame."""
    return encode(Kind.HELLO, 0, MAGIC + _U16.pack(version) + token.encode())


def decode_hello(body: bytes) -> tuple[int, bytes]:
    """Version and secret. Raises `LinkProtocolError` when the peer is no token link."""
    start = len(MAGIC)
    if body[:start] != MAGIC or len(body) < start + _U16.size:
        raise LinkProtocolError("the peer's first frame is no hello of a token link")
    return _U16.unpack_from(body, start)[0], body[start + _U16.size :]


def encode_welcome() -> bytes:
    """The server's answer to a good hello."""
    return encode(Kind.WELCOME, 0, _U16.pack(VERSION))


def split_known(generation: Generation) -> tuple[Base | None, Sequence[bytes | memoryview]]:
    """(what the server may have of the prompt, the rest of it). Copies nothing and reads the known part once."""
    known, total = generation.known, generation.prompt_tokens
    if known is None or not 0 < known.length <= total:
        return None, generation.parts
    whole = memoryview(b"".join(generation.parts))  # 20 us at 100,000 ids, and one run of the checksum for all parts
    size = 4 * known.length
    checksum, rest = zlib.crc32(whole[:size]), [whole[size:]]
    return Base(known.request_id, known.length, checksum, total), rest


def encode_open(
    number: int, generation: Generation, base: Base | None = None, rest: Sequence[bytes | memoryview] | None = None
) -> bytes:
    """A request with its whole prompt, or with what `split_known` gave. Raises `EngineError("invalid", …)` when it
    exceeds `MAX_FRAME_BYTES`."""
    g = generation
    parts = g.parts if rest is None else rest
    parsing = None if g.parsing is None else g.parsing.tools
    lent = None if base is None else (base.request_id, base.length, base.checksum, base.total)
    header = _encoder.encode((g.request_id, g.model, g.sampling, g.priority, g.cache_salt, parsing, lent))
    head = _head(Kind.OPEN, number, _U32.size + len(header) + sum(map(len, parts)))
    return b"".join((head, _U32.pack(len(header)), header, *parts))


def decode_open(body: bytes) -> tuple[Generation, Base | None]:
    """(the request with the ids that came, what they are the rest of). Raises `LinkProtocolError` when it is
    malformed."""
    try:
        end = _U32.size + _U32.unpack_from(body)[0]
        header = _header_decoder.decode(memoryview(body)[_U32.size : end])
    except (error, MsgspecError) as problem:
        raise LinkProtocolError("a malformed request header") from problem
    request_id, model, sampling, priority, salt, parsing, lent = header
    prompt = body[end:]
    if end > len(body) or len(prompt) % 4:
        raise LinkProtocolError("a prompt that is no list of 32-bit ids")
    base = None if lent is None else Base(*lent)
    if base is not None and base.length < 1:
        raise LinkProtocolError("a prompt that begins with nothing")
    how = None if parsing is None else Parsing(parsing)
    return Generation(request_id, model, (prompt,), sampling, priority, salt, parsing=how), base


def encode_chunk(number: int, chunk: Chunk) -> bytes:
    """Sampled ids. One id without anything else, by far the most frequent frame, is 14 bytes."""
    ids = chunk.ids
    flags = _FINISH_FLAGS[chunk.finish]
    bare = chunk.logprobs is None and chunk.deltas is None
    if bare and chunk.cached_tokens is None:
        if len(ids) == 1:
            return _ONE_ID.pack(_ONE_ID_BYTES, Kind.CHUNK, number, flags, ids[0])
        count = len(ids)
        return pack(f"<IBIB{count}I", _HEAD_BODY + 1 + 4 * count, Kind.CHUNK, number, flags, *ids)
    parts = [b""]
    if chunk.cached_tokens is not None:
        flags |= _CACHED
        parts.append(_U32.pack(chunk.cached_tokens))
    raw = pack(f"<{len(ids)}I", *ids)
    if bare:
        parts.append(raw)
    else:
        flags |= _EXTRAS
        logprobs = chunk.logprobs
        rows = None if logprobs is None else [(entry.token_id, entry.logprob, entry.top) for entry in logprobs]
        deltas = None if chunk.deltas is None else pack_deltas(chunk.deltas)
        parts += (_U32.pack(len(ids)), raw, _encoder.encode((rows, deltas)))
    parts[0] = bytes((flags,))
    return encode(Kind.CHUNK, number, b"".join(parts))


def decode_chunk(body: bytes) -> Chunk:
    """Sampled ids. Raises `LinkProtocolError` when the body is malformed."""
    try:
        if len(body) == _CHUNK_START.size and not body[0] & (_CACHED | _EXTRAS):
            flags, only = _CHUNK_START.unpack(body)
            return Chunk([only], _FINISHES[flags >> _FINISH_SHIFT])
        flags = body[0]
        position, cached, logprobs, deltas = 1, None, None, None
        if flags & _CACHED:
            cached = _U32.unpack_from(body, position)[0]
            position += _U32.size
        end = len(body)
        if flags & _EXTRAS:
            count = _U32.unpack_from(body, position)[0]
            position += _U32.size
            end = position + 4 * count
            if end > len(body):
                raise LinkProtocolError("a chunk shorter than its id count")
            rows, packed = _extras_decoder.decode(memoryview(body)[end:])
            logprobs = None if rows is None else [TokenLogprob(*row) for row in rows]
            deltas = None if packed is None else unpack_deltas(packed)
        return Chunk(unpack_ids(body[position:end]), _FINISHES[flags >> _FINISH_SHIFT], cached, logprobs, deltas)
    except (error, ValueError, IndexError, MsgspecError) as problem:
        raise LinkProtocolError("a malformed chunk") from problem


def encode_error(number: int, fault: EngineFault, message: str) -> bytes:
    """A stream or a question failed; nothing more comes for this number."""
    return encode(Kind.ERROR, number, _encoder.encode((fault, message)))


def decode_error(body: bytes) -> tuple[EngineFault, str]:
    """Fault and message. Raises `LinkProtocolError`."""
    try:
        return _error_decoder.decode(body)
    except MsgspecError as problem:
        raise LinkProtocolError("a malformed error") from problem


def encode_ask(number: int, question: int, guide: Guide | None = None) -> bytes:
    """A question; `guide` goes with CHECK. Raises `EngineError("invalid", …)` for a guide too large for a frame."""
    extra = b"" if guide is None else _encoder.encode((guide.kind, guide.value))
    return encode(Kind.ASK, number, bytes((question,)) + extra)


def decode_ask(body: bytes) -> tuple[int, Guide | None]:
    """Question and guide. Raises `LinkProtocolError`."""
    try:
        question = body[0]
        guide = Guide(*_guide_decoder.decode(memoryview(body)[1:])) if question == Question.CHECK else None
    except (IndexError, MsgspecError) as problem:
        raise LinkProtocolError("a malformed question") from problem
    if question not in (Question.LOAD, Question.HEALTH, Question.CHECK):
        raise LinkProtocolError(f"an unknown question, {question}")
    return question, guide


def encode_answer(number: int, load: Load) -> bytes:
    """The load, in answer to an ASK."""
    return encode(Kind.ANSWER, number, _LOAD.pack(load.running, load.waiting, load.kv_usage))


def decode_answer(body: bytes) -> Load:
    """The load. Raises `LinkProtocolError`."""
    try:
        return Load(*_LOAD.unpack(body))
    except error as problem:
        raise LinkProtocolError("a malformed answer") from problem


def merge(into: Chunk, later: Chunk) -> None:
    """Appends a chunk to the one before it, for a reader who is behind."""
    into.ids += later.ids
    into.finish = later.finish
    if into.cached_tokens is None:
        into.cached_tokens = later.cached_tokens
    if later.logprobs is not None:
        into.logprobs = later.logprobs if into.logprobs is None else into.logprobs + later.logprobs
    if later.deltas is not None:
        into.deltas = later.deltas if into.deltas is None else into.deltas + later.deltas
