"""The engine loop: receive, plan, run, verify, commit.

One thread runs it. Values go in through the inbox and out through `post`; nothing else is shared.
The engine is the only source of truth for committed tokens.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby, islice

import torch

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
)
from cluster.load import LocalDrafterLoad, VerifierLoad
from cluster.types import (
    DraftRun,
    ErrorEvent,
    FinishEvent,
    FinishReason,
    GenerationEvent,
    Path,
    PromptLogprobsEvent,
    TokenLogprobs,
    TokensEvent,
)
from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner
from engine.sequence import Emission, Sequence
from engine.target import Drawn, draw
from verifier_service.acceptance import Verification
from verifier_service.draft_planner import Decision, DraftPlanner
from verifier_service.draft_trie import DraftOutcome, DraftTrie
from verifier_service.events import (
    Cancelled,
    DraftArrived,
    DraftCommit,
    DraftOpen,
    DraftSessionLive,
    DraftSessionLost,
    DraftVerdict,
    EngineInput,
    EngineOutput,
    Foresight,
    PathChanged,
    Reconfigured,
    SequenceEvent,
    Stopped,
    Submitted,
)
from verifier_service.generation import Generation
from verifier_service.local_drafting import PREDICTION, LocalDrafting, LocalRequest
from verifier_service.outbox import Outbox
from verifier_service.planner import StepProfile
from verifier_service.prompt_scores import num_logits, sort_rows
from verifier_service.recorders import EngineRecorder
from verifier_service.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
from verifier_service.speculation import Speculation

logger = logging.getLogger(__name__)

_AVERAGING = 0.2
"""Weight of the newest step in the moving averages."""
_PLACE_AVERAGING = 0.05
"""Weight of the newest generation in that of the time it held its place."""


@dataclass(frozen=True, slots=True)
class _StepResults:
    drawn: dict[int, Drawn]
    """The target's own draws, by seq, of every sequence that reached its end."""
    verifications: dict[int, Verification]
    """What is final of their drafts."""
    scores: dict[int, tuple[TokenLogprobs, ...]]
    """By seq, of prompt tokens that the step computed."""


class Engine:
    """Decodes all sequences of one verifier. `post` is called from the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: SchedulerConfig,
        speculation: SpeculationConfig,
        post: Callable[[EngineOutput], None],
        profile: StepProfile | None = None,
    ) -> None:
        """`profile`: as profile_steps measures it; without one every draft at hand is verified."""
        # Not a SimpleQueue: CPython's waits for ever if the timeout passes as its get begins.
        self.inbox: queue.Queue[EngineInput] = queue.Queue()
        self.draft_outcomes = dict.fromkeys(DraftOutcome, 0)
        self.num_preemptions = 0
        self.recorder = EngineRecorder()
        self._runner = runner
        self._config = scheduler
        self._speculation = speculation
        self._post = post
        self._scheduler = Scheduler(scheduler, runner.kv)
        self._planner = DraftPlanner(profile)
        self._local = LocalDrafting(speculation)
        self._generations: dict[int, Generation] = {}
        self._outbox = Outbox()
        self._verdicts: list[tuple[Generation, list[str], int]] = []
        """Of the last step: drafters of the verified drafts, and how many were accepted."""
        self._step_ms = 0.0
        self._step_tokens = 0.0
        self._place_s = 0.0
        self._drafting_s = 0.0
        """Spent on drafts since the last step."""
        self._last_progress = time.monotonic()
        self._stopped = False
        self._thread = threading.Thread(target=self.run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """Finish the running step and end the thread."""
        self.inbox.put(Stopped())
        self._thread.join(timeout_s)

    @property
    def alive(self) -> bool:
        """Whether the loop runs."""
        return self._thread.is_alive()

    def stalled_for_s(self) -> float:
        """How long work has waited without a step; 0 while idle. May be called from any thread."""
        return time.monotonic() - self._last_progress if self._generations else 0.0

    @property
    def decisions(self) -> Counter[Decision]:
        """What the planner decided since the start."""
        return self._planner.decisions

    @property
    def trial_reason(self) -> str:
        """Why drafter replicas draft, or rest."""
        return self._planner.trial_reason

    @property
    def draft_wait_ms(self) -> float:
        """How long a draft that is due takes to come, of late."""
        return self._planner.wait_ms

    def load(self) -> VerifierLoad:
        """May be called from any thread; the numbers are then of slightly different moments."""
        kv = self._runner.kv
        return VerifierLoad(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            kv_blocks_used=kv.num_used_blocks,
            kv_blocks_total=kv.num_blocks,
            step_ms=self._step_ms,
            step_tokens=self._step_tokens,
            knee_tokens=self._planner.knee_tokens,
            prefix_cache_hit_tokens=kv.num_hit_tokens,
            prefix_cache_query_tokens=kv.num_queried_tokens,
            num_preemptions=self.num_preemptions,
            max_running=self._config.max_running_sequences,
            max_waiting=self._config.max_waiting_sequences,
            place_s=self._place_s,
            draft_gain=self._planner.gain,
            draft_price=self._planner.price(idle=not self._generations),
            draft_tax=self._planner.tax,
            drafters_rest=not self._planner.drafters_pay,
            local_drafters=self._local_loads(),
        )

    def _local_loads(self) -> tuple[LocalDrafterLoad, ...]:
        totals = self.recorder.speculation.totals()
        return tuple(
            LocalDrafterLoad(
                kind, totals.draft_tokens.get(kind, 0), totals.accepted_tokens.get(kind, 0)
            )
            for kind in self._local.kinds
        )

    # --- the loop ----------------------------------------------------------------------------

    def run(self) -> None:
        while not self._stopped:
            self._receive(block=not self._generations)
            self._flush()
            if self._generations and not self._stopped:
                self._wait_for_drafts()
                self.step()
                self._flush()

    def step(self) -> None:
        """Plan, run, verify, commit."""
        started = time.monotonic()
        self._expire(started)
        self._choose_drafts()
        plan = self._scheduler.schedule(self._propose)
        if lengths := [len(scheduled.sequence.token_ids) for scheduled in plan.scheduled]:
            self._planner.set_context(sum(lengths) / len(lengths))
        self.num_preemptions += len(plan.preempted)
        num_drawn = sum(scheduled.draws for scheduled in plan.scheduled)
        num_rows = sum(map(num_logits, plan.scheduled))
        self._note_places(plan, started)
        tells_scores = any(scheduled.sequence.scores for scheduled in plan.scheduled)
        try:
            results = self._run(plan)
        except Exception as error:
            logger.exception("a step failed; its sequences end, the engine goes on")
            for scheduled in plan.scheduled:
                self._fail(scheduled.sequence.seq, InternalError(f"the forward failed: {error}"))
            return
        for scheduled in plan.scheduled:
            seq = scheduled.sequence.seq
            if self._tell_scores(scheduled.sequence, results.scores.get(seq, ())):
                self._commit(scheduled, results.drawn.get(seq), results.verifications.get(seq))
        num_read = plan.num_tokens - num_rows
        self._measure(started, num_rows, num_read, num_drawn, is_typical=not tells_scores)

    def _note_places(self, plan: SchedulerOutput, now: float) -> None:
        for scheduled in plan.scheduled:
            generation = self._generations[scheduled.sequence.seq]
            if generation.placed_at is None:
                generation.placed_at = now

    def _run(self, plan: SchedulerOutput) -> _StepResults:
        if not plan.scheduled:
            return _StepResults({}, {}, {})
        logits = self._runner.forward([_slice(scheduled) for scheduled in plan.scheduled])
        rows = sort_rows(logits, plan.scheduled)
        generations = [self._generations[s.sequence.seq] for s in plan.scheduled if s.draws]
        drafts = [scheduled.draft_ids for scheduled in plan.scheduled if scheduled.draws]
        blocks = [g.block(draft_ids) for g, draft_ids in zip(generations, drafts, strict=True)]
        draws = draw(rows.drawn_from, blocks)
        parts = torch.split(rows.drawn_from, [block.num_rows for block in blocks])
        verified = map(Generation.verify, generations, blocks, parts, draws)
        seqs = [generation.sequence.seq for generation in generations]
        return _StepResults(
            dict(zip(seqs, draws, strict=True)), dict(zip(seqs, verified, strict=True)), rows.scores
        )

    def _tell_scores(self, sequence: Sequence, scores: tuple[TokenLogprobs, ...]) -> bool:
        """Deliver log probabilities of the prompt. False if they are no numbers, which ends it."""
        if any(math.isnan(one.logprob) for one in scores):
            self._fail(sequence.seq, self._generations[sequence.seq].failure())
            return False
        if scores:
            first = sequence.num_scored_tokens
            sequence.num_scored_tokens += len(scores)
            self._say(sequence, PromptLogprobsEvent(sequence.request.request_id, first, scores))
        return True

    def _commit(
        self,
        scheduled: ScheduledSequence,
        drawn: Drawn | None,
        verification: Verification | None,
    ) -> None:
        """Make final what the target drew; a prompt chunk that draws nothing only gains KV."""
        sequence, draft_ids = scheduled.sequence, scheduled.draft_ids
        if drawn is None or verification is None:
            self._scheduler.commit(scheduled, 0)
            if sequence.is_full and not sequence.scores:
                self._finish(sequence, FinishReason.LENGTH)
            return
        draft_ids = draft_ids[: len(drawn.token_ids) - 1]
        num_accepted = verification.num_accepted_tokens
        if verification.next_token_id is None:
            self._fail(sequence.seq, self._generations[sequence.seq].failure())
            return
        self._scheduler.commit(scheduled, num_accepted)
        new_ids = (*draft_ids[:num_accepted], verification.next_token_id)
        self._emit(sequence, draft_ids, new_ids, drawn.logits)

    def _emit(
        self,
        sequence: Sequence,
        draft_ids: tuple[int, ...],
        new_ids: tuple[int, ...],
        logits: torch.Tensor | None,
    ) -> None:
        """Deliver accepted drafts and the token after them. `logits` are the model's own, where
        they were asked for."""
        generation = self._generations[sequence.seq]
        speculation = generation.speculation
        start = len(sequence.token_ids)
        num_accepted = len(new_ids) - 1
        first = start == sequence.num_prompt_tokens
        num_cached = sequence.num_cached_prompt_tokens if first else None
        if draft_ids:
            self._planner.verified(speculation, len(draft_ids), num_accepted)
        refused_ids = draft_ids[num_accepted:]
        emission = sequence.emit(new_ids)
        if not generation.commit(emission.token_ids):
            self._fail(sequence.seq, generation.failure())
            return
        num_accepted = min(num_accepted, len(emission.token_ids))
        drafters = [node.drafter for node in speculation.chosen[: len(draft_ids)]]
        speculation.record(drafters, num_accepted)
        if draft_ids:
            self.recorder.speculation.record(drafters, num_accepted)
        foreseen = self._local.committed(sequence.seq, emission.token_ids)
        self._say(
            sequence,
            TokensEvent(
                sequence.request.request_id,
                start - sequence.num_prompt_tokens,
                emission.token_ids,
                tuple(i < num_accepted for i in range(len(emission.token_ids))),
                len(draft_ids),
                refused_ids,
                num_cached or 0,
                generation.logprobs(emission.token_ids, logits),
                _runs(drafters),
                foreseen.predicted,
                foreseen.num_resyncs,
            ),
        )
        self._follow(generation, start, emission)
        if sequence.seq not in self._generations:
            self._judge_replica(speculation, drafters, num_accepted, None)
        elif drafters:
            self._verdicts.append((generation, drafters, num_accepted))

    def _judge_replicas(self) -> None:
        """Tell how the drafts of drafter replicas fared in the last step, and what of the next ones
        was there already: all that came while it ran is in the tries by now."""
        for generation, drafters, num_accepted in self._verdicts:
            trie = generation.speculation.trie
            assert trie is not None
            is_ready = trie.has_next(generation.speculation.drafter)
            foresight = Foresight(num_accepted < len(drafters), is_ready)
            self._judge_replica(generation.speculation, drafters, num_accepted, foresight)
        self._verdicts.clear()

    def _judge_replica(
        self,
        speculation: Speculation,
        drafters: list[str],
        num_accepted: int,
        foresight: Foresight | None,
    ) -> None:
        if num_drafted := drafters.count(speculation.drafter):
            accepted = drafters[:num_accepted].count(speculation.drafter)
            verdict = DraftVerdict(speculation.incarnation, num_drafted, accepted, foresight)
            self._outbox.verdicts.append(verdict)

    def _follow(self, generation: Generation, start: int, emission: Emission) -> None:
        """End the generation, or ask for drafts behind its new tokens."""
        sequence, speculation = generation.sequence, generation.speculation
        if emission.finish_reason is not None:
            self._finish(sequence, emission.finish_reason)
        elif speculation.trie is not None:
            speculation.trie.commit(emission.token_ids)
            if speculation.ordered:
                speculation.asked_at = time.monotonic()
                self._outbox.commits.append(DraftCommit(sequence.seq, start, emission.token_ids))

    # --- inbox -------------------------------------------------------------------------------

    def _receive(self, *, block: bool) -> None:
        """Take all that is in the inbox; wait for the first of it if there is nothing to do."""
        if block:
            self._judge_replicas()
            self._flush()
            self._handle(self.inbox.get())
            self._last_progress = time.monotonic()
        while not self.inbox.empty():
            self._handle(self.inbox.get())
        self._judge_replicas()

    def _wait_for_drafts(self) -> None:
        """Wait for drafts that are due as long as it pays, and all together no longer than the
        deadline. Those of our own are there before that."""
        if not self._drafts_for_any():
            return
        began = time.monotonic()
        self._draft_locally()
        deadline_ms = self._speculation.draft_deadline_ms
        started = time.monotonic()
        deadline = started + deadline_ms / 1e3
        waited = False
        while True:
            due: list[Speculation] = []
            others: list[Speculation] = []
            for generation in self._generations.values():
                if generation.is_decoding:
                    (due if generation.is_due else others).append(generation.speculation)
            if not self._planner.waits(due, others):
                break
            waited = True
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                for speculation in due:
                    speculation.late = True
                    self.recorder.num_late += 1
                    self._planner.missed(deadline_ms)
                break
            try:
                self._handle(self.inbox.get(timeout=remaining_s))
                self._receive(block=False)
            except queue.Empty:
                continue
        ended = time.monotonic()
        self._drafting_s += ended - began
        if waited:
            self.recorder.draft_wait_seconds.observe(ended - started)

    def _handle(self, message: EngineInput) -> None:
        match message:
            case Submitted():
                self._submit(message)
            case Cancelled(seq):
                if seq in self._generations:
                    self._remove(seq)
            case PathChanged(seq, path):
                if seq in self._generations:
                    self._change_path(seq, path)
            case DraftArrived():
                self._take_draft(message)
            case DraftSessionLive(seq, drafter, incarnation, tells_laws):
                if generation := self._generations.get(seq):
                    speculation = generation.speculation
                    speculation.drafter = _replica_name(drafter, speculation)
                    speculation.incarnation = incarnation
                    speculation.live, speculation.late = True, False
                    self._use_laws(generation, tells_laws)
            case DraftSessionLost(seq):
                if generation := self._generations.get(seq):
                    generation.speculation.live = False
                    self._use_laws(generation, tells_laws=False)
            case Reconfigured(scheduler, speculation):
                self._config = self._scheduler.config = scheduler
                self._speculation = speculation
            case Stopped():
                self._stopped = True

    def _submit(self, message: Submitted) -> None:
        generation = Generation.of(message, self._runner.card, self._speculation, self._local.kinds)
        sequence = generation.sequence
        self._generations[message.seq] = generation
        self._scheduler.add(sequence)
        if error := self._refusal(sequence):
            self._fail(message.seq, error)
        elif sequence.is_full and not sequence.scores:
            self._finish(sequence, FinishReason.LENGTH)
        else:
            self._start_drafting(generation)

    def _refusal(self, sequence: Sequence) -> PacelineError | None:
        generates = sequence.request.max_tokens > 0
        if len(sequence.token_ids) > sequence.max_len or (sequence.is_full and generates):
            return InvalidRequestError(
                f"the prompt has {len(sequence.token_ids)} tokens and leaves no room within "
                f"{sequence.max_len}; shorten it or raise max_tokens",
                param="prompt_ids",
            )
        if sequence.max_len > self._runner.kv.num_slots:
            return InvalidRequestError(
                f"prompt and max_tokens need {sequence.max_len} tokens of KV cache and the pool "
                f"holds {self._runner.kv.num_slots}; lower max_tokens",
                param="max_tokens",
            )
        if len(self._scheduler.waiting) > self._config.max_waiting_sequences:
            return OverloadedError("the verifier's queue is full", retry_after_s=1.0)
        return None

    def _start_drafting(self, generation: Generation) -> None:
        """Make ready for the drafts that are wanted on the present path; what is ready stays."""
        sequence, speculation = generation.sequence, generation.speculation
        speculation.rests = not self._planner.engages
        if not generation.wants_drafts:
            return
        if speculation.trie is None:
            speculation.trie = DraftTrie(sequence.token_ids, self._runner.vocab_size)
            self._local.begin(sequence, predicts=PREDICTION in speculation.local_kinds)
        if speculation.engages and not speculation.ordered:
            self._order_session(sequence, speculation)

    def _order_session(self, sequence: Sequence, speculation: Speculation) -> None:
        speculation.ordered = True
        speculation.asked_at = time.monotonic()
        request = sequence.request
        self._outbox.opens.append(
            DraftOpen(
                sequence.seq,
                tuple(sequence.token_ids),
                sequence.num_prompt_tokens,
                request.request_key,
                request.sampling,
                speculation.depth,
                request.drafter,
                request.cache_salt,
                speculation.wants_laws,
            )
        )

    def _change_path(self, seq: int, path: Path) -> None:
        """Going plain pauses the session, which stays warm; coming back resumes it."""
        generation = self._generations[seq]
        speculation = generation.speculation
        if speculation.path is path:
            return
        speculation.path = path
        self._engage(generation)

    def _engage(self, generation: Generation) -> None:
        """Begin, resume or pause what drafts for it, as is wanted now."""
        speculation, seq = generation.speculation, generation.sequence.seq
        had_session = speculation.ordered
        self._start_drafting(generation)
        if had_session:
            speculation.asked_at = time.monotonic()
            self._outbox.paused[seq] = not speculation.engages

    def _use_laws(self, generation: Generation, tells_laws: bool) -> None:
        token_ids = generation.sequence.token_ids
        generation.speculation.use_laws(tells_laws, token_ids, self._runner.vocab_size)

    def _take_draft(self, message: DraftArrived) -> None:
        generation = self._generations.get(message.seq)
        if generation is None or generation.speculation.trie is None:
            return  # It finished while the draft was on its way.
        speculation = generation.speculation
        was_settled = speculation.settled
        outcome = speculation.take(message.draft, self._runner.vocab_size)
        self.draft_outcomes[outcome] += 1
        if outcome in (DraftOutcome.USED, DraftOutcome.LAWLESS):
            speculation.resynced = False
        if speculation.settled and not was_settled:
            speculation.late = False
            wait_ms = 1e3 * max(0.0, message.arrived_at - speculation.asked_at)
            self._planner.answered(speculation, wait_ms, empty=not speculation.holds_chain(1))
        if outcome is DraftOutcome.MALFORMED:
            self._outbox.malformed.append(message.seq)
        elif outcome is DraftOutcome.UNKNOWN_ANCHOR and not speculation.resynced:
            # Once: a drafter that keeps naming unknown anchors gets no loop out of us.
            speculation.resynced = True
            self._outbox.resyncs.append(message.seq)

    # --- ends --------------------------------------------------------------------------------

    def _expire(self, now: float) -> None:
        for seq, generation in list(self._generations.items()):
            if generation.deadline is not None and now >= generation.deadline:
                self._leave_place(generation)
                self._fail(seq, DeadlineExceededError("the request's deadline passed"))

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        stats = self._generations[sequence.seq].speculation.stats()
        self._say(sequence, FinishEvent(sequence.request.request_id, reason, stats))
        self._leave_place(self._generations[sequence.seq])
        self._remove(sequence.seq)

    def _leave_place(self, generation: Generation) -> None:
        """Learn how long places are held; a client that left says nothing of that."""
        if generation.placed_at is not None:
            held_s = time.monotonic() - generation.placed_at
            before = self._place_s or held_s
            self._place_s = before + _PLACE_AVERAGING * (held_s - before)

    def _fail(self, seq: int, error: PacelineError) -> None:
        sequence = self._generations[seq].sequence
        kind = type(error).__name__
        request_id = sequence.request.request_id
        self._say(sequence, ErrorEvent(request_id, kind, error.message, error.param or ""))
        self._remove(seq)

    def _remove(self, seq: int) -> None:
        generation = self._generations.pop(seq)
        self._scheduler.remove(generation.sequence)
        if generation.speculation.trie is not None:
            self._local.end(seq)
        if generation.speculation.ordered:
            self._outbox.closes.append(seq)

    def _drafts_for_any(self) -> bool:
        """Without any, a step is as if speculation did not exist."""
        return any(g.speculation.trie is not None for g in self._generations.values())

    def _draft_locally(self) -> None:
        """Ask the drafters of our own for every sequence that decodes in the next step."""
        asked = [
            LocalRequest(
                g.sequence.seq,
                g.speculation.kinds_now,
                min(g.sequence.max_draft_len, g.speculation.local_depth),
            )
            for g in self._generations.values()
            if g.speculation.trie is not None and g.is_decoding and g.sequence.max_draft_len > 0
        ]
        for draft in self._local.draft(asked):
            trie = self._generations[draft.seq].speculation.trie
            assert trie is not None
            trie.graft(draft.nodes, draft.kind)

    def _choose_drafts(self) -> None:
        """Let the planner choose among the drafts of all sequences that decode in this step."""
        if not self._drafts_for_any():
            return
        began = time.monotonic()
        generations = [self._generations[sequence.seq] for sequence in self._scheduler.running]
        decoding = [g for g in generations if g.is_decoding]
        self._planner.choose(
            [(g.speculation, g.sequence.max_draft_len) for g in decoding],
            len(decoding),
            self._num_prompt_tokens(),
        )
        self._drafting_s += time.monotonic() - began

    def _num_prompt_tokens(self) -> int:
        """That the next step reads, as far as there are places for those who wait."""
        running = self._scheduler.running
        num_places = max(0, self._config.max_running_sequences - len(running))
        reading = [s for s in running if not self._generations[s.seq].is_decoding]
        reading += islice(self._scheduler.waiting, num_places)
        num_tokens = sum(sequence.num_uncomputed_tokens for sequence in reading)
        return min(num_tokens, self._config.max_prefill_chunk_tokens)

    def _propose(self, sequence: Sequence, max_len: int) -> tuple[int, ...]:
        return self._generations[sequence.seq].drafts(max_len)

    def _say(self, sequence: Sequence, event: GenerationEvent) -> None:
        self._outbox.events.append(SequenceEvent(sequence.seq, event))

    def _flush(self) -> None:
        if not self._outbox.empty:
            self._post(self._outbox.output(self.load(), self._planner.least_survival))
            self._outbox = Outbox()

    def _measure(
        self, started: float, num_rows: int, num_read: int, num_drawn: int, *, is_typical: bool
    ) -> None:
        """A step that gives more rows of logits than others tells nothing of what those cost."""
        self._last_progress = time.monotonic()
        step_ms = (self._last_progress - started) * 1e3
        self.recorder.step_seconds.observe(step_ms / 1e3)
        self.recorder.step_tokens.observe(num_rows + num_read)
        self._step_ms += _AVERAGING * (step_ms - self._step_ms)
        self._step_tokens += _AVERAGING * (num_rows + num_read - self._step_tokens)
        engaged = self._planner.engages
        self._planner.stepped(
            num_rows if is_typical else 0,
            num_read if is_typical else 0,
            step_ms,
            num_drawn=num_drawn,
            drafting_ms=1e3 * self._drafting_s,
            now=self._last_progress,
        )
        self._drafting_s = 0.0
        if self._planner.engages is not engaged:
            for generation in self._generations.values():
                self._engage(generation)


def _runs(drafters: list[str]) -> tuple[DraftRun, ...]:
    return tuple(DraftRun(drafter, len(list(run))) for drafter, run in groupby(drafters))


def _replica_name(drafter: str, speculation: Speculation) -> str:
    """Never that of a drafter inside the verifier."""
    return f"{drafter} replica" if drafter in speculation.local_kinds else drafter


def _slice(scheduled: ScheduledSequence) -> SequenceSlice:
    sequence = scheduled.sequence
    assert sequence.cache is not None
    return SequenceSlice(
        sequence.cache.block_table,
        sequence.num_computed_tokens,
        scheduled.fed_ids,
        num_logits(scheduled),
    )
