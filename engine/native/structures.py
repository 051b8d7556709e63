"""The structures of kernels/model.h, field for field."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_float, c_int64, c_void_p
from typing import ClassVar

import torch

ELEMENT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
"""By dtype."""


class Matrix(Structure):
    """A packed weight."""

    _fields_: ClassVar = [
        ("panels", c_void_p),
        ("scale", c_void_p),
        ("bias", c_void_p),
        ("num_in", c_int64),
        ("out", c_int64),
    ]


class Layer(Structure):
    """Weights and KV of one layer."""

    NORMS = (
        "attention_norm",
        "q_norm",
        "k_norm",
        "post_attention_norm",
        "mlp_norm",
        "post_mlp_norm",
    )
    _fields_: ClassVar = [
        *((name, Matrix) for name in ("qkv", "o", "gate_up", "down")),
        *((name, c_void_p) for name in NORMS),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("window", c_int64),
        ("keys", c_void_p),
        ("values", c_void_p),
    ]


_MODEL_SIZES = (
    "weight_type",
    "type",
    "num_layers",
    "hidden",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "intermediate",
    "is_gelu",
    "block_size",
    "num_threads",
)


class Model(Structure):
    """A whole model."""

    _fields_: ClassVar = [
        *((name, c_int64) for name in _MODEL_SIZES),
        *((name, c_float) for name in ("eps", "attention_scaling", "embedding_scale")),
        ("layers", POINTER(Layer)),
        ("final_norm", c_void_p),
        ("embedding", c_void_p),
        ("head", Matrix),
    ]


class Span(Structure):
    """Consecutive rows of one sequence."""

    _fields_: ClassVar = [
        ("first_row", c_int64),
        ("start", c_int64),
        ("num_rows", c_int64),
        ("block_table", c_void_p),
    ]


class Step(Structure):
    """One forward."""

    _fields_: ClassVar = [
        ("num_rows", c_int64),
        ("num_spans", c_int64),
        ("num_logits", c_int64),
        ("token_ids", c_void_p),
        ("spans", POINTER(Span)),
        ("logit_rows", c_void_p),
        ("logits", c_void_p),
        ("workspace", c_void_p),
    ]
