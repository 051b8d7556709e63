"""Arrivals have the law that the profile names; a replay is exact."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.loadtest.arrivals import Arrival, draw_arrivals, replay_arrivals
from benchmarks.loadtest.profile import OpenLoad, ReplayLoad

LONG_S = 6_000.0


def load(arrivals: str, cv: float = 1.0, duration_s: float = LONG_S) -> OpenLoad:
    return OpenLoad(kind="open", rate=(1.0,), arrivals=arrivals, cv=cv, duration_s=duration_s)


def gaps(arrivals: tuple[Arrival, ...]) -> np.ndarray:
    return np.diff([0.0, *(arrival.offset_s for arrival in arrivals)])


@pytest.mark.parametrize(
    ("law", "cv"), [("poisson", 1.0), ("gamma", 0.3), ("gamma", 1.0), ("gamma", 4.0)]
)
def test_rate_and_variation_of_gaps(law: str, cv: float) -> None:
    drawn = gaps(draw_arrivals(load(law, cv), 5.0, (7,)))
    # The rate over n gaps has a deviation of cv / sqrt(n); at CV 4 that of the CV is largest.
    assert 1 / drawn.mean() == pytest.approx(5.0, rel=5 * cv / len(drawn) ** 0.5)
    assert drawn.std() / drawn.mean() == pytest.approx(cv, rel=0.05)


def test_poisson_gaps_are_exponential() -> None:
    drawn = gaps(draw_arrivals(load("poisson"), 5.0, (7,)))
    for quantile in (0.1, 0.5, 0.9):
        assert np.quantile(drawn, quantile) == pytest.approx(-np.log(1 - quantile) / 5, rel=0.03)


def test_constant_gaps() -> None:
    drawn = draw_arrivals(load("constant", duration_s=2.0), 4.0, (7,))
    assert [arrival.offset_s for arrival in drawn] == [0.25 * n for n in range(1, 8)]


def test_arrivals_follow_from_the_seed_and_stay_within_the_level() -> None:
    first, again, other = (
        draw_arrivals(load("gamma", 3.0), 2.0, seed) for seed in ((1,), (1,), (2,))
    )
    assert first == again
    assert first != other
    assert all(earlier.offset_s <= later.offset_s for earlier, later in pairwise(first))
    assert first[-1].offset_s < LONG_S


TRACE = (Arrival(0.0, 100, 10), Arrival(4.0, 200, 20), Arrival(6.0, 4_000, 1), Arrival(20.0, 8, 8))


def replay(**changes: object) -> ReplayLoad:
    fields = {"kind": "replay", "trace": Path("x.csv"), "duration_s": 100.0, **changes}
    return ReplayLoad.model_validate(fields)


def test_a_replay_is_exact() -> None:
    assert replay_arrivals(TRACE, replay(), 1.0) == TRACE


def test_a_replay_is_faster_and_shorter_as_asked() -> None:
    config = replay(length_scale=0.1, max_prompt_tokens=150, duration_s=4.0)
    assert replay_arrivals(TRACE, config, 2.0) == (
        Arrival(0.0, 10, 1),
        Arrival(2.0, 20, 2),
        Arrival(3.0, 150, 1),
    )


def test_a_replay_begins_where_asked() -> None:
    assert replay_arrivals(TRACE, replay(start_s=4.0), 1.0) == (
        Arrival(0.0, 200, 20),
        Arrival(2.0, 4_000, 1),
        Arrival(16.0, 8, 8),
    )
