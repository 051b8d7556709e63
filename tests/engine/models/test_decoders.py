"""Every decoder against transformers' own forward, family by family, and the law: a row's bits do
not depend on how it was fed or on what else was in the step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from engine.decoder import Decoder, SequenceSlice
from engine.models.captured_steps import CapturedSteps
from engine.models.fixed_row_steps import fixed_row_steps
from engine.models.layers import DecoderLayers, plain_product
from engine.models.paged_attention import GatherKernel
from engine.models.spec import Activation, DecoderSpec, DecoderWeights, Rope
from engine.models.torch_decoder import TorchDecoder
from engine.models.transformers_decoder import TransformersDecoder
from engine.native.native_decoder import NativeDecoder
from tests.support.decoders import (
    BLOCK_SIZE,
    CPU,
    Piece,
    StepsDecoder,
    block_table,
    feed,
    greedy_continuation,
    pieces_at_random,
    pieces_of,
    pool_blocks,
    random_ids,
    read_model,
)

MakeDecoder = Callable[[DecoderSpec, DecoderWeights], Decoder]

PROMPT_LEN = 75
"""Three windows and more."""
NUM_GREEDY = 40


def torch_decoder(spec: DecoderSpec, weights: DecoderWeights) -> Decoder:
    return TorchDecoder(spec, weights, weights.embedding.dtype, CPU)


def captured_decoder(spec: DecoderSpec, weights: DecoderWeights) -> Decoder:
    """What runs on a GPU, without the graphs."""
    layers = DecoderLayers(spec, weights, plain_product)
    return StepsDecoder(
        lambda num_blocks, block_size: CapturedSteps(
            layers, GatherKernel(), lambda forward: forward, num_blocks, block_size
        )
    )


def fixed_rows_decoder(spec: DecoderSpec, weights: DecoderWeights) -> Decoder:
    """What runs on a GPU with `deterministic`."""
    return StepsDecoder(fixed_row_steps(spec, weights))


def native_decoder(spec: DecoderSpec, weights: DecoderWeights) -> Decoder:
    return NativeDecoder(spec, weights, weights.embedding.dtype, num_threads=1)


CPU_DECODERS: dict[str, MakeDecoder] = {
    "torch": torch_decoder,
    "native": native_decoder,
}
"""What a CPU uses: rows have the same bits whatever the batch."""
DECODERS = CPU_DECODERS | {"captured": captured_decoder, "fixed-rows": fixed_rows_decoder}


def make(name: str, folder: Path, dtype: torch.dtype = torch.float32) -> Decoder:
    decoder = DECODERS[name](*read_model(folder, dtype))
    decoder.allocate(pool_blocks(140, 140, 140, 140), BLOCK_SIZE)
    return decoder


@lru_cache
def oracle(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )


@torch.inference_mode()
def oracle_logits(folder: Path, token_ids: list[int]) -> torch.Tensor:
    return oracle(folder)(torch.tensor([token_ids])).logits[0]


# --- the same numbers as transformers ---------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_logits_are_those_of_transformers(name: str, family_folder: Path) -> None:
    """A prompt in chunks, then token by token."""
    token_ids = random_ids(0, PROMPT_LEN)
    logits = feed(make(name, family_folder), [token_ids], pieces_of(33, 30, 1))[0]
    expected = oracle_logits(family_folder, token_ids)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CPU_DECODERS)
def test_greedy_tokens_are_those_of_transformers(name: str, family_folder: Path) -> None:
    prompt = random_ids(1, 30)
    generated = greedy_continuation(make(name, family_folder), prompt, NUM_GREEDY)
    logits = oracle_logits(family_folder, prompt + generated)[len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == generated
    assert len(set(generated)) > 5


SPOILERS: dict[str, tuple[str, Callable[[DecoderSpec], DecoderSpec]]] = {
    "window": (
        "mistral",
        lambda spec: dataclasses.replace(
            spec,
            layers=tuple(dataclasses.replace(layer, sliding_window=25) for layer in spec.layers),
        ),
    ),
    "rope of layers": (
        "smollm3",
        lambda spec: dataclasses.replace(
            spec, layers=tuple(dataclasses.replace(layer, rope=0) for layer in spec.layers)
        ),
    ),
    "rope factor": (
        "llama-yarn",
        lambda spec: dataclasses.replace(spec, ropes=(Rope(spec.ropes[0].inv_freq, 1.0),)),
    ),
    "scaling": ("gemma3", lambda spec: dataclasses.replace(spec, attention_scaling=32**-0.5)),
    "embedding scale": ("gemma", lambda spec: dataclasses.replace(spec, embedding_scale=1.0)),
    "activation": (
        "gemma",
        lambda spec: dataclasses.replace(spec, activation=Activation.SILU),
    ),
}


@pytest.mark.parametrize("spoiler", SPOILERS)
def test_a_wrong_spec_is_noticed(spoiler: str, family_folders: dict[str, Path]) -> None:
    family, spoil = SPOILERS[spoiler]
    spec, weights = read_model(family_folders[family])
    decoder = torch_decoder(spoil(spec), weights)
    decoder.allocate(pool_blocks(PROMPT_LEN), BLOCK_SIZE)
    token_ids = random_ids(0, PROMPT_LEN)
    logits = feed(decoder, [token_ids], pieces_of(PROMPT_LEN))[0]
    assert (logits - oracle_logits(family_folders[family], token_ids)).abs().max() > 1e-2


# --- the law ----------------------------------------------------------------------------------

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
FAMILIES_OF_THE_LAW = (
    "llama-biases-wide-heads",
    "qwen3",
    "mistral",
    "gemma3",
    "llama-one-kv-head-odd-mlp",
)


@pytest.mark.parametrize("family", FAMILIES_OF_THE_LAW)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CPU_DECODERS)
def test_bits_do_not_depend_on_the_step(
    name: str, dtype: str, family: str, family_folders: dict[str, Path]
) -> None:
    decoder = make(name, family_folders[family], DTYPES[dtype])
    sequences = [random_ids(seed, n) for seed, n in enumerate((100, 70, 33, 64))]
    expected = [
        feed(decoder, [token_ids], pieces_of(1 if index == 0 else 100))[0]
        for index, token_ids in enumerate(sequences)
    ]
    for size in (3, 8, 33, 100):
        assert torch.equal(feed(decoder, sequences[:1], pieces_of(size))[0], expected[0])
    for steps in (all_by_one(4), *(pieces_at_random(random.Random(seed), 4) for seed in range(2))):
        for got, want in zip(feed(decoder, sequences, steps), expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_fixed_rows_do_not_depend_on_the_step(
    dtype: str, family_folders: dict[str, Path]
) -> None:
    decoder = make("fixed-rows", family_folders["mistral"], DTYPES[dtype])
    sequences = [random_ids(seed, n) for seed, n in enumerate((75, 70, 33))]
    expected = [feed(decoder, [token_ids], pieces_of(75))[0] for token_ids in sequences]
    assert torch.equal(feed(decoder, sequences[:1], pieces_of(64, 1))[0], expected[0])
    mixed = feed(decoder, sequences, pieces_at_random(random.Random(0), 3))
    for got, want in zip(mixed, expected, strict=True):
        assert torch.equal(got, want)


def all_by_one(num_sequences: int) -> Iterator[list[Piece]]:
    while True:
        yield [(s, 1) for s in range(num_sequences)]


# --- the contract -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", DECODERS)
def test_only_the_wanted_rows_come_out(name: str, family_folders: dict[str, Path]) -> None:
    decoder = make(name, family_folders["llama"], torch.bfloat16)
    sequences = [random_ids(seed, 20) for seed in range(3)]
    whole = [feed(decoder, [token_ids], pieces_of(20))[0] for token_ids in sequences]
    slices = [
        SequenceSlice(block_table(s, 3, 20), 0, token_ids, n)
        for s, (token_ids, n) in enumerate(zip(sequences, (0, 3, 1), strict=True))
    ]
    logits = decoder.forward(slices)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(
        logits, torch.cat([whole[1][-3:], whole[2][-1:]]), rtol=0.1, atol=0.1
    )
    assert decoder.forward(slices[:1]).shape == (0, 128)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [*DECODERS, "transformers"])
@torch.inference_mode()
def test_a_sequence_goes_on_from_a_copied_block(
    name: str, dtype: str, family_folders: dict[str, Path]
) -> None:
    """As from the block itself, which goes another way meanwhile."""
    folder = family_folders["gemma3"]
    if name == "transformers":
        config = AutoConfig.from_pretrained(folder)
        decoder: Decoder = TransformersDecoder(folder, config, DTYPES[dtype], CPU)
        decoder.allocate(5, BLOCK_SIZE)
    else:
        decoder = make(name, folder, DTYPES[dtype])
    whole, other = random_ids(0, 30), random_ids(1, 10)
    expected = decoder.forward([SequenceSlice([0, 1], 0, whole, 10)])
    decoder.forward([SequenceSlice([2, 3], 0, whole[:20], 1)])
    decoder.copy_block(3, 4)
    decoder.forward([SequenceSlice([2, 3], 16, other, 1)])
    continued = decoder.forward([SequenceSlice([2, 4], 20, whole[20:], 10)])
    tolerance = {"float32": 1e-4, "bfloat16": 0.1}[dtype]
    torch.testing.assert_close(continued, expected, rtol=tolerance, atol=tolerance)


def test_a_block_has_the_bytes_that_the_pool_takes_for_it(
    family_folders: dict[str, Path],
) -> None:
    spec, weights = read_model(family_folders["qwen3"], torch.bfloat16)
    decoder = torch_decoder(spec, weights)
    assert decoder.block_bytes(16) == 2 * 2 * 2 * 32 * 2 * 16  # K and V, layers, heads, dim, bytes
