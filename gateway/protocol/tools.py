"""Tools a request offers, flattened to what a model can call.

Hosted tools that this gateway cannot run are dropped (protocol.md 8.21): Codex sends some with every request.
A tool inside a `namespace` is offered to the model as `namespace.name` and mapped back on the way out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.protocol.deltas import CallKind


@dataclass(frozen=True, slots=True)
class Tool:
    """One callable tool. `parameters` is a JSON schema (function) or None; `grammar` is (syntax, definition) of a
    custom tool with a grammar, else None; `param` is where the request has the tool."""

    kind: CallKind
    name: str
    namespace: str | None = None
    description: str | None = None
    parameters: Mapping[str, Any] | None = None
    strict: bool = False
    grammar: tuple[str, str] | None = None
    param: str | None = field(default=None, compare=False)

    @property
    def model_name(self) -> str:
        """The name the model sees."""
        return self.name if self.namespace is None else f"{self.namespace}.{self.name}"


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`mode` none, auto or required; `names` narrows to these model names (a named choice is required + one name)."""

    mode: str = "auto"
    names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolSet:
    """All tools of one request, in the order given. `parallel` is parallel_tool_calls."""

    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = field(default_factory=ToolChoice)
    parallel: bool = True

    def by_model_name(self) -> dict[str, Tool]:
        """Look-up for a parser that has read a name in the model's output."""
        return {tool.model_name: tool for tool in self.tools}

    def callable(self) -> Sequence[Tool]:
        """The tools the choice leaves."""
        if self.choice.mode == "none":
            return ()
        if not self.choice.names:
            return self.tools
        return tuple(tool for tool in self.tools if tool.model_name in self.choice.names)
