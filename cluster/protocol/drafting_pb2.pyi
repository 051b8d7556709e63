from cluster.protocol import sampling_pb2 as _sampling_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class TargetBatch(_message.Message):
    __slots__ = ("hello", "opens", "commits", "pauses", "resumes", "closes", "least_survival")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OPENS_FIELD_NUMBER: _ClassVar[int]
    COMMITS_FIELD_NUMBER: _ClassVar[int]
    PAUSES_FIELD_NUMBER: _ClassVar[int]
    RESUMES_FIELD_NUMBER: _ClassVar[int]
    CLOSES_FIELD_NUMBER: _ClassVar[int]
    LEAST_SURVIVAL_FIELD_NUMBER: _ClassVar[int]
    hello: TargetHello
    opens: _containers.RepeatedCompositeFieldContainer[OpenSession]
    commits: _containers.RepeatedCompositeFieldContainer[CommitTokens]
    pauses: _containers.RepeatedScalarFieldContainer[int]
    resumes: _containers.RepeatedScalarFieldContainer[int]
    closes: _containers.RepeatedScalarFieldContainer[int]
    least_survival: float
    def __init__(self, hello: _Optional[_Union[TargetHello, _Mapping]] = ..., opens: _Optional[_Iterable[_Union[OpenSession, _Mapping]]] = ..., commits: _Optional[_Iterable[_Union[CommitTokens, _Mapping]]] = ..., pauses: _Optional[_Iterable[int]] = ..., resumes: _Optional[_Iterable[int]] = ..., closes: _Optional[_Iterable[int]] = ..., least_survival: _Optional[float] = ...) -> None: ...

class DrafterBatch(_message.Message):
    __slots__ = ("hello", "drafts", "errors", "load", "drain")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    hello: DrafterHello
    drafts: _containers.RepeatedCompositeFieldContainer[SessionDraft]
    errors: _containers.RepeatedCompositeFieldContainer[SessionError]
    load: DrafterReport
    drain: bool
    def __init__(self, hello: _Optional[_Union[DrafterHello, _Mapping]] = ..., drafts: _Optional[_Iterable[_Union[SessionDraft, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[SessionError, _Mapping]]] = ..., load: _Optional[_Union[DrafterReport, _Mapping]] = ..., drain: _Optional[bool] = ...) -> None: ...

class TargetHello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "incarnation", "target_model", "vocabulary", "lease_ms")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TARGET_MODEL_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    noise_version: int
    incarnation: str
    target_model: str
    vocabulary: str
    lease_ms: int
    def __init__(self, protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., target_model: _Optional[str] = ..., vocabulary: _Optional[str] = ..., lease_ms: _Optional[int] = ...) -> None: ...

class DrafterHello(_message.Message):
    __slots__ = ("protocol_version", "noise_version", "incarnation", "drafter", "vocabulary", "max_sessions", "max_speculative_tokens", "max_context_len", "kind", "tells_laws")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    NOISE_VERSION_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DRAFTER_FIELD_NUMBER: _ClassVar[int]
    VOCABULARY_FIELD_NUMBER: _ClassVar[int]
    MAX_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MAX_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_LEN_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TELLS_LAWS_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    noise_version: int
    incarnation: str
    drafter: str
    vocabulary: str
    max_sessions: int
    max_speculative_tokens: int
    max_context_len: int
    kind: str
    tells_laws: bool
    def __init__(self, protocol_version: _Optional[int] = ..., noise_version: _Optional[int] = ..., incarnation: _Optional[str] = ..., drafter: _Optional[str] = ..., vocabulary: _Optional[str] = ..., max_sessions: _Optional[int] = ..., max_speculative_tokens: _Optional[int] = ..., max_context_len: _Optional[int] = ..., kind: _Optional[str] = ..., tells_laws: _Optional[bool] = ...) -> None: ...

class OpenSession(_message.Message):
    __slots__ = ("session", "epoch", "token_ids", "request_key", "sampling", "num_speculative_tokens", "num_prompt_tokens", "cache_salt", "wants_laws")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_KEY_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    NUM_SPECULATIVE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    WANTS_LAWS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    request_key: int
    sampling: _sampling_pb2.Sampling
    num_speculative_tokens: int
    num_prompt_tokens: int
    cache_salt: str
    wants_laws: bool
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., request_key: _Optional[int] = ..., sampling: _Optional[_Union[_sampling_pb2.Sampling, _Mapping]] = ..., num_speculative_tokens: _Optional[int] = ..., num_prompt_tokens: _Optional[int] = ..., cache_salt: _Optional[str] = ..., wants_laws: _Optional[bool] = ...) -> None: ...

class CommitTokens(_message.Message):
    __slots__ = ("session", "position", "token_ids")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    session: int
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session: _Optional[int] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionDraft(_message.Message):
    __slots__ = ("session", "epoch", "anchor_position", "anchor_hash", "token_ids", "parents", "confidences", "answers", "laws")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_POSITION_FIELD_NUMBER: _ClassVar[int]
    ANCHOR_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    PARENTS_FIELD_NUMBER: _ClassVar[int]
    CONFIDENCES_FIELD_NUMBER: _ClassVar[int]
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    LAWS_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    anchor_position: int
    anchor_hash: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    parents: _containers.RepeatedScalarFieldContainer[int]
    confidences: _containers.RepeatedScalarFieldContainer[float]
    answers: int
    laws: _containers.RepeatedCompositeFieldContainer[DraftLaw]
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., anchor_position: _Optional[int] = ..., anchor_hash: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., parents: _Optional[_Iterable[int]] = ..., confidences: _Optional[_Iterable[float]] = ..., answers: _Optional[int] = ..., laws: _Optional[_Iterable[_Union[DraftLaw, _Mapping]]] = ...) -> None: ...

class DraftLaw(_message.Message):
    __slots__ = ("token_ids", "weights")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[int]] = ...) -> None: ...

class SessionError(_message.Message):
    __slots__ = ("session", "epoch", "kind", "message")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    session: int
    epoch: int
    kind: str
    message: str
    def __init__(self, session: _Optional[int] = ..., epoch: _Optional[int] = ..., kind: _Optional[str] = ..., message: _Optional[str] = ...) -> None: ...

class DrafterReport(_message.Message):
    __slots__ = ("sessions", "tokens_per_s", "queue_ms", "num_branches")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_BRANCHES_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    tokens_per_s: float
    queue_ms: float
    num_branches: int
    def __init__(self, sessions: _Optional[int] = ..., tokens_per_s: _Optional[float] = ..., queue_ms: _Optional[float] = ..., num_branches: _Optional[int] = ...) -> None: ...
