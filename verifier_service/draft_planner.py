"""The planner with what it learns: what a step costs, what drafts are worth, how long they take.

The arithmetic is in planner.py. One of these belongs to one engine and is used by its thread.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from verifier_service.draft_trie import Chance
from verifier_service.draft_worth import DraftWorth
from verifier_service.drafter_trial import DrafterTrial, TriedStep
from verifier_service.planner import (
    Acceptance,
    Drafts,
    StepCost,
    StepProfile,
    WaitPolicy,
    plan_depths,
)
from verifier_service.speculation import Speculation

logger = logging.getLogger(__name__)


class Decision(StrEnum):
    """What was decided about drafts, and why."""

    VERIFIED = "drafts verified: worth their rows"
    LEFT = "drafts at hand left: none worth its row"
    WAITED = "waited: the tokens expected are worth the time"
    PROBED = "waited: a probe"
    WENT_ON = "did not wait: the tokens expected are not worth the time"
    ENGAGED = "a trial: drafter replicas gain more than they cost"
    RELEASED = "a trial: drafter replicas cost more than they gain, and rest"


class DraftPlanner:
    """Chooses the drafts of each step. Without a profile of the device's steps every draft at hand
    is chosen and every draft that is due is waited for."""

    def __init__(self, profile: StepProfile | None) -> None:
        self.decisions: Counter[Decision] = Counter()
        """By sequence of a step where drafts were at hand, by step where some were due, by trial of
        drafter replicas."""
        self._cost = StepCost(profile.ms, profile.context_ms) if profile else StepCost({1: 1.0})
        self._prompt_share = profile.prompt_share if profile else 1.0
        self._measured = profile is not None
        self._acceptance = Acceptance()
        self._waiting = WaitPolicy()
        self._step = 0
        self._worth = DraftWorth()
        self._trial = DrafterTrial()
        self._plan = _Plan()

    def set_context(self, mean_len: float) -> None:
        """Call as each step begins: tokens of the sequences in it, on the average. What is decided
        before the next one goes by this too."""
        self._cost.context_len = mean_len

    @property
    def wait_ms(self) -> float:
        """How long a draft that is due takes to come."""
        return self._waiting.wait_ms or 0.0

    @property
    def gain(self) -> float | None:
        """What a sequence gains from drafts, see draft_worth.py."""
        return self._worth.gain

    def price(self, *, idle: bool) -> float:
        """What a draft for every sequence costs, see draft_worth.py; idle: for a first one. Free
        where steps were not measured."""
        return self._price(1) if idle else self._worth.price

    @property
    def engages(self) -> bool:
        """Drafter replicas shall draft."""
        return self._trial.engages

    @property
    def drafters_pay(self) -> bool:
        """They are held to be worth what they cost; while the other way is tried too."""
        return self._trial.pays

    @property
    def trial_reason(self) -> str:
        """Why drafter replicas draft, or rest."""
        return self._trial.reason

    @property
    def tax(self) -> float:
        """What replicas at work lengthen a step by, as a share of it, see drafter_trial.py."""
        return self._trial.tax

    @property
    def least_survival(self) -> float:
        """A draft that is less likely to be accepted is not worth making. One is verified if it
        brings more than its row costs, which is the price, and to make it costs some of the tax;
        half of both leaves room for a drafter that knows its chances badly."""
        return min(1.0, 0.5 * (self._worth.price + self._trial.tax))

    @property
    def knee_tokens(self) -> int:
        """Tokens that a step takes before its time grows; 0 is not measured."""
        return self._cost.knee() if self._measured else 0

    def choose(
        self, speculations: Sequence[tuple[Speculation, int]], num_base: int, num_prefill: int
    ) -> None:
        """Set `chosen` of each, given with the most drafts that it can use.

        `num_base`: sequences that draw a token in this step; `num_prefill`: prompt tokens in it.
        """
        chains = [
            speculation.chain(max_len, self._chance_for(speculation))
            for speculation, max_len in speculations
        ]
        survivals = [[node.survival for node in chain] for chain in chains]
        num_others = num_base + round(self._prompt_share * num_prefill)
        depths = plan_depths(self._cost, num_others, num_base, survivals)
        for (speculation, _), chain, depth in zip(speculations, chains, depths, strict=True):
            speculation.chosen = chain[:depth]
            if chain:
                self.decisions[Decision.VERIFIED if depth else Decision.LEFT] += 1
        self._note_plan([speculation for speculation, _ in speculations], num_base)

    def _note_plan(self, speculations: Sequence[Speculation], num_base: int) -> None:
        """What this step's drafts are expected to bring. Prompt chunks are left out: who joins
        shall not change what drafting is worth."""
        drafted_for = [speculation for speculation in speculations if speculation.wanted]
        chosen = [node.survival for speculation in drafted_for for node in speculation.chosen]
        may_engage = [speculation for speculation in drafted_for if speculation.remote]
        self._plan = _Plan(
            num_base,
            len(drafted_for),
            sum(chosen),
            self._cost(num_base + len(chosen)) / self._cost(num_base),
            len(may_engage),
            sum(speculation.engages and speculation.live for speculation in may_engage),
            any(speculation.kinds_now for speculation in may_engage),
        )

    def _price(self, num_decoding: int) -> float:
        return self._cost(2 * num_decoding) / self._cost(num_decoding) - 1.0

    def waits(self, due: Sequence[Speculation], others: Sequence[Speculation]) -> bool:
        """Whether the step shall wait for these drafts; ask again when some have come. `others`
        decode in it too."""
        if not due or not self._measured:
            return bool(due)
        tokens = rows = 0.0
        for speculation in others:
            if speculation.live and speculation.engages and not speculation.late:
                tokens += speculation.value.expected
                rows += speculation.value.rows
        coming = []
        for speculation in due:
            held = self._at_hand(speculation)
            tokens += held.tokens
            rows += held.rows
            coming.append(speculation.value.beyond(held))
        at_hand = Drafts(tokens, rows)
        num_decoding = len(due) + len(others)
        waits = self._waiting.waits(self._step, self._cost, num_decoding, at_hand, coming)
        self._note_wait(waits)
        return waits

    def _note_wait(self, waits: bool) -> None:
        probes = self._step == self._waiting.probe_step
        if not waits:
            self.decisions[Decision.WENT_ON] += 1
        else:
            self.decisions[Decision.PROBED if probes else Decision.WAITED] += 1

    def answered(self, speculation: Speculation, wait_ms: float, *, empty: bool) -> None:
        """A draft that was due came after so long."""
        self._waiting.observe_wait(wait_ms)
        if empty:
            speculation.value.observe(0, 0)

    def missed(self, deadline_ms: float) -> None:
        """The deadline passed before a draft that was due."""
        self._waiting.observe_wait(deadline_ms)

    def verified(self, speculation: Speculation, num_drafted: int, num_accepted: int) -> None:
        """The first `num_drafted` of a sequence's chosen drafts were verified."""
        chain = speculation.chosen[:num_drafted]
        remote = [node.drafter not in speculation.local_kinds for node in chain]
        if any(remote):
            speculation.value.observe(sum(remote[:num_accepted]), sum(remote))
            self._waiting.observe_verdict(self._step)
        if speculation.tells_laws:
            speculation.mean.observe(num_drafted, num_accepted)
            return
        # What lies behind the first refusal says nothing.
        for position, node in enumerate(chain[: num_accepted + 1]):
            hit = position < num_accepted
            self._acceptance.record(node.drafter, [node.confidence], int(hit), self._step)

    def _chance_for(self, speculation: Speculation) -> Chance:
        return speculation.mean if speculation.tells_laws else self._chance

    def _chance(self, drafter: str, confidence: float) -> float:
        return self._acceptance.conditional(drafter, confidence, self._step)

    def _at_hand(self, speculation: Speculation) -> Drafts:
        """As many as are verified of late."""
        num_rows = math.ceil(speculation.value.rows)
        nodes = speculation.chain(num_rows, self._chance_for(speculation))
        return Drafts(sum(node.survival for node in nodes), len(nodes))

    def stepped(
        self,
        num_rows: int,
        num_read: int,
        step_ms: float,
        *,
        num_drawn: int,
        drafting_ms: float,
        now: float,
    ) -> None:
        """A step was run, in which `num_drawn` sequences drew a token. `num_rows`: its tokens that
        gave logits; `num_read`: the others; both 0 if its time says nothing about other steps;
        `drafting_ms`: spent on making, awaiting and choosing drafts; `now`: seconds, on any
        clock."""
        num_tokens = num_rows + self._prompt_share * num_read
        self._step += 1
        plan, self._plan = self._plan, _Plan()
        is_trial = self._trial.is_on and plan.num_engageable > 0
        surprise = 0.0
        if self._measured and num_tokens:
            surprise = math.log(max(step_ms, 1e-3) / self._cost(num_tokens))
            if not is_trial:
                self._cost.observe(num_tokens, step_ms)
        if not num_drawn:
            return
        lost = drafting_ms / self._cost(num_drawn) if self._measured else 0.0
        if plan.num_engageable and self._measured:
            self._try_drafters(plan, lost, surprise, is_typical=num_tokens > 0)
        if is_trial:
            return  # Routers shall not take it for a change of what drafting is worth.
        if plan.num_engaged:
            lost += self._trial.tax
        gained = plan.gained - num_drawn * lost if plan.num_drafted_for else 0.0
        self._worth.observe(now, self._price(num_drawn), gained, plan.num_drafted_for)

    def _try_drafters(self, plan: _Plan, lost: float, surprise: float, *, is_typical: bool) -> None:
        step = TriedStep(
            1.0 + plan.tokens / plan.num_base,
            plan.length + lost,
            surprise,
            plan.num_engaged / plan.num_engageable,
            plan.num_base,
            plan.drafts_alone,
            is_typical and 2 * plan.num_engageable >= plan.num_base,
        )
        if self._trial.stepped(step):
            self.decisions[Decision.ENGAGED if self._trial.engages else Decision.RELEASED] += 1
            logger.info("%s", self._trial.reason)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Of one step."""

    num_base: int = 0
    """Sequences that draw a token."""
    num_drafted_for: int = 0
    tokens: float = 0.0
    """That its drafts are expected to bring."""
    length: float = 1.0
    """Of the step, over one without drafts."""
    num_engageable: int = 0
    """Sequences for which drafter replicas may draft."""
    num_engaged: int = 0
    """Sequences for which they do."""
    drafts_alone: bool = False
    """Drafters inside the verifier draft for some of these."""

    @property
    def gained(self) -> float:
        """Tokens, after what the rows of drafts cost."""
        return self.tokens - self.num_base * (self.length - 1.0)
