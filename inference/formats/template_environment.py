"""A checkpoint's own Jinja chat template: found, compiled and run the way transformers does it.

The template is the operator's file and runs in Jinja's sandbox; what it is fed is clients' text, so a rendering is
bounded in time and size. `strftime_now` gives the moment at which the template was loaded, for as long as the process
lives: a date that moves would change the head of every conversation at midnight and throw away its cached prefix.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import soft_str

from inference.tokenizer import VocabularyError

RENDER_S = 10.0
MAX_RENDERED_CHARS = 128 * 1024 * 1024

_ESCAPE = re.compile(r"\\(?:u([0-9a-f]{4})|.)", re.DOTALL)  # in JSON, and as Python prints strings
_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class TemplateFailure(Exception):
    """The template refused the conversation, broke on it or ran out of bounds. The text is for clients: the template's
    own words where they stand in it as written, so never a client's."""


class ChatTemplate:
    """One compiled template, with the texts of its special tokens. Safe to share between threads.

    `variables` are the names that it reads and does not set itself: the switches it knows.
    """

    def __init__(
        self,
        source: str,
        special: Mapping[str, str] | None = None,
        tool_source: str | None = None,
        now: datetime | None = None,
    ) -> None:
        """`tool_source` is rendered instead of `source` when tools are offered. Raises `VocabularyError`."""
        self.source = source if tool_source is None else f"{source}\n{tool_source}"
        self.special = dict(special or {})
        moment = now or datetime.now()  # noqa: DTZ005  transformers shows local time, too
        self._environment = _Environment(moment)
        try:
            self._plain = self._environment.from_string(source)
            self._with_tools = self._plain if tool_source is None else self._environment.from_string(tool_source)
            self.variables = frozenset(meta.find_undeclared_variables(self._environment.parse(self.source)))
        except (jinja2.TemplateError, RecursionError) as error:
            raise VocabularyError(f"the chat template can't be compiled: {type(error).__name__}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        opened: bool = True,
        settings: Mapping[str, Any] | None = None,
        kept: frozenset[str] = frozenset(),
    ) -> str:
        """The text of a conversation, in chat-completions form. `opened`: with what makes the assistant speak. `kept`
        are characters that stay as they are where the template prints JSON in ASCII, or values as Python does.

        Raises:
            TemplateFailure: see there.
        """
        template = self._with_tools if tools else self._plain
        values = {**self.special, **(settings or {}), "documents": None, "add_generation_prompt": opened}
        pieces: list[str] = []
        size = 0
        try:
            with self._environment.bounded(RENDER_S, kept):
                for piece in template.generate(messages=messages, tools=tools or None, **values):
                    self._environment.tick()
                    pieces.append(piece)
                    size += len(piece)
                    if size > MAX_RENDERED_CHARS:
                        raise TemplateFailure("the chat template makes too much text of this input")
        except jinja2.TemplateError as error:
            words = error.message or ""
            known = isinstance(error, _Refused) and words in self.source
            raise TemplateFailure(words if known else "the chat template can't show this conversation") from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            # What a template trips over: string + none, an index too far, too deep a schema.
            raise TemplateFailure("the chat template can't show this conversation") from error
        return "".join(pieces)


class _Refused(jinja2.TemplateError):
    """The template called `raise_exception`."""


class _Environment(ImmutableSandboxedEnvironment):
    """transformers' settings, filters and functions. Every look-up and call of a template also looks at the clock."""

    def __init__(self, now: datetime) -> None:
        extensions = [_Generation, loopcontrols]
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=extensions, finalize=self._printed)
        self._limits = threading.local()
        self.filters["tojson"] = self._to_json
        self.filters["string"] = lambda value: soft_str(self._printed(value))
        self.globals["raise_exception"] = _refuse
        self.globals["strftime_now"] = now.strftime

    def bounded(self, seconds: float, kept: frozenset[str]) -> _Bound:
        """A context in which `tick` raises once the time is up, and the characters `kept` are never escaped."""
        return _Bound(self._limits, time.monotonic() + seconds, kept)

    def tick(self) -> None:
        if time.monotonic() > getattr(self._limits, "deadline", float("inf")):
            raise TemplateFailure("the chat template takes too long over this input")

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.tick()
        return super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.tick()
        return super().getitem(obj, argument)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  as in Jinja
        __self.tick()
        return super().call(__context, __obj, *args, **kwargs)

    def _to_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
        return self._unescaped(text) if ensure_ascii else text

    def _printed(self, value: Any) -> Any:
        """Objects and lists as Python prints them; other values as they are."""
        return self._unescaped(str(value)) if isinstance(value, dict | list | tuple) else value

    def _unescaped(self, text: str) -> str:
        kept: frozenset[str] = getattr(self._limits, "kept", frozenset())

        def real(match: re.Match[str]) -> str:
            char = chr(int(match.group(1) or "0", 16))
            return char if char in kept else match.group()

        return _ESCAPE.sub(real, text) if kept else text


class _Bound:
    def __init__(self, limits: threading.local, deadline: float, kept: frozenset[str]) -> None:
        self._limits = limits
        self._deadline = deadline
        self._kept = kept

    def __enter__(self) -> None:
        self._limits.deadline = self._deadline
        self._limits.kept = self._kept

    def __exit__(self, *_: object) -> None:
        del self._limits.deadline, self._limits.kept


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training. Here the block is only its content."""

    tags = {"generation"}  # noqa: RUF012  as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Macro) -> str:
        content: str = caller()
        return content


def _refuse(message: str) -> NoReturn:
    raise _Refused(message)


def load_template(directory: Path, now: datetime | None = None) -> ChatTemplate:
    """The chat template of a checkpoint's folder: `chat_template.jinja`, or part of `tokenizer_config.json`.

    Raises:
        VocabularyError: no template, or files that can't be read.
    """
    settings = read_settings(directory, "tokenizer_config.json")
    special = {**special_tokens(settings), **special_tokens(read_settings(directory, "special_tokens_map.json"))}
    file = directory / "chat_template.jinja"
    try:
        found: Any = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
    except (OSError, ValueError) as error:
        raise VocabularyError(f"{file} can't be read: {error}") from error
    named: dict[str, Any] = {}
    if isinstance(found, list):
        named = {str(entry.get("name")): entry.get("template") for entry in found if isinstance(entry, dict)}
        found = named.get("default")
    if not isinstance(found, str):
        raise VocabularyError(f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json)")
    with_tools = named.get("tool_use")
    return ChatTemplate(found, special, with_tools if isinstance(with_tools, str) else None, now)


def read_settings(directory: Path, name: str) -> dict[str, Any]:
    """One of a checkpoint's JSON files; empty if there is none. Raises `VocabularyError` for one that is no object."""
    path = directory / name
    try:
        found = json.loads(path.read_bytes()) if path.is_file() else {}
    except (OSError, ValueError) as error:
        raise VocabularyError(f"{path} can't be read: {error}") from error
    if not isinstance(found, dict):
        raise VocabularyError(f"{path} is no JSON object")
    return found


def special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a tokenizer's settings name, as templates are given them."""
    found = {name: settings.get(name) for name in _SPECIAL_TOKENS}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in found.items()}
    return {name: value for name, value in texts.items() if isinstance(value, str)}
