"""A linear layer in the native kernels, for models that they do not run as a whole."""

from __future__ import annotations

import ctypes
from functools import lru_cache

import torch

from engine.native.build import NativeUnavailableError, native_library
from engine.native.packing import pack, padded

DTYPES = (torch.bfloat16, torch.float32)
"""Of weights and KV in the native kernels."""


class NativeLinear:
    """Rows times a packed weight of bfloat16 or float32, summed in float32. A row's bits do not
    depend on the other rows."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """
        weight  # [out_features, in_features]
        """
        self._library, _ = native_library()
        self._dtype = weight.dtype
        self._out_features = len(weight)
        self._packed = pack(weight, bias)
        self._padded_out = padded(self._out_features, self._library.paceline_panel_width())

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[..., in_features] -> [..., out_features], both in the weight's dtype"""
        x = rows.float().contiguous()
        y = torch.empty(*rows.shape[:-1], self._padded_out)
        self._library.paceline_product(
            ctypes.c_int64(self._dtype == torch.bfloat16),
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
    for dtype in (torch.bfloat16, torch.float32):
        weight = torch.randn(70, 50, generator=generator).to(dtype)
        rows = torch.randn(17, 50, generator=generator).to(dtype)
        expected = (rows.double() @ weight.double().T).to(dtype)
        if not torch.allclose(NativeLinear(weight, None)(rows), expected, rtol=1e-2, atol=1e-2):
            raise NativeUnavailableError("the compiled kernels give wrong products on this CPU")
