"""When the requests of an open load are sent, and how long they are. Pure functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.loadtest.profile import OpenLoad, ReplayLoad


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of an open load."""

    offset_s: float
    """Since the start of its level."""
    prompt_tokens: int | None = None
    """None: the prompt's own length."""
    output_tokens: int | None = None
    """None: drawn with the prompt."""


def draw_arrivals(load: OpenLoad, rate: float, seed: Sequence[int]) -> tuple[Arrival, ...]:
    """Arrivals within `load.duration_s` at `rate` per second on average.

    Gaps are independent, of mean 1/rate. The first one precedes the first arrival, so that nothing
    is due at time 0.
    """
    generator = np.random.default_rng(seed)
    offsets: list[float] = []
    now_s = 0.0
    while True:
        for gap in _gaps(load, generator, 1_024) / rate:
            now_s += float(gap)
            if now_s >= load.duration_s:
                return tuple(map(Arrival, offsets))
            offsets.append(now_s)


def _gaps(load: OpenLoad, generator: np.random.Generator, count: int) -> np.ndarray:
    """Of mean 1."""
    if load.arrivals == "constant":
        return np.ones(count)
    shape = 1 / load.cv**2 if load.arrivals == "gamma" else 1.0
    return generator.gamma(shape, 1 / shape, count)


def replay_arrivals(
    trace: Sequence[Arrival], load: ReplayLoad, speed: float
) -> tuple[Arrival, ...]:
    """The part of a trace that `load` names, in the test's time, with its scaled lengths."""
    moved = (replace(row, offset_s=(row.offset_s - load.start_s) / speed) for row in trace)
    return tuple(
        Arrival(
            row.offset_s,
            _scaled(row.prompt_tokens, load.length_scale, load.max_prompt_tokens),
            _scaled(row.output_tokens, load.length_scale, load.max_output_tokens),
        )
        for row in moved
        if 0 <= row.offset_s < load.duration_s
    )


def _scaled(length: int | None, factor: float, most: int) -> int | None:
    return None if length is None else min(most, max(1, round(length * factor)))
