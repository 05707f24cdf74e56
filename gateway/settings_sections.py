"""The sections of the settings: what each one means, its unit, its default and the reason for that default.

`gateway.settings` puts them together and says how they are loaded. The descriptions are the documentation: they become
`docs/settings.md`.
"""

from __future__ import annotations

import ipaddress
from base64 import b64decode
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

MIB = 1 << 20
Seconds = Annotated[float, Field(gt=0, le=7 * 86400)]
ApiKey = Annotated[str, Field(min_length=1, max_length=512, pattern=r"^[!-~]+$")]
SealingKey = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/_-]{43}=?$")]


def decoded(keys: Iterable[str]) -> list[bytes]:
    """Keys in base64, plain or for URLs, as bytes."""
    plain = (key.rstrip("=").translate(str.maketrans("-_", "+/")) for key in keys)
    return [b64decode(f"{key}=") for key in plain]


class Section(BaseModel):
    """What all sections share: unknown keys are errors, values never change, `true` is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _booleans_are_no_numbers(cls, value: object, info: Any) -> object:
        accepts = str(cls.model_fields[info.field_name].annotation)
        if isinstance(value, bool) and "bool" not in accepts and "Any" not in accepts:
            raise PydanticCustomError("bool_type", "a boolean is not a number or a text")
        return value


class ServerSettings(Section):
    """Where clients connect."""

    host: str = Field(
        default="127.0.0.1",
        description="Address to listen on. Loopback by default, so that a first start exposes nothing; 0.0.0.0 on a "
        "cluster, where HAProxy on one node must reach the replicas of another.",
    )
    port: int = Field(
        default=8000,
        ge=1,
        le=65535,
        description="TCP port. 8000 is what Ray Serve and `vllm serve` use.",
    )
    api_keys: tuple[ApiKey, ...] = Field(
        default=(),
        repr=False,
        description="Bearer keys that clients may use. None by default, which leaves the gateway open and is allowed "
        "on a loopback host only: a first try needs no key, a reachable gateway needs one.",
    )
    api_keys_file: Path | None = Field(
        default=None,
        description="File with one key a line (`#` starts a comment), added to api_keys. None by default; better than "
        "api_keys, since files can be kept out of process lists and of version control.",
    )
    websocket: bool = Field(
        default=True,
        description="Answer WebSocket handshakes. On, as the socket is what Limpet is for; off answers 426 and leaves "
        "HTTP + SSE.",
    )
    request_max_bytes: int = Field(
        default=16 * MIB,
        ge=64 * 1024,
        le=1 << 30,
        description="Largest request, in bytes: one WebSocket message (beyond it: close 1009) or one HTTP body (413). "
        "16 MiB is OpenAI's limit, and Codex takes 1009 for exactly that.",
    )
    deflate: bool = Field(
        default=False,
        description="Answer permessage-deflate when a client offers it. Off: measured 9 to 21 us of CPU per event and "
        "40 kB of memory per socket, and tokens gain little; worth it over slow links.",
    )

    rollout_extension: bool = Field(
        default=False,
        description="Take `response.append` and `rollout` in a `response.create` (docs/rollout-extension.md): one "
        "response that waits for its tools. Off, as no published client knows it.",
    )

    def keys(self) -> tuple[str, ...]:
        """The keys, those of the file included: `load_settings` has read it."""
        return self.api_keys

    @property
    def loopback(self) -> bool:
        """Whether only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


class LimitSettings(Section):
    """Bounds on sockets, lanes, turns and memory."""

    socket_lifetime_s: Seconds = Field(
        default=3600.0,
        description="Age at which a socket is closed, seconds. 60 min is what OpenAI does, so clients redial; sockets "
        "never move between replicas, and this is what spreads them out again.",
    )
    lifetime_grace_s: Annotated[float, Field(ge=0)] = Field(
        default=300.0,
        description="How long a turn that runs at that age may go on, seconds. 300 s ends nearly all of them; lifetime "
        "+ grace must fit in ray.hard_stop_s.",
    )
    lifetime_jitter_s: Annotated[float, Field(ge=0)] = Field(
        default=300.0,
        description="A socket's lifetime is shortened by a random share of this, seconds. 300 s, so that clients "
        "which came together do not come back together.",
    )
    active_turns: int = Field(
        default=16,
        ge=1,
        le=1024,
        description="Turns running at once on one socket, default lane included. 16 as OpenAI.",
    )
    named_lanes: int = Field(
        default=32, ge=0, le=4096, description="Distinct stream_id values over a socket's life. 32 as OpenAI."
    )
    queued_turns: int = Field(
        default=64,
        ge=0,
        le=65536,
        description="Turns waiting on one socket. 64: four waves of 16; more is a client that does not wait for "
        "answers, told so with 429 websocket_queue_full.",
    )
    queued_bytes: int = Field(
        default=32 * MIB,
        ge=64 * 1024,
        description="Bytes of waiting turns on one socket. 32 MiB: two requests of the largest size; 64 of them "
        "would be 1 GiB.",
    )
    send_timeout_s: Seconds = Field(
        default=30.0,
        description="How long a client may read nothing while a turn has something to send, seconds; then the socket "
        "is closed with 1013. 30 s outlasts a stalled network; meanwhile the turn waits and memory does not grow.",
    )
    drain_grace_s: Annotated[float, Field(ge=0)] = Field(
        default=240.0,
        description="How long turns may go on after their replica was told to stop, seconds. 240 s, so that the answer "
        "is out and the socket closed within ray.min_draining_s.",
    )
    keepalive_s: Seconds = Field(
        default=20.0,
        description="Silence inside a turn after which a keepalive event is sent, seconds. 20 s: OpenAI's is about 30, "
        "and the shortest idle timers of proxies are 30 to 60; never outside a turn.",
    )
    sse_comment_s: Seconds = Field(
        default=15.0,
        description="Silence on an SSE stream after which a comment line is sent, seconds. 15 s is the HTML standard's "
        "advice.",
    )
    ping_interval_s: Seconds = Field(
        default=25.0,
        description="Pause between WebSocket pings, seconds. 25 s keeps middleboxes with a 30 s timer open.",
    )
    ping_timeout_s: Seconds = Field(
        default=40.0,
        description="Wait for a pong before the socket counts as dead, seconds. 40 s: clients that block their loop "
        "while a tool runs answer late; uvicorn's 20 s cut them.",
    )
    kept_responses_per_lane: int = Field(
        default=16,
        ge=1,
        le=4096,
        description="Newest responses of a lane that previous_response_id may name. OpenAI keeps 1; 16 lets a client "
        "step back or fork, at the price of references only, since contexts share their items.",
    )
    context_bytes: int = Field(
        default=2 << 30,
        ge=MIB,
        description="Contexts (items and token ids) that the sockets of one session actor may hold in memory, bytes; "
        "beyond it the stored ones that were used longest ago leave it for the database. 2 GiB.",
    )
    conversation_bytes: int = Field(
        default=256 * MIB,
        ge=MIB,
        description="Largest conversation that lives in memory only (store: false), bytes of items and token ids; then "
        "its next turn is refused as conversation_too_large. 256 MiB: a million tokens with their text take 12.",
    )
    turn_deadline_s: Seconds = Field(
        default=1800.0,
        description="Longest turn, seconds; then it ends as response.failed. 1800 s is 64k tokens at 36 a second: "
        "longer is a hang.",
    )


class SecuritySettings(Section):
    """Keys of the gateway itself."""

    sealing_keys: tuple[SealingKey, ...] = Field(
        default=(),
        repr=False,
        description="Keys that seal encrypted_content (reasoning and compacted windows that clients carry), each 32 "
        "bytes in base64: `openssl rand -base64 32`. The first seals, all open: to replace a key, put the new one "
        "first and take the old one out when no client has blobs of it. None by default: each start makes a random one "
        "that all replicas share, so what clients carry is worth nothing after a restart.",
    )
    sealing_keys_file: Path | None = Field(
        default=None,
        description="File with one such key a line (`#` starts a comment), added to sealing_keys. None by default; "
        "better than sealing_keys, for the same reasons as api_keys_file.",
    )

    def keys(self) -> list[bytes]:
        """The keys, those of the file included: `load_settings` has read it."""
        return decoded(self.sealing_keys)


class SessionSettings(Section):
    """The session actors: Serve replicas that hold sockets and conversations."""

    min_replicas: int = Field(
        default=1, ge=1, le=10_000, description="Fewest session actors. 1 is enough for one machine; a cluster wants 2."
    )
    max_replicas: int = Field(
        default=2,
        ge=1,
        le=10_000,
        description="Most session actors. 2: one Python process uses one core, and a laptop has two.",
    )
    target_sockets_per_replica: int = Field(
        default=1000,
        ge=1,
        description="Sockets per actor at which another is started. 1000: of agents' sockets some 5 % are in a turn, "
        "and 50 streams at 100 tokens a second are near what one core sends.",
    )
    max_sockets_per_replica: int = Field(
        default=4000,
        ge=1,
        description="Sockets per actor beyond which a handshake gets 503. 4000 idle ones take 100 MB; Serve itself "
        "would let the dial hang or answer 500.",
    )
    cpus: float = Field(
        default=1.0,
        ge=0,
        description="CPU cores Ray reserves per actor. 1: it runs on one event loop.",
    )
    upscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        default=10.0,
        description="How long sockets must be too many before an actor is added, seconds. 10 s: an actor starts in 3 s "
        "and each change of the set replaces HAProxy's process, so that a short burst should not cause two.",
    )
    downscale_delay_s: Annotated[float, Field(ge=0)] = Field(
        default=600.0,
        description="How long sockets must be too few before an actor is stopped, seconds. 600 s as in Serve: agents "
        "pause, and the sockets of a stopped actor must be opened again.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise PydanticCustomError("conflict", "min_replicas not above max_replicas")
        if self.target_sockets_per_replica > self.max_sockets_per_replica:
            raise PydanticCustomError("conflict", "target_sockets_per_replica not above max_sockets_per_replica")
        return self


class RaySettings(Section):
    """The Ray cluster underneath and Serve's ingress."""

    address: str | None = Field(
        default=None,
        description="Cluster to join (`auto`, `HOST:6379`). None starts one on this machine and ends it with Limpet.",
    )
    haproxy: bool = Field(
        default=True,
        description="Put HAProxy before the session actors instead of Serve's Python proxy. On: first event after "
        "0.4 ms against 5 ms, an eighth of the CPU per event; off is the fall-back where it cannot run.",
    )
    namespace: str = Field(
        default="limpet",
        min_length=1,
        description="Ray namespace of our actors. Apart from other jobs'.",
    )
    temp_dir: Path | None = Field(
        default=None,
        description="Ray's sessions, logs and sockets. None is a short directory in /tmp, because a Unix socket's path "
        "may not be longer than 107 bytes.",
    )
    hard_stop_s: int = Field(
        default=3900,
        ge=1,
        description="How long an HAProxy process that was replaced keeps its sockets, seconds. Every change of the "
        "replica set replaces it and Ray's default of 120 s cuts them all; 3900 is lifetime + grace.",
    )
    min_draining_s: int = Field(
        default=300,
        ge=0,
        description="How long a stopping session actor may finish its turns, seconds. 300 s is the grace of a turn; "
        "Serve waits this long even for an idle one.",
    )
    maxconn: int = Field(
        default=65536,
        ge=64,
        description="Sockets per node in HAProxy. 65536: Ray's 4096 is less than two actors may hold.",
    )
    proxy_ready_timeout_s: Seconds = Field(
        default=60.0,
        description="Wait for a node's proxy, seconds. Ray's 5 s fail on a machine that is busy loading a model.",
    )
    start_attempts: int = Field(
        default=4,
        ge=1,
        le=20,
        description="Tries of starting Ray. 4: it gives up after a fixed 30 s when cores are busy.",
    )
    deploy_timeout_s: Seconds = Field(
        default=1800.0,
        description="Wait for the first turn to be possible, seconds. 1800 s: a download plus a model load.",
    )
    stop_timeout_s: Seconds = Field(
        default=30.0,
        description="Longest wait for running turns when Limpet is told to end, seconds. 30 s: who presses Ctrl-C "
        "waits for no half-hour turn; with no client connected it ends at once.",
    )
    object_store_mb: int = Field(
        default=200,
        ge=80,
        description="Ray's shared memory, MB. 200: we pass no large objects; Ray would take a third of RAM.",
    )
    num_cpus: int | None = Field(
        default=None,
        ge=1,
        description="Logical cores Ray counts with on this machine. None is the real number, or more where actors and "
        "a CPU engine would not fit: on a laptop they share.",
    )
