"""What is done to rows between products: row by row on a CPU, and the same when compiled."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

from engine.attention import ShapeProbe
from engine.models.fused_rows import fused_kernels
from engine.models.layers import (
    EAGER,
    DecoderLayers,
    gate,
    norm_and_rotate,
    plain_product,
    rms_norm,
    rope_angles,
)
from engine.models.spec import Activation, Rope
from tests.support.decoders import read_model

DTYPES = (torch.float32, torch.bfloat16)
NUM_ROWS, NUM_HEADS, HEAD_DIM = 40, 3, 14
ROPE = Rope(torch.logspace(0, -3, HEAD_DIM // 2), 1.1)


def draw(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(0)).to(dtype)


def rotated(heads: torch.Tensor) -> torch.Tensor:
    weight = draw(NUM_HEADS, HEAD_DIM)
    positions = torch.arange(len(heads)) * 0 + 17
    return norm_and_rotate(heads, weight, 1e-6, rope_angles(ROPE, positions))


FUNCTIONS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], tuple[int, ...]]] = {
    "norm": (lambda rows: rms_norm(rows, draw(77), 1e-6), (77,)),
    "rotate": (rotated, (NUM_HEADS, HEAD_DIM)),
    "silu": (lambda rows: gate(rows, Activation.SILU), (2 * 77,)),
    "gelu": (lambda rows: gate(rows, Activation.GELU_TANH), (2 * 77,)),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_row_does_not_depend_on_the_others(name: str, dtype: torch.dtype) -> None:
    """Of sizes that no vector register divides."""
    function, sizes = FUNCTIONS[name]
    rows = draw(NUM_ROWS, *sizes, dtype=dtype)
    expected = function(rows)
    for num_rows in (1, 2, 3, 7, 13):
        parts = [function(part.clone()) for part in torch.split(rows, num_rows)]
        assert torch.equal(torch.cat(parts), expected)


def test_activations_are_torchs() -> None:
    gates, ups = draw(NUM_ROWS, 2 * 77).mul(4).chunk(2, -1)
    both = torch.cat([gates, ups], -1)
    torch.testing.assert_close(gate(both, Activation.SILU), functional.silu(gates) * ups)
    gelu = functional.gelu(gates, approximate="tanh")
    torch.testing.assert_close(gate(both, Activation.GELU_TANH), gelu * ups)
    huge = torch.tensor([[-200.0, 1.0]])
    assert gate(huge, Activation.SILU).abs().item() == 0.0


def test_the_scale_of_embeddings_is_rounded_as_transformers_rounds_it(
    family_folders: dict[str, Path],
) -> None:
    spec, weights = read_model(family_folders["gemma"], torch.bfloat16)
    scaled = GemmaTextScaledWordEmbedding(1, 1, None, 48**0.5).requires_grad_(False)
    scaled.weight = torch.nn.Parameter(weights.embedding, requires_grad=False)
    layers = DecoderLayers(
        dataclasses.replace(spec, layers=(), embedding_scale=48**0.5),
        dataclasses.replace(weights, layers=()),
        plain_product,
    )
    token_ids, no_step = torch.arange(40), ShapeProbe()
    assert torch.equal(layers.hidden(token_ids, token_ids, no_step), scaled(token_ids))


# --- compiled ---------------------------------------------------------------------------------


def test_compiled_kernels_are_whole_graphs_and_give_the_same(
    family_folders: dict[str, Path],
) -> None:
    spec, weights = read_model(family_folders["gemma3"])
    kernels = fused_kernels(spec, weights, backend="eager")
    assert kernels is not EAGER
    rows = draw(5, spec.hidden_size)
    args = weights.final_norm, spec.rms_norm_eps
    torch.testing.assert_close(kernels.norm(rows, *args), EAGER.norm(rows, *args))
    both = draw(5, 2 * spec.intermediate_size)
    torch.testing.assert_close(
        kernels.gated(both, spec.activation), EAGER.gated(both, spec.activation)
    )


def test_without_a_compiler_rows_are_computed_eagerly(
    family_folders: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C compiler")

    spec, weights = read_model(family_folders["llama"])
    with caplog.at_level(logging.WARNING):
        assert fused_kernels(spec, weights, backend=no_compiler) is EAGER
    assert "not fused" in caplog.text
    assert "no C compiler" in caplog.text
