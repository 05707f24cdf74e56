"""The STEPS rule: what the scripted engine answers to a ChatML prompt, read back from its ids.

The newest user message that holds `STEPS=[…]`, a JSON list, drives the answer. With k tool outputs after it, step k is
played as a tool call in Hermes markup; `$N` in its strings becomes the last `TOK_…` word of output N. After the last
step the answer is `RESULT <last token>`. Steps are

    {"call": NAME, "args": {…}}     a function; with "namespace" the model's name for it is NAMESPACE.NAME
    {"custom": NAME, "input": "…"}  a custom tool, whose input is text
    {"text": "…"}                   plain text

Without STEPS the answer is `PONG`, unless the request asks for more than words (`inference.unscripted`): a call of the
tool that the newest message names ("weather" is enough for `get_weather`), of any tool when one must be called, or a
value of the schema that guides the answer. A forced call that STEPS don't name is completed the same way.

Messages are told apart by control ids, which no content can spell. Tool outputs are user messages that begin with
`<tool_response>`; they are told apart by that token's id where the vocabulary has one, else by the exact text between
two outputs.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import pairwise
from typing import Any

from inference.detokenizer import Detokenizer
from inference.engine import Guide
from inference.formats.chatml import raw_begin
from inference.tokenizer import Tokenizer, pack_ids, unpack_ids
from inference.unscripted import Offered, asked_for, call_text, offered_tools, smallest

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
_OUTPUT_OPEN, _OUTPUT_CLOSE = "<tool_response>", "</tool_response>"
_TOKEN = re.compile(r"TOK_\w+")
_REFERENCE = re.compile(r"\$\d")
_REMEMBERED = 4096  # messages; each is read once in a conversation that only grows
_ID_BYTES = 4


@dataclass(frozen=True, slots=True)
class _Reading:
    """What one message means to the rule."""

    role: str
    text: str | None  # of a user message that is no tool output
    steps: list[Any] | None = None
    tokens: tuple[str, ...] = ()  # one for each tool output
    tools: tuple[Offered, ...] = ()  # that a system message shows


class PromptReader:
    """Reads ChatML prompts of one vocabulary. Remembers what the last `_REMEMBERED` messages meant, so that a long
    conversation costs its new messages. Raises KeyError for a vocabulary without ChatML's control tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._start = pack_ids([tokenizer.special("<|im_start|>")])
        self._end = pack_ids([tokenizer.special("<|im_end|>")])
        tags = [tag for tag in (_OUTPUT_OPEN, _OUTPUT_CLOSE) if tokenizer.has_special(tag)]
        self._output_open = pack_ids([tokenizer.special(_OUTPUT_OPEN)]) if tags else None
        self._shown = {tokenizer.special(tag) for tag in (*tags, CALL_OPEN) if tokenizer.has_special(tag)}
        self._readings: OrderedDict[bytes, _Reading] = OrderedDict()

    def answer(self, prompt: bytes, guide: Guide | None = None) -> str:
        """The rule's answer, without what the prompt's opening already holds of it (a forced tool call)."""
        *closed, opening = self._messages(prompt) or [b""]
        steps: list[Any] | None = None
        tokens: list[str] = []
        for message in reversed(closed):
            reading = self._read(message)
            if reading.role == "user":
                if reading.steps is not None:
                    steps = reading.steps
                    break
                tokens[:0] = reading.tokens
        _, _, forced = self._decode(opening).partition("\n")
        _, mark, call = forced.rpartition(CALL_OPEN)  # an empty <think> block may stand before it
        text = self._unscripted(closed, guide) if steps is None else play(steps, tokens)
        if mark and not text.startswith(mark + call):
            text = self._forced(closed, mark + call)
        return text.removeprefix(mark + call)

    def _unscripted(self, closed: Sequence[bytes], guide: Guide | None) -> str:
        if guide is not None and guide.kind == "json":
            return json.dumps(smallest(json.loads(guide.value)), ensure_ascii=False)
        tools = self._read(closed[0]).tools if closed else ()
        if tools:
            asked = asked_for(tools, self._read(closed[-1]).text or "")
            # A structural tag that waits for no trigger asks for a call at once.
            if asked is None and guide is not None and "triggered_tags" not in guide.value:
                asked = tools[0]
            if asked is not None:
                return call_text(asked)
        return "PONG"

    def _forced(self, closed: Sequence[bytes], start: str) -> str:
        """The call that begins so, of a tool that is shown or at least spelled in its start."""
        for tool in self._read(closed[0]).tools if closed else ():
            if (text := call_text(tool)).startswith(start):
                return text
        return f"{start} {{}}}}\n{CALL_CLOSE}"

    def last_user_text(self, prompt: bytes) -> str:
        """Text of the newest user message that is no tool output; empty if there is none."""
        for message in reversed(self._messages(prompt)):
            reading = self._read(message)
            if reading.role == "user" and reading.text is not None:
                return reading.text
        return ""

    def _messages(self, prompt: bytes) -> list[bytes]:
        """Ids between each `<|im_start|>` and its `<|im_end|>`; the last one is open in a prompt that asks for more."""
        starts = list(_positions(prompt, self._start))
        messages = []
        for start, following in itertools.pairwise([*starts, len(prompt)]):
            begin = start + _ID_BYTES
            end = next(_positions(prompt, self._end, begin, following), following)
            messages.append(prompt[begin:end])
        return messages

    def _read(self, message: bytes) -> _Reading:
        key = blake2b(message, digest_size=16).digest()
        if (known := self._readings.get(key)) is not None:
            self._readings.move_to_end(key)
            return known
        reading = self._readings[key] = self._interpret(message)
        if len(self._readings) > _REMEMBERED:
            self._readings.popitem(last=False)
        return reading

    def _interpret(self, message: bytes) -> _Reading:
        role, _, text = self._decode(message).partition("\n")
        if role != "user":
            return _Reading(role, None, tools=offered_tools(text) if role == "system" else ())
        if not text.startswith(_OUTPUT_OPEN):
            return _Reading(role, text, find_steps(text))
        if self._output_open is None:
            outputs = text.split(f"\n{_OUTPUT_CLOSE}\n{_OUTPUT_OPEN}\n")
        else:
            cuts = [*_positions(message, self._output_open), len(message)]
            outputs = [self._decode(message[start:end]) for start, end in pairwise(cuts)]
        return _Reading(role, None, None, tuple(_last_token(output) for output in outputs))

    def _decode(self, ids: bytes) -> str:
        detokenizer = Detokenizer(self._tokenizer, self._shown)
        return detokenizer.feed(unpack_ids(ids)) + detokenizer.finish()


def _positions(ids: bytes, wanted: bytes, start: int = 0, end: int | None = None) -> Iterator[int]:
    """Where an id stands in packed ids."""
    end = len(ids) if end is None else end
    at = ids.find(wanted, start, end)
    while at >= 0:
        if at % _ID_BYTES == 0:
            yield at
        at = ids.find(wanted, at + 1, end)


def _last_token(output: str) -> str:
    found: list[str] = _TOKEN.findall(output)
    return found[-1] if found else "TOK_missing"


def find_steps(text: str) -> list[Any] | None:
    """The list after the first `STEPS=`, or None if there is none that is JSON."""
    _, found, rest = text.partition("STEPS=")
    if not found:
        return None
    try:
        steps, _ = json.JSONDecoder().raw_decode(rest.lstrip())
    except (ValueError, RecursionError):
        return None
    return steps if isinstance(steps, list) else None


def play(steps: Sequence[Any], tokens: Sequence[str]) -> str:
    """What to say when the tool outputs so far held these tokens, one for each output."""
    if len(tokens) >= len(steps):
        return f"RESULT {tokens[-1] if tokens else 'none'}"
    step = _substitute(steps[len(tokens)], tokens)
    if not isinstance(step, dict):
        return str(step)
    if "text" in step:
        return str(step["text"])
    name = str(step.get("call", step.get("custom", "")))
    if "namespace" in step:
        name = f"{step['namespace']}.{name}"
    if "custom" in step:
        return f"{raw_begin(name)}{step.get('input', '')}\n{CALL_CLOSE}"
    call = json.dumps({"name": name, "arguments": step.get("args", {})}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}"


def _substitute(value: Any, tokens: Sequence[str]) -> Any:
    if isinstance(value, str):
        known = {f"${n}": token for n, token in enumerate(tokens[:9], 1)}
        return _REFERENCE.sub(lambda found: known.get(found[0], found[0]), value)
    if isinstance(value, dict):
        return {key: _substitute(entry, tokens) for key, entry in value.items()}
    if isinstance(value, list):
        return [_substitute(entry, tokens) for entry in value]
    return value
