"""How many more drafts do the ratio tests accept than coupling does?

    python -m benchmarks.verification_rules [--model SOURCE] [--drafter SOURCE]

The engine decodes some prompts with a model drafter of the same process, which answers at once, and
every draft is verified. So what is told is acceptance alone, per step of a sequence: no wire, no
planner. Each rule and temperature decodes the same prompts with the same keys. Beside it the CPU
time of the engine's thread outside of forwards, per step of a sequence, the drafter's included.
"""

from __future__ import annotations

import argparse
import queue
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from tokenizers import Tokenizer

from benchmarks.measuring import print_table
from cluster.config import (
    EMBEDDED_DRAFTER,
    EMBEDDED_MODEL,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
    VerificationRule,
)
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import (
    Draft,
    ErrorEvent,
    FinishEvent,
    GenerationRequest,
    Path,
    SamplingParams,
    SpeculationStats,
    make_request_key,
)
from drafter_service.model_drafter import ModelDrafter
from engine.decoder import SequenceSlice
from engine.drafting.interface import DraftRequest, DraftSession
from engine.loader import load_model
from engine.model_runner import ModelRunner
from verifier_service.engine import Engine
from verifier_service.events import (
    DraftArrived,
    DraftSessionLive,
    EngineOutput,
    Submitted,
)

PROMPTS = [
    "Explain to a child why the sky is blue.",
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Give me five tips for learning a new language, with a reason for each.",
    "Write a Python function that counts the words of a text, and explain it.",
    "What happened in the French Revolution? Tell it in order.",
    "Compare cats and dogs as pets.",
]
RULES: tuple[VerificationRule, ...] = ("coupled", "rejection", "block")
TEMPERATURES = (0.7, 1.0)
BLOCK_SIZE = 16


class CountingRunner(ModelRunner):
    """Knows how long its forwards took."""

    forward_s = 0.0

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        began = time.thread_time()
        logits = super().forward(slices)
        self.forward_s += time.thread_time() - began
        return logits


def runner_of(source: str, num_tokens: int) -> CountingRunner:
    num_blocks = len(PROMPTS) * (num_tokens // BLOCK_SIZE + 8)
    kv = KVCacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, prefix_cache=False)
    return CountingRunner(load_model(ModelConfig(source=source)), kv)


class DraftingEngine:
    """An engine with its drafter in the same thread."""

    def __init__(self, runner: ModelRunner, drafter: ModelDrafter, rule: VerificationRule) -> None:
        self._drafter = drafter
        self._committed: dict[int, list[int]] = {}
        self._depth: dict[int, int] = {}
        self._ended: queue.Queue[FinishEvent | ErrorEvent] = queue.Queue()
        speculation = SpeculationConfig(
            planner="fixed", local_drafters=(), draft_deadline_ms=60_000.0, verification=rule
        )
        self._engine = Engine(runner, SchedulerConfig(), speculation, self._take)

    def run(self, requests: Sequence[GenerationRequest]) -> list[SpeculationStats]:
        """What speculation did for each."""
        for seq, request in enumerate(requests):
            self._engine.inbox.put(Submitted(seq, request))
        self._engine.start()
        ends = [self._ended.get() for _ in requests]
        self._engine.stop(timeout_s=10.0)
        failed = [end.message for end in ends if isinstance(end, ErrorEvent)]
        if failed:
            raise RuntimeError(f"requests failed: {failed}")
        return [end.stats for end in ends if isinstance(end, FinishEvent)]

    def _take(self, output: EngineOutput) -> None:
        """In the engine's thread: all drafts that a step asks for are made in one batch."""
        orders = output.orders
        for order in orders.opens:
            session = DraftSession(
                order.seq,
                order.token_ids,
                order.num_prompt_tokens,
                order.request_key,
                order.sampling,
                wants_laws=order.wants_laws,
            )
            self._drafter.begin(session)
            self._committed[order.seq] = list(order.token_ids)
            self._depth[order.seq] = order.num_speculative_tokens
            live = DraftSessionLive(order.seq, self._drafter.name, "", order.wants_laws)
            self._engine.inbox.put(live)
        for commit in orders.commits:
            self._drafter.extend(commit.seq, commit.token_ids)
            self._committed[commit.seq] += commit.token_ids
        for seq in orders.closes:
            self._drafter.end(seq)
            del self._committed[seq]
        asked = {order.seq for order in orders.opens} | {commit.seq for commit in orders.commits}
        self._draft(sorted(asked & self._committed.keys()))
        for item in output.events:
            if isinstance(item.event, FinishEvent | ErrorEvent):
                self._ended.put(item.event)

    def _draft(self, seqs: list[int]) -> None:
        while seqs:
            requests = [DraftRequest(seq, self._depth[seq]) for seq in seqs]
            drafts = self._drafter.draft(requests)
            for seq, nodes in zip(seqs, drafts, strict=True):
                if nodes is not None:
                    committed = self._committed[seq]
                    num_tokens = len(committed)
                    draft = Draft(num_tokens, prefix_hash(committed), nodes, answers=num_tokens)
                    self._engine.inbox.put(DraftArrived(seq, draft, time.monotonic()))
            seqs = [seq for seq, nodes in zip(seqs, drafts, strict=True) if nodes is None]


@dataclass(frozen=True)
class Measured:
    accepted_per_step: float
    accepted_per_draft: float
    other_ms: float
    """Per step of a sequence."""


def measure(
    target: CountingRunner,
    draft_runner: CountingRunner,
    requests: Sequence[GenerationRequest],
    rule: VerificationRule,
    vocab_size: int,
) -> Measured:
    drafter = ModelDrafter(draft_runner, vocab_size=vocab_size)
    forward_s = target.forward_s + draft_runner.forward_s
    began = time.process_time()
    stats = DraftingEngine(target, drafter, rule).run(requests)
    spent_s = time.process_time() - began
    spent_s -= target.forward_s + draft_runner.forward_s - forward_s
    num_steps = sum(one.num_steps for one in stats)
    num_accepted = sum(one.num_accepted_tokens for one in stats)
    num_drafted = sum(one.num_draft_tokens for one in stats)
    return Measured(num_accepted / num_steps, num_accepted / num_drafted, 1e3 * spent_s / num_steps)


def requests_of(
    target: ModelRunner, temperature: float, num_tokens: int, depth: int
) -> list[GenerationRequest]:
    tokenizer: Tokenizer = Tokenizer.from_str(target.card.tokenizer_json)
    requests = []
    for index, prompt in enumerate(PROMPTS):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        prompt_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        requests.append(
            GenerationRequest(
                request_id=str(index),
                request_key=make_request_key(b"benchmark", 0, prompt_ids),
                prompt_ids=prompt_ids,
                sampling=SamplingParams(temperature=temperature),
                max_tokens=num_tokens,
                ignore_eos=True,
                path=Path.SPECULATIVE,
                num_speculative_tokens=depth,
            )
        )
    return requests


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--drafter", default=EMBEDDED_DRAFTER)
    parser.add_argument("--tokens", type=int, default=128, help="per prompt")
    parser.add_argument("--depth", type=int, default=5, help="drafts per step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    target = runner_of(args.model, args.tokens)
    draft_runner = runner_of(args.drafter, args.tokens)
    rows = []
    for temperature in TEMPERATURES:
        requests = requests_of(target, temperature, args.tokens, args.depth)
        coupled = 0.0
        for rule in RULES:
            result = measure(target, draft_runner, requests, rule, target.card.vocab_size)
            coupled = coupled or result.accepted_per_step
            accepted = result.accepted_per_step
            print(f"temperature {temperature:g}, {rule}: {accepted:.2f} a step", flush=True)
            rows.append(
                [
                    f"{temperature:g}",
                    rule,
                    f"{result.accepted_per_step:.2f}",
                    f"{result.accepted_per_draft:.1%}",
                    f"{(1 + result.accepted_per_step) / (1 + coupled):.3f}",
                    f"{result.other_ms:.2f}",
                ]
            )
    columns = ["temperature", "rule", "accepted a step", "of drafts", "tokens a step", "other ms"]
    title = f"{args.drafter} for {args.model}, {args.depth} drafts a step"
    print_table(
        title, columns, rows, "tokens a step: over coupling's; other ms: outside of forwards"
    )


if __name__ == "__main__":
    main()
