"""A small byte-level vocabulary with Llama 3's control tokens, trained on the spot, and templates of its family."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

CONTROL = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip
# Llama 3's pre-tokenizer
WORDS = "|".join(
    (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}{1,3}", r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+", r"\s+(?!\S)", r"\s+",
    )
)  # fmt: skip
_CORPUS = (
    "system user assistant ipython Cutting Knowledge Date: December 2023 Today Date: 26 Jul 2024 You have access to "
    'the following functions. {"name": "get_weather", "parameters": {"city": "Paris"}}; {"type": "function", '
    '"function": {} '
    "def f(x):\n    return [x, 1, 2]\n\n start header id end eot eom python tag Environment: description properties\n\n"
) * 20

# Written for these tests after the behaviour of Llama 3.1's template (builtin tools left out): same output, other text.
LLAMA31 = r"""
{%- set intro = 'You have access to the following functions. To call a function, please respond with JSON for a '
 + 'function call.Respond in the format {"name": function name, "parameters": dictionary of argument name and its '
 + 'value}.Do not use variables.\n\n' -%}
{%- set intro_user = 'Given the following functions, please respond with a JSON for a function call with its proper '
 + 'arguments that best answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": '
 + 'dictionary of argument name and its value}.Do not use variables.\n\n' -%}
{%- if date_string is not defined %}{% set date_string = "26 Jul 2024" %}{% endif -%}
{%- if tools_in_user_message is not defined %}{% set tools_in_user_message = true %}{% endif -%}
{%- set start = 1 if messages[0].role == 'system' else 0 -%}
{%- set shown = tools if tools else [] -%}
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\n\n' -}}
{%- if shown %}{{ 'Environment: ipython\n' }}{% endif -%}
{{- 'Cutting Knowledge Date: December 2023\nToday Date: ' + date_string + '\n\n' -}}
{%- if shown and not tools_in_user_message -%}{{- intro -}}
{%- for tool in shown %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor -%}
{%- endif -%}
{{- (messages[0].content | trim if start else '') + '<|eot_id|>' -}}
{%- for message in messages[start:] -%}
{%- if message.role == 'tool' -%}
{{- '<|start_header_id|>ipython<|end_header_id|>\n\n' + (message.content | tojson) + '<|eot_id|>' -}}
{%- elif message.tool_calls -%}
{%- if message.tool_calls | length > 1 %}{{ raise_exception('one tool call at a time') }}{% endif -%}
{%- set call = message.tool_calls[0].function -%}
{{- '<|start_header_id|>assistant<|end_header_id|>\n\n{"name": "' + call.name + '", "parameters": ' -}}
{{- (call.arguments | tojson) + '}<|eot_id|>' -}}
{%- else -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' -}}
{%- if loop.first and shown and tools_in_user_message -%}{{- intro_user -}}
{%- for tool in shown %}{{ (tool | tojson(indent=4)) + '\n\n' }}{% endfor -%}
{%- endif -%}
{{- (message.content | trim) + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
""".strip("\n")
# The same for Llama 3.0's, which knows neither dates nor tools.
LLAMA30 = r"""
{{- bos_token -}}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' + (message.content | trim) + '<|eot_id|>' -}}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif -%}
""".strip("\n")


@functools.cache
def reference() -> Tokenizer:
    """The tokenizer as the library `tokenizers` has it, added tokens and all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.add_special_tokens(list(CONTROL))
    return tokenizer


def write_checkpoint(folder: Path, template: str) -> Path:
    """A checkpoint's folder with tokenizer and chat template, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    reference().save(str(folder / "tokenizer.json"))
    settings = {"chat_template": template, "bos_token": CONTROL[0], "eos_token": "<|eot_id|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder
