"""The engine loop: receive, plan, run, verify, commit.

One thread runs it. Values go in through the inbox and out through `post`; nothing else is shared.
The engine is the only source of truth for committed tokens.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping

import torch

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.errors import (
    DeadlineExceededError,
    InternalError,
    InvalidRequestError,
    OverloadedError,
    PacelineError,
)
from cluster.load import VerifierLoad
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    GenerationEvent,
    Path,
    TokensEvent,
)
from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner
from engine.sequence import Emission, Sequence
from engine.target import Drawn, draw
from verifier_service.acceptance import verify
from verifier_service.draft_planner import DraftPlanner
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
    PathChanged,
    Reconfigured,
    SequenceEvent,
    Stopped,
    Submitted,
)
from verifier_service.generation import Generation
from verifier_service.outbox import Outbox
from verifier_service.scheduler import ScheduledSequence, Scheduler, SchedulerOutput
from verifier_service.speculation import Speculation

logger = logging.getLogger(__name__)

_AVERAGING = 0.2
"""Weight of the newest step in the moving averages."""


class Engine:
    """Decodes all sequences of one verifier. `post` is called from the engine's thread."""

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: SchedulerConfig,
        speculation: SpeculationConfig,
        post: Callable[[EngineOutput], None],
        profile: Mapping[int, float] | None = None,
    ) -> None:
        """`profile`: ms of a step by its tokens, as profile_steps measures it; without one every
        draft at hand is verified."""
        # Not a SimpleQueue: CPython's waits for ever if the timeout passes as its get begins.
        self.inbox: queue.Queue[EngineInput] = queue.Queue()
        self.draft_outcomes = dict.fromkeys(DraftOutcome, 0)
        self.num_preemptions = 0
        self._runner = runner
        self._config = scheduler
        self._speculation = speculation
        self._post = post
        self._scheduler = Scheduler(scheduler, runner.kv)
        self._planner = DraftPlanner(profile)
        self._generations: dict[int, Generation] = {}
        self._outbox = Outbox()
        self._step_ms = 0.0
        self._step_tokens = 0.0
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
        self.num_preemptions += len(plan.preempted)
        try:
            drawn = self._run(plan)
        except Exception as error:
            logger.exception("a step failed; its sequences end, the engine goes on")
            for scheduled in plan.scheduled:
                self._fail(scheduled.sequence.seq, InternalError(f"the forward failed: {error}"))
            return
        for scheduled in plan.scheduled:
            self._commit(scheduled, drawn.get(scheduled.sequence.seq))
        self._measure(started, plan.num_tokens)

    def _run(self, plan: SchedulerOutput) -> dict[int, Drawn]:
        """The target's own draws, by seq, of every sequence that reached its end."""
        if not plan.scheduled:
            return {}
        logits = self._runner.forward([_slice(scheduled) for scheduled in plan.scheduled])
        drawing = [scheduled for scheduled in plan.scheduled if scheduled.draws]
        blocks = [self._generations[s.sequence.seq].block(s.draft_ids) for s in drawing]
        draws = draw(logits, blocks)
        return {s.sequence.seq: drawn for s, drawn in zip(drawing, draws, strict=True)}

    def _commit(self, scheduled: ScheduledSequence, drawn: Drawn | None) -> None:
        """Make final what the target drew; a prompt chunk that draws nothing only gains KV."""
        sequence, draft_ids = scheduled.sequence, scheduled.draft_ids
        if drawn is None:
            self._scheduler.commit(scheduled, 0)
            return
        draft_ids = draft_ids[: len(drawn.token_ids) - 1]
        verification = verify(draft_ids, drawn.token_ids)
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
        speculation.record(len(draft_ids), num_accepted)
        if draft_ids:
            verdict = DraftVerdict(speculation.incarnation, len(draft_ids), num_accepted)
            self._outbox.verdicts.append(verdict)
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
            ),
        )
        self._follow(generation, start, emission)

    def _follow(self, generation: Generation, start: int, emission: Emission) -> None:
        """End the generation, or ask for drafts behind its new tokens."""
        sequence, speculation = generation.sequence, generation.speculation
        if emission.finish_reason is not None:
            request_id = sequence.request.request_id
            self._say(
                sequence, FinishEvent(request_id, emission.finish_reason, speculation.stats())
            )
            self._remove(sequence.seq)
        elif speculation.trie is not None:
            speculation.trie.commit(emission.token_ids)
            speculation.asked_at = time.monotonic()
            self._outbox.commits.append(DraftCommit(sequence.seq, start, emission.token_ids))

    # --- inbox -------------------------------------------------------------------------------

    def _receive(self, *, block: bool) -> None:
        """Take all that is in the inbox; wait for the first of it if there is nothing to do."""
        if block:
            self._handle(self.inbox.get())
            self._last_progress = time.monotonic()
        while not self.inbox.empty():
            self._handle(self.inbox.get())

    def _wait_for_drafts(self) -> None:
        """Wait for drafts that are due as long as it pays, and all together no longer than the
        deadline."""
        if not self._drafts_for_any():
            return
        deadline_ms = self._speculation.draft_deadline_ms
        deadline = time.monotonic() + deadline_ms / 1e3
        num_decoding = sum(g.is_decoding for g in self._generations.values())
        while True:
            due = [g.speculation for g in self._generations.values() if g.is_due]
            if not self._planner.waits(due, num_decoding, self._step_ms):
                return
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                for speculation in due:
                    speculation.late = True
                    self._planner.missed(deadline_ms)
                return
            try:
                self._handle(self.inbox.get(timeout=remaining_s))
            except queue.Empty:
                continue

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
            case DraftSessionLive(seq, drafter, incarnation):
                if generation := self._generations.get(seq):
                    speculation = generation.speculation
                    speculation.drafter, speculation.incarnation = drafter, incarnation
                    speculation.live, speculation.late = True, False
            case DraftSessionLost(seq):
                if generation := self._generations.get(seq):
                    generation.speculation.live = False
            case Reconfigured(scheduler, speculation):
                self._config = self._scheduler.config = scheduler
                self._speculation = speculation
            case Stopped():
                self._stopped = True

    def _submit(self, message: Submitted) -> None:
        generation = Generation.of(message, self._runner.card, self._speculation)
        sequence, speculation = generation.sequence, generation.speculation
        self._generations[message.seq] = generation
        self._scheduler.add(sequence)
        if error := self._refusal(sequence):
            self._fail(message.seq, error)
        elif speculation.wanted:
            self._open(sequence, speculation)

    def _refusal(self, sequence: Sequence) -> PacelineError | None:
        if len(sequence.token_ids) >= sequence.max_len:
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

    def _open(self, sequence: Sequence, speculation: Speculation) -> None:
        speculation.trie = DraftTrie(sequence.token_ids, self._runner.vocab_size)
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
            )
        )

    def _change_path(self, seq: int, path: Path) -> None:
        """Going plain pauses the session, which stays warm; coming back resumes it."""
        generation = self._generations[seq]
        speculation = generation.speculation
        if speculation.path is path:
            return
        speculation.path = path
        if speculation.trie is not None:
            self._outbox.paused[seq] = path is Path.PLAIN
        elif speculation.wanted:
            self._open(generation.sequence, speculation)

    def _take_draft(self, message: DraftArrived) -> None:
        generation = self._generations.get(message.seq)
        if generation is None or generation.speculation.trie is None:
            return  # It finished while the draft was on its way.
        speculation = generation.speculation
        was_answered = speculation.answered
        outcome = generation.speculation.trie.insert(message.draft)
        self.draft_outcomes[outcome] += 1
        if speculation.answered:
            speculation.late = speculation.resynced = False
        if speculation.answered and not was_answered:
            wait_ms = 1e3 * max(0.0, message.arrived_at - speculation.asked_at)
            self._planner.answered(speculation, wait_ms, empty=not message.draft.nodes)
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
                self._fail(seq, DeadlineExceededError("the request's deadline passed"))

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
            self._outbox.closes.append(seq)

    def _drafts_for_any(self) -> bool:
        """Without any, a step is as if speculation did not exist."""
        return any(g.speculation.trie is not None for g in self._generations.values())

    def _choose_drafts(self) -> None:
        """Let the planner choose among the drafts of all sequences that decode in this step."""
        if not self._drafts_for_any():
            return
        sequences = [*self._scheduler.running, *self._scheduler.waiting]
        generations = [self._generations[sequence.seq] for sequence in sequences]
        decoding = [g for g in generations if g.is_decoding]
        num_prompt_tokens = sum(
            g.sequence.num_uncomputed_tokens for g in generations if not g.is_decoding
        )
        self._planner.choose(
            [(g.speculation, g.sequence.max_draft_len) for g in decoding],
            len(decoding),
            min(num_prompt_tokens, self._config.max_prefill_chunk_tokens),
        )

    def _propose(self, sequence: Sequence, max_len: int) -> tuple[int, ...]:
        return self._generations[sequence.seq].drafts(max_len)

    def _say(self, sequence: Sequence, event: GenerationEvent) -> None:
        self._outbox.events.append(SequenceEvent(sequence.seq, event))

    def _flush(self) -> None:
        if not self._outbox.empty:
            self._post(self._outbox.output(self.load()))
            self._outbox = Outbox()

    def _measure(self, started: float, num_tokens: int) -> None:
        self._last_progress = time.monotonic()
        step_ms = (self._last_progress - started) * 1e3
        self._step_ms += _AVERAGING * (step_ms - self._step_ms)
        self._step_tokens += _AVERAGING * (num_tokens - self._step_tokens)
        self._planner.stepped(num_tokens, step_ms)


def _slice(scheduled: ScheduledSequence) -> SequenceSlice:
    sequence = scheduled.sequence
    assert sequence.cache is not None
    num_logits = len(scheduled.draft_ids) + 1 if scheduled.draws else 0
    return SequenceSlice(
        sequence.cache.block_table, sequence.num_computed_tokens, scheduled.fed_ids, num_logits
    )
