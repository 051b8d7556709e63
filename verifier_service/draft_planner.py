"""The planner with what it learns: what a step costs, what drafts are worth, how long they take.

The arithmetic is in planner.py. One of these belongs to one engine and is used by its thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from verifier_service.planner import Acceptance, StepCost, WaitPolicy, plan_depths
from verifier_service.speculation import Speculation


class DraftPlanner:
    """Chooses the drafts of each step. Without a profile of the device's steps every draft at hand
    is chosen and every draft that is due is waited for."""

    def __init__(self, profile: Mapping[int, float] | None) -> None:
        self._cost = StepCost(profile or {1: 1.0})
        self._measured = profile is not None
        self._acceptance = Acceptance()
        self._waiting = WaitPolicy()
        self._step = 0

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
        chains = [speculation.chain(max_len) for speculation, max_len in speculations]
        survivals = [
            self._acceptance.survivals(
                speculation.drafter, [n.confidence for n in chain], self._step
            )
            for (speculation, _), chain in zip(speculations, chains, strict=True)
        ]
        depths = plan_depths(self._cost, num_base + num_prefill, num_base, survivals)
        for (speculation, _), chain, depth in zip(speculations, chains, depths, strict=True):
            speculation.chosen = chain[:depth]

    def waits(self, due: Sequence[Speculation], num_decoding: int, step_ms: float) -> bool:
        """Whether the step shall wait for these drafts; ask again when some have come."""
        if not self._measured:
            return bool(due)
        values = [speculation.value.expected for speculation in due]
        return self._waiting.waits(self._step, step_ms, num_decoding, values)

    def answered(self, speculation: Speculation, wait_ms: float, *, empty: bool) -> None:
        """A draft that was due came after so long."""
        self._waiting.observe_wait(wait_ms)
        if empty:
            speculation.value.observe(0)

    def missed(self, deadline_ms: float) -> None:
        """The deadline passed before a draft that was due."""
        self._waiting.observe_wait(deadline_ms)

    def verified(self, speculation: Speculation, num_drafted: int, num_accepted: int) -> None:
        """The first `num_drafted` of a sequence's chosen drafts were verified."""
        speculation.value.observe(num_accepted)
        confidences = [node.confidence for node in speculation.chosen[:num_drafted]]
        self._acceptance.record(speculation.drafter, confidences, num_accepted, self._step)

    def stepped(self, num_tokens: int, step_ms: float) -> None:
        """A step was run."""
        self._step += 1
        if self._measured and num_tokens:
            self._cost.observe(num_tokens, step_ms)
