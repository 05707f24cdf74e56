"""Which chat format a checkpoint gets.

A format of its own (Harmony, Llama 3, ChatML) where the checkpoint's files speak for one, and, but for Harmony, its own
template agrees: both render a few made-up conversations when the model is loaded, and their ids must be the same. If
not, or where there is no format of its own, the template is rendered itself (`inference.formats.template`).

Left out of the comparison is what a format does otherwise on purpose: ChatML and Llama 3 show tools and calls also
where the template shows none, Llama 3 has tools in the system turn and puts several calls into one message, and its
date stands still. Harmony's reference is its library, not the template, whose date moves.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from gateway.protocol.errors import ApiError
from gateway.protocol.items import FunctionCall, FunctionCallOutput, Item, Message, Reasoning, ReasoningText
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.chatml import START, chatml_format
from inference.formats.format import Brief, Format
from inference.formats.harmony import harmony_format
from inference.formats.llama3 import DEFAULT_TODAY, START_HEADER, llama3_format
from inference.formats.template import TemplateFormat, read_vocabulary, template_format
from inference.formats.template_environment import TemplateFailure, load_template, read_settings
from inference.formats.template_tokens import added_tokens
from inference.tokenizer import HubTokenizer, VocabularyError

log = logging.getLogger(__name__)

Wanted = Literal["auto", "harmony", "chatml", "llama3", "template"]

_HARMONY = {"<|start|>", "<|channel|>", "<|message|>"}


@dataclass(frozen=True, slots=True)
class _Native:
    """A format of its own. `settings`: how its template must be asked to do as the format does. `parallel`: several
    calls of one turn look as in the template."""

    load: Callable[[Path], Format]
    settings: Mapping[str, Any]
    parallel: bool = True


_NATIVE: Mapping[str, _Native] = {
    "harmony": _Native(harmony_format, {}),
    "llama3": _Native(llama3_format, {"tools_in_user_message": False, "date_string": DEFAULT_TODAY}, parallel=False),
    "chatml": _Native(chatml_format, {}),
}


def choose_format(directory: Path | str, wanted: Wanted = "auto", engine_parses: bool = False) -> Format:
    """The format of a checkpoint's folder. Takes as long as its tokenizer does to load, and up to 0.7 s more.

    Args:
        directory: holds the checkpoint's tokenizer, template and settings (`inference.replica.TOKENIZER_FILES`).
        wanted: a format by name, then taken without comparison; or `auto`.
        engine_parses: the engine was started with parsers. Formats of their own take the output apart themselves, so
            this counts for `template` only.

    Raises:
        VocabularyError: files that are missing, can't be read, or are not those of the format wanted.
    """
    folder = Path(directory)
    if wanted != "auto":
        return template_format(folder, engine_parses) if wanted == "template" else _NATIVE[wanted].load(folder)
    vocabulary = read_vocabulary(folder)
    name = _candidate(folder, vocabulary)
    if name is None:
        return template_format(folder, engine_parses, vocabulary=vocabulary)
    try:
        form = _NATIVE[name].load(folder)
    except VocabularyError as error:
        log.warning("not served as %s: %s", name, error)
        return template_format(folder, engine_parses, vocabulary=vocabulary)
    return form if name == "harmony" else _verified(form, _NATIVE[name], folder, engine_parses, vocabulary)


def _candidate(folder: Path, vocabulary: dict[str, Any]) -> str | None:
    """What a checkpoint's files speak for."""
    if read_settings(folder, "config.json").get("model_type") == "gpt_oss":
        return "harmony"
    if {token.text for token in added_tokens(vocabulary)} >= _HARMONY:
        return "harmony"
    source = load_template(folder).source
    if START_HEADER in source:
        return "llama3"
    return "chatml" if START in source else None


def _verified(form: Format, native: _Native, folder: Path, engine_parses: bool, vocabulary: dict[str, Any]) -> Format:
    """The format, if the checkpoint's template agrees with it."""
    try:
        general = template_format(folder, engine_parses, cast("HubTokenizer", form.tokenizer), vocabulary)
    except VocabularyError as error:
        log.warning("the format %s is not compared with the chat template: %s", form.name, error)
        return form
    different = [
        case for case, brief, items in _cases(general, native) if not _agree(form, general, native, brief, items)
    ]
    if not different:
        return form
    log.warning(
        "the chat template is rendered itself, as it differs from the format %s in: %s", form.name, ", ".join(different)
    )
    return general


def _agree(form: Format, general: TemplateFormat, native: _Native, brief: Brief, items: list[Item]) -> bool:
    """Whether both make the same prompt of a conversation."""
    try:
        expected = general.renderer.ids(general.renderer.whole(brief, items, {}, native.settings))
        return form.head(brief) + form.body(items, {}) + form.opening(brief).ids == expected
    except (ApiError, TemplateFailure):
        return False


def _cases(general: TemplateFormat, native: _Native) -> Iterator[tuple[str, Brief, list[Item]]]:
    """Conversations by what is new in them."""
    forms, drops = general.renderer.forms, general.traits.drops
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = ToolSet(
        (Tool("function", "weather", None, "The weather now", schema), Tool("function", "time", None, "Now"))
    )
    ask: list[Item] = [Message("user", "What's it like?")]
    told: list[Item] = [*ask, Message("assistant", "  Fine.\n"), Message("user", "And\n\nnow? ")]
    yield "a question", Brief(), ask
    yield "instructions", Brief("Be brief.\n", None), ask
    yield "several turns", Brief(), told
    yield "several turns and instructions", Brief("Be brief.", None), told
    if forms.late_system:
        yield "a system message in the middle", Brief(), [*told, Message("system", "Be kind."), *ask]
    if forms.tools:
        yield "tools", Brief(None, None, tools), ask
        yield "tools and instructions", Brief("Be brief.", None, tools), told
    if forms.calls is None:
        return
    brief = Brief("Be brief.", None, tools if forms.tools else ToolSet())
    call: list[Item] = [FunctionCall("call_1", "weather", '{"city": "Rome"}'), FunctionCallOutput("call_1", "mild")]
    yield "a call", brief, [*ask, *call]
    yield "an answer behind a call", brief, [*ask, *call, Message("assistant", "Mild."), *ask]
    if native.parallel:
        more = FunctionCall("call_2", "time", "{}")
        yield "two calls", brief, [*ask, call[0], more, call[1], FunctionCallOutput("call_2", "noon")]
    thought = Reasoning(content=(ReasoningText("Let me see."),))
    if not drops.get(("outputs", True), True):
        yield "thoughts before a call", brief, [*ask, thought, *call]
        yield "thoughts of an earlier turn", brief, [*ask, thought, *call, thought, Message("assistant", "Mild."), *ask]
