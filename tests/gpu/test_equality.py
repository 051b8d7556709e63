"""Numbers on a GPU: against a CPU, captured against eager, kernel against kernel, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from engine.models.cuda_graphs import GraphCapture
from engine.models.families import decoder_spec
from tests.gpu import equality
from tests.gpu.step_times import attention_ms

pytestmark = pytest.mark.gpu


def test_logits_are_those_of_a_cpu(shallow: Path, device: torch.device) -> None:
    equality.logits_are_those_of_a_cpu(shallow, device)


def test_captured_steps_are_eager_ones(shallow: Path, device: torch.device) -> None:
    same = equality.captured_steps_are_eager_ones(shallow, device, GraphCapture(device))
    print(f"\n{shallow.name}: captured steps are eager ones bit by bit: {same}")


def test_fixed_rows_have_the_same_bits(shallow: Path, device: torch.device) -> None:
    equality.fixed_rows_have_the_same_bits(shallow, device)


@pytest.mark.parametrize("block_size", [16, 256])
def test_attention_kernels(shallow: Path, block_size: int, device: torch.device) -> None:
    """Those present agree with the gathering one; the report says which, and how fast."""
    spec = decoder_spec(AutoConfig.from_pretrained(shallow))
    present, refused = equality.kernels_present(spec, block_size, device)
    for name, reason in refused.items():
        print(f"\nblocks of {block_size}: no {name}: {reason}", end="")
    for name, kernel in present.items():
        for num_rows, context_len in ((1, 8192), (32, 1024), (32, 4096)):
            sizes = {"num_rows": num_rows, "context_len": context_len, "block_size": block_size}
            layer_ms = attention_ms(kernel, spec, device, **sizes)
            shape = f"{num_rows:3} rows over {context_len}"
            print(f"\nblocks of {block_size}: {name:26} {shape}: {1e3 * layer_ms:8.1f} us", end="")
    print()
