"""Chunks of chat completions as deltas. Pure.

Calls come numbered, in fragments, and fragments of several may be mixed; deltas know one open call at a time. So the
first is passed on as it comes, the next ones are held back until it is whole: when its arguments are complete JSON and
another call has begun, or at the end.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from gateway.protocol.deltas import (
    CallDelta,
    CallEnd,
    CallStart,
    Delta,
    ReasoningDelta,
    RefusalDelta,
    TextDelta,
)
from inference.engine import Counted, Finish
from inference.upstream.dialects import Dialect
from inference.upstream.errors import broken_off, filtered
from inference.upstream.fields import logprobs_in, text_in
from inference.upstream.usage import counted

FINISHES: Mapping[str, Finish] = {"length": "length", "max_tokens": "length", "model_length": "length"}
"""Reasons that are no plain end. What is not here, nor a failure, is one: servers have many words for it."""

_FAILURES = ("error", "abort", "insufficient_system_resource", "network_error")


@dataclass(slots=True)
class _Call:
    index: int
    id: str = ""
    name: str = ""
    arguments: list[str] = field(default_factory=list)
    sent: int = 0  # fragments passed on

    def is_whole(self) -> bool:
        """Whether nothing can follow: the arguments are complete JSON."""
        text = "".join(self.arguments)
        if not text.rstrip().endswith("}"):  # arguments are an object; most fragments end elsewhere
            return False
        try:
            orjson.loads(text)
        except orjson.JSONDecodeError:
            return False
        return True


class ChatReader:
    """Reads one answer. `names` maps functions as the upstream knows them to `Tool.model_name` where those differ;
    with `one_call` a second call is never begun, and `full` then tells that nothing more is wanted."""

    def __init__(self, dialect: Dialect, names: Mapping[str, str], *, one_call: bool = False) -> None:
        self._dialect = dialect
        self._names = names
        self._one_call = one_call
        self._calls: list[_Call] = []  # those that have not ended, the open one first
        self._open = False
        self._ended = 0
        self._last: dict[int, _Call] = {}
        self.full = False
        self.ended = False  # never: the stream's end is the answer's
        self.thinking = True  # until something is said
        self.reason: str | None = None
        self.counted: Counted | None = None

    def read(self, chunks: Sequence[Mapping[str, Any]]) -> list[Delta]:
        """The deltas of these chunks."""
        out: list[Delta] = []
        for chunk in chunks:
            if (usage := counted(chunk, self._dialect.usage)) is not None:
                self.counted = usage
            choices = chunk.get("choices")
            choice = choices[0] if isinstance(choices, list) and choices else None
            if not isinstance(choice, dict) or self.full:
                continue
            delta = choice.get("delta")
            if isinstance(delta, dict):
                self._read(delta, _tokens(choice.get("logprobs")), out)
            if isinstance(reason := choice.get("finish_reason"), str) and reason:
                self.reason = reason
        self.thinking = self.thinking and not out and self.reason is None
        return out

    def finish(self) -> tuple[list[Delta], Finish]:
        """The stream is over: what was held back, and how the answer ended. Raises `UpstreamError` if it did not."""
        if self.full:
            return [], "stop"
        if self.reason is None or self.reason in _FAILURES:
            raise broken_off()
        if self.reason == "content_filter":
            raise filtered()
        end = FINISHES.get(self.reason, "stop")
        out: list[Delta] = []
        while self._calls and (end == "stop" or self._calls[0].is_whole()):
            self._end_first(out)
        if self._calls:
            self._pass_on(out)
        return out, end

    def _read(self, delta: Mapping[str, Any], logprobs: Any, out: list[Delta]) -> None:
        thought = next((text for name in self._dialect.reasoning_out if (text := text_in(delta.get(name)))), "")
        if thought:
            self._end_calls(out)
            out.append(ReasoningDelta(thought))
        if content := text_in(delta.get("content")):
            self._end_calls(out)
            out.append(TextDelta(content, logprobs_in(logprobs)))
        if refusal := text_in(delta.get("refusal")):
            self._end_calls(out)
            out.append(RefusalDelta(refusal))
        for fragment in delta.get("tool_calls") or ():
            if isinstance(fragment, dict) and not self.full:
                self._fragment(fragment, out)

    def _fragment(self, fragment: Mapping[str, Any], out: list[Delta]) -> None:
        function = fragment.get("function")
        function = function if isinstance(function, dict) else {}
        call = self._call_of(fragment, text_in(function.get("name")))
        if call is None:
            return
        if arguments := text_in(function.get("arguments")):
            call.arguments.append(arguments)
        if self._one_call and self._ended:
            self.full = True
        elif self._calls:
            self._pass_on(out)
            while len(self._calls) > 1 and self._calls[0].is_whole():
                self._end_first(out)
                if self._calls:
                    self._pass_on(out)

    def _call_of(self, fragment: Mapping[str, Any], name: str) -> _Call | None:
        """Whose fragment this is; a call begins with its name. None for one that nobody can be told of."""
        call_id = text_in(fragment.get("id"))
        index = fragment.get("index")
        if not isinstance(index, int):  # left out by some servers
            newest = max(self._last, default=-1)
            index = newest + 1 if name and (newest < 0 or call_id != self._last[newest].id) else max(newest, 0)
        known = self._last.get(index)
        # Some number every call 0, and tell them apart by their ids only.
        other = known is not None and bool(name and call_id and known.id) and call_id != known.id
        if known is None or other:
            known = self._last[index] = _Call(index)
        known.id = known.id or call_id
        if name and not known.name:
            known.name = name
            self._calls.append(known)
        return known if known.name == "" or known in self._calls else None

    def _pass_on(self, out: list[Delta]) -> None:
        """What the open call has that was not passed on."""
        call = self._calls[0]
        if not self._open:
            out.append(CallStart("function", self._names.get(call.name, call.name)))
            self._open = True
        if text := "".join(call.arguments[call.sent :]):
            out.append(CallDelta(text))
        call.sent = len(call.arguments)

    def _end_first(self, out: list[Delta]) -> None:
        self._pass_on(out)
        call = self._calls.pop(0)
        if not "".join(call.arguments).strip():
            out.append(CallDelta("{}"))
        out.append(CallEnd())
        self._open = False
        self._ended += 1
        if self._one_call and self._calls:
            self._calls.clear()
            self.full = True

    def _end_calls(self, out: list[Delta]) -> None:
        """Something else is said: the calls before it are over."""
        while self._calls:
            self._end_first(out)


def _tokens(logprobs: Any) -> Any:
    return logprobs.get("content") if isinstance(logprobs, dict) else None
