"""The shapes that steps of a GPU are filled up to, on a CPU: the capture only counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from engine.decoder import SequenceSlice
from engine.models.captured_steps import CapturedSteps
from engine.models.cuda_graphs import Forward
from engine.models.layers import DecoderLayers, plain_product
from engine.models.paged_attention import GatherKernel
from engine.models.rows import pack_rows
from engine.models.step_inputs import StepInputs, StepShape, fill_inputs
from tests.support.decoders import (
    BLOCK_SIZE,
    StepsDecoder,
    block_table,
    feed,
    pieces_of,
    random_ids,
    read_model,
)

NUM_BLOCKS = 260


@dataclass
class Counter:
    """A Capture that captures nothing."""

    num_captured: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)

    def __call__(self, forward: Forward) -> Forward:
        self.num_captured += 1

        def replay() -> torch.Tensor:
            self.outputs.append(forward())
            return self.outputs[-1]

        return replay


class Captured(StepsDecoder):
    def __init__(self, folder: Path) -> None:
        self.counter = Counter()
        layers = DecoderLayers(*read_model(folder), plain_product)
        super().__init__(
            lambda num_blocks, block_size: CapturedSteps(
                layers, GatherKernel(), self.counter, num_blocks, block_size
            )
        )
        self.allocate(NUM_BLOCKS, BLOCK_SIZE)


@pytest.fixture
def captured(family_folders: dict[str, Path]) -> Captured:
    return Captured(family_folders["llama"])


def decode_step(num_sequences: int, start: int = 0, num_rows: int = 1) -> list[SequenceSlice]:
    return [
        SequenceSlice(
            block_table(s, num_sequences, start + num_rows),
            start,
            random_ids(s, num_rows),
            num_rows,
        )
        for s in range(num_sequences)
    ]


def test_steps_of_one_bucket_are_captured_once(captured: Captured) -> None:
    for num_sequences in (5, 8, 7, 5):
        assert len(captured.forward(decode_step(num_sequences))) == num_sequences
    assert captured.counter.num_captured == 1
    assert [len(output) for output in captured.counter.outputs] == [8, 8, 8, 8]
    captured.forward(decode_step(9))
    assert captured.counter.num_captured == 2


def test_long_contexts_have_wider_tables(captured: Captured) -> None:
    for start in (0, 500, 511, 512, 1000):
        captured.forward(decode_step(1, start))
    assert captured.counter.num_captured == 2


def test_prompts_and_large_steps_are_not_captured(captured: Captured) -> None:
    captured.forward(decode_step(1, num_rows=33))
    captured.forward(decode_step(129))
    captured.forward([*decode_step(2), *decode_step(3, num_rows=40)[2:]])
    assert captured.counter.num_captured == 0
    captured.forward(decode_step(4, num_rows=32))
    assert captured.counter.num_captured == 1


def test_a_mixed_step_gives_what_its_parts_give(captured: Captured) -> None:
    """Decode tokens, drafts and two long chunks in turn; float32 sums in another order."""
    sequences = [random_ids(s, 150) for s in range(4)]
    expected = [feed(captured, [token_ids], pieces_of(150))[0] for token_ids in sequences]
    sizes = (1, 60, 5, 70)

    def steps():
        while True:
            yield [(s, (n + 7 * s) % 75 + 1) for s, n in enumerate(sizes)]

    for got, want in zip(feed(captured, sequences, steps()), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_fillers_touch_no_block_of_the_pool(captured: Captured) -> None:
    """A step of three rows is filled up with a fourth."""
    steps = captured.steps
    assert isinstance(steps, CapturedSteps)
    captured.forward(decode_step(3))
    captured.forward(decode_step(3, start=1))
    keys, _ = steps._pool.layer(0)
    written = {s * BLOCK_SIZE for s in (3, 4, 5)}  # the first blocks of block_table(s, 3, n)
    slots = keys.flatten(0, 1).abs().sum((1, 2)).nonzero().flatten().tolist()
    assert set(slots) == {slot + i for slot in written for i in (0, 1)} | {NUM_BLOCKS * BLOCK_SIZE}


def test_the_inputs_say_where_each_row_goes() -> None:
    slices = [
        SequenceSlice([7, 2, 9], 30, [11, 12, 13], 1),
        SequenceSlice([4], 0, [21], 1),
    ]
    shape = StepShape(num_rows=8, num_tables=8, table_width=4)
    inputs = StepInputs.of(fill_inputs(pack_rows(slices), shape, scratch_block=99), shape)
    assert inputs.token_ids.tolist() == [11, 12, 13, 21, 0, 0, 0, 0]
    assert inputs.positions.tolist() == [30, 31, 32, 0, 0, 0, 0, 0]
    assert inputs.row_tables()[:4].tolist() == [[7, 2, 9, 0]] * 3 + [[4, 0, 0, 0]]
    slots = inputs.slots(block_size=16).tolist()
    assert slots == [2 * 16 + 14, 2 * 16 + 15, 9 * 16, 4 * 16, *[99 * 16] * 4]
