"""The chat templates of well-known models, as the package trl carries them. Read, never imported: that takes torch."""

from __future__ import annotations

import importlib.util
from pathlib import Path

FOLDER = "chat_templates"


def original(name: str) -> str:
    """The Jinja text of a model's own template."""
    found = importlib.util.find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return (Path(found.origin).parent / FOLDER / f"{name}.jinja").read_text(encoding="utf-8")
