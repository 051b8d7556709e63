"""A simulated verifier: the steps of verifier_service's engine over a table of costs.

Its planner is the production one. The scheduler is a model of the production one that counts tokens
where that counts blocks: decoding sequences first, then drafts, then prompt chunks; when the cache
is full drafts yield first, then the newest sequence is preempted, to be computed again.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.draft_client import SimulatedDraftClient
from benchmarks.simulation.drafter import Answer, SimulatedDrafter
from benchmarks.simulation.drafting import SimulatedSpeculation
from benchmarks.simulation.outcome import RequestOutcome
from benchmarks.simulation.production import (
    DraftPlanner,
    Path,
    StepCost,
    StepProfile,
    VerifierLoad,
    verifier_load,
)
from benchmarks.simulation.scenario import Verifiers
from benchmarks.simulation.sequence import SimulatedSequence, Told
from benchmarks.simulation.traffic import Request

AVERAGING = 0.2
PLACE_AVERAGING = 0.05
"""Both as in verifier_service/engine.py."""

Report = Callable[["SimulatedVerifier"], None]


class SimulatedVerifier:
    """One verifier replica."""

    def __init__(
        self,
        number: int,
        config: Verifiers,
        clock: Clock,
        drafters: Mapping[int, SimulatedDrafter],
        report: Report,
        *,
        planner: str,
        rtt_s: Callable[[int], float],
        seed: str,
    ) -> None:
        """`report` is called after every step; `rtt_s` gives the way to a drafter and back."""
        self.number = number
        self.name = f"verifier-{number}"
        self.draining = False
        """Takes no new request."""
        self.is_gone = False
        self.num_tokens = 0
        """Drawn since the start."""
        self.num_steps = 0
        self.num_speculative_steps = 0
        """Steps that verified drafts."""
        self.num_drafted_parts = 0
        """Sequences that had drafts verified, counted in every step."""
        self.num_preemptions = 0
        self.num_late = 0
        """Drafts that were waited for in vain."""
        self.busy_s = 0.0
        self.waited_s = 0.0
        """For drafts."""
        self.in_flight: dict[int, int] = {}
        """Sequences by router."""
        self.running: list[SimulatedSequence] = []
        self.waiting: deque[SimulatedSequence] = deque()
        profile = StepProfile(config.table, prompt_share=config.prompt_share)
        self.planner = DraftPlanner(profile if planner == "goodput" else None)
        self.drafts = SimulatedDraftClient(number, clock, drafters, rtt_s, self.take_drafts)
        self._config = config
        self._clock = clock
        self._report = report
        self._rng = random.Random(seed)
        truth = StepCost(config.table)
        self._step_costs = [truth(n) for n in range(config.scheduler.max_step_tokens + 1)]
        self.sequences: dict[int, SimulatedSequence] = {}
        """All that run or wait, by index of their request."""
        self._decoding: list[SimulatedSequence] = []
        """Those that run and have read their prompt, between two steps."""
        self.kv_used = 0
        self._chances: dict[float, float] = {}
        self._num_followed = 0
        """Sequences that were drafted for at some time."""
        self._computing = False
        self._waiting_since_s = 0.0
        self._deadline_s = -1.0
        """Until when the next step waits for drafts; below 0 it does not wait."""
        self._place_s = 0.0
        """How long a sequence runs, of late."""
        self._step_ms = 0.0
        self._step_tokens = 0.0

    # --- for routers ---

    def submit(
        self, request: Request, router: int, path: Path, outcome: RequestOutcome, tell: Told
    ) -> bool:
        """Queue a request; False if the queue is full. What drafts do for it is counted in
        `outcome`."""
        if len(self.waiting) > self._config.scheduler.max_waiting_sequences:
            return False
        depth = self._config.num_speculative_tokens
        speculation = SimulatedSpeculation(depth, path, chances=self._chances)
        sequence = SimulatedSequence(request, router, outcome, tell, speculation)
        self.waiting.append(sequence)
        self.sequences[request.index] = sequence
        self.in_flight[router] = self.in_flight.get(router, 0) + 1
        self._start_drafting(sequence)
        self._go_on()
        return True

    def set_paths(self, changes: Sequence[tuple[int, Path]]) -> None:
        """Change the paths of requests, by index; without effect on those that have ended."""
        resumed = []
        for index, path in changes:
            sequence = self.sequences.get(index)
            if sequence is None or sequence.speculation.path is path:
                continue
            sequence.speculation.path = path
            if self._engage(sequence):
                resumed.append(sequence)
        self.drafts.tell(resumed)
        if self._deadline_s >= 0:
            self._go_on()

    def load(self) -> VerifierLoad:
        """As it reports it."""
        return verifier_load(
            self.planner,
            is_idle=not self.sequences,
            limits=self._config.scheduler,
            place_s=self._place_s,
            running=len(self.running),
            waiting=len(self.waiting),
            kv_tokens=(self.kv_used, self._config.kv_tokens),
            step_ms=self._step_ms,
            step_tokens=self._step_tokens,
            num_preemptions=self.num_preemptions,
            drafters=self.drafts.loads(),
        )

    @property
    def is_empty(self) -> bool:
        return not self.sequences

    def update_drafters(self) -> None:
        """Others came or are gone."""
        self.drafts.update_drafters()

    def leave_drafter(self, number: int) -> None:
        """Its sessions go elsewhere."""
        self.drafts.leave(number, [*self.running, *self.waiting])

    def keep_house(self) -> None:
        """Give sessions without a drafter another try. To be called now and then."""
        self.drafts.place_waiting()

    def _engage(self, sequence: SimulatedSequence) -> bool:
        """Begin, resume or pause what drafts for it; whether its session drafts."""
        self._start_drafting(sequence)
        if sequence.session is not None:
            sequence.session.paused = not sequence.speculation.engages
        return sequence.session is not None and not sequence.session.paused

    def _start_drafting(self, sequence: SimulatedSequence) -> None:
        sequence.speculation.rests = not self.planner.engages
        if (
            sequence.speculation.engages
            and sequence.max_draft_len > 0
            and not sequence.wants_session
        ):
            sequence.wants_session = True
            sequence.speculation.asked_at = self._clock.now
            self._num_followed += 1
            self.drafts.open(sequence)

    # --- the loop ---

    def _go_on(self) -> None:
        """Something came: begin a step, unless one runs or drafts are waited for."""
        if not self._computing and (self.running or self.waiting):
            if self._num_followed and self._waits():
                return
            self._step()

    def _waits(self) -> bool:
        """Whether to wait for the drafts that are due."""
        now = self._clock.now
        due: list[SimulatedSpeculation] = []
        others: list[SimulatedSpeculation] = []
        for sequence in self._decoding:
            speculation = sequence.speculation
            (due if speculation.is_due(sequence.max_draft_len) else others).append(speculation)
        if not due or not self.planner.waits(due, others):
            return False
        if self._deadline_s < 0:
            self._deadline_s = now + self._config.draft_deadline_ms / 1e3
            self._clock.at(self._deadline_s, self._go_on)
            self._waiting_since_s = now
            return True
        if now < self._deadline_s:
            return True
        for speculation in due:
            speculation.late = True
            self.num_late += 1
            self.planner.missed(self._config.draft_deadline_ms)
        return False

    def _step(self) -> None:
        drafting_s = 0.0
        if self._deadline_s >= 0:
            drafting_s = self._clock.now - self._waiting_since_s
            self.waited_s += drafting_s
            self._deadline_s = -1.0
        self._choose_drafts()
        parts, num_rows, num_read = self._fill()
        while not num_rows + num_read and len(self.running) > 1:
            # Only prompts run, and each waits for room that another holds.
            self._preempt_newest()
            parts, num_rows, num_read = self._fill()
        dear_tokens = num_rows + round(self._config.prompt_share * num_read)
        ms = self._step_costs[dear_tokens] + self._config.context_ms * self.kv_used / 1e3
        if self._num_followed:
            ms += self._config.drafting_ms
            drafting_s += self._config.drafting_ms / 1e3
        if self._config.jitter:
            ms *= self._rng.lognormvariate(0.0, self._config.jitter)
        self._computing = True
        tokens = num_rows, num_read
        self._clock.after(ms / 1e3, lambda: self._finish(parts, tokens, ms, 1e3 * drafting_s))

    def _choose_drafts(self) -> None:
        if not self._num_followed and self.planner.engages:
            return
        decoding = self._decoding
        self.planner.choose(
            [(s.speculation, s.max_draft_len) for s in decoding],
            len(decoding),
            self._num_prompt_tokens(),
        )

    def _num_prompt_tokens(self) -> int:
        """That the next step reads, as far as there are places for those who wait."""
        limits = self._config.scheduler
        places = max(0, limits.max_running_sequences - len(self.running))
        num_tokens = sum([s.uncomputed for s in (*self.running, *islice(self.waiting, places))])
        return min(num_tokens, limits.max_prefill_chunk_tokens)

    def _fill(self) -> tuple[list[tuple[SimulatedSequence, int]], int, int]:
        """What a step holds: each sequence that draws tokens with the number of its drafts, the
        tokens of those that decode with their drafts, and the tokens that are read. KV of all of
        them is reserved; what is refused is given back later."""
        limits = self._config.scheduler
        parts: list[tuple[SimulatedSequence, int]] = []
        is_short = self._reserve_decodes()
        decoding = self._decoding[: limits.max_step_tokens]
        budget = limits.max_step_tokens - len(decoding)
        free = self._config.kv_tokens - self.kv_used - len(decoding)
        for sequence in decoding:
            num_drafts = 0
            if chosen := sequence.speculation.chosen:
                num_drafts = min(len(chosen), sequence.max_draft_len, budget, free)
                budget -= num_drafts
                free -= num_drafts
            parts.append((sequence, num_drafts))
        num_rows = limits.max_step_tokens - budget
        num_read = self._reserve_prompts(budget, free, parts, may_admit=not is_short)
        return parts, num_rows, num_read

    def _reserve_decodes(self) -> bool:
        """Preempt until every decoding sequence has room for a token; whether that was needed."""
        is_short = False
        while True:
            if self.kv_used + len(self._decoding) <= self._config.kv_tokens:
                return is_short
            is_short = True
            self._preempt_newest()

    def _preempt_newest(self) -> None:
        victim = self.running.pop()
        self.kv_used -= victim.kv_tokens
        victim.kv_tokens = 0
        victim.uncomputed = victim.request.prompt_tokens + victim.speculation.tip
        victim.speculation.chosen = ()
        self.waiting.appendleft(victim)
        self._decoding = [s for s in self.running if not s.uncomputed]
        self.num_preemptions += 1

    def _reserve_prompts(
        self,
        budget: int,
        free: int,
        parts: list[tuple[SimulatedSequence, int]],
        *,
        may_admit: bool,
    ) -> int:
        """Read prompts; those that are read to their end draw a token. Returns the tokens."""
        limits = self._config.scheduler
        room = all_room = max(0, min(budget, limits.max_prefill_chunk_tokens, free))
        for sequence in self.running:
            if sequence.uncomputed and room:
                room -= self._read(sequence, room, parts)
        while (
            may_admit
            and room
            and self.waiting
            and len(self.running) < limits.max_running_sequences
            and self._has_room(self.waiting[0])
        ):
            sequence = self.waiting.popleft()
            self.running.append(sequence)
            if sequence.placed_at_s is None:
                sequence.placed_at_s = self._clock.now
            room -= self._read(sequence, room, parts)
        return all_room - room

    def _read(
        self, sequence: SimulatedSequence, room: int, parts: list[tuple[SimulatedSequence, int]]
    ) -> int:
        num_tokens = min(room, sequence.uncomputed)
        sequence.uncomputed -= num_tokens
        sequence.kv_tokens += num_tokens
        self.kv_used += num_tokens
        if not sequence.uncomputed:
            parts.append((sequence, -1))
        return num_tokens

    def _has_room(self, sequence: SimulatedSequence) -> bool:
        """For all its tokens and one more, besides what running ones still need for theirs."""
        needed = sequence.uncomputed + 1 + sum(s.uncomputed + 1 for s in self.running)
        return self.kv_used + needed <= self._config.kv_tokens or not self.running

    def _finish(
        self,
        parts: Sequence[tuple[SimulatedSequence, int]],
        tokens: tuple[int, int],
        ms: float,
        drafting_ms: float,
    ) -> None:
        self._computing = False
        self.busy_s += ms / 1e3
        self.num_steps += 1
        told: list[SimulatedSequence] = []
        is_speculative = False
        for sequence, num_drafts in parts:
            speculation = sequence.speculation
            num_accepted = 0
            if num_drafts > 0:
                is_speculative = True
                num_accepted = min(num_drafts, speculation.num_right)
                self.num_drafted_parts += 1
                self.planner.verified(speculation, num_drafts, num_accepted)
                sequence.outcome.num_draft_tokens += num_drafts
                sequence.outcome.num_accepted_tokens += num_accepted
            num_new = num_accepted + 1
            if num_drafts >= 0:  # Else the prompt was read: its last token is in the cache already.
                sequence.kv_tokens += num_new
                self.kv_used += num_new
            self.num_tokens += num_new
            speculation.commit(num_new)
            if sequence.num_left:
                if sequence.outcome.first_token_s is None:
                    sequence.tell(speculation.tip, False)
                if sequence.wants_session:
                    self._foresee(sequence)
                    if speculation.engages:
                        speculation.asked_at = self._clock.now
                        told.append(sequence)
            else:
                self._end(sequence)
        self._decoding = [s for s in self.running if not s.uncomputed]
        self._chances.clear()
        self.num_speculative_steps += is_speculative
        self._step_ms += AVERAGING * (ms - self._step_ms)
        self._step_tokens += AVERAGING * (sum(tokens) - self._step_tokens)
        engaged = self.planner.engages
        self.planner.stepped(
            *tokens, ms, num_drawn=len(parts), drafting_ms=drafting_ms, now=self._clock.now
        )
        if self.planner.engages is not engaged:
            told = [sequence for sequence in self.sequences.values() if self._engage(sequence)]
        self.drafts.tell(told)
        self._report(self)
        self._go_on()

    def _foresee(self, sequence: SimulatedSequence) -> None:
        """Where the answer is still on the drafter's chain, take what it drafted ahead."""
        session, speculation = sequence.session, sequence.speculation
        if session is not None and speculation.known_len:
            length = self.drafts.lead(sequence)
            speculation.insert(session.anchor, session.pattern, length)

    def _end(self, sequence: SimulatedSequence) -> None:
        assert sequence.placed_at_s is not None
        held_s = self._clock.now - sequence.placed_at_s
        before_s = self._place_s or held_s
        self._place_s = before_s + PLACE_AVERAGING * (held_s - before_s)
        self.running.remove(sequence)
        del self.sequences[sequence.request.index]
        self.kv_used -= sequence.kv_tokens
        self.in_flight[sequence.router] -= 1
        if sequence.wants_session:
            self._num_followed -= 1
            self.drafts.close(sequence)
        sequence.tell(sequence.speculation.tip, True)

    # --- drafts ---

    def take_drafts(self, answers: Sequence[Answer]) -> None:
        """A drafter's message."""
        now = self._clock.now
        for answer in answers:
            if answer.session.closed:
                continue
            speculation: SimulatedSpeculation = answer.session.speculation
            speculation.live = True
            was_settled = speculation.settled
            speculation.insert(answer.anchor, answer.pattern, answer.length)
            if answer.answers == speculation.tip:
                speculation.is_answered = True
            if speculation.settled and not was_settled:
                speculation.late = False
                wait_ms = 1e3 * max(0.0, now - speculation.asked_at)
                self.planner.answered(speculation, wait_ms, empty=not speculation.num_at_hand)
        if self._deadline_s >= 0:
            self._go_on()
