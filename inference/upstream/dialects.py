"""How upstreams differ in what they call chat completions, or Responses: data, with where it is known from. Pure.

A difference that is not in here is one that nobody has needed yet. What a dialect lacks is refused before a response
is created (bugs.md O-88), never asked for and never left out silently.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from inference.upstream.usage import UsageShape


@dataclass(frozen=True, slots=True)
class Encoding:
    """What an upstream takes. `gzip_above` is the size in bytes from which on a body is compressed, None for never."""

    form: Literal["json", "msgpack"] = "json"
    gzip_above: int | None = None


@dataclass(frozen=True, slots=True)
class Dialect:
    """What one kind of upstream takes and gives.

    `instructions`: the role of instructions and of developer messages. `reasoning_out`: the fields of a delta in which
    thoughts come, the first that holds any. `reasoning_in`: the field of an assistant's message in which they go back;
    None: they don't. `max_tokens`: the name of that limit. `usage_option`: whether usage must be asked for.

    `choices`: the values of `tool_choice` beside a named function, which `named_choice` stands for. `parallel_option`:
    whether `parallel_tool_calls` is known. `strict_tools`: whether functions may be `strict`. `formats`: the types of
    `response_format`; `format_beside_tools`: also together with tools. `strict_schemas`: whether a schema's `strict` is
    known. `efforts`: the values of `reasoning_effort`, by the request's; those that are missing are not sent.
    `images`: whether users' messages may hold some. `logprobs`: whether those can be had. `salt`: the field of a word
    that keeps tenants apart in the server's prefix cache.
    """

    name: str
    instructions: Literal["system", "developer"] = "system"
    reasoning_out: tuple[str, ...] = ("reasoning_content", "reasoning")
    reasoning_in: str | None = None
    max_tokens: Literal["max_tokens", "max_completion_tokens"] = "max_tokens"
    usage_option: bool = True
    choices: frozenset[str] = frozenset({"none", "auto", "required"})
    named_choice: bool = True
    parallel_option: bool = True
    strict_tools: bool = False
    formats: frozenset[str] = frozenset({"json_object", "json_schema"})
    format_beside_tools: bool = True
    strict_schemas: bool = True
    efforts: Mapping[str, str] = field(default_factory=dict)
    images: bool = False
    logprobs: bool = True
    salt: str | None = None
    usage: UsageShape = field(default_factory=UsageShape)
    encoding: Encoding = field(default_factory=Encoding)


@dataclass(frozen=True, slots=True)
class ResponsesDialect:
    """What one kind of server of the Responses API takes. Nothing is ever stored there: we hold the conversation.

    `thoughts`: how those go back to the server that had them: as `text`, or `sealed` in its own `encrypted_content`;
    None: they don't. `thought_ids`: each needs an id, any. `custom_tools`: freeform tools with their grammars; they are
    functions of one argument otherwise. `allowed_tools`: whether a choice may narrow the tools; fewer are sent
    otherwise. `efforts`: of reasoning, by the request's; those that are missing are not sent. `summaries`, `verbosity`,
    `phases`: whether those are known. `defaults`: temperature and top_p are sent when they are 1, too, which some
    models refuse and others take for something else than their absence. The others are as in `Dialect`.
    """

    name: str
    instructions: Literal["system", "developer"] = "system"
    thoughts: Literal["text", "sealed"] | None = None
    thought_ids: bool = False
    custom_tools: bool = False
    allowed_tools: bool = False
    efforts: Mapping[str, str] = field(default_factory=dict)
    summaries: bool = False
    verbosity: bool = False
    phases: bool = False
    images: bool = False
    files: bool = False
    defaults: bool = True
    salt: str | None = None
    encoding: Encoding = field(default_factory=Encoding)


_EFFORTS = {"minimal": "low", "low": "low", "medium": "medium", "high": "high", "xhigh": "high", "max": "high"}
_OPENAI_EFFORTS = {name: name for name in ("none", "minimal", "low", "medium", "high", "xhigh")}

GENERIC = Dialect("generic", parallel_option=False, strict_schemas=False)
"""The least that servers have in common. Thoughts are read by either name and never sent."""

OPENAI = Dialect(
    # platform.openai.com/docs/api-reference/chat; it shows no thoughts
    "openai",
    instructions="developer",
    reasoning_out=(),
    max_tokens="max_completion_tokens",
    strict_tools=True,
    efforts=_OPENAI_EFFORTS,
    images=True,
)

VLLM = Dialect(
    # vllm.md: `reasoning` since 0.12, `reasoning_content` before; --enable-prompt-tokens-details for cached tokens
    "vllm",
    reasoning_out=("reasoning", "reasoning_content"),
    reasoning_in="reasoning",
    max_tokens="max_completion_tokens",
    strict_tools=True,
    efforts=_EFFORTS,
    images=True,
    salt="cache_salt",
)

CEREBRAS = Dialect(
    # cerebras.md; cerebras-cloud-sdk 1.91.0, types/chat/completion_create_params.py. O-87: `reasoning` both ways.
    "cerebras",
    reasoning_out=("reasoning",),
    reasoning_in="reasoning",
    max_tokens="max_completion_tokens",
    strict_tools=True,
    efforts={"none": "none", **_EFFORTS},
    images=True,
    encoding=Encoding("json", gzip_above=8_192),
)

CEREBRAS_GPT_OSS = replace(
    # 567-labs/instructor#1766 (O-88): auto and none only; it always thinks, and reads text only
    CEREBRAS,
    name="cerebras-gpt-oss",
    choices=frozenset({"none", "auto"}),
    named_choice=False,
    efforts=_EFFORTS,
    images=False,
)

DIALECTS: Mapping[str, Dialect] = {
    dialect.name: dialect for dialect in (GENERIC, OPENAI, VLLM, CEREBRAS, CEREBRAS_GPT_OSS)
}
"""By name, as settings give it."""

RESPONSES_GENERIC = ResponsesDialect("generic")
"""The least that servers have in common."""

RESPONSES_OPENAI = ResponsesDialect(
    # openai 3.57.0, types/responses/response_create_params.py; reasoning models refuse temperature and top_p
    "openai",
    instructions="developer",
    thoughts="sealed",
    custom_tools=True,
    allowed_tools=True,
    efforts=_OPENAI_EFFORTS,
    summaries=True,
    verbosity=True,
    phases=True,
    images=True,
    files=True,
    defaults=False,
)

RESPONSES_VLLM = ResponsesDialect(
    # vLLM 0.33, entrypoints/openai/responses: refuses `encrypted_content`, reads thoughts as text
    "vllm",
    thoughts="text",
    thought_ids=True,
    efforts=_EFFORTS,
    images=True,
    salt="cache_salt",
)

RESPONSES_LIMPET = ResponsesDialect(
    # another gateway like this one
    "limpet",
    thoughts="text",
    custom_tools=True,
    allowed_tools=True,
    efforts={**_OPENAI_EFFORTS, "max": "max"},
    summaries=True,
    verbosity=True,
    phases=True,
    images=True,
    files=True,
)

RESPONSES_DIALECTS: Mapping[str, ResponsesDialect] = {
    dialect.name: dialect for dialect in (RESPONSES_GENERIC, RESPONSES_OPENAI, RESPONSES_VLLM, RESPONSES_LIMPET)
}
"""By name, as settings give it."""
