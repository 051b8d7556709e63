"""What the next forward holds. Decides and returns a value; runs no model and sends nothing.

Each step is filled in this order: one token of every decoding sequence, then drafts, then prompt
chunks. KV follows the same order, so drafts can never push out a sequence: when blocks run out,
those that no sequence holds are evicted, then drafts yield, and only then is the newest sequence
preempted, to be recomputed later. A sequence begins after the longest prefix of it that the pool
still holds; so does a preempted one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cluster.config import SchedulerConfig
from engine.kv_cache import CachedPrefix, KVCacheManager
from engine.sequence import Sequence, SequenceState
from verifier_service.waiting_queue import WaitingQueue

MAX_SCORED_TOKENS = 256
"""Most prompt tokens in a step whose logits are all wanted; of a vocabulary of 150,000 so many rows
take 150 MB."""

ProposeDrafts = Callable[[Sequence, int], tuple[int, ...]]
"""(sequence, most drafts) -> the drafts to verify, empty if there are none."""


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """One sequence's part of a step."""

    sequence: Sequence
    num_tokens: int
    """Committed tokens to feed, from the first uncomputed one."""
    draft_ids: tuple[int, ...] = ()
    """Fed after them; only where `num_tokens` reaches the last committed token."""

    @property
    def draws(self) -> bool:
        """Whether this step reaches the sequence's end, so that tokens are drawn."""
        reaches_end = self.num_tokens == self.sequence.num_uncomputed_tokens
        return reaches_end and not self.sequence.is_full

    @property
    def num_drawn_rows(self) -> int:
        """Rows of logits that tokens are drawn from, the last ones of its part."""
        return len(self.draft_ids) + 1 if self.draws else 0

    @property
    def fed_ids(self) -> list[int]:
        start = self.sequence.num_computed_tokens
        return [*self.sequence.token_ids[start : start + self.num_tokens], *self.draft_ids]


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """What one forward holds. The slots of all its tokens are reserved."""

    scheduled: tuple[ScheduledSequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    """Sequences that lost their KV to make room in this step."""

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens + len(s.draft_ids) for s in self.scheduled)


@dataclass(slots=True)
class _PromptRoom:
    """Prompt tokens that still fit into a step."""

    num_tokens: int
    num_scored_tokens: int
    """Of those, whose logits are wanted."""

    def of(self, sequence: Sequence) -> int:
        """For this sequence."""
        scored = self.num_scored_tokens
        return min(self.num_tokens, scored) if sequence.scores else self.num_tokens

    def take(self, sequence: Sequence, num_tokens: int) -> None:
        self.num_tokens -= num_tokens
        if sequence.scores:
            self.num_scored_tokens -= num_tokens


class Scheduler:
    """Owns the order of sequences and their KV. `running` is in order of admission."""

    def __init__(self, config: SchedulerConfig, kv: KVCacheManager) -> None:
        self.config = config
        """May be replaced between two steps."""
        self._kv = kv
        self.waiting = WaitingQueue()
        self.running: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Free all that the sequence holds; it is finished."""
        if sequence.state is SequenceState.RUNNING:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._release(sequence)
        sequence.move_to(SequenceState.FINISHED)

    def schedule(self, propose: ProposeDrafts) -> SchedulerOutput:
        """Fill one step and reserve the slots of its tokens."""
        preempted: list[Sequence] = []
        while not (output := self._fill(propose, preempted)).scheduled and len(self.running) > 1:
            # Only prompts run, and each waits for blocks that another holds.
            preempted.append(self._preempt_newest())
        return output

    def _fill(self, propose: ProposeDrafts, preempted: list[Sequence]) -> SchedulerOutput:
        decoding = self._reserve_decodes(preempted)
        budget = self.config.max_step_tokens - len(decoding)
        scheduled = []
        for sequence in decoding:
            draft_ids = self._reserve_drafts(sequence, propose, budget)
            budget -= len(draft_ids)
            scheduled.append(ScheduledSequence(sequence, 1, draft_ids))
        scheduled += self._reserve_prefills(budget, may_admit=not preempted)
        return SchedulerOutput(tuple(scheduled), tuple(preempted))

    def commit(self, scheduled: ScheduledSequence, num_accepted: int) -> None:
        """Keep the KV of a sequence's part of a step, but of its drafts only the first
        `num_accepted`. To be called before the sequence takes its new tokens."""
        cache = scheduled.sequence.cache
        assert cache is not None
        num_refused = len(scheduled.draft_ids) - num_accepted
        fed_ids = scheduled.fed_ids
        self._kv.rollback(cache, num_refused)
        self._kv.commit(cache, fed_ids[: len(fed_ids) - num_refused])

    def _reserve_decodes(self, preempted: list[Sequence]) -> list[Sequence]:
        decoding = [s for s in self.running if s.num_uncomputed_tokens == 1]
        decoding = decoding[: self.config.max_step_tokens]
        reserved = []
        for sequence in decoding:
            while sequence.state is SequenceState.RUNNING and not self._reserve(sequence, 1):
                # A victim is never older than `sequence`, so none that is reserved is lost.
                preempted.append(self._preempt_newest())
            if sequence.state is SequenceState.RUNNING:
                reserved.append(sequence)
        return reserved

    def _reserve_drafts(
        self, sequence: Sequence, propose: ProposeDrafts, budget: int
    ) -> tuple[int, ...]:
        draft_ids = propose(sequence, min(budget, sequence.max_draft_len))
        while draft_ids and not self._reserve(sequence, len(draft_ids)):
            draft_ids = draft_ids[:-1]
        return draft_ids

    def _reserve_prefills(self, budget: int, *, may_admit: bool) -> list[ScheduledSequence]:
        room = _PromptRoom(min(budget, self.config.max_prefill_chunk_tokens), MAX_SCORED_TOKENS)
        scheduled = []
        for sequence in [s for s in self.running if s.num_uncomputed_tokens > 1]:
            num_tokens = self._reserve_chunk(sequence, room.of(sequence))
            if num_tokens:
                room.take(sequence, num_tokens)
                scheduled.append(ScheduledSequence(sequence, num_tokens))
        while may_admit and (admitted := self._admit(room)):
            num_tokens = self._reserve_chunk(admitted, room.of(admitted))
            assert num_tokens, "admitted without room"
            room.take(admitted, num_tokens)
            scheduled.append(ScheduledSequence(admitted, num_tokens))
        return scheduled

    def _admit(self, room: _PromptRoom) -> Sequence | None:
        """The next waiting sequence, now running, if there is room for it."""
        if not self.waiting or len(self.running) >= self.config.max_running_sequences:
            return None
        sequence = self.waiting.next()
        if room.of(sequence) <= 0:
            return None
        prefix = self._kv.find(sequence.findable_ids, sequence.request.cache_salt)
        if not self._has_room(sequence, prefix):
            return None
        self.waiting.take(sequence)
        sequence.begin(self._kv.open(prefix))
        self.running.append(sequence)
        return sequence

    def _has_room(self, sequence: Sequence, prefix: CachedPrefix) -> bool:
        """For all its tokens and one more, besides what the running ones still need for theirs:
        admitting a sequence only to preempt it would be work for nothing."""
        needed = self._num_missing_blocks(sequence, len(prefix.blocks)) + prefix.num_idle_blocks
        for running in self.running:
            assert running.cache is not None
            needed += self._num_missing_blocks(running, len(running.cache.block_table))
        return self._kv.num_free_blocks >= needed or not self.running

    def _num_missing_blocks(self, sequence: Sequence, num_held: int) -> int:
        return max(0, len(sequence.token_ids) // self._kv.block_size + 1 - num_held)

    def _reserve_chunk(self, sequence: Sequence, budget: int) -> int:
        num_tokens = min(budget, sequence.num_uncomputed_tokens)
        return num_tokens if num_tokens > 0 and self._reserve(sequence, num_tokens) else 0

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        assert sequence.cache is not None
        return self._kv.reserve(sequence.cache, num_tokens)

    def _preempt_newest(self) -> Sequence:
        victim = self.running.pop()
        self._release(victim)
        victim.move_to(SequenceState.WAITING)
        self.waiting.give_back(victim)
        return victim

    def _release(self, sequence: Sequence) -> None:
        if sequence.cache is not None:
            self._kv.close(sequence.cache)
            sequence.cache = None
