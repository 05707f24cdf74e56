"""The general path on well-known models' own templates: ids equal to transformers', and which go in pieces."""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from inference.formats.template import TemplateFormat
from inference.formats.template_environment import ChatTemplate
from inference.formats.template_tokens import added_tokens
from inference.tokenizer import HubTokenizer, unpack_ids
from tests.support.template_families import SHOWN, SPECIAL, brief_of, conversations, items_of
from tests.support.templates import original
from tests.support.vocabulary import reference

_CONTROL = re.compile(r"<[|\uff5c][^|\uff5c<>'\" ]+[|\uff5c]>|<\|?/?[a-z_]+\|?>|\[/?[A-Z_]+\]|<[A-Z_]+>")


@dataclass(frozen=True)
class Expected:
    """`tools`, `thoughts`, `repeats`, `system`: what transformers can be asked for with this template."""

    appendable: bool
    tools: bool = True
    thoughts: bool = False
    repeats: bool = True
    system: bool = True
    hermes: bool = False


ORIGINALS = {
    "qwen2_5": Expected(True, hermes=True),
    "qwen3": Expected(True, thoughts=True, hermes=True),
    "qwen3_instruct_2507": Expected(True, hermes=True),
    "qwen3_6": Expected(True, thoughts=True),
    "qwen3_8": Expected(True, thoughts=True),
    "nemotron_3_nano": Expected(True, thoughts=True),
    "lfm2_v2": Expected(True),
    "phi3": Expected(True, tools=False, hermes=True),
    # no form for tools: Hermes', as text
    "deepseek_r1_distill": Expected(True, tools=False, hermes=True),
    # a switch that changes what users have said
    "glm4moe": Expected(False, thoughts=True),
    # roles in turn
    "gemma": Expected(False, tools=False, repeats=False, system=False, hermes=True),
    "gemma3": Expected(False, tools=False, repeats=False, hermes=True),
    # nothing opens the assistant's message behind tool outputs
    "deepseekv3": Expected(False, tools=False),
    "gemma4": Expected(False),
}


@functools.cache
def pair(name: str) -> tuple[Any, TemplateFormat]:
    """(transformers' tokenizer, ours) with all that looks like a control token in the template."""
    text = original(name)
    tokenizer = Tokenizer.from_str(reference(()).to_str())
    names = sorted({*_CONTROL.findall(text), *SPECIAL.values()})
    tokenizer.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in names])
    data = json.loads(tokenizer.to_str())
    chat = TemplateFormat(HubTokenizer(data, name), ChatTemplate(text, SPECIAL), added_tokens(data))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=text, **SPECIAL), chat


@pytest.mark.parametrize("name", ORIGINALS)
def test_classification(name: str) -> None:
    chat = pair(name)[1]
    assert (chat.appendable, chat.traits.hermes) == (ORIGINALS[name].appendable, ORIGINALS[name].hermes), chat.why_whole


@pytest.mark.parametrize("name", ORIGINALS)
@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_prompts_have_the_ids_of_the_original_template(name: str, data: st.DataObject) -> None:
    known = ORIGINALS[name]
    renderer, chat = pair(name)
    messages = data.draw(
        conversations(tools=known.tools, system=known.system, repeats=known.repeats, thoughts=known.thoughts)
    )
    offered = known.tools and data.draw(st.booleans())
    shown = SHOWN if offered else None
    expected = renderer.apply_chat_template(messages, tools=shown, add_generation_prompt=True)["input_ids"]
    brief, items = brief_of(messages, offered), items_of(messages)
    assert unpack_ids(chat.whole(brief, items, {}) + chat.opening(brief).ids) == expected
    if chat.appendable:
        assert unpack_ids(chat.head(brief) + chat.body(items, {}) + chat.opening(brief).ids) == expected
