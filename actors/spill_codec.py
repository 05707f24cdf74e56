"""What a spill file holds: frames of jobs, as bytes. Pure.

    magic, 8 bytes | salt, 8 bytes | frames
    frame: length, 4 bytes | checksum, 4 bytes | state, 1 byte | blob

The checksum is the CRC-32 of length and blob, so that a frame that was cut off is known as such: reading ends there.
The state is outside of it, as it is changed in place once a job is durable. A blob is one of `actors.store.encryption`,
bound to its file's salt and its offset. It holds a list: the kind, then the fields by position as in
`actors.store.records`. The long texts that requests repeat are frames of their own, one for each text in a file; a
response names them by their offset.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from actors.conversation import Response
from actors.store.encryption import BlobCodec, Place
from actors.store.errors import Unreadable
from actors.store.jobs import (
    DeleteConversation,
    DeleteItem,
    DeleteResponse,
    Job,
    PutConversation,
    PutItems,
    PutResponse,
    PutUsage,
)
from actors.store.records import (
    EchoTexts,
    SplitBody,
    dump,
    items_from_lists,
    items_to_lists,
    join_body,
    parse,
    split_body,
    turn_from_list,
    turn_to_list,
)
from actors.stored import StoredResponse

MAGIC = b"LMPSPIL1"
"""The last byte is the layout's number."""
_UNFINISHED = frozenset(MAGIC[:length] for length in range(len(MAGIC)))
"""What a power cut may leave of it, before zeros."""
SALT_BYTES = 8
HEADER_BYTES = len(MAGIC) + SALT_BYTES
WAITING, DONE, TEXT = 0, 1, 2
"""States: a job that is not known to be durable, one that is, a text that responses name."""

_FRAME = struct.Struct("<IIB")
_LENGTH = struct.Struct("<I")
STATE_AT = _FRAME.size - 1
"""Where in a frame its state is."""

TEXT_AT = 1
"""Where in a response's list the offset of its text is, None without one."""
_RESPONSE, _ITEMS = 0, 1
_PLAIN: Mapping[type, tuple[int, tuple[str, ...]]] = {
    DeleteResponse: (2, ("tenant", "id")),
    PutUsage: (
        3,
        (
            "tenant",
            "id",
            "key",
            "model",
            "status",
            "created_at",
            "input_tokens",
            "cached_tokens",
            "output_tokens",
            "reasoning_tokens",
            "first_token_ms",
            "total_ms",
        ),
    ),
    PutConversation: (4, ("tenant", "id", "owner", "created_at", "metadata", "expires_at")),
    DeleteItem: (5, ("tenant", "conversation_id", "owner", "item_id", "head", "rendered")),
    DeleteConversation: (6, ("tenant", "id", "owner")),
}
"""Number and fields of the jobs that are written as they are. As with records, new fields go to the end."""
_PLAIN_BY_NUMBER: Mapping[int, tuple[Callable[..., Job], tuple[str, ...]]] = {
    number: (kind, names) for kind, (number, names) in _PLAIN.items()
}
_DAMAGED = (ValueError, TypeError, KeyError, IndexError, msgspec.MsgspecError)

Key = tuple[str, str]
"""(tenant, response id)."""


class Frame(NamedTuple):
    """One frame of a file, at `offset`."""

    offset: int
    state: int
    blob: bytes


class Frames(NamedTuple):
    """A file's frames in order. `torn`: how many bytes at its end are no whole frame."""

    salt: bytes
    frames: list[Frame]
    torn: int


class FrameCodec:
    """Packs and opens the blobs of frames. They are not compressed: a file lives for milliseconds."""

    def __init__(self, keys: Sequence[bytes]) -> None:
        self._codec = BlobCodec(keys)

    def frame(self, salt: bytes, offset: int, state: int, content: Any) -> bytes:
        """The bytes to write at `offset`; `content` is for `dump`."""
        blob = self._codec.pack(_place(salt, offset), dump(content), compress=False)
        length = _LENGTH.pack(len(blob))
        return _FRAME.pack(len(blob), zlib.crc32(blob, zlib.crc32(length)), state) + blob

    def open(self, salt: bytes, frame: Frame) -> Any:
        """The content. Raises `Unreadable`."""
        data = self._codec.open(_place(salt, frame.offset), frame.blob)
        try:
            return parse(data)
        except _DAMAGED:
            raise Unreadable("permanent", "A frame of a spill file is damaged.") from None


def read_frames(data: bytes) -> Frames:
    """The frames of a whole file. One that its writer did not finish has fewer, or none. Raises `Unreadable` for a file
    of another layout."""
    if len(data) < HEADER_BYTES or data[: len(MAGIC)].rstrip(b"\0") in _UNFINISHED:
        return Frames(b"", [], len(data))
    if not data.startswith(MAGIC):
        raise Unreadable("permanent", "A spill file has another layout.")
    frames: list[Frame] = []
    at = HEADER_BYTES
    while at + _FRAME.size <= len(data):
        length, checksum, state = _FRAME.unpack_from(data, at)
        blob = data[at + _FRAME.size : at + _FRAME.size + length]
        if len(blob) < length or zlib.crc32(blob, zlib.crc32(_LENGTH.pack(length))) != checksum:
            break
        frames.append(Frame(at, state, blob))
        at += _FRAME.size + length
    return Frames(data[len(MAGIC) : HEADER_BYTES], frames, len(data) - at)


def job_to_list(job: Job, texts: EchoTexts, *, with_turn: bool) -> tuple[list[Any], str]:
    """A job for `dump` and the long text that its object repeats, or "": the caller keeps that once in the file, and
    its offset at `TEXT_AT` of the list. `with_turn`: whether a response can be continued."""
    if isinstance(job, PutResponse):
        return _response_to_list(job, texts, with_turn=with_turn)
    if isinstance(job, PutItems):
        items = items_to_lists(job.items)
        return [_ITEMS, job.tenant, job.conversation_id, job.owner, items, job.head, job.rendered], ""
    number, names = _PLAIN[type(job)]
    values = [getattr(job, name) for name in names]
    return [number, *(dict(value) if isinstance(value, Mapping) else value for value in values)], ""


class SpilledResponse:
    """A response as a frame has it: what it continues must be found before it is a job again."""

    __slots__ = ("_fields", "_text", "key", "parent")

    def __init__(self, raw: Sequence[Any], text_at: Callable[[int], str]) -> None:
        text_offset, tenant, response_id, parent_id, *self._fields = raw
        self.key: Key = tenant, response_id
        self.parent: Key | None = None if parent_id is None else (tenant, parent_id)
        """Whose turn its own goes behind; None if it begins a conversation or can't be continued."""
        self._text = "" if text_offset is None else text_at(text_offset)

    def job(self, parent: Response | None, *, severed: bool = False) -> PutResponse:
        """The job again. `severed`: what it continues can't be found, so that it can be read only. Raises
        `Unreadable`."""
        try:
            return self._job(parent, severed=severed)
        except _DAMAGED:
            raise Unreadable("permanent", "A response in a spill file is damaged.") from None

    def _job(self, parent: Response | None, *, severed: bool) -> PutResponse:
        tenant, response_id = self.key
        turn, status, model, created_at, expires_at, pieces, background, held, asked, given = self._fields[:10]
        node = None if severed or turn is None else turn_from_list(turn, parent)
        if isinstance(given, list):
            items = items_from_lists(given)
        else:
            items = node.items[:given] if node is not None else items_from_lists(turn[1][:given])
        body = join_body(SplitBody(pieces, self._text))
        record = StoredResponse(response_id, body, None, background, items, node, len(body) + held, model=asked)
        return PutResponse(tenant, record, status, model, created_at, expires_at)


Spilled = SpilledResponse | Job


def spilled_from_list(raw: Sequence[Any], text_at: Callable[[int], str]) -> Spilled:
    """The inverse of `job_to_list`; `text_at` gives the text in the frame at an offset. Raises `Unreadable`."""
    try:
        kind = raw[0]
        if kind == _RESPONSE:
            return SpilledResponse(raw[1:], text_at)
        if kind == _ITEMS:
            tenant, conversation_id, owner, items, head, rendered = raw[1:7]
            return PutItems(tenant, conversation_id, owner, items_from_lists(items), head, rendered)
        make, names = _PLAIN_BY_NUMBER[kind]
        return make(**dict(zip(names, raw[1:], strict=False)))
    except _DAMAGED:
        raise Unreadable("permanent", "A job in a spill file is damaged.") from None


def _response_to_list(job: PutResponse, texts: EchoTexts, *, with_turn: bool) -> tuple[list[Any], str]:
    record = job.record
    split = split_body(record.own, record.echo, texts)
    node = record.node if with_turn else None
    count = len(record.given)
    fields = [
        _RESPONSE,
        None,
        job.tenant,
        record.id,
        None if node is None or node.parent is None else node.parent.id,
        None if node is None else turn_to_list(node),
        job.status,
        job.model,
        job.created_at,
        job.expires_at,
        split.pieces,
        record.background,
        record.size - len(record.own),
        record.model,
        count if node is not None and node.items[:count] == record.given else items_to_lists(record.given),
    ]
    return fields, split.shared


def _place(salt: bytes, offset: int) -> Place:
    return Place("spill", "frame", salt.hex(), str(offset))
