"""Server-sent events, as upstreams send them: bytes in, the data of whole events out. Pure."""

from __future__ import annotations

MAX_EVENT_BYTES = 16 * 1024 * 1024

_MARK = b"\xef\xbb\xbf"


class EventTooLong(ValueError):
    """An event above `MAX_EVENT_BYTES`: what sends it is broken."""


class EventReader:
    """Reads one stream. Pieces may be cut anywhere, in the middle of a line or of a line's end too.

    All three line ends of the standard are known; comments and every field but `data` are left out. What stands behind
    the last blank line is no event and is never delivered.
    """

    __slots__ = ("_begun", "_cr", "_pieces", "_size")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._size = 0
        self._cr = b""  # a carriage return at the end of a piece, which a newline may follow
        self._begun = False

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that this piece completes. Raises `EventTooLong`."""
        if not self._size and piece.endswith(b"\n\n") and piece.startswith(b"data: ") and not self._cr:
            only = piece[6:-2]  # one event in one piece, as it is mostly
            if b"\n" not in only and b"\r" not in only:
                self._begun = True
                return [only]
        if self._cr or b"\r" in piece:
            piece = self._plain(piece)
        self._pieces.append(piece)
        self._size += len(piece)
        if b"\n" in piece:
            # Joined only when a line ends: an event in a thousand pieces must not be copied a thousand times.
            blocks = self._whole().split(b"\n\n")
            rest = blocks.pop()
            self._pieces, self._size = [rest], len(rest)
            found = [data for block in blocks if (data := _data(block)) is not None]
        else:
            found = []
        if self._size > MAX_EVENT_BYTES:
            raise EventTooLong(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return found

    def _plain(self, piece: bytes) -> bytes:
        """With newlines only. A carriage return at the end waits for what follows."""
        piece = self._cr + piece
        self._cr = b"\r" if piece.endswith(b"\r") else b""
        return piece[: len(piece) - len(self._cr)].replace(b"\r\n", b"\n").replace(b"\r", b"\n")

    def _whole(self) -> bytes:
        text = b"".join(self._pieces)
        if not self._begun:
            self._begun = True
            text = text.removeprefix(_MARK)
        return text


def _data(block: bytes) -> bytes | None:
    """The data of one event, its lines joined; None for an event without any."""
    if block.startswith(b"data: ") and b"\n" not in block:  # nearly all of them
        return block[6:]
    lines = [line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
