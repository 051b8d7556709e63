"""The native kernels against the textbook, and what a row's bits may depend on."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from engine.decoder import SequenceSlice
from engine.int8 import quantized
from engine.models.spec import (
    Activation,
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    Rope,
)
from engine.native.native_decoder import NativeDecoder
from engine.native.native_linear import has_int8

SPEC = DecoderSpec(
    hidden_size=44,  # nothing here is a multiple of a vector's length
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,
    intermediate_size=70,
    vocab_size=203,
    max_position=400,
    rms_norm_eps=1e-5,
    activation=Activation.SILU,
    attention_scaling=0.3,
    embedding_scale=1.5,
    layers=(LayerSpec(None, 0), LayerSpec(37, 0), LayerSpec(None, None)),
    ropes=(Rope(1.0 / 100.0 ** (torch.arange(5) / 5), 1.1),),
)
BLOCK_SIZE = 16


def random_weights(spec: DecoderSpec, dtype: torch.dtype, *, tied: bool = True) -> DecoderWeights:
    """Every part that a layer may have is there."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 0.3) -> torch.Tensor:
        return (scale * torch.randn(*shape, generator=generator)).to(dtype)

    def norm(size: int) -> torch.Tensor:
        return 1 + draw(size, scale=0.1).float()

    num_rows = (spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim
    hidden, inner = spec.hidden_size, spec.intermediate_size
    layers = tuple(
        LayerWeights(
            attention_norm=norm(hidden),
            qkv=draw(num_rows, hidden),
            qkv_bias=draw(num_rows),
            q_norm=norm(spec.head_dim),
            k_norm=norm(spec.head_dim),
            o=draw(hidden, spec.num_heads * spec.head_dim),
            o_bias=draw(hidden),
            post_attention_norm=norm(hidden),
            mlp_norm=norm(hidden),
            gate_up=draw(2 * inner, hidden),
            gate_up_bias=draw(2 * inner),
            down=draw(hidden, inner),
            down_bias=draw(hidden),
            post_mlp_norm=norm(hidden),
        )
        for _ in spec.layers
    )
    embedding = draw(spec.vocab_size, hidden)
    head = embedding if tied else draw(spec.vocab_size, hidden)
    return DecoderWeights(embedding, layers, norm(hidden), head)


def decoder(
    dtype: torch.dtype = torch.bfloat16,
    spec: DecoderSpec = SPEC,
    *,
    tied: bool = True,
    num_threads: int = 1,
    block_size: int = BLOCK_SIZE,
    num_blocks: int = 64,
    int8: bool = False,
) -> NativeDecoder:
    weights = random_weights(spec, dtype, tied=tied)
    made = NativeDecoder(spec, weights, dtype, num_threads, int8=int8)
    made.allocate(num_blocks, block_size)
    return made


def textbook(spec: DecoderSpec, weights: DecoderWeights, token_ids: Sequence[int]) -> torch.Tensor:
    """Logits after every token, in float64 without any cache."""
    n, eps = len(token_ids), spec.rms_norm_eps
    positions = torch.arange(n, dtype=torch.float64)
    distance = positions[:, None] - positions[None, :]

    def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()

    def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return x @ weight.double().T + bias.double()

    def rotated(x: torch.Tensor, rope: Rope) -> torch.Tensor:
        angles = torch.outer(positions, rope.inv_freq.double())
        cosine, sine = angles.cos() * rope.factor, angles.sin() * rope.factor
        a, b = x.chunk(2, -1)
        return torch.cat([a * cosine - b * sine, b * cosine + a * sine], -1)

    def heads(x: torch.Tensor, norm: torch.Tensor, layer: LayerSpec) -> torch.Tensor:
        x = normed(x.view(n, -1, spec.head_dim).transpose(0, 1), norm)
        return x if layer.rope is None else rotated(x, spec.ropes[layer.rope])

    x = weights.embedding[list(token_ids)].double() * spec.embedding_scale
    for layer, w in zip(spec.layers, weights.layers, strict=True):
        qkv = linear(normed(x, w.attention_norm), w.qkv, w.qkv_bias)
        sizes = [spec.num_heads * spec.head_dim, *[spec.num_kv_heads * spec.head_dim] * 2]
        q, k, v = qkv.split(sizes, -1)
        repeats = spec.num_heads // spec.num_kv_heads
        keys = heads(k, w.k_norm, layer).repeat_interleave(repeats, 0)
        values = v.view(n, -1, spec.head_dim).transpose(0, 1).repeat_interleave(repeats, 0)
        scores = heads(q, w.q_norm, layer) @ keys.transpose(1, 2) * spec.attention_scaling
        hidden = (distance < 0) | (distance >= (layer.sliding_window or n))
        attended = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ values
        o = linear(attended.transpose(0, 1).reshape(n, -1), w.o, w.o_bias)
        x = x + normed(o, w.post_attention_norm)
        gate, up = linear(normed(x, w.mlp_norm), w.gate_up, w.gate_up_bias).chunk(2, -1)
        if spec.activation is Activation.SILU:
            gate = torch.nn.functional.silu(gate)
        else:
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
        x = x + normed(linear(gate * up, w.down, w.down_bias), w.post_mlp_norm)
    return normed(x, weights.final_norm) @ weights.head.double().T


def random_ids(seed: int, n: int) -> list[int]:
    return [random.Random(seed).randrange(SPEC.vocab_size) for _ in range(n)]


def feed(
    runner: NativeDecoder, token_ids: Sequence[int], table: Sequence[int], *cuts: int
) -> torch.Tensor:
    """Logits after every token; the sequence is cut before these positions."""
    bounds = [0, *cuts, len(token_ids)]
    parts = [
        runner.forward([SequenceSlice(table, start, token_ids[start:end], end - start)])
        for start, end in pairwise(bounds)
    ]
    return torch.cat(parts)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_the_textbook_s(activation: Activation, tied: bool) -> None:
    spec = dataclasses.replace(SPEC, activation=activation)
    token_ids = random_ids(0, 150)
    expected = textbook(spec, random_weights(spec, torch.float32, tied=tied), token_ids)
    logits = feed(decoder(torch.float32, spec, tied=tied), token_ids, range(10), 70)
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_keeps_arithmetic_in_float32() -> None:
    """Only weights and the pool are rounded: far closer than bfloat16 activations would be."""
    token_ids = random_ids(1, 60)
    expected = textbook(SPEC, random_weights(SPEC, torch.bfloat16), token_ids)
    logits = feed(decoder(torch.bfloat16), token_ids, range(10))
    error = (logits.double() - expected).abs().max() / expected.abs().max()
    assert error < 0.02


def in_int8(weights: DecoderWeights) -> DecoderWeights:
    """What the matrices stand for once they are of int8; embeddings stay as they are."""

    def rounded(matrix: torch.Tensor) -> torch.Tensor:
        whole, scale = quantized(matrix)
        return whole.float() * scale[:, None]

    matrices = ("qkv", "o", "gate_up", "down")
    layers = tuple(
        dataclasses.replace(layer, **{name: rounded(getattr(layer, name)) for name in matrices})
        for layer in weights.layers
    )
    return dataclasses.replace(weights, layers=layers, head=rounded(weights.head))


@pytest.mark.skipif(not has_int8(), reason="this CPU has no products with int8")
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_with_int8_weights_alone_are_rounded(dtype: torch.dtype, tied: bool) -> None:
    token_ids = random_ids(6, 150)
    expected = textbook(SPEC, in_int8(random_weights(SPEC, dtype, tied=tied)), token_ids)
    made = decoder(dtype, tied=tied, int8=True)
    logits = feed(made, token_ids, range(10), 70)
    error = (logits.double() - expected).abs().max() / expected.abs().max()
    assert error < (0.02 if dtype == torch.bfloat16 else 1e-3)
    assert made.kernel_class != decoder(dtype).kernel_class


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_bits_depend_on_the_sequence_alone(dtype: torch.dtype, int8: bool) -> None:
    """Whole, cut anywhere, one by one, by two threads, over scattered blocks."""
    token_ids = random_ids(2, 130)
    expected = feed(decoder(dtype, int8=int8), token_ids, range(9))
    rng = random.Random(0)
    scattered = rng.sample(range(64), 9)
    for num_threads in (1, 2):
        runner = decoder(dtype, num_threads=num_threads, int8=int8)
        single = range(1, 130 if num_threads == 1 else 20)
        assert torch.equal(feed(runner, token_ids, scattered, *single), expected)
        for _ in range(5):
            cuts = sorted(rng.sample(range(1, 130), rng.randint(0, 8)))
            assert torch.equal(feed(runner, token_ids, scattered, *cuts), expected)


@pytest.mark.parametrize("num_others", [1, 5, 6, 7, 11, 12, 13, 30, 47, 48, 60])
def test_bits_do_not_depend_on_batch_mates(num_others: int) -> None:
    token_ids = random_ids(3, 60)
    expected = feed(decoder(), token_ids, range(4))
    runner = decoder(num_blocks=64 + 4)
    feed(runner, token_ids[:40], range(4))
    slices = [SequenceSlice(range(4), 40, token_ids[40:], 20)]
    for index in range(num_others):
        slices.append(SequenceSlice([4 + index], 0, random_ids(100 + index, 1 + index % 3), 1))
    random.Random(num_others).shuffle(slices)
    before = sum(s.num_logits for s in slices[: [s.start for s in slices].index(40)])
    assert torch.equal(runner.forward(slices)[before : before + 20], expected[40:])


@pytest.mark.parametrize("block_size", [1, 5, 8, 32, 48, 256])
def test_bits_do_not_depend_on_the_block_size(block_size: int) -> None:
    token_ids = random_ids(4, 120)
    expected = feed(decoder(), token_ids, range(8))
    runner = decoder(block_size=block_size, num_blocks=120 // block_size + 1)
    assert torch.equal(feed(runner, token_ids, range(120 // block_size + 1), 30, 31, 90), expected)


def test_what_a_block_held_before_does_not_show() -> None:
    """A former owner's keys and values, not finite ones among them, add exactly nothing."""
    weights = random_weights(SPEC, torch.bfloat16)
    poisoned = weights.embedding.clone()
    poisoned[7] = torch.inf
    runner = NativeDecoder(
        SPEC, dataclasses.replace(weights, embedding=poisoned), torch.bfloat16, 1
    )
    runner.allocate(8, BLOCK_SIZE)
    token_ids = [i for i in random_ids(5, 50) if i != 7]
    expected = feed(runner, token_ids, [4, 5, 6, 7])
    bad = runner.forward([SequenceSlice([0, 1, 2, 3], 0, [7] * 64, 64)])
    assert not torch.isfinite(bad).any()
    assert torch.equal(feed(runner, token_ids, [3, 1, 0, 2], 20), expected)


def test_a_step_without_logits_and_a_step_without_rows() -> None:
    runner = decoder()
    assert runner.forward([SequenceSlice([0], 0, [1, 2], 0)]).shape == (0, SPEC.vocab_size)
    assert runner.forward([]).shape == (0, SPEC.vocab_size)


def test_block_bytes_are_what_the_pool_takes() -> None:
    """Keys of 10 elements, values filled up to 16, slots in groups of 16."""
    runner = decoder()
    assert runner.block_bytes(16) == 3 * 2 * (10 + 16) * 16 * 2
    assert runner.block_bytes(17) == 2 * runner.block_bytes(16)
