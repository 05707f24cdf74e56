"""The frame codec by itself: everything that can be sent comes back, however the bytes are cut; nothing else does."""

from __future__ import annotations

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Logprob,
    MessageStart,
    ReasoningDelta,
    ReasoningEnd,
    RefusalDelta,
    SummaryDelta,
    TextDelta,
)
from inference import linkframes as frames
from inference.engine import Chunk, EngineError, Generation, Guide, Load, Parsing, Prefix, Sampling, TokenLogprob
from inference.linkframes import FrameSplitter, Kind, LinkProtocolError, Question
from inference.tokenizer import pack_ids

ids = st.integers(0, 2**32 - 1)
logprob = st.floats(max_value=0.0, allow_nan=False, allow_infinity=True)
token_logprobs = st.builds(TokenLogprob, ids, logprob, st.lists(st.tuples(ids, logprob), max_size=3).map(tuple))
text_logprobs = st.builds(
    Logprob, st.binary(max_size=4), logprob, st.lists(st.tuples(st.binary(max_size=4), logprob), max_size=2).map(tuple)
)
deltas = st.one_of(
    st.builds(TextDelta, st.text(min_size=1), st.lists(text_logprobs, max_size=2).map(tuple)),
    st.builds(RefusalDelta, st.text()),
    st.builds(ReasoningDelta, st.text()),
    st.builds(ReasoningEnd, st.text()),
    st.builds(SummaryDelta, st.text(), st.integers(0, 99)),
    st.builds(CallDelta, st.text()),
    st.builds(CallStart, st.sampled_from(["function", "custom"]), st.text(), st.none() | st.text()),
    st.builds(MessageStart, st.sampled_from([None, "commentary", "final_answer"])),
    st.just(CallEnd()),
)
chunks = st.builds(
    Chunk,
    st.lists(ids, max_size=40),
    st.sampled_from([None, "stop", "length", "abort"]),
    st.none() | ids,
    st.none() | st.lists(token_logprobs, max_size=4),
    st.none() | st.lists(deltas, max_size=4),
)
guides = st.builds(Guide, st.sampled_from(["json", "regex", "grammar", "structural_tag"]), st.text())
samplings = st.builds(
    Sampling,
    st.integers(1, 2**31),
    st.floats(0, 2),
    st.floats(0, 1),
    st.lists(ids, max_size=4).map(tuple),
    st.none() | st.integers(0, 20),
    st.none() | guides,
)
generations = st.builds(
    Generation,
    st.text(),
    st.text(),
    st.lists(st.lists(ids, max_size=20).map(pack_ids), max_size=4).map(tuple),
    samplings,
    st.integers(-100, 100),
    st.none() | st.text(),
    st.none(),
    st.none() | st.builds(Parsing, st.text()),
)


@given(chunks)
def test_a_chunk_comes_back(chunk: Chunk) -> None:
    ((kind, number, body),) = FrameSplitter().feed(frames.encode_chunk(7, chunk))
    assert (kind, number) == (Kind.CHUNK, 7)
    assert frames.decode_chunk(body) == chunk


@given(generations)
def test_a_generation_comes_back(generation: Generation) -> None:
    ((kind, number, body),) = FrameSplitter().feed(frames.encode_open(9, generation))
    assert (kind, number) == (Kind.OPEN, 9)
    assert frames.decode_open(body) == (replace(generation, parts=(generation.prompt,)), None)


@given(generations, st.text(), st.integers(-2, 90))
def test_what_is_known_of_a_prompt_does_not_travel(generation: Generation, name: str, length: int) -> None:
    generation = replace(generation, known=Prefix(name, length))
    base, rest = frames.split_known(generation)
    ((_, _, body),) = FrameSplitter().feed(frames.encode_open(9, generation, base, rest))
    got, got_base = frames.decode_open(body)
    prompt, total = generation.prompt, generation.prompt_tokens
    if 0 < length <= total:
        assert got_base == base == frames.Base(name, length, zlib.crc32(prompt[: 4 * length]), total)
        assert got.prompt == prompt[4 * length :]
    else:  # a hint that makes no sense
        assert got_base is None
        assert got.prompt == prompt
    assert got == replace(generation, parts=got.parts, known=None)


@given(guides)
def test_a_question_comes_back(guide: Guide) -> None:
    questions = [(Question.LOAD, None), (Question.HEALTH, None), (Question.CHECK, guide)]
    stream = b"".join(frames.encode_ask(n, *question) for n, question in enumerate(questions))
    assert [frames.decode_ask(body) for _, _, body in FrameSplitter().feed(stream)] == questions


@pytest.mark.parametrize("body", [b"", b"\x00", b"\x03", b"\x04"])
def test_what_is_no_question_is_an_error(body: bytes) -> None:
    with pytest.raises(LinkProtocolError):
        frames.decode_ask(body)


@settings(deadline=None)  # drawing each cut takes as long as the machine is busy
@given(st.lists(chunks, max_size=8), st.data())
def test_the_cuts_of_the_byte_stream_do_not_matter(sent: list[Chunk], data: st.DataObject) -> None:
    stream = b"".join(frames.encode_chunk(n, chunk) for n, chunk in enumerate(sent))
    splitter = FrameSplitter()
    got = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        got += splitter.feed(stream[:size])
        stream = stream[size:]
    assert [number for _, number, _ in got] == list(range(len(sent)))
    assert [frames.decode_chunk(body) for _, _, body in got] == sent


@given(st.binary(max_size=60))
def test_no_bytes_break_a_decoder(body: bytes) -> None:
    for decode in (
        frames.decode_chunk,
        frames.decode_open,
        frames.decode_error,
        frames.decode_answer,
        frames.decode_ask,
    ):
        try:
            decode(body)
        except LinkProtocolError:
            continue


@given(st.lists(chunks, min_size=1, max_size=6))
def test_merged_chunks_hold_all_there_was(several: list[Chunk]) -> None:
    expected_ids = [token for chunk in several for token in chunk.ids]
    with_logprobs = [chunk.logprobs for chunk in several if chunk.logprobs is not None]
    expected = [entry for part in with_logprobs for entry in part] if with_logprobs else None
    with_deltas = [chunk.deltas for chunk in several if chunk.deltas is not None]
    expected_deltas = [delta for part in with_deltas for delta in part] if with_deltas else None
    first_cached = next((chunk.cached_tokens for chunk in several if chunk.cached_tokens is not None), None)
    merged = several[0]
    for later in several[1:]:
        frames.merge(merged, later)
    assert merged == Chunk(expected_ids, several[-1].finish, first_cached, expected, expected_deltas)


def test_one_id_takes_14_bytes() -> None:
    assert len(frames.encode_chunk(1, Chunk([49_000]))) == 14


def test_a_long_prompt_arrives_in_pieces_without_a_copy_of_all_for_each() -> None:
    generation = Generation("r", "m", (b"\x01\x02\x00\x00" * 1_000_000,), Sampling(1))
    stream = frames.encode_open(1, generation)
    splitter = FrameSplitter()
    got = [frame for start in range(0, len(stream), 65536) for frame in splitter.feed(stream[start : start + 65536])]
    assert frames.decode_open(got[0][2]) == (generation, None)


@pytest.mark.parametrize("length", [0, 4, 65, 2**32 - 1])
def test_a_length_out_of_bounds_is_an_error_before_anything_is_kept(length: int) -> None:
    with pytest.raises(LinkProtocolError):
        FrameSplitter(limit=64).feed(struct.pack("<IBI", length, Kind.PING, 0))


def test_a_request_too_large_for_a_frame_is_refused_where_it_is_made() -> None:
    with pytest.raises(EngineError) as refused:
        frames.encode_open(1, Generation("r", "m", (bytes(frames.MAX_FRAME_BYTES),), Sampling(1)))
    assert refused.value.fault == "invalid"


def test_a_prompt_must_be_whole_ids() -> None:
    _, _, body = FrameSplitter().feed(frames.encode_open(1, Generation("r", "m", (b"abc",), Sampling(1))))[0]
    with pytest.raises(LinkProtocolError):
        frames.decode_open(body)


def test_hello_error_and_answer_come_back() -> None:
    splitter = FrameSplitter()
    hello, error, answer = splitter.feed(
        frames.encode_hello("s3cret", version=5)
        + frames.encode_error(2, "overloaded", "later")
        + frames.encode_answer(3, Load(1, 2, 0.5))
    )
    assert frames.decode_hello(hello[2]) == (5, b"s3cret")
    assert frames.decode_error(error[2]) == ("overloaded", "later")
    assert frames.decode_answer(answer[2]) == Load(1, 2, 0.5)


@pytest.mark.parametrize("body", [b"", b"GET / HTTP/1.1\r\n", frames.MAGIC, frames.MAGIC + b"\x01"])
def test_what_is_no_hello_is_an_error(body: bytes) -> None:
    with pytest.raises(LinkProtocolError):
        frames.decode_hello(body)
