"""Contents for models that read text only."""

from __future__ import annotations

from typing import Any

from gateway.protocol.errors import ApiError
from gateway.protocol.items import InputFile, InputImage, text_of

_MODEL = "this model reads text only; leave out the {} part"


def text_only(content: str | tuple[Any, ...], refusal: str = _MODEL) -> str:
    """The text of a message or a tool output. Raises `ApiError` (unsupported_parameter) for images and files, with
    `refusal` about the type of the first."""
    if not isinstance(content, str):
        for part in content:
            if isinstance(part, InputImage | InputFile):
                raise ApiError("unsupported_parameter", refusal.format(part.type), "input")
    return text_of(content)
