"""Matrices in the layout of kernels/vectors.h."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch

from engine.native.build import native_library
from engine.native.structures import ELEMENT_TYPES, Matrix


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight [out, in] and its bias, packed."""

    matrix: Matrix
    tensors: list[torch.Tensor]
    """The memory that the matrix points to; to be kept as long as it is used."""


def pack(
    weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
) -> Packed:
    """Pack a weight of bfloat16 or float32, or of int8.

    weight  # [out, in]
    scale   # [out] float32, of int8 alone: what a whole number of a row stands for
    """
    library, _ = native_library()
    num_out, num_in = weight.shape
    weight = weight.contiguous()
    weight_type = ctypes.c_int64(ELEMENT_TYPES[weight.dtype])
    shape = ctypes.c_int64(num_out), ctypes.c_int64(num_in)
    library.paceline_packed_bytes.restype = ctypes.c_int64
    panels = torch.empty(library.paceline_packed_bytes(weight_type, *shape), dtype=torch.uint8)
    library.paceline_pack(
        weight_type, ctypes.c_void_p(weight.data_ptr()), *shape, ctypes.c_void_p(panels.data_ptr())
    )
    tensors = [panels]
    matrix = Matrix(panels=panels.data_ptr(), num_in=num_in, out=num_out)
    for name, vector in (("scale", scale), ("bias", bias)):
        if vector is not None:
            tensors.append(filled_up(vector))
            setattr(matrix, name, tensors[-1].data_ptr())
    return Packed(matrix, tensors)


def filled_up(values: torch.Tensor) -> torch.Tensor:
    """A vector in float32, with zeros up to whole panels."""
    width = native_library()[0].paceline_panel_width()
    padding = padded(len(values), width) - len(values)
    return torch.nn.functional.pad(values.float(), (0, padding))


def padded(n: int, unit: int) -> int:
    """The smallest multiple of `unit` that is not below n."""
    return -(-n // unit) * unit
