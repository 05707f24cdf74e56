"""Every setting of Limpet, in one model, and how it is loaded.

Values come from a YAML file, from `LIMPET_SECTION__KEY` environment variables and from the command line, the later ones
winning; `load_settings` merges them and says of a wrong one which key it is, where it came from, what was found and
what is allowed. A `Settings` built from a plain dict, as every replica does, reads nothing else. Importing this module
imports neither Ray nor vLLM. `docs/settings.md` is generated from it: `limpet settings --markdown`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from gateway.settings_engines import EngineName, ModelSettings, ReplicaSettings, ScriptedSettings, VllmSettings
from gateway.settings_errors import Problem, SettingsError, problems_of
from gateway.settings_sections import LimitSettings, RaySettings, SecuritySettings, ServerSettings, SessionSettings
from gateway.settings_sources import Environ, Given, Source, YamlFile, merged
from gateway.settings_store import StoreSettings

__all__ = [
    "EngineName",
    "LimitSettings",
    "ModelSettings",
    "RaySettings",
    "ReplicaSettings",
    "ScriptedSettings",
    "SecuritySettings",
    "ServerSettings",
    "SessionSettings",
    "Settings",
    "SettingsError",
    "StoreSettings",
    "VllmSettings",
    "load_settings",
]


class Settings(BaseSettings):
    """All settings. Build it with `load_settings`, or from the dict of another one's `model_dump(mode="json")`."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True, env_prefix="LIMPET_", env_nested_delimiter="__")

    server: ServerSettings = Field(default=ServerSettings(), description="Where clients connect.")
    limits: LimitSettings = Field(default=LimitSettings(), description="Bounds on sockets, lanes, turns and memory.")
    models: tuple[ModelSettings, ...] = Field(
        default=(), description="Models that clients may name. Empty: `limpet up` takes one that fits the machine."
    )
    sessions: SessionSettings = Field(
        default=SessionSettings(), description="The session actors, which hold the sockets."
    )
    security: SecuritySettings = Field(default=SecuritySettings(), description="Keys of the gateway itself.")
    store: StoreSettings = Field(default=StoreSettings(), description="What is kept, and where.")
    scripted: ScriptedSettings = Field(default=ScriptedSettings(), description="The scripted engine, a double.")
    ray: RaySettings = Field(default=RaySettings(), description="The Ray cluster underneath and Serve's ingress.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log lines shown. info: starts, ends and refusals; never client text."
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic-settings passes these by name
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what is passed: a replica must get its creator's settings, not its own machine's environment."""
        return (init_settings,)

    @model_validator(mode="after")
    def _known_database(self) -> Self:
        if self.store.kind == "other":
            raise _conflict(
                "store.url", "sqlite:////absolute/file.db, postgresql://USER:PASSWORD@HOST/DATABASE or memory"
            )
        return self

    @model_validator(mode="after")
    def _open_on_loopback_only(self) -> Self:
        if not self.server.api_keys and not self.server.loopback:
            raise _conflict(
                "server.host",
                "a loopback host such as 127.0.0.1 while there is no key; set server.api_keys or server.api_keys_file "
                "to let other machines in",
            )
        return self

    @model_validator(mode="after")
    def _limits_fit(self) -> Self:
        limits, life = self.limits, self.limits.socket_lifetime_s + self.limits.lifetime_grace_s
        if self.ray.haproxy and life > self.ray.hard_stop_s:
            raise _conflict(
                "ray.hard_stop_s",
                f"at least limits.socket_lifetime_s + limits.lifetime_grace_s = {life:g}; with less, HAProxy cuts "
                "sockets that may still live",
                beside="limits.socket_lifetime_s",
            )
        if limits.lifetime_jitter_s >= limits.socket_lifetime_s:
            raise _conflict(
                "limits.lifetime_jitter_s",
                f"less than limits.socket_lifetime_s = {limits.socket_lifetime_s:g}",
                beside="limits.socket_lifetime_s",
            )
        if limits.drain_grace_s > self.ray.min_draining_s:
            raise _conflict(
                "limits.drain_grace_s",
                f"at most ray.min_draining_s = {self.ray.min_draining_s}; after that Serve cuts what still runs",
                beside="ray.min_draining_s",
            )
        if limits.queued_bytes < self.server.request_max_bytes:
            raise _conflict(
                "limits.queued_bytes",
                f"at least server.request_max_bytes = {self.server.request_max_bytes}; with less, the largest request "
                "could never wait",
                beside="server.request_max_bytes",
            )
        return self

    @model_validator(mode="after")
    def _models_are_told_apart(self) -> Self:
        names: dict[str, int] = {}
        deployments: dict[str, str] = {}
        for index, model in enumerate(self.models):
            for name in (model.name, *model.aliases, *model.vllm.loras):
                if name in names:
                    raise _conflict(f"models.{index}.name", f"a name not used before; {name!r} is that of another one")
                names[name] = index
            twin = deployments.setdefault(model.deployment, model.name)
            if twin != model.name:
                raise _conflict(
                    f"models.{index}.name",
                    f"a name that differs from {twin!r} in letters or digits; both become {model.deployment}",
                )
        for index, model in enumerate(self.models):
            if model.fallback is not None and (model.fallback not in names or names[model.fallback] == index):
                raise _conflict(f"models.{index}.fallback", "the name of another model of this list")
        return self

    def model_named(self, name: str) -> ModelSettings | None:
        """The model that clients mean by `name`, an alias included."""
        return next((model for model in self.models if name == model.name or name in model.aliases), None)


def _conflict(key: str, allowed: str, beside: str = "") -> PydanticCustomError:
    """A value that is fine alone and wrong beside another one."""
    return PydanticCustomError("conflict", "{allowed}", {"key": key, "allowed": allowed, "beside": beside})


def load_settings(
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    overrides_from: str = "command line",
) -> Settings:
    """Merge defaults, file, environment and overrides, in this order, and check the result.

    Args:
        config: YAML file; without it the one that `LIMPET_CONFIG` names, if any.
        environ: Environment variables; those of the process when None.
        overrides: Nested dict with the highest priority, e.g. `{"server": {"port": 9000}}`.
        overrides_from: What the overrides are called in an error message.

    Raises:
        SettingsError: Something is wrong; the message names every wrong key.
    """
    environ = os.environ if environ is None else environ
    sources: list[Source] = []
    if config is None and environ.get("LIMPET_CONFIG"):
        config = Path(environ["LIMPET_CONFIG"])
    if config is not None:
        sources.append(YamlFile(config))
    sources.append(Environ(environ, Settings))
    sources.append(Given(overrides or {}, overrides_from))
    values = merged(sources)
    _read_key_file(values, sources, "server", "api_keys")
    _read_key_file(values, sources, "security", "sealing_keys")
    _read_key_file(values, sources, "store", "encryption_keys")
    _read_upstream_keys(values, sources)
    try:
        return Settings.model_validate(values)
    except ValidationError as error:
        raise SettingsError(problems_of(error, Settings, values, sources)) from None


def _read_upstream_keys(values: dict[str, Any], sources: list[Source]) -> None:
    """The same for the upstream of each model."""
    models = values.get("models")
    for index, model in enumerate(models if isinstance(models, list) else ()):
        if isinstance(model, dict):
            _read_keys(model.get("upstream"), sources, f"models.{index}.upstream", "keys")


def _read_key_file(values: dict[str, Any], sources: list[Source], name: str, field: str) -> None:
    """Add the keys of a section's `<field>_file` to its `<field>`, in place."""
    _read_keys(values.get(name), sources, name, field)


def _read_keys(section: Any, sources: list[Source], name: str, field: str) -> None:
    if not isinstance(section, dict) or not isinstance(section.get(f"{field}_file"), str | Path):
        return
    key, path = f"{name}.{field}_file", Path(section[f"{field}_file"]).expanduser()
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        named = path if len(path.parts) > 1 else "a name"  # a key may stand where its file belongs
        raise SettingsError(
            [Problem.of(key, sources, found=f"{named}: {reason}", allowed="a readable file of keys")]
        ) from None
    keys = [line for line in lines if line and not line.startswith("#")]
    if not keys:
        raise SettingsError([Problem.of(key, sources, found=f"{path}: no key in it", allowed="at least one key")])
    given = section.get(field) or []
    if isinstance(given, list | tuple):
        section[field] = [*given, *(key for key in keys if key not in given)]
