"""What a verifier tells of itself to whoever scrapes the cluster."""

from __future__ import annotations

from cluster.load import DrafterState
from cluster.metrics import (
    ACCEPTED_PER_POSITION,
    ACCEPTED_TOKENS,
    BREAKER_STATE,
    DRAFT_GAIN,
    DRAFT_OUTCOMES,
    DRAFT_PRICE,
    DRAFT_RTT,
    DRAFT_TAX,
    DRAFT_TOKENS,
    DRAFT_WAIT,
    DRAFTERS_REST,
    FALLBACKS,
    KV_BLOCKS,
    LEASES_EXPIRED,
    PREEMPTIONS,
    PREFIX_CACHE_HITS,
    PREFIX_CACHE_QUERIES,
    RUNNING,
    STEP_TOKENS,
    VERIFY_STEP,
    VLLM_ACCEPTED_PER_POSITION,
    VLLM_ACCEPTED_TOKENS,
    VLLM_DRAFT_TOKENS,
    VLLM_DRAFTS,
    WAITING,
    WASTED_TOKENS,
    Exposition,
    MemberLabels,
)
from verifier_service.draft_client import DraftClient
from verifier_service.engine import Engine
from verifier_service.recorders import Fallback
from verifier_service.servicer import GenerationServicer


class VerifierMetrics:
    """Reads the numbers where they are kept."""

    def __init__(
        self,
        labels: MemberLabels,
        engine: Engine,
        draft_client: DraftClient,
        servicer: GenerationServicer,
        depth: int,
    ) -> None:
        """`depth`: most drafts in a step of a sequence; so many positions are told from the start,
        since who takes differences must see a 0 first."""
        self._labels = labels
        self._engine = engine
        self._draft_client = draft_client
        self._servicer = servicer
        self._depth = depth

    def text(self) -> str:
        """The exposition of this moment."""
        exposition = Exposition(self._labels)
        self._add_load(exposition)
        self._add_steps(exposition)
        self._add_speculation(exposition)
        self._add_drafting(exposition)
        exposition.add(LEASES_EXPIRED, self._servicer.num_expired)
        return exposition.text()

    def _add_load(self, exposition: Exposition) -> None:
        load = self._engine.load()
        exposition.add(RUNNING, load.running)
        exposition.add(WAITING, load.waiting)
        exposition.add(KV_BLOCKS, load.kv_blocks_used, "used")
        exposition.add(KV_BLOCKS, load.kv_blocks_total - load.kv_blocks_used, "free")
        exposition.add(PREFIX_CACHE_HITS, load.prefix_cache_hit_tokens)
        exposition.add(PREFIX_CACHE_QUERIES, load.prefix_cache_query_tokens)
        exposition.add(PREEMPTIONS, load.num_preemptions)
        exposition.add(DRAFT_PRICE, load.draft_price)
        exposition.add(DRAFT_TAX, load.draft_tax)
        exposition.add(DRAFTERS_REST, int(load.drafters_rest))
        if load.draft_gain is not None:
            exposition.add(DRAFT_GAIN, load.draft_gain)

    def _add_steps(self, exposition: Exposition) -> None:
        recorder = self._engine.recorder
        exposition.add_distribution(VERIFY_STEP, recorder.step_seconds)
        exposition.add_distribution(STEP_TOKENS, recorder.step_tokens)
        exposition.add_distribution(DRAFT_WAIT, recorder.draft_wait_seconds)

    def _add_speculation(self, exposition: Exposition) -> None:
        totals = self._engine.recorder.speculation.totals()
        local = {local.kind for local in self._engine.load().local_drafters}
        names = self._draft_client.drafter_names | local | totals.draft_tokens.keys()
        for drafter in sorted(names):
            exposition.add(DRAFT_TOKENS, totals.draft_tokens.get(drafter, 0), drafter)
            exposition.add(ACCEPTED_TOKENS, totals.accepted_tokens.get(drafter, 0), drafter)
        drafted, accepted = sum(totals.draft_tokens.values()), sum(totals.accepted_tokens.values())
        exposition.add(WASTED_TOKENS, drafted - accepted)
        exposition.add(VLLM_DRAFTS, totals.num_drafts)
        exposition.add(VLLM_DRAFT_TOKENS, drafted)
        exposition.add(VLLM_ACCEPTED_TOKENS, accepted)
        per_position = totals.accepted_per_position
        for position in range(max(self._depth, len(per_position))):
            count = per_position[position] if position < len(per_position) else 0
            exposition.add(ACCEPTED_PER_POSITION, count, str(position))
            exposition.add(VLLM_ACCEPTED_PER_POSITION, count, str(position))

    def _add_drafting(self, exposition: Exposition) -> None:
        client = self._draft_client
        exposition.add_distribution(DRAFT_RTT, client.recorder.rtt_seconds)
        for outcome, count in self._engine.draft_outcomes.items():
            exposition.add(DRAFT_OUTCOMES, count, outcome)
        exposition.add(DRAFT_OUTCOMES, client.counters.stale_epochs, "stale_epoch")
        exposition.add(DRAFT_OUTCOMES, client.counters.unknown_sessions, "unknown_session")
        exposition.add(DRAFT_OUTCOMES, client.counters.surplus_drafts, "surplus")
        late = {Fallback.LATE: self._engine.recorder.num_late}
        fallbacks = {**client.recorder.fallbacks, **late}
        for reason in Fallback:
            exposition.add(FALLBACKS, fallbacks.get(reason, 0), reason)
        states = [load.state for load in client.loads()]
        for state in DrafterState:
            exposition.add(BREAKER_STATE, states.count(state), state)
