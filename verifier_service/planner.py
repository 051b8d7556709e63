"""How many drafts to verify, and whether to wait for more.

Maximises goodput: expected tokens of a step over the time it takes. A draft is worth its share of a
longer step or it is not; acceptance alone decides nothing. All here is arithmetic on values that
the caller gives: no clock, no model. Plans change speed, never tokens, since drafts are verified
by coupling: whichever are chosen, and why, the target draws the same.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import truediv

_DRIFT_RATE = 0.1
"""Share of a step's surprise that each of the two drift factors takes up."""
_MAX_SURPRISE = math.log(1.5)
"""What an observation counts at most, so that a hiccup moves T by 8 % and no more."""
_LOCAL_DECAY = 0.995
"""Shrinks the drift of a bucket to the global one, at each observation of it."""
_KNEE = 1.1

_NUM_BINS = 10
_PRIOR_WEIGHT = 4.0
_WINDOW = 500
"""Effective number of observations that a bin remembers."""
_IDLE_STEPS = 250
"""A bin that goes longer unobserved forgets, by half in each `_IDLE_HALF_LIFE` steps."""
_IDLE_HALF_LIFE = 100
_LEAST_CHANCE = 0.01

_VALUE_AVERAGING = 0.25
_WAIT_AVERAGING = 0.1
PROBE_EVERY = 16


class StepCost:
    """T: ms that a step takes, by its number of tokens. Never declines with the tokens.

    Linear between the points of a profile, constant below them, linear beyond. What is observed
    moves a factor for all points and one for the nearest; others yield where T would decline.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        """`points`: measured ms by number of tokens, positive, best up to the largest step."""
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

    def __call__(self, num_tokens: int) -> float:
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

    def observe(self, num_tokens: int, ms: float) -> None:
        """Follow a step that was measured."""
        surprise = math.log(max(ms, 1e-3) / self(num_tokens))
        moved = _DRIFT_RATE * max(-_MAX_SURPRISE, min(_MAX_SURPRISE, surprise))
        nearest = min(range(len(self._sizes)), key=lambda i: abs(self._sizes[i] - num_tokens))
        self._drift += moved
        self._local_drift[nearest] = self._local_drift[nearest] * _LOCAL_DECAY + moved
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
        """Most tokens of which a step takes within 10 % of a step of one; at most the largest
        number that was profiled."""
        limit = _KNEE * self(1)
        index = bisect_right(self._table, limit) - 1
        if index == len(self._sizes) - 1:
            return self._sizes[-1]
        start, ms, slope = self._line(self._sizes[index])
        return min(start + int((limit - ms) / slope), self._sizes[index + 1] - 1)

    def _line(self, num_tokens: int) -> tuple[int, float, float]:
        """Start, ms there, and ms per token of the segment that holds `num_tokens`."""
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


@dataclass(slots=True)
class DraftValue:
    """Of one sequence: tokens that a draft is expected to bring. A new sequence gets a try."""

    expected: float = 1.0

    def observe(self, num_accepted: int) -> None:
        """Call for each answer of a drafter, an empty one too, unless the plan left it out."""
        self.expected += _VALUE_AVERAGING * (num_accepted - self.expected)


def worth_waiting(step_ms: float, num_decoding: int, due: Sequence[float], wait_ms: float) -> bool:
    """Whether (num_decoding + sum(due)) / (step_ms + wait_ms) beats num_decoding / step_ms.

    `due`: tokens that each draft on its way is expected to bring; `step_ms` is positive.
    """
    return sum(due) * step_ms > num_decoding * wait_ms


@dataclass(slots=True)
class WaitPolicy:
    """Of one engine: whether a step waits for the drafts that are due."""

    wait_ms: float | None = None
    """How long a due draft takes to come; none has come yet: as good as at once."""

    def observe_wait(self, ms: float) -> None:
        """Call for each draft that was due, waited for or not; one that never came counts as the
        deadline."""
        before = ms if self.wait_ms is None else self.wait_ms
        self.wait_ms = before + _WAIT_AVERAGING * (ms - before)

    def waits(self, step: int, step_ms: float, num_decoding: int, due: Sequence[float]) -> bool:
        """True where it pays, and in every 16th step as a probe, so that a text which begins to
        repeat itself is noticed. All sequences probe in one step: a wait is paid by all."""
        if not due:
            return False
        if step % PROBE_EVERY == 0:
            return True
        return worth_waiting(step_ms, num_decoding, due, self.wait_ms or 0.0)
