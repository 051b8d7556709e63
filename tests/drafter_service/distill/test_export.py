"""Which tokens a student can say."""

from __future__ import annotations

import torch

from drafter_service.distill.lesson import Lesson
from drafter_service.distill.vocabulary import frequent_tokens


def test_the_tokens_with_most_probability_are_kept() -> None:
    lesson = Lesson(
        token_ids=torch.zeros(3, dtype=torch.int32),
        num_context=1,
        top_ids=torch.tensor([[8, 3], [5, 8]], dtype=torch.int32),
        top_log_probs=torch.tensor([[0.5, 0.2], [0.4, 0.3]]).log().half(),
    )
    assert frequent_tokens([lesson], 10, 2).tolist() == [5, 8]
    assert frequent_tokens([lesson], 10, 5).tolist() == [0, 1, 3, 5, 8]  # The lowest ids beside.
    assert frequent_tokens([lesson], 10, 99).tolist() == list(range(10))
