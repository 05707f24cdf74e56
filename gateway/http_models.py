"""`GET /models`, and the catalog for Codex's `model_catalog_url` (protocol.md 6.1 and 7.1)."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from gateway.gateway import Gateway
from gateway.http_answers import answer
from gateway.protocol.errors import ApiError

CATALOG_PATIENCE_S = 5.0
"""How long the catalog waits for models that still load; it then leaves out what only a loaded model knows."""

TOOL_OUTPUT_TOKENS = 10_000
"""Codex cuts the output of a tool here. 10,000 as its own catalog has it, less for a model with a small context."""

INSTRUCTIONS = """\
You are a coding agent on the user's machine. You work in the current directory, through the tools you are given, \
until the task is done.

- Look before you change: read the files that matter and follow the style you find there.
- Do what was asked, completely, and nothing else. Fix causes rather than symptoms.
- Run commands in small steps and read their output. When a command fails, find out why before you try another way.
- Check your work: run the tests or the program if there is a way to. Say so if you could not.
- Never discard work that you did not make, and leave version control alone unless you are asked to use it.
- Call tools with exactly the arguments they describe. When no tool is needed, just answer.

Finish with a short account of what you did and what the user should know. Be brief and plain."""


class Models:
    """The model endpoints."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def list(self, request: Request) -> Response:
        """Every name that can be asked for."""
        self._gateway.auth.tenant(request.headers.raw)
        return answer({"object": "list", "data": [_model(name) for name in self._gateway.actor.models.names()]})

    async def one(self, request: Request) -> Response:
        """One of them."""
        self._gateway.auth.tenant(request.headers.raw)
        name = request.path_params["name"]
        if not self._gateway.actor.models.knows(name):
            raise ApiError("model_not_found", f"The model '{name[:128]}' does not exist.", "model")
        return answer(_model(name))

    async def codex(self, request: Request) -> Response:
        """`{"models": [ModelInfo]}`. What a client says of itself (`client_version`) makes no difference."""
        self._gateway.auth.tenant(request.headers.raw)
        names = self._gateway.actor.models.names()
        lengths = await asyncio.gather(*map(self._context_length, names))
        pairs = zip(names, lengths, strict=True)
        return answer({"models": [_codex_model(name, length, rank) for rank, (name, length) in enumerate(pairs)]})

    async def _context_length(self, name: str) -> int | None:
        try:
            async with asyncio.timeout(CATALOG_PATIENCE_S):
                return (await self._gateway.actor.models.resolve(name)).context_length
        except (ApiError, TimeoutError):
            return None


def _model(name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": 0, "owned_by": "limpet"}


def _codex_model(name: str, context_length: int | None, rank: int) -> dict[str, Any]:
    """All keys that Codex demands (7.1). Models of ours are plain ones: no Responses-Lite, no hosted tools."""
    known: dict[str, Any] = {}
    if context_length is not None:
        known = {"context_window": context_length, "max_context_window": context_length}
    return {
        "slug": name,
        "display_name": name,
        "description": "Served by Limpet.",
        "supported_reasoning_levels": [],
        "shell_type": "shell_command",
        "visibility": "list",
        "supported_in_api": True,
        "priority": rank,
        "support_verbosity": False,
        "truncation_policy": {"mode": "tokens", "limit": min(TOOL_OUTPUT_TOKENS, (context_length or 1 << 30) // 4)},
        "experimental_supported_tools": [],
        "base_instructions": INSTRUCTIONS,
        "input_modalities": ["text"],
        "apply_patch_tool_type": "freeform",
        "supports_parallel_tool_calls": True,
        **known,
    }
