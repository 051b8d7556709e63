"""Percentiles, intervals and ratios. All intervals hold 95 %, by bootstrap from a fixed seed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cluster.config import Section

PERCENTILES = (50, 90, 95, 99)
RESAMPLES = 1_000
LOW, HIGH = 2.5, 97.5
Z_95 = 1.959964

Values = NDArray[np.float64]


class Estimate(Section):
    """A figure and its 95 % interval."""

    value: float
    low: float
    high: float


class Distribution(Section):
    """Of a latency in milliseconds, over requests or over gaps between chunks."""

    count: int
    mean: float
    p50: Estimate
    p90: Estimate
    p95: Estimate
    p99: Estimate
    max: float


def distribution(values: Sequence[float]) -> Distribution | None:
    """None of nothing."""
    if not values:
        return None
    sample = np.sort(np.asarray(values, dtype=np.float64))
    estimates = {
        f"p{percentile}": _estimate(
            float(np.percentile(sample, percentile)), resampled_percentile(sample, percentile)
        )
        for percentile in PERCENTILES
    }
    return Distribution(
        count=len(values), mean=float(sample.mean()), max=float(sample[-1]), **estimates
    )


def resampled_percentile(ordered: Values, percentile: float, seed: int = 0) -> Values:
    """That percentile of RESAMPLES samples drawn with replacement.

    Of n draws the k-th smallest has the rank that the k-th smallest of n uniform numbers has, which
    is beta distributed. So no sample need be drawn, however large n is.

    Args:
        ordered: The sample, ascending.
    """
    count = len(ordered)
    rank = min(count, max(1, math.ceil(percentile / 100 * count)))
    uniform = np.random.default_rng(seed).beta(rank, count - rank + 1, RESAMPLES)
    picked: Values = ordered[np.minimum(count - 1, (uniform * count).astype(np.int64))]
    return picked


def resampled_mean(sample: Values, seed: int = 0) -> Values:
    """The mean of RESAMPLES samples drawn with replacement."""
    generator = np.random.default_rng(seed)
    drawn = generator.integers(0, len(sample), (RESAMPLES, len(sample)))
    means: Values = sample[drawn].mean(axis=1)
    return means


def _estimate(value: float, resampled: Values) -> Estimate:
    low, high = np.percentile(resampled, (LOW, HIGH))
    return Estimate(value=value, low=float(low), high=float(high))


def percentile(values: Sequence[float], which: float) -> Estimate | None:
    """One percentile; None of nothing."""
    if not values:
        return None
    sample = np.sort(np.asarray(values, dtype=np.float64))
    return _estimate(float(np.percentile(sample, which)), resampled_percentile(sample, which))


def mean(values: Sequence[float]) -> Estimate | None:
    """None of nothing."""
    if not values:
        return None
    sample = np.asarray(values, dtype=np.float64)
    return _estimate(float(sample.mean()), resampled_mean(sample))


def share(count: int, total: int) -> Estimate | None:
    """Of successes, with Wilson's interval."""
    if total == 0:
        return None
    rate, z2 = count / total, Z_95**2
    centre = (rate + z2 / (2 * total)) / (1 + z2 / total)
    spread = rate * (1 - rate) / total + z2 / (4 * total**2)
    half = Z_95 * math.sqrt(spread) / (1 + z2 / total)
    return Estimate(value=rate, low=max(0.0, centre - half), high=min(1.0, centre + half))


def ratio_of_means(values: Sequence[float], others: Sequence[float]) -> Estimate | None:
    """Mean of `values` over mean of `others`, which is independent. None where there is none."""
    if not values or not others or not any(others):
        return None
    above, below = np.asarray(values, np.float64), np.asarray(others, np.float64)
    return _ratio(
        float(above.mean() / below.mean()), resampled_mean(above, 1), resampled_mean(below, 2)
    )


def ratio_of_percentiles(
    values: Sequence[float], others: Sequence[float], which: float
) -> Estimate | None:
    """The same of a percentile."""
    if not values or not others:
        return None
    above, below = np.sort(np.asarray(values)), np.sort(np.asarray(others))
    divisor = float(np.percentile(below, which))
    if divisor == 0:
        return None
    return _ratio(
        float(np.percentile(above, which)) / divisor,
        resampled_percentile(above, which, 1),
        resampled_percentile(below, which, 2),
    )


def _ratio(value: float, above: Values, below: Values) -> Estimate:
    kept = below > 0
    return _estimate(value, above[kept] / below[kept])
