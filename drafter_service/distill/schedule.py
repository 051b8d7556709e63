"""What a training step does, as a function of how far the training is."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

_WARM_UP_SHARE = 0.02
_COOL_DOWN_SHARE = 0.35
_PEAK_RATE = 8e-4
_FIRST_WRITTEN_SHARE = 0.2
_ALL_WRITTEN_AT = 0.5
_VARIATION_FROM = 0.3
_VARIATION_WEIGHT = 2.0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Progress runs from 0 to 1."""

    num_tokens: int
    """That the target writes."""
    num_passes: float
    """How often each of them is learned, on average."""

    @property
    def num_learned(self) -> int:
        """Tokens of the whole training, a token that is learned twice counted twice."""
        return math.ceil(self.num_tokens * self.num_passes)

    def num_written(self, progress: float) -> int:
        """Tokens that must be written by now: the first half of the training sees the corpus
        grow, so that there is something to see early."""
        grown = _FIRST_WRITTEN_SHARE + (1.0 - _FIRST_WRITTEN_SHARE) * progress / _ALL_WRITTEN_AT
        return math.ceil(self.num_tokens * min(1.0, grown))

    def learning_rate(self, progress: float) -> float:
        """Up, level, and down to nearly nothing: a training may be cut short by less passes."""
        up = progress / _WARM_UP_SHARE
        down = (1.0 - progress) / _COOL_DOWN_SHARE
        return _PEAK_RATE * max(0.02, min(1.0, up, down))

    def variation_weight(self, progress: float) -> float:
        """Of total variation beside cross entropy: that is what decides acceptance, and it teaches
        little while student and target hardly overlap."""
        return _VARIATION_WEIGHT if progress >= _VARIATION_FROM else 0.0


def choose_lessons(
    rng: random.Random, lengths: Sequence[int], num_uses: Sequence[int], batch_tokens: int
) -> list[int]:
    """Indices of lessons for one step: of those used least often any, up to `batch_tokens` tokens,
    but one at least.

    lengths   # of each lesson, tokens
    num_uses  # of each lesson
    """
    order = sorted(range(len(lengths)), key=lambda index: (num_uses[index], rng.random()))
    chosen: list[int] = []
    room = batch_tokens
    for index in order:
        room -= lengths[index]
        if chosen and room < 0:
            break
        chosen.append(index)
    return chosen
