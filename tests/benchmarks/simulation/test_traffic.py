"""Arrivals and what can be foreseen of texts."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from benchmarks.simulation.drafting import DraftSession, SimulatedSpeculation
from benchmarks.simulation.production import Path as Way
from benchmarks.simulation.scenario import Kind, RateLoad
from benchmarks.simulation.traffic import draw_times, make_patterns, make_requests
from tests.benchmarks.simulation.scenarios import tiny


def test_arrivals_follow_the_rate_curve() -> None:
    load = RateLoad.model_validate(
        {
            "kind": "rate",
            "rate": [
                {"at_s": 0, "per_s": 10},
                {"at_s": 100, "per_s": 10},
                {"at_s": 200, "per_s": 100},
                {"at_s": 300, "per_s": 0},
            ],
        }
    )
    times = draw_times(load, 400.0, np.random.default_rng(1))
    counts, _ = np.histogram(times, bins=[0, 100, 200, 300, 400])
    assert counts[:3] == pytest.approx([1_000, 5_500, 5_000], rel=0.08)
    assert counts[3] == 0
    assert times == sorted(times)


def test_constant_arrivals_are_even_and_gamma_ones_are_not() -> None:
    def gaps(**law: object) -> list[float]:
        content = {"kind": "rate", "rate": [{"at_s": 0, "per_s": 50}], **law}
        times = draw_times(RateLoad.model_validate(content), 200.0, np.random.default_rng(1))
        return [after - before for before, after in pairwise(times)]

    assert gaps(arrivals="constant") == pytest.approx([0.02] * 9_998)
    spread = gaps(arrivals="gamma", cv=3)
    assert np.std(spread) / np.mean(spread) == pytest.approx(3, rel=0.1)


def test_patterns_are_accepted_as_the_kind_says() -> None:
    patterns = make_patterns(Kind(acceptance=(0.8, 0.6, 0.5), spread=0.4), (1,))
    for position, wanted in enumerate((0.8, 0.6, 0.5, 0.5)):
        reached = [p for p in patterns if p.num_right >= position]
        right = [p for p in reached if p.num_right > position]
        assert len(right) / len(reached) == pytest.approx(wanted, abs=0.06)


def test_confidences_are_true() -> None:
    patterns = make_patterns(Kind(acceptance=(0.6,), spread=0.6), (1,))
    sure = [p for p in patterns if p.confidences[0] > 0.8]
    unsure = [p for p in patterns if p.confidences[0] < 0.4]
    for some in (sure, unsure):
        said = np.mean([p.confidences[0] for p in some])
        assert np.mean([p.num_right > 0 for p in some]) == pytest.approx(said, abs=0.05)


def test_a_trace_is_replayed_with_its_times_and_lengths(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.gz"
    rows = [
        {"timestamp": 1_000 * i, "input_length": 10 + i, "output_length": 5 + i} for i in range(5)
    ]
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, rows)).encode()))
    load = {"kind": "trace", "trace": path, "speed": 2, "max_prompt_tokens": 64}
    scenario = tiny(load={**load, "max_output_tokens": 64})
    told = [(r.arrival_s, r.prompt_tokens, r.output_tokens) for r in make_requests(scenario)]
    assert told == [(0.5 * i, 10 + i, 5 + i) for i in range(5)]


def test_a_chain_is_used_as_far_as_the_text_went_along() -> None:
    request = make_requests(tiny())[0]
    start = next(i for i in range(200) if 2 <= request.pattern(i).num_right <= 6)
    pattern = request.pattern(start)
    speculation = SimulatedSpeculation(4, Way.SPECULATIVE, tip=start, anchor=start)
    speculation.insert(start, pattern, 8)
    assert speculation.num_at_hand == 8
    assert len(speculation.chain(16)) == 4  # No more than its depth.

    speculation.commit(pattern.num_right)
    assert speculation.num_at_hand == 8 - pattern.num_right
    speculation.commit(1)  # The first wrong draft: the text goes another way.
    assert speculation.num_at_hand == 0
    speculation.insert(start, pattern, 9)  # Comes too late.
    assert speculation.num_at_hand == 0


def test_a_drafter_lengthens_the_chain_that_was_right_and_begins_another_else() -> None:
    request = make_requests(tiny())[0]
    start = next(i for i in range(200) if 2 <= request.pattern(i).num_right <= 3)
    pattern = request.pattern(start)
    speculation = SimulatedSpeculation(4, Way.SPECULATIVE)
    session = DraftSession(request, speculation, verifier=0, wanted=4, unread_tokens=0)
    session.told_tip = start
    assert session.catch_up() == 4
    session.length += 4
    session.told_tip += pattern.num_right
    assert session.catch_up() == pattern.num_right
    session.length += pattern.num_right
    session.told_tip += 1
    assert session.catch_up() == 4
    assert session.anchor == session.told_tip
