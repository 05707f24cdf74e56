"""What every HTTP answer of the API has: an `x-request-id`, and for refusals the JSON of `protocol.errors`."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from gateway.protocol.errors import ApiError
from gateway.refusals import refusal_headers

log = logging.getLogger(__name__)


def request_id() -> str:
    """A new one."""
    return f"req_{secrets.token_hex(12)}"


def answer(value: Any, status: int = 200) -> Response:
    """A value as JSON; text is JSON already."""
    body = value.encode() if isinstance(value, str) else orjson.dumps(value)
    return Response(body, status, {"x-request-id": request_id()}, media_type="application/json")


async def refused(_: Request, error: Exception) -> Response:
    """A handler of Starlette's for `ApiError`."""
    assert isinstance(error, ApiError)
    return _error(error)


async def not_routed(request: Request, error: Exception) -> Response:
    """A handler of Starlette's for paths and methods that no route has. OPTIONS says what a path takes."""
    assert isinstance(error, HTTPException)
    if error.status_code != 405:
        return _error(ApiError("not_found", f"There is nothing at {request.url.path}. The API is under /v1."))
    allowed = sorted({*(error.headers or {}).get("Allow", "").split(", "), "OPTIONS"} - {""})
    if request.method == "OPTIONS":
        response = Response(None, 204, {"x-request-id": request_id()})
    else:
        response = _error(ApiError("method_not_allowed", f"{request.method} is not supported on {request.url.path}."))
    response.headers["allow"] = ", ".join(allowed)
    return response


async def gone(_: Request, __: Exception) -> Response:
    """The client left; nobody reads this. 499 is what nginx logs for it."""
    return Response(status_code=499)


async def broken(_: Request, error: Exception) -> Response:
    """A handler of Starlette's for what nobody expected."""
    log.error("a request failed in the gateway itself", exc_info=error)
    return _error(ApiError("server_error", "The gateway failed on this request; try again."))


def _error(error: ApiError) -> Response:
    body = orjson.dumps(error.body())
    response = Response(body, error.status)
    response.raw_headers = refusal_headers(error, request_id(), len(body))
    return response
