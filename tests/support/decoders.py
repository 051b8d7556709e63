"""Decoders without a runner: made from a folder, and fed with sequences in any pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig

from engine.decoder import Decoder, SequenceSlice
from engine.models.families import decoder_spec
from engine.models.rows import pack_rows
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.steps import MakeSteps, Steps
from engine.models.weights import read_weights

CPU = torch.device("cpu")
BLOCK_SIZE = 16

Piece = tuple[int, int]
"""A sequence, and how many of its tokens one forward takes."""


def read_model(
    folder: Path, dtype: torch.dtype = torch.float32, device: torch.device = CPU
) -> tuple[DecoderSpec, DecoderWeights]:
    """What a checkpoint's folder holds."""
    config = AutoConfig.from_pretrained(folder)
    spec = decoder_spec(config)
    return spec, read_weights(folder, spec, config, dtype, device)


class StepsDecoder:
    """A Decoder of any way to run steps, on whatever device that runs on."""

    name = "torch"
    kernel_class = "test"
    device = CPU

    def __init__(self, make_steps: MakeSteps) -> None:
        self._make_steps = make_steps
        self.steps: Steps | None = None

    def block_bytes(self, block_size: int) -> int:
        raise NotImplementedError

    def allocate(self, num_blocks: int, block_size: int) -> None:
        self.steps = self._make_steps(num_blocks, block_size)

    def copy_block(self, source: int, target: int) -> None:
        assert self.steps is not None
        self.steps.copy_block(source, target)

    @torch.inference_mode()
    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        assert self.steps is not None
        return self.steps.run(pack_rows(slices))


def feed(
    decoder: Decoder, sequences: Sequence[Sequence[int]], steps: Iterator[list[Piece]]
) -> list[torch.Tensor]:
    """Feed all sequences as the steps say; logits after every token, per sequence.

    Their blocks lie among each other in the pool, which `decoder` has in blocks of BLOCK_SIZE.
    """
    num_fed = [0] * len(sequences)
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    while any(n < len(ids) for n, ids in zip(num_fed, sequences, strict=True)):
        pieces = []
        for s, n in next(steps):
            token_ids = sequences[s][num_fed[s] : num_fed[s] + n]
            if token_ids:
                table = block_table(s, len(sequences), num_fed[s] + len(token_ids))
                pieces.append((s, SequenceSlice(table, num_fed[s], token_ids, len(token_ids))))
                num_fed[s] += len(token_ids)
        if not pieces:
            continue
        logits = decoder.forward([piece for _, piece in pieces])
        parts = logits.split([piece.num_logits for _, piece in pieces])
        for (s, _), part in zip(pieces, parts, strict=True):
            outputs[s].append(part)
    return [torch.cat(parts) for parts in outputs]


def block_table(sequence: int, num_sequences: int, num_tokens: int) -> list[int]:
    """Every num_sequences-th block of the pool, neighbours swapped."""
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    return [sequence + (index ^ 1) * num_sequences for index in range(num_blocks)]


def pool_blocks(*lengths: int) -> int:
    """Blocks of a pool in which `feed` has room for sequences of these lengths."""
    return len(lengths) * (-(-max(lengths) // BLOCK_SIZE) + 1)


def pieces_of(*sizes: int, sequence: int = 0) -> Iterator[list[Piece]]:
    """One sequence in pieces of these sizes; the last size is repeated."""
    for size in sizes:
        yield [(sequence, size)]
    while True:
        yield [(sequence, sizes[-1])]


def pieces_at_random(rng: random.Random, num_sequences: int) -> Iterator[list[Piece]]:
    """Prompt chunks, decode tokens and drafts of many sequences in any mixture."""
    while True:
        chosen = rng.sample(range(num_sequences), rng.randint(1, num_sequences))
        yield [(s, rng.choice([1, 1, 2, 5, 9, 40])) for s in chosen]


def random_ids(seed: int, n: int, vocab_size: int = 128) -> list[int]:
    """Of no special token."""
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(n)]


def greedy_continuation(decoder: Decoder, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """Plain decoding of one sequence: the prompt in two chunks, then token by token."""
    token_ids, num_fed = list(prompt), 0
    chunk = len(prompt) // 2
    while len(token_ids) < len(prompt) + num_tokens:
        piece = token_ids[num_fed : num_fed + chunk]
        table = block_table(0, 1, num_fed + len(piece))
        at_end = num_fed + len(piece) == len(token_ids)
        logits = decoder.forward([SequenceSlice(table, num_fed, piece, int(at_end))])
        num_fed += len(piece)
        chunk = max(1, len(token_ids) - num_fed)
        if at_end:
            token_ids.append(int(logits[0].argmax()))
            chunk = 1
    return token_ids[len(prompt) :]
