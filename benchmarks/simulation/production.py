"""The one place where the simulation touches the code that decides in production.

Everything else here is simulated: devices, networks, clients. What is imported below runs as it
does in a router, a verifier and Serve's controller.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

from cluster.config import AdmissionConfig, PathPolicyConfig, SchedulerConfig
from cluster.errors import OverloadedError, TenantOverloadedError
from cluster.load import (
    Aged,
    ClusterLoad,
    DrafterLoad,
    DrafterState,
    VerifierLoad,
    cluster_load,
    report_interval_s,
)
from cluster.types import Path
from router.admission import Admission
from router.path_policy import (
    PathDecision,
    PathPolicy,
    ServiceTier,
    SpeculationMode,
    with_probes,
)
from router.queue_outlook import QueueOutlook, best_outlook, queue_outlook
from router.verifier_pool import SMALL_FLEET, SNAPSHOT_S
from router.verifier_routing import (
    MAX_CANDIDATES,
    FleetMean,
    HashRing,
    RecentCount,
    VerifierView,
    choose_verifier,
    fleet_mean,
    prompt_affinity,
)
from verifier_service.draft_planner import DraftPlanner
from verifier_service.draft_trie import ChainNode, Chance, its_word
from verifier_service.drafter_choice import Candidate, choose_drafter, preferred_drafters
from verifier_service.planner import StepCost, StepProfile
from verifier_service.speculation import Speculation

__all__ = [
    "HOUSEKEEPING_PERIOD_S",
    "MAX_CANDIDATES",
    "MAX_STREAMS",
    "POLICY_TICK_S",
    "REFUSALS",
    "SMALL_FLEET",
    "SNAPSHOT_S",
    "Admission",
    "AdmissionConfig",
    "Aged",
    "Candidate",
    "ChainNode",
    "Chance",
    "ClusterLoad",
    "DraftPlanner",
    "DrafterLoad",
    "DrafterState",
    "FleetMean",
    "HashRing",
    "Path",
    "PathDecision",
    "PathPolicy",
    "PathPolicyConfig",
    "QueueOutlook",
    "RecentCount",
    "SchedulerConfig",
    "ServiceTier",
    "Speculation",
    "SpeculationMode",
    "StepCost",
    "StepProfile",
    "VerifierLoad",
    "VerifierView",
    "best_outlook",
    "choose_drafter",
    "choose_verifier",
    "cluster_load",
    "fleet_mean",
    "its_word",
    "preferred_drafters",
    "prompt_affinity",
    "queue_outlook",
    "replica_policy",
    "report_interval_s",
    "verifier_load",
    "with_probes",
]

POLICY_TICK_S = 0.1
"""Between two looks of a router's path policy at the load; as in router/service.py."""
MAX_STREAMS = 8
HOUSEKEEPING_PERIOD_S = 0.25
"""Both as in verifier_service/draft_client.py, which would load torch."""
REFUSALS = (OverloadedError, TenantOverloadedError)
"""What a full router raises."""

ReplicaPolicy = Callable[[Any], tuple[float, Mapping[str, Any]]]


def replica_policy(function: str, kwargs: Mapping[str, Any]) -> ReplicaPolicy:
    """The autoscaling policy that a Serve YAML names, `module:name`. Raises ImportError,
    AttributeError, ValueError or TypeError if there is none or its arguments do not fit."""
    module, _, name = function.partition(":")
    policy: ReplicaPolicy = getattr(importlib.import_module(module), name)(**kwargs)
    return policy


def verifier_load(
    planner: DraftPlanner,
    *,
    is_idle: bool,
    limits: SchedulerConfig,
    place_s: float,
    running: int,
    waiting: int,
    kv_tokens: tuple[int, int],
    step_ms: float,
    step_tokens: float,
    num_preemptions: int,
    drafters: tuple[DrafterLoad, ...],
) -> VerifierLoad:
    """A verifier's report; `kv_tokens` are those used and all, told as blocks of 16."""
    used, total = kv_tokens
    return VerifierLoad(
        running=running,
        waiting=waiting,
        kv_blocks_used=used // 16,
        kv_blocks_total=total // 16,
        step_ms=step_ms,
        step_tokens=step_tokens,
        knee_tokens=planner.knee_tokens,
        num_preemptions=num_preemptions,
        max_running=limits.max_running_sequences,
        max_waiting=limits.max_waiting_sequences,
        place_s=place_s,
        draft_gain=planner.gain,
        draft_price=planner.price(idle=is_idle),
        drafters=drafters,
    )
