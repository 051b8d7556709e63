from cluster.protocol import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RouterBatch(_message.Message):
    __slots__ = ("hello", "submits", "cancels", "set_paths", "load_interval_ms")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMITS_FIELD_NUMBER: _ClassVar[int]
    CANCELS_FIELD_NUMBER: _ClassVar[int]
    SET_PATHS_FIELD_NUMBER: _ClassVar[int]
    LOAD_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submits: _containers.RepeatedCompositeFieldContainer[Submit]
    cancels: _containers.RepeatedScalarFieldContainer[str]
    set_paths: _containers.RepeatedCompositeFieldContainer[SetPath]
    load_interval_ms: int
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submits: _Optional[_Iterable[_Union[Submit, _Mapping]]] = ..., cancels: _Optional[_Iterable[str]] = ..., set_paths: _Optional[_Iterable[_Union[SetPath, _Mapping]]] = ..., load_interval_ms: _Optional[int] = ...) -> None: ...

class VerifierBatch(_message.Message):
    __slots__ = ("hello", "tokens", "finishes", "errors", "load", "drain", "prompt_logprobs")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    FINISHES_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    hello: VerifierHello
    tokens: _containers.RepeatedCompositeFieldContainer[Tokens]
    finishes: _containers.RepeatedCompositeFieldContainer[Finish]
    errors: _containers.RepeatedCompositeFieldContainer[RequestError]
    load: VerifierLoad
    drain: bool
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[PromptLogprobs]
    def __init__(self, hello: _Optional[_Union[VerifierHello, _Mapping]] = ..., tokens: _Optional[_Iterable[_Union[Tokens, _Mapping]]] = ..., finishes: _Optional[_Iterable[_Union[Finish, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[RequestError, _Mapping]]] = ..., load: _Optional[_Union[VerifierLoad, _Mapping]] = ..., drain: _Optional[bool] = ..., prompt_logprobs: _Optional[_Iterable[_Union[PromptLogprobs, _Mapping]]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("protocol_version", "router_id", "fingerprint", "lease_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    router_id: str
    fingerprint: str
    lease_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., router_id: _Optional[str] = ..., fingerprint: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class VerifierHello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "incarnation", "fingerprint")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    noise_version: int
    incarnation: str
    fingerprint: str
    def __init__(self, protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("request_id", "request_key", "prompt_ids", "resumed_ids", "sampling", "max_tokens", "stop_token_ids", "ignore_eos", "speculative", "num_speculative_tokens", "drafter", "deadline_ms", "num_top_logprobs", "grammar", "prediction_ids", "cache_salt", "num_prompt_logprobs", "priority")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    RESUMED_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    PREDICTION_IDS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    request_key: int
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    resumed_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _sampling_pb2.Sampling
    max_tokens: int
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    speculative: bool
    num_speculative_tokens: int
    drafter: str
    deadline_ms: int
    num_top_logprobs: int
    grammar: Grammar
    prediction_ids: _containers.RepeatedScalarFieldContainer[int]
    cache_salt: str
    num_prompt_logprobs: int
    priority: int
    def __init__(self, request_id: _Optional[str] = ..., request_key: _Optional[int] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., resumed_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., max_tokens: _Optional[int] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., speculative: _Optional[bool] = ..., num_speculative_tokens: _Optional[int] = ..., drafter: _Optional[str] = ..., deadline_ms: _Optional[int] = ..., num_top_logprobs: _Optional[int] = ..., grammar: _Optional[_Union[Grammar, _Mapping]] = ..., prediction_ids: _Optional[_Iterable[int]] = ..., cache_salt: _Optional[str] = ..., num_prompt_logprobs: _Optional[int] = ..., priority: _Optional[int] = ...) -> None: ...

class Grammar(_message.Message):
    __slots__ = ("kind", "text")
    KIND_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    text: str
    def __init__(self, kind: _Optional[str] = ..., text: _Optional[str] = ...) -> None: ...

class SetPath(_message.Message):
    __slots__ = ("request_id", "speculative")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    SPECULATIVE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    speculative: bool
    def __init__(self, request_id: _Optional[str] = ..., speculative: _Optional[bool] = ...) -> None: ...

class Tokens(_message.Message):
    __slots__ = ("request_id", "position", "token_ids", "drafted", "num_draft_tokens", "refused_ids", "num_cached_prompt_tokens", "logprobs", "draft_runs", "predicted", "num_resyncs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_IDS_FIELD_NUMBER: _ClassVar[int]
    NUM_CACHED_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_RUNS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_FIELD_NUMBER: _ClassVar[int]
    NUM_RESYNCS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    drafted: _containers.RepeatedScalarFieldContainer[bool]
    num_draft_tokens: int
    refused_ids: _containers.RepeatedScalarFieldContainer[int]
    num_cached_prompt_tokens: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    draft_runs: _containers.RepeatedCompositeFieldContainer[DraftRun]
    predicted: _containers.RepeatedScalarFieldContainer[bool]
    num_resyncs: int
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., drafted: _Optional[_Iterable[bool]] = ..., num_draft_tokens: _Optional[int] = ..., refused_ids: _Optional[_Iterable[int]] = ..., num_cached_prompt_tokens: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ..., draft_runs: _Optional[_Iterable[_Union[DraftRun, _Mapping]]] = ..., predicted: _Optional[_Iterable[bool]] = ..., num_resyncs: _Optional[int] = ...) -> None: ...

class DraftRun(_message.Message):
    __slots__ = ("drafter", "num_tokens")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    num_tokens: int
    def __init__(self, drafter: _Optional[str] = ..., num_tokens: _Optional[int] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("request_id", "position", "logprobs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    position: int
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprobs]
    def __init__(self, request_id: _Optional[str] = ..., position: _Optional[int] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprobs, _Mapping]]] = ...) -> None: ...

class TokenLogprobs(_message.Message):
    __slots__ = ("logprob", "top_ids", "top_logprobs")
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    TOP_IDS_FIELD_NUMBER: _ClassVar[int]
    TOP_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    logprob: float
    top_ids: _containers.RepeatedScalarFieldContainer[int]
    top_logprobs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, logprob: _Optional[float] = ..., top_ids: _Optional[_Iterable[int]] = ..., top_logprobs: _Optional[_Iterable[float]] = ...) -> None: ...

class Finish(_message.Message):
    __slots__ = ("request_id", "reason", "stats")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    STATS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    stats: SpeculationStats
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., stats: _Optional[_Union[SpeculationStats, _Mapping]] = ...) -> None: ...

class SpeculationStats(_message.Message):
    __slots__ = ("drafter", "num_steps", "drafted_per_position", "accepted_per_position")
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    NUM_STEPS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_PER_POSITION_FIELD_NUMBER: _ClassVar[int]
    drafter: str
    num_steps: int
    drafted_per_position: _containers.RepeatedScalarFieldContainer[int]
    accepted_per_position: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, drafter: _Optional[str] = ..., num_steps: _Optional[int] = ..., drafted_per_position: _Optional[_Iterable[int]] = ..., accepted_per_position: _Optional[_Iterable[int]] = ...) -> None: ...

class RequestError(_message.Message):
    __slots__ = ("request_id", "kind", "message", "param")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    PARAM_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: str
    message: str
    param: str
    def __init__(self, request_id: _Optional[str] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ..., param: _Optional[str] = ...) -> None: ...

class VerifierLoad(_message.Message):
    __slots__ = ("running", "waiting", "kv_blocks_used", "kv_blocks_total", "step_ms", "step_tokens", "knee_tokens", "drafters", "prefix_cache_hit_tokens", "prefix_cache_query_tokens", "num_preemptions", "local_drafters", "draft_gain", "max_running", "max_waiting", "place_s", "draft_price", "draft_tax", "drafters_rest")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    KV_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    STEP_MS_FIELD_NUMBER: _ClassVar[int]
    STEP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KNEE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFIX_CACHE_QUERY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    LOCAL_DRAFTERS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_GAIN_FIELD_NUMBER: _ClassVar[int]
    MAX_RUNNING_FIELD_NUMBER: _ClassVar[int]
    MAX_WAITING_FIELD_NUMBER: _ClassVar[int]
    PLACE_S_FIELD_NUMBER: _ClassVar[int]
    DRAFT_PRICE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TAX_FIELD_NUMBER: _ClassVar[int]
    DRAFTERS_REST_FIELD_NUMBER: _ClassVar[int]
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    step_ms: float
    step_tokens: float
    knee_tokens: int
    drafters: _containers.RepeatedCompositeFieldContainer[DrafterLink]
    prefix_cache_hit_tokens: int
    prefix_cache_query_tokens: int
    num_preemptions: int
    local_drafters: _containers.RepeatedCompositeFieldContainer[LocalDrafter]
    draft_gain: float
    max_running: int
    max_waiting: int
    place_s: float
    draft_price: float
    draft_tax: float
    drafters_rest: bool
    def __init__(self, running: _Optional[int] = ..., waiting: _Optional[int] = ..., kv_blocks_used: _Optional[int] = ..., kv_blocks_total: _Optional[int] = ..., step_ms: _Optional[float] = ..., step_tokens: _Optional[float] = ..., knee_tokens: _Optional[int] = ..., drafters: _Optional[_Iterable[_Union[DrafterLink, _Mapping]]] = ..., prefix_cache_hit_tokens: _Optional[int] = ..., prefix_cache_query_tokens: _Optional[int] = ..., num_preemptions: _Optional[int] = ..., local_drafters: _Optional[_Iterable[_Union[LocalDrafter, _Mapping]]] = ..., draft_gain: _Optional[float] = ..., max_running: _Optional[int] = ..., max_waiting: _Optional[int] = ..., place_s: _Optional[float] = ..., draft_price: _Optional[float] = ..., draft_tax: _Optional[float] = ..., drafters_rest: _Optional[bool] = ...) -> None: ...

class LocalDrafter(_message.Message):
    __slots__ = ("kind", "num_draft_tokens", "num_accepted_tokens")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_draft_tokens: int
    num_accepted_tokens: int
    def __init__(self, kind: _Optional[str] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ...) -> None: ...

class DrafterLink(_message.Message):
    __slots__ = ("incarnation", "state", "sessions", "tokens_per_s", "queue_ms", "rtt_ms", "num_draft_tokens", "num_accepted_tokens", "kind", "num_accepted_chains", "num_ahead_hits", "num_corrections", "num_correction_hits", "num_branches")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    RTT_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_ACCEPTED_CHAINS_FIELD_NUMBER: _ClassVar[int]
    NUM_AHEAD_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRECTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_CORRECTION_HITS_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    state: str
    sessions: int
    tokens_per_s: float
    queue_ms: float
    rtt_ms: float
    num_draft_tokens: int
    num_accepted_tokens: int
    kind: str
    num_accepted_chains: int
    num_ahead_hits: int
    num_corrections: int
    num_correction_hits: int
    num_branches: int
    def __init__(self, incarnation: _Optional[str] = ..., state: _Optional[str] = ..., sessions: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., queue_ms: _Optional[float] = ..., rtt_ms: _Optional[float] = ..., num_draft_tokens: _Optional[int] = ..., num_accepted_tokens: _Optional[int] = ..., kind: _Optional[str] = ..., num_accepted_chains: _Optional[int] = ..., num_ahead_hits: _Optional[int] = ..., num_corrections: _Optional[int] = ..., num_correction_hits: _Optional[int] = ..., num_branches: _Optional[int] = ...) -> None: ...
