"""Percentiles, intervals and ratios: against hand-made figures, numpy, and plain resampling."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.loadtest import statistics
from benchmarks.loadtest.statistics import (
    distribution,
    ratio_of_means,
    ratio_of_percentiles,
    resampled_percentile,
    share,
)


def test_percentiles_by_hand() -> None:
    found = distribution([float(value) for value in range(1, 101)][::-1])
    assert found is not None
    assert (found.count, found.mean, found.max) == (100, 50.5, 100.0)
    assert found.p50.value == 50.5
    assert found.p90.value == pytest.approx(90.1)
    assert found.p99.value == pytest.approx(99.01)
    assert found.p50.low < 50.5 < found.p50.high


def test_of_nothing_there_is_nothing() -> None:
    assert distribution([]) is None
    assert statistics.mean([]) is None
    assert share(0, 0) is None
    assert ratio_of_means([1.0], []) is None
    assert ratio_of_means([1.0], [0.0]) is None
    assert ratio_of_percentiles([], [1.0], 50) is None


def test_one_value_is_its_own_interval() -> None:
    found = distribution([3.0])
    assert found is not None
    assert (found.p99.low, found.p99.value, found.p99.high) == (3.0, 3.0, 3.0)


def test_the_short_way_to_a_percentile_has_the_law_of_resampling() -> None:
    generator = np.random.default_rng(3)
    sample = np.sort(generator.gamma(2, 10, 400))
    drawn = sample[generator.integers(0, 400, (4_000, 400))]
    for percentile in (50, 95):
        plain = np.percentile(np.percentile(drawn, percentile, axis=1), (2.5, 97.5))
        short = np.percentile(resampled_percentile(sample, percentile), (2.5, 97.5))
        assert short == pytest.approx(plain, rel=0.05)


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    generator = np.random.default_rng(5)
    held = 0
    for _ in range(200):
        found = distribution(list(generator.exponential(1.0, 150)))
        assert found is not None
        held += found.p50.low <= np.log(2) <= found.p50.high
    assert 0.9 <= held / 200 <= 0.99


def test_shares_have_wilson_intervals() -> None:
    found = share(8, 10)
    assert found is not None
    assert found.value == 0.8
    assert (found.low, found.high) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    all_of_them = share(10, 10)
    assert all_of_them is not None
    assert all_of_them.low == pytest.approx(0.7225, abs=1e-3)
    assert all_of_them.high == pytest.approx(1.0)


def test_ratios() -> None:
    generator = np.random.default_rng(1)
    slow, fast = generator.normal(100, 5, 300), generator.normal(200, 5, 300)
    for found in (
        ratio_of_means(list(fast), list(slow)),
        ratio_of_percentiles(list(fast), list(slow), 50),
    ):
        assert found is not None
        assert found.value == pytest.approx(2.0, rel=0.02)
        assert found.low < found.value < found.high
        assert found.high - found.low < 0.1
    same = ratio_of_percentiles(list(slow), list(slow[::-1]), 95)
    assert same is not None
    assert same.low < 1.0 < same.high
