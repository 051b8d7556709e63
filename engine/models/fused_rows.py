"""The row-wise parts of a decoder, each compiled into one GPU kernel."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch

from engine.models.layers import EAGER, RowKernels, rope_angles
from engine.models.spec import DecoderSpec, DecoderWeights, Rope

logger = logging.getLogger(__name__)

_PROBED_ROWS = (1, 3)
"""One row is compiled by itself, any other number once."""


def fused_kernels(
    spec: DecoderSpec, weights: DecoderWeights, backend: str | Callable[..., Any] = "inductor"
) -> RowKernels:
    """Compiled, and run once in every form this model needs; eager where there is no compiler.

    `backend` of torch.compile. Needs Triton and a C compiler on a GPU, and takes seconds.
    """
    kernels = RowKernels(
        *(
            torch.compile(function, dynamic=True, fullgraph=True, backend=backend)
            for function in (EAGER.norm, EAGER.normed_rotated, EAGER.gated)
        )
    )
    try:
        for num_rows in _PROBED_ROWS:
            _run(kernels, spec, weights, num_rows)
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split("\n")[:2])
        logger.warning("norms and activations are not fused, which makes steps longer: %s", reason)
        return EAGER
    return kernels


@torch.inference_mode()
def _run(kernels: RowKernels, spec: DecoderSpec, weights: DecoderWeights, num_rows: int) -> None:
    embedding = weights.embedding
    num_turned = spec.num_heads + spec.num_kv_heads
    qkv = embedding.new_zeros(num_rows, num_turned + spec.num_kv_heads, spec.head_dim)
    positions = torch.arange(num_rows, dtype=torch.int32, device=embedding.device)
    has_norm = weights.layers[0].q_norm is not None
    norm = torch.ones(num_turned, spec.head_dim, device=embedding.device) if has_norm else None
    kernels.norm(embedding[:num_rows], weights.final_norm, spec.rms_norm_eps)
    ropes = [Rope(rope.inv_freq.to(embedding.device), rope.factor) for rope in spec.ropes]
    for index in {layer.rope for layer in spec.layers}:
        angles = None if index is None else rope_angles(ropes[index], positions)
        kernels.normed_rotated(qkv[:, :num_turned], norm, spec.rms_norm_eps, angles)
    kernels.gated(embedding.new_zeros(num_rows, 2 * spec.intermediate_size), spec.activation)
