"""How much faster does one stream come with drafts, and what is in the way of more?

    python -m benchmarks.speculation [--prompts-per-kind N] [--delay-ms 5,20,60] [--output FILE]

A verifier in this process on one core, a drafter in a process of its own on another, gRPC between
them. Held-out prompts of five kinds, and texts to copy, are answered plain and with drafts by
turns: those of the verifier's own suffix drafter, those of the drafter replica, and of both as a
request gets them that names none. The answers must be equal. Speed is that of decoding, from the
first token on.

With `--delay-ms` every message to and from the drafter takes so much longer each way, and what the
planner then decides is told.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path as FilePath
from typing import Any

import torch
from tokenizers import Tokenizer

from benchmarks.measuring import print_table
from cluster.config import (
    EMBEDDED_DRAFTER,
    EMBEDDED_MODEL,
    DrafterConfig,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from cluster.protocol.messages import TargetHello
from cluster.types import (
    ErrorEvent,
    FinishEvent,
    GenerationEvent,
    GenerationRequest,
    Member,
    Path,
    SamplingParams,
    TokensEvent,
    make_request_key,
)
from drafter_service.distill.prompts import ASKED_KINDS, Kind, held_out_prompts
from drafter_service.service import DrafterService
from engine.loader import load_model
from engine.model_runner import ModelRunner
from tests.support.fault_proxy import FaultProxy
from tests.support.polling import eventually
from verifier_service.draft_client import DraftClient
from verifier_service.draft_planner import Decision
from verifier_service.engine import Engine
from verifier_service.events import EngineOutput, Submitted
from verifier_service.grpc_network import GrpcNetwork
from verifier_service.planner import StepCost, StepProfile
from verifier_service.step_profile import profile_steps

PLAIN = "plain"
DRAFTERS = {"local": "suffix", "remote": "model", "both": "auto"}
"""What a request of each arm names."""
COPY = "copy"
KINDS = (*ASKED_KINDS, COPY)
COPIED_SHARE = 8
"""A text to copy stands twice in its prompt, and then one part of so many of it."""
PROMPT_SEED = 7
MIN_TOKENS = 8
"""Shorter answers tell nothing."""
SHOWN_POSITIONS = 8
START_TIMEOUT_S = 120.0


# --- the drafter's process ------------------------------------------------------------------------


def serve_drafter(source: str, core: int, delays_ms: Sequence[float], pipe: Connection) -> None:
    """Tell at which members the drafter is reached, by delay, and serve until killed."""
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    asyncio.run(_serve(source, delays_ms, pipe))


async def _serve(source: str, delays_ms: Sequence[float], pipe: Connection) -> None:
    config = DrafterConfig(kind="model", model=ModelConfig(source=source))
    service = await DrafterService.start(config, host="127.0.0.1")
    member = Member(service.incarnation, service.address)
    async with AsyncExitStack() as stack:
        proxies = [
            await stack.enter_async_context(FaultProxy(member, delay_ms)) for delay_ms in delays_ms
        ]
        through = {proxy.delay_ms: proxy.member for proxy in proxies}
        pipe.send({0.0: member, **through})
        await asyncio.Event().wait()


@contextmanager
def drafter_process(
    source: str, core: int, delays_ms: Sequence[float]
) -> Iterator[dict[float, Member]]:
    """The drafter by the delay with which it is reached."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=serve_drafter, args=(source, core, delays_ms, theirs), daemon=True
    )
    process.start()
    try:
        if not ours.poll(START_TIMEOUT_S):
            raise SystemExit("the drafter does not start")
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


# --- the verifier ---------------------------------------------------------------------------------


@dataclass
class Answer:
    """One answer, and what was done for it after its first token."""

    token_ids: tuple[int, ...]
    decode_s: float
    cpu_s: float
    """Of this process, in the same time."""
    num_steps: int
    """That gave its tokens, without the one that gave the first."""
    waited_s: float
    drafted: tuple[int, ...]
    """By position."""
    accepted: tuple[int, ...]
    counts: Counter[str]
    """Accepted chains and corrections, and of how many the next draft was there already; what the
    planner decided."""

    @property
    def num_decoded(self) -> int:
        return len(self.token_ids) - 1


class Verifier:
    """An engine and its draft client, both in this process; no router."""

    def __init__(self, runner: ModelRunner, profile: StepProfile) -> None:
        self._loop = asyncio.get_running_loop()
        config = SpeculationConfig()
        self.engine = Engine(runner, SchedulerConfig(), config, self._post, profile)
        hello = TargetHello("benchmark", runner.card.name, runner.card.vocabulary)
        self._client = DraftClient(config, hello, self.engine.inbox.put, GrpcNetwork(hello))
        self._events: list[tuple[float, float, GenerationEvent]] = []
        self._ended = asyncio.Event()
        self._num_submitted = 0
        self.engine.start()

    def _post(self, output: EngineOutput) -> None:
        """In the engine's thread."""
        now, cpu = time.perf_counter(), time.process_time()
        self._events += [(now, cpu, item.event) for item in output.events]
        self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: EngineOutput) -> None:
        self._client.apply(output.orders)
        for verdict in output.verdicts:
            self._client.record(verdict)
        if any(isinstance(item.event, FinishEvent | ErrorEvent) for item in output.events):
            self._ended.set()

    async def use(self, drafter: Member) -> None:
        self._client.update_members({drafter.incarnation: drafter})
        await eventually(lambda: [load.state for load in self._client.loads()] == ["ready"], 20)

    async def answer(self, request: GenerationRequest) -> Answer:
        before, waited_s = self._counts(), self.engine.recorder.draft_wait_seconds.sum
        self._events, self._num_submitted = [], self._num_submitted + 1
        self._ended.clear()
        self.engine.inbox.put(Submitted(self._num_submitted, request))
        await self._ended.wait()
        await eventually(lambda: self._client.num_sessions == 0)
        end = self._events[-1][-1]
        if not isinstance(end, FinishEvent):
            raise SystemExit(f"a request failed: {end}")
        told = [(now, cpu, e) for now, cpu, e in self._events if isinstance(e, TokensEvent)]
        return Answer(
            tuple(token_id for *_, event in told for token_id in event.token_ids),
            told[-1][0] - told[0][0],
            told[-1][1] - told[0][1],
            end.stats.num_steps - 1,
            self.engine.recorder.draft_wait_seconds.sum - waited_s,
            end.stats.drafted_per_position,
            end.stats.accepted_per_position,
            self._counts() - before,
        )

    def _counts(self) -> Counter[str]:
        (load,) = self._client.loads()
        return Counter(
            {
                "accepted chains": load.num_accepted_chains,
                "ready chains": load.num_ahead_hits,
                "corrections": load.num_corrections,
                "ready corrections": load.num_correction_hits,
                **self.engine.decisions,
            }
        )

    async def close(self) -> None:
        self.engine.stop(5.0)
        await self._client.close()


# --- arms -----------------------------------------------------------------------------------------


@dataclass
class Total:
    """Of some answers of one arm, beside the same answers plain."""

    num_tokens: int = 0
    num_steps: int = 0
    plain_s: float = 0.0
    decode_s: float = 0.0
    plain_cpu_s: float = 0.0
    cpu_s: float = 0.0
    waited_s: float = 0.0
    drafted: Counter[int] = field(default_factory=Counter)
    accepted: Counter[int] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)

    def add(self, plain: Answer, drafted: Answer) -> None:
        self.num_tokens += drafted.num_decoded
        self.num_steps += drafted.num_steps
        self.plain_s += plain.decode_s
        self.decode_s += drafted.decode_s
        self.plain_cpu_s += plain.cpu_s
        self.cpu_s += drafted.cpu_s
        self.waited_s += drafted.waited_s
        self.drafted.update(dict(enumerate(drafted.drafted)))
        self.accepted.update(dict(enumerate(drafted.accepted)))
        self.counts.update(drafted.counts)

    @property
    def length(self) -> float:
        """Tokens of a step."""
        return self.num_tokens / self.num_steps

    @property
    def speedup(self) -> float:
        return self.plain_s / self.decode_s

    @property
    def cpu_speedup(self) -> float:
        """By CPU time of the verifier, and what it waited."""
        return self.plain_cpu_s / (self.cpu_s + self.waited_s)

    def share(self, part: str, of: str) -> str:
        return f"{self.counts[part]}/{self.counts[of]}"

    def cells(self, cost: StepCost) -> list[str]:
        rows = 1.0 + sum(self.drafted.values()) / self.num_steps
        longer = cost(round(rows)) / cost(1)
        return [
            str(self.num_tokens),
            f"{1e3 * self.plain_s / self.num_tokens:.1f}",
            f"{self.speedup:.2f}",
            f"{self.cpu_speedup:.2f}",
            f"{self.length:.2f}",
            f"{self.speedup / self.length:.2f}",
            f"{rows:.1f}",
            f"{longer:.2f}",
            f"{1e3 * self.waited_s / self.num_steps:.1f}",
            self.share("ready chains", "accepted chains"),
            self.share("ready corrections", "corrections"),
        ]

    def positions(self) -> list[str]:
        """Share of the steps in which the draft at each position was accepted."""
        return [f"{self.accepted[place] / self.num_steps:.2f}" for place in range(SHOWN_POSITIONS)]

    def record(self) -> dict[str, Any]:
        return {**vars(self), "speedup": self.speedup, "cpu_speedup": self.cpu_speedup}


COLUMNS = (
    "tokens",
    "plain ms",
    "faster",
    "by CPU",
    "tokens/step",
    "hidden",
    "rows",
    "T",
    "waited ms",
    "ready chains",
    "corrections",
)
READING = """\
plain ms: a token of plain decoding; by CPU: faster by the verifier's CPU time and what it waited,
which other work on the machine hardly changes; hidden: faster over tokens/step; rows: of a step; T:
a step of so many rows over one of one row, so that tokens/step over T is about what can be had;
waited ms: a step; ready chains, corrections: the drafter's next draft was there when its last one
was accepted whole, or was corrected"""


def requests_of(
    runner: ModelRunner, args: argparse.Namespace
) -> list[tuple[str, GenerationRequest]]:
    """Held-out prompts in chat format, and to copy what some of them ask to edit, as it is."""
    tokenizer: Tokenizer = Tokenizer.from_str(runner.card.tokenizer_json)
    asked = []
    for prompt in held_out_prompts(PROMPT_SEED, args.prompts_per_kind):
        text = f"<|im_start|>user\n{prompt.text}<|im_end|>\n<|im_start|>assistant\n"
        asked.append((str(prompt.kind), text))
        if prompt.kind is Kind.EDIT:
            copied = prompt.text.partition("\n\n")[2] + "\n\n"
            asked.append((COPY, 2 * copied + copied[: len(copied) // COPIED_SHARE]))
    requests = []
    for kind, text in asked:
        prompt_ids = tuple(tokenizer.encode(text, add_special_tokens=False).ids)
        request = GenerationRequest(
            request_id="",
            request_key=make_request_key(b"benchmark", 0, prompt_ids),
            prompt_ids=prompt_ids,
            sampling=SamplingParams(temperature=args.temperature),
            max_tokens=args.tokens,
        )
        if kind in args.kinds:
            requests.append((kind, request))
    return requests


Totals = dict[str, dict[str, Total]]
"""Arm -> kind."""


async def measure(
    verifier: Verifier, arms: Sequence[str], requests: Sequence[tuple[str, GenerationRequest]]
) -> Totals:
    """Every request by every arm, plain among them, in an order that turns."""
    totals: Totals = {arm: defaultdict(Total) for arm in arms}
    ways = [PLAIN, *arms]
    for index, (kind, request) in enumerate(requests):
        answers = {}
        for way in ways[index % len(ways) :] + ways[: index % len(ways)]:
            answers[way] = await verifier.answer(
                replace(
                    request,
                    request_id=f"{index}-{way}",
                    cache_salt=f"{index}-{way}",  # None gains by what another has computed.
                    path=Path.PLAIN if way == PLAIN else Path.SPECULATIVE,
                    drafter=DRAFTERS.get(way, "auto"),
                )
            )
        for arm in arms:
            if answers[arm].token_ids != answers[PLAIN].token_ids:
                raise SystemExit(f"drafts changed an answer: {kind}, {arm}, prompt {index}")
            if answers[PLAIN].num_decoded >= MIN_TOKENS:
                totals[arm][kind].add(answers[PLAIN], answers[arm])
        print(f"  {kind}, {answers[PLAIN].num_decoded} tokens", flush=True)
    return totals


# --- what is told ---------------------------------------------------------------------------------


def tell(title: str, totals: Totals, cost: StepCost) -> None:
    """Tables of each arm."""
    for arm, by_kind in totals.items():
        rows = [[kind, *total.cells(cost)] for kind, total in by_kind.items()]
        print_table(f"{title}, {arm}", ["kind", *COLUMNS], rows, READING)
        positions = [[kind, *total.positions()] for kind, total in by_kind.items()]
        places = [str(place + 1) for place in range(SHOWN_POSITIONS)]
        print_table(
            f"{title}, {arm}: share of steps in which the draft at a position was accepted",
            ["kind", *places],
            positions,
            "a step without a draft there counts as one that refused it",
        )


def tell_decisions(totals: Totals, verifier: Verifier) -> None:
    """Why the planner did what it did."""
    counts: Counter[str] = Counter()
    for by_kind in totals.values():
        for total in by_kind.values():
            counts.update(total.counts)
    for decision in Decision:
        print(f"  {counts[decision]:5}  {decision}")
    load = verifier.engine.load()
    print(
        f"  a draft that is due takes {verifier.engine.draft_wait_ms:.1f} ms to come, a step "
        f"{load.step_ms:.1f} ms; {verifier.engine.trial_reason}",
        flush=True,
    )


async def run(args: argparse.Namespace, runner: ModelRunner) -> dict[str, Any]:
    delays_ms = [0.0, *args.delay_ms]
    profile = profile_steps(runner)
    cost = StepCost(profile.ms)
    sizes = [size for size in profile.ms if size > 1]
    print(f"a step of one row takes {cost(1):.1f} ms, of so many rows so many times as long:")
    print("  " + ", ".join(f"{size}: {cost(size) / cost(1):.2f}" for size in sizes))
    requests = requests_of(runner, args)
    report: dict[str, Any] = {"profile_ms": profile.ms}
    with drafter_process(args.drafter, args.cores[1], args.delay_ms) as members:
        for delay_ms in delays_ms:
            arms = ["both"] if delay_ms else args.arms
            verifier = Verifier(runner, profile)
            await verifier.use(members[delay_ms])
            await measure(verifier, arms, requests[:1])  # to warm up
            totals = await measure(verifier, arms, requests)
            title = f"{delay_ms:g} ms of delay each way" if delay_ms else "no delay"
            tell(title, totals, cost)
            tell_decisions(totals, verifier)
            report[f"{delay_ms:g}"] = {
                arm: {kind: total.record() for kind, total in by_kind.items()}
                for arm, by_kind in totals.items()
            }
            await verifier.close()
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--drafter", default=EMBEDDED_DRAFTER)
    parser.add_argument("--kinds", default=",".join(KINDS), help="(%(default)s)")
    parser.add_argument("--arms", default="local,remote,both", help="(%(default)s)")
    parser.add_argument("--prompts-per-kind", type=int, default=8, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer (%(default)s)")
    parser.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    parser.add_argument("--delay-ms", default="", help="each way, as in 5,20,60")
    parser.add_argument("--cores", default="0,1", help="verifier's, drafter's (%(default)s)")
    parser.add_argument("--output", type=FilePath, help="JSON")
    args = parser.parse_args()
    args.kinds, args.arms = args.kinds.split(","), args.arms.split(",")
    args.delay_ms = [float(ms) for ms in args.delay_ms.split(",") if ms]
    args.cores = [int(core) for core in args.cores.split(",")]
    os.sched_setaffinity(0, {args.cores[0]})
    torch.set_num_threads(1)
    kv_cache = KVCacheConfig(num_blocks=256, prefix_cache=False)
    runner = ModelRunner(load_model(ModelConfig(source=args.model)), kv_cache)
    runner.warm_up()
    report = asyncio.run(run(args, runner))
    if args.output:
        args.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
