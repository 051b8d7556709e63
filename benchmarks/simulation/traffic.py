"""The requests of a scenario, and what a drafter would foresee of each. Functions of the seed."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from benchmarks.loadtest.arrivals import Arrival, replay_arrivals
from benchmarks.loadtest.profile import ReplayLoad
from benchmarks.loadtest.trace import read_trace
from benchmarks.simulation.production import ServiceTier, SpeculationMode
from benchmarks.simulation.scenario import MAX_CHAIN, Kind, RateLoad, Scenario, TraceLoad

PATTERN_BITS = 11
_NUM_PATTERNS = 1 << PATTERN_BITS
_MIX, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
_ARRIVALS, _REQUESTS, _PATTERNS = range(3)
"""Random streams of their own."""


@dataclass(frozen=True, slots=True)
class Pattern:
    """A chain of drafts at some place of some text."""

    confidences: tuple[float, ...]
    """MAX_CHAIN of them."""
    num_right: int
    """How many of them the target would draw itself."""


@dataclass(frozen=True, slots=True)
class Request:
    """What a client sends, and what comes of it whatever the cluster does."""

    index: int
    kind: str
    mode: SpeculationMode
    tier: ServiceTier
    arrival_s: float
    router: int
    """Random bits that say which router takes it."""
    prompt_tokens: int
    output_tokens: int
    key: int
    """Random bits that say how its text can be foreseen."""
    patterns: Sequence[Pattern]
    """Of its kind."""

    def pattern(self, position: int) -> Pattern:
        """The chain that a drafter would propose behind so many tokens of the answer. The same
        however often it is asked, as the text does not depend on who drafts when."""
        mixed = ((self.key + position) * _MIX) & _MASK
        mixed = ((mixed ^ (mixed >> 32)) * _MIX) & _MASK
        return self.patterns[mixed >> (64 - PATTERN_BITS)]


def make_requests(scenario: Scenario) -> list[Request]:
    """In order of arrival."""
    arrivals = _arrivals(scenario)
    kinds = list(scenario.traffic.items())
    patterns = {
        name: make_patterns(kind, (scenario.seed, _PATTERNS, place))
        for place, (name, kind) in enumerate(kinds)
    }
    rng = np.random.default_rng((scenario.seed, _REQUESTS))
    shares = np.array([kind.share for _, kind in kinds])
    picked = rng.choice(len(kinds), len(arrivals), p=shares / shares.sum())
    keys = rng.integers(0, 1 << 63, len(arrivals))
    routers = rng.integers(0, 1 << 31, len(arrivals))
    lengths = rng.random((len(arrivals), 2))
    requests = []
    for index, arrival in enumerate(arrivals):
        name, kind = kinds[int(picked[index])]
        prompt, output = (
            length.low + int(part * (length.high - length.low + 1))
            for length, part in zip(
                (kind.prompt_tokens, kind.output_tokens), lengths[index], strict=True
            )
        )
        requests.append(
            Request(
                index,
                name,
                SpeculationMode(kind.mode),
                ServiceTier(kind.tier),
                arrival.offset_s,
                int(routers[index]),
                arrival.prompt_tokens or prompt,
                arrival.output_tokens or output,
                int(keys[index]),
                patterns[name],
            )
        )
    return requests


def make_patterns(kind: Kind, seed: Sequence[int]) -> tuple[Pattern, ...]:
    """Many chains of which the j-th draft is right with the chance `acceptance[j]` if those before
    it are. The chance of a single token is beta distributed around that."""
    rng = np.random.default_rng(seed)
    last = kind.acceptance[-1]
    means = np.array([*kind.acceptance, *[last] * MAX_CHAIN][:MAX_CHAIN])
    chances = np.broadcast_to(means, (_NUM_PATTERNS, MAX_CHAIN))
    if kind.spread:
        weight = 1.0 / kind.spread - 1.0
        inner = np.clip(means, 1e-6, 1 - 1e-6)
        drawn = rng.beta(inner * weight, (1 - inner) * weight, chances.shape)
        chances = np.where((means > 0) & (means < 1), drawn, chances)
    right = np.concatenate([rng.random(chances.shape) < chances, np.zeros((len(chances), 1))], 1)
    return tuple(
        Pattern(tuple(round(float(chance), 2) for chance in row), int(num_right))
        for row, num_right in zip(chances, np.argmin(right, axis=1), strict=True)
    )


def _arrivals(scenario: Scenario) -> Sequence[Arrival]:
    load = scenario.load
    if isinstance(load, TraceLoad):
        replay = ReplayLoad(
            kind="replay",
            trace=load.trace,
            length_scale=load.length_scale,
            max_prompt_tokens=load.max_prompt_tokens,
            max_output_tokens=load.max_output_tokens,
            start_s=load.start_s,
            duration_s=scenario.duration_s,
        )
        return replay_arrivals(read_trace(load.trace), replay, load.speed)
    rng = np.random.default_rng((scenario.seed, _ARRIVALS))
    return [Arrival(at_s) for at_s in draw_times(load, scenario.duration_s, rng)]


def draw_times(load: RateLoad, duration_s: float, rng: np.random.Generator) -> list[float]:
    """Arrivals before `duration_s`: gaps of mean 1 in a time that runs as fast as the rate."""
    curve = _Curve(load, duration_s)
    times: list[float] = []
    passed = 0.0
    while True:
        for gap in _gaps(load, rng):
            passed += gap
            if passed >= curve.total:
                return times
            times.append(curve.time_of(passed))


def _gaps(load: RateLoad, rng: np.random.Generator) -> list[float]:
    if load.arrivals == "constant":
        return [1.0] * 1_024
    shape = 1 / load.cv**2 if load.arrivals == "gamma" else 1.0
    return [float(gap) for gap in rng.gamma(shape, 1 / shape, 1_024)]


class _Curve:
    """Arrivals that are expected until a time, and back."""

    def __init__(self, load: RateLoad, duration_s: float) -> None:
        corners = [(p.at_s, p.per_s) for p in load.rate]
        inner = [(at_s, rate) for at_s, rate in corners if 0 < at_s < duration_s]
        ends = [(at_s, _rate_at(corners, at_s)) for at_s in (0.0, duration_s)]
        self._corners = [ends[0], *inner, ends[1]]
        pieces = [
            (after[0] - before[0]) * (before[1] + after[1]) / 2
            for before, after in pairwise(self._corners)
        ]
        self._reached = list(accumulate(pieces, initial=0.0))
        self.total = self._reached[-1]

    def time_of(self, expected: float) -> float:
        """When so many are expected; less than the total."""
        place = bisect_right(self._reached, expected) - 1
        (start_s, rate), (end_s, end_rate) = self._corners[place], self._corners[place + 1]
        rest, slope = expected - self._reached[place], (end_rate - rate) / (end_s - start_s)
        root = math.sqrt(rate * rate + 2 * slope * rest)
        return start_s + min(end_s - start_s, 2 * rest / (rate + root))


def _rate_at(corners: Sequence[tuple[float, float]], at_s: float) -> float:
    times, rates = zip(*corners, strict=True)
    rate: np.float64 = np.interp(at_s, times, rates)
    return float(rate)
