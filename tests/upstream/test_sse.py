"""Events come out whole and in order, however the bytes were cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.upstream import sse
from inference.upstream.sse import EventReader, EventTooLong

TEXT = st.text(st.characters(exclude_characters="\r\n\x00", exclude_categories=["Cs"]), max_size=12)
NOISE = st.sampled_from([": keep-alive", "event: chunk", "id: 7", "retry: 10", "data2: no", ""])


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, list[bytes]]:
    """A stream with the standard's three line ends, and the data of its events."""
    end = draw(st.sampled_from(["\n", "\r\n", "\r"]))
    out, expected = [], []
    for lines in draw(st.lists(st.lists(TEXT, min_size=1, max_size=3), max_size=5)):
        blank = draw(st.sampled_from(["data:", "data: "]))
        # Without the blank behind the colon, a line may not begin with one: it would be taken for that.
        given_lines = [line.lstrip(" ") if blank == "data:" else line for line in lines]
        noise = draw(NOISE)
        out += [noise] if noise else []
        out += [blank + line for line in given_lines] + [""]
        expected.append("\n".join(given_lines).encode())
    text = "".join(line + end for line in out)
    return text.encode(), expected


@given(streams(), st.lists(st.integers(0, 400), max_size=8), st.booleans())
@settings(max_examples=150)
def test_any_cut_gives_the_same_events(stream: tuple[bytes, list[bytes]], cuts: list[int], marked: bool) -> None:
    text, expected = stream
    text = b"\xef\xbb\xbf" + text if marked else text
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    reader = EventReader()
    found = [event for a, b in pairwise(edges) for event in reader.feed(text[a:b])]
    found += reader.feed(b": a comment\n")  # what a held carriage return waits for
    assert found == expected


def test_every_byte_by_itself() -> None:
    reader = EventReader()
    text = b'data: {"a":1}\r\n\r\n: ping\r\n\r\ndata: [DONE]\r\n\r\ndata: cut'
    assert [event for at in range(len(text)) for event in reader.feed(text[at : at + 1])] == [b'{"a":1}', b"[DONE]"]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 1000)
    reader = EventReader()
    for _ in range(100):
        reader.feed(b"0123456789")
    with pytest.raises(EventTooLong):
        reader.feed(b"0")
