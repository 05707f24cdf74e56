"""Output that is more than ids: log-probabilities wanted for its text, or taken apart by the engine already.

The plain case, ids into a format's parser, needs nothing of this.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from actors.prompt import Prompt
from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, Logprob, ReasoningDelta, TextDelta
from gateway.protocol.tools import Tool
from inference.engine import Chunk, TokenLogprob
from inference.formats.format import OutputParser
from inference.formats.toolcalls import FreeformText
from inference.tokenizer import Tokenizer


class Output(Protocol):
    """What a turn asks its output once the chunks are read."""

    @property
    def reasoning_tokens(self) -> int:
        """See `OutputParser`."""
        ...

    def finish(self) -> list[Delta]:
        """See `OutputParser`."""
        ...


class ScoredOutput:
    """Feeds a parser id by id, so that each piece of text gets the log-probabilities of the ids that it came from. Ids
    of reasoning, of calls and of markup give none: the protocol has no place for them."""

    def __init__(self, parser: OutputParser, tokenizer: Tokenizer) -> None:
        self._parser = parser
        self._bytes = tokenizer.token_bytes
        self._held: list[Logprob] = []

    @property
    def reasoning_tokens(self) -> int:
        """See `OutputParser`."""
        return self._parser.reasoning_tokens

    def read(self, chunk: Chunk) -> list[Delta]:
        """The deltas that a chunk completes."""
        out: list[Delta] = []
        for at, token_id in enumerate(chunk.ids):
            if chunk.logprobs is not None:
                self._held.append(self._logprob(chunk.logprobs[at]))
            self._take(self._parser.feed((token_id,)), out)
        return out

    def finish(self) -> list[Delta]:
        """See `OutputParser`."""
        out: list[Delta] = []
        self._take(self._parser.finish(), out)
        return out

    def _take(self, deltas: list[Delta], out: list[Delta]) -> None:
        for delta in deltas:
            out.append(TextDelta(delta.text, self._behind(delta.text)) if isinstance(delta, TextDelta) else delta)
            self._held.clear()

    def _behind(self, text: str) -> tuple[Logprob, ...]:
        """The newest of the ids held that spell this text: older ones were markup that gave no delta."""
        left = sum(len(entry.token) for entry in self._held) - len(text.encode())
        for at, entry in enumerate(self._held):
            left -= len(entry.token)
            if left < 0:
                return tuple(self._held[at:])
        return ()

    def _logprob(self, entry: TokenLogprob) -> Logprob:
        top = tuple((self._bytes(token_id), logprob) for token_id, logprob in entry.top)
        return Logprob(self._bytes(entry.token_id), entry.logprob, top)


class EngineOutput:
    """Deltas of an engine that parses itself. It knows every tool as a function by the name the model sees: that is
    mapped back, and the input of a freeform tool is taken out of its JSON."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._freeform: FreeformText | None = None
        # To the chunk: what a chunk mixes counts as reasoning.
        self.reasoning_tokens = 0
        self._chars = 0

    @property
    def said_tokens(self) -> int:
        """About how many tokens this was, for engines that have not told: four characters are one."""
        return -(-self._chars // 4)

    def read(self, chunk: Chunk) -> list[Delta]:
        """The deltas of a chunk."""
        out: list[Delta] = []
        reasoning = False
        for delta in chunk.deltas or ():
            self._chars += len(getattr(delta, "text", ""))
            if isinstance(delta, CallStart):
                tool = self._tools.get(delta.name) or Tool("function", delta.name)
                # An engine that knows freeform tools gives their input as it is.
                shimmed = tool.kind == "custom" and delta.kind == "function"
                self._freeform = FreeformText() if shimmed else None
                out.append(CallStart(tool.kind, tool.name, tool.namespace))
            elif isinstance(delta, CallDelta) and self._freeform is not None:
                out += _call_text(self._freeform.feed(delta.text, complete=False))
            elif isinstance(delta, CallEnd) and self._freeform is not None:
                out += [*_call_text(self._freeform.feed("", complete=True)), delta]
            else:
                reasoning = reasoning or isinstance(delta, ReasoningDelta)
                out.append(delta)
        self.reasoning_tokens += len(chunk.ids) if reasoning else 0
        return out

    def finish(self) -> list[Delta]:
        """See `OutputParser`. The engine has sent all there is."""
        return []


def special_output(prompt: Prompt, parser: OutputParser, *, scored: bool) -> ScoredOutput | EngineOutput | None:
    """What reads this turn's chunks; None where the parser alone does."""
    if prompt.opening.parsing is not None:
        return EngineOutput(prompt.brief.tools.by_model_name())
    return ScoredOutput(parser, prompt.model.format.tokenizer) if scored else None


def _call_text(text: str) -> list[Delta]:
    return [CallDelta(text)] if text else []
