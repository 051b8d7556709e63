"""What GET /v1/cluster tells."""

from __future__ import annotations

from typing import Any

from cluster.load import DrafterLoad, DrafterState, VerifierLoad
from cluster.types import Member
from router.service import RouterService

Json = dict[str, Any]


def cluster_report(service: RouterService) -> Json:
    """Mode, reason, and every member as this router sees it."""
    load = service.pool.load()
    drafters = {incarnation: aged.value for incarnation, aged in load.drafters.items()}
    members = {i: Member(i, "") for i in drafters} | service.drafters
    return {
        "mode": service.policy.mode.value,
        "reason": service.policy.reason,
        "since_s": round(service.policy.since_s(service.clock()), 3),
        "acceptance_per_position": service.totals.acceptance_per_position,
        "routers": [_router(service)],
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


def _router(service: RouterService) -> Json:
    return {
        "replica_id": service.identity.replica_id,
        "node_id": service.identity.node_id,
        "pid": service.identity.pid,
        "in_flight": service.admission.in_flight,
        "ready": service.not_ready_reason is None,
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
