"""What of a student goes into the file, and which tokens it can say."""

from __future__ import annotations

import torch

from drafter_service.distill.export import quantized
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.vocabulary import frequent_tokens


def test_a_matrix_is_rounded_to_the_nearest_of_its_row() -> None:
    matrix = torch.randn(
        40, 64, generator=torch.Generator().manual_seed(0)
    ) * 10.0 ** -torch.arange(40.0).clamp(max=20).unsqueeze(1)
    matrix[7] = 0.0
    values, scales = quantized(matrix)
    assert (values.dtype, scales.dtype) == (torch.int8, torch.float32)
    restored = values.float() * scales[:, None]
    assert ((restored - matrix).abs() <= 0.501 * scales[:, None]).all()
    assert not restored[7].any()
    assert (values.abs().amax(1)[torch.arange(40) != 7] == 127).all()


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
