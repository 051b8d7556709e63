"""What do drafting ahead and prepared corrections buy? One verifier and one drafter over gRPC, in
one process, with models that are tiny and forwards that sleep as long as real ones take: so the
figures are the protocol's, whatever machine this is. Each row gives the same text, or it fails.

    python -m benchmarks.draft_ahead
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path as FolderPath

import torch

from cluster.config import (
    AheadConfig,
    DrafterConfig,
    KVCacheConfig,
    ModelConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from cluster.load import DrafterLoad
from cluster.protocol.messages import TargetHello
from cluster.types import GenerationRequest, Member, Path, SamplingParams, TokensEvent
from drafter_service.model_drafter import ModelDrafter
from drafter_service.service import DrafterService
from engine.decoder import SequenceSlice
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from tests.support.polling import eventually
from tests.support.tiny_models import make_blurred_model, make_tiny_model
from verifier_service.draft_client import DraftClient
from verifier_service.engine import Engine
from verifier_service.events import EngineOutput, Submitted
from verifier_service.grpc_network import GrpcNetwork
from verifier_service.planner import StepProfile

DEPTH = 6
NUM_TOKENS = 60
MODES = {
    "on demand": AheadConfig(lead_tokens=0, branches=0),
    "lead": AheadConfig(branches=0),
    "corrections": AheadConfig(lead_tokens=0),
    "both": AheadConfig(),
}


class SlowRunner(ModelRunner):
    """Its forwards take longer."""

    def __init__(self, loaded: LoadedModel, kv: KVCacheConfig, step_ms: float) -> None:
        super().__init__(loaded, kv)
        self._step_s = step_ms / 1e3

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        time.sleep(self._step_s)
        return super().forward(slices)


def slow_runner(folder: FolderPath, step_ms: float) -> SlowRunner:
    model = ModelConfig(source=str(folder), dtype="float32")
    kv = KVCacheConfig(num_blocks=400, prefix_cache=False)
    return SlowRunner(load_model(model), kv, step_ms)


@dataclass(frozen=True)
class Run:
    """What some streams got."""

    token_ids: tuple[tuple[int, ...], ...]
    seconds: float
    num_steps: int
    load: DrafterLoad | None
    waited_s: float

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.token_ids)) / self.seconds


class Verifier:
    """An engine and its draft client; no router."""

    def __init__(self, runner: ModelRunner, step_ms: float) -> None:
        self._loop = asyncio.get_running_loop()
        config = SpeculationConfig(
            num_speculative_tokens=DEPTH, local_drafters=(), draft_deadline_ms=step_ms
        )
        profile = StepProfile({1: step_ms, 64: step_ms})
        self.engine = Engine(runner, SchedulerConfig(), config, self._post, profile)
        hello = TargetHello("verifier", "target", runner.card.vocabulary)
        network = GrpcNetwork(hello)
        self.client = DraftClient(config, hello, self.engine.inbox.put, network)
        self._events: dict[int, list[TokensEvent]] = {}
        self._num_submitted = 0

    def _post(self, output: EngineOutput) -> None:
        self._loop.call_soon_threadsafe(self._deliver, output)

    def _deliver(self, output: EngineOutput) -> None:
        self.client.apply(output.orders)
        for verdict in output.verdicts:
            self.client.record(verdict)
        for item in output.events:
            if isinstance(item.event, TokensEvent):
                self._events[item.seq].append(item.event)

    async def run(self, num_streams: int, sampling: SamplingParams, path: Path) -> Run:
        seqs = range(self._num_submitted, self._num_submitted + num_streams)
        self._num_submitted += num_streams
        waited = self.engine.recorder.draft_wait_seconds.sum
        started = time.perf_counter()
        for index, seq in enumerate(seqs):
            self._events[seq] = []
            prompt = tuple(range(10 + index, 30 + index))
            request = GenerationRequest(
                str(seq), index, prompt, sampling, NUM_TOKENS, ignore_eos=True, path=path
            )
            self.engine.inbox.put(Submitted(seq, request))
        await eventually(lambda: all(self._num_tokens(s) >= NUM_TOKENS for s in seqs), 600)
        loads = self.client.loads()
        return Run(
            tuple(tuple(i for e in self._events[seq] for i in e.token_ids) for seq in seqs),
            time.perf_counter() - started,
            max(len(self._events[seq]) for seq in seqs),
            loads[0] if loads else None,
            self.engine.recorder.draft_wait_seconds.sum - waited,
        )

    def _num_tokens(self, seq: int) -> int:
        return sum(len(event.token_ids) for event in self._events[seq])

    async def close(self) -> None:
        self.engine.stop(5.0)
        await self.client.close()


async def speculative(
    args: argparse.Namespace,
    folders: tuple[FolderPath, FolderPath],
    ahead: AheadConfig,
    num_streams: int,
    sampling: SamplingParams,
) -> Run:
    drafter = ModelDrafter(slow_runner(folders[1], args.draft_ms))
    config = DrafterConfig(ahead=ahead)
    service = DrafterService(config, drafter, name="draft", vocabulary=drafter.vocabulary)
    await service.listen("127.0.0.1")
    verifier = Verifier(slow_runner(folders[0], args.verify_ms), args.verify_ms)
    verifier.engine.start()
    member = Member(service.incarnation, service.address)
    verifier.client.update_members({member.incarnation: member})
    await eventually(lambda: [load.state for load in verifier.client.loads()] == ["ready"], 20)
    try:
        return await verifier.run(num_streams, sampling, Path.SPECULATIVE)
    finally:
        await verifier.close()
        await service.stop(0.0)


async def plain(
    args: argparse.Namespace, folder: FolderPath, num_streams: int, sampling: SamplingParams
) -> Run:
    verifier = Verifier(slow_runner(folder, args.verify_ms), args.verify_ms)
    verifier.engine.start()
    try:
        return await verifier.run(num_streams, sampling, Path.PLAIN)
    finally:
        await verifier.close()


def told(name: str, run: Run, base: Run) -> str:
    assert run.token_ids == base.token_ids, "drafting changed the text"
    assert run.load is not None
    load = run.load
    length = NUM_TOKENS / run.num_steps
    ahead = _share(load.num_ahead_hits, load.num_accepted_chains)
    corrections = _share(load.num_correction_hits, load.num_corrections)
    return (
        f"{name:12} {run.tokens_per_s:5.0f} tokens/s {run.tokens_per_s / base.tokens_per_s:5.2f}x"
        f"  {length:4.2f} tokens a step, waited {1e3 * run.waited_s / run.num_steps:4.1f} ms;"
        f"  ready: {ahead} accepted chains, {corrections} corrections"
        f"  ({load.num_branches} prepared)"
    )


def _share(hits: int, total: int) -> str:
    return f"{hits:3d}/{total:<3d}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--verify-ms", type=float, default=20.0, help="of a verifier's step")
    parser.add_argument("--draft-ms", type=float, default=3.0, help="of a drafter's forward")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        target = make_tiny_model(FolderPath(directory) / "target", seed=1)
        for amount, temperature, num_streams in itertools.product(
            (0.0, 0.02, 0.04), (0.0, 1.0), (1, 4)
        ):
            draft = make_blurred_model(FolderPath(directory) / f"draft-{amount}", target, amount)
            sampling = SamplingParams(temperature=temperature)
            base = await plain(args, target, num_streams, sampling)
            print(
                f"\ndraft model off by {amount:g}, temperature {temperature:g}, "
                f"{num_streams} streams; plain: {base.tokens_per_s:.0f} tokens/s"
            )
            for name, ahead in MODES.items():
                run = await speculative(args, (target, draft), ahead, num_streams, sampling)
                print(told(name, run, base), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
