"""The runner against transformers' own forward, and the law: a row's bits do not depend on how it
was fed or on what else was in the step."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from cluster.config import KVCacheConfig, ModelConfig
from cluster.types import SamplingParams
from engine.decoder import SequenceSlice
from engine.embedded import embedded_model_folder
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from engine.sampling import SampleRow, sample

from .conftest import tiny_runner

PROMPTS = [
    "The Eiffel Tower is a wrought-iron lattice tower on the Champ de Mars in Paris, France. It is "
    "named after the engineer Gustave Eiffel, whose company designed and built it from 1887 to "
    "1889. Locally nicknamed La dame de fer, it was constructed as the centerpiece of the 1889 "
    "World's Fair, and to crown the centennial anniversary of the French Revolution. "
    "Although it was at first criticised by artists and intellectuals, it has since become a "
    "global cultural icon of France and one of the most recognisable structures in the world.",
    "<|im_start|>user\nList ten fruits, then ten vegetables, one per line, in alphabetical order, "
    "and say for each of them in which season it is best.<|im_end|>\n<|im_start|>assistant\n1. "
    "Apple: best in autumn.\n2. Banana: all year round.\n3. Cherry: best in early summer.\n4. "
    "Date: best in autumn.\n5. Elderberry: late summer.\n6. Fig: late summer to autumn.\n"
    "7. Grape: early autumn.\n8. Honeydew melon: summer.\n9. Kiwi: winter.\n10. Lemon: winter.\n",
]

Step = list[tuple[int, int]]
"""Pieces of one forward: (sequence, number of tokens)."""


def feed(
    runner: ModelRunner, sequences: Sequence[Sequence[int]], steps: Iterator[Step]
) -> list[torch.Tensor]:
    """Feed all sequences as the steps say; logits after every token, per sequence."""
    caches = [runner.kv.open() for _ in sequences]
    outputs: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in steps:
        if all(cache.num_slots == len(ids) for cache, ids in zip(caches, sequences, strict=True)):
            break
        slices, fed = [], []
        for s, n in step:
            start = caches[s].num_committed
            token_ids = sequences[s][start : start + n]
            if token_ids:
                assert runner.kv.reserve(caches[s], len(token_ids))
                runner.kv.commit(caches[s], token_ids)
                table = caches[s].block_table
                slices.append(SequenceSlice(table, start, token_ids, len(token_ids)))
                fed.append(s)
        if not slices:
            continue
        logits = runner.forward(slices).split([piece.num_logits for piece in slices])
        for s, part in zip(fed, logits, strict=True):
            outputs[s].append(part)
    for cache in caches:
        runner.kv.close(cache)
    return [torch.cat(parts) for parts in outputs]


def blocks_of(n: int, sequence: int = 0) -> Iterator[Step]:
    while True:
        yield [(sequence, n)]


def all_together(num_sequences: int, n: int) -> Iterator[Step]:
    while True:
        yield [(s, n) for s in range(num_sequences)]


def at_random(rng: random.Random, num_sequences: int) -> Iterator[Step]:
    """Prefill chunks, decode tokens and draft blocks in any mixture, until all is fed."""
    for _ in range(1000):
        chosen = rng.sample(range(num_sequences), rng.randint(1, num_sequences))
        yield [(s, rng.choice([1, 1, 2, 5, 9, 40])) for s in chosen]


def alone(runner: ModelRunner, token_ids: Sequence[int], n: int) -> torch.Tensor:
    return feed(runner, [token_ids], blocks_of(n))[0]


def random_ids(seed: int, n: int, vocab_size: int = 128) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab_size) for _ in range(n)]


def generate(
    runner: ModelRunner, prompt_ids: Sequence[int], num_tokens: int, sampling: SamplingParams
) -> list[int]:
    """Plain decoding, one token a step."""
    cache, token_ids, key = runner.kv.open(), list(prompt_ids), 77
    pending = list(prompt_ids)
    for _ in range(num_tokens):
        start = len(token_ids) - len(pending)
        assert runner.kv.reserve(cache, len(pending))
        logits = runner.forward([SequenceSlice(cache.block_table, start, pending, 1)])
        pending = sample(logits, [SampleRow(sampling, key, len(token_ids))])
        token_ids += pending
    runner.kv.close(cache)
    return token_ids[len(prompt_ids) :]


# --- the same numbers as transformers ---------------------------------------------------------


@torch.inference_mode()
def test_logits_are_those_of_transformers(tiny_folder: Path) -> None:
    runner = tiny_runner(tiny_folder)
    token_ids = random_ids(0, 150)
    expected = AutoModelForCausalLM.from_pretrained(tiny_folder)(torch.tensor([token_ids])).logits[
        0
    ]
    torch.testing.assert_close(alone(runner, token_ids, 1), expected, rtol=1e-4, atol=1e-4)


@torch.inference_mode()
def test_greedy_tokens_are_those_of_transformers(tiny_folder: Path) -> None:
    runner = tiny_runner(tiny_folder)
    prompt_ids = random_ids(1, 20)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    expected = model.generate(
        torch.tensor([prompt_ids]), max_new_tokens=60, min_new_tokens=60, do_sample=False,
        eos_token_id=None,
    )  # fmt: skip
    generated = generate(runner, prompt_ids, 60, SamplingParams(temperature=0))
    assert generated == expected[0, 20:].tolist()
    assert len(set(generated)) > 10


# --- the law ----------------------------------------------------------------------------------


def test_bits_do_not_depend_on_the_step(tiny_folder: Path) -> None:
    runner = tiny_runner(tiny_folder)
    sequences = [random_ids(seed, n) for seed, n in enumerate((140, 70, 33, 100))]
    expected = [alone(runner, token_ids, 1) for token_ids in sequences]
    for n in (2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 64, 65, 140):
        assert torch.equal(alone(runner, sequences[0], n), expected[0]), f"blocks of {n}"
    for n in (1, 4):
        for got, want in zip(feed(runner, sequences, all_together(4, n)), expected, strict=True):
            assert torch.equal(got, want)
    for seed in range(4):
        got_all = feed(runner, sequences, at_random(random.Random(seed), 4))
        for got, want in zip(got_all, expected, strict=True):
            assert torch.equal(got, want)


def test_bits_do_not_depend_on_the_block_size(tiny_folders: dict[str, Path]) -> None:
    token_ids = random_ids(3, 100)
    expected = alone(tiny_runner(tiny_folders["llama"]), token_ids, 7)
    for block_size in (1, 5, 48, 256):
        runner = tiny_runner(tiny_folders["llama"], block_size=block_size)
        assert torch.equal(alone(runner, token_ids, 7), expected)


def test_rejected_drafts_leave_no_trace(tiny_folders: dict[str, Path]) -> None:
    """Wrong drafts are written, rolled back and overwritten; what follows has the same bits."""
    runner = tiny_runner(tiny_folders["llama"])
    token_ids = random_ids(4, 90)
    expected = alone(runner, token_ids, 1)
    rng, cache = random.Random(0), runner.kv.open()
    while cache.num_committed < 90:
        start, drafts = cache.num_committed, random_ids(rng.randrange(99), rng.randrange(8))
        assert runner.kv.reserve(cache, 1 + len(drafts))
        block = [token_ids[start], *drafts]
        logits = runner.forward([SequenceSlice(cache.block_table, start, block, len(block))])
        assert torch.equal(logits[0], expected[start])
        runner.kv.commit(cache, block[:1])
        runner.kv.rollback(cache, len(drafts))
        runner.kv.check()


@pytest.fixture(scope="module")
def prompts(embedded: LoadedModel) -> list[list[int]]:
    """Token ids of real text, each over 100 positions."""
    tokenizer = Tokenizer.from_str(embedded.card.tokenizer_json)
    encoded = [tokenizer.encode(text).ids[:112] for text in PROMPTS]
    assert all(len(token_ids) > 100 for token_ids in encoded)
    return encoded


@pytest.fixture(scope="module")
def expected_logits(embedded_runner: ModelRunner, prompts: list[list[int]]) -> list[torch.Tensor]:
    """The first prompt fed one token a step, the other whole, each alone."""
    return [alone(embedded_runner, ids, 112 if index else 1) for index, ids in enumerate(prompts)]


def test_embedded_bits_do_not_depend_on_drafts_or_chunks(
    embedded_runner: ModelRunner, prompts: list[list[int]], expected_logits: list[torch.Tensor]
) -> None:
    for n in (3, 9, 33, 112):
        assert torch.equal(alone(embedded_runner, prompts[0], n), expected_logits[0])


def test_embedded_bits_do_not_depend_on_the_batch(
    embedded_runner: ModelRunner, prompts: list[list[int]], expected_logits: list[torch.Tensor]
) -> None:
    for steps in (all_together(2, 1), at_random(random.Random(0), 2)):
        for got, want in zip(feed(embedded_runner, prompts, steps), expected_logits, strict=True):
            assert torch.equal(got, want)


@torch.inference_mode()
def test_embedded_greedy_tokens_are_those_of_transformers_up_to_near_ties(
    prompts: list[list[int]], expected_logits: list[torch.Tensor]
) -> None:
    """Where the most likely token differs, transformers' own margin is a few bfloat16 steps."""
    model = AutoModelForCausalLM.from_pretrained(embedded_model_folder(), dtype=torch.bfloat16)
    for token_ids, got in zip(prompts, expected_logits, strict=True):
        logits = model(torch.tensor([token_ids])).logits[0].float()
        chosen = got.argmax(-1, keepdim=True)
        shortfall = logits.max(-1).values - logits.gather(-1, chosen).flatten()
        assert shortfall.max() <= 0.25
        assert (shortfall > 0).sum() <= 4


# --- the contract -----------------------------------------------------------------------------


def test_only_the_wanted_rows_come_out(tiny_folders: dict[str, Path]) -> None:
    runner = tiny_runner(tiny_folders["llama"])
    sequences = [random_ids(seed, 20) for seed in range(3)]
    expected = [alone(runner, token_ids, 20) for token_ids in sequences]
    caches = [runner.kv.open() for _ in range(3)]
    for cache in caches:
        runner.kv.reserve(cache, 20)
    slices = [
        SequenceSlice(cache.block_table, 0, token_ids, n)
        for cache, token_ids, n in zip(caches, sequences, (0, 3, 1), strict=True)
    ]
    logits = runner.forward(slices)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, torch.cat([expected[1][-3:], expected[2][-1:]]))
    assert runner.forward(slices[:1]).shape == (0, runner.vocab_size)


def test_the_pool_is_as_large_as_its_memory(tiny_folders: dict[str, Path]) -> None:
    loaded = load_model(ModelConfig(source=str(tiny_folders["llama"]), dtype="float32"))
    bytes_per_block = 2 * 2 * 2 * 16 * 4 * 16  # layers, keys and values, heads, dim, bytes, tokens
    runner = ModelRunner(loaded, KVCacheConfig(memory_bytes=10 * bytes_per_block + 1))
    assert runner.kv.num_blocks == 10
    with pytest.raises(ValueError, match="no block"):
        ModelRunner(loaded, KVCacheConfig(memory_bytes=bytes_per_block - 1))


def test_seeded_sampling_is_reproduced_from_any_split(tiny_folders: dict[str, Path]) -> None:
    """Generating 30 tokens, or 12 and then 18 more from prompt + 12, is the same."""
    runner = tiny_runner(tiny_folders["llama"])
    prompt_ids, sampling = random_ids(5, 30), SamplingParams(temperature=0.9, top_p=0.95)
    whole = generate(runner, prompt_ids, 30, sampling)
    first = generate(runner, prompt_ids, 12, sampling)
    assert first + generate(runner, prompt_ids + first, 18, sampling) == whole
