"""How long a step takes for how many tokens, measured on this device before the first request."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch

from engine.cache_folder import cache_folder
from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner
from verifier_service.planner import StepCost, StepProfile

STEP_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 17, 24, 32, 48, 64, 96, 128)
"""Devices take rows in tiles, so that T is a staircase: every number of rows that up to 8 drafts of
one sequence make, and of the others those where stairs are likely."""
_MAX_ROUNDS = 5
_SIZE_BUDGET_MS = 150.0
"""No further round of a size that has taken this long: it is no longer small against noise."""
_TRUSTED = 1.3
"""A kept profile holds where its step of one token differs by no more than this factor."""
_FORMAT = 4
_CONTEXT_ROWS, _CONTEXT_LEN = 8, 1024
"""Where the cost of context is measured; a shorter context where there is less room."""


def profile_steps(runner: ModelRunner) -> StepProfile:
    """Milliseconds of a forward by the tokens it takes, each with logits, what context adds, and
    what a token without logits costs."""
    ms = {size: step_ms(runner, size) for size in step_sizes(runner)}
    return StepProfile(ms, _context_ms(runner, ms), prompt_share(runner, ms))


def _context_ms(runner: ModelRunner, ms: Mapping[int, float]) -> float:
    room = min(runner.kv.num_slots, runner.max_model_len) - _CONTEXT_ROWS
    context_len = min(_CONTEXT_LEN, room)
    if _CONTEXT_ROWS not in ms or context_len <= 0:
        return 0.0
    added_ms = step_ms(runner, _CONTEXT_ROWS, context_len) - ms[_CONTEXT_ROWS]
    return max(0.0, added_ms) / (_CONTEXT_ROWS * context_len)


def step_sizes(runner: ModelRunner, context_len: int = 0) -> list[int]:
    """Those of STEP_SIZES that fit behind so many tokens."""
    room = min(runner.kv.num_slots, runner.max_model_len) - context_len
    return [size for size in STEP_SIZES if size <= room]


def step_ms(
    runner: ModelRunner, num_tokens: int, context_len: int = 0, num_logits: int | None = None
) -> float:
    """The median of some forwards of so many tokens of one sequence behind so many others; with
    logits after all of these tokens, or after so many of the last."""
    wanted = num_tokens if num_logits is None else num_logits
    rounds = [_forward_ms(runner, num_tokens, context_len, wanted)]
    while len(rounds) < _MAX_ROUNDS and sum(rounds) < _SIZE_BUDGET_MS:
        rounds.append(_forward_ms(runner, num_tokens, context_len, wanted))
    return median(rounds)


def prompt_share(runner: ModelRunner, ms: Mapping[int, float]) -> float:
    """What a token of a prompt costs, over one with logits; `ms` is of such, by number of tokens.
    Over 0, at most 1."""
    cost, size = StepCost(ms), max(ms)
    read_ms = step_ms(runner, size, num_logits=1)
    return max(1, sum(cost(n) <= read_ms for n in range(1, size + 1))) / size


def kept_profile(runner: ModelRunner, num_threads: int) -> StepProfile:
    """The profile of an earlier start of this model, dtype and build on this device, if a step of
    one token takes as long as it did then; else a new one, which is kept."""
    file = _profile_file(runner, num_threads)
    kept = _read(file, step_sizes(runner))
    if kept is not None:
        now_ms = step_ms(runner, 1)
        if 1 / _TRUSTED <= now_ms / kept.ms[1] <= _TRUSTED:
            return kept
    profile = profile_steps(runner)
    _write(file, profile)
    return profile


def device_name(device: torch.device) -> str:
    """What runs the steps, for a person."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_name() or device.type


def _forward_ms(runner: ModelRunner, num_tokens: int, context_len: int, num_logits: int) -> float:
    cache = runner.kv.open()
    assert runner.kv.reserve(cache, context_len + num_tokens)
    part = SequenceSlice(cache.block_table, context_len, [0] * num_tokens, num_logits)
    started = time.perf_counter()
    logits = runner.forward([part])
    logits[-1, -1].item()  # A GPU has only been told what to do until someone looks.
    elapsed_ms = 1e3 * (time.perf_counter() - started)
    runner.kv.close(cache)
    return elapsed_ms


def _profile_file(runner: ModelRunner, num_threads: int) -> Path:
    """The fingerprint names model, revision, dtype and kernels."""
    parts = (
        _FORMAT,
        runner.card.fingerprint,
        runner.card.decoder,
        device_name(runner.device),
        num_threads,
        runner.kv.block_size,
        torch.__version__,
    )
    name = hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
    return cache_folder() / "profiles" / f"{name}.json"


def _read(file: Path, sizes: Sequence[int]) -> StepProfile | None:
    """None if there is none, or none that can be used: it is only a cache."""
    try:
        told = json.loads(file.read_text())
        ms = {int(size): float(ms) for size, ms in told["ms"].items()}
        kept = StepProfile(ms, float(told["context_ms"]), float(told["prompt_share"]))
    except (OSError, ValueError, AttributeError, TypeError, KeyError):
        return None
    is_sound = sorted(ms) == list(sizes) and min(ms.values()) > 0 and kept.context_ms >= 0
    return kept if is_sound and 0 < kept.prompt_share <= 1 else None


def _write(file: Path, profile: StepProfile) -> None:
    """Whole or not at all; where it cannot be kept it is measured again next time."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=file.parent, delete=False) as new:
            json.dump(asdict(profile), new)
        os.replace(new.name, file)
    except OSError:
        return


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "")
