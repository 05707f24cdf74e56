"""Compressed bodies: every coding, every bound, and what is broken in every place. The compressors are the judges."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Callable

import httpx
import pytest
import zstandard

from gateway.http_body import SUPPORTED
from tests.support.actors import says
from tests.support.gateway import gateway

BODY = json.dumps({"model": "m", "input": "x " * 20_000}).encode()
SMALL = {"server": {"request_max_bytes": 65536}}


def raw_deflate(data: bytes) -> bytes:
    squeezer = zlib.compressobj(wbits=-15)
    return squeezer.compress(data) + squeezer.flush()


def zstd_stream(data: bytes) -> bytes:
    """Without the content's size in the header, as a client that streams sends it."""
    squeezer = zstandard.ZstdCompressor().compressobj()
    return squeezer.compress(data) + squeezer.flush()


def two_frames(compress: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: compress(data[:1000]) + compress(data[1000:])


CODINGS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    "gzip": ("gzip", gzip.compress),
    "x-gzip": ("x-gzip", gzip.compress),
    "gzip of two members": ("GZIP", two_frames(gzip.compress)),
    "deflate": ("deflate", zlib.compress),
    "deflate without a header": ("deflate", raw_deflate),
    "zstd": ("zstd", zstandard.ZstdCompressor().compress),
    "zstd without a size": ("zstd", zstd_stream),
    "zstd of two frames": ("zstd", two_frames(zstandard.ZstdCompressor().compress)),
    "identity": ("identity", bytes),
    "nothing": ("", bytes),
    "identity beside one": ("identity, gzip", gzip.compress),
}


async def post(body: bytes, coding: str, settings: dict[str, dict[str, int]] | None = None) -> httpx.Response:
    async with gateway(says("ok"), settings) as running, httpx.AsyncClient(base_url=running.http) as client:
        return await client.post("/responses", content=body, headers={"content-encoding": coding})


@pytest.mark.parametrize("name", CODINGS)
async def test_each_coding_is_read(name: str) -> None:
    coding, compress = CODINGS[name]
    answer = await post(compress(BODY), coding)

    assert answer.status_code == 200
    assert answer.json()["usage"]["input_tokens"] > 10_000


@pytest.mark.parametrize(
    ("coding", "status"),
    [("br", 415), ("compress", 415), ("gzip, gzip", 415), ("zstd, gzip", 415), ("gzip;q=1", 415), ("x" * 4000, 415)],
)
async def test_what_is_not_supported_says_what_is(coding: str, status: int) -> None:
    answer = await post(BODY, coding)
    error = answer.json()["error"]

    assert (answer.status_code, error["code"]) == (status, "unsupported_media_type")
    assert "," in coding or all(name in error["message"] for name in SUPPORTED)


@pytest.mark.parametrize("name", [name for name in CODINGS if "identity" not in name and name != "nothing"])
async def test_what_is_broken_is_refused(name: str) -> None:
    coding, compress = CODINGS[name]
    good = compress(BODY)
    broken = {
        "garbage": b"\x00garbage" * 100,
        "cut short": good[:-3],
        "cut to a byte": good[:1],
        "changed": good[:20] + bytes([good[20] ^ 255]) + good[21:],
        "trailing": good + b"garbage",
    }
    async with gateway(says("ok")) as running, httpx.AsyncClient(base_url=running.http) as client:
        for where, body in broken.items():
            answer = await client.post("/responses", content=body, headers={"content-encoding": coding})

            assert answer.status_code == 400, where
            assert answer.json()["error"]["code"] in ("invalid_value", "invalid_json"), where


ZEROS = b"\x00" * (64 << 20)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", gzip.compress(ZEROS) * 10),
        ("deflate", zlib.compress(ZEROS * 4)),
        ("zstd", zstandard.ZstdCompressor().compress(ZEROS) * 400),  # 25 GiB
    ],
)
async def test_a_bomb_is_refused_without_going_off(coding: str, body: bytes) -> None:
    assert len(body) < 1 << 20
    answer = await post(body, coding, {"server": {"request_max_bytes": 1 << 20}})

    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize("coding", ["gzip", "zstd", "deflate"])
@pytest.mark.parametrize("extra", [0, 1])
async def test_the_limit_is_exact_for_what_it_becomes(coding: str, extra: int) -> None:
    start = b'{"model":"m","input":"'
    body = start + b"x" * (65536 + extra - len(start) - 2) + b'"}'
    answer = await post(CODINGS[coding][1](body), coding, SMALL)

    assert answer.status_code == (413 if extra else 200)


async def test_an_announced_length_beyond_the_limit_is_refused_unread() -> None:
    async with gateway(says("ok"), SMALL) as running, httpx.AsyncClient(base_url=running.http) as client:
        answer = await client.post("/responses", content=b"x" * 65537)

    assert answer.status_code == 413
