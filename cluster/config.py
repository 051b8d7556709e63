"""Configuration of the three applications: each one's `args:` in the Serve YAML.

Frozen, unknown keys refused. Each part of the code gets the section it needs, never the whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

EMBEDDED_MODEL = "embedded:smollm2-135m-instruct"
EMBEDDED_DRAFTER = "embedded:smollm2-135m-drafter"
"""Distilled from the embedded model."""

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
    """Hub id, local folder, path of a .gguf file, or the embedded model. Of a drafter also what
    `paceline distill` made: its folder, or the embedded drafter."""
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


class SuffixConfig(Section):
    """The suffix drafter: proposes what followed the longest earlier match of the sequence's end,
    in the sequence itself and in recent outputs of the same tenant (`cache_salt`)."""

    min_match: Annotated[int, Field(ge=1, le=16)] = 2
    """Shortest match, in tokens."""
    max_sources: Annotated[int, Field(ge=1, le=64)] = 4
    """Matches that are followed at once; more make better guesses and cost more."""
    min_survival: Annotated[float, Field(ge=0, lt=1)] = 0.3
    """A chain ends before its chance to be accepted as a whole falls below this."""
    max_remembered_tokens: Annotated[int, Field(ge=0)] = 1 << 17
    """Outputs that are remembered, over all tenants, in tokens of about 150 bytes each."""
    remember_unsalted: bool = False
    """Whether requests without a salt share their outputs as one tenant. The time of an answer then
    tells a client something about the outputs of others."""


VerificationRule = Literal["coupled", "rejection", "block"]


class SpeculationConfig(Section):
    """How the verifier uses drafts."""

    num_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 8
    """Most drafts of a drafter replica verified per sequence and step, the bonus token excluded. 0
    is no speculation at all."""
    local_drafters: tuple[Literal["ngram", "suffix"], ...] = ("suffix",)
    """Drafters that run inside the verifier, without a round trip and without a drafter pool. What
    clients predict is drafted from in any case."""
    num_local_speculative_tokens: Annotated[int, Field(ge=0, le=64)] = 24
    """As num_speculative_tokens, of the verifier's own drafters and of clients' predictions: long
    copies are cheap to draft and often right."""
    suffix: SuffixConfig = SuffixConfig()
    """Of the suffix drafter among them."""
    planner: Literal["goodput", "fixed"] = "goodput"
    """goodput: verify as many drafts, and wait for them as far, as measured step times and
    acceptance make worth it. fixed: verify and wait for all; for measurements and tests."""
    verification: VerificationRule = "coupled"
    """How a draft is accepted. coupled: if it is the token that the target draws itself, so that
    nothing about drafting shows in the output. rejection: by the ratio of its probabilities under
    target and drafter, which accepts a little more of a good drafter's drafts; block: the same for
    a chain as a whole, which accepts a little more again. Both are exact in distribution alone: one
    seed may give other tokens with another drafter, another load or after a resume, and a drafter
    is believed what it says of its probabilities. They hold for sampled requests without a
    prediction, with drafters of kind model; such requests use no drafter inside the verifier
    meanwhile. All else is verified by coupling."""
    draft_deadline_ms: FiniteMillis = 20.0
    """Longest wait for a draft that is due; after one miss its sequence no longer waits."""
    connect_backoff_s: FiniteSeconds = 1.0
    """First pause before a lost or distrusted drafter is tried again; doubles up to 30 s."""


class TlsConfig(Section):
    """Mutual TLS between members: paths of PEM files, read anew for every connection."""

    certificate: str
    """This member's chain. It names the role as a DNS name: router.paceline, verifier.paceline or
    drafter.paceline."""
    key: str
    """Its private key."""
    ca: str
    """What the other members' certificates must be signed by."""


class RpcConfig(Section):
    """Where a member's gRPC server listens, and what members ask of one another."""

    bind_host: str = "auto"
    """Address to bind; auto is the node's own address."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """0 takes a free port."""
    token_file: str | None = None
    """File with a token that all members share, one a line: the first is shown, all are taken."""
    tls: TlsConfig | None = None
    """Mutual TLS; without it members speak in clear."""

    @model_validator(mode="after")
    def _is_not_open_to_the_world(self) -> RpcConfig:
        everywhere = self.bind_host in ("0.0.0.0", "::", "[::]")
        if everywhere and self.tls is None and self.token_file is None:
            raise ValueError(
                f"bind_host {self.bind_host} opens the port to every network: set tls or "
                "token_file, or bind to auto"
            )
        return self


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


class AheadConfig(Section):
    """What a drafter does before it is asked, on guesses that may prove wrong. Under load it does
    less of it: first no branches, then no lead."""

    lead_tokens: Annotated[int, Field(ge=0, le=64)] = 16
    """Tokens of the chain beyond what a verifier wants at once, on the guess that it takes all."""
    branches: Annotated[int, Field(ge=0, le=16)] = 4
    """Likely corrections prepared for a chain; 0 prepares none."""
    branch_len: Annotated[int, Field(ge=2, le=16)] = 5
    """Tokens of each, the correction included."""
    max_branching_sessions: Annotated[int, Field(ge=1)] = 8
    """With more sessions than this none prepares corrections."""


class DrafterConfig(Section):
    """The Drafter application."""

    kind: Literal["ngram", "suffix", "model"] = "ngram"
    """How drafts are made."""
    ngram: NgramConfig = NgramConfig()
    """Of kind ngram."""
    suffix: SuffixConfig = SuffixConfig()
    """Of kind suffix."""
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
    ahead: AheadConfig = AheadConfig()
    """Drafting before it is asked for."""
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
    max_prompt_logprobs: Annotated[int, Field(ge=1)] = 1 << 18
    """Log probabilities of prompt tokens (echo with logprobs) in one reply, the likeliest beside
    each token's own counted too."""
    max_stop_len: Annotated[int, Field(ge=1)] = 64
    """Longest stop string, in characters."""
    max_header_bytes: Annotated[int, Field(ge=1024)] = 32 << 10
    """All headers of a request together."""
    max_body_s: FiniteSeconds = 30.0
    """Time for a request's body to arrive. Nothing is held for a request before that."""


class AuthConfig(Section):
    """Who may use the HTTP API."""

    keys_file: str | None = None
    """YAML file of API keys, kept as hashes; see router/api_keys.py. Without it everyone may. It is
    read again when it changes."""


class AdmissionConfig(Section):
    """How much this router takes at once."""

    max_concurrent_requests: Annotated[int, Field(ge=1)] = 512
    """Generations in flight; more are refused with 503 and Retry-After."""
    retry_after_s: FiniteSeconds = 1.0
    """What a refused client is told to wait."""


class PathPolicyConfig(Section):
    """When auto requests speculate: where drafts are cheap, or bring more than they cost.

    The price of drafts is what one for every sequence would lengthen a step by, as a share of it;
    their gain is in tokens per step and sequence, after what they cost. Verifiers report both."""

    mode: Literal["auto", "on", "off"] = "auto"
    """Cluster-wide; a request's own mode goes before it."""
    plain_above_price: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.65
    """Drafts are dear above this price; then their gain decides."""
    speculative_below_price: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.5
    """Below this price requests speculate, whatever the texts of the moment gain."""
    plain_below_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.03
    """Requests go plain where drafts are dear and gain less than this."""
    speculative_above_gain: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.08
    """They speculate again where the probes among them gain more than this."""
    max_drafting_loss: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.02
    """Where drafts are cheap but making them, for texts with which nothing is gained, loses more
    than this, requests go plain too; the same unit as a gain."""
    plain_above_running: Annotated[int, Field(ge=1)] | None = None
    """A limit besides: mean running sequences per verifier above which requests go plain whatever
    drafts gain. By default there is none."""
    speculative_below_running: Annotated[int, Field(ge=1)] | None = None
    """Mean below which that limit holds no longer; by default the limit itself."""
    min_dwell_s: Annotated[float, Field(ge=0, le=3600, allow_inf_nan=False)] = 2.0
    """Shortest time between two switches."""
    max_load_age_s: FiniteSeconds = 2.0
    """Older load reports count as unknown, and unknown means plain."""

    @model_validator(mode="after")
    def _ordered(self) -> PathPolicyConfig:
        if self.speculative_below_price > self.plain_above_price:
            raise ValueError("speculative_below_price must not be over plain_above_price")
        if self.plain_below_gain > self.speculative_above_gain:
            raise ValueError("plain_below_gain must not be over speculative_above_gain")
        if self.speculative_below_running is not None and (
            self.plain_above_running is None
            or self.speculative_below_running > self.plain_above_running
        ):
            raise ValueError(
                "speculative_below_running must not be over plain_above_running, nor stand alone"
            )
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
    auth: AuthConfig = AuthConfig()
    """Who may ask."""
    rpc: RpcConfig = RpcConfig()
    """How members are spoken to."""
    tool_call_format: Literal["auto", "hermes", "llama3_json"] = "auto"
    """How the model writes calls of functions: `auto` sees it from the chat template. A template
    that knows no tools gets them as text, in this format; `auto` takes hermes then."""
    request_timeout_s: FiniteSeconds = 600.0
    """Longest life of one request."""
    max_resumes: Annotated[int, Field(ge=0)] = 3
    """How often a request whose verifier is lost goes on at another one, with the same tokens. 0:
    it ends in an error instead."""
