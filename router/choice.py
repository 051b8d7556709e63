"""One choice as the client sees it: text, stop strings, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, field

from cluster.types import DraftRun, FinishEvent, FinishReason, TokenLogprobs, TokensEvent
from router.detokenizer import Detokenizer
from router.generation import Generation
from router.generation_client import EventBatch
from router.stop_strings import StopStrings
from router.thinking import ReasoningCounter


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine step added to a choice."""

    index: int
    text: str
    num_tokens: int = 0
    """Tokens delivered by this step, those without text included."""
    num_draft_tokens: int = 0
    """Drafts verified in this step."""
    num_accepted_tokens: int = 0
    """Delivered tokens that were accepted drafts."""
    refused_ids: tuple[int, ...] = ()
    """Drafts that the target did not draw."""
    accepted_spans: tuple[tuple[int, int], ...] = ()
    """Parts of `text` that accepted drafts spell, as [start, end) in characters."""
    logprobs: tuple[tuple[int, TokenLogprobs], ...] = ()
    """Of each delivered token id, where the client asked for them."""
    finish_reason: FinishReason | None = None

    def then(self, later: Delta) -> Delta:
        """This and the next one as one."""
        shift = len(self.text)
        spans = tuple((start + shift, end + shift) for start, end in later.accepted_spans)
        return Delta(
            self.index,
            self.text + later.text,
            self.num_tokens + later.num_tokens,
            self.num_draft_tokens + later.num_draft_tokens,
            self.num_accepted_tokens + later.num_accepted_tokens,
            self.refused_ids + later.refused_ids,
            self.accepted_spans + spans,
            self.logprobs + later.logprobs,
            later.finish_reason,
        )


@dataclass(slots=True)
class SpeculationTally:
    """What speculation did, counted from the tokens that were delivered.

    A step without drafts counts in `num_steps` only.
    """

    num_steps: int = 0
    last_drafter: str = ""
    """As the verifier names it at the end."""
    num_resyncs: int = 0
    """How often an answer that had left the client's prediction was found in it again."""
    drafted_by: Counter[str] = field(default_factory=Counter)
    """Drafts by drafter."""
    accepted_by: Counter[str] = field(default_factory=Counter)
    drafted_per_position: Counter[int] = field(default_factory=Counter)
    accepted_per_position: Counter[int] = field(default_factory=Counter)
    accepted_histogram: Counter[int] = field(default_factory=Counter)
    """Index j: steps with drafts of which exactly j were accepted."""

    def add_step(self, num_draft_tokens: int, num_accepted_tokens: int) -> None:
        self.num_steps += 1
        if num_draft_tokens:
            self.drafted_per_position.update(range(num_draft_tokens))
            self.accepted_per_position.update(range(num_accepted_tokens))
            self.accepted_histogram[num_accepted_tokens] += 1

    def add_drafters(self, runs: Sequence[DraftRun], num_accepted_tokens: int) -> None:
        """Count who proposed the drafts of a step, of which so many were accepted."""
        for run in runs:
            self.drafted_by[run.drafter] += run.num_tokens
            self.accepted_by[run.drafter] += min(run.num_tokens, num_accepted_tokens)
            num_accepted_tokens = max(0, num_accepted_tokens - run.num_tokens)

    def add(self, other: SpeculationTally) -> None:
        """Take in another tally."""
        self.num_steps += other.num_steps
        self.last_drafter = other.last_drafter or self.last_drafter
        self.num_resyncs += other.num_resyncs
        self.drafted_by.update(other.drafted_by)
        self.accepted_by.update(other.accepted_by)
        self.drafted_per_position += other.drafted_per_position
        self.accepted_per_position += other.accepted_per_position
        self.accepted_histogram += other.accepted_histogram

    @property
    def drafter(self) -> str:
        """The one of which most was accepted, or that was there and had no draft verified; empty if
        none."""
        return max(self.accepted_by, key=self._merit, default=self.last_drafter)

    def _merit(self, drafter: str) -> tuple[int, int]:
        return self.accepted_by[drafter], self.drafted_by[drafter]

    @property
    def num_draft_tokens(self) -> int:
        return self.drafted_per_position.total()

    @property
    def num_accepted_tokens(self) -> int:
        return self.accepted_per_position.total()

    @property
    def acceptance_per_position(self) -> list[float]:
        """Index j: share of the drafts at position j of a block that were accepted."""
        return [
            round(self.accepted_per_position[position] / drafted, 4)
            for position, drafted in sorted(self.drafted_per_position.items())
        ]

    @property
    def num_draft_steps(self) -> int:
        return self.accepted_histogram.total()


class ChoiceText:
    """Turns token ids into the text that may be shown."""

    def __init__(
        self,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        silent_ids: frozenset[int],
        min_tokens: int = 0,
    ) -> None:
        """The text of the first `min_tokens` tokens is not searched for stop strings."""
        self._num_unsearched = min_tokens if stops else 0
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops) if stops else None
        self._silent_ids = silent_ids

    def push(self, token_ids: Sequence[int]) -> tuple[str, int, bool]:
        """(text, number of ids used, a stop string was completed). The ids after the one that
        completed it are not used."""
        if self._stops is None:
            return self._detokenizer.push(self._audible(token_ids)), len(token_ids), False
        num_first = min(self._num_unsearched, len(token_ids))
        self._num_unsearched -= num_first
        text = self._detokenizer.push(self._audible(token_ids[:num_first]))
        for num_used, token_id in enumerate(token_ids[num_first:], start=num_first + 1):
            piece = self._detokenizer.push(self._audible((token_id,)))
            shown, stopped = self._stops.push(piece)
            text += shown
            if stopped:
                return text, num_used, True
        return text, len(token_ids), False

    def finish(self) -> tuple[str, bool]:
        """(what was held back, a stop string was completed by it), when no token follows."""
        tail = self._detokenizer.finish()
        if self._stops is None:
            return tail, False
        text, stopped = self._stops.push(tail)
        return (text, True) if stopped else (text + self._stops.finish(), False)

    def _audible(self, token_ids: Sequence[int]) -> Sequence[int]:
        if self._silent_ids.isdisjoint(token_ids):
            return token_ids
        return [token_id for token_id in token_ids if token_id not in self._silent_ids]


class Choice:
    """One generation and what came of it so far."""

    def __init__(
        self, index: int, generation: Generation, text: ChoiceText, reasoning: ReasoningCounter
    ) -> None:
        self.index = index
        self.generation = generation
        self.num_tokens = 0
        """Tokens delivered; what usage counts."""
        self.num_cached_prompt_tokens = 0
        """Prompt tokens that its verifier did not have to compute."""
        self.num_predicted_tokens = 0
        """Tokens delivered that the client's prediction had next."""
        self.tally = SpeculationTally()
        self._text = text
        self._reasoning = reasoning

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens delivered that are reasoning."""
        return self._reasoning.num_tokens

    async def deltas(self) -> AsyncGenerator[Delta, None]:
        """One per engine step, the last one with the finish reason."""
        try:
            async for batch in self.generation.events():
                delta = self._advance(batch)
                yield delta
                if delta.finish_reason is not None:
                    return
        finally:
            self.generation.close()

    def _advance(self, batch: EventBatch) -> Delta:
        text = ""
        refused: list[int] = []
        logprobs: list[tuple[int, TokenLogprobs]] = []
        spans: list[tuple[int, int]] = []
        num_tokens = num_drafted = num_accepted = 0
        finish_reason = None
        for event in batch:
            if finish_reason is not None:
                break
            if isinstance(event, TokensEvent):
                accepted_ids = event.token_ids[: sum(event.drafted)]
                foreseen, accepted, stopped = self._text.push(accepted_ids)
                own, used, stopped = (
                    ("", 0, True) if stopped else self._text.push(event.token_ids[accepted:])
                )
                self.tally.add_step(event.num_draft_tokens, accepted)
                self.num_cached_prompt_tokens += event.num_cached_prompt_tokens
                if foreseen:
                    spans.append((len(text), len(text) + len(foreseen)))
                text += foreseen + own
                num_tokens += accepted + used
                self.num_predicted_tokens += sum(event.predicted[: accepted + used])
                self.tally.add_drafters(event.draft_runs, accepted)
                self.tally.num_resyncs += event.num_resyncs
                delivered_ids = event.token_ids[: accepted + used]
                self._reasoning.push(delivered_ids)
                logprobs += zip(delivered_ids, event.logprobs, strict=False)
                num_drafted += event.num_draft_tokens
                num_accepted += accepted
                refused += event.refused_ids
                finish_reason = FinishReason.STOP if stopped else None
            elif isinstance(event, FinishEvent):
                self.tally.last_drafter = event.stats.drafter
                tail, stopped = self._text.finish()
                text += tail
                finish_reason = FinishReason.STOP if stopped else event.reason
        self.num_tokens += num_tokens
        return Delta(
            self.index,
            text,
            num_tokens,
            num_drafted,
            num_accepted,
            tuple(refused),
            tuple(spans),
            tuple(logprobs),
            finish_reason,
        )
