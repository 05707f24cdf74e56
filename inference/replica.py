"""The Serve deployment around an engine: one replica, one engine, one token link.

Control goes over Ray (where the link listens, the tokenizer's files, load, health); tokens never do. A turn on the link
is invisible to Serve, so the replica drains it itself before Serve may stop it.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inference.draining import on_drain
from inference.engine import Engine, EngineError
from inference.link import LinkServer, serve_link
from inference.serve_logging import log_to_serve

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
    "config.json",
)
"""What a session actor needs of a checkpoint. Sent over Ray, so that nodes without a GPU need no copy of the model."""


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """What a session actor learns of a replica. `files` are the tokenizer's, by name; empty for an engine without."""

    replica: str
    host: str
    port: int
    draining: bool
    context_length: int
    load: int = 0
    waiting: int = 0


class EngineReplica:
    """Base of the engine deployments. Subclasses start their engine in `start_engine`.

    `drain_s` bounds how long running generations may go on when the replica stops; `token` is the cluster's shared
    secret for the link.
    """

    async def __init__(self, options: dict[str, Any], token: str, drain_s: float) -> None:  # type: ignore[misc]
        log_to_serve("info")
        self._drain_s = drain_s
        self._draining = False
        self._engine, self._context_length, self._directory = await self.start_engine(options)
        host = _own_address()
        self._server: LinkServer = await serve_link(self._engine, host, 0, token)
        on_drain(self._drain)
        log.info("engine ready, token link on %s", self._server.address)

    async def start_engine(self, options: dict[str, Any]) -> tuple[Engine, int, Path | None]:
        """The engine, its context length in tokens, and the checkpoint's directory if it has one."""
        raise NotImplementedError

    async def info(self) -> ReplicaInfo:
        """Where to find this replica. Cheap; asked every few seconds by every session actor."""
        from ray import serve

        host, port = self._server.address
        name = serve.get_replica_context().replica_id.unique_id
        load = await self._engine.load()
        return ReplicaInfo(
            name, host, port, self._draining, self._context_length, load.running + load.waiting, load.waiting
        )

    async def tokenizer_files(self) -> dict[str, bytes]:
        """The checkpoint's tokenizer files by name; empty for an engine without a checkpoint."""
        directory = self._directory
        if directory is None:
            return {}
        return await asyncio.to_thread(_read_files, directory)

    async def check_health(self) -> None:
        """Called by Serve; raising has this replica replaced."""
        try:
            async with asyncio.timeout(20.0):
                await self._engine.check_health()
        except EngineError as error:
            raise RuntimeError(error.message) from error

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What the engine has in hand: turns on the link are not in Serve's own count."""
        load = await self._engine.load()
        return {"turns": float(load.running + load.waiting), "kv_usage": load.kv_usage}

    async def _drain(self) -> None:
        self._draining = True
        await self._server.close(self._drain_s)
        await self._engine.close()


class VllmReplica(EngineReplica):
    """vLLM behind the link."""

    async def start_engine(self, options: dict[str, Any]) -> tuple[Engine, int, Path | None]:
        from inference.vllm import VllmConfig, VllmEngine

        engine = await VllmEngine.start(VllmConfig(**options))
        return engine, engine.context_length, engine.directory


class ScriptedReplica(EngineReplica):
    """The public double behind the link."""

    async def start_engine(self, options: dict[str, Any]) -> tuple[Engine, int, Path | None]:
        from inference.scripted import ScriptedEngine
        from inference.tokenizer import scripted_tokenizer

        options = dict(options)
        context_length = options.pop("context_length")
        return ScriptedEngine(scripted_tokenizer(), **options), context_length, None


def _own_address() -> str:
    """The address that Ray knows this node by: loopback on a gateway of one machine. Ray's own `get_node_ip_address`
    finds the machine's outer address instead."""
    import ray

    me = ray.get_runtime_context().get_node_id()
    nodes = ray.nodes()  # type: ignore[no-untyped-call]
    return next(str(node["NodeManagerAddress"]) for node in nodes if node["NodeID"] == me)


def _read_files(directory: Path) -> dict[str, bytes]:
    found = {name: directory / name for name in TOKENIZER_FILES}
    return {name: path.read_bytes() for name, path in found.items() if path.is_file()}
