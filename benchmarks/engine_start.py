"""Memory of a runner, and how long it takes to be warm: in a process of its own, which begins with
neither. Sections of benchmarks/engine.py."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from dataclasses import astuple, dataclass
from pathlib import Path

import psutil

from benchmarks.measuring import block_tables, forward_s, print_table
from cluster.config import KVCacheConfig, ModelConfig
from engine.decoder import SequenceSlice
from engine.loader import load_model
from engine.model_runner import ModelRunner

NUM_BLOCKS = 128
CHUNK_LEN = 256
NUM_RUNS = 2


@dataclass(frozen=True, slots=True)
class Started:
    """What a process tells of its start. Bytes are of its resident memory."""

    imported_s: float
    """Since the process began; so are the others."""
    loaded_s: float
    warm_s: float
    imported_bytes: int
    loaded_bytes: int
    full_bytes: int
    """With every slot of the pool written."""
    peak_bytes: int
    kv_bytes: int
    """Predicted for the pool."""


def start(config: ModelConfig) -> Started:
    """In a new process."""
    imported_s, imported_bytes = _now()
    loaded = load_model(config)
    loaded_s, loaded_bytes = _now()
    runner = ModelRunner(loaded, KVCacheConfig(num_blocks=NUM_BLOCKS))
    runner.warm_up()
    warm_s, _ = _now()
    with block_tables(runner, 1, runner.kv.num_slots) as [table]:
        for first in range(0, runner.kv.num_slots, CHUNK_LEN):
            forward_s(runner, [SequenceSlice(table, first, [1] * CHUNK_LEN, 0)])
    _, full_bytes = _now()
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text(encoding="ascii"))
    return Started(
        imported_s,
        loaded_s,
        warm_s,
        imported_bytes,
        loaded_bytes,
        full_bytes,
        int(peak[1]) << 10 if peak else 0,
        NUM_BLOCKS * loaded.decoder.block_bytes(runner.kv.block_size),
    )


def _now() -> tuple[float, int]:
    process = psutil.Process()
    return time.time() - process.create_time(), process.memory_info().rss


def memory_and_start(config: ModelConfig, folder: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.engine_start", config.model_dump_json()]
    runs = [Started(*json.loads(subprocess.check_output(command))) for _ in range(NUM_RUNS)]
    best = min(runs, key=lambda run: run.warm_s)
    weights = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    base, predicted = best.imported_bytes, weights + best.kv_bytes
    sizes = {
        "weights": (weights, best.loaded_bytes - base),
        f"KV, {NUM_BLOCKS} blocks": (best.kv_bytes, best.full_bytes - best.loaded_bytes),
        "together": (predicted, best.full_bytes - base),
        "peak": (predicted, best.peak_bytes - base),
    }
    print_table(
        "5. Memory, MiB",
        ["", "predicted", "grown"],
        [[name, *(f"{size / 2**20:.0f}" for size in pair)] for name, pair in sizes.items()],
        f"{(best.full_bytes - base) / predicted:.2f} times what weights and KV need, at the peak "
        f"{(best.peak_bytes - base) / predicted:.2f} times; besides {base >> 20} MiB of code",
    )
    seconds = {"imported": best.imported_s, "loaded": best.loaded_s, "warm": best.warm_s}
    print_table(
        "6. Start",
        ["", "s"],
        [[name, f"{s:.1f}"] for name, s in seconds.items()],
        f"a runner is warm {best.warm_s:.1f} s after its process began, of which the model takes "
        f"{best.warm_s - best.imported_s:.1f} s",
    )


if __name__ == "__main__":
    print(json.dumps(astuple(start(ModelConfig.model_validate_json(sys.argv[1])))))
