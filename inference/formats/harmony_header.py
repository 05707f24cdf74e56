"""Headers of gpt-oss's messages, read as leniently as they are written.

A header has up to three sections: what stands before `<|channel|>` (role), behind it (channel), and behind
`<|constrain|>` (content type). Two ways to read one: a header that ended as it should may hold junk, so it is searched;
in one that broke off the content may have begun, so only its beginning counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from gateway.protocol.deltas import Phase
from gateway.protocol.tools import Tool
from inference.formats.harmony_tools import FUNCTIONS

MAX_NAME_CHARS = 128  # of an item's `name`

Section = Literal["role", "channel", "type"]

_NOBODY = ("user", "assistant", "all")
_CHANNEL = re.compile(r"analysis|commentary|final")
_TO = re.compile(rf"to=\s*|(?<![\w.=-])(?={FUNCTIONS}\.)")
_OTHER_ROLE = re.compile(rf"\s*(?:user|system|developer|tool|{FUNCTIONS}\.[\w.-]+)\b|\s*[\w.-]+\s+to=assistant\b")
_CALLED = r"(?:\s*to=\s*(?P<to>[\w.-]+))?"
_TYPE = r"(?:\s*(?:json|code)(?![a-z]))?"
_BEGINNING: Mapping[Section, re.Pattern[str]] = {
    "role": re.compile(rf"(?:\s*assistant)*{_CALLED}"),
    "channel": re.compile(rf"(?:\s*(?P<channel>analysis|commentary|final)(?![a-z]))?{_CALLED}{_TYPE}"),
    "type": re.compile(rf"{_TYPE}{_CALLED}"),
}


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says. `rest` is content that a broken-off header swallowed; `phase` is that of visible text."""

    kind: Literal["reasoning", "text", "call", "nothing"]
    phase: Phase | None = None
    tool: Tool | None = None
    json: bool = False
    rest: str = ""


def whole_header(sections: Mapping[Section, str], tools: Mapping[str, Tool]) -> Header:
    """A header that `<|message|>` ended."""
    if _OTHER_ROLE.match(sections["role"]):
        return Header("nothing")
    found = _CHANNEL.search(sections.get("channel", sections["role"]))
    tool = None
    for text in sections.values():
        if tool is None and (to := _TO.search(text)) is not None:
            tool = _called(text[to.end() :].split(), tools)
    if tool is None:
        return _plain(found.group() if found else None)
    is_json = "json" in sections.get("type", "") or sections.get("channel", "").endswith(" json")
    return Header("call", None, tool, is_json)


def broken_header(sections: Mapping[Section, str], tools: Mapping[str, Tool]) -> Header:
    """A header that ended without `<|message|>`."""
    if _OTHER_ROLE.match(sections["role"]):
        return Header("nothing")
    last: Section = "type" if "type" in sections else "channel" if "channel" in sections else "role"
    before = whole_header({"role": "", **{name: text for name, text in sections.items() if name != last}}, tools)
    beginning = _BEGINNING[last].match(sections[last])
    assert beginning is not None  # every part of the pattern is optional
    named = beginning.groupdict()
    rest = sections[last][beginning.end() :]
    if any(named.values()):
        rest = rest.lstrip()
    to = named.get("to")
    if (tool := before.tool or (_called([to], tools) if to else None)) is not None:
        return Header("call", None, tool, last == "type", rest)
    return replace(before, rest=rest) if last == "type" else _plain(named.get("channel"), rest)


def _plain(channel: str | None, rest: str = "") -> Header:
    """A message to nobody."""
    if channel == "analysis":
        return Header("reasoning", rest=rest)
    return Header("text", "commentary" if channel == "commentary" else "final_answer", rest=rest)


def _called(words: Sequence[str], tools: Mapping[str, Tool]) -> Tool | None:
    """The tool that words behind `to=` name; None for nobody."""
    if not tools or not words or words[0] in _NOBODY:
        return None
    for count in range(len(words), 0, -1):
        if (tool := _known("".join(words[:count]), tools)) is not None:
            return tool
    name = words[0].removeprefix(f"{FUNCTIONS}.")
    return Tool("function", name[:MAX_NAME_CHARS]) if name else None


def _known(word: str, tools: Mapping[str, Tool]) -> Tool | None:
    name = word.removeprefix(f"{FUNCTIONS}.")
    if (tool := tools.get(name) or tools.get(word)) is not None:
        return tool
    # A namespaced tool that the model called without its namespace, if only one fits.
    fitting = [tool for tool in tools.values() if tool.name == name]
    return fitting[0] if len(fitting) == 1 else None
