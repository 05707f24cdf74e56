"""The general path: any checkpoint with a Jinja chat template, rendered by that template itself.

Ids equal those of transformers' `apply_chat_template`, with these differences, all of them deliberate:

- client text never becomes a control token (`inference.formats.template_tokens`);
- instructions and a leading system message share one system message, in the first user's where the template has none;
- what the template has no place for is said in the next best way (`inference.formats.template_messages`);
- dates stand still while the process lives (`inference.formats.template_environment`).

Where the template's text only ever grows it is rendered piece by piece (`appendable`). Else `whole` renders every turn
from the start, at a cost that grows with the conversation, and the caller keeps what the new ids share with the old.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import orjson

from gateway.protocol.errors import ApiError
from gateway.protocol.items import Item, Message
from gateway.protocol.tools import ToolChoice, ToolSet
from inference.engine import Guide, Parsing
from inference.formats.chatml import HERMES, call_begin
from inference.formats.chatml_parser import END_THINK, THINK, ChatMLParser
from inference.formats.format import Brief, Opening
from inference.formats.guides import check_grammars, forced_tool, output_guide
from inference.formats.template_environment import (
    ChatTemplate,
    TemplateFailure,
    load_template,
    read_settings,
)
from inference.formats.template_growth import forgets
from inference.formats.template_messages import chat_messages, shown_tools, tool_object
from inference.formats.template_parts import Renderer, Rendering
from inference.formats.template_probe import EFFORTS, discover, efforts, examine, glues, switches
from inference.formats.template_tokens import AddedToken, Shield, TemplateEncoder, added_tokens
from inference.formats.toolcalls import OPEN
from inference.tokenizer import HubTokenizer, Tokenizer, VocabularyError

_NO_REASONING = ("none", "minimal")
# The template prints arguments as JSON, a freeform tool's as well, so no raw form here: its grammar is only described.
_LAYOUT = replace(HERMES, begin=lambda tool: call_begin(tool.model_name), raw_end=None)
_CLOSED_THOUGHT = f"\n{END_THINK}\n\n"


class TemplateFormat:
    """`inference.formats.format.Format` for a checkpoint with any chat template.

    `appendable`: `head`, `body` and `opening` together are the prompt. Otherwise `whole` and `opening` are, `body` is
    not to be asked, and a turn's ids must be compared with the last turn's. `why_whole` says for the log what is in the
    way.
    """

    name = "template"

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate,
        added: Sequence[AddedToken],
        ends: Sequence[int] = (),
        engine_parses: bool = False,
    ) -> None:
        """Takes 0.05 to 0.6 s: the template is tried on made-up conversations.

        Args:
            tokenizer: encodes text.
            template: the checkpoint's own.
            added: all added tokens of the vocabulary.
            ends: ids that the checkpoint's settings say end a generation.
            engine_parses: the engine was started with parsers for this model's output.

        Raises:
            VocabularyError: a template that can't be used for conversations.
        """
        self.tokenizer = tokenizer
        self.engine_parses = engine_parses
        self._switches = switches(template)
        forms = discover(template)
        self._efforts = efforts(template, forms)
        renderer = Renderer(template, TemplateEncoder(tokenizer, added), forms)
        encoder = TemplateEncoder(tokenizer, added, glues(renderer))
        self.renderer = renderer = Renderer(template, encoder, forms)
        self.traits, self._parts = examine(renderer)
        self.speaks_ids = True
        self.appendable = self._parts is not None
        self.why_whole = self.traits.whole
        self._thinking = THINK in template.source or END_THINK in template.source
        kinds = (False, True) if self._thinking or engine_parses else (False,)
        drops = self.traits.drops
        self.forgetful = any(dropped for (_, reasoned), dropped in drops.items() if reasoned in kinds)
        self._turn_end, self._closing = self._turn_ends()
        ends = [self._turn_end, *ends] if self._turn_end is not None else ends
        self.stop_ids = tuple(dict.fromkeys(ends))

    def head(self, brief: Brief) -> bytes:
        """See `Format.head`. Empty where the whole is rendered."""
        if self._parts is None:
            return b""
        return self._ids(self._parts.head(brief, self._settings(brief)))

    def body(self, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """See `Format.body`. For an appendable template only. Raises `ApiError` (unsupported_parameter) for images and
        files, and (invalid_prompt) for what the template refuses."""
        if self._parts is None:
            raise TypeError(f"this template is rendered whole: {self.why_whole}")
        return self._ids(self._parts.body(items, calls))

    def whole(self, brief: Brief, items: Sequence[Item], calls: Mapping[str, str]) -> bytes:
        """Ids of the whole conversation: what `opening` then completes to a prompt. Works for every template, in
        O(conversation). `items` are all but the preamble; `calls` as for `body`. Raises `ApiError` as `body` does."""
        rendering = self.renderer.whole(brief, items, calls, self._settings(brief))
        if self._parts is None:
            return self._ids(rendering)
        opening = self._parts.opening(self._settings(brief))
        return self._ids(lambda shield: rendering(shield).removesuffix(opening))

    def forgets(self, items: Sequence[Item], added: Sequence[Item]) -> bool:
        """See `Format.forgets`. False where the whole is rendered."""
        return self.forgetful and forgets(self.traits.drops, items, added)

    def opening(self, brief: Brief) -> Opening:
        """See `Format.opening`. Where the whole is rendered, that already holds what makes the assistant speak, and the
        ids here are only those of a forced call or of thoughts cut short.

        What can be held to depends on whether the model's calls look as Hermes' do. If not, a required or named tool, a
        narrower choice of tools and a text format beside tools are refused (unsupported_parameter); strict functions
        and one call at a time are then left to the model, as grammars of freeform tools are always.
        """
        guide, room = self._guide(brief)
        settings = self._settings(brief)
        text = "" if self._parts is None else self._parts.opening(settings)
        forced = f"{THINK}\n" if self.traits.opens_thinking and self._thinks(settings) else ""
        if self.engine_parses:
            tools = [tool_object(tool) for tool in shown_tools(brief.tools)]
            return Opening(self._plain_ids(text), "", guide, Parsing(json.dumps(tools, ensure_ascii=False)))
        if forced and not room:
            text, forced = text + _CLOSED_THOUGHT, ""
        if (tool := forced_tool(brief.tools)) is not None:
            forced = call_begin(tool.model_name)
            ids = self._plain_ids(text + OPEN) + self.tokenizer.encode(forced.removeprefix(OPEN))
            return Opening(ids, forced, guide)
        return Opening(self._plain_ids(text), forced, guide)

    def spoken(self, sampled: Sequence[int]) -> tuple[int, bytes]:
        """See `Format.spoken`."""
        if not sampled or sampled[-1] not in self.stop_ids:
            return len(sampled), self._closing
        if sampled[-1] == self._turn_end and (self._closing or self._parts is None):
            return len(sampled), self._closing[4:]
        return len(sampled) - 1, self._closing

    def parser(self, tools: ToolSet, opening: Opening) -> ChatMLParser:
        """`<think>` blocks if the template knows them, calls if they look as Hermes' do; the rest is text."""
        return ChatMLParser(self.tokenizer, tools if self.traits.hermes else ToolSet(), self._thinking, opening.forced)

    def _plain_ids(self, text: str) -> bytes:
        """Ids of text of the template's."""
        return self.renderer.encoder.ids(text, Shield(self.renderer.encoder))

    def _ids(self, rendering: Rendering) -> bytes:
        try:
            return self.renderer.ids(rendering)
        except TemplateFailure as failure:
            raise ApiError("invalid_prompt", f"this model's chat template: {failure}", "input") from failure
        except RecursionError as error:
            raise ApiError("invalid_prompt", "a tool's schema or a call's arguments are nested too deep") from error

    def _settings(self, brief: Brief) -> dict[str, Any]:
        """What the template's switches are set to. Without `reasoning.effort` its own defaults hold."""
        found: dict[str, Any] = {}
        if brief.effort is not None:
            off = brief.effort in _NO_REASONING
            found = dict.fromkeys(self._switches, not off)
            if self._efforts and not (self._switches and off):
                found["reasoning_effort"] = self._nearest(brief.effort)
        if self._switches and not self.engine_parses and not self._guide(brief)[1]:
            # Under a guide there is no other way to keep the model from thinking first.
            found.update(dict.fromkeys(self._switches, False))
        return found

    def _nearest(self, effort: str) -> str:
        """The template's word for an effort: the same, or the next one to it."""
        wanted = EFFORTS.index(effort) if effort in EFFORTS else EFFORTS.index("medium")
        return min(reversed(self._efforts), key=lambda word: abs(EFFORTS.index(word) - wanted))

    def _thinks(self, settings: Mapping[str, Any]) -> bool:
        """Whether a template that opens thoughts by itself does so with these settings."""
        if self._parts is not None:
            return self._parts.opening(settings).rstrip().endswith(THINK)
        return all(settings.get(name) is not False for name in self._switches)

    def _guide(self, brief: Brief) -> tuple[Guide | None, bool]:
        tools = brief.tools
        tool = forced_tool(tools)
        if self.traits.hermes:
            if tool is not None and self.engine_parses:
                # The engine's parser must see the call from its start, so that can't be in the prompt. Offered twice,
                # the tool is no choice of one, and one call is all that is let through.
                tools = ToolSet((tool, tool), ToolChoice("required"), parallel=False)
            return output_guide(tools, brief.text, _LAYOUT)
        check_grammars(tools)
        unknown = "this gateway doesn't know how this model writes calls"
        if tools.choice.mode == "required" or (tools.choice.names and tools.callable()):
            text = f"{unknown}, so it can't hold it to a choice of tools; use auto or none"
            raise ApiError("unsupported_parameter", text, "tool_choice")
        if brief.text.type != "text" and tools.callable():
            text = f"{unknown}, so a text format can't be held beside tools; leave one of them out"
            raise ApiError("unsupported_parameter", text, "text.format")
        return output_guide(ToolSet(), brief.text, _LAYOUT)

    def _turn_ends(self) -> tuple[int | None, bytes]:
        """(the control token that ends an assistant's message, ids that close one)."""
        encoder = self.renderer.encoder
        if self._parts is not None and self._parts.turn_end:
            token = encoder.token_at(self._parts.turn_end, 0)
            return None if token is None else token.id, self._plain_ids(self._parts.turn_end)
        shield = Shield(encoder)
        mark = shield.marks[0]
        talk = [Message("user", "x"), Message("assistant", mark), Message("user", "x")]
        messages = chat_messages(talk, {}, self.renderer.forms, shield.cover_trusted)
        try:
            behind = self.renderer.render(messages, None, {}, shield).rpartition(mark)[2]
        except TemplateFailure:
            return None, b""
        controls = (piece for piece in encoder.pieces(behind) if isinstance(piece, AddedToken) and not piece.harmless)
        first = next(controls, None)
        return None if first is None else first.id, b""


def template_format(
    directory: Path | str,
    engine_parses: bool = False,
    tokenizer: HubTokenizer | None = None,
    vocabulary: dict[str, Any] | None = None,
    now: datetime | None = None,
) -> TemplateFormat:
    """The format of a checkpoint's folder.

    Args:
        directory: holds `tokenizer.json` and the chat template; settings beside them are read as far as they exist.
        engine_parses: see `TemplateFormat`.
        tokenizer: the folder's, if it is loaded already.
        vocabulary: what its `tokenizer.json` says, if that is read already.
        now: what the template's dates say; the time of loading if None.

    Raises:
        VocabularyError: unreadable files, no chat template, or one that can't be used for conversations.
    """
    folder = Path(directory)
    template = load_template(folder, now)
    data = read_vocabulary(folder) if vocabulary is None else vocabulary
    added = added_tokens(data)
    adapted = _as_rendered(data)
    if tokenizer is None or adapted is not data:
        path = str(folder / "tokenizer.json")
        try:
            tokenizer = HubTokenizer(adapted, path)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise VocabularyError(f"{path} can't be read as a tokenizer: {type(error).__name__}: {error}") from error
    ends = end_ids(folder, template, {token.text: token.id for token in added})
    form = TemplateFormat(tokenizer, template, added, ends, engine_parses)
    if not form.stop_ids:
        raise VocabularyError(f"nothing in {folder} says what ends a generation (eos_token_id, eos_token)")
    return form


def read_vocabulary(directory: Path) -> dict[str, Any]:
    """A checkpoint's `tokenizer.json`. Raises `VocabularyError`."""
    path = directory / "tokenizer.json"
    try:
        data = orjson.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise VocabularyError(f"{path} can't be read as a tokenizer: {type(error).__name__}: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model"), dict):
        raise VocabularyError(f"{path} can't be read as a tokenizer: it is no object with a model")
    return data


def end_ids(directory: Path, template: ChatTemplate, ids: Mapping[str, int]) -> list[int]:
    """The ids that a checkpoint's settings say end a generation, without repeats. Raises `VocabularyError`."""
    found: list[int] = []
    for name in ("generation_config.json", "config.json"):
        settings = read_settings(directory, name)
        inner = settings.get("text_config")
        for given in (settings, inner if isinstance(inner, dict) else {}):
            value = given.get("eos_token_id")
            found += [entry for entry in (value if isinstance(value, list) else [value]) if isinstance(entry, int)]
    if (end := ids.get(template.special.get("eos_token", ""))) is not None:
        found.append(end)
    return list(dict.fromkeys(found))


def _as_rendered(data: dict[str, Any]) -> dict[str, Any]:
    """The vocabulary as it must encode the pieces of a rendering; the same object if that makes no difference.

    Added tokens that are only white space are ordinary ones of the model, too, and merge as such. And a vocabulary that
    writes a space before the first word of a text must not do so behind every control token.
    """
    vocabulary = data["model"].get("vocab")
    blank = {token.text for token in added_tokens(data) if token.harmless}
    blank &= set(vocabulary) if isinstance(vocabulary, dict) else set()
    first = _prepends_first(data.get("pre_tokenizer"))
    if not blank and not first:
        return data
    kept = [entry for entry in data.get("added_tokens") or () if entry["content"] not in blank]
    before = _prepending_never(data["pre_tokenizer"]) if first else data.get("pre_tokenizer")
    return {**data, "added_tokens": kept, "pre_tokenizer": before}


def _prepends_first(step: Any) -> bool:
    if not isinstance(step, dict):
        return False
    if step.get("type") == "Sequence":
        return any(map(_prepends_first, step.get("pretokenizers") or ()))
    return step.get("type") == "Metaspace" and step.get("prepend_scheme") == "first"


def _prepending_never(step: dict[str, Any]) -> dict[str, Any]:
    if step.get("type") == "Sequence":
        return {**step, "pretokenizers": [_prepending_never(inner) for inner in step.get("pretokenizers") or ()]}
    return {**step, "prepend_scheme": "never"} if _prepends_first(step) else step
