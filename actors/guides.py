"""Constraints on output that an engine was asked about, so that one it can't hold is refused before generation.

Only the engine knows what it can compile, and compiling may take seconds: each constraint is asked about once. Agents
send the same ones turn after turn.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict

from actors.engines import PinnedEngine
from gateway.protocol.errors import ApiError
from gateway.protocol.textformat import TextFormat
from inference.engine import EngineError, Guide

REMEMBERED = 4096
DEADLINE_S = 60.0
"""Longest time that a turn waits for the engine's word, seconds."""


class CheckedGuides:
    """The constraints that an actor's engines have found sound."""

    def __init__(self) -> None:
        self._sound: OrderedDict[bytes, None] = OrderedDict()

    async def check(self, model: str, guide: Guide, text: TextFormat, engine: PinnedEngine) -> bool:
        """Whether the engine had to be asked. Raises `ApiError`: invalid_json_schema or invalid_value for what it can't
        hold, engine_unavailable when it gives no answer."""
        key = hashlib.blake2b(f"{model}\0{guide.kind}\0{guide.value}".encode(), digest_size=16).digest()
        if key in self._sound:
            self._sound.move_to_end(key)
            return False
        try:
            async with asyncio.timeout(DEADLINE_S):
                await engine.check(guide)
        except EngineError as error:
            raise _refusal(error, text) from None
        except TimeoutError:
            message = "The engine did not say in time whether it can hold this output format; try again."
            raise ApiError("engine_unavailable", message) from None
        self._sound[key] = None
        while len(self._sound) > REMEMBERED:
            self._sound.popitem(last=False)
        return True


def _refusal(error: EngineError, text: TextFormat) -> ApiError:
    if error.fault != "invalid":
        code = "engine_overloaded" if error.fault == "overloaded" else "engine_unavailable"
        return ApiError(code, error.message)
    if text.type == "json_schema":
        return ApiError("invalid_json_schema", error.message, "text.format.schema")
    return ApiError("invalid_value", error.message, "tools")
