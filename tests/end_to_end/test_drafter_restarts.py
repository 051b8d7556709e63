"""N3: a drafter dies by SIGKILL at every phase of a session and comes back empty at its address.
The answer that runs has the same tokens, is re-synced, and gets drafts accepted again.

The drafter is a process and the verifier real; a proxy between them knows the phase by the messages
and lets nothing more through, and the engine stands still until the drafter is back."""

from __future__ import annotations

import asyncio
import threading
from contextlib import AsyncExitStack
from dataclasses import replace

from cluster.protocol import drafting_pb2
from cluster.types import GenerationRequest, Member, Path, SamplingParams
from tests.support.drafter_process import DrafterProcess
from tests.support.fault_proxy import FaultProxy
from tests.support.generation import Answer, RunningVerifier, running_verifier
from tests.support.polling import eventually
from tests.support.tiny_models import make_tiny_model

PROMPT = tuple(10 + i % 5 for i in range(60))
NUM_TOKENS = 150
NUM_COMMITS = 5
"""Told to the drafter before it dies in the middle of an answer."""
RESTART_S = 20.0


class Gate:
    """Before each forward of the verifier."""

    def __init__(self, verifier: RunningVerifier) -> None:
        runner = verifier.service._engine._runner
        forward = runner.forward
        self._open = threading.Event()
        self._open.set()

        def gated(slices):
            assert self._open.wait(2 * RESTART_S)
            return forward(slices)

        runner.forward = gated  # type: ignore[method-assign]
        self.close = self._open.clear
        self.open = self._open.set


class Phase:
    """Stands in the proxy until its phase has come; then nothing passes, and the engine halts."""

    def __init__(self, name: str, gate: Gate) -> None:
        self.reached = asyncio.Event()
        self._name = name
        self._gate = gate
        self._num_commits = 0

    def to_drafter(self, _: int, message: bytes) -> list[bytes]:
        batch = drafting_pb2.TargetBatch.FromString(message)
        self._num_commits += len(batch.commits)
        if self.reached.is_set():
            return []
        if self._name == "open" and batch.opens:
            return self._reach()
        if self._name == "after commit" and self._num_commits == NUM_COMMITS:
            return self._reach(message)
        return [message]

    def to_verifier(self, _: int, message: bytes) -> list[bytes]:
        batch = drafting_pb2.DrafterBatch.FromString(message)
        if self.reached.is_set():
            return []
        if self._name == "prefill" and batch.drafts:
            return self._reach()
        if self._name == "mid-proposal" and self._num_commits >= NUM_COMMITS:
            for draft in batch.drafts:
                if len(draft.token_ids) > 1:
                    return self._reach(first_node_of(draft))
        return [message]

    def _reach(self, *passed: bytes) -> list[bytes]:
        self._gate.close()
        self.reached.set()
        return list(passed)


def first_node_of(draft: drafting_pb2.SessionDraft) -> bytes:
    """A message with the beginning of a proposal: there was no time for the rest."""
    for nodes in (draft.token_ids, draft.parents, draft.confidences):
        del nodes[1:]
    draft.ClearField("answers")
    return drafting_pb2.DrafterBatch(drafts=[draft]).SerializeToString()


class Openings:
    """Of sessions, as they pass on to the drafter."""

    def __init__(self) -> None:
        self.seen: list[drafting_pb2.OpenSession] = []

    def __call__(self, _: int, message: bytes) -> list[bytes]:
        self.seen += drafting_pb2.TargetBatch.FromString(message).opens
        return [message]


async def test_a_drafter_that_is_killed_at_any_phase_comes_back_and_is_used(tmp_path):
    async with AsyncExitStack() as stack:
        source = str(make_tiny_model(tmp_path, seed=1))
        verifier = await stack.enter_async_context(
            running_verifier(source, dtype="float32", connect_backoff_s=0.05)
        )
        (plain,) = await verifier.generate([request("plain")], path=Path.PLAIN)
        drafter = await stack.enter_async_context(DrafterProcess())
        proxy = await stack.enter_async_context(FaultProxy(drafter.member))
        await verifier.use_drafters(proxy.member)
        gate = Gate(verifier)
        for name in ("open", "prefill", "mid-proposal", "after commit"):
            phase = Phase(name, gate)
            proxy.to_drafter, proxy.to_verifier = phase.to_drafter, phase.to_verifier
            answering = asyncio.create_task(verifier.generate([request(name)]))
            await asyncio.wait_for(phase.reached.wait(), RESTART_S)
            await drafter.kill()
            openings = Openings()
            proxy.to_drafter, proxy.to_verifier = openings, None
            port = int(drafter.address.rpartition(":")[2])
            drafter = await stack.enter_async_context(DrafterProcess(port=port))
            await see_drafts_of(replace(proxy.member, incarnation=drafter.incarnation), verifier)
            assert not answering.done(), "over before the drafter was back"
            gate.open()
            (answer,) = await answering
            assert answer.token_ids == plain.token_ids, name
            check_resynced(openings, answer)


def request(tag: str) -> GenerationRequest:
    return GenerationRequest(
        request_id=tag,
        request_key=1,
        prompt_ids=PROMPT,
        # Three tokens: a text that an n-gram drafter does well on.
        sampling=SamplingParams(temperature=0.0, logit_bias=((10, 90.0), (11, 90.0), (12, 90.0))),
        max_tokens=NUM_TOKENS,
        ignore_eos=True,
    )


async def see_drafts_of(successor: Member, verifier: RunningVerifier) -> None:
    """Take it for the only drafter, and wait until it drafts for what runs."""
    client = verifier.service._draft_client
    num_drafts = client.counters.drafts
    await eventually(lambda: not any(load.sessions for load in client.loads()), RESTART_S)
    verifier.service.update_drafters({successor.incarnation: successor})
    await eventually(lambda: client.counters.drafts > num_drafts, RESTART_S)


def check_resynced(openings: Openings, answer: Answer) -> None:
    """The successor was told all that was committed by then, and behind what its predecessor may
    have left, its drafts were accepted."""
    (opening,) = openings.seen
    assert opening.epoch == 2
    given = len(opening.token_ids) - len(PROMPT)
    assert tuple(opening.token_ids) == (*PROMPT, *answer.token_ids[:given])
    late = [event for event in answer.events if event.position > given + 10]
    assert sum(sum(event.drafted) for event in late) > 20
