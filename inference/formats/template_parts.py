"""Head, body and opening, cut out of what a chat template makes of whole conversations.

New items are rendered behind a short stand-in for what precedes them, whose last text is a mark that no client's text
holds; what follows the mark, less what closes the message it stands in, is the items' own. So a turn costs what is new
in it, however long the conversation is. Whether the pieces together are what the template makes of everything at once
is for `inference.formats.template_probe` to find out.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from gateway.protocol.items import (
    CallOutput,
    CustomToolCall,
    CustomToolCallOutput,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
)
from inference.formats.format import Brief
from inference.formats.template_environment import ChatTemplate, TemplateFailure
from inference.formats.template_messages import (
    ChatMessage,
    Forms,
    chat_messages,
    covered_tool,
    shown_tools,
    system_text,
    with_system,
)
from inference.formats.template_tokens import AddedToken, Shield, TemplateEncoder

Built = TypeVar("Built")
Settings = Mapping[str, Any]

_ODD = "the chat template can't show this conversation piece by piece"


class Inseparable(Exception):
    """The template's text can't be cut into head, body and opening; the text says what is in the way."""


class Renderer:
    """A template, its vocabulary and the forms it takes. All texts it returns are covered by the `Shield` given."""

    def __init__(self, template: ChatTemplate, encoder: TemplateEncoder, forms: Forms) -> None:
        self.template = template
        self.encoder = encoder
        self.forms = forms

    def shielded(self, build: Callable[[Shield], Built]) -> tuple[Built, Shield]:
        """What `build` makes, and a shield none of whose characters occurred in the texts it covered on the way."""
        shield = Shield(self.encoder)
        try:
            built = build(shield)
        except TemplateFailure:
            if not shield.clashes:
                raise
        else:
            if not shield.clashes:
                return built, shield
        shield = Shield(self.encoder, shield.clashes)
        return build(shield), shield

    def ids(self, build: Callable[[Shield], str]) -> bytes:
        """The ids of a rendering."""
        text, shield = self.shielded(build)
        return self.encoder.ids(text, shield)

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str], settings: Settings) -> Rendering:
        """The text of a whole conversation, with what makes the assistant speak."""

        def build(shield: Shield) -> str:
            system = system_text(brief, self.forms)
            messages = chat_messages(items, calls, self.forms, shield.cover)
            messages = with_system(system, messages, self.forms, shield.cover)
            return self.render(messages, self.tools(brief, shield), settings, shield)

        return build

    def tools(self, brief: Brief, shield: Shield) -> list[dict[str, Any]] | None:
        """The tools as the template is given them."""
        if not self.forms.tools:
            return None
        return [covered_tool(tool, shield.cover, shield.cover_all) for tool in shown_tools(brief.tools)] or None

    def render(
        self,
        messages: Sequence[ChatMessage],
        tools: Sequence[dict[str, Any]] | None,
        settings: Settings,
        shield: Shield,
        opened: bool = True,
    ) -> str:
        """Raises `TemplateFailure`."""
        return self.template.render(messages, tools, opened, settings, shield.characters)


Rendering = Callable[[Shield], str]


class TemplateParts:
    """The pieces of a template's text. Raises `Inseparable` where there are none.

    `turn_end` is what closes an assistant's message: nothing, or a control token and what follows it.
    """

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        shield = Shield(renderer.encoder)
        first, second = shield.marks
        said: Item = Message("assistant", first)
        try:
            closed = self._behind(self._messages([Message("user", first)], shield), shield, {}, opened=False)
            opened = self._behind(self._messages([Message("user", first)], shield), shield, {})
            self._user_end = _common(renderer.encoder, closed, opened)
            self._openings: dict[tuple[tuple[str, Any], ...], str] = {(): opened.removeprefix(self._user_end)}
            behind = self._behind(self._messages([Message("user", "x"), said], shield), shield, {})
            self.turn_end = behind.removesuffix(self.opening({}))
            talk = self._messages([Message("user", "x"), said, Message("user", second)], shield)
            behind = self._behind(talk, shield, {})
        except TemplateFailure as failure:
            raise Inseparable(f"it refuses a plain conversation: {failure}") from failure
        if not behind.startswith(self.turn_end) or second not in behind:
            raise Inseparable("what closes an assistant's message depends on what follows")
        self._user_lead = behind[len(self.turn_end) : behind.index(second)]
        if self.turn_end and renderer.encoder.token_at(self.turn_end, 0) is None:
            raise Inseparable("an assistant's message doesn't end with a control token")

    def opening(self, settings: Settings) -> str:
        """What makes the assistant speak."""
        key = tuple(sorted(settings.items()))
        if (known := self._openings.get(key)) is None:
            shield = Shield(self._renderer.encoder)
            messages = self._messages([Message("user", shield.marks[0])], shield)
            known = _cut(self._behind(messages, shield, settings), self._user_end)
            if len(self._openings) < 64:  # efforts are few, but clients write them
                self._openings[key] = known
        return known

    def head(self, brief: Brief, settings: Settings) -> Rendering:
        """Everything before the first item. Raises `TemplateFailure`, as do the others."""

        def build(shield: Shield) -> str:
            forms = self._renderer.forms
            mark = shield.marks[0]
            system = system_text(brief, forms)
            messages = with_system(system, self._messages([Message("user", mark)], shield), forms, shield.cover)
            text = self._renderer.render(messages, self._renderer.tools(brief, shield), settings, shield)
            before, found, behind = text.rpartition(mark)
            if not found or behind != self._user_end + self.opening(settings) or not before.endswith(self._user_lead):
                raise TemplateFailure(_ODD)
            return before.removesuffix(self._user_lead)

        return build

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> Rendering:
        """The items alone."""

        def build(shield: Shield) -> str:
            messages = chat_messages(items, calls, self._renderer.forms, shield.cover)
            if not messages:
                return ""
            before, end = self._before(messages[0], items, calls, shield)
            text = _cut(self._behind([*before, *messages], shield, {}), end)
            opening = self.opening({})
            if messages[-1]["role"] != "assistant" and not text.endswith(opening):
                raise TemplateFailure(_ODD)
            return text.removesuffix(opening)

        return build

    def _before(
        self, first: ChatMessage, items: Sequence[Item], calls: Mapping[str, str], shield: Shield
    ) -> tuple[list[ChatMessage], str]:
        """(a short stand-in for what precedes the items, what closes it)."""
        mark = shield.marks[0]
        outputs = _leading_outputs(items)
        if outputs:
            given = json.dumps({"x": mark}, ensure_ascii=False)
            earlier = [FunctionCall(output.call_id, calls.get(output.call_id, "x"), given) for output in outputs]
            before = self._messages([Message("user", "x"), *earlier], shield)
            return before, self._behind(before, shield, {}).removesuffix(self.opening({}))
        if first["role"] == "assistant":
            return self._messages([Message("user", mark)], shield), self._user_end
        return self._messages([Message("user", "x"), Message("assistant", mark)], shield), self.turn_end

    def _messages(self, items: Sequence[Item], shield: Shield) -> list[ChatMessage]:
        return chat_messages(items, {}, self._renderer.forms, shield.cover_trusted)

    def _behind(self, messages: Sequence[ChatMessage], shield: Shield, settings: Settings, opened: bool = True) -> str:
        """What the template writes behind the mark."""
        text = self._renderer.render(messages, None, settings, shield, opened)
        _, found, behind = text.rpartition(shield.marks[0])
        if not found:
            raise TemplateFailure(_ODD)
        return behind


def _leading_outputs(items: Sequence[Item]) -> list[CallOutput]:
    found: list[CallOutput] = []
    for item in items:
        if isinstance(item, FunctionCallOutput | CustomToolCallOutput):
            found.append(item)
        elif isinstance(item, Message | FunctionCall | CustomToolCall | Reasoning):
            break
    return found


def _cut(text: str, start: str) -> str:
    if not text.startswith(start):
        raise TemplateFailure(_ODD)
    return text[len(start) :]


def _common(encoder: TemplateEncoder, closed: str, opened: str) -> str:
    """What a message ends with, whether or not the assistant is to speak: some templates write an end of text where it
    is not."""
    if opened.startswith(closed):
        return closed
    common = ""
    for left, right in zip(encoder.split(closed), encoder.split(opened), strict=False):
        if left != right:
            break
        common += left.text if isinstance(left, AddedToken) else left
    return common
