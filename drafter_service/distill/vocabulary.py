"""Which tokens a drafter can say: a head over few of them costs little, and misses little."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from drafter_service.distill.lesson import Lesson


def frequent_tokens(lessons: Iterable[Lesson], vocab_size: int, num_tokens: int) -> torch.Tensor:
    """Those that the target gave the most probability to; of equal ones those with lower ids, which
    a tokenizer mostly gives to the more frequent.

    returns  # [num_tokens, or vocab_size if that is less] int64, ascending
    """
    mass = torch.zeros(vocab_size, dtype=torch.float64)
    for lesson in lessons:
        probs = lesson.top_log_probs.double().exp()
        mass.index_add_(0, lesson.top_ids.flatten().long(), probs.flatten())
    order = torch.sort(mass, descending=True, stable=True).indices
    return order[:num_tokens].sort().values
