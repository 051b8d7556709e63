"""Matrices in the layout of kernels/vectors.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.native.build import native_library
from engine.native.structures import Matrix


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out, in] and its bias, packed."""

    matrix: Matrix
    tensors: list[torch.Tensor]
    """The memory that the matrix points to; to be kept as long as it is used."""


def pack(weight: torch.Tensor, bias: torch.Tensor | None) -> Packed:
    """Pack a weight of bfloat16 or float32."""
    library, _ = native_library()
    num_out, num_in = weight.shape
    weight = weight.contiguous()
    is_bf16 = ctypes.c_int64(weight.dtype == torch.bfloat16)
    shape = ctypes.c_int64(num_out), ctypes.c_int64(num_in)
    library.paceline_packed_bytes.restype = ctypes.c_int64
    panels = torch.empty(library.paceline_packed_bytes(is_bf16, *shape), dtype=torch.uint8)
    library.paceline_pack(
        is_bf16, ctypes.c_void_p(weight.data_ptr()), *shape, ctypes.c_void_p(panels.data_ptr())
    )
    tensors = [panels] if bias is None else [panels, filled_up(bias)]
    matrix = Matrix(
        panels=panels.data_ptr(),
        bias=None if bias is None else tensors[1].data_ptr(),
        num_in=num_in,
        out=num_out,
    )
    return Packed(matrix, tensors)


def filled_up(values: torch.Tensor) -> torch.Tensor:
    """A vector in float32, with zeros up to whole panels."""
    width = native_library()[0].paceline_panel_width()
    padding = padded(len(values), width) - len(values)
    return torch.nn.functional.pad(values.float(), (0, padding))


def padded(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below n."""
    return -(-n // unit) * unit
