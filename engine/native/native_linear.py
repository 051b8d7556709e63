"""A linear layer in the native kernels, for models that they do not run as a whole."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from engine.int8 import quantized
from engine.native.build import NativeUnavailableError, native_library
from engine.native.packing import pack, padded
from engine.native.structures import ELEMENT_TYPES

DTYPES = (torch.bfloat16, torch.float32)
"""Of weights and KV in the native kernels."""


class NativeLinear:
    """Rows times a packed weight, summed in float32, or exactly where the weight is of int8. A
    row's bits do not depend on the other rows."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, scale: torch.Tensor | None = None
    ) -> None:
        """
        weight  # [out_features, in_features] bfloat16 or float32, or int8
        scale   # [out_features] float32, of int8 alone: what a whole number of a row stands for
        """
        self._library, _ = native_library()
        self._weight_type = ELEMENT_TYPES[weight.dtype]
        self._dtype = weight.dtype if scale is None else torch.float32
        self._out_features = len(weight)
        self._packed = pack(weight, bias, scale)
        self._padded_out = padded(self._out_features, self._library.paceline_panel_width())

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], in the weight's dtype, or float32 if that is
        int8"""
        x = rows.to(torch.float32, copy=True).contiguous()  # The kernel rounds them in place.
        y = torch.empty(*rows.shape[:-1], self._padded_out)
        self._library.paceline_product(
            ctypes.c_int64(self._weight_type),
            ctypes.byref(self._packed.matrix),
            ctypes.c_int64(y.numel() // self._padded_out),
            ctypes.c_void_p(x.data_ptr()),
            ctypes.c_void_p(y.data_ptr()),
            ctypes.c_int64(torch.get_num_threads()),
        )
        return y[..., : self._out_features].to(self._dtype)


@lru_cache
def check_kernels() -> None:
    """Raise NativeUnavailableError unless the kernels can be had and multiply rightly here."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(70, 50, generator=generator)
    rows = torch.randn(17, 50, generator=generator)
    linears = [NativeLinear(matrix.to(dtype), None) for dtype in DTYPES]
    if has_int8():
        whole, scale = quantized(matrix)
        linears.append(NativeLinear(whole, None, scale))
    expected = rows.double() @ matrix.double().T
    for linear in linears:
        got = linear(rows).double()
        if not torch.allclose(got, expected, rtol=0.0, atol=0.01 * expected.abs().max().item()):
            raise NativeUnavailableError("the compiled kernels give wrong products on this CPU")


def has_int8() -> bool:
    """Whether the kernels multiply with int8 on this CPU."""
    return bool(native_library()[0].paceline_has_int8())
