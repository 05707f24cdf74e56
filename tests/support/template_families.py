"""Chat templates after the behaviour of well-known families, written for these tests; their reference is transformers.

Also a small vocabulary with all their control tokens, and conversations both as messages and as items.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from gateway.protocol.items import FunctionCall, FunctionCallOutput, Item, Message, Reasoning, ReasoningText
from gateway.protocol.tools import Tool, ToolSet
from inference.formats.format import Brief
from tests.support.vocabulary import reference

# system in front; calls as Hermes has them; a role may repeat
CHATML = r"""
{%- if tools %}{{ '<|im_start|>system\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}{% endif %}{{ 'Tools:' }}
{%- for tool in tools %}{{ '\n' + (tool | tojson) }}{% endfor %}{{ '<|im_end|>\n' }}
{%- elif messages[0].role == 'system' %}{{ '<|im_start|>system\n' + messages[0].content + '<|im_end|>\n' }}
{%- else %}{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}
{%- elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson)
 + '}\n</tool_call>' }}
{%- endfor %}{% generation %}{{ '<|im_end|>' }}{% endgeneration %}{{ '\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}
""".strip()

# as before; thoughts are shown from the newest query on, and can be switched off
THINKING = (
    r"""
{%- set talk = namespace(query=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set talk.query = loop.index0 %}{% endif %}
{%- endfor %}
"""
    + CHATML.replace(
        "{{ '<|im_start|>assistant\\n' + message.content }}",
        "{{ '<|im_start|>assistant\\n' }}"
        "{%- if message.reasoning_content and loop.index0 > talk.query %}"
        "{{ '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}{% endif %}"
        "{{- message.content }}",
    ).replace(
        "{{ '<|im_start|>assistant\\n' }}{% endif %}",
        "{{ '<|im_start|>assistant\\n' }}"
        "{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}"
        "{% endif %}",
    )
).strip()

# no end of turn but the next header; the date in front
HEADERS = r"""
{{- '[gMASK]<sop>' }}
{%- if tools or messages[0].role == 'system' %}{{ '<|system|>\n' + strftime_now('%d %b %Y') + '\n' }}
{%- for tool in tools or [] %}{{ (tool.function | tojson(indent=2, ensure_ascii=True)) + '\n' }}{% endfor %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}{{ '<|observation|>\n' + message.content }}
{%- else %}{{ '<|' + message.role + '|>\n' + message.content }}
{%- for call in message.tool_calls or [] %}
{{- '\n' + call.function.name + '\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg>' + key + '</arg>' + (value | tojson) + '\n' }}
{%- endfor %}
{%- endfor %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}
""".strip()

# control tokens that swallow line ends; an end of text where the assistant is not to speak
SWALLOWING = r"""
{{- bos_token }}
{%- for message in messages %}
{{- '<|' + message.role + '|>\n' + message.content | trim + '<|end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}
""".strip()

# tools before the last user message; roles in turn; call ids of nine characters; system text in the last user message
INST = r"""
{%- set system = messages[0].content if messages[0].role == 'system' else '' %}
{%- set talk = messages[1:] if messages[0].role == 'system' else messages %}
{%- set turn = namespace(user=true, last=-1) %}
{%- for message in talk %}
{%- if message.role == 'user' %}{% set turn.last = loop.index0 %}{% endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) %}
{%- if (message.role == 'user') != turn.user %}{{ raise_exception('Roles must take turns') }}{% endif %}
{%- set turn.user = not turn.user %}
{%- endif %}
{%- endfor %}
{{- bos_token }}
{%- for message in talk %}
{%- if message.role == 'user' %}
{%- if tools and loop.index0 == turn.last %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' }}
{%- if system and loop.index0 == turn.last %}{{ system + '\n\n' }}{% endif %}
{{- message.content + '[/INST]' }}
{%- elif message.tool_calls %}{{ '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}
{%- if call.id | length != 9 %}{{ raise_exception('Call ids have nine characters') }}{% endif %}
{{- '{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) + ', "id": "' + call.id
 + '"}' }}
{%- if not loop.last %}{{ ', ' }}{% endif %}
{%- endfor %}{{ ']' + eos_token }}
{%- elif message.role == 'assistant' %}{{ ' ' + message.content + eos_token }}
{%- elif message.role == 'tool' %}
{{- '[TOOL_RESULTS]{"content": ' + (message.content | tojson) + ', "call_id": "' + message.tool_call_id
 + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ raise_exception('Only user, assistant and tool here') }}{% endif %}
{%- endfor %}
""".strip()

# roles user and model, in turn, and no system
MODEL_ROLE = r"""
{{- bos_token }}
{%- if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' + message.content | trim
 + '<end_of_turn>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}
""".strip()

# thoughts opened by the template and never shown again; arguments as text; nothing to open behind tool outputs
OPENED = r"""
{{- bos_token }}
{%- set talk = namespace(out=false) %}
{%- for message in messages %}
{%- if message.role == 'system' %}{{ message.content }}
{%- elif message.role == 'user' %}{{ '<|User|>' + message.content }}{% set talk.out = false %}
{%- elif message.role == 'tool' %}
{{- ('' if talk.out else '<|outputs|>') + '<|output|>' + message.content }}{% set talk.out = true %}
{%- else %}
{%- if not talk.out %}{{ '<|Assistant|>' }}{% endif %}{% set talk.out = false %}
{{- message.content.split('</think>')[-1] }}
{%- for call in message.tool_calls or [] %}
{{- '<|call|>' + call.function.name + '\n' + call.function.arguments + '<|call_end|>' }}
{%- endfor %}{{ eos_token }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt and not talk.out %}{{ '<|Assistant|><think>\n' }}{% endif %}
""".strip()

# thoughts opened by the template, and gone at once
THOUGHTLESS = CHATML.replace(
    "{{ '<|im_start|>assistant\\n' }}{% endif %}", "{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

# text only: no control token between messages
BARE = r"""
{%- for message in messages %}{{ message.role + ': ' + message.content + '\n\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ 'assistant:' }}{% endif %}
""".strip()

# takes lists of parts
PARTS = CHATML.replace("message.content", "message.content[0].text").replace(
    "messages[0].content", "messages[0].content[0].text"
)

_END = "{%- if add_generation_prompt %}"
NASTY: Mapping[str, str] = {
    "counts": "{{ '<|im_start|>' ~ (messages | length) ~ ' messages' }}" + CHATML,
    "counts from ten on": "{% if messages | length > 10 %}{{ '<|im_start|>long' }}{% endif %}" + CHATML,
    "keeps the newest": "{% set messages = messages[-9:] %}" + CHATML,
    "reverses": "{% set messages = messages | reverse | list %}" + CHATML,
    "system last": CHATML.replace(
        _END, "{%- if messages[0].role == 'system' %}{{ '<|im_start|>' + messages[0].content }}{% endif %}" + _END
    ),
    "numbers messages from the end": CHATML.replace("'<|im_start|>user'", "'<|im_start|>user' ~ loop.revindex"),
    "marks the last user": CHATML.replace(
        "{{- '<|im_start|>' + message.role", "{{- '<|im_start|>' + message.role + ('*' if loop.last else '')"
    ),
    "tools at the end": CHATML.replace(
        _END, "{%- if tools %}{{ '<|im_start|>' + (tools | tojson) }}{% endif %}" + _END
    ),
    "calls only with tools": CHATML.replace("in message.tool_calls or []", "in (message.tool_calls or []) if tools"),
    "counts calls": CHATML.replace(
        "'<|im_end|>' }}{% endgen", "(message.tool_calls or []) | length ~ '<|im_end|>' }}{% endgen"
    ),
    "merges at the joint": CHATML.replace("'<|im_end|>\\n'", "'\\n'").replace(
        "'<|im_start|>' + message.role", "message.role"
    ),
    "opening by count": CHATML.replace(
        "'<|im_start|>assistant\\n' }}{% endif %}", "'<|im_start|>assistant\\n' ~ messages | length }}{% endif %}"
    ),
    "thinking changes the past": CHATML.replace(
        "'<|im_start|>assistant\\n' + message.content",
        "'<|im_start|>assistant\\n' + ('!' if enable_thinking else '') + message.content",
    ),
}

APPENDABLE = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS, "swallowing": SWALLOWING,
              "thoughtless": THOUGHTLESS, "parts": PARTS}  # fmt: skip
WHOLE = {"inst": INST, "model role": MODEL_ROLE, "opened": OPENED, "bare": BARE}

CONTROLS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]",
    "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[gMASK]", "<sop>",
    "<|observation|>", "<start_of_turn>", "<end_of_turn>", "<|User|>", "<|Assistant|>", "<|outputs|>", "<|output|>",
    "<|call|>", "<|call_end|>",
)  # fmt: skip
SWALLOWERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@functools.cache
def vocabulary(swallow: bool = False) -> Tokenizer:
    """A byte-level vocabulary with all control tokens above."""
    tokenizer = Tokenizer.from_str(reference(()).to_str())
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in CONTROLS])
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, rstrip=swallow) for name in SWALLOWERS]
    )
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in MARKUP])
    return tokenizer


@functools.cache
def hugging_face(template: str, swallow: bool = False) -> Any:
    """transformers' tokenizer with this template."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=vocabulary(swallow), chat_template=template, **SPECIAL)


def write_model(folder: Path, template: str, swallow: bool = False, **settings: Any) -> Path:
    """A checkpoint's folder without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    vocabulary(swallow).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**SPECIAL, **settings}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


CITY = {"type": "object", "properties": {"city": {"type": "string", "description": "naïve <city> [x]"}}}
TOOL = Tool("function", "get_weather", None, 'Weather & "more" now', CITY)
SHOWN = [{"type": "function", "function": {"name": "get_weather", "description": TOOL.description, "parameters": CITY}}]

# What could be a control token's end or beginning would be one in transformers, which is the one wanted difference.
plain = st.text(st.characters(codec="utf-8", exclude_characters="<[|"), max_size=16)
arguments = st.dictionaries(plain, st.integers() | plain | st.none() | st.lists(plain, max_size=2), max_size=3)


@st.composite
def conversations(
    draw: st.DrawFn, *, tools: bool = True, system: bool = True, repeats: bool = True, thoughts: bool = False
) -> list[dict[str, Any]]:
    """Messages in chat-completions form, the last one for the assistant to answer."""
    messages: list[dict[str, Any]] = []
    if system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(plain)})
    rounds = draw(st.integers(0, 3))
    for number in range(rounds + 1):
        messages += [{"role": "user", "content": draw(plain)} for _ in range(draw(st.integers(1, 2 if repeats else 1)))]
        for _ in range(draw(st.integers(0, 2)) if tools else 0):
            messages += _calls(draw, thoughts)
        if number < rounds:
            messages.append({"role": "assistant", "content": draw(plain), **_thought(draw, thoughts)})
    return messages


def _thought(draw: st.DrawFn, thoughts: bool) -> dict[str, str]:
    if not thoughts or draw(st.booleans()):
        return {}
    return {"reasoning_content": draw(plain.map(lambda text: text.strip("\n")).filter(bool))}


def _calls(draw: st.DrawFn, thoughts: bool) -> list[dict[str, Any]]:
    given = draw(st.lists(arguments, min_size=1, max_size=3))
    ids = [draw(st.text("0123456789abcXYZ", min_size=9, max_size=9)) for _ in given]
    functions = [{"name": "get_weather", "arguments": each} for each in given]
    calls = [{"id": i, "type": "function", "function": f} for i, f in zip(ids, functions, strict=True)]
    outputs = [
        {"role": "tool", "content": draw(plain), "name": "get_weather", "tool_call_id": call_id} for call_id in ids
    ]
    return [{"role": "assistant", "content": draw(plain), "tool_calls": calls, **_thought(draw, thoughts)}, *outputs]


def items_of(messages: Sequence[Mapping[str, Any]]) -> list[Item]:
    """The same conversation as items; a leading system message is left out."""
    items: list[Item] = []
    for message in messages:
        if thought := message.get("reasoning_content"):
            items.append(Reasoning(content=(ReasoningText(thought),)))
        if message["role"] == "tool":
            items.append(FunctionCallOutput(message["tool_call_id"], message["content"]))
        elif message["role"] != "system":
            items.append(Message(message["role"], message["content"]))
        for call in message.get("tool_calls", ()):
            given = json.dumps(call["function"]["arguments"], ensure_ascii=False)
            items.append(FunctionCall(call["id"], call["function"]["name"], given))
    return items


def brief_of(messages: Sequence[Mapping[str, Any]], offered: bool, effort: str | None = None) -> Brief:
    """What the request of this conversation says beside its items."""
    preamble = messages[0]["content"] if messages[0]["role"] == "system" else None
    return Brief(None, preamble, ToolSet((TOOL,)) if offered else ToolSet(), effort=effort)
