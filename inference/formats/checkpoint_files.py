"""What the native formats read of a checkpoint's folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from inference.tokenizer import HubTokenizer, VocabularyError, load_tokenizer


def read_template(directory: Path) -> str:
    """The chat template of a checkpoint: a file of its own, or part of the tokenizer's settings."""
    try:
        file = directory / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = json.loads((directory / "tokenizer_config.json").read_bytes()).get("chat_template")
    except (OSError, ValueError) as error:
        raise VocabularyError(f"the chat template in {directory} can't be read: {error}") from error
    if isinstance(template, list):  # several, by name
        template = next((entry.get("template") for entry in template if entry.get("name") == "default"), None)
    if not isinstance(template, str):
        raise VocabularyError(f"{directory} has no chat template (chat_template.jinja or tokenizer_config.json)")
    return template


def tokenizer_with(directory: Path, names: Sequence[str]) -> HubTokenizer:
    """The tokenizer of a checkpoint. Raises `VocabularyError` for one that lacks one of these control tokens."""
    tokenizer = load_tokenizer(directory)
    for name in names:
        if not tokenizer.has_special(name):
            raise VocabularyError(f"the vocabulary in {directory} has no control token {name}")
    return tokenizer
