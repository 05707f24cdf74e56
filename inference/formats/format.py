"""What every chat format provides, in both directions.

A prompt is `head + body + opening`:

- *head*: instructions and tools. They are per request and not part of the stored context (protocol.md 2.1), so the
  head is rendered apart from the conversation and may change between turns without touching the body.
- *body*: the conversation's items. Append-only: rendering the items of one turn never changes ids that are there.
- *opening*: what makes the model speak. It becomes part of the body together with the ids the model then samples,
  as `spoken` leaves them.

One rewriting is known: templates that no longer show a model's thoughts once the talk has moved on. `forgets` says
when; the conversation is then cut back to where the thoughts began, and what followed is rendered anew without them
(`actors.rounds`).

No text of a client can become a control token: text is encoded with special tokens off.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.protocol.deltas import Delta
from gateway.protocol.items import Item
from gateway.protocol.textformat import TextFormat
from gateway.protocol.tools import ToolSet
from inference.engine import Guide, Parsing
from inference.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Brief:
    """What a request says beside its conversation. `preamble` is the text of the conversation's first item when that is
    a system or developer message (it then is no body item); `effort` is `reasoning.effort`, `summary` likewise."""

    instructions: str | None = None
    preamble: str | None = None
    tools: ToolSet = field(default_factory=ToolSet)
    text: TextFormat = field(default_factory=TextFormat)
    effort: str | None = None
    summary: str | None = None


@dataclass(frozen=True, slots=True)
class Opening:
    """How a turn starts. `ids` open the assistant's message and are part of the context. `forced` is output that the
    opening already contains (the start of a forced tool call): the parser is fed it first, as if sampled. `parsing`:
    the engine takes the output apart, and no parser of this format is asked."""

    ids: bytes
    forced: str = ""
    guide: Guide | None = None
    parsing: Parsing | None = None


class OutputParser(Protocol):
    """Sampled ids to deltas, incrementally: what is fed whole or id by id gives the same concatenation."""

    def feed(self, ids: Sequence[int]) -> list[Delta]:
        """Deltas that these ids complete. Text that may still turn out to be markup, and bytes that are not yet a whole
        code point, are held back."""
        ...

    def finish(self) -> list[Delta]:
        """No more ids: what was held back comes out (an unfinished code point as U+FFFD). A tool call cut off in the
        middle gets no `CallEnd`."""
        ...

    @property
    def reasoning_tokens(self) -> int:
        """How many of the ids fed so far were reasoning."""
        ...


class Format(Protocol):
    """A chat format bound to one model's tokenizer. Stateless and safe to share between sessions and threads.

    `forgetful`: `forgets` may be True. `appendable`: heads and bodies can be rendered apart, as said above; where they
    can't, `whole` is asked for every prompt instead of `head` and `body`. `speaks_ids`: engines answer with ids, which
    the context keeps; where they don't, it goes on with `body` of the items that were said.
    """

    name: str
    tokenizer: Tokenizer
    stop_ids: tuple[int, ...]
    forgetful: bool
    appendable: bool
    speaks_ids: bool

    def head(self, brief: Brief) -> bytes:
        """Ids of everything before the first body item. Which tool must be called is no part of it."""
        ...

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """Ids of new items, to be appended. Items that have no form in the chat (references, triggers, hosted-tool
        traces) give nothing, as do thoughts that later ones of these items make the template forget. `calls` maps the
        call ids that items before these have left without output to the names the model called (`Tool.model_name`).
        Raises `ApiError` (unsupported_parameter) for what this model can't see."""
        ...

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """Ids of head and body of a whole conversation. O(history)."""
        ...

    def forgets(self, items: Sequence[Item], added: Sequence[Item]) -> bool:
        """Whether thoughts among `items`, the newest of the context, are shown no longer when `added` follow them."""
        ...

    def opening(self, brief: Brief) -> Opening:
        """How the next assistant turn opens, and the constraint that makes `tool_choice`, strict functions, grammars
        and `text.format` hold. Raises `ApiError` (invalid_json_schema, unsupported_parameter) for what cannot be."""
        ...

    def spoken(self, sampled: Sequence[int]) -> tuple[int, bytes]:
        """What sampled ids become in the context: (how many of them, from the first, stay as they are; the ids that
        follow those and complete the assistant's message). All stay but for a last one that only ends sampling."""
        ...

    def parser(self, tools: ToolSet, opening: Opening) -> OutputParser:
        """A parser for one turn's output."""
        ...
