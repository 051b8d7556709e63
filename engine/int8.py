"""Matrices in whole numbers."""

from __future__ import annotations

import torch

_LARGEST = 127


def quantized(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest int8 and the scales of the rows.

    matrix   # [rows, columns] float
    returns  # [rows, columns] int8, [rows] float32
    """
    matrix = matrix.float()
    scales = (matrix.abs().amax(dim=1) / _LARGEST).clamp_(min=torch.finfo(torch.float32).tiny)
    return (matrix / scales[:, None]).round().to(torch.int8), scales
