"""Matrices in whole numbers."""

from __future__ import annotations

import torch

from engine.int8 import quantized


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
