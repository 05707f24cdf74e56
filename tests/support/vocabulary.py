"""A small byte-level vocabulary like Qwen's, trained on the spot, and its reference tokenizer."""

from __future__ import annotations

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKUP = ("<tool_call>", "</tool_call>", "<think>", "</think>")
# Qwen's pre-tokenizer
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CORPUS = (
    'system user assistant You are a helpful assistant. {"name": "get_weather", "arguments": {"city": "Paris"}} '
    "def f(x):\n    return [x, 1, 2]\n\n tool call think response <tools> </tools> im start im end tool_call "
) * 20


@functools.cache
def reference(markup: tuple[str, ...] = MARKUP) -> Tokenizer:
    """The tokenizer as the library `tokenizers` has it, added tokens and all."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([_CORPUS], trainer)
    tokenizer.add_special_tokens(list(CONTROL))
    tokenizer.add_tokens([AddedToken(name, special=False, normalized=False) for name in markup])
    return tokenizer


def write_checkpoint(folder: Path, template: str, markup: tuple[str, ...] = MARKUP) -> Path:
    """A checkpoint's folder with tokenizer and chat template, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    reference(markup).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}), encoding="utf-8")
    return folder
