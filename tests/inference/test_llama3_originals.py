"""Llama 3 against the checkpoints' own templates."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from gateway.protocol.tools import Tool, ToolSet
from inference.formats.llama3 import Llama3Format, options_from_template
from inference.tokenizer import HubTokenizer
from tests.inference.test_llama3 import CITY, SHOWN, conversations, prompt
from tests.support.llama3 import CONTROL, reference
from tests.support.templates import original

GET = Tool("function", "get_weather", None, "Weather now", CITY)


@functools.cache
def pair(name: str) -> tuple[Any, Llama3Format]:
    text = original(name)
    hub = HubTokenizer(json.loads(reference().to_str()), "test")
    renderer = PreTrainedTokenizerFast(tokenizer_object=reference(), bos_token=CONTROL[0], chat_template=text)
    return renderer, Llama3Format(hub, options_from_template(text))


@pytest.mark.parametrize("name", ["llama3", "llama3_1", "llama3_2"])
@settings(deadline=None, max_examples=50)
@given(data=st.data(), offered=st.booleans())
def test_prompts_have_the_ids_of_the_original_template(name: str, data: st.DataObject, offered: bool) -> None:
    renderer, form = pair(name)
    with_tools = name != "llama3"
    messages: list[dict[str, Any]] = data.draw(conversations(with_tools=with_tools))
    offered = offered and with_tools
    expected = renderer.apply_chat_template(
        messages, tools=SHOWN if offered else None, add_generation_prompt=True,
        tools_in_user_message=False, date_string="26 Jul 2024",
    )["input_ids"]  # fmt: skip
    assert prompt(form, messages, ToolSet((GET,)) if offered else ToolSet()) == expected
