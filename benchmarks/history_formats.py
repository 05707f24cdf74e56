"""Chat formats that only `benchmarks.history` has a use for."""

from __future__ import annotations

from dataclasses import replace

from inference.engine import Guide
from inference.formats.chatml import ChatMLFormat
from inference.formats.format import Brief, Opening

TOOL = "look"
_CALL = rf'<tool_call>\n\{{"name": "{TOOL}", "arguments": \{{"path": "[a-z]{{1,8}}"\}}\}}\n</tool_call>'
REASONS_AND_CALLS = rf"<think>\n[a-z ]{{10,40}}\n</think>\n\n{_CALL}(\n{_CALL}){{1,2}}"
"""A regex: a thought, then two or three calls of the tool `look`."""


class UncachedChat(ChatMLFormat):
    """As if the template could not be rendered in pieces: the session actor renders and encodes the whole conversation
    every turn."""

    appendable = False


class ForcedChat(ChatMLFormat):
    """Has a model of any quality reason and call tools in every turn. What it reasons, whom it asks for and how its
    words fall into tokens is sampled."""

    def opening(self, brief: Brief) -> Opening:
        """With the constraint in place of the request's own."""
        return replace(super().opening(brief), guide=Guide("regex", REASONS_AND_CALLS))
