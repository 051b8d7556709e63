"""Load reports: what verifiers and drafters tell, and the snapshot a router decides from."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, TypeVar

T = TypeVar("T")


class DrafterState(StrEnum):
    """How a drafter looks from a verifier."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class DrafterLoad:
    """What one verifier knows of one drafter."""

    incarnation: str
    state: DrafterState
    sessions: int = 0
    tokens_per_s: float = 0.0
    """Tokens the drafter proposed a second, over all its sessions."""
    queue_ms: float = 0.0
    """Wait between a commit's arrival and its draft's forward."""
    rtt_ms: float = 0.0
    """From sending a commit to its draft's arrival."""
    num_draft_tokens: int = 0
    """Drafts of it that this verifier verified."""
    num_accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class VerifierLoad:
    """What one verifier reports of itself."""

    running: int = 0
    waiting: int = 0
    kv_blocks_used: int = 0
    kv_blocks_total: int = 0
    step_ms: float = 0.0
    """Moving average of a decoding step's time."""
    step_tokens: float = 0.0
    """Moving average of the tokens in a step."""
    knee_tokens: int = 0
    """Tokens a step takes before its time grows; 0 is not measured."""
    prefix_cache_hit_tokens: int = 0
    """Since the start: tokens of admitted sequences whose KV was there already."""
    prefix_cache_query_tokens: int = 0
    """Since the start: all tokens of admitted sequences, as they were then."""
    num_preemptions: int = 0
    """Since the start: sequences that lost their place, to be computed again."""
    drafters: tuple[DrafterLoad, ...] = ()


@dataclass(frozen=True, slots=True)
class Aged(Generic[T]):
    """A report and how old it is."""

    value: T
    age_s: float


@dataclass(frozen=True, slots=True)
class ClusterLoad:
    """A router's snapshot of the cluster. Keys are incarnations."""

    verifiers: dict[str, Aged[VerifierLoad]] = field(default_factory=dict)
    drafters: dict[str, Aged[DrafterLoad]] = field(default_factory=dict)
