"""What the comparison says of machines and measurements that are known."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.envelope_prediction import MODES, accepted_per_step, chance_of, compare

FLAT = {"1": 40.0, "32": 40.0, "128": 40.0}
DRAFTER = {"step_ms": {"0": {"1": 0.01, "32": 0.01}}}


def profile(table: dict[str, float]) -> dict[str, Any]:
    return {"step_ms": {"0": table, "256": table}, "prompt_share": 1.0}


def envelope(
    drafter: str, concurrency: int, accepted_per_step: float, table: dict[str, float] = FLAT
) -> dict[str, Any]:
    accepted = [accepted_per_step] * 2 * concurrency
    run = {"tokens_per_s": 25.0, "accepted_per_step": accepted, "prompt_tokens": 8.0}
    runs = {mode: [run] for mode in MODES}
    cell = {"kind": "chat", "drafter": drafter, "concurrency": concurrency, "runs": runs}
    return {
        "num_tokens": 96,
        "num_texts": {"chat": 2},
        "cells": [cell],
        "profiles": [profile(table)] * 2,
    }


@pytest.mark.parametrize("depth", [1, 8])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_the_chance_is_found_again(chance: float, depth: int) -> None:
    accepted = sum(chance**position for position in range(1, depth + 1))
    assert chance_of(accepted, depth) == pytest.approx(chance, abs=1e-6)


def test_each_text_has_the_acceptance_that_it_had_among_fewest() -> None:
    measured = envelope("model", 4, 0.5)
    measured["num_texts"]["chat"] = 3
    measured["cells"] += envelope("model", 1, 2.0)["cells"]
    assert accepted_per_step(measured) == {("chat", "model"): [2.0, 2.0, 0.5]}


def test_the_clock_runs_from_the_first_answer_s_end_until_a_client_finds_none_left() -> None:
    """Two texts twice, of 96 tokens but for the first one of 48; one text takes a fifth of the
    steps. So 10 steps pass before the clock, 19 bring five tokens and one, 67 bring two; then who
    began with the other text is through."""
    measured = envelope("model", 2, 4.0)
    measured["cells"][0]["runs"]["on"][0]["accepted_per_step"] = [4.0, 0.0, 4.0, 0.0]
    foretold = {mode: speed for _, mode, _, speed in compare(DRAFTER, measured)}
    tokens_per_step = (19.2 * 6 + 67.2 * 2) / 86.4
    assert foretold["off"] == pytest.approx(2 * 25.0, rel=0.03)
    assert foretold["on"] == pytest.approx(tokens_per_step * 25.0, rel=0.1)


@pytest.mark.parametrize("concurrency", [1, 4])
def test_on_a_flat_table_speed_is_tokens_over_steps(concurrency: int) -> None:
    rows = compare(DRAFTER, envelope("model", concurrency, 1.5))
    foretold = {mode: speed for _, mode, _, speed in rows}
    assert foretold["off"] == pytest.approx(concurrency * 25.0, rel=0.03)
    # The last answer is that with the least luck.
    assert 0.7 < foretold["on"] / (concurrency * 25.0 * 2.5) < 1.15
    assert foretold["auto"] == pytest.approx(foretold["on"], rel=0.1)


def test_what_one_client_s_steps_take_beyond_forwards_is_told() -> None:
    slower = envelope("model", 1, 1.5)
    slower["cells"][0]["runs"]["off"][0]["tokens_per_s"] = 20.0
    slower["cells"] += envelope("model", 4, 1.5)["cells"]
    foretold = {(name, mode): speed for name, mode, _, speed in compare(DRAFTER, slower)}
    assert foretold["chat, model, 1", "off"] == pytest.approx(20.0, rel=0.03)
    assert foretold["chat, model, 4", "off"] == pytest.approx(4 * 20.0, rel=0.03)


def test_where_every_row_costs_a_step_drafts_bring_nothing() -> None:
    steep = {"1": 40.0, "2": 80.0, "128": 5120.0}
    rows = compare(DRAFTER, envelope("suffix", 4, 0.2, steep))
    foretold = {mode: speed for _, mode, _, speed in rows}
    assert foretold["auto"] == pytest.approx(foretold["off"], rel=0.05)
