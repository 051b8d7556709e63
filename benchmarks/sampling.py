"""What does drawing the tokens of a step cost? Milliseconds on one thread, and the ratio to greedy.

    python -m benchmarks.sampling

On logits of the embedded model, and on flat random ones, which leave most to look at. For a
vocabulary larger than the model's, its logits are repeated, each time a little lower.
"""

from __future__ import annotations

import time

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.types import SamplingParams
from engine.embedded import embedded_model_folder
from engine.sampling import SampleRow, sample
from tests.support import prompts

NUMS_ROWS = (1, 8, 32, 72)
VOCAB_SIZES = (49_152, 151_936)
REPEATED_LOWER = 4.0
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "t 1": SamplingParams(),
    "t 0.7, top_p 0.9": SamplingParams(temperature=0.7, top_p=0.9),
    "top_k 50": SamplingParams(top_k=50),
}
NUM_RUNS = 20


def _model_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    """The model's own of consecutive positions, [num_rows, vocab]."""
    folder = embedded_model_folder()
    text = "\n".join([*prompts.CHAT, *prompts.CODE])
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(ids[:, : 2 * num_rows]).logits[0, -num_rows:]
    num_times = -(-vocab_size // logits.shape[1])
    return torch.cat([logits - REPEATED_LOWER * i for i in range(num_times)], 1)[:, :vocab_size]


def _flat_logits(num_rows: int, vocab_size: int) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))


def _best_ms(logits: torch.Tensor, params: SamplingParams) -> float:
    rows = [SampleRow(params, 7 * index, 100 + index) for index in range(len(logits))]
    seconds = []
    for _ in range(NUM_RUNS):
        started = time.perf_counter()
        sample(logits, rows)
        seconds.append(time.perf_counter() - started)
    return min(seconds) * 1e3


def main() -> None:
    torch.set_num_threads(1)
    print(f"{'logits':8}{'vocab':>8}{'rows':>6}", *(f"{name:>20}" for name in PARAMS))
    for name, make in (("model", _model_logits), ("flat", _flat_logits)):
        for vocab_size in VOCAB_SIZES:
            logits = make(max(NUMS_ROWS), vocab_size).contiguous()
            for num_rows in NUMS_ROWS:
                ms = [_best_ms(logits[:num_rows], params) for params in PARAMS.values()]
                cells = (f"{each:9.2f} ms ({each / ms[0]:5.1f})" for each in ms)
                print(
                    f"{name:8}{vocab_size:8}{num_rows:6}", *(f"{c:>20}" for c in cells), flush=True
                )


if __name__ == "__main__":
    main()
