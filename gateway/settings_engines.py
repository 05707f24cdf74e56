"""The settings of what samples: models, vLLM, the scripted double."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from gateway.settings_sections import ApiKey, Seconds, Section
from inference.upstream.dialects import DIALECTS, RESPONSES_DIALECTS

EngineName = Literal["vllm", "scripted", "cerebras", "chat", "responses"]
DialectName = Literal["generic", "openai", "vllm", "cerebras", "cerebras-gpt-oss", "limpet"]
FormatName = Literal["auto", "harmony", "chatml", "llama3", "template"]
LoraName = Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^\S+$")]
_DIALECTS = {"chat": DIALECTS, "responses": RESPONSES_DIALECTS}
LoraPath = Annotated[str, StringConstraints(min_length=1)]


class VllmSettings(Section):
    """How vLLM is started. None (or auto) leaves it to the device: the reason says what follows."""

    device: Literal["auto", "cpu", "gpu"] = Field(
        default="auto",
        description="Where the engine runs. auto: `limpet up` takes a GPU where this machine has one; serve.yaml says "
        "gpu, since the node that reads it has none.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        default="auto",
        description="Number format of weights and activations. auto is the checkpoint's own on a GPU and float32 on a "
        "CPU, where bfloat16 costs three times the CPU time without AVX-512.",
    )
    max_num_seqs: int = Field(
        default=128,
        ge=1,
        le=8192,
        description="Sequences decoded at once per replica. 128 fills a GPU in decode and leaves room in the KV cache; "
        "more wait in vLLM's queue.",
    )
    block_size: Literal[8, 16, 32, 64, 128] | None = Field(
        default=None,
        description="Tokens per KV cache block. None is vLLM's own on a GPU and 32 on a CPU: the CPU default of 128 "
        "never reuses a prompt shorter than that.",
    )
    kv_cache_gib: float = Field(
        default=1.0,
        gt=0,
        description="KV cache of a CPU engine, GiB. 1 GiB holds 23,000 tokens of the packaged model in float32; a GPU "
        "takes what gpu_memory_utilization leaves.",
    )
    tensor_parallel: int = Field(
        default=1,
        ge=1,
        le=64,
        description="GPUs that share each layer. 1: most models fit one GPU.",
    )
    pipeline_parallel: int = Field(default=1, ge=1, le=64, description="GPU groups that share the layers. 1, as above.")
    nodes: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Machines that one replica may need for its GPUs; divides pipeline_parallel, so that only whole "
        "groups are apart. 1: vLLM starts its own workers. More: Ray places them, a GPU each, on as few as it can.",
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of GPU memory for weights and cache. 0.9 is vLLM's own default."
    )
    enforce_eager: bool | None = Field(
        default=None,
        description="Skip compilation. None is off on a GPU and on on a CPU, where compiling takes 200 s at every "
        "start for at most 30 % less CPU.",
    )
    tool_parser: str | None = Field(
        default=None,
        max_length=64,
        description="vLLM's parser of tool calls, for a model whose chat format Limpet does not know itself (`vllm "
        "serve` calls it --tool-call-parser). None: such a model's calls stay text.",
    )
    reasoning_parser: str | None = Field(
        default=None,
        max_length=64,
        description="vLLM's parser of reasoning, for the same models (--reasoning-parser). None: their thoughts stay "
        "text.",
    )
    loras: dict[LoraName, LoraPath] = Field(
        default_factory=dict,
        description="LoRA adapters on top of this model: directory or hub id by the name that clients send as `model`. "
        "Empty. All are loaded at the start, eight at most compute in one batch.",
    )
    cpus: float = Field(
        default=1.0,
        ge=0,
        description="CPU cores Ray reserves per replica. 1: the engine's loop; a CPU engine computes on it.",
    )
    extra: dict[str, Any] = Field(
        default_factory=dict,
        description="Further vLLM engine arguments, passed as they are. Empty; wins over everything above.",
    )

    @model_validator(mode="after")
    def _stages_are_whole(self) -> Self:
        if self.pipeline_parallel % self.nodes:
            raise PydanticCustomError("conflict", "nodes that divide pipeline_parallel")
        if self.nodes > 1 and self.device == "cpu":
            raise PydanticCustomError("conflict", "nodes: 1 on a CPU")
        return self


class ReplicaSettings(Section):
    """How many engines serve a model."""

    min: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Fewest replicas. 1: a first turn must not wait for a model load.",
    )
    max: int = Field(
        default=1,
        ge=1,
        le=10_000,
        description="Most replicas. 1: GPUs cost money, so more is a decision.",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min > self.max:
            raise PydanticCustomError("conflict", "min not above max")
        return self


class UpstreamSettings(Section):
    """Where a model is served over HTTP by somebody else. Session actors ask it themselves."""

    url: str = Field(
        default="https://api.cerebras.ai/v1",
        pattern=r"^https?://\S+$",
        max_length=2048,
        description="Base URL, with the API's prefix. Cerebras' own by default.",
    )
    model: str | None = Field(default=None, description="What the upstream calls the model. None: as our clients do.")
    keys: tuple[ApiKey, ...] = Field(
        default=(),
        repr=False,
        description="API keys. Each is an endpoint of its own with its own rate limits, and conversations are spread "
        "over them. None by default, for servers without.",
    )
    keys_file: Path | None = Field(
        default=None, description="File with one such key a line (`#` starts a comment), added to keys."
    )
    dialect: DialectName = Field(
        default="generic",
        description="How an upstream differs from others of its API: names of fields, what it refuses. generic sends "
        "the common ones only. Chat completions have all but limpet; Responses have generic, openai, vllm and limpet.",
    )
    max_output_tokens: int | None = Field(
        default=None,
        ge=1,
        description="Longest answer that is asked for, tokens. None: as long as clients want, for Cerebras 16,384, "
        "since it reserves what may be sampled and refuses what its rate limit has no room for.",
    )
    first_event_s: Seconds = Field(default=60.0, description="Wait for an answer's first event, seconds. 60 s.")
    idle_s: Seconds = Field(default=30.0, description="Longest silence while something is being said, seconds. 30 s.")
    thinking_s: Seconds = Field(
        default=600.0,
        description="Longest silence of an answer that has begun while nothing is being said, seconds: the model may "
        "think unseen, or still read its prompt. 600 s, as the OpenAI SDKs wait.",
    )
    connections: int = Field(
        default=256, ge=1, le=10_000, description="Connections of one session actor to one endpoint. 256."
    )


class ModelSettings(Section):
    """One model that clients may name."""

    name: str = Field(
        min_length=1,
        max_length=256,
        pattern=r"^\S+$",
        description="Id that clients send as `model`. No default: it is the one thing a model needs.",
    )
    engine: EngineName = Field(
        default="vllm",
        description="What samples: vllm, which Limpet starts; cerebras, by token ids; chat, any server of chat "
        "completions; responses, any of the Responses API; or scripted, the double for tests. vllm, as it is the real "
        "one.",
    )
    path: str | None = Field(
        default=None,
        description="Checkpoint directory or hub id. None is the small packaged model, which runs on a CPU without a "
        "download.",
    )
    format: FormatName = Field(
        default="auto",
        description="Chat format: harmony (gpt-oss), chatml (Qwen, SmolLM), llama3, or template, which runs the "
        "checkpoint's own Jinja template. auto takes the one that the checkpoint's files show and tries it against "
        "their template.",
    )
    context_length: int | None = Field(
        default=None, ge=16, description="Longest prompt plus answer, tokens. None is what the checkpoint says."
    )
    aliases: tuple[str, ...] = Field(
        default=(), description="Other ids for the same model. Empty; for clients whose model name cannot be changed."
    )
    hedge: bool = Field(
        default=False,
        description="Ask a second replica or endpoint when the first is silent for longer than 95 % of turns wait, for "
        "5 % of turns at most. Off: it costs a prefill each time.",
    )
    fallback: str | None = Field(
        default=None,
        description="Another model of this list that answers when no engine of this one can, before anything was said. "
        "None: the turn fails.",
    )
    vllm: VllmSettings = VllmSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    replicas: ReplicaSettings = ReplicaSettings()

    @property
    def upstream_only(self) -> bool:
        """Whether somebody else runs it, so that there is no engine to deploy."""
        return self.engine in ("cerebras", "chat", "responses")

    @model_validator(mode="after")
    def _upstream_is_whole(self) -> Self:
        if self.upstream_only and self.context_length is None:
            raise PydanticCustomError("conflict", "context_length, which no upstream tells")
        if self.engine in _DIALECTS and self.upstream.dialect not in _DIALECTS[self.engine]:
            known = ", ".join(_DIALECTS[self.engine])
            raise PydanticCustomError("conflict", f"an upstream.dialect that engine {self.engine} has: {known}")
        if self.engine == "cerebras" and self.path is None and self.format != "harmony":
            raise PydanticCustomError(
                "conflict", "format: harmony, or a path with the model's tokenizer: ids are made here for Cerebras"
            )
        return self

    @property
    def gpus(self) -> int:
        """GPUs that one replica takes. 0 while the device is `auto`; `limpet up` decides that before it counts."""
        on_gpu = self.engine == "vllm" and self.vllm.device == "gpu"
        return self.vllm.tensor_parallel * self.vllm.pipeline_parallel if on_gpu else 0

    @property
    def deployment(self) -> str:
        """Name of the Serve deployment: `engine-` and the model's name in letters, digits and dashes."""
        return "engine-" + re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")


class ScriptedSettings(Section):
    """The scripted engine: a double with a known speed."""

    tokens_per_second: float = Field(
        default=1000.0,
        gt=0,
        le=1e6,
        description="Tokens per second and turn. 1000 is the slow end of today's fast models.",
    )
    time_to_first_token_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Pause before the first token, seconds. 0, so that overhead is what is seen.",
    )
    max_running: int = Field(
        default=256, ge=1, description="Turns sampled at once; more wait. 256, so that it is never what limits a test."
    )
    any_model: bool = Field(
        default=False,
        description="Answer for any model name. Off: an unknown model is an error; `--engine scripted` turns it on.",
    )
