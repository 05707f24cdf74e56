"""Conversation items: what clients send, what we emit, and what we take back.

Each type is a frozen, slotted dataclass that is cheap inside and that pydantic validates once at the edge
(`gateway.protocol.requests`). Unknown fields of an item are ignored (Codex adds some). Bounds are the published
ones (protocol.md 2.1). `to_json` gives the wire form; optional fields that are None are left out, never null,
which satisfies both OpenAI's types and the Open Responses schema.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Annotated, Any, Literal

from annotated_types import MaxLen, MinLen
from pydantic import BeforeValidator, Discriminator, FailFast, Tag, ValidationInfo

from gateway.protocol.deltas import Phase

MAX_TEXT_CHARS = 10_485_760
MAX_IMAGE_URL_CHARS = 20_971_520
MAX_FILE_DATA_CHARS = 73_400_320
MAX_ENCRYPTED_CHARS = 20_971_520

Text = Annotated[str, MaxLen(MAX_TEXT_CHARS)]
CallId = Annotated[str, MinLen(1), MaxLen(64)]
ToolName = Annotated[str, MinLen(1), MaxLen(128)]
Role = Literal["user", "assistant", "system", "developer"]
Status = Literal["in_progress", "completed", "incomplete"]


def string_or_array(value: Any) -> str:
    """Which form a text-or-parts field has. A tag in angle brackets does not show in an error's path."""
    return "<string>" if isinstance(value, str) else "<array>"


class _FirstFault(FailFast):
    """Stop at an array's first fault: a million bad parts must not make a million findings. Pydantic's own marker
    has no hash, and a union's members need one."""

    __hash__ = object.__hash__


FIRST_FAULT = _FirstFault()

_INSIDE = {"wire": False}  # of the one field that no client is shown, and none can set
OURS = "ours"
"""Context of a validation of what no client could have written."""


def _ours_only(value: Any, info: ValidationInfo) -> Any:
    return value if info.context == OURS else None


# Clients replay our items with `null` where they keep no value.
_NULL_IS_EMPTY = BeforeValidator(lambda value: () if value is None else value)


@dataclass(frozen=True, slots=True)
class InputText:
    """Text in a message or a tool output."""

    text: Text
    type: Literal["input_text"] = "input_text"


@dataclass(frozen=True, slots=True)
class InputImage:
    """An image by URL, data URL or file id."""

    type: Literal["input_image"] = "input_image"
    image_url: Annotated[str, MaxLen(MAX_IMAGE_URL_CHARS)] | None = None
    file_id: str | None = None
    detail: str | None = None


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file by id, URL or inline data."""

    type: Literal["input_file"] = "input_file"
    file_id: str | None = None
    file_url: str | None = None
    file_data: Annotated[str, MaxLen(MAX_FILE_DATA_CHARS)] | None = None
    filename: str | None = None


@dataclass(frozen=True, slots=True)
class OutputText:
    """Text that a model wrote."""

    text: Text
    type: Literal["output_text"] = "output_text"
    annotations: Annotated[tuple[Any, ...], _NULL_IS_EMPTY] = ()
    logprobs: tuple[Any, ...] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A model's refusal."""

    refusal: Text
    type: Literal["refusal"] = "refusal"


@dataclass(frozen=True, slots=True)
class ReasoningText:
    """Raw reasoning."""

    text: Text
    type: Literal["reasoning_text"] = "reasoning_text"


@dataclass(frozen=True, slots=True)
class SummaryText:
    """A summary of reasoning."""

    text: Text
    type: Literal["summary_text"] = "summary_text"


MessagePart = InputText | InputImage | InputFile | OutputText | Refusal | ReasoningText | SummaryText
OutputPart = InputText | InputImage | InputFile | OutputText
_MessageContent = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[tuple[Annotated[MessagePart, Discriminator("type")], ...], FIRST_FAULT, Tag("<array>")],
    Discriminator(string_or_array),
]
_ToolOutput = Annotated[
    Annotated[Text, Tag("<string>")]
    | Annotated[tuple[Annotated[OutputPart, Discriminator("type")], ...], FIRST_FAULT, Tag("<array>")],
    Discriminator(string_or_array),
]


@dataclass(frozen=True, slots=True)
class Message:
    """A message of any role. A string stays a string."""

    role: Role
    content: _MessageContent
    type: Literal["message"] = "message"
    id: str | None = None
    status: Status | None = None
    phase: Phase | None = None


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A call of a function tool; `arguments` is JSON text as the model wrote it."""

    call_id: CallId
    name: ToolName
    arguments: Text
    type: Literal["function_call"] = "function_call"
    id: str | None = None
    namespace: str | None = None
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class FunctionCallOutput:
    """What the client's function returned."""

    call_id: CallId
    output: _ToolOutput
    type: Literal["function_call_output"] = "function_call_output"
    id: str | None = None
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class CustomToolCall:
    """A call of a freeform tool; `input` is plain text."""

    call_id: CallId
    name: ToolName
    input: Text
    type: Literal["custom_tool_call"] = "custom_tool_call"
    id: str | None = None
    namespace: str | None = None
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class CustomToolCallOutput:
    """What the client's freeform tool returned."""

    call_id: CallId
    output: _ToolOutput
    type: Literal["custom_tool_call_output"] = "custom_tool_call_output"
    id: str | None = None
    status: Status | None = None


@dataclass(frozen=True, slots=True)
class Reasoning:
    """A reasoning item: summary, raw content, or an opaque blob of ours. `foreign` is an upstream's blob, for that
    upstream only: who made it, a newline, the blob. It is never on the wire: clients carry it inside ours."""

    type: Literal["reasoning"] = "reasoning"
    id: str | None = None
    summary: Annotated[tuple[SummaryText, ...], FIRST_FAULT] = ()
    content: Annotated[tuple[ReasoningText, ...], FIRST_FAULT] | None = None
    encrypted_content: Annotated[str, MaxLen(MAX_ENCRYPTED_CHARS)] | None = None
    status: Status | None = None
    foreign: Annotated[str | None, BeforeValidator(_ours_only)] = field(default=None, metadata=_INSIDE)


@dataclass(frozen=True, slots=True)
class Compaction:
    """A compacted window, opaque to clients."""

    encrypted_content: Annotated[str, MaxLen(MAX_ENCRYPTED_CHARS)]
    type: Literal["compaction"] = "compaction"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class CompactionTrigger:
    """Asks for compaction; must be the last input item."""

    type: Literal["compaction_trigger"] = "compaction_trigger"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class ItemReference:
    """Points at an item of the context by id."""

    id: str
    type: Literal["item_reference"] = "item_reference"


@dataclass(frozen=True, slots=True)
class AdditionalTools:
    """Tool definitions as an input item (Codex Responses-Lite). `tools` is the raw JSON list."""

    tools: tuple[Any, ...]
    type: Literal["additional_tools"] = "additional_tools"
    role: str = "developer"
    id: str | None = None


@dataclass(frozen=True, slots=True)
class Opaque:
    """An item that we carry but do not render: hosted-tool traces and the like. `raw` is the client's object."""

    type: str
    raw: Any
    id: str | None = None


Item = (
    Message
    | FunctionCall
    | FunctionCallOutput
    | CustomToolCall
    | CustomToolCallOutput
    | Reasoning
    | Compaction
    | CompactionTrigger
    | ItemReference
    | AdditionalTools
    | Opaque
)
Call = FunctionCall | CustomToolCall
CallOutput = FunctionCallOutput | CustomToolCallOutput


def to_json(value: Any) -> Any:
    """The wire form of an item or a part."""
    if isinstance(value, Opaque):
        return value.raw
    if isinstance(value, tuple):
        return [to_json(entry) for entry in value]
    if hasattr(value, "__dataclass_fields__"):
        return {
            each.name: to_json(entry)
            for each in fields(value)
            if (entry := getattr(value, each.name)) is not None and not each.metadata
        }
    return value


def called_name(call: Call) -> str:
    """The name under which the model called the tool, as in `Tool.model_name`."""
    return call.name if call.namespace is None else f"{call.namespace}.{call.name}"


def text_of(content: str | tuple[Any, ...]) -> str:
    """All text of a message's content or a tool's output, parts joined without a separator; images and files
    contribute nothing."""
    if isinstance(content, str):
        return content
    return "".join(part.refusal if isinstance(part, Refusal) else getattr(part, "text", "") for part in content)
