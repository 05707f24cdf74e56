"""Every refusal of an upstream becomes a row of the error table, in words of ours."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gateway.protocol.errors import TABLE
from inference.upstream.errors import MAX_RETRY_AFTER_S, refusal, retry_after, stream_error
from tests.support.upstreams import SAFE_TEXT

NOW = 1_796_000_000.0
SECRET = "/srv/models/x at 0x7f12ab, https://10.0.0.7:8000, key csk-123456, the user said: my password is hunter2"


@pytest.mark.parametrize(
    ("status", "fault", "code"),
    [
        (400, "invalid", "invalid_prompt"),
        (401, "unavailable", "server_error"),
        (402, "unavailable", "insufficient_quota"),
        (403, "unavailable", "server_error"),
        (404, "unavailable", "model_not_found"),
        (405, "invalid", "invalid_prompt"),
        (408, "unavailable", "server_error"),
        (413, "invalid", "request_too_large"),
        (422, "invalid", "invalid_prompt"),
        (429, "overloaded", "rate_limit_exceeded"),
        (500, "unavailable", "server_error"),
        (502, "unavailable", "server_error"),
        (503, "overloaded", "engine_overloaded"),
        (504, "unavailable", "server_error"),
        (529, "overloaded", "engine_overloaded"),
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_statuses(status: int, fault: str, code: str, wrapped: bool) -> None:
    inner = {"message": SECRET, "type": "some_type", "param": SECRET, "code": SECRET}
    body = json.dumps({"error": inner} if wrapped else inner).encode()
    error, detail = refusal(status, {}, body, NOW)
    assert (error.fault, error.code, error.status) == (fault, code, status)
    assert error.code in TABLE
    assert SAFE_TEXT.fullmatch(error.message)
    assert not any(word in error.message for word in ("hunter2", "csk", "srv", "10.0.0.7", "0x7f"))
    assert (detail.code, detail.type, detail.param) == ("", "some_type", "")


@pytest.mark.parametrize("body", [b"", b"<html>Bad Gateway</html>", b"[]", b"null", b'{"error": "no"}', b"\xff\xfe"])
def test_bodies_that_say_nothing(body: bytes) -> None:
    assert refusal(502, {}, body, NOW)[0].code == "server_error"


@pytest.mark.parametrize(
    "error",
    [
        # vLLM, OpenAI, Cerebras, llama.cpp (bugs.md O-52, O-53)
        {"message": "This model's maximum context length is 4096 tokens. However, you requested 5000.", "code": 400},
        {"message": "…", "code": "context_length_exceeded", "type": "invalid_request_error"},
        {"message": "Please reduce the length of the messages or completion. Current length is 9 while limit is 8"},
        {"message": "the request exceeds the available context size", "type": "exceed_context_size_error"},
    ],
)
@pytest.mark.parametrize("wrapped", [True, False])
def test_context_overflow_in_all_words(error: dict[str, Any], wrapped: bool) -> None:
    found, _ = refusal(400, {"retry-after": "3"}, json.dumps({"error": error} if wrapped else error).encode(), NOW)
    assert (found.fault, found.code, found.retry_after_s) == ("invalid", "context_length_exceeded", None)


def test_the_place_of_a_fault_is_told_if_it_is_a_word() -> None:
    body = json.dumps({"error": {"message": SECRET, "param": "messages[3].content", "code": "x"}}).encode()
    assert "messages[3].content" in refusal(400, {}, body, NOW)[0].message


def test_spent_quota_is_no_rate_limit() -> None:
    body = json.dumps({"error": {"message": "", "code": "insufficient_quota"}}).encode()
    found, _ = refusal(429, {"retry-after": "3"}, body, NOW)
    assert (found.fault, found.code, found.retry_after_s) == ("unavailable", "insufficient_quota", None)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({"retry-after": "7"}, 7.0),
        ({"retry-after": "0.25"}, 0.25),
        ({"retry-after-ms": "1500", "retry-after": "9"}, 1.5),
        ({"retry-after-ms": "soon", "retry-after": "9"}, 9.0),
        ({"retry-after": "Sun, 29 Nov 2026 22:13:30 GMT"}, 10.0),
        ({"retry-after": "Sun, 29 Nov 2020 22:13:30 GMT"}, 0.0),
        ({"retry-after": "-5"}, 0.0),
        ({"retry-after": "inf"}, MAX_RETRY_AFTER_S),
        ({"retry-after": "nan"}, None),
        ({"retry-after": "later"}, None),
        ({}, None),
    ],
)
def test_retry_after(headers: dict[str, str], expected: float | None) -> None:
    assert retry_after(headers, 1_795_990_400.0) == expected


def test_rate_limits_always_come_with_advice() -> None:
    assert refusal(429, {"retry-after": "12"}, b"", NOW)[0].retry_after_s == 12
    assert refusal(429, {}, b"", NOW)[0].retry_after_s == TABLE["rate_limit_exceeded"].retry_after_s


@pytest.mark.parametrize(
    ("chunk", "code", "fault"),
    [
        ({"error": {"message": SECRET, "code": "x"}, "status_code": 503}, "engine_overloaded", "overloaded"),
        ({"error": {"message": SECRET}, "status_code": 429}, "rate_limit_exceeded", "overloaded"),
        ({"error": {"message": SECRET, "code": 429}}, "rate_limit_exceeded", "overloaded"),
        ({"error": {"message": SECRET}}, "server_error", "unavailable"),
        ({"error": SECRET}, "server_error", "unavailable"),
        ({"object": "error", "message": "reduce the length", "code": 400}, "context_length_exceeded", "invalid"),
    ],
)
def test_chunks_that_are_errors(chunk: dict[str, Any], code: str, fault: str) -> None:
    found = stream_error(chunk, NOW)
    assert found is not None
    assert (found[0].code, found[0].fault) == (code, fault)
    assert SAFE_TEXT.fullmatch(found[0].message)


@pytest.mark.parametrize("chunk", [{"choices": []}, {"error": None, "choices": []}, {"error": {}}, {}])
def test_chunks_that_are_none(chunk: dict[str, Any]) -> None:
    assert stream_error(chunk, NOW) is None
