"""Configuration of the three applications: each one's `args:` in the Serve YAML.

Frozen, unknown keys refused. Each part of the code gets the section it needs, never the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

EMBEDDED_MODEL = "embedded:smollm2-135m-instruct"

FiniteSeconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
FiniteMillis = Annotated[float, Field(gt=0, le=600_000, allow_inf_nan=False)]


class Section(BaseModel):
    """Base of every section."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    def merged(self, changes: Mapping[str, Any]) -> Self:
        """This section with some fields changed, those of inner sections one by one. Raises
        pydantic's ValidationError."""
        values = self.model_dump()
        for name, value in changes.items():
            inner = getattr(self, name, None)
            if isinstance(inner, Section) and isinstance(value, Mapping):
                value = inner.merged(value).model_dump()
            values[name] = value
        return type(self).model_validate(values)


class ModelConfig(Section):
    """A causal language model and how it is run."""

    source: str = EMBEDDED_MODEL
    """Hub id, local folder, path of a .gguf file, or the embedded model."""
    revision: str | None = None
    """Commit or tag of a hub id."""
    name: str | None = None
    """Name that clients use; by default the last part of the source."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """Weights and activations; auto is bfloat16."""
    max_model_len: Annotated[int, Field(gt=0)] | None = None
    """Most tokens of prompt and completion together; by default the model's own window."""
    device: str = "auto"
    """torch device; auto is cuda where there is one, else cpu."""
    num_threads: Annotated[int, Field(ge=1)] = 1
    """Compute threads on a CPU."""
    implementation: Literal["auto", "native", "torch", "transformers"] = "auto"
    """How it is run; auto takes the fastest that can. native: our kernels, on a CPU; torch: few
    torch operations, above all on a GPU; both for Llama-like families. transformers: its own
    modules, for every other architecture."""
    deterministic: bool | None = None
    """Whether a row's bits are independent of the batch. By default they are on a CPU, where it
    costs nothing; on a GPU it is an option that costs speed."""


class KVCacheConfig(Section):
    """The paged KV cache."""

    block_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Tokens in a block."""
    num_blocks: Annotated[int, Field(ge=1)] | None = None
    """Blocks in the pool; by default what memory_bytes holds."""
    memory_bytes: Annotated[int, Field(gt=0)] = 1 << 30
    """Memory for the pool where num_blocks is not given."""
    prefix_cache: bool = True
    """Keep blocks that no sequence holds any more, and let requests that begin with the same tokens
    reuse them."""


class SchedulerConfig(Section):
    """What one engine step may hold."""

    max_running_sequences: Annotated[int, Field(ge=1)] = 64
    """Sequences decoded together."""
    max_waiting_sequences: Annotated[int, Field(ge=0)] = 256
    """Submitted sequences that may wait for a place; more are refused."""
    max_step_tokens: Annotated[int, Field(ge=1)] = 512
    """Tokens in one forward: prefill chunks, decode tokens and drafts together."""
    max_prefill_chunk_tokens: Annotated[int, Field(ge=1)] = 256
    """Prompt tokens that one forward takes at most, so that decoding is not stalled."""


class SpeculationConfig(Section):
    """How the verifier uses drafts."""

    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 8
    """Most drafts verified per sequence and step, the bonus token excluded."""
    planner: Literal["goodput", "fixed"] = "goodput"
    """goodput: verify as many drafts, and wait for them as far, as measured step times and
    acceptance make worth it. fixed: verify and wait for all; for measurements and tests."""
    draft_deadline_ms: FiniteMillis = 20.0
    """Longest wait for a draft that is due; after one miss its sequence no longer waits."""
    connect_backoff_s: FiniteSeconds = 1.0
    """First pause before a lost drafter is tried again; doubles up to 30 s."""


class RpcConfig(Section):
    """Where a member's gRPC server listens."""

    bind_host: str = "auto"
    """Address to bind; auto is the node's own address."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """0 takes a free port."""


class VerifierConfig(Section):
    """The Verifier application."""

    model: ModelConfig = ModelConfig()
    """The target."""
    kv_cache: KVCacheConfig = KVCacheConfig()
    """Of the target."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """What a step may hold."""
    speculation: SpeculationConfig = SpeculationConfig()
    """How drafts are used."""
    rpc: RpcConfig = RpcConfig()
    """Where routers reach it."""
    drafter_app: str = "drafter"
    """Serve application whose replicas draft for this verifier; it may be absent."""
    drain_grace_s: FiniteSeconds = 15.0
    """On shutdown, time for running generations to finish; less than the deployment's
    graceful_shutdown_timeout_s."""
    stall_timeout_s: FiniteSeconds = 60.0
    """Health fails when work waits and the engine has not stepped for this long."""


class NgramConfig(Section):
    """The n-gram drafter: proposes what followed the same n-gram earlier in the sequence."""

    max_ngram: Annotated[int, Field(ge=1, le=16)] = 4
    """Longest suffix that is looked up first."""
    min_ngram: Annotated[int, Field(ge=1, le=16)] = 3
    """Shortest suffix that is looked up."""
    min_survival: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """A chain ends before its chance to be accepted as a whole falls below this."""

    @model_validator(mode="after")
    def _ordered(self) -> NgramConfig:
        if self.min_ngram > self.max_ngram:
            raise ValueError("min_ngram must not be over max_ngram")
        return self


class DrafterConfig(Section):
    """The Drafter application."""

    kind: Literal["ngram", "model"] = "ngram"
    """How drafts are made."""
    ngram: NgramConfig = NgramConfig()
    """Of kind ngram."""
    model: ModelConfig | None = None
    """Draft model of kind model: any causal language model with the target's vocabulary."""
    kv_cache: KVCacheConfig = KVCacheConfig()
    """Of the draft model; sessions that do not fit are computed anew when their turn comes. They
    carry no salt, so they share nothing, whatever prefix_cache says."""
    max_step_tokens: Annotated[int, Field(ge=1)] | None = None
    """Tokens in one forward of the draft model, of which prompts take what drafting leaves; by
    default 32 on a CPU, which takes larger pieces hardly faster, else 512."""
    max_sessions: Annotated[int, Field(ge=1)] = 1024
    """Sessions open at once, over all verifiers; an open beyond that is refused."""
    max_speculative_tokens: Annotated[int, Field(ge=1, le=64)] = 16
    """Longest chain in one draft."""
    session_ttl_s: FiniteSeconds = 600.0
    """A session without any message for this long is closed."""
    drain_grace_s: FiniteSeconds = 5.0
    """On shutdown, time for open sessions to be closed by their verifiers."""
    rpc: RpcConfig = RpcConfig()
    """Where verifiers reach it."""

    @model_validator(mode="after")
    def _has_its_model(self) -> DrafterConfig:
        if self.kind == "model" and self.model is None:
            raise ValueError(
                "kind model needs the section model: set model.source to a hub id, a folder, a "
                f".gguf file or {EMBEDDED_MODEL}"
            )
        return self


class LimitsConfig(Section):
    """What one request may ask for; checked before anything is allocated."""

    max_body_bytes: Annotated[int, Field(gt=0)] = 2 << 20
    """Largest request body."""
    max_prompt_tokens: Annotated[int, Field(gt=0)] | None = None
    """By default what the model's window leaves for one generated token."""
    max_completion_tokens: Annotated[int, Field(gt=0)] | None = None
    """By default what the model's window leaves after the prompt."""
    max_choices: Annotated[int, Field(ge=1, le=128)] = 8
    """Largest n."""
    max_prompts: Annotated[int, Field(ge=1)] = 32
    """Prompts in one completions request."""
    max_stop_len: Annotated[int, Field(ge=1)] = 64
    """Longest stop string, in characters."""


class AdmissionConfig(Section):
    """How much this router takes at once."""

    max_concurrent_requests: Annotated[int, Field(ge=1)] = 512
    """Generations in flight; more are refused with 503 and Retry-After."""
    retry_after_s: FiniteSeconds = 1.0
    """What a refused client is told to wait."""


class PathPolicyConfig(Section):
    """When auto requests speculate: a threshold on decoding load with hysteresis."""

    mode: Literal["auto", "on", "off"] = "auto"
    """Cluster-wide; a request's own mode goes before it."""
    plain_above_running: Annotated[int, Field(ge=1)] = 16
    """Mean running sequences per verifier above which requests go plain."""
    speculative_below_running: Annotated[int, Field(ge=1)] = 12
    """Mean below which they speculate again."""
    min_dwell_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 2.0
    """Shortest time between two switches."""
    max_load_age_s: FiniteSeconds = 2.0
    """Older load reports count as unknown, and unknown means plain."""

    @model_validator(mode="after")
    def _ordered(self) -> PathPolicyConfig:
        if self.speculative_below_running > self.plain_above_running:
            raise ValueError("speculative_below_running must not be over plain_above_running")
        return self


class RouterConfig(Section):
    """The Router application."""

    verifier_app: str = "verifier"
    """Serve application whose replicas hold the model."""
    drafter_app: str = "drafter"
    """Serve application of the drafters, for the status report; it may be absent."""
    limits: LimitsConfig = LimitsConfig()
    """What one request may ask for."""
    admission: AdmissionConfig = AdmissionConfig()
    """How much is taken at once."""
    path_policy: PathPolicyConfig = PathPolicyConfig()
    """When requests are drafted for."""
    request_timeout_s: FiniteSeconds = 600.0
    """Longest life of one request."""
