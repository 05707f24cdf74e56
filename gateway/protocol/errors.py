"""Every error a client can get, in one table: code, status, type, and what to do about it.

Source: spec/protocol.md section 5. Codes marked `ours` have no upstream twin. The numeric status is never
optional: Codex ignores an error frame without one and hangs until its idle timeout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: HTTP status, `error.type`, and how long a client should wait (seconds), if it helps to retry."""

    status: int
    type: str
    retry_after_s: int | None = None


INVALID = "invalid_request_error"

TABLE: dict[str, Rule] = {
    "previous_response_not_found": Rule(400, INVALID),
    "invalid_stream_id": Rule(400, INVALID),
    "websocket_stream_limit_reached": Rule(400, INVALID),
    "websocket_connection_limit_reached": Rule(400, INVALID),
    "websocket_queue_full": Rule(429, "rate_limit_error", 1),  # ours
    "invalid_json": Rule(400, INVALID),  # ours
    "unsupported_event": Rule(400, INVALID),  # ours
    "missing_required_parameter": Rule(400, INVALID),
    "invalid_type": Rule(400, INVALID),
    "invalid_value": Rule(400, INVALID),
    "unsupported_parameter": Rule(400, INVALID),
    "string_above_max_length": Rule(400, INVALID),
    "array_above_max_length": Rule(400, INVALID),
    "integer_below_min_value": Rule(400, INVALID),
    "integer_above_max_value": Rule(400, INVALID),
    "invalid_function_call_output": Rule(400, INVALID),  # ours; upstream leaves the code null
    "mutually_exclusive_parameters": Rule(400, INVALID),
    "conversation_locked": Rule(400, INVALID, 1),
    "invalid_prompt": Rule(400, INVALID),
    "invalid_encrypted_content": Rule(400, INVALID),
    "invalid_json_schema": Rule(400, INVALID),
    "context_length_exceeded": Rule(400, INVALID),
    "not_found": Rule(404, INVALID),
    "model_not_found": Rule(404, INVALID),
    "method_not_allowed": Rule(405, INVALID),
    "invalid_api_key": Rule(401, INVALID),
    "insufficient_permissions": Rule(403, "permission_error"),
    "request_too_large": Rule(413, INVALID),
    "unsupported_media_type": Rule(415, INVALID),
    "websocket_disabled": Rule(426, INVALID),  # ours
    "upgrade_required": Rule(426, INVALID),  # ours
    "rate_limit_exceeded": Rule(429, "rate_limit_error", 1),
    "insufficient_quota": Rule(429, "insufficient_quota"),
    "server_error": Rule(500, "server_error"),
    # Codex treats 503 `server_is_overloaded` as fatal, so a passing overload is a 429 with a retry time.
    "engine_overloaded": Rule(429, "rate_limit_error", 1),  # ours
    "engine_unavailable": Rule(500, "server_error", 1),  # ours
    "store_unavailable": Rule(500, "server_error", 2),  # ours
    "conversation_too_large": Rule(400, INVALID),  # ours
    "server_is_overloaded": Rule(503, "server_error", 5),
}


class ApiError(Exception):
    """A refusal that a client is told about: a row of `TABLE` plus the words for this case.

    `message` must say what was wrong and what to do, and must not hold prompts, outputs or keys.
    """

    __slots__ = ("code", "message", "param", "retry_after_s")

    def __init__(self, code: str, message: str, param: str | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(message)
        rule = TABLE[code]  # an unknown code is a programming error: KeyError
        self.code = code
        self.message = message
        self.param = param
        self.retry_after_s = rule.retry_after_s if retry_after_s is None else retry_after_s

    @property
    def status(self) -> int:
        """HTTP status, and the `status` of the WebSocket frame."""
        return TABLE[self.code].status

    @property
    def type(self) -> str:
        """`error.type` on the wire."""
        return TABLE[self.code].type

    def headers(self) -> dict[str, str]:
        """`retry-after` when a retry helps, else empty."""
        return {} if self.retry_after_s is None else {"retry-after": str(self.retry_after_s)}

    def body(self) -> dict[str, Any]:
        """The HTTP body: `{"error": {message, type, param, code}}`, all four keys always."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    def frame(self, stream_id: str | None = None, sequence_number: int | None = None) -> dict[str, Any]:
        """The WebSocket error frame. `stream_id` only when the create named a valid lane; `sequence_number` only
        inside a started stream. Retry advice goes to both places that clients read (top level: Copilot;
        `error.headers`: Pydantic AI)."""
        frame: dict[str, Any] = {"type": "error", "status": self.status, **self.body()}
        if stream_id is not None:
            frame["stream_id"] = stream_id
        if sequence_number is not None:
            frame["sequence_number"] = sequence_number
        if headers := self.headers():
            frame["headers"] = headers
            frame["error"]["headers"] = headers
        return frame
