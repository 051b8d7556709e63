"""Whatever a verifier writes on its stream: the drafter drafts for others as before, and holds
nothing of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.config import DrafterConfig
from cluster.member_auth import Role
from cluster.protocol.codec import encode_target_batch
from cluster.protocol.messages import CommitTokens, OpenSession, TargetBatch
from drafter_service.service import DrafterService
from tests.cluster.test_codec import sampling, target_batches
from tests.support.loop_thread import LoopThread
from tests.support.polling import eventually
from tests.support.raw_stream import send_bytes
from tests.support.raw_verifier import HELLO, RawVerifier, opening

METHOD = "/paceline.drafting.v1.Drafting/Draft"
REPETITIVE = (3, 4, 5, 3, 4, 5, 3, 4)
sessions = st.integers(0, 2)
token_ids = st.lists(st.integers(0, 9), max_size=12).map(tuple)
counts = st.sampled_from([0, 1, 8, (1 << 32) - 1])
numbers = st.lists(sessions, max_size=2).map(tuple)
plausible = st.builds(
    TargetBatch,
    opens=st.lists(
        st.builds(OpenSession, sessions, counts, token_ids, counts, counts, sampling, counts),
        max_size=2,
    ).map(tuple),
    commits=st.lists(
        st.builds(CommitTokens, sessions, st.integers(0, 14), token_ids), max_size=3
    ).map(tuple),
    pauses=numbers,
    resumes=numbers,
    closes=numbers,
)
FEW = settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module")
def loop() -> Iterator[LoopThread]:
    with LoopThread() as started:
        yield started


@pytest.fixture(scope="module")
def service(loop: LoopThread) -> Iterator[DrafterService]:
    started = loop.run(DrafterService.start(DrafterConfig(), host="127.0.0.1"))
    yield started
    loop.run(started.stop(0.0))


async def check(service: DrafterService) -> None:
    """It drafts for a good verifier, and holds nothing of the other."""
    async with RawVerifier(service.address) as verifier:
        await verifier.open(opening(1, REPETITIVE))
        assert (await verifier.chain(1, len(REPETITIVE)))[:3] == [5, 3, 4]
    await eventually(lambda: service.num_sessions == 0)
    service.check_health()


def send(loop: LoopThread, service: DrafterService, messages: list[bytes]) -> str:
    return loop.run(send_bytes(service.address, Role.DRAFTER, METHOD, messages))


GREETING = encode_target_batch(TargetBatch(hello=HELLO)).SerializeToString()


@FEW
@given(messages=st.lists(st.binary(max_size=60), min_size=1, max_size=3), greets=st.booleans())
def test_bytes(loop, service, messages, greets):
    send(loop, service, [GREETING, *messages] if greets else messages)
    loop.run(check(service))


@FEW
@given(batches=st.lists(target_batches, min_size=1, max_size=3), greets=st.booleans())
def test_well_typed_messages(loop, service, batches, greets):
    messages = [encode_target_batch(batch).SerializeToString() for batch in batches]
    send(loop, service, [GREETING, *messages] if greets else messages)
    loop.run(check(service))


@FEW
@given(batches=st.lists(plausible, min_size=1, max_size=4))
def test_plausible_messages(loop, service, batches):
    messages = [encode_target_batch(batch).SerializeToString() for batch in batches]
    send(loop, service, [GREETING, *messages])
    loop.run(check(service))
