"""Formats whose prompt is JSON text, for upstreams that render it themselves: what they have in common.

The "ids" here are text. A head or a body is a run of JSON objects, each with a comma behind it and then blanks, so
that it is a multiple of four bytes long: the token cache keeps it like ids, and counts a token for four bytes, which
is roughly what there are. Pieces only need to be joined, and put between brackets without the last comma.

What a model says comes back as deltas, never as ids (`speaks_ids`): the context goes on with the body of the items
that were said. No text of a client can be anything but text, as it stands in JSON strings.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any, TypeGuard

import orjson

from gateway.protocol.deltas import Delta
from gateway.protocol.errors import ApiError
from gateway.protocol.items import (
    Call,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    called_name,
)
from gateway.protocol.tools import Tool, ToolSet
from inference.engine import Parsing
from inference.formats.format import Opening
from inference.formats.guides import check_schema
from inference.formats.plaintext import text_only as plain
from inference.formats.toolcalls import INPUT_KEY
from inference.tokenizer import Tokenizer

SCHEMA_NAME = "response"
SCHEMA_PARAM = "text.format.schema"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(frozen=True, slots=True)
class UpstreamRequest(Parsing):
    """What a request has beside its prompt. `fields` is a JSON object, to be merged into the request; `names` maps
    tools as the upstream knows them to `Tool.model_name` where those differ. With `one_call` the answer must end
    before a second call."""

    fields: str = "{}"
    names: Mapping[str, str] = field(default_factory=dict)
    one_call: bool = False


class JsonText:
    """`inference.tokenizer.Tokenizer` of these formats: four bytes of UTF-8 are an id."""

    vocab_size = 2**32
    special_ids: frozenset[int] = frozenset()
    hub: Any = None

    def encode(self, text: str) -> bytes:
        return padded(text.encode("utf-8", "replace"))

    def special(self, name: str) -> int:
        raise KeyError(name)

    def has_special(self, name: str) -> bool:  # noqa: ARG002  there are none
        return False

    def token_bytes(self, token_id: int) -> bytes:
        return token_id.to_bytes(4, "little")


class NoParser:
    """`inference.formats.format.OutputParser` for output that comes as deltas: there are no ids to read."""

    reasoning_tokens = 0

    def feed(self, ids: Sequence[int]) -> list[Delta]:  # noqa: ARG002  there are none
        return []

    def finish(self) -> list[Delta]:
        return []


class JsonTextFormat:
    """The part of `inference.formats.format.Format` that does not depend on what the objects are."""

    stop_ids: tuple[int, ...] = ()
    forgetful = False
    appendable = True
    speaks_ids = False

    def __init__(self) -> None:
        self.tokenizer: Tokenizer = JsonText()

    def forgets(self, items: Sequence[Item], added: Sequence[Item]) -> bool:  # noqa: ARG002  that is the upstream's
        """See `Format.forgets`."""
        return False

    def spoken(self, sampled: Sequence[int]) -> tuple[int, bytes]:  # noqa: ARG002  there are none
        """See `Format.spoken`: nothing, as `speaks_ids` says."""
        return 0, b""

    def parser(self, tools: ToolSet, opening: Opening) -> NoParser:  # noqa: ARG002  the upstream parses
        return NoParser()


def request_opening(fields: Mapping[str, Any], tools: ToolSet, offered: Iterable[Tool]) -> Opening:
    """No ids, but the rest of the request, which offers these tools."""
    names = {wire: tool.model_name for tool in offered if (wire := wire_name(tool.model_name)) != tool.model_name}
    beside = UpstreamRequest(fields=dumps(fields).decode(), names=names, one_call=not tools.parallel)
    return Opening(b"", parsing=beside)


def dumps(value: Any) -> bytes:
    """JSON text. Lone surrogates become U+FFFD, which any server can read."""
    try:
        return orjson.dumps(value)
    except TypeError:  # those, and integers above 64 bits in a schema
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()


def padded(text: bytes) -> bytes:
    """With blanks behind it, to a multiple of four bytes."""
    return text + b" " * (-len(text) % 4)


def run_of(objects: Iterable[Any]) -> bytes:
    """Objects as a piece of a prompt."""
    return b"".join(padded(dumps(each) + b",") for each in objects)


def request_body(name: str, parts: Sequence[bytes], request: UpstreamRequest, options: Mapping[str, Any]) -> bytes:
    """The JSON of a request whose list `name` is a prompt."""
    listed = b"".join(parts).rstrip(b", ")
    fields = request.fields.encode()
    more = b"," + fields[1:-1] if len(fields) > 2 else b""
    return b"".join((orjson.dumps(options)[:-1], b',"', name.encode(), b'":[', listed, b"]", more, b"}"))


def wire_name(model_name: str) -> str:
    """A tool's name as servers take it: 64 letters, digits, `_` and `-` at most. Others become such, always the same
    one, and different ones different ones."""
    if _NAME.fullmatch(model_name):
        return model_name
    digest = sha256(model_name.encode("utf-8", "replace")).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_-]', '_', model_name)[:55]}_{digest}"


def call_name(call: Call) -> str:
    """The name of the tool that was called, as servers take it."""
    return wire_name(called_name(call))


def call_arguments(call: Call) -> str:
    """A call's arguments as they were. Servers parse them and fail on what is no JSON object, so such text stands
    under a key of its own (bugs.md O-84). A freeform tool has one argument."""
    if isinstance(call, CustomToolCall):
        return dumps({INPUT_KEY: call.input}).decode()
    if not call.arguments.strip():
        return "{}"
    try:
        found = json.loads(call.arguments)
    except (ValueError, RecursionError):
        found = None
    return call.arguments if isinstance(found, dict) else dumps({"arguments": call.arguments}).decode()


def shown(items: Sequence[Item]) -> list[Item]:
    """Without calls that were cut off and that nobody answered: a server refuses a call without its output, and no
    output of such a one is to be expected."""
    answered = {item.call_id for item in items if isinstance(item, FunctionCallOutput | CustomToolCallOutput)}
    return [item for item in items if not (_is_cut(item) and item.call_id not in answered)]


def text_only(content: str | tuple[Any, ...]) -> str:
    """As `plaintext.text_only`, where an upstream has no place for more."""
    return plain(content, "this model's upstream takes no {} part here; leave it out")


def checked_schema(text: str | None) -> dict[str, Any]:
    """A schema of a text format. Raises `ApiError`."""
    try:
        schema: dict[str, Any] = json.loads(text or "")
    except (ValueError, RecursionError):
        raise ApiError("invalid_json_schema", "the schema is not JSON", SCHEMA_PARAM) from None
    check_schema(schema, SCHEMA_PARAM)
    return schema


def is_closed(schema: Any) -> bool:
    """Whether every object in a schema names all its properties and requires them: what `strict` needs."""
    stack = [schema]
    while stack:
        node = stack.pop()
        if isinstance(node, list):
            stack.extend(node)
        elif isinstance(node, dict):
            if node.get("type") == "object" or "properties" in node:
                properties = node.get("properties")
                required = node.get("required")
                if node.get("additionalProperties") is not False or not isinstance(properties, dict):
                    return False
                if set(properties) != set(required if isinstance(required, list) else ()):
                    return False
            stack.extend(node.values())
    return True


def _is_cut(item: Item) -> TypeGuard[Call]:
    return isinstance(item, FunctionCall | CustomToolCall) and item.status == "incomplete"
