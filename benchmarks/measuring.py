"""What benchmarks of the engine share: driving it in one thread, timing forwards, printing."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.types import GenerationRequest, SamplingParams, TokensEvent
from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner
from verifier_service.engine import Engine
from verifier_service.events import EngineOutput, Stopped, Submitted

Prompts = list[list[int]]


@dataclass
class Steps:
    """The steps that gave every sequence a token; so all of them but the first only decode."""

    num_sequences: int
    ends: list[float] = field(default_factory=list)
    clocks: list[dict[str, float]] = field(default_factory=list)
    """What the clock said at each end: seconds by phase."""

    @property
    def num_decoding(self) -> int:
        return len(self.ends) - 1

    @property
    def seconds(self) -> float:
        """Of those that only decode."""
        return self.ends[-1] - self.ends[0]

    @property
    def tokens_per_s(self) -> float:
        return self.num_sequences * self.num_decoding / self.seconds

    def phase_s(self, phase: str) -> float:
        return self.clocks[-1][phase] - self.clocks[0][phase]


def generate(
    runner: ModelRunner,
    prompts: Prompts,
    num_tokens: int,
    temperature: float = 0.0,
    clock: dict[str, float] | None = None,
) -> Steps:
    """Run a new engine in this thread, on the plain path, until every prompt has its tokens."""
    steps = Steps(len(prompts))
    num_missing = len(prompts) * num_tokens

    def take(output: EngineOutput) -> None:
        nonlocal num_missing
        num_new = sum(isinstance(item.event, TokensEvent) for item in output.events)
        num_missing -= num_new
        if num_new == len(prompts):
            steps.ends.append(time.perf_counter())
            steps.clocks.append(dict(clock or {}))
        if not num_missing:
            engine.inbox.put(Stopped())

    engine = Engine(runner, SchedulerConfig(), SpeculationConfig(), take)
    for seq, prompt_ids in enumerate(prompts):
        request = GenerationRequest(
            request_id=str(seq),
            request_key=seq,
            prompt_ids=tuple(prompt_ids),
            sampling=SamplingParams(temperature=temperature),
            max_tokens=num_tokens,
            ignore_eos=True,
        )
        engine.inbox.put(Submitted(seq, request))
    engine.run()
    return steps


def short_prompts(runner: ModelRunner, count: int) -> Prompts:
    """Of about 15 tokens, all different."""
    tokenizer = Tokenizer.from_str(runner.card.tokenizer_json)
    text = "Question {0}: tell me a long story about the number {0}."
    return [tokenizer.encode(text.format(index)).ids for index in range(count)]


@contextlib.contextmanager
def block_tables(runner: ModelRunner, count: int, num_slots: int) -> Iterator[list[list[int]]]:
    """Of so many sequences, with so many slots each."""
    caches = [runner.kv.open() for _ in range(count)]
    assert all(runner.kv.reserve(cache, num_slots) for cache in caches), "the pool is too small"
    yield [cache.block_table for cache in caches]
    for cache in caches:
        runner.kv.close(cache)


def forward_s(runner: ModelRunner, slices: Sequence[SequenceSlice]) -> float:
    """Seconds that a forward takes."""
    started = time.perf_counter()
    logits = runner.forward(slices)
    logits[-1:, -1:].tolist()  # A GPU has only been told what to do until someone looks.
    return time.perf_counter() - started


def print_table(
    title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], reading: str
) -> None:
    """`reading`: what the table says, in a line."""
    table = [columns, *rows]
    widths = [max(len(row[index]) for row in table) for index in range(len(columns))]
    print(f"\n{title}")
    for row in table:
        cells = (cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))
        print(f"  {row[0]:{widths[0]}}  {'  '.join(cells)}")
    print(reading, flush=True)
