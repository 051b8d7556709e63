"""How long a step takes for how many tokens, measured on this device before the first request."""

from __future__ import annotations

import time

from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner

STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
_MAX_ROUNDS = 3
_SIZE_BUDGET_MS = 150.0
"""No further round of a size that has taken this long: it is no longer small against noise."""


def profile_steps(runner: ModelRunner) -> dict[int, float]:
    """Milliseconds of a forward by the tokens it takes, each with logits; the best of up to three.

    Attention over long contexts is not in it: what it adds grows with the context, not with the
    number of drafts, and the planner follows the measured steps.
    """
    sizes = [size for size in STEP_SIZES if size <= min(runner.kv.num_slots, runner.max_model_len)]
    return {size: _best_ms(runner, size) for size in sizes}


def _best_ms(runner: ModelRunner, num_tokens: int) -> float:
    rounds = [_step_ms(runner, num_tokens)]
    while len(rounds) < _MAX_ROUNDS and sum(rounds) < _SIZE_BUDGET_MS:
        rounds.append(_step_ms(runner, num_tokens))
    return min(rounds)


def _step_ms(runner: ModelRunner, num_tokens: int) -> float:
    cache = runner.kv.open()
    assert runner.kv.reserve(cache, num_tokens)
    started = time.perf_counter()
    logits = runner.forward([SequenceSlice(cache.block_table, 0, [0] * num_tokens, num_tokens)])
    logits[-1, -1].item()  # A GPU has only been told what to do until someone looks.
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    runner.kv.close(cache)
    return elapsed_ms
