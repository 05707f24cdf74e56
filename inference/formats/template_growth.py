"""Whether a chat template's text only ever grows: the conversations it is tried on, and what must hold for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

from gateway.protocol.items import (
    CustomToolCall,
    FunctionCall,
    FunctionCallOutput,
    Item,
    Message,
    Reasoning,
    ReasoningText,
)
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.format import Brief
from inference.formats.template_parts import Inseparable, Renderer, Rendering, TemplateParts
from inference.formats.template_tokens import Shield

Kind = Literal["user", "outputs"]
Drops = Mapping[tuple[Kind, bool], bool]
Group = Sequence[Item]

_LONG = 24  # rounds: more than a template that shows only the newest few would keep
TOOL = Tool("function", "qname", None, "qdescription", {"type": "object", "properties": {"qkey": {"type": "string"}}})
_BRIEFS = (
    Brief(),
    Brief(instructions="qsystem"),
    Brief(tools=ToolSet((TOOL,))),
    Brief(instructions="qsystem", tools=ToolSet((TOOL, Tool("custom", "qcustom", "qspace", "qdescription")))),
)


def spoken_kind(added: Sequence[Item]) -> Kind:
    """What follows an assistant's message: a new query, or something within its round."""
    return "user" if any(isinstance(item, Message) and item.role != "assistant" for item in added) else "outputs"


def is_said(item: Item) -> bool:
    """Whether an assistant's turn left this item."""
    return isinstance(item, Reasoning | FunctionCall | CustomToolCall) or (
        isinstance(item, Message) and item.role == "assistant"
    )


def find_drops(renderer: Renderer, parts: TemplateParts, switches: Sequence[str]) -> Drops:
    """`Traits.drops`."""
    shield = Shield(renderer.encoder)
    ask: list[Item] = [Message("user", "quser")]
    thought = Reasoning(content=(ReasoningText("qthought"),))
    followed: Mapping[Kind, list[Item]] = {
        "user": [Message("assistant", "qanswer"), Message("user", "qmore")],
        "outputs": [Message("assistant", "qanswer"), FunctionCall("c", "qname", "{}"), FunctionCallOutput("c", "qout")],
    }
    before = parts.body(ask, {})(shield)
    plain = before + parts.opening({})
    found: dict[tuple[Kind, bool], bool] = {}
    for kind, items in followed.items():
        text = parts.body([*ask, *items], {})(shield)
        found[kind, False] = not text.startswith(plain + "qanswer")
        text = parts.body([*ask, thought, *items], {})(shield)
        found[kind, True] = not (text.startswith(plain) and "qthought" in text)
    # An opening that says "answer at once" by an empty thought: gone with the round that it was sampled in. Within the
    # round it stays, as all that was sampled does.
    for name in switches:
        text = parts.body([*ask, *followed["user"]], {})(shield)
        said = before + parts.opening({name: False}) + "qanswer"
        found["user", False] = found["user", False] or not text.startswith(said)
    return found


def forgets(drops: Drops, items: Sequence[Item], added: Sequence[Item]) -> bool:
    """`Format.forgets` of a template with these `Traits.drops`."""
    kind = spoken_kind(added)
    thought = plain = began = False
    for item in items:
        if not is_said(item):
            began = False
        elif isinstance(item, Reasoning):
            thought = began = thought or bool(item.content or item.summary)
        else:
            plain = plain or not began
            began = True
    return (thought and drops[kind, True]) or (plain and drops[kind, False])


class Examination:
    """Tries the pieces against the whole. `run` raises `Inseparable`, or `TemplateFailure` where the template refuses a
    conversation."""

    def __init__(
        self, renderer: Renderer, parts: TemplateParts, drops: Drops, settings: Sequence[Mapping[str, Any]]
    ) -> None:
        """`settings` are those of the template's switches that requests can bring about."""
        self._renderer = renderer
        self._parts = parts
        self._drops = drops
        self._shield = Shield(renderer.encoder)
        self._bodies: dict[tuple[tuple[Item, ...], tuple[str, ...]], str] = {}
        self._settings = settings

    def run(self) -> None:
        for groups in _conversations():
            self._grows(groups)
            for brief in _BRIEFS:
                for count in range(1, len(groups) + 1, 2):
                    self._joins(brief, list(chain(*groups[:count])), {})
        for settings in self._settings:
            for groups in _conversations()[:2]:
                self._joins(_BRIEFS[-1], list(chain(*groups)), settings)
        self._joins(_BRIEFS[1], list(chain(*_long_talk())), {})
        self._ends_alike()

    def _grows(self, groups: Sequence[Group]) -> None:
        """Every turn of a conversation, and every place that it may be cut back to."""
        for count in range(1, len(groups) + 1, 2):
            body = self._body(list(chain(*groups[:count])))
            for cut in range(1, count):
                left, right = list(chain(*groups[:cut])), list(chain(*groups[cut:count]))
                tail = self._body(right, left)
                if not tail or not body.endswith(tail):
                    raise Inseparable("a message is shown otherwise depending on those before it")
                if cut % 2 == 1 and not forgets(self._drops, _newest_round(left), right):
                    self._follows(body[: len(body) - len(tail)], self._body(left), tail)
            if count > 1:
                self._stays(body, groups[:count])

    def _follows(self, before: str, shown: str, tail: str) -> None:
        """The first of an assistant's messages may be rendered anew behind what the user said."""
        if before != shown:
            raise Inseparable("a message is shown otherwise depending on those behind it")
        if not self._renderer.encoder.parts_cleanly(before, tail):
            raise Inseparable("messages have no control token between them")

    def _stays(self, body: str, groups: Sequence[Group]) -> None:
        """What was sampled last stays as it is, if it isn't forgotten, and the new items follow it."""
        added = groups[-1]
        earlier = list(chain(*groups[:-2]))
        if forgets(self._drops, groups[-2], added):
            return
        opened = self._body(earlier) + self._parts.opening({})
        tail = self._body(added, [*earlier, *groups[-2]])
        if not body.startswith(opened):
            raise Inseparable("an assistant's message doesn't begin with what makes the assistant speak")
        before = body[: len(body) - len(tail)]
        if not before.endswith(self._parts.turn_end):
            raise Inseparable("assistants' messages end in different ways")
        if not self._renderer.encoder.parts_cleanly(self._parts.turn_end or "x", tail):
            raise Inseparable("messages have no control token between them")

    def _joins(self, brief: Brief, items: list[Item], settings: Mapping[str, Any]) -> None:
        """Head, body and opening are the whole, as text and as ids."""
        parts, encoder = self._parts, self._renderer.encoder
        pieces = [
            self._text(parts.head(brief, settings)),
            self._text(parts.body(items, {})),
            parts.opening(settings),
        ]
        whole = self._text(self._renderer.whole(brief, items, {}, settings))
        if "".join(pieces) != whole:
            raise Inseparable("head, body and opening together differ from the whole")
        clean = encoder.parts_cleanly(pieces[0], pieces[1]) and encoder.parts_cleanly(pieces[1], pieces[2])
        ids = [encoder.ids(piece, self._shield) for piece in (*pieces, whole)]
        if not clean or b"".join(ids[:3]) != ids[3]:
            raise Inseparable("head, body and opening have no control token between them")

    def _ends_alike(self) -> None:
        """Calls are closed as answers are, so that `Format.spoken` needn't know which it closes."""
        end = self._parts.turn_end
        call: list[Item] = [Message("user", "quser"), FunctionCall("c", "qname", "{}")]
        if not self._body(call).endswith(end):
            raise Inseparable("calls and answers end in different ways")

    def _body(self, items: Sequence[Item], behind: Sequence[Item] = ()) -> str:
        calls = _pending(behind)
        key = (tuple(items), tuple(calls))
        if key not in self._bodies:
            self._bodies[key] = self._text(self._parts.body(items, calls))
        return self._bodies[key]

    def _text(self, build: Rendering) -> str:
        return build(self._shield)


def _newest_round(items: Sequence[Item]) -> Sequence[Item]:
    """What follows the newest query."""
    queries = [i for i, item in enumerate(items) if isinstance(item, Message) and item.role == "user"]
    return items[queries[-1] + 1 :]


def _pending(items: Sequence[Item]) -> dict[str, str]:
    waiting = {item.call_id: item.name for item in items if isinstance(item, FunctionCall)}
    for item in items:
        if isinstance(item, FunctionCallOutput):
            waiting.pop(item.call_id, None)
    return waiting


def _conversations() -> Sequence[Sequence[Group]]:
    """Conversations as what is put in and what the assistant says, in turn."""

    def user(*texts: str) -> Group:
        return [Message("user", text) for text in texts]

    def answer(text: str) -> Message:
        return Message("assistant", text)

    def calls(*ids: str) -> Iterator[FunctionCall]:
        return (FunctionCall(f"call_{i}", "qname", f'{{"qkey": "q{i}"}}') for i in ids)

    def outputs(*ids: str) -> Group:
        return [FunctionCallOutput(f"call_{i}", f"qoutput{i}") for i in ids]

    thought = Reasoning(content=(ReasoningText("qthought"),))
    return (
        (user("q1"), [answer("qa1")], user("q2"), [answer("qa2")], user("q3")),
        (
            user("q1"),
            [thought, *calls("a")],
            outputs("a"),
            [thought, answer("qa1")],
            user("q2"),
            [thought, answer("qa2"), *calls("b", "c", "d")],
            outputs("b", "c", "d"),
            [*calls("e")],
            outputs("e"),
            [answer("qa3")],
            user("q3"),
        ),
        (
            user("q1", "q2"),
            [thought, answer("qa1")],
            [Message("system", "q3"), *user("q4")],
            [answer("qa2")],
            user("q5"),
        ),
        (
            user(" q1\n\n"),
            [answer("qa1  qa")],
            user(""),
            [FunctionCall("call_z", "qname", "")],
            [FunctionCallOutput("call_z", ""), *user("\nq2 ")],
        ),
    )


def _long_talk() -> Sequence[Group]:
    rounds = ([Message("user", f"q{i}"), Message("assistant", f"qa{i}")] for i in range(_LONG))
    return [*rounds, [Message("user", "qlast")]]
