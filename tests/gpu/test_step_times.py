"""Steps against the memory floor. The report is the result; the bounds are wide."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.step_times import Shape, TimedDecoder, memory_bytes_per_ms

pytestmark = pytest.mark.gpu

BLOCK_SIZE = 256
CONTEXT_LEN = 1000
SHAPES: dict[str, Shape] = {
    "1 row": (1, 1),
    "8 rows": (8, 1),
    "32 rows": (32, 1),
    "1 sequence, 7 drafts": (1, 8),
    "8 sequences, 3 drafts each": (8, 4),
}
NUM_TOKENS = 32 * 2048


@pytest.mark.parametrize("name", ["large", "small"])
def test_steps_are_near_the_memory_floor(
    name: str, device: torch.device, request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(name)
    timed = TimedDecoder(folder, device, block_size=BLOCK_SIZE, num_tokens=NUM_TOKENS)
    floor_ms = timed.weight_bytes / memory_bytes_per_ms(device)
    times = {shape: timed.step_ms(SHAPES[shape], CONTEXT_LEN) for shape in SHAPES}
    print(f"\n{name}: weights {timed.weight_bytes / 1e9:.2f} GB, floor {floor_ms:.3f} ms")
    for shape, step_ms in times.items():
        print(
            f"{name}: {shape:28} {step_ms:8.3f} ms, {step_ms / floor_ms:6.2f} of the floor, "
            f"{step_ms / times['1 row']:5.2f} of 1 row"
        )
    assert times["1 sequence, 7 drafts"] < 2 * times["1 row"]


def test_what_fixed_rows_cost(large: Path, device: torch.device) -> None:
    sizes = {"block_size": BLOCK_SIZE, "num_tokens": NUM_TOKENS}
    fast = TimedDecoder(large, device, **sizes)
    fixed = TimedDecoder(large, device, deterministic=True, **sizes)
    print()
    for shape, sequences in (SHAPES | {"a prompt of 512": (1, 512)}).items():
        fast_ms = fast.step_ms(sequences, CONTEXT_LEN)
        fixed_ms = fixed.step_ms(sequences, CONTEXT_LEN)
        print(f"fixed rows: {shape:28} {fixed_ms:8.3f} ms, {fixed_ms / fast_ms:6.2f} of captured")
