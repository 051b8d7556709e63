"""Is the engine ahead of its peers on this machine, and what does a step of it cost?

    python -m benchmarks.engine [--vllm-python PATH] [--implementation NAME] [--model FOLDER]

One compute thread for each. Peers get the same prompts and weights, in bfloat16 and in float32,
since a CPU may be much slower at one of them; they and the engine take turns, and the best round
counts. vLLM takes part if an interpreter that has it is named, here or by PACELINE_VLLM_PYTHON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import verifier_service.engine
from benchmarks.engine_start import memory_and_start
from benchmarks.forward_costs import prefill, row_costs
from benchmarks.measuring import Prompts, generate, print_table, short_prompts
from benchmarks.vllm_peer import VllmPeer
from cluster.config import EMBEDDED_MODEL, KVCacheConfig, ModelConfig
from engine.embedded import embedded_model_folder
from engine.loader import load_model
from engine.model_runner import ModelRunner
from verifier_service.scheduler import Scheduler

CONCURRENCIES = (1, 8, 32)
NUM_TOKENS = 128
NUM_PEER_TOKENS = 32
"""Fewer, since some take minutes. It favours them: their contexts are shorter."""
NUM_ROUNDS = 2
PHASES = {
    "forward": (ModelRunner, "forward"),
    "draw": (verifier_service.engine, "draw"),
    "schedule": (Scheduler, "schedule"),
    "commit KV": (Scheduler, "commit"),
}
"""Where a step's time goes, by the function that takes it; none calls another."""

Peer = Callable[[Prompts, int], float]
"""Seconds to give every prompt so many tokens, greedy."""


# --- 1: peers -----------------------------------------------------------------------------------


def transformers_peer(folder: Path, dtype: torch.dtype) -> Peer:
    """transformers' own generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def seconds(prompts: Prompts, num_tokens: int) -> float:
        longest = max(map(len, prompts))
        padded = [(longest - len(prompt_ids), prompt_ids) for prompt_ids in prompts]
        started = time.perf_counter()
        model.generate(
            torch.tensor([[0] * n + prompt_ids for n, prompt_ids in padded]),
            attention_mask=torch.tensor([[0] * n + [1] * (longest - n) for n, _ in padded]),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return time.perf_counter() - started

    return seconds


@contextlib.contextmanager
def running_peers(folder: Path, vllm_python: str | None) -> Iterator[dict[str, Peer]]:
    peers, vllm = {}, []
    for dtype in (torch.bfloat16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        peers[f"transformers {name}"] = transformers_peer(folder, dtype)
        if vllm_python:
            vllm.append(VllmPeer(vllm_python, folder, name))
            peers[vllm[-1].name] = vllm[-1].seconds
    yield peers
    for peer in vllm:
        peer.close()


def decoding_speeds(runner: ModelRunner, peers: dict[str, Peer], prompts: Prompts) -> list[float]:
    """Tokens per second of the engine and of each peer, up to the first token left out."""
    ours: list[float] = []
    theirs: list[list[tuple[float, float]]] = []
    for _ in range(NUM_ROUNDS):
        ours.append(generate(runner, prompts, NUM_TOKENS).tokens_per_s)
        theirs.append(
            [(peer(prompts, NUM_PEER_TOKENS), peer(prompts, 1)) for peer in peers.values()]
        )
    best = [tuple(map(min, zip(*rounds, strict=True))) for rounds in zip(*theirs, strict=True)]
    num_tokens = len(prompts) * (NUM_PEER_TOKENS - 1)
    return [max(ours), *(num_tokens / (all_s - first_s) for all_s, first_s in best)]


def compare(runner: ModelRunner, folder: Path, vllm_python: str | None) -> None:
    prompts = short_prompts(runner, max(CONCURRENCIES))
    with running_peers(folder, vllm_python) as peers:
        names = ["ours", *peers]
        speeds = [decoding_speeds(runner, peers, prompts[:n]) for n in CONCURRENCIES]
    ratios = [[column[0] / speed for speed in column] for column in speeds]
    rows = [
        [name, *(f"{column[i]:.1f}" for column in speeds), *(f"{r[i]:.2f}" for r in ratios)]
        for i, name in enumerate(names)
    ]
    absent = "" if vllm_python else "; vLLM did not take part: no interpreter that has it was named"
    print_table(
        "1. Decoding, tokens/s, and ours / theirs",
        ["sequences", *map(str, CONCURRENCIES), *(f"ratio {n}" for n in CONCURRENCIES)],
        rows,
        f"against the fastest peer of each column: {_least(ratios)} times as fast; {NUM_TOKENS} "
        f"tokens of ours, {NUM_PEER_TOKENS} of theirs{absent}",
    )


def _least(ratios: list[list[float]]) -> str:
    return ", ".join(f"{min(column[1:]):.2f}" for column in ratios)


# --- 3: the step outside the forward ------------------------------------------------------------


@contextlib.contextmanager
def timed_phases() -> Iterator[dict[str, float]]:
    """Seconds spent in each of PHASES from here on."""
    clock = dict.fromkeys(PHASES, 0.0)

    def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            started = time.perf_counter()
            result = function(*args)
            clock[phase] += time.perf_counter() - started
            return result

        return call

    with contextlib.ExitStack() as stack:
        for phase, (owner, name) in PHASES.items():
            wrapped = timed(phase, getattr(owner, name))
            stack.enter_context(mock.patch.object(owner, name, wrapped))
        yield clock


def step_phases(runner: ModelRunner) -> None:
    prompts = short_prompts(runner, max(CONCURRENCIES))
    runs = []
    for temperature in (0.0, 1.0):
        with timed_phases() as clock:
            runs.append(generate(runner, prompts, NUM_TOKENS, temperature, clock))
    seconds = {phase: [run.phase_s(phase) for run in runs] for phase in PHASES}
    seconds["the rest"] = [run.seconds - sum(map(run.phase_s, PHASES)) for run in runs]
    rows = []
    for phase, spent in seconds.items():
        pairs = list(zip(spent, runs, strict=True))
        cells = [
            (f"{1e3 * s / run.num_decoding:.2f}", f"{s / run.seconds:.1%}") for s, run in pairs
        ]
        rows.append([phase, *cells[0], *cells[1]])
    greedy, drawn = (1 - run.phase_s("forward") / run.seconds for run in runs)
    print_table(
        f"3. A step of {len(prompts)} sequences by phase",
        ["", "greedy, ms", "share", "T = 1, ms", "share"],
        rows,
        f"outside the forward: {greedy:.1%} of a greedy step, {drawn:.1%} at temperature 1",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--vllm-python", default=os.environ.get("PACELINE_VLLM_PYTHON"))
    parser.add_argument(
        "--implementation", default="auto", help="auto, native, torch, transformers"
    )
    parser.add_argument("--model", default=EMBEDDED_MODEL, help="a folder, or the embedded model")
    arguments = parser.parse_args()
    config = ModelConfig(source=arguments.model, implementation=arguments.implementation)
    embedded = config.source == EMBEDDED_MODEL
    folder = embedded_model_folder() if embedded else Path(config.source)
    model = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    runner = ModelRunner(load_model(config), KVCacheConfig())
    print(
        f"{runner.card.name}, {runner.card.decoder}; load of the machine {os.getloadavg()[0]:.1f}"
    )
    compare(runner, folder, arguments.vllm_python)
    row_costs(runner)
    step_phases(runner)
    prefill(runner, model)
    memory_and_start(config, folder)


if __name__ == "__main__":
    main()
