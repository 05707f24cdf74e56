"""`text` of a request: what form the visible output must have, and how much of it is wanted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class TextFormat:
    """`schema` is JSON text for json_schema, else None. `verbosity` is a wish that most models know nothing of."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    schema: str | None = None
    verbosity: str | None = None
