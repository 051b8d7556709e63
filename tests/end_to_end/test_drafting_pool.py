"""Four verifiers with one drafter, and one verifier with three, over real gRPC; the drafters are
processes. Whatever becomes of a drafter or of the messages, the same tokens come, and nothing is
left of it.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path as FilePath

import pytest

from cluster.config import KVCacheConfig, ModelConfig, SpeculationConfig, VerifierConfig
from cluster.member_auth import Role
from cluster.metrics import Distribution
from cluster.protocol import drafting_pb2, members_pb2, members_pb2_grpc
from cluster.rpc import open_channel
from cluster.types import GenerationRequest, Member, Path, SamplingParams, TokensEvent
from router.generation_client import GenerationClient
from tests.support.drafter_process import DrafterProcess
from tests.support.expositions import total
from tests.support.fault_proxy import FaultProxy
from tests.support.polling import eventually, until
from tests.support.tiny_models import make_tiny_model
from verifier_service.service import VerifierService

pytestmark = [pytest.mark.long, pytest.mark.alone]

NUM_VERIFIERS = 4
PER_VERIFIER = 2
NUM_TOKENS = 200
FAULT_AT = 40
"""Tokens of a request after which a fault happens."""
DEADLINE_S, SLACK_S = 0.5, 0.25
"""What a step may wait for drafts, and by how much a busy machine may overrun that."""
LOST_S = 20.0
"""A drafter that stands still is noticed by then, and one that is back is dialled again."""
OVERSIZED = bytes([0x7A, 0x80, 0x80, 0x80, 0x0A]) + bytes(20 << 20)
"""A well-formed message: field 15, which nobody knows, of 20 MiB."""


@dataclass
class Verifier:
    """One, and a client of it."""

    service: VerifierService
    client: GenerationClient
    waits_s: list[float] = field(default_factory=list)
    """Of each step that waited for drafts."""

    def __post_init__(self) -> None:
        waits = self.service._engine.recorder.draft_wait_seconds

        def observe(value: float, times: int = 1) -> None:
            self.waits_s.append(value)
            Distribution.observe(waits, value, times)

        waits.observe = observe  # type: ignore[method-assign]

    async def answer(self, prompt: int, path: Path, progress: list[int]) -> tuple[int, ...]:
        """The tokens; how many there are stands in `progress`, at the prompt's place."""
        request = GenerationRequest(
            request_id=f"{prompt}-{time.monotonic_ns()}",
            request_key=prompt,
            prompt_ids=tuple(10 + (prompt + i) % 5 for i in range(60)),
            sampling=SamplingParams(temperature=1.0 if prompt % 2 else 0.0),
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
            path=path,
        )
        token_ids: list[int] = []
        async for events in self.client.submit(request):
            for event in events:
                if isinstance(event, TokensEvent):
                    assert event.position == len(token_ids)
                    token_ids += event.token_ids
                    progress[prompt] = len(token_ids)
        return tuple(token_ids)

    def state_of(self, drafter: Member) -> str:
        states = {load.incarnation: load.state.value for load in self.service.load().drafters}
        return states.get(drafter.incarnation, "")

    def holds_nothing(self) -> bool:
        load, client = self.service.load(), self.service._draft_client
        sessions = sum(one.sessions for one in load.drafters)
        return not (load.running or load.kv_blocks_used or client.num_sessions or sessions)

    def counts(self) -> Counter[str]:
        """What came of all that drafters sent, and of the streams to them."""
        engine, client = self.service._engine, self.service._draft_client
        accepted = engine.recorder.speculation.totals().accepted_tokens
        return Counter(
            {
                **asdict(client.counters),
                "late": engine.recorder.num_late,
                "accepted": sum(accepted.values()),
            }
        )


@dataclass
class Pool:
    """All verifiers."""

    verifiers: list[Verifier]
    expected: dict[int, tuple[int, ...]] = field(default_factory=dict)

    def introduce(self, *drafters: Member, to: int = NUM_VERIFIERS) -> None:
        for verifier in self.verifiers[:to]:
            verifier.service.update_drafters({one.incarnation: one for one in drafters})

    async def see(self, state: str, drafter: Member, of: int = NUM_VERIFIERS) -> None:
        """Wait until the drafter is in that state for the first `of` verifiers."""
        some = self.verifiers[:of]
        await eventually(lambda: all(one.state_of(drafter) == state for one in some), LOST_S)

    async def see_lost(self, drafter: Member) -> None:
        """Wait until no verifier has it; each may be dialling it meanwhile."""
        await eventually(
            lambda: all(one.state_of(drafter) != "ready" for one in self.verifiers), LOST_S
        )

    def counts(self) -> Counter[str]:
        return sum((verifier.counts() for verifier in self.verifiers), Counter())

    async def generate(
        self,
        fault: Callable[[], Awaitable[None]] | None = None,
        *,
        path: Path = Path.SPECULATIVE,
        by: int = NUM_VERIFIERS,
        each: int = PER_VERIFIER,
        num_withheld: Callable[[], int] = lambda: 0,
    ) -> Counter[str]:
        """Every prompt, with a fault amid all of them: the same tokens as ever, no step that waited
        longer than one deadline, no more of those than the fault explains, and nothing held
        afterwards. Gives what was counted meanwhile. `num_withheld`: messages that did not pass at
        once."""
        before = self.counts()
        for verifier in self.verifiers:
            verifier.waits_s.clear()
        progress = [0] * (by * each)
        answers = [
            asyncio.create_task(self.verifiers[prompt % by].answer(prompt, path, progress))
            for prompt in range(by * each)
        ]
        if fault is not None:
            await eventually(lambda: min(progress) >= FAULT_AT, LOST_S)
            assert max(progress) < NUM_TOKENS, "the fault comes too late to show anything"
            await fault()
        for prompt, token_ids in enumerate(await asyncio.gather(*answers)):
            assert token_ids == self.expected.setdefault(prompt, token_ids)
        await eventually(lambda: all(one.holds_nothing() for one in self.verifiers))
        counts = self.counts() - before
        longest_s = max((wait_s for one in self.verifiers for wait_s in one.waits_s), default=0.0)
        assert longest_s < DEADLINE_S + SLACK_S
        # A deadline may pass for each sequence at once; none waits again before a draft has come. A
        # message has drafts of one verifier.
        most_late = by * each * (1 + counts["streams_opened"]) + each * num_withheld()
        assert counts["late"] <= most_late
        return counts


@asynccontextmanager
async def pool_of(model: str) -> AsyncIterator[Pool]:
    config = VerifierConfig(
        model=ModelConfig(source=model, dtype="float32"),
        kv_cache=KVCacheConfig(num_blocks=256, prefix_cache=False),
        speculation=SpeculationConfig(
            planner="fixed",
            local_drafters=(),
            draft_deadline_ms=1e3 * DEADLINE_S,
            connect_backoff_s=0.1,
        ),
    )
    async with AsyncExitStack() as stack:
        verifiers = []
        for _ in range(NUM_VERIFIERS):
            service = await VerifierService.start(config, host="127.0.0.1")
            stack.push_async_callback(service.stop, grace_s=1.0)
            member = Member(service.incarnation, service.address)
            client = GenerationClient(member, "test", service.card.fingerprint, time.monotonic)
            stack.push_async_callback(client.close)
            await eventually(lambda c=client: c.usable, LOST_S)
            verifiers.append(Verifier(service, client))
        pool = Pool(verifiers)
        await pool.generate(path=Path.PLAIN)  # What is expected from now on.
        yield pool


async def holds_nothing(drafter: Member) -> None:
    """Wait until no session is open there."""
    async with open_channel(drafter.address, Role.DRAFTER) as channel:
        stub = members_pb2_grpc.MembersStub(channel)

        async def is_unused() -> bool:
            reply = await stub.Metrics(members_pb2.MetricsRequest())
            return total(reply.text, "paceline_drafter_sessions") == 0

        await until(is_unused, LOST_S)


class Spoiler:
    """Does something to messages, from the moment that it is told to."""

    def __init__(self, spoil: Callable[[list[bytes]], list[bytes]], *, lasts: bool) -> None:
        """`spoil`: messages in a row -> what passes in their place, empty to wait for another.
        Unless it `lasts`, it happens once."""
        self._spoil = spoil
        self._lasts = lasts
        self._held: defaultdict[int, list[bytes]] = defaultdict(list)
        self.on = False
        self.num_spoiled = 0
        self.num_withheld = 0

    def __call__(self, stream: int, message: bytes) -> list[bytes]:
        messages = [*self._held.pop(stream, []), message]
        if not self.on:
            return messages
        passed = self._spoil(messages)
        if not passed:
            self._held[stream] = messages
            self.num_withheld += 1
        else:
            self.num_spoiled += 1
            self.on = self._lasts
        return passed

    async def begin(self) -> None:
        """Returns once it has happened."""
        self.on = True
        await eventually(lambda: self.num_spoiled, LOST_S)


def swap(messages: list[bytes]) -> list[bytes]:
    return messages[::-1] if len(messages) == 2 else []


MESSAGE_FAULTS = {
    "garbage": lambda: Spoiler(lambda messages: [b"\xff" * 40], lasts=False),
    "duplicate": lambda: Spoiler(lambda messages: messages * 2, lasts=True),
    "reordered": lambda: Spoiler(swap, lasts=True),
    "oversized": lambda: Spoiler(lambda messages: [OVERSIZED], lasts=False),
}


async def test_nothing_that_becomes_of_drafters_or_messages_shows(tmp_path: FilePath) -> None:
    model = str(make_tiny_model(tmp_path, seed=1))
    async with pool_of(model) as pool:
        async with AsyncExitStack() as stack:
            await drafters_fail(pool, stack)
        async with AsyncExitStack() as stack:
            await messages_are_spoiled(pool, stack)


async def drafters_fail(pool: Pool, stack: AsyncExitStack) -> None:
    """One of all verifiers stands still, dies and is replaced; then two of one's three fail."""
    drafter = await stack.enter_async_context(DrafterProcess())
    pool.introduce(drafter.member)
    await pool.see("ready", drafter.member)
    assert (await pool.generate())["accepted"] > 0

    counts = await pool.generate(drafter.stop)
    await pool.see_lost(drafter.member)
    assert drafter.is_stopped()
    assert counts["late"] > 0
    drafter.resume()
    await pool.see("ready", drafter.member)
    assert (await pool.generate())["accepted"] > 0
    await holds_nothing(drafter.member)

    # Another answers where it was: by the old name it is refused, by its own it serves.
    counts = await pool.generate(drafter.kill)
    assert counts["streams_lost"] >= NUM_VERIFIERS
    port = int(drafter.address.rpartition(":")[2])
    successor = await stack.enter_async_context(DrafterProcess(port=port))
    assert successor.address == drafter.address
    await pool.see("refused", drafter.member)
    pool.introduce(successor.member)
    await pool.see("ready", successor.member)
    assert (await pool.generate())["accepted"] > 0

    others = [await stack.enter_async_context(DrafterProcess()) for _ in range(2)]
    members = [successor.member, *(other.member for other in others)]
    pool.introduce(*members, to=1)
    for member in members:
        await pool.see("ready", member, of=1)

    async def lose_two() -> None:
        loads = pool.verifiers[0].service.load().drafters
        assert sorted(load.sessions for load in loads if load.state == "ready") == [2, 2, 2]
        await others[0].kill()
        await others[1].stop()

    counts = await pool.generate(lose_two, by=1, each=6)
    assert counts["sessions_opened"] > 6
    others[1].resume()
    for member in (successor.member, others[1].member):
        await holds_nothing(member)


async def messages_are_spoiled(pool: Pool, stack: AsyncExitStack) -> None:
    """Between all verifiers and one drafter."""
    drafter = await stack.enter_async_context(DrafterProcess())
    proxy = await stack.enter_async_context(FaultProxy(drafter.member))
    pool.introduce(proxy.member)
    await pool.see("ready", proxy.member)
    for direction, name in product(("to_verifier", "to_drafter"), MESSAGE_FAULTS):
        spoiler = MESSAGE_FAULTS[name]()
        setattr(proxy, direction, spoiler)
        counts = await pool.generate(
            spoiler.begin, num_withheld=lambda spoiler=spoiler: spoiler.num_withheld
        )
        spoiler.on = False
        if name in ("garbage", "oversized"):
            assert counts["streams_lost"] == spoiler.num_spoiled == 1, (direction, name)
        else:
            assert spoiler.num_spoiled > 0, (direction, name)
        await pool.see("ready", proxy.member)
        assert (await pool.generate())["accepted"] > 0, (direction, name)
        await holds_nothing(drafter.member)

    def other_vocabulary(stream: int, message: bytes) -> list[bytes]:
        batch = drafting_pb2.DrafterBatch.FromString(message)
        if batch.HasField("hello"):
            batch.hello.vocabulary = "another"
        return [batch.SerializeToString()]

    stranger = await stack.enter_async_context(DrafterProcess())
    other = await stack.enter_async_context(FaultProxy(stranger.member))
    other.to_verifier = other_vocabulary
    pool.introduce(other.member)
    await pool.see("refused", other.member)
    assert (await pool.generate())["streams_opened"] == 0
    await holds_nothing(stranger.member)
