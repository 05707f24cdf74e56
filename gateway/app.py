"""Composition: settings become a Serve application of one session deployment and one engine deployment per model.

`limpet up` and `serve deploy serve.yaml` both end in `build_application`, so they run the same thing.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp

from actors.background import BackgroundLimits
from actors.models import ANY_NAME, ModelTable
from actors.sealing import Sealer, new_key
from actors.session import SessionActor
from actors.stored import StoreLimits
from gateway.asgi import build_asgi, uvicorn_options
from gateway.gateway import Gateway
from gateway.model_loading import lora_loader, model_loader, upstream_loader
from gateway.names import SESSION_DEPLOYMENT
from gateway.settings import ModelSettings, Settings, load_settings
from gateway.storage import open_store
from inference.draining import on_drain
from inference.replica import EngineReplica, ScriptedReplica, VllmReplica
from inference.serve_logging import log_to_serve

log = logging.getLogger(__name__)

MODEL_PATIENCE_S = 60.0
OWNER_TIMEOUT_S = 10.0
HEALTH_CHECK_S = 3.0
"""How often Serve looks whether a replica lives, seconds: one that was killed is replaced that much sooner."""
WRITE_S = 20.0
"""How long a replica that stops goes on writing what its turns left, seconds."""


def build(args: Mapping[str, Any]) -> Application:
    """Entry point of serve.yaml: `args` is the settings, as in the YAML file."""
    return build_application(load_settings(None, {}, args, overrides_from="serve.yaml"))


def build_application(settings: Settings, engines: Mapping[str, type[EngineReplica]] | None = None) -> Application:
    """The whole application. `engines` replaces the replica class per engine kind, for tests that watch an engine."""
    kinds: dict[str, type[EngineReplica]] = {"vllm": VllmReplica, "scripted": ScriptedReplica, **(engines or {})}
    token = link_token(settings)
    handles = [
        _engine_deployment(settings, model, kinds[model.engine]).bind(
            engine_options(settings, model), token, float(settings.ray.min_draining_s)
        )
        for model in settings.models
        if not model.upstream_only
    ]
    # Given by no setting, the key is made here, so that all replicas agree on it; a restart makes another one.
    sealing_keys = settings.security.keys() or [new_key()]
    application: Application = _session_deployment(settings).bind(
        settings.model_dump(mode="json"), token, handles, sealing_keys
    )
    return application


def link_token(settings: Settings) -> str:
    """The cluster's shared secret for the token link. Made from the gateway's own secrets, so that it is the same after
    a redeploy, when old engines and new session actors must still talk; random where there are none (one machine)."""
    sealing_keys = settings.security.keys()
    own = [key.hex() for key in sealing_keys] or list(settings.server.api_keys)
    if not own:
        return secrets.token_hex(32)
    return hashlib.sha256("\0".join(["limpet token link", *sorted(own)]).encode()).hexdigest()


def engine_options(settings: Settings, model: ModelSettings) -> dict[str, Any]:
    """What an engine replica is told: plain values, no settings objects."""
    if model.engine == "scripted":
        scripted = settings.scripted
        return {
            "tokens_per_second": scripted.tokens_per_second,
            "time_to_first_token_s": scripted.time_to_first_token_s,
            "max_running": scripted.max_running,
            "context_length": model.context_length or 1_000_000,
        }
    options = model.vllm.model_dump(exclude={"cpus"})
    return {"model": model.path, "max_model_len": model.context_length, **options}


class SessionReplica:
    """One Serve replica: a session actor behind an ASGI application, with the methods its peers call."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], token: str, engines: list[DeploymentHandle[Any]], sealing_keys: list[bytes]
    ) -> None:
        self._settings = Settings.model_validate(settings)
        log_to_serve(self._settings.log_level)
        _set_uvicorn_defaults(self._settings)
        handles = iter(engines)  # one for each model that we run ourselves
        loaders = {
            model.name: upstream_loader(model) if model.upstream_only else model_loader(model, next(handles), token)
            for model in self._settings.models
        }
        loaders |= {
            name: lora_loader(loaders[model.name], name)
            for model in self._settings.models
            if not model.upstream_only
            for name in model.vllm.loras
        }
        aliases = {alias: model.name for model in self._settings.models for alias in model.aliases}
        if self._settings.scripted.any_model:
            aliases[ANY_NAME] = self._settings.models[0].name
        limits, owner = self._settings.limits, secrets.token_hex(4)
        durability = await open_store(self._settings, owner)
        self._actor = SessionActor(
            ModelTable(loaders, aliases, MODEL_PATIENCE_S),
            owner=owner,
            per_lane=limits.kept_responses_per_lane,
            peers=self,
            store=StoreLimits(self._settings.store.memory_responses, self._settings.store.memory_bytes),
            background=BackgroundLimits(deadline_s=limits.turn_deadline_s),
            sealer=Sealer(sealing_keys),
            durability=durability,
            conversation_bytes=limits.conversation_bytes,
            memory_bytes=limits.context_bytes,
        )
        if durability is not None:
            durability.start()
        self._actor.models.start()
        self._gateway = Gateway(self._settings, self._actor)
        on_drain(self._drain)

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return build_asgi(self._gateway)

    async def answer(self, asker: str, operation: str, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """A question of another actor, if this one has what it is about."""
        return None if asker == self._actor.ids.owner else await self._actor.peers.answer(operation, args)

    async def counters(self) -> dict[str, int]:
        """Totals since the start, and what is open now."""
        totals = self._actor.counters
        return {
            **{name: getattr(totals, name) for name in totals.__slots__},
            "sockets": len(self._gateway.sockets),
        }

    async def ask(self, operation: str, args: tuple[Any, ...]) -> list[Any]:
        """`actors.peers.Peers`. Nobody answers for an actor that is gone: its memory went with it."""
        context = serve.get_replica_context()
        peers = serve.get_deployment_handle(context.deployment, context.app_name)
        asked = peers.broadcast("answer", self._actor.ids.owner, operation, args)
        try:
            answers: list[Any] = await asked.results_async(timeout_s=OWNER_TIMEOUT_S, return_exceptions=True)
        except TimeoutError:
            log.warning("not all session actors answered in %.0f s", OWNER_TIMEOUT_S)
            return [TimeoutError()]
        return answers

    async def drain(self, code: int, reason: str, grace_s: float) -> None:
        """Let nobody in, end what runs within the grace, close every socket with this code, write what is to be
        written."""
        await self._gateway.drain(code, reason, grace_s)
        await self._actor.flush(WRITE_S)

    async def _drain(self) -> None:
        await self._gateway.drain(1012, "this replica is stopping; connect again")
        await self._actor.flush(WRITE_S)


def _session_deployment(settings: Settings) -> Any:
    sessions = settings.sessions
    return serve.deployment(
        serve.ingress()(SessionReplica),
        name=SESSION_DEPLOYMENT,
        ray_actor_options={"num_cpus": sessions.cpus},
        # A socket holds a slot for life, and over this number a handshake would hang or get 500 (spec/ray.md 1.3): the
        # gateway refuses long before.
        max_ongoing_requests=100_000,
        graceful_shutdown_timeout_s=settings.ray.min_draining_s + 30.0,
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=60.0,
        autoscaling_config={
            "min_replicas": sessions.min_replicas,
            "max_replicas": sessions.max_replicas,
            # Serve counts open sockets as ongoing requests, idle or not.
            "target_ongoing_requests": sessions.target_sockets_per_replica,
            "upscale_delay_s": sessions.upscale_delay_s,
            "downscale_delay_s": sessions.downscale_delay_s,
        },
    )


def _engine_deployment(settings: Settings, model: ModelSettings, kind: type[EngineReplica]) -> Any:
    options: dict[str, Any] = {"num_cpus": model.vllm.cpus if model.engine == "vllm" else 1}
    placement: dict[str, Any] = {}
    if model.gpus and model.vllm.nodes > 1:
        # vLLM's workers are Ray actors then, each in a bundle with one GPU (it refuses bundles with more). Serve puts
        # the replica itself, which computes nothing, into the first one.
        bundles = [{"CPU": model.vllm.cpus, "GPU": 1.0}, *({"GPU": 1.0} for _ in range(model.gpus - 1))]
        placement = {"placement_group_bundles": bundles, "placement_group_strategy": "PACK"}
    elif model.gpus:
        # One replica is one node: vLLM's own worker processes use the GPUs that Ray gives the replica.
        options["num_gpus"] = model.gpus
    return serve.deployment(
        kind,
        name=model.deployment,
        ray_actor_options=options,
        **placement,
        max_ongoing_requests=1000,
        graceful_shutdown_timeout_s=settings.ray.min_draining_s + 30.0,
        health_check_period_s=HEALTH_CHECK_S,
        health_check_timeout_s=60.0,
        max_constructor_retry_count=1,
        autoscaling_config={
            "min_replicas": model.replicas.min,
            "max_replicas": model.replicas.max,
            "policy": {"policy_function": "inference.scaling:turns_per_replica"},
        },
    )


def _set_uvicorn_defaults(settings: Settings) -> None:
    """Serve opens the replica's port after the constructor and offers no option for these (spec/ray.md 1.3)."""
    import uvicorn

    values = uvicorn_options(settings)
    original = uvicorn.Config.__init__

    def configured(self: uvicorn.Config, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **{**kwargs, **values})

    uvicorn.Config.__init__ = configured  # type: ignore[method-assign]
