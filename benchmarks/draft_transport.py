"""What does talking to a drafter cost the verifier? Time per step of 32 sequences, each of which
commits tokens and gets a draft: to encode and to send, to receive and to decode; and apart from
that, to judge. The first four are done by the event loop's thread, and gRPC has threads of its own
that move the bytes meanwhile; both are told. The drafter is a process of its own, and its time is
not counted.

    python -m benchmarks.draft_transport
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Callable

from cluster.config import SpeculationConfig
from cluster.protocol import drafting_pb2
from cluster.protocol.codec import (
    decode_drafter_batch,
    encode_drafter_batch,
    encode_target_batch,
)
from cluster.protocol.messages import (
    CommitTokens,
    DrafterBatch,
    SessionDraft,
    TargetBatch,
    TargetHello,
)
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import Draft, DraftNode, SamplingParams
from tests.support.drafter_process import DrafterProcess
from tests.support.polling import eventually
from verifier_service.draft_client import DraftClient
from verifier_service.draft_trie import DraftTrie
from verifier_service.events import (
    DraftArrived,
    DraftCommit,
    DraftOpen,
    DraftOrders,
    EngineInput,
)
from verifier_service.grpc_network import GrpcNetwork

NUM_SEQUENCES = 32
DEPTH = 8
NUM_STEPS = 300
CYCLE = (11, 12, 13, 14, 15)
PROMPT = CYCLE * 20


class Sequences:
    """The engine's side: who has no answer yet."""

    def __init__(self) -> None:
        self.token_ids = list(PROMPT)
        self.num_nodes = 0
        self.num_drafts = 0
        self.unanswered = set(range(NUM_SEQUENCES))
        self.all_answered = asyncio.Event()

    def post(self, event: EngineInput) -> None:
        if isinstance(event, DraftArrived):
            self.num_nodes += len(event.draft.nodes)
            self.num_drafts += 1
            if event.draft.answers == len(self.token_ids):
                self.unanswered.discard(event.seq)
                if not self.unanswered:
                    self.all_answered.set()

    def commit(self, num_tokens: int) -> DraftOrders:
        """The next tokens of the cycle, which is what the drafter drafted."""
        start = len(self.token_ids)
        token_ids = tuple(CYCLE[(start + i) % len(CYCLE)] for i in range(num_tokens))
        self.token_ids += token_ids
        self.all_answered.clear()
        self.unanswered = set(range(NUM_SEQUENCES))
        return DraftOrders(
            commits=tuple(DraftCommit(s, start, token_ids) for s in range(NUM_SEQUENCES))
        )


async def over_grpc() -> None:
    """Steps against a real drafter: CPU time of this thread and of others, and the round trip."""
    hello = TargetHello("verifier", "target", "")
    sequences = Sequences()
    client = DraftClient(SpeculationConfig(), hello, sequences.post, GrpcNetwork(hello))
    async with DrafterProcess() as drafter:
        client.update_members({drafter.member.incarnation: drafter.member})
        await eventually(lambda: [load.state for load in client.loads()] == ["ready"], 20)
        opens = tuple(
            DraftOpen(seq, PROMPT, len(PROMPT), seq, SamplingParams(), DEPTH)
            for seq in range(NUM_SEQUENCES)
        )
        client.apply(DraftOrders(opens=opens))
        await sequences.all_answered.wait()
        loop_ms, others_ms, wall_ms = [], [], []
        for _ in range(NUM_STEPS):
            orders = sequences.commit(random.randint(1, DEPTH + 1))
            own, cpu, wall = time.thread_time(), time.process_time(), time.perf_counter()
            client.apply(orders)
            await sequences.all_answered.wait()
            loop_ms.append(1e3 * (time.thread_time() - own))
            others_ms.append(1e3 * (time.process_time() - cpu) - loop_ms[-1])
            wall_ms.append(1e3 * (time.perf_counter() - wall))
            await asyncio.sleep(0.02)  # as a step takes; the drafter goes ahead meanwhile
        await client.close()
    nodes, drafts = (
        n / NUM_STEPS / NUM_SEQUENCES for n in (sequences.num_nodes, sequences.num_drafts)
    )
    print(
        f"{NUM_SEQUENCES} sequences, each {nodes:.1f} new nodes in {drafts:.1f} drafts a step, "
        "over gRPC:"
    )
    for name, spent_ms in (("the event loop's thread", loop_ms), ("other threads", others_ms)):
        print(f"  CPU time of {name}, median {statistics.median(spent_ms):.2f} ms a step")
    print(f"  round trip, median {statistics.median(wall_ms):.2f} ms (the drafter's time included)")


def by_parts() -> None:
    """The parts that are ours, alone."""
    token_ids = tuple(range(100, 100 + DEPTH // 2))
    commits = TargetBatch(
        commits=tuple(CommitTokens(s, 1_000, token_ids) for s in range(NUM_SEQUENCES))
    )
    anchor = prefix_hash(PROMPT)
    nodes = tuple(DraftNode(100 + i, i - 1, 0.9) for i in range(DEPTH))
    drafts = DrafterBatch(
        drafts=tuple(
            SessionDraft(s, 1, Draft(len(PROMPT), anchor, nodes, len(PROMPT)))
            for s in range(NUM_SEQUENCES)
        )
    )
    wire = encode_drafter_batch(drafts).SerializeToString()

    def judge() -> None:
        for trie in tries.pop():
            trie.insert(drafts.drafts[0].draft)

    num_runs = 200
    tries = [[DraftTrie(PROMPT, 1_000) for _ in range(NUM_SEQUENCES)] for _ in range(num_runs)]
    parts: dict[str, Callable[[], object]] = {
        "encode": lambda: encode_target_batch(commits).SerializeToString(),
        "decode": lambda: decode_drafter_batch(drafting_pb2.DrafterBatch.FromString(wire)),
        "judge": judge,
    }
    for name, part in parts.items():
        times = []
        for _ in range(num_runs):
            started = time.perf_counter()
            part()
            times.append(1e3 * (time.perf_counter() - started))
        print(f"  {name:7} {statistics.median(times):.2f} ms")
    print(f"  a message of drafts has {len(wire)} bytes")


if __name__ == "__main__":
    by_parts()
    asyncio.run(over_grpc())
