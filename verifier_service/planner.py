"""How many drafts to verify, and whether to wait for more.

Maximises goodput: expected tokens of a step over the time it takes. A draft is worth its share of a
longer step or it is not; acceptance alone decides nothing. All here is arithmetic on values that
the caller gives: no clock, no model. Plans change speed, never tokens, where drafts are verified by
coupling: whichever are chosen, and why, the target draws the same. Where a ratio test verifies
them, a plan may not look at what was drawn: see MeanAcceptance.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv
from typing import NamedTuple

_DRIFT_RATE, _LOCAL_DRIFT_RATE = 0.1, 0.03
"""Shares of a step's surprise that the drift of all points, and that of the nearest and those above
it, take up. How fast a machine is changes from moment to moment, how its times compare seldom does,
and what a draft costs hangs on that alone: so it is learnt slowly, and of larger steps only from
larger steps."""
_MAX_SURPRISE = math.log(1.5)
"""What an observation counts at most, so that a hiccup moves T by 5 % and no more."""
_LOCAL_DECAY = 0.9985
"""Shrinks the drift of a bucket to the global one, at each observation of it."""
_KNEE = 1.1

_NUM_BINS = 10
_PRIOR_WEIGHT = 4.0
_WINDOW = 120
"""Effective number of observations that a bin remembers."""
_IDLE_STEPS = 100
"""A bin that goes longer unobserved forgets, by half in each `_IDLE_HALF_LIFE` steps."""
_IDLE_HALF_LIFE = 40
_LEAST_CHANCE = 0.01

_MEAN_WINDOW = 50
"""Effective number of drafts that a sequence's mean remembers."""

_VALUE_AVERAGING = 0.25
_WAIT_AVERAGING = 0.1
PROBE_EVERY = 16


@dataclass(frozen=True, slots=True)
class StepProfile:
    """What steps were measured to take."""

    ms: Mapping[int, float]
    """Without context, by number of tokens."""
    context_ms: float = 0.0
    """What each token of context adds for each token of the step."""
    prompt_share: float = 1.0
    """What a token of a prompt costs, which gives no logits, over one that does."""


class StepCost:
    """T: ms that a step takes, by its number of tokens. Never declines with the tokens.

    Attention reads the context for each token anew, so a draft costs more behind a long one: that
    is added, from `context_len`. The rest is linear between the points of a profile, constant below
    them, linear beyond. What is observed moves a factor for all points and one for the nearest and
    those above; others yield where T would decline.
    """

    def __init__(self, points: Mapping[int, float], context_ms: float = 0.0) -> None:
        """`points`: measured ms by number of tokens, positive, best up to the largest step;
        `context_ms` as in StepProfile."""
        if not points or min(points) < 1 or min(points.values()) <= 0:
            raise ValueError(f"no profile of a step: {points}")
        self._sizes = sorted(points)
        self._profile = list(accumulate((points[size] for size in self._sizes), max))
        last_sizes, last_ms = self._sizes[-2:], self._profile[-2:]
        width = max(1, last_sizes[-1] - last_sizes[0])
        self._growth = (1.0 - last_ms[0] / last_ms[-1]) / width
        self._table = self._profile
        self._drift = 0.0
        self._local_drift = [0.0] * len(self._sizes)
        self.context_len = 0.0
        """Tokens before each of those of a step, on the average."""
        self._context_ms = context_ms

    def __call__(self, num_tokens: float) -> float:
        start, ms, slope = self._line(num_tokens)
        return ms + slope * (num_tokens - start)

    def span(self, first: int, count: int) -> list[float]:
        """T of `first`, `first + 1` and so on, `count` of them."""
        times: list[float] = []
        stop = first + count
        while (position := first + len(times)) < stop:
            start, ms, slope = self._line(position)
            index = bisect_right(self._sizes, position)
            end = min(stop, self._sizes[index]) if index < len(self._sizes) else stop
            times += [ms + slope * offset for offset in range(position - start, end - start)]
        return times

    def observe(self, num_tokens: float, ms: float) -> None:
        """Follow a step that was measured."""
        surprise = math.log(max(ms, 1e-3) / self(num_tokens))
        surprise = max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
        nearest = min(range(len(self._sizes)), key=lambda i: abs(self._sizes[i] - num_tokens))
        self._drift += _DRIFT_RATE * surprise
        for index in range(nearest, len(self._sizes)):
            local = self._local_drift[index]
            self._local_drift[index] = local * _LOCAL_DECAY + _LOCAL_DRIFT_RATE * surprise
        drifts = [self._drift + local for local in self._local_drift]
        table = [ms * math.exp(drift) for ms, drift in zip(self._profile, drifts, strict=True)]
        seen = table[nearest]
        self._table = [min(t, seen) for t in table[:nearest]] + [
            max(t, seen) for t in table[nearest:]
        ]
        self._local_drift = [
            math.log(now / then) - self._drift
            for now, then in zip(self._table, self._profile, strict=True)
        ]

    def knee(self) -> int:
        """Most tokens of which a step without context takes within 10 % of a step of one; at most
        the largest number that was profiled."""
        limit = _KNEE * self._table[0]
        index = bisect_right(self._table, limit) - 1
        if index == len(self._sizes) - 1:
            return self._sizes[-1]
        start, ms, slope = self._bare_line(self._sizes[index])
        return min(start + int((limit - ms) / slope), self._sizes[index + 1] - 1)

    def _line(self, num_tokens: float) -> tuple[int, float, float]:
        """Start, ms there, and ms per token of the segment that holds `num_tokens`."""
        start, ms, slope = self._bare_line(num_tokens)
        row_ms = self._context_ms * self.context_len * math.exp(self._drift)
        return start, ms + row_ms * start, slope + row_ms

    def _bare_line(self, num_tokens: float) -> tuple[int, float, float]:
        """The same without context."""
        sizes, table = self._sizes, self._table
        index = bisect_right(sizes, num_tokens) - 1
        if index < 0:
            return 0, table[0], 0.0
        if index == len(sizes) - 1:
            return sizes[-1], table[-1], table[-1] * self._growth
        rise = table[index + 1] - table[index]
        return sizes[index], table[index], rise / (sizes[index + 1] - sizes[index])


@dataclass(slots=True)
class _Bin:
    """Faded counts of one range of confidence."""

    hits: float = 0.0
    trials: float = 0.0
    last_step: int = 0

    def weight(self, step: int) -> float:
        """What the counts are still worth."""
        idle = step - self.last_step - _IDLE_STEPS
        return 1.0 if idle <= 0 else math.exp2(-idle / _IDLE_HALF_LIFE)

    def record(self, step: int, *, hit: bool) -> None:
        keep = self.weight(step) * (1.0 - 1.0 / _WINDOW)
        self.hits = self.hits * keep + hit
        self.trials = self.trials * keep + 1.0
        self.last_step = step

    def chance(self, confidence: float, step: int) -> float:
        weight = self.weight(step)
        if not _LEAST_CHANCE <= confidence <= 1.0 - _LEAST_CHANCE:
            confidence = _LEAST_CHANCE if confidence < 0.5 else 1.0 - _LEAST_CHANCE
        hits = _PRIOR_WEIGHT * confidence + self.hits * weight
        return hits / (_PRIOR_WEIGHT + self.trials * weight)


class Acceptance:
    """What a drafter's confidence is worth: the chance of a draft to be accepted, given that all
    before it were. Kept per drafter `key`; starts from the drafter's word, and returns to it where
    nothing was observed for long. `step` is any counter that grows with the engine's steps."""

    def __init__(self) -> None:
        self._bins: dict[str, list[_Bin]] = {}

    def conditional(self, key: str, confidence: float, step: int) -> float:
        """Strictly between 0 and 1."""
        return self._bins_of(key)[_bin_index(confidence)].chance(confidence, step)

    def survivals(self, key: str, confidences: Sequence[float], step: int) -> tuple[float, ...]:
        """Chance of each draft of a chain that it and all before it are accepted."""
        bins = self._bins_of(key)
        chances = (bins[_bin_index(c)].chance(c, step) for c in confidences)
        return tuple(accumulate(chances, float.__mul__))

    def record(self, key: str, confidences: Sequence[float], num_accepted: int, step: int) -> None:
        """Learn from a verified chain; what lies behind its first refusal says nothing."""
        bins = self._bins_of(key)
        for position, confidence in enumerate(confidences[: num_accepted + 1]):
            bins[_bin_index(confidence)].record(step, hit=position < num_accepted)

    def _bins_of(self, key: str) -> list[_Bin]:
        if key not in self._bins:
            self._bins[key] = [_Bin() for _ in range(_NUM_BINS)]
        return self._bins[key]


def _bin_index(confidence: float) -> int:
    return math.ceil(confidence * _NUM_BINS) - 1 if confidence > 0 else 0


def plan_depths(
    cost: StepCost,
    num_other_tokens: int,
    num_base: int,
    survivals: Sequence[Sequence[float]],
) -> tuple[int, ...]:
    """How many drafts of each sequence to verify, for the highest goodput

        (num_base + sum of the chosen survivals) / T(num_other_tokens + number of the chosen).

    `num_other_tokens`: all that the step holds without drafts, prompt chunks included; `num_base`:
    the sequences that draw a token in it. Each of `survivals` must not rise. Exact for any T: of n
    drafts the n likeliest are the best, and these are prefixes, so every n is tried. Of equal plans
    the one with fewest drafts.
    """
    owners = [owner for owner, chain in enumerate(survivals) for _ in chain]
    chances = [chance for chain in survivals for chance in chain]
    order = sorted(range(len(chances)), key=chances.__getitem__, reverse=True)  # stable
    expected = accumulate((chances[i] for i in order), initial=float(num_base))
    goodput = list(map(truediv, expected, cost.span(num_other_tokens, len(order) + 1)))
    depths = [0] * len(survivals)
    for i in order[: goodput.index(max(goodput))]:
        depths[owners[i]] += 1
    return tuple(depths)


class Drafts(NamedTuple):
    """What drafts of one sequence, or of several together, amount to."""

    tokens: float = 0.0
    """Expected to be accepted."""
    rows: float = 0.0
    """Verified for them."""


@dataclass(slots=True)
class DraftValue:
    """Of one sequence: what a draft on its way is expected to be. A new sequence gets a try."""

    expected: float = 1.0
    """Tokens that it brings."""
    first: float = 0.5
    """Chance of its first token to be right."""
    rows: float = 1.0
    """Tokens of it that are verified."""

    def observe(self, num_accepted: int, num_verified: int) -> None:
        """Call for each answer of a drafter, an empty one too, unless the plan left it out."""
        self.expected += _VALUE_AVERAGING * (num_accepted - self.expected)
        self.first += _VALUE_AVERAGING * ((num_accepted > 0) - self.first)
        self.rows += _VALUE_AVERAGING * (num_verified - self.rows)

    def beyond(self, at_hand: Drafts) -> DraftValue:
        """What it brings to a sequence that has these drafts already."""
        if not at_hand.rows:
            return self
        rows = max(0.0, self.rows - at_hand.rows)
        tokens = max(0.0, self.expected - at_hand.tokens) if rows else 0.0
        return DraftValue(tokens, min(self.first, tokens), rows)

    @property
    def late(self) -> Drafts:
        """Of a step, on the average over many of which none waits: see worth_waiting."""
        missed = 1.0 + self.first
        return Drafts(
            max(0.0, self.expected - self.first) / missed,
            self.first * max(0.0, self.rows - 1.0) / missed,
        )


@dataclass(slots=True)
class MeanAcceptance:
    """Of one sequence whose drafts a ratio test verifies: the chance of any draft to be accepted.

    The best depth is sought among all, so with a word on each draft it would hang on the drafts
    behind a cut, and the test would be biased. One number from drafts that are history gives the
    plan nothing to look at.
    """

    _accepted: float = 2.8
    _judged: float = 4.0

    def __call__(self, drafter: str, confidence: float) -> float:
        """Whatever the confidence."""
        return self._accepted / self._judged

    def observe(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a verified chain; what lies behind its first refusal says nothing."""
        num_judged = min(num_drafted, num_accepted + 1)
        kept = (1.0 - 1.0 / _MEAN_WINDOW) ** num_judged
        self._accepted = self._accepted * kept + num_accepted
        self._judged = self._judged * kept + num_judged


def worth_waiting(
    cost: StepCost,
    num_decoding: int,
    at_hand: Drafts,
    due: Sequence[DraftValue],
    wait_ms: float,
) -> bool:
    """Whether steps that wait for the drafts that are `due` have a higher goodput than steps that
    never wait, `at_hand` being what the other sequences have.

    A draft that is not waited for is not lost: it comes while the step runs. Its first token is
    compared with what the step draws, and if they are equal, which has the chance f, the rest is
    there for the next step. So of the steps of a sequence that nobody waits for, f / (1 + f) verify
    something: each that verifies leaves nothing, and each that does not is followed by one that
    does with the chance f. What they verify is rows - 1 drafts that bring (tokens - f) / f. Hence
    with t tokens in n rows from all that is there without the drafts that are due:

        waiting   (t + sum of tokens) / (T(n + sum of rows) + wait_ms)
        going     (t + sum of (tokens - f) / (1 + f)) / T(n + sum of f (rows - 1) / (1 + f))

    and going is never worse than leaving the late drafts out, t / T(n). Prompts are left out of T:
    a step that reads one takes longer, but time that is lost is worth the same in any step. Left
    out too: what a drafter adds to a late draft meanwhile, and that rows which come and go cost
    more than their mean where T bends upwards. The one favours going, the other waiting.
    """
    tokens, rows = num_decoding + at_hand.tokens, num_decoding + at_hand.rows
    all_tokens, all_rows, late_tokens, late_rows = tokens, rows, tokens, rows
    for value in due:
        late = value.late
        all_tokens += value.expected
        all_rows += value.rows
        late_tokens += late.tokens
        late_rows += late.rows
    going = max(tokens / cost(rows), late_tokens / cost(late_rows))
    return all_tokens / (cost(all_rows) + wait_ms) > going


@dataclass(slots=True)
class WaitPolicy:
    """Of one engine: whether a step waits for the drafts that are due."""

    wait_ms: float | None = None
    """How long a due draft takes to come; none has come yet: as good as at once."""
    probe_step: int = -1
    """The latest step that waits, or waited, whatever it costs."""
    _verdict_step: int = 0
    """The latest step in which a draft was verified."""

    def observe_wait(self, ms: float) -> None:
        """Call for each draft that was due, waited for or not; one that never came counts as the
        deadline."""
        before = ms if self.wait_ms is None else self.wait_ms
        self.wait_ms = before + _WAIT_AVERAGING * (ms - before)

    def observe_verdict(self, step: int) -> None:
        """Call where a draft was verified in this step: what drafts are worth is seen."""
        self._verdict_step = step

    def waits(
        self,
        step: int,
        cost: StepCost,
        num_decoding: int,
        at_hand: Drafts,
        due: Sequence[DraftValue],
    ) -> bool:
        """True where it pays; as a probe also where 16 steps verified no draft, so that a text
        which begins to repeat itself is noticed. All sequences probe in one step: a wait is paid
        by all. While a step waits it may be asked about again."""
        if not due:
            return False
        if step - max(self.probe_step, self._verdict_step) >= PROBE_EVERY:
            self.probe_step = step
        if step == self.probe_step:
            return True
        return worth_waiting(cost, num_decoding, at_hand, due, self.wait_ms or 0.0)
