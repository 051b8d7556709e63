"""The checks of tests/gpu, small and on a CPU, so that they are not run for the first time where
time is dear."""

from __future__ import annotations

import asyncio
from pathlib import Path

import torch

from cluster.config import KVCacheConfig
from tests.gpu import equality, models
from tests.gpu.draft_loop import Loop, run_loop
from tests.gpu.step_times import TimedDecoder, attention_ms, memory_bytes_per_ms
from tests.support.decoders import CPU, read_model


def test_equalities_hold(family_folders: dict[str, Path]) -> None:
    folder = family_folders["qwen3"]
    equality.logits_are_those_of_a_cpu(folder, CPU)
    assert equality.captured_steps_are_eager_ones(folder, CPU, lambda forward: forward)
    equality.fixed_rows_have_the_same_bits(folder, CPU)


def test_a_cpu_has_the_gathering_kernel_alone(family_folders: dict[str, Path]) -> None:
    spec, _ = read_model(family_folders["mistral"])
    present, refused = equality.kernels_present(spec, 16, CPU)
    assert list(present) == ["gather"]
    assert "flash_attn" in refused
    sizes = {"num_rows": 2, "context_len": 40, "block_size": 16}
    assert attention_ms(present["gather"], spec, CPU, **sizes) > 0


def test_steps_are_timed(family_folders: dict[str, Path]) -> None:
    timed = TimedDecoder(family_folders["llama"], CPU, block_size=16, num_tokens=128)
    layer = 64 * (64 + 2 * 32) + 64 * 64 + 3 * 64 * 96  # q, k, v; o; gate, up, down
    assert timed.weight_bytes == 2 * (2 * layer + 128 * 64)
    assert timed.step_ms((2, 3), context_len=20) > 0
    assert memory_bytes_per_ms(CPU, 1 << 20) > 0


def test_checkpoints_of_real_shapes_are_read(tmp_path: Path) -> None:
    config = models.qwen3_06b(num_layers=1, vocab_size=128)
    spec, weights = read_model(models.write_checkpoint(tmp_path, config, CPU), torch.bfloat16)
    assert (spec.hidden_size, spec.head_dim) == (1024, 128)
    assert weights.layers[0].gate_up.shape == (6144, 1024)


def test_the_loop_runs(family_folders: dict[str, Path]) -> None:
    model = {"dtype": "float32", "device": "cpu", "implementation": "torch"}
    loop = Loop(model, KVCacheConfig(num_blocks=64), 2, 20, 24)
    large, small = family_folders["llama"], family_folders["qwen3"]
    figures = asyncio.run(run_loop(large, small, loop, (1.0, 0.5)))
    for run in (*figures.scripted.values(), figures.by_model):
        assert run.token_ids == figures.plain.token_ids
    right, half = figures.scripted[1.0], figures.scripted[0.5]
    assert right.num_steps < figures.plain.num_steps
    assert right.num_accepted == right.num_drafted > half.num_accepted > 0
    assert len(figures.report()) == 4
