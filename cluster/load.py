"""Load reports: what verifiers and drafters tell, and the snapshot a router decides from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from operator import itemgetter
from typing import Generic, TypeVar

T = TypeVar("T")


class DrafterState(StrEnum):
    """How a drafter looks from a verifier."""

    CONNECTING = "connecting"
    READY = "ready"
    LOST = "lost"
    REFUSED = "refused"
    DRAINING = "draining"
    DISTRUSTED = "distrusted"
    """Almost none of its drafts were accepted: it has no sessions for a while."""


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
    kind: str = ""
    """How it drafts; empty until it has said so."""
    num_accepted_chains: int = 0
    """Verdicts that accepted every draft."""
    num_ahead_hits: int = 0
    """After how many of those the next draft was there already."""
    num_corrections: int = 0
    """Verdicts that refused a draft."""
    num_correction_hits: int = 0
    """After how many of those the next draft was there already, prepared for that correction."""
    num_branches: int = 0
    """Corrections that the drafter prepared, over all its sessions."""


@dataclass(frozen=True, slots=True)
class LocalDrafterLoad:
    """A drafter that runs inside a verifier."""

    kind: str
    num_draft_tokens: int = 0
    """Drafts of it that were verified."""
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
    max_running: int = 0
    """Places: sequences that may run together; 0 is not known."""
    max_waiting: int = 0
    """Sequences that may wait for a place; more are refused."""
    place_s: float = 0.0
    """How long a sequence holds its place, of late; 0 before any ended."""
    draft_gain: float | None = None
    """Tokens per step that a sequence gains from drafts, all costs of them deducted; None if none
    is drafted for. See verifier_service/draft_worth.py."""
    draft_price: float = 0.0
    """What one draft for every sequence would lengthen a step by, as a share of it; 0 is not
    measured."""
    draft_tax: float = 0.0
    """What drafter replicas at work lengthen a step by, as a share of it; 0 before that was tried.
    See verifier_service/drafter_trial.py."""
    drafters_rest: bool = False
    """Drafter replicas are not asked at present, since they cost more than they bring."""
    drafters: tuple[DrafterLoad, ...] = ()
    local_drafters: tuple[LocalDrafterLoad, ...] = ()
    """Drafters of its own; that for clients' predictions is always there."""


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


MAX_REPORTS_PER_S = 50
"""Load reports of idle verifiers that a router takes in a second. One costs it about 0.3 ms, with
all that gRPC does for it: together under 2 % of a core."""


def report_interval_s(num_verifiers: int) -> float:
    """Longest time between two reports of a verifier to a router that has no request there, in
    whole seconds: 1, and more in a large fleet."""
    return float(max(1, math.ceil(num_verifiers / MAX_REPORTS_PER_S)))


def cluster_load(reports: Mapping[str, Aged[VerifierLoad]]) -> ClusterLoad:
    """What the verifiers' reports tell together, by incarnation. Drafters are seen through the
    verifiers that use them."""
    seen: dict[str, list[tuple[float, DrafterLoad]]] = {}
    for report in reports.values():
        for drafter in report.value.drafters:
            seen.setdefault(drafter.incarnation, []).append((report.age_s, drafter))
    return ClusterLoad(dict(reports), {name: _merged(views) for name, views in seen.items()})


def _merged(views: list[tuple[float, DrafterLoad]]) -> Aged[DrafterLoad]:
    """One drafter as several verifiers see it, with the ages of their reports. What each counted
    itself adds up. It is ready if it is for one of them; its own figures, and the age, are those of
    the newest such report."""
    ready = [view for view in views if view[1].state is DrafterState.READY]
    age_s, newest = min(ready or views, key=itemgetter(0))
    loads = [load for _, load in views]
    merged = replace(
        newest,
        sessions=sum(load.sessions for load in loads),
        rtt_ms=max(load.rtt_ms for load in loads),
        num_draft_tokens=sum(load.num_draft_tokens for load in loads),
        num_accepted_tokens=sum(load.num_accepted_tokens for load in loads),
    )
    return Aged(merged, age_s)
