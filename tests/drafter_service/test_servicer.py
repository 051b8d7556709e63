"""The drafting service over real gRPC: what every stream may rely on, whatever the others do."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import grpc
import pytest

import drafter_service.servicer as servicer_module
from cluster.config import DrafterConfig
from cluster.errors import InternalError
from cluster.member_auth import Role
from cluster.protocol.codec import encode_target_batch
from cluster.protocol.messages import CommitTokens, TargetBatch
from cluster.protocol.prefix_hash import prefix_hash
from cluster.rpc import open_channel
from drafter_service.service import DrafterService
from engine.drafting.ngram import NgramDrafter
from tests.support.expositions import total
from tests.support.polling import TIMEOUT_S, eventually
from tests.support.raw_verifier import HELLO, RawVerifier, opening

REPETITIVE = (1, 2, 3, 1, 2, 3, 1, 2)


@pytest.fixture
async def start_service():
    """Starts drafters, stops them at the end."""
    services = []

    async def start(drafter=None, *, vocabulary="", **config):
        drafter = drafter or NgramDrafter(4, 2)
        service = DrafterService(
            DrafterConfig(**config), drafter, name="test", vocabulary=vocabulary
        )
        services.append(service)
        await service.listen("127.0.0.1")
        return service

    yield start
    for service in services:
        await service.stop(0.0)
        with pytest.raises(InternalError):
            service.check_health()


@pytest.fixture
async def service(start_service):
    return await start_service()


async def failure_of(verifier: RawVerifier) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async with verifier:
            await verifier.read()
    return caught.value


async def read_all(call):
    while await call.read() is not grpc.aio.EOF:
        pass


# --- handshake ---------------------------------------------------------------------------------


async def test_hands_are_shaken(service):
    async with RawVerifier(service.address) as verifier:
        assert verifier.hello.incarnation == service.incarnation
        assert verifier.hello.drafter == "test"
        assert verifier.hello.max_sessions == DrafterConfig().max_sessions


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"protocol_version": 99}, "protocol"),
        ({"noise_version": 99}, "noise"),
        ({"vocabulary": "vocabulary-b"}, "vocabulary"),
    ],
)
async def test_a_mismatch_is_refused_in_words(start_service, change, word):
    service = await start_service(vocabulary="vocabulary-a")
    async with RawVerifier(service.address) as fitting:
        error = await failure_of(RawVerifier(service.address, dataclasses.replace(HELLO, **change)))
        assert error.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert word in error.details()
        await fitting.open(opening(1, REPETITIVE))
        assert await fitting.chain(1, 8)


async def test_a_drafter_without_a_vocabulary_fits_any(service):
    hello = dataclasses.replace(HELLO, vocabulary="vocabulary-b")
    async with RawVerifier(service.address, hello) as verifier:
        assert verifier.hello.vocabulary == ""


async def test_the_first_message_must_be_a_hello(service):
    error = await failure_of(RawVerifier(service.address, hello=None))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "hello" in error.details()


async def test_a_stream_without_a_hello_ends(service, monkeypatch):
    monkeypatch.setattr(servicer_module, "HELLO_TIMEOUT_S", 0.1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await RawVerifier(service.address).read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


# --- drafts ------------------------------------------------------------------------------------


async def test_open_commit_and_resume_are_answered_from_the_last_token(service):
    async with RawVerifier(service.address) as verifier:
        await verifier.open(opening(1, REPETITIVE, epoch=7))
        assert await verifier.chain(1, 8) == [3, 1, 2, 3]
        first = verifier.drafts[0]
        assert first.epoch == 7
        assert first.draft.anchor_hash == prefix_hash(REPETITIVE)

        await verifier.commit((1, 8, (3, 9)))
        assert (await verifier.draft(1, 10)).draft.nodes == ()

        await verifier.send(TargetBatch(pauses=(1,), commits=(CommitTokens(1, 10, (2, 3)),)))
        await verifier.send(TargetBatch(resumes=(1,)))
        assert await verifier.chain(1, 12) == [9, 2, 3, 9]


async def test_a_paused_session_says_nothing(service):
    async with RawVerifier(service.address) as verifier:
        await verifier.send(TargetBatch(opens=(opening(1, REPETITIVE),), pauses=(1,)))
        await verifier.commit((1, 8, (3,)))
        await verifier.open(opening(2, REPETITIVE))
        await verifier.draft(2, 8)
        assert {d.session for d in verifier.drafts} == {2}


async def test_each_message_gets_exactly_one_answer(service):
    async with RawVerifier(service.address) as verifier:
        await verifier.open(*(opening(n, REPETITIVE) for n in range(20)))
        for n in range(20):
            await verifier.draft(n, 8)
        for length in range(8, 30):
            await verifier.commit(*((n, length, (length % 3 + 1,)) for n in range(20)))
            for n in range(20):
                await verifier.draft(n, length + 1)
        answers = [draft for draft in verifier.drafts if draft.draft.answers is not None]
        assert len(answers) == 20 * 23


async def test_several_verifiers_do_not_mix(service):
    """The same session numbers, other tokens, at once."""

    async def drive(verifier, base):
        tokens = [base, base + 1, base + 2] * 3
        await verifier.open(*(opening(n, tuple(tokens)) for n in range(10)))
        for _ in range(10):
            cycle = tokens[-3:] * 2
            for n in range(10):
                assert await verifier.chain(n, len(tokens)) == cycle[:4]
            await verifier.commit(*((n, len(tokens), (cycle[0],)) for n in range(10)))
            tokens.append(cycle[0])

    async with RawVerifier(service.address) as one, RawVerifier(service.address) as two:
        await asyncio.gather(drive(one, 100), drive(two, 200))
        assert not one.errors
        assert not two.errors


async def test_load_reports_come_now_and_then(service):
    async with RawVerifier(service.address) as verifier:
        await verifier.open(opening(1, REPETITIVE))
        start = time.monotonic()
        length, reports = 8, []
        while len(reports) < 4:
            await verifier.draft(1, length)
            await verifier.commit((1, length, (1,)))
            length += 1
            reports = [batch.load for batch in verifier.batches if batch.load]
        assert time.monotonic() - start > 0.25, "every 0.1 s"
        assert reports[-1].sessions == 1
        assert service.report().tokens_per_s > 0
        assert service.autoscaling_stats()["sessions"] == 1.0


# --- what goes wrong ---------------------------------------------------------------------------


async def test_a_bad_message_costs_one_session(service):
    """N1: gap, contradiction, unknown session and empty commit, each beside a good session."""
    async with RawVerifier(service.address) as verifier:
        await verifier.open(*(opening(n, REPETITIVE) for n in range(5)))
        await verifier.commit((1, 9, (3,)), (2, 7, (9,)), (99, 8, (3,)), (3, 8, ()), (4, 8, (3,)))
        assert (await verifier.error(1)).kind == "InvalidRequestError"
        assert (await verifier.error(2)).kind == "InvalidRequestError"
        assert (await verifier.error(99)).kind == "UnknownSessionError"
        assert (await verifier.error(3)).kind == "InvalidRequestError"
        assert await verifier.chain(4, 9)
        await verifier.open(opening(1, REPETITIVE, epoch=2))
        await verifier.read_until(lambda v: any(d.epoch == 2 for d in v.drafts))
        assert len(verifier.errors) == 4
        assert service.num_session_errors == {"InvalidRequestError": 3, "UnknownSessionError": 1}
        assert service.num_sessions == 3


@pytest.mark.parametrize("first", [True, False], ids=["first", "later"])
async def test_bytes_that_are_no_message_end_their_stream_alone(service, first):
    async with (
        RawVerifier(service.address) as verifier,
        open_channel(service.address, Role.DRAFTER) as channel,
    ):
        call = channel.stream_stream("/paceline.drafting.v1.Drafting/Draft")()
        if not first:
            await call.write(encode_target_batch(TargetBatch(hello=HELLO)).SerializeToString())
        await call.write(b"\xff\xff\xff\xff not a protobuf")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.wait_for(read_all(call), TIMEOUT_S)
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        await verifier.open(opening(1, REPETITIVE))
        assert await verifier.chain(1, 8)


async def test_a_dead_verifier_leaves_nothing(service):
    """N4."""
    async with RawVerifier(service.address) as other:
        await other.open(opening(1, REPETITIVE))
        verifier = await RawVerifier(service.address).__aenter__()
        await verifier.open(*(opening(n, REPETITIVE) for n in range(20)))
        await verifier.draft(19, 8)
        assert service.num_sessions == 21
        await verifier.leave()
        await eventually(lambda: service.num_sessions == 1)
        await other.commit((1, 8, (3,)))
        assert await other.chain(1, 9)


async def test_silent_sessions_expire(start_service):
    service = await start_service(session_ttl_s=0.2)
    async with RawVerifier(service.address) as verifier:
        await verifier.open(opening(1, REPETITIVE))
        error = await verifier.error(1)
        assert (error.kind, error.epoch) == ("UnknownSessionError", 1)
        assert service.num_sessions == 0


async def test_sessions_of_a_verifier_that_falls_silent_are_closed(service):
    hello = dataclasses.replace(HELLO, lease_ms=2_500)
    async with RawVerifier(service.address, hello) as verifier, RawVerifier(service.address) as old:
        await old.open(opening(1, REPETITIVE))
        await verifier.open(opening(1, REPETITIVE), opening(2, REPETITIVE, epoch=3))
        await eventually(lambda: service.num_sessions == 3)
        for _ in range(38):  # its heart beats, for one and a half leases
            await verifier.send(TargetBatch())
            await asyncio.sleep(0.1)
        assert service.num_sessions == 3
        await eventually(lambda: service.num_sessions == 1)
        assert total(service.metrics.text(), "paceline_leases_expired_total") == 2
        assert (await verifier.error(2)).kind == "UnknownSessionError"
        assert (await verifier.error(2)).epoch == 3
        # It may open them again; whoever has no lease was left alone.
        verifier.batches.clear()
        await verifier.open(opening(2, REPETITIVE, epoch=4))
        assert (await verifier.draft(2, 8)).epoch == 4
        await old.commit((1, 8, (3,)))
        await eventually(lambda: service.num_sessions == 2)


async def test_a_full_drafter_refuses(start_service):
    service = await start_service(max_sessions=2)
    async with RawVerifier(service.address) as one, RawVerifier(service.address) as two:
        await one.open(opening(1, REPETITIVE), opening(2, REPETITIVE))
        await one.draft(2, 8)
        await two.open(opening(1, REPETITIVE))
        assert (await two.error(1)).kind == "OverloadedError"
        await one.send(TargetBatch(closes=(1,)))
        await eventually(lambda: service.num_sessions == 1)
        await two.open(opening(1, REPETITIVE, epoch=2))
        assert (await two.draft(1, 8)).epoch == 2


async def test_a_verifier_that_does_not_read_holds_up_nobody(service):
    async with RawVerifier(service.address) as deaf, RawVerifier(service.address) as other:
        await deaf.open(*(opening(n, REPETITIVE) for n in range(50)))

        async def shout():
            for length in range(8, 150):
                await deaf.commit(*((n, length, (1,)) for n in range(50)))

        shouting = asyncio.create_task(shout())
        await other.open(opening(1, REPETITIVE))
        for length in range(8, 30):
            await other.draft(1, length)
            await other.commit((1, length, (1,)))
        await asyncio.wait_for(shouting, TIMEOUT_S)
        assert await deaf.chain(49, 150)


class StuckDrafter(NgramDrafter):
    """Drafts only while `go` is set."""

    def __init__(self):
        super().__init__(4, 2)
        self.go = threading.Event()

    def draft(self, requests):
        assert self.go.wait(TIMEOUT_S)
        return super().draft(requests)


async def test_a_stuck_drafter_blocks_no_event_loop_and_answers_the_newest(start_service):
    drafter = StuckDrafter()
    service = await start_service(drafter)
    async with RawVerifier(service.address) as verifier:
        await verifier.open(opening(1, REPETITIVE))
        for length in range(8, 18):
            await verifier.commit((1, length, (length % 3 + 1,)))
        async with RawVerifier(service.address) as other:
            assert other.hello is not None
        service.check_health()
        drafter.go.set()
        await verifier.draft(1, 18)
        answers = [draft.draft.answers for draft in verifier.drafts]
        assert [answer for answer in answers if answer is not None] == [18]


# --- drain -------------------------------------------------------------------------------------


async def test_drain_serves_what_is_open_and_takes_nothing_new(service):
    async with RawVerifier(service.address) as verifier:
        await verifier.open(opening(1, REPETITIVE))
        await verifier.draft(1, 8)
        stopping = asyncio.create_task(service.stop(2 * TIMEOUT_S))
        await verifier.read_until(lambda v: v.batches[-1].drain)
        await verifier.commit((1, 8, (3,)))
        assert await verifier.chain(1, 9)
        await verifier.open(opening(2, REPETITIVE))
        assert (await verifier.error(2)).kind == "OverloadedError"
        error = await failure_of(RawVerifier(service.address))
        assert error.code() is grpc.StatusCode.UNAVAILABLE
        assert not stopping.done()
        await verifier.send(TargetBatch(closes=(1,)))
        await asyncio.wait_for(stopping, TIMEOUT_S)
        with pytest.raises((EOFError, grpc.aio.AioRpcError)):
            await verifier.read_until(lambda _: False)


async def test_drain_waits_no_longer_than_its_grace(service):
    async with RawVerifier(service.address) as verifier:
        await verifier.open(opening(1, REPETITIVE))
        await verifier.draft(1, 8)
        start = time.monotonic()
        await service.stop(0.2)
        assert 0.2 <= time.monotonic() - start < TIMEOUT_S
        assert service.num_sessions == 0
