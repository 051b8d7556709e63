"""Whatever a router writes on its stream: the verifier answers others as before, and holds nothing
of it afterwards."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cluster.member_auth import Role
from cluster.protocol.codec import encode_router_batch
from cluster.protocol.messages import RouterBatch, RouterHello, SetPath
from cluster.types import GenerationRequest, Path, SamplingParams
from tests.cluster.test_codec import router_batches
from tests.support.generation import RunningVerifier, running_verifier
from tests.support.loop_thread import LoopThread
from tests.support.polling import eventually
from tests.support.raw_stream import send_bytes
from tests.support.tiny_models import make_tiny_model

METHOD = "/paceline.generation.v1.Generation/Generate"
VOCAB_SIZE = 128
names = st.sampled_from(["a", "b", ""])
numbers = st.floats(width=32)
token_ids = st.lists(st.integers(0, VOCAB_SIZE), max_size=20).map(tuple)
counts = st.sampled_from([0, 1, 3, 21, (1 << 32) - 1])
samplings = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1.0]) | numbers,
    top_k=counts,
    top_p=st.sampled_from([0.5, 1.0]) | numbers,
    min_p=st.sampled_from([0.0, 0.1]) | numbers,
    repetition_penalty=st.sampled_from([1.0, 1.1]) | numbers,
    logit_bias=st.lists(st.tuples(st.integers(0, VOCAB_SIZE), numbers), max_size=2).map(tuple),
    bad_words=st.lists(token_ids, max_size=2).map(tuple),
    min_tokens=counts,
)
submits = st.builds(
    GenerationRequest,
    request_id=names,
    request_key=st.integers(0, (1 << 64) - 1),
    prompt_ids=token_ids,
    sampling=st.just(SamplingParams(temperature=0.0)) | samplings,
    max_tokens=counts,
    resumed_ids=st.just(()) | token_ids,
    path=st.sampled_from(Path),
    num_speculative_tokens=counts,
    num_top_logprobs=st.none() | counts,
    num_prompt_logprobs=st.none() | counts,
    deadline_ms=counts,
)
plausible = st.builds(
    RouterBatch,
    submits=st.lists(submits, max_size=3).map(tuple),
    cancels=st.lists(names, max_size=2).map(tuple),
    set_paths=st.lists(st.builds(SetPath, names, st.sampled_from(Path)), max_size=2).map(tuple),
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
def verifier(loop: LoopThread, tmp_path_factory: Any) -> Iterator[RunningVerifier]:
    folder = make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=64)
    with loop.within(running_verifier(str(folder), dtype="float32")) as started:
        yield started


@pytest.fixture(scope="module")
def expected(loop: LoopThread, verifier: RunningVerifier) -> list[int]:
    return answer(loop, verifier)


def answer(loop: LoopThread, verifier: RunningVerifier) -> list[int]:
    sampling = SamplingParams(temperature=0.0)
    request = GenerationRequest("good", 1, (5, 6, 7), sampling, max_tokens=8, ignore_eos=True)
    (said,) = loop.run(verifier.generate([request]))
    return said.token_ids


def check(loop: LoopThread, verifier: RunningVerifier, expected: list[int]) -> None:
    """It serves the good router as before, and holds nothing of the other."""
    assert answer(loop, verifier) == expected
    servicer = verifier.service._servicer

    async def nothing_is_held() -> None:
        await eventually(lambda: servicer.num_requests == 0)
        await eventually(lambda: servicer.num_streams == 1)
        await eventually(lambda: verifier.service.load().kv_blocks_used == 0)

    loop.run(nothing_is_held())
    verifier.service.check_health()


def send(loop: LoopThread, verifier: RunningVerifier, messages: list[bytes]) -> str:
    return loop.run(send_bytes(verifier.service.address, Role.VERIFIER, METHOD, messages))


def hello(verifier: RunningVerifier) -> bytes:
    batch = RouterBatch(hello=RouterHello("fuzz", verifier.service.card.fingerprint))
    return encode_router_batch(batch).SerializeToString()


@FEW
@given(messages=st.lists(st.binary(max_size=60), min_size=1, max_size=3), greets=st.booleans())
def test_bytes(loop, verifier, expected, messages, greets):
    send(loop, verifier, [hello(verifier), *messages] if greets else messages)
    check(loop, verifier, expected)


# One that asks for silence gets it, so that `send` would wait for an answer in vain.
talkative = router_batches.map(lambda batch: replace(batch, load_interval_ms=100))


@FEW
@given(batches=st.lists(talkative, min_size=1, max_size=3), greets=st.booleans())
def test_well_typed_messages(loop, verifier, expected, batches, greets):
    messages = [encode_router_batch(batch).SerializeToString() for batch in batches]
    send(loop, verifier, [hello(verifier), *messages] if greets else messages)
    check(loop, verifier, expected)


@FEW
@given(batches=st.lists(plausible, min_size=1, max_size=4))
def test_plausible_messages_do_not_even_end_their_stream(loop, verifier, expected, batches):
    messages = [encode_router_batch(batch).SerializeToString() for batch in batches]
    assert send(loop, verifier, [hello(verifier), *messages]) == ""
    check(loop, verifier, expected)
