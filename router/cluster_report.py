"""What GET /v1/cluster tells."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cluster.load import DrafterLoad, DrafterState, VerifierLoad
from cluster.members_service import RouterStatus
from cluster.types import Member
from router.service import RouterService

Json = dict[str, Any]


def cluster_report(service: RouterService, routers: Mapping[str, RouterStatus]) -> Json:
    """Mode, reason, and every member as this router sees it. `routers`: what the other routers told
    of themselves, by incarnation."""
    load = service.pool.load()
    drafters = {incarnation: aged.value for incarnation, aged in load.drafters.items()}
    members = {i: Member(i, "") for i in drafters} | service.drafters
    return {
        "mode": service.policy.mode.value,
        "reason": service.policy.reason,
        "since_s": round(service.policy.since_s(service.clock()), 3),
        "acceptance_per_position": service.totals.acceptance_per_position,
        "routers": _routers(service, routers),
        "verifiers": [_verifier(service, member) for member in service.pool.members.values()],
        "drafters": [
            _drafter(member, drafters.get(incarnation)) for incarnation, member in members.items()
        ],
    }


def _identity(member: Member) -> Json:
    return {
        "replica_id": member.replica_id,
        "node_id": member.node_id,
        "pid": member.pid,
        "address": member.address,
        "model": member.model,
        "decoder": member.decoder,
        "incarnation": member.incarnation,
        "fingerprint": member.fingerprint,
    }


def _routers(service: RouterService, told: Mapping[str, RouterStatus]) -> list[Json]:
    """This one first. Each has a mode of its own, from the same load."""
    own = service.identity
    others = [member for name, member in service.routers.items() if name != own.incarnation]
    rows = [_router(own, service.status())]
    return rows + [_router(member, told.get(member.incarnation)) for member in others]


def _router(member: Member, status: RouterStatus | None) -> Json:
    """A router that did not answer in time has state silent, and is not ready."""
    known = status or RouterStatus()
    return {
        "replica_id": member.replica_id,
        "node_id": member.node_id,
        "pid": member.pid,
        "address": member.address,
        "incarnation": member.incarnation,
        "state": "silent" if status is None else "ready" if known.ready else "not ready",
        "ready": known.ready,
        "in_flight": known.in_flight,
        "mode": known.mode or None,
        "reason": known.reason or None,
        "since_s": round(known.since_s, 3),
    }


def _verifier(service: RouterService, member: Member) -> Json:
    client = service.pool.clients.get(member.incarnation)
    aged = client.load() if client else None
    report = aged.value if aged else VerifierLoad()
    queried = report.prefix_cache_query_tokens
    hit_rate = round(report.prefix_cache_hit_tokens / queried, 4) if queried else None
    return {
        **_identity(member),
        "state": client.state.value if client else "unused",
        "load_age_s": round(aged.age_s, 3) if aged else None,
        "running": report.running,
        "waiting": report.waiting,
        "kv_blocks_used": report.kv_blocks_used,
        "kv_blocks_total": report.kv_blocks_total,
        "step_ms": round(report.step_ms, 3),
        "knee_tokens": report.knee_tokens,
        "prefix_cache_hit_rate": hit_rate,
        "num_preemptions": report.num_preemptions,
        "draft_price": round(report.draft_price, 3),
        "draft_gain": None if report.draft_gain is None else round(report.draft_gain, 3),
        "draft_tax": round(report.draft_tax, 3),
        "drafters_rest": report.drafters_rest,
    }


def _drafter(member: Member, load: DrafterLoad | None) -> Json:
    """A drafter that no verifier uses has state unused."""
    known = load or DrafterLoad(member.incarnation, DrafterState.CONNECTING)
    drafted, accepted = known.num_draft_tokens, known.num_accepted_tokens
    return {
        **_identity(member),
        "state": load.state.value if load else "unused",
        "sessions": known.sessions,
        "tokens_per_s": round(known.tokens_per_s, 1),
        "queue_ms": round(known.queue_ms, 3),
        "rtt_ms": round(known.rtt_ms, 3),
        "acceptance_rate": round(accepted / drafted, 4) if drafted else None,
    }
