"""What the envelope says of figures that are known."""

from __future__ import annotations

import pytest

from benchmarks.envelope import Cell, Run, answer_tokens, print_envelope


def cell(off: list[float], on: list[float], auto: list[float], concurrency: int = 1) -> Cell:
    made = Cell("chat", "suffix", concurrency)
    for mode, speeds in (("off", off), ("on", on), ("auto", auto)):
        made.runs[mode] += [Run(speed, float(mode == "off")) for speed in speeds]
    return made


def test_auto_is_compared_with_the_better_of_the_others() -> None:
    assert cell([10.0] * 3, [20.0] * 3, [19.0] * 3).ratio == pytest.approx(0.95)
    assert cell([20.0] * 3, [10.0] * 3, [19.0] * 3).ratio == pytest.approx(0.95)


def test_the_bound_is_lower_the_more_rounds_differ() -> None:
    steady = cell([20.0] * 4, [10.0] * 4, [19.0] * 4)
    shaken = cell([20.0] * 4, [10.0] * 4, [15.0, 23.0, 17.0, 21.0])
    assert steady.bound == steady.ratio
    assert shaken.bound < shaken.ratio == pytest.approx(0.95)


def test_the_bound_takes_rounds_whole() -> None:
    """What slows a whole round down says nothing of auto."""
    slow_rounds = cell([20.0, 10.0] * 4, [10.0, 5.0] * 4, [19.0, 9.5] * 4)
    assert slow_rounds.bound == pytest.approx(slow_rounds.ratio)


def test_the_table_names_the_mean_and_the_lowest_bound(capsys) -> None:
    print_envelope([cell([10.0], [10.0], [8.0]), cell([10.0], [10.0], [12.5], concurrency=32)])
    shown = capsys.readouterr().out
    assert "geometric mean 1.000" in shown
    assert "lowest bound 0.800 in chat, suffix, 1" in shown


def test_first_answers_end_one_after_the_other() -> None:
    lengths = [answer_tokens(index, 4, 64) for index in range(12)]
    assert lengths == [16, 32, 48, 64, *[64] * 8]
    assert [answer_tokens(index, 1, 64) for index in range(3)] == [64] * 3
