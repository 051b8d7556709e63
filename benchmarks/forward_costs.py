"""What a forward costs: by its rows, and for a long prompt. Sections of benchmarks/engine.py."""

from __future__ import annotations

import random
import time
from typing import Any

import torch

from benchmarks.measuring import block_tables, forward_s, generate, print_table
from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner

NUM_ROUNDS = 5
BLOCK_ROWS = (1, 2, 4, 8, 16, 32)
SEQUENCES = (8, 32)
CONTEXT_LEN = 256
PROMPT_LEN = 1_000
NUM_PROMPTS = 2
MATRIX_ROWS = 256


# --- 2: the cost of rows ------------------------------------------------------------------------


def row_costs(runner: ModelRunner) -> None:
    with block_tables(runner, max(SEQUENCES), CONTEXT_LEN + max(BLOCK_ROWS)) as tables:
        steps = _steps(tables)
        for table in tables:
            forward_s(runner, [SequenceSlice(table, 0, list(range(CONTEXT_LEN)), 0)])
        best = dict.fromkeys(steps, float("inf"))
        for _ in range(NUM_ROUNDS):
            for name, slices in steps.items():
                best[name] = min(best[name], forward_s(runner, slices))
    ratios = {name: seconds / best["1 of one sequence"] for name, seconds in best.items()}
    print_table(
        f"2. A forward by its rows, at {CONTEXT_LEN} tokens of context",
        ["rows", "ms", "to 1 row"],
        [[name, f"{1e3 * best[name]:.1f}", f"{ratios[name]:.2f}"] for name in steps],
        f"8 rows take {ratios['8 of one sequence']:.2f} times as long as one: drafts that fill "
        "them pay if the step brings more tokens than that",
    )


def _steps(tables: list[list[int]]) -> dict[str, list[SequenceSlice]]:
    ids = list(range(max(BLOCK_ROWS)))
    blocks = {
        f"{n} of one sequence": [SequenceSlice(tables[0], CONTEXT_LEN, ids[:n], n)]
        for n in BLOCK_ROWS
    }
    batches = {
        f"1 of each of {n}": [SequenceSlice(table, CONTEXT_LEN, [1], 1) for table in tables[:n]]
        for n in SEQUENCES
    }
    return blocks | batches


# --- 4: prefill ---------------------------------------------------------------------------------


def prefill(runner: ModelRunner, model: dict[str, Any]) -> None:
    """`model`: the content of its config.json."""
    best = _prefill_s(runner)
    flops, head, torchs = _flops(model), _head_rate(runner, model), _torch_rate(model)
    print_table(
        f"4. A prompt of {PROMPT_LEN} tokens",
        ["", "tokens/s", "GFLOP/s", "of the head's", "of torch's"],
        [
            [name, f"{PROMPT_LEN / s:.0f}", f"{flops / s / 1e9:.1f}"]
            + [f"{flops / s / rate:.0%}" for rate in (head, torchs)]
            for name, s in best.items()
        ],
        f"matrix rates at {MATRIX_ROWS} rows: {head / 1e9:.1f} GFLOP/s of the decoder's head, its "
        f"largest product; {torchs / 1e9:.1f} of torch in float32, in the shape of gate and up",
    )


def _prefill_s(runner: ModelRunner) -> dict[str, float]:
    chunked_s = whole_s = float("inf")
    with block_tables(runner, 1, PROMPT_LEN) as [table]:
        for seed in range(NUM_PROMPTS):
            # Each is new, so that no prefix of it is cached.
            ids = random.Random(seed).choices(range(runner.vocab_size), k=PROMPT_LEN)
            started = time.perf_counter()
            generate(runner, [ids], 1)
            chunked_s = min(chunked_s, time.perf_counter() - started)
            whole_s = min(whole_s, forward_s(runner, [SequenceSlice(table, 0, ids, 1)]))
    return {"in chunks": chunked_s, "in one forward": whole_s}


def _flops(model: dict[str, Any]) -> float:
    """Of a Llama-like model's layers over the prompt."""
    hidden, heads = model["hidden_size"], model["num_attention_heads"]
    all_heads = 2 * (heads + model["num_key_value_heads"])  # Queries, output, keys, values.
    head_dim = model.get("head_dim") or hidden // heads
    weights = hidden * (all_heads * head_dim + 3 * model["intermediate_size"])
    attention = PROMPT_LEN * heads * head_dim  # Scores and values, over half of it on average.
    return float(2 * PROMPT_LEN * model["num_hidden_layers"] * (weights + attention))


def _head_rate(runner: ModelRunner, model: dict[str, Any]) -> float:
    """FLOP/s, by how much longer a forward takes if all of its rows give logits."""
    few_s = many_s = float("inf")
    with block_tables(runner, 1, MATRIX_ROWS) as [table]:
        ids = list(range(MATRIX_ROWS))
        for _ in range(NUM_ROUNDS):
            few_s = min(few_s, forward_s(runner, [SequenceSlice(table, 0, ids, 1)]))
            many_s = min(many_s, forward_s(runner, [SequenceSlice(table, 0, ids, len(ids))]))
    flops = 2 * (MATRIX_ROWS - 1) * model["hidden_size"] * runner.vocab_size
    return float(flops / (many_s - few_s))


def _torch_rate(model: dict[str, Any]) -> float:
    num_in, num_out = model["hidden_size"], 2 * model["intermediate_size"]
    x, weight = torch.randn(MATRIX_ROWS, num_in), torch.randn(num_out, num_in)
    best_s = float("inf")
    for _ in range(4 * NUM_ROUNDS):
        started = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        best_s = min(best_s, time.perf_counter() - started)
    return float(2 * MATRIX_ROWS * num_in * num_out / best_s)
