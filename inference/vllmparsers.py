"""vLLM's own parsers, for models that have no format of ours: sampled ids to deltas, inside the replica.

One vLLM parser object reads one generation, as in vLLM's chat server: it is handed the text and the ids of every step,
finds the reasoning first and the tool calls in what is left. vLLM 0.32; imports vllm inside, as `inference.vllm` does.

All tools are functions to vLLM's parsers, so every call comes out as `CallStart("function", name)` with the name that
the model wrote (`Tool.model_name`). Which tool of the request that is, its namespace, and whether it is a custom one
whose input stands under `input`, is found where the request is known: in the session.

A parser costs the replica's loop some 50 microseconds a token, on average over 20,000 of them too, though most read all
of the text so far at every step.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any, Protocol

from gateway.protocol.deltas import CallDelta, CallEnd, CallStart, Delta, ReasoningDelta, TextDelta
from inference.detokenizer import Detokenizer
from inference.engine import EngineError, Parsing
from inference.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_CHATTY = ("vllm.tool_parsers", "vllm.reasoning", "vllm.parser")


def check_parsers(tool_parser: str | None, reasoning_parser: str | None) -> None:
    """Raises `EngineError("unavailable", …)` for a name that vLLM doesn't have, with those that look like it."""
    from vllm.reasoning import ReasoningParserManager
    from vllm.tool_parsers import ToolParserManager

    for kind, name, manager in (
        ("tool", tool_parser, ToolParserManager),
        ("reasoning", reasoning_parser, ReasoningParserManager),
    ):
        names = manager.list_registered()
        if name is not None and name not in names:
            near = get_close_matches(name, names, n=5, cutoff=0.5)
            hint = f"did you mean {', '.join(near)}?" if near else f"it has {', '.join(names)}."
            raise EngineError("unavailable", f"vLLM has no {kind} parser {name}; {hint}")


class EngineParsers:
    """The parsers an engine was started with. `begin` makes one for a generation.

    Args:
        tool_parser: vLLM's name of it; None leaves calls in the text.
        reasoning_parser: likewise, for reasoning.
        engine_tokenizer: vLLM's own tokenizer object, which its parsers want.
        tokenizer: the same vocabulary, to turn ids into text.
        model_config: vLLM's, if there is one.

    Raises:
        EngineError: unavailable; the tokenizer lacks what a parser looks for.
    """

    def __init__(
        self,
        tool_parser: str | None,
        reasoning_parser: str | None,
        engine_tokenizer: Any,
        tokenizer: Tokenizer,
        model_config: Any = None,
    ) -> None:
        self._engine_tokenizer = engine_tokenizer
        self._tokenizer = tokenizer
        self._model_config = model_config
        self._class: Any = None
        if tool_parser is None and reasoning_parser is None:
            return
        from vllm.parser import ParserManager

        for name in _CHATTY:  # they log what they choke on, and that is a client's
            logging.getLogger(name).setLevel(logging.CRITICAL)
        check_parsers(tool_parser, reasoning_parser)
        try:
            self._class = ParserManager.get_parser(
                tool_parser_name=tool_parser,
                reasoning_parser_name=reasoning_parser,
                enable_auto_tools=True,
                tokenizer=engine_tokenizer,
            )
        except Exception as problem:
            names = " and ".join(filter(None, (tool_parser, reasoning_parser)))
            cause = problem.__cause__ or problem
            text = (str(cause).splitlines() or [type(cause).__name__])[0][:200]
            raise EngineError("unavailable", f"vLLM's parser {names} can't work with this model: {text}") from problem

    def begin(self, parsing: Parsing, prompt: list[int]) -> OutputReader:
        """A reader for one generation. Raises `EngineError("invalid", …)` for tools that vLLM can't read."""
        if self._class is None:
            return OutputReader(None, None, Detokenizer(self._tokenizer), prompt)
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        try:
            tools = json.loads(parsing.tools)
            request = ChatCompletionRequest(messages=[], tools=tools or None)
            options = {"chat_template_kwargs": {}, "model_config": self._model_config}
            parser = self._class(self._engine_tokenizer, request.tools, **options)
            request = parser.adjust_request(request)
        except Exception as problem:  # noqa: BLE001  the messages hold the client's tools
            log.info("vLLM's parsers refuse some tools: %s", type(problem).__name__)
            raise EngineError("invalid", "The engine's parser can't read these tools.") from None
        shown = () if request.skip_special_tokens else self._tokenizer.special_ids
        return OutputReader(parser, request, Detokenizer(self._tokenizer, shown), prompt)


class OutputReader:
    """Reads one generation. vLLM's parsers are made for one id at a time and differ when they get several, so that is
    how they get them. A parser that fails is let go, and the text that it had not passed on goes out as it is; so does
    all of the text if the parser made nothing of it."""

    def __init__(self, parser: Any, request: Any, detokenizer: Detokenizer, prompt: list[int]) -> None:
        self._parser = parser
        self._request = request
        self._detokenizer = detokenizer
        self._prompt = prompt
        self._unread = ""  # what the parser got and has said nothing about
        self._messages = MessageReader()

    def feed(self, ids: Sequence[int], *, finished: bool = False, stopped: bool = False) -> list[Delta]:
        """Deltas that these ids complete. With `finished` they are the last ones; with `stopped` the very last of them
        is a stop id, which is no text."""
        deltas: list[Delta] = []
        last = len(ids) - 1
        for n, token in enumerate(ids):
            text = "" if stopped and n == last else self._detokenizer.step(token) or ""
            end = finished and n == last
            deltas += self._parse(text + self._detokenizer.finish() if end else text, [token], end)
        if finished:
            if not ids:
                deltas += self._parse(self._detokenizer.finish(), [], True)
            if self._messages.silent:
                deltas += self._messages.text(self._unread)
            deltas += self._messages.finish(stopped)
        return deltas

    def _parse(self, text: str, ids: list[int], finished: bool) -> list[Delta]:
        if self._parser is None:
            return self._messages.text(text)
        self._unread += text
        try:
            message = self._parser.parse_delta(text, ids, self._request, self._prompt, finished=finished)
            deltas = [] if message is None else self._messages.read(message)
        except Exception as problem:  # noqa: BLE001  a parser trusts the model too much; the output must go on
            log.warning("vLLM's parser failed, the rest is passed on as text: %s", type(problem).__name__)
            self._parser = None
            text, self._unread = self._unread, ""
            return self._messages.text(text)
        if deltas:
            self._unread = ""
        return deltas


class _Call(Protocol):
    @property
    def name(self) -> str | None: ...

    @property
    def arguments(self) -> str | None: ...


class MessageReader:
    """vLLM's delta messages as deltas. vLLM numbers the calls and doesn't say when one ends: it does when the next one
    or text begins, and at the end of the output if its arguments are whole.

    White space before text is kept back: between reasoning, calls and text it is layout, and dropped.
    """

    def __init__(self) -> None:
        self._call: int | None = None
        self._arguments: list[str] = []
        self._blank = ""  # white space that may turn out to begin a text
        self._in: type[Delta] | None = None  # what was said last

    @property
    def silent(self) -> bool:
        """Whether nothing has been said at all."""
        return self._in is None

    def read(self, message: Any) -> list[Delta]:
        """One delta message, `vllm.entrypoints.generate.base.protocol.DeltaMessage` or alike."""
        deltas: list[Delta] = []
        if message.reasoning:
            deltas += self._reasoning(_whole(message.reasoning))
        if message.content:
            deltas += self.text(message.content)
        for call in message.tool_calls or ():
            if call.function is not None:
                deltas += self._called(call.index, call.function)
        return deltas

    def text(self, text: str) -> list[Delta]:
        """Visible text."""
        if self._in is not TextDelta:
            text = self._blank + _whole(text)
            self._blank = ""
            if not text.strip():
                self._blank = text
                return []
            if self._in is not None:
                text = text.lstrip()
        if not text:
            return []
        ended = self._end_call()
        self._in = TextDelta
        return [*ended, TextDelta(_whole(text))]

    def finish(self, stopped: bool) -> list[Delta]:
        """The output is over. With `stopped` the model itself ended it; then a call without arguments is whole too."""
        if self._call is None:
            return []
        arguments = "".join(self._arguments)
        whole = _is_json(arguments) if arguments.strip() else stopped
        return self._end_call() if whole else []

    def _reasoning(self, text: str) -> list[Delta]:
        if self._in is not ReasoningDelta:
            text = text.lstrip("\n")
            if not text:
                return []
        ended = self._end_call()
        self._in, self._blank = ReasoningDelta, ""
        return [*ended, ReasoningDelta(text)]

    def _called(self, index: int, call: _Call) -> list[Delta]:
        deltas: list[Delta] = []
        if index != self._call:
            if not call.name:  # more of a call that is over; nobody can be told of it any more
                return []
            deltas = [*self._end_call(), CallStart("function", _whole(call.name))]
            self._call, self._in, self._blank = index, CallStart, ""
        if call.arguments:
            text = _whole(call.arguments)
            self._arguments.append(text)
            deltas.append(CallDelta(text))
        return deltas

    def _end_call(self) -> list[Delta]:
        if self._call is None:
            return []
        bare = not "".join(self._arguments).strip()
        self._call, self._arguments = None, []
        return [CallDelta("{}"), CallEnd()] if bare else [CallEnd()]


def _whole(text: str) -> str:
    """Without lone surrogates, which parsers may find in JSON escapes and no frame can carry."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
