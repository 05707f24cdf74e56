"""The body of a create request as pydantic validates it: types and bounds of every field, and the input items.

Source: spec/protocol.md 2.1, A.4 and A.6. Scalars are strict; null means absent; unknown fields are ignored. Lists stop
at the first fault, so that a hostile body cannot make a million findings. `requests` turns a `Body` into a
`CreateRequest`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import BeforeValidator, Discriminator, Field, Strict, Tag, TypeAdapter, ValidationError

from gateway.protocol import items
from gateway.protocol.invalid import from_validation
from gateway.protocol.items import FIRST_FAULT, Opaque, Text

HOSTED_ITEMS = frozenset(
    {
        "apply_patch_call",
        "apply_patch_call_output",
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "configuration_update",
        "file_search_call",
        "image_generation_call",
        "local_shell_call",
        "local_shell_call_output",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "program",
        "program_output",
        "shell_call",
        "shell_call_output",
        "tool_search_call",
        "tool_search_output",
        "web_search_call",
    }
)
"""Item types that are carried as they are (A.4)."""

_Bool = Annotated[bool, Strict()]
_Id = Annotated[str, MinLen(1), MaxLen(512)]
_Count = Annotated[int, Strict(), Field(ge=1)]
_ReasoningSummary = Literal["auto", "concise", "detailed"]


def _item_tag(value: Any) -> str | None:
    """Which variant an input item is: an object without `type` is a message if it has a role, else a reference."""
    if not isinstance(value, dict):
        return None
    kind = value.get("type")
    if kind is None:
        return "message" if "role" in value else "item_reference" if "id" in value else None
    if not isinstance(kind, str):
        return None
    if kind in HOSTED_ITEMS:
        return "<hosted>"
    return kind if kind in _TAGS else "unknown"  # not just any string: a client could send a tag of ours


def _without_nulls(value: Any) -> Any:
    """Optional fields given as null are absent. Hosted items are kept as they came."""
    if isinstance(value, dict) and None in value.values() and _item_tag(value) != "<hosted>":
        return {key: entry for key, entry in value.items() if entry is not None}
    return value


def _as_opaque(raw: dict[str, Any]) -> dict[str, Any]:
    return {"type": raw["type"], "raw": raw, "id": raw.get("id")}


_Item = Annotated[
    Annotated[items.Message, Tag("message")]
    | Annotated[items.FunctionCall, Tag("function_call")]
    | Annotated[items.FunctionCallOutput, Tag("function_call_output")]
    | Annotated[items.CustomToolCall, Tag("custom_tool_call")]
    | Annotated[items.CustomToolCallOutput, Tag("custom_tool_call_output")]
    | Annotated[items.Reasoning, Tag("reasoning")]
    | Annotated[items.Compaction, Tag("compaction")]
    | Annotated[items.CompactionTrigger, Tag("compaction_trigger")]
    | Annotated[items.ItemReference, Tag("item_reference")]
    | Annotated[items.AdditionalTools, Tag("additional_tools")]
    | Annotated[Opaque, BeforeValidator(_as_opaque), Tag("<hosted>")],
    Discriminator(_item_tag),
    BeforeValidator(_without_nulls),
]
_TAGS = frozenset(
    {
        "message",
        "function_call",
        "function_call_output",
        "custom_tool_call",
        "custom_tool_call_output",
        "reasoning",
        "compaction",
        "compaction_trigger",
        "item_reference",
        "additional_tools",
        "input_text",
        "input_image",
        "input_file",
        "output_text",
        "refusal",
        "reasoning_text",
        "summary_text",
    }
)


@dataclass(frozen=True, slots=True)
class PlainFormat:
    """Text, or any JSON."""

    type: Literal["text", "json_object"] = "text"


@dataclass(frozen=True, slots=True)
class SchemaFormat:
    """JSON of one schema."""

    name: Annotated[str, MaxLen(64), Field(pattern="^[a-zA-Z0-9_-]+$")]
    schema: dict[str, Any]
    type: Literal["json_schema"] = "json_schema"
    description: str | None = None
    strict: _Bool | None = None


@dataclass(frozen=True, slots=True)
class TextConfig:
    """`text`."""

    format: Annotated[PlainFormat | SchemaFormat, Discriminator("type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """`reasoning`."""

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    summary: _ReasoningSummary | None = None
    context: Literal["auto", "current_turn", "all_turns"] | None = None
    mode: str | None = None
    generate_summary: _ReasoningSummary | None = None


@dataclass(frozen=True, slots=True)
class Conversation:
    """`conversation` as an object."""

    id: _Id


def _conversation_form(value: Any) -> str:
    return "<string>" if isinstance(value, str) else "<object>"


@dataclass(frozen=True, slots=True)
class Management:
    """An entry of `context_management`."""

    type: Literal["compaction"]
    compact_threshold: Annotated[int, Strict(), Field(ge=1000)] | None = None


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """`prompt_cache_options`."""

    prewarm: _Bool | None = None
    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None
    comparison_response_id: str | None = None


@dataclass(frozen=True, slots=True)
class Body:
    """The fields that pydantic validates: all but `tools` and `tool_choice` (tooldefs), `metadata` and the ones that
    have a meaning on one transport only."""

    model: Annotated[str, MinLen(1), MaxLen(512)]
    input: (
        Annotated[
            Annotated[Text, Tag("<string>")] | Annotated[tuple[_Item, ...], FIRST_FAULT, Tag("<array>")],
            Discriminator(items.string_or_array),
        ]
        | None
    ) = None
    previous_response_id: _Id | None = None
    conversation: (
        Annotated[
            Annotated[_Id, Tag("<string>")] | Annotated[Conversation, Tag("<object>")],
            Discriminator(_conversation_form),
        ]
        | None
    ) = None
    instructions: Text | None = None
    store: _Bool | None = None
    generate: _Bool | None = None
    background: _Bool | None = None
    parallel_tool_calls: _Bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Annotated[int, Strict(), Field(ge=16)] | None = None
    max_tool_calls: _Count | None = None
    temperature: Annotated[float, Strict(), Field(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Strict(), Field(ge=0.0, le=1.0)] | None = None
    top_logprobs: Annotated[int, Strict(), Field(ge=0, le=20)] | None = None
    include: (
        Annotated[
            tuple[
                Literal[
                    "file_search_call.results",
                    "web_search_call.results",
                    "web_search_call.action.sources",
                    "message.input_image.image_url",
                    "computer_call_output.output.image_url",
                    "code_interpreter_call.outputs",
                    "reasoning.encrypted_content",
                    "message.output_text.logprobs",
                ],
                ...,
            ],
            FIRST_FAULT,
        ]
        | None
    ) = None
    context_management: Annotated[tuple[Management, ...], FIRST_FAULT] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast", "ultrafast"] | None = None
    prompt_cache_key: Annotated[str, MaxLen(64)] | None = None
    prompt_cache_options: CacheOptions | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    user: str | None = None
    safety_identifier: Annotated[str, MaxLen(128)] | None = None


_BODY = TypeAdapter(Body)


def validate_body(body: Mapping[str, Any]) -> Body:
    """The fields of a create request. Raises `ApiError` for the first that is wrong."""
    try:
        return _BODY.validate_python(body if isinstance(body, dict) else dict(body))
    except ValidationError as fault:
        raise from_validation(fault, _TAGS) from None  # pydantic's exception holds the client's text
