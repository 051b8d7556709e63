"""What must be equal on a GPU. Every check takes a device, so that a CPU can try the check."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from engine.decoder import Decoder
from engine.models.captured_steps import CapturedSteps
from engine.models.cuda_graphs import Capture
from engine.models.fixed_row_steps import fixed_row_steps
from engine.models.flash_attention import CANDIDATES, PagedShapes, check_kernel, choose_kernel
from engine.models.layers import DecoderLayers, plain_product
from engine.models.paged_attention import GatherKernel, PagedKernel
from engine.models.spec import DecoderSpec
from engine.models.torch_decoder import TorchDecoder
from tests.support.decoders import (
    BLOCK_SIZE,
    CPU,
    StepsDecoder,
    feed,
    pieces_at_random,
    pieces_of,
    pool_blocks,
    random_ids,
    read_model,
)

_LENS = (150, 90, 33)


def logits_are_those_of_a_cpu(folder: Path, device: torch.device) -> None:
    """In float32: prompts in chunks, drafts and decode tokens of three sequences at once."""
    logits = []
    for place in (CPU, device):
        spec, weights = read_model(folder, torch.float32, place)
        decoder = TorchDecoder(spec, weights, torch.float32, place)
        logits.append(_fed_at_random(decoder, spec.vocab_size))
    for got, want in zip(logits[1], logits[0], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=2e-3)


def captured_steps_are_eager_ones(folder: Path, device: torch.device, capture: Capture) -> bool:
    """In bfloat16, up to the last places; returns whether every bit is equal."""
    layers = DecoderLayers(*read_model(folder, torch.bfloat16, device), plain_product)
    logits = []
    for how in (lambda forward: forward, capture):
        decoder = StepsDecoder(
            lambda blocks, size, how=how: CapturedSteps(layers, GatherKernel(), how, blocks, size)
        )
        logits.append(torch.cat(_fed_at_random(decoder, layers.spec.vocab_size)))
    torch.testing.assert_close(logits[1], logits[0], rtol=0.05, atol=0.1)
    return torch.equal(logits[0], logits[1])


def fixed_rows_have_the_same_bits(
    folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Alone in one piece, alone in others, and among others in any mixture."""
    decoder = StepsDecoder(fixed_row_steps(*read_model(folder, dtype, device)))
    decoder.allocate(pool_blocks(*_LENS), BLOCK_SIZE)
    sequences = [random_ids(seed, n) for seed, n in enumerate(_LENS)]
    expected = [feed(decoder, [token_ids], pieces_of(max(_LENS)))[0] for token_ids in sequences]
    for sizes in ((1,), (7,), (64, 1, 30)):
        got = feed(decoder, sequences[1:2], pieces_of(*sizes))[0]
        assert torch.equal(got, expected[1]), f"pieces of {sizes}"
    for seed in range(3):
        mixed = feed(decoder, sequences, pieces_at_random(random.Random(seed), len(_LENS)))
        for got, want in zip(mixed, expected, strict=True):
            assert torch.equal(got, want), f"mixture {seed}"


def kernels_present(
    spec: DecoderSpec, block_size: int, device: torch.device
) -> tuple[dict[str, PagedKernel], dict[str, str]]:
    """Those that give the right numbers here, and why the others do not."""
    shapes = PagedShapes(spec, block_size, torch.bfloat16, device)
    present: dict[str, PagedKernel] = {}
    refused: dict[str, str] = {}
    for name, make in CANDIDATES:
        try:
            kernel = make()
            check_kernel(kernel, shapes)
            present[name] = kernel
        except (AttributeError, ImportError, RuntimeError, TypeError, ValueError) as error:
            refused[name] = str(error).split("\n")[0]
    present["gather"] = GatherKernel()
    assert choose_kernel(shapes).name == next(iter(present))
    return present, refused


def _fed_at_random(decoder: Decoder, vocab_size: int) -> list[torch.Tensor]:
    decoder.allocate(pool_blocks(*_LENS), BLOCK_SIZE)
    sequences = [random_ids(seed, n, vocab_size) for seed, n in enumerate(_LENS)]
    steps = pieces_at_random(random.Random(1), len(_LENS))
    return [logits.cpu() for logits in feed(decoder, sequences, steps)]
