"""What upstreams refuse, as errors of ours. Pure.

Clients get words of ours only: an upstream's own text may hold addresses, keys or pieces of a prompt (bugs.md O-54).
Sources: protocol.md section 5, cerebras.md, bugs.md O-52, O-53, O-89.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple

import orjson

from gateway.protocol.errors import TABLE
from inference.engine import EngineError, EngineFault

MAX_RETRY_AFTER_S = 86_400.0

_OVERFLOW = re.compile(
    r"context[ _](length|size|window)|maximum (model|sequence) length|reduce the length|(prompt|input) is too long",
    re.IGNORECASE,
)
_QUOTA = ("insufficient_quota", "payment_required", "billing_hard_limit_reached")
_WORD = re.compile(r"[A-Za-z0-9_.\-]{1,64}")
_PARAM = re.compile(r"[A-Za-z0-9_.\[\]]{1,64}")


class UpstreamError(EngineError):
    """An upstream did not do it. `code` is a row of the error table, for an answer before or after `response.created`;
    `status` and `word` are the upstream's own status and code, None and empty where it gave none."""

    def __init__(
        self,
        fault: EngineFault,
        code: str,
        message: str,
        retry_after_s: float | None = None,
        status: int | None = None,
        word: str = "",
    ) -> None:
        super().__init__(fault, message, retry_after_s)
        assert code in TABLE
        self.code = code
        self.status = status
        self.word = word


class Answer(NamedTuple):
    """What becomes of one status: whose fault it is, which error the client gets, in which words."""

    fault: EngineFault
    code: str
    message: str


_INVALID = Answer("invalid", "invalid_prompt", "The upstream refused this request as invalid")
_BROKEN = Answer("unavailable", "server_error", "The upstream failed; try again shortly")
_OVERFLOWN = Answer(
    "invalid",
    "context_length_exceeded",
    "This conversation is longer than the upstream model's context. Shorten it or start a new one",
)
_SPENT = Answer("unavailable", "insufficient_quota", "The upstream account of this model has no quota left")
_BUSY = Answer("overloaded", "engine_overloaded", "The upstream is overloaded; try again shortly")

ANSWERS: Mapping[int, Answer] = {
    # What is wrong with our key or address is no client's business, and another endpoint may do.
    401: Answer("unavailable", "server_error", "The upstream does not accept the gateway's credentials"),
    402: _SPENT,
    403: Answer("unavailable", "server_error", "The upstream does not accept the gateway's credentials"),
    404: Answer("unavailable", "model_not_found", "The upstream does not have this model now"),
    408: _BROKEN,
    409: _BROKEN,
    413: Answer("invalid", "request_too_large", "The request is larger than the upstream takes"),
    425: _BROKEN,
    429: Answer("overloaded", "rate_limit_exceeded", "The upstream's rate limit is reached; try again later"),
    # Not `server_is_overloaded`: Codex takes that for fatal (protocol.md section 5).
    503: _BUSY,
    529: _BUSY,
}
"""By status; others from 500 on are a broken upstream's, others below an invalid request's."""


STATUSES: Mapping[str, int] = {
    "invalid_request_error": 400,
    "invalid_prompt": 400,
    "context_length_exceeded": 400,
    "rate_limit_exceeded": 429,
    "insufficient_quota": 429,
    "server_is_overloaded": 503,
    "slow_down": 503,
    "engine_overloaded": 503,
    "empty_image_file": 400,
    "failed_to_download_image": 400,
}
"""By words for errors that come without one (protocol.md section 5): inside a stream, or of a failed response."""
_OUR_FAULT = re.compile(r"(invalid|image|unsupported)_\w+|\w+_policy(_violation)?")
"""More words for what is wrong with a request (openai 3.57.0, types/responses/response_error.py, and their like)."""


@dataclass(frozen=True, slots=True)
class Detail:
    """What an error body says that is safe to use: single words, never sentences. For logs."""

    code: str = ""
    type: str = ""
    param: str = ""
    overflow: bool = False


def refusal(status: int, headers: Mapping[str, str], body: bytes, wall: float) -> tuple[UpstreamError, Detail]:
    """The error for an answer other than 200. `wall` is the time of day (seconds since 1970)."""
    try:
        parsed = orjson.loads(body)
    except ValueError:
        parsed = None
    return _error(status, parsed, retry_after(headers, wall))


def stream_error(chunk: Mapping[str, Any], wall: float) -> tuple[UpstreamError, Detail] | None:
    """The error for a chunk that is an error object, None for any other. It carries its own status."""
    error = chunk.get("error")
    if not error and chunk.get("object") != "error" and chunk.get("type") != "error":
        return None
    inner = error if isinstance(error, dict) else {}
    given = (chunk.get("status"), chunk.get("status_code"), inner.get("status_code"), inner.get("code"))
    status = _status((*given, chunk.get("code"), inner.get("type")))
    headers = inner.get("headers")
    given_headers = headers.items() if isinstance(headers, dict) else ()
    return _error(status, chunk, retry_after({str(key).lower(): str(value) for key, value in given_headers}, wall))


def failure(error: Any) -> UpstreamError:
    """The error of a Response object that has failed."""
    inner = error if isinstance(error, dict) else {}
    return _error(_status((inner.get("code"),)), {"error": inner}, None)[0]


def retry_after(headers: Mapping[str, str], wall: float) -> float | None:
    """Seconds to wait, 0 to `MAX_RETRY_AFTER_S`, by `retry-after-ms` or `retry-after` (seconds or a date); None if
    neither makes sense. Names are lower case."""
    for name, scale in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name)
        if value is None:
            continue
        try:
            seconds = float(value) / scale
        except ValueError:
            try:
                seconds = parsedate_to_datetime(value).timestamp() - wall
            except (ValueError, TypeError, OverflowError):
                continue
        if not math.isnan(seconds):
            return min(max(seconds, 0.0), MAX_RETRY_AFTER_S)
    return None


def unreachable() -> UpstreamError:
    """No connection."""
    return UpstreamError("unavailable", "engine_unavailable", "The upstream can't be reached; try again shortly.", 1.0)


def silent() -> UpstreamError:
    """A deadline has passed without a byte."""
    return UpstreamError("unavailable", "engine_unavailable", "The upstream did not answer in time.", 1.0)


def broken_off() -> UpstreamError:
    """The stream ended before the answer did."""
    return UpstreamError("unavailable", "server_error", "The upstream broke off before the answer was complete.")


def unreadable() -> UpstreamError:
    """The upstream sent what is no answer."""
    return UpstreamError("unavailable", "server_error", "The upstream sent an answer that can't be read.")


def filtered() -> UpstreamError:
    """A content filter ended the answer. To send it again is no use."""
    return UpstreamError("invalid", "invalid_prompt", "The upstream's content filter ended the answer.")


def _error(status: int, body: Any, wait: float | None) -> tuple[UpstreamError, Detail]:
    detail = _detail(body)
    answer = ANSWERS.get(status) or (_INVALID if 400 <= status < 500 else _BROKEN)
    if detail.overflow and status in (400, 413, 422):
        answer = _OVERFLOWN
    elif status == 429 and (detail.code in _QUOTA or detail.type in _QUOTA):
        answer = _SPENT
    message = answer.message
    if answer is _INVALID and detail.param:
        message += f" (its word for the place: {detail.param})"
    if answer.fault == "invalid" or answer is _SPENT:
        wait = None
    elif wait is None and (usual := TABLE[answer.code].retry_after_s) is not None:
        wait = float(usual)
    return UpstreamError(answer.fault, answer.code, f"{message}.", wait, status, detail.code), detail


def _status(given: Sequence[Any]) -> int:
    """The first of these that is a status, or a word that means one."""
    for value in given:
        if isinstance(value, int) and 400 <= value < 600:
            return value
        if isinstance(value, str) and value in STATUSES:
            return STATUSES[value]
        if isinstance(value, str) and _OUR_FAULT.fullmatch(value):
            return 400
    return 500


def _detail(body: Any) -> Detail:
    """The known forms of error bodies: `{"error": {…}}` (OpenAI) and the same without the wrapper (Cerebras, vLLM)."""
    if not isinstance(body, dict):
        return Detail()
    error = body.get("error", body)
    if not isinstance(error, dict):
        return Detail(overflow=isinstance(error, str) and _OVERFLOW.search(error) is not None)
    text = error.get("message")
    overflow = isinstance(text, str) and _OVERFLOW.search(text) is not None
    code = _single(error.get("code"), _WORD)
    return Detail(
        code,
        _single(error.get("type"), _WORD),
        _single(error.get("param"), _PARAM),
        overflow or _OVERFLOW.search(code) is not None,
    )


def _single(value: Any, form: re.Pattern[str]) -> str:
    return value if isinstance(value, str) and form.fullmatch(value) else ""
