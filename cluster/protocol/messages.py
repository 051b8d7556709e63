"""The messages of both protocols as plain values; codec.py maps them to the wire and back.

A batch is one wire message: all that one side has to say after one step. Empty fields mean that
there is nothing of that kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from cluster.load import VerifierLoad
from cluster.types import Draft, GenerationEvent, GenerationRequest, Path, SamplingParams

PROTOCOL_VERSION = 2
NOISE_VERSION = 1
"""Version of the coupled noise (engine/noise.py); members with different noise do not pair."""
MAX_DRAFTS_PER_MESSAGE = 16
"""Drafts of a session that a drafter may send for each message that it heard of it."""


# --- generation: router and verifier ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RouterHello:
    """First message of a router on a generation stream."""

    router_id: str
    """Incarnation of the router."""
    fingerprint: str
    """ModelCard.fingerprint it tokenizes for."""
    lease_ms: int = 0
    """The verifier frees what it runs for a router that is silent for so long; while anything runs,
    a router speaks once a second. 0: never."""
    protocol_version: int = PROTOCOL_VERSION


@dataclass(frozen=True, slots=True)
class VerifierHello:
    """First message of a verifier on a generation stream."""

    incarnation: str
    fingerprint: str
    protocol_version: int = PROTOCOL_VERSION
    noise_version: int = NOISE_VERSION


@dataclass(frozen=True, slots=True)
class SetPath:
    """Change the path of a running request."""

    request_id: str
    path: Path


@dataclass(frozen=True, slots=True)
class RouterBatch:
    """What a router says at once."""

    hello: RouterHello | None = None
    submits: tuple[GenerationRequest, ...] = ()
    cancels: tuple[str, ...] = ()
    """Request ids. An unknown one is not an error: it may have finished meanwhile."""
    set_paths: tuple[SetPath, ...] = ()
    load_interval_ms: int = 0
    """Longest time between two load reports while no request of this router runs; 0: as before, at
    first 1 s."""


@dataclass(frozen=True, slots=True)
class VerifierBatch:
    """What a verifier says after one step."""

    hello: VerifierHello | None = None
    events: tuple[GenerationEvent, ...] = ()
    load: VerifierLoad | None = None
    drain: bool = False
    """Submit nothing more; what runs is finished."""


# --- drafting: verifier and drafter ----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetHello:
    """First message of a verifier on a drafting stream."""

    incarnation: str
    target_model: str
    vocabulary: str
    """Fingerprint of the target's vocabulary."""
    lease_ms: int = 0
    """The drafter closes the sessions of a verifier that is silent for so long; while any is open,
    a verifier speaks once a second. 0: never."""
    protocol_version: int = PROTOCOL_VERSION
    noise_version: int = NOISE_VERSION


@dataclass(frozen=True, slots=True)
class DrafterHello:
    """First message of a drafter on a drafting stream."""

    incarnation: str
    drafter: str
    """ngram, or the draft model's name."""
    vocabulary: str
    """Empty: token ids are opaque to this drafter, any vocabulary fits."""
    max_sessions: int
    max_speculative_tokens: int
    max_context_len: int = 0
    """Tokens; 0 is unbounded."""
    kind: str = ""
    """How it drafts: ngram, suffix, model."""
    tells_laws: bool = False
    """It can draw drafts by noise of its own and tell the law of each."""
    protocol_version: int = PROTOCOL_VERSION
    noise_version: int = NOISE_VERSION


@dataclass(frozen=True, slots=True)
class OpenSession:
    """Open a session, or replace it: drafter state is a function of the committed tokens."""

    session: int
    """Chosen by the verifier, unique on the stream."""
    epoch: int
    """Counts re-openings; echoed by every draft."""
    token_ids: tuple[int, ...]
    """All committed tokens: prompt, then what was generated."""
    num_prompt_tokens: int
    request_key: int
    sampling: SamplingParams
    num_speculative_tokens: int
    cache_salt: str = ""
    """Only sessions of one salt may learn from one another; without one from none."""
    wants_laws: bool = False
    """Every draft is to come with the law that it was drawn from; see README.md beside this file.
    """


@dataclass(frozen=True, slots=True)
class CommitTokens:
    """Tokens that are now final in a session."""

    session: int
    position: int
    """Of the first id, counted from the first prompt token."""
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TargetBatch:
    """What a verifier says to a drafter after one step. Applied in the order of the fields."""

    hello: TargetHello | None = None
    opens: tuple[OpenSession, ...] = ()
    commits: tuple[CommitTokens, ...] = ()
    pauses: tuple[int, ...] = ()
    """Sessions that take commits and send no drafts."""
    resumes: tuple[int, ...] = ()
    closes: tuple[int, ...] = ()
    least_survival: float = 0.0
    """In [0, 1], for all its sessions from now on: a token whose chance to be accepted, with all
    before it, is lower is not worth drafting."""


class SessionDraft(NamedTuple):
    """A draft of one session; which of them are due, README.md beside this file says. A tuple,
    since a message may bring one of every session."""

    session: int
    epoch: int
    draft: Draft


@dataclass(frozen=True, slots=True)
class SessionError:
    """A session that the drafter no longer has, or never took. Other sessions go on."""

    session: int
    epoch: int
    kind: str
    """Name in the error table of cluster/errors.py."""
    message: str


@dataclass(frozen=True, slots=True)
class DrafterReport:
    """A drafter's own load."""

    sessions: int
    tokens_per_s: float
    queue_ms: float
    num_branches: int = 0
    """Corrections that were prepared, since the start."""


@dataclass(frozen=True, slots=True)
class DrafterBatch:
    """What a drafter says at once."""

    hello: DrafterHello | None = None
    drafts: tuple[SessionDraft, ...] = ()
    errors: tuple[SessionError, ...] = ()
    load: DrafterReport | None = None
    drain: bool = False
    """Open nothing more; open sessions are served until they are closed."""
