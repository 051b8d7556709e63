"""vLLM on a CPU as a peer of ours, in a process and a venv of its own.

`VllmPeer` runs this file as a plain script, by the interpreter of that venv; so it may import
nothing of ours. The script says "ready" when the model is loaded. Then each line of its input is
{"prompts": [[token id]], "num_tokens": n}, and each line of its output the seconds that it took to
give every prompt n tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "0",  # one compute thread
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


class VllmPeer:
    """A peer of benchmarks/engine.py. Takes minutes to start: vLLM compiles the model."""

    def __init__(self, python: str, folder: Path, dtype: str) -> None:
        self.name = f"vLLM {dtype}"
        self._process = subprocess.Popen(
            [python, __file__, str(folder), dtype],
            env={**os.environ, **_ENVIRONMENT},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def seconds(self, prompts: list[list[int]], num_tokens: int) -> float:
        assert self._process.stdin is not None
        order = json.dumps({"prompts": prompts, "num_tokens": num_tokens})
        print(order, file=self._process.stdin, flush=True)
        return float(self._answer())

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline().strip()
        if not line:
            raise RuntimeError(f"{self.name} ended with status {self._process.wait()}")
        return line


def main(folder: str, dtype: str) -> None:
    # Libraries print too; answers alone go where the output led.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found]

    model = LLM(model=folder, dtype=dtype, max_model_len=2048, enable_prefix_caching=False)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [{"prompt_token_ids": prompt_ids} for prompt_ids in order["prompts"]]
        sampling = SamplingParams(temperature=0, max_tokens=order["num_tokens"], ignore_eos=True)
        started = time.perf_counter()
        model.generate(prompts, sampling, use_tqdm=False)
        print(time.perf_counter() - started, file=answers, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
