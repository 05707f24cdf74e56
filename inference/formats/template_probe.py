"""What a chat template does, found out by running it on made-up conversations when it is loaded.

First the forms it takes (`discover`), then whether its text only ever grows (`examine`). A template that passes is
rendered piece by piece; any doubt, and every turn is rendered whole. A template that looks at the words of messages can
still deceive a probe with other words; those that look at roles, counts, order, tools, reasoning or switches are seen.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from gateway.protocol.items import FunctionCall, FunctionCallOutput, Item, Message
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.format import Brief
from inference.formats.template_environment import ChatTemplate, TemplateFailure
from inference.formats.template_growth import TOOL, Drops, Examination, find_drops
from inference.formats.template_messages import Forms, tool_object
from inference.formats.template_parts import Inseparable, Renderer, TemplateParts
from inference.tokenizer import VocabularyError

SWITCHES = ("enable_thinking", "thinking")
"""Names by which templates let reasoning be turned on and off."""

EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
"""What `reasoning.effort` may say, least first."""

_USUAL = ("low", "medium", "high")

_HERMES = re.compile(
    r'<tool_call>\s*\{\s*"name":\s*"qname",\s*"arguments":\s*\{\s*"qkey":\s*"qvalue"\s*\}\s*\}\s*</tool_call>'
)
_THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
_OFFERED = [tool_object(TOOL)]


@dataclass(frozen=True, slots=True)
class Traits:
    """What `examine` found.

    `whole`: why the template can't be rendered piece by piece; "" if it can. `drops`: for (what follows, whether the
    message has reasoning) whether the template then shows an assistant's message otherwise than it was sampled.
    `opens_thinking`: it begins the model's thoughts itself. `hermes`: calls look as Hermes' do.
    """

    whole: str = ""
    drops: Drops = field(default_factory=dict)
    opens_thinking: bool = False
    hermes: bool = False


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _assistant(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **fields}


def discover(template: ChatTemplate) -> Forms:
    """The forms a template takes. Raises `VocabularyError` for one that doesn't even show what a user says."""
    parts = False
    if not _shows(template, [_user("quser")], "quser"):
        parts = True
        if not _shows(template, [_user([{"type": "text", "text": "quser"}])], "quser"):
            raise VocabularyError("the chat template doesn't show what a user says")

    def message(role: str, text: str) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": text}] if parts else text}

    user, answer = message("user", "quser"), message("assistant", "qanswer")
    late = [user, answer, message("system", "qlate"), message("user", "qmore")]
    system = _shows(template, [message("system", "qsystem"), user], "qsystem")
    told = [user, answer, message("developer", "qlate"), message("user", "qmore")]
    developer = "developer" in template.source and _in_order(_shown(template, told), "qanswer", "qlate", "qmore")
    return Forms(
        parts=parts,
        system=system,
        late_system=system and _in_order(_shown(template, late), "qanswer", "qlate", "qmore"),
        developer=developer,
        repeats=_shows(template, [user, message("user", "qmore")], "quser", "qmore"),
        thoughts=tuple(name for name in _THOUGHT_FIELDS if _reads(template.source, name)),
        tools=_shows(template, [user], "qname", "qdescription", tools=_OFFERED),
        **_call_form(template, user, message("assistant", "")["content"]),
    )


def _call_form(template: ChatTemplate, user: dict[str, Any], empty: Any) -> dict[str, Any]:
    """`Forms.calls` and what belongs to it."""

    def shows(arguments: Any, ids: Sequence[str], *needles: str) -> str:
        functions = [{"name": f"qname{i}", "arguments": arguments} for i in range(len(ids))]
        made = [{"id": id_, "type": "function", "function": f} for id_, f in zip(ids, functions, strict=True)]
        said = [f"qoutput{i}" for i in range(len(ids))]
        outputs = [
            {
                "role": "tool",
                "content": [{"type": "text", "text": text}] if isinstance(empty, list) else text,
                "name": f"qname{i}",
                "tool_call_id": ids[i],
            }
            for i, text in enumerate(said)
        ]
        messages = [user, _assistant(empty, tool_calls=made), *outputs]
        wanted = (*(f"qname{i}" for i in range(len(ids))), *said, *needles)
        # Some show calls only where tools are offered.
        return _shown(template, messages, *wanted) or _shown(template, messages, *wanted, tools=_OFFERED)

    for short, ids in (
        (False, ["call_qfirst0000", "call_qsecond000"]),
        (True, ["qfirst000", "qsecond00"]),
        (False, ["call_qfirst0000"]),
    ):
        found = {"single_calls": len(ids) == 1, "short_ids": short}
        text = shows({"qkey": "qvalue"}, ids, "qkey", "qvalue")
        printed = shows('{"qkey": "qvalue"}', ids, '{"qkey": "qvalue"}') != ""
        if text and "{'qkey'" not in text:  # a dictionary as Python prints it is no JSON
            return {"calls": "object", "text_calls": printed, **found}
        if printed:
            return {"calls": "text", "text_calls": True, **found}
    return {"calls": None}


def _reads(source: str, name: str) -> bool:
    """Whether the template reads this field of a message."""
    quoted = rf"['\"]{name}['\"]"
    return re.search(rf"\.{name}\b|\[\s*{quoted}\s*\]|{quoted}\s+in\b|get\(\s*{quoted}", source) is not None


def _shown(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], *needles: str, tools: list[dict[str, Any]] | None = None
) -> str:
    """The template's text if all needles are in it, else nothing."""
    try:
        text = template.render(messages, tools)
    except TemplateFailure:
        return ""
    return text if all(needle in text for needle in needles) else ""


def _shows(
    template: ChatTemplate, messages: Sequence[dict[str, Any]], *needles: str, tools: list[dict[str, Any]] | None = None
) -> bool:
    return _shown(template, messages, *needles, tools=tools) != ""


def _in_order(text: str, *needles: str) -> bool:
    """Whether they are all in the text, one behind the other."""
    return re.search(".*".join(needles), text, re.DOTALL) is not None


def glues(renderer: Renderer) -> bool:
    """Whether the template writes clients' text between the brackets of control tokens."""
    insides = {token.text[1:-1] for token in renderer.encoder.added if not token.harmless and len(token.text) > 2}
    shapes = {re.sub(r"\w+", "", inside): inside for inside in sorted(insides)}.values()
    words = sorted({*shapes, *(re.sub(r"^\W+|\W+$", "", inside) for inside in shapes)} - {""})
    return any(_controls(renderer, word) != _controls(renderer, "q" * 7) for word in words)


def _controls(renderer: Renderer, word: str) -> int:
    """How many control tokens a conversation has in which everything a client can name is `word`."""
    tool = Tool("function", word, None, word, {"type": "object", "properties": {word: {"type": "string"}}})
    call = FunctionCall("c", word, json.dumps({word: word}))
    items: list[Item] = [Message("user", word), call, FunctionCallOutput("c", word), Message("assistant", word)]
    build = renderer.whole(Brief(word, None, ToolSet((tool,))), [*items, Message("user", word)], {}, {})
    try:
        text, _ = renderer.shielded(build)
    except TemplateFailure:
        return 0
    return sum(not isinstance(piece, str) and not piece.harmless for piece in renderer.encoder.pieces(text))


def efforts(template: ChatTemplate, forms: Forms) -> tuple[str, ...]:
    """The words for an effort that the template takes, least first; none if it knows no effort."""
    if "reasoning_effort" not in template.variables:
        return ()
    known = [word for word in EFFORTS if word in _USUAL or re.search(rf"['\"]{word}['\"]", template.source)]
    user = _user([{"type": "text", "text": "quser"}] if forms.parts else "quser")
    return tuple(word for word in known if _takes(template, user, {"reasoning_effort": word}))


def _takes(template: ChatTemplate, user: dict[str, Any], settings: dict[str, Any]) -> bool:
    try:
        template.render([user], settings=settings)
    except TemplateFailure:
        return False
    return True


def switches(template: ChatTemplate) -> tuple[str, ...]:
    """The switches for reasoning that the template knows."""
    return tuple(name for name in SWITCHES if name in template.variables)


def _settings(template: ChatTemplate, forms: Forms) -> list[dict[str, Any]]:
    """How requests can set the template's switches."""
    words = [{"reasoning_effort": word} for word in efforts(template, forms)]
    sides = [dict.fromkeys(switches(template), side) for side in (False, True)]
    found: list[dict[str, Any]] = [{}, *sides, *({**side, **word} for side in sides for word in words)]
    return [settings for i, settings in enumerate(found) if settings not in found[:i]]


def examine(renderer: Renderer) -> tuple[Traits, TemplateParts | None]:
    """What the template does, and its parts if it can be rendered piece by piece."""
    template = renderer.template
    asked: list[Item] = [Message("user", "quser"), FunctionCall("c", "qname", '{"qkey": "qvalue"}')]
    answered = [*asked, FunctionCallOutput("c", "qoutput")]
    hermes = renderer.forms.calls is None
    ends = []
    for brief, items in ((Brief(), [Message("user", "quser")]), (Brief(tools=ToolSet((TOOL,))), answered)):
        try:
            text, _ = renderer.shielded(renderer.whole(brief, items, {}, {}))
        except TemplateFailure:
            continue
        ends.append(text.rstrip().endswith("<think>"))
        hermes = hermes or _HERMES.search(text) is not None
    opens = bool(ends) and all(ends)
    if not renderer.forms.repeats or not renderer.forms.system:
        return Traits("it wants roles to take turns, or has none for the system", {}, opens, hermes), None
    if renderer.forms.single_calls:
        return Traits("calls are shown one by one", {}, opens, hermes), None
    try:
        parts = TemplateParts(renderer)
        drops = find_drops(renderer, parts, switches(template))
        Examination(renderer, parts, drops, _settings(template, renderer.forms)).run()
    except (Inseparable, TemplateFailure) as error:
        return Traits(str(error), {}, opens, hermes), None
    return Traits("", drops, opens and parts.opening({}).rstrip().endswith("<think>"), hermes), parts
