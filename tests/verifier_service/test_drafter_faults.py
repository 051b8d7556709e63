"""The law under faults: whatever a drafter does or whatever becomes of it, the same tokens come,
and no step waits longer than its deadline."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from cluster.load import DrafterState
from tests.support.draft_driver import PROMPT, DraftDriver
from tests.support.drafter_process import DrafterProcess
from tests.support.polling import TIMEOUT_S, eventually
from tests.support.scripted_drafter import ScriptedDrafter, misbehaviours, oracle
from tests.support.toy_verifier import (
    DEADLINE_S,
    VOCAB_SIZE,
    ToyVerifier,
    once_live,
    step_time,
    text,
)
from verifier_service.draft_trie import DraftOutcome

NUM_TOKENS = 120
EXPECTED = [text(position) for position in range(len(PROMPT), len(PROMPT) + NUM_TOKENS)]
SLACK_S = 5.0
"""For other processes on the machine."""
MISBEHAVIOURS = misbehaviours(VOCAB_SIZE)


def true_continuation(token_ids, num_tokens):
    return [text(len(token_ids) + i) for i in range(num_tokens)]


async def test_an_oracle_is_accepted_to_the_last():
    async with ScriptedDrafter(oracle(true_continuation)) as drafter, DraftDriver() as driver:
        await driver.ready(drafter.member)
        verifier = ToyVerifier(driver, 1, TIMEOUT_S)
        assert await verifier.generate(NUM_TOKENS, once_live(driver, 1)) == EXPECTED
        assert verifier.num_accepted == verifier.num_drafted > 0.6 * NUM_TOKENS


@pytest.mark.parametrize("name", MISBEHAVIOURS)
async def test_a_bad_drafter_changes_nothing(name):
    """I4, K2, N2, N5: alone, so that there is no better one to turn to."""
    async with ScriptedDrafter(MISBEHAVIOURS[name]) as drafter, DraftDriver() as driver:
        await driver.ready(drafter.member)
        verifier = ToyVerifier(driver, 1)
        assert await verifier.generate(NUM_TOKENS, step_time(0.001)) == EXPECTED
        assert verifier.longest_wait_s < DEADLINE_S + SLACK_S
        await eventually(lambda: not drafter.sessions)


async def test_out_of_vocabulary_drafts_are_malformed():
    """I4, K3."""
    async with (
        ScriptedDrafter(MISBEHAVIOURS["out_of_vocabulary"]) as drafter,
        DraftDriver() as driver,
    ):
        await driver.ready(drafter.member)
        verifier = ToyVerifier(driver, 1)
        assert await verifier.generate(30, step_time(0.002)) == EXPECTED[:30]
        assert set(verifier.outcomes) == {DraftOutcome.MALFORMED}
        assert verifier.num_drafted == 0


async def test_late_drafts_cost_one_deadline():
    """N2: each answer comes long after its step."""
    async with ScriptedDrafter(oracle(true_continuation)) as drafter, DraftDriver() as driver:
        await driver.ready(drafter.member)
        drafter.delay_s = 0.2
        verifier = ToyVerifier(driver, 1)
        assert await verifier.generate(NUM_TOKENS, step_time(0.005)) == EXPECTED
        assert 0 < verifier.num_late <= 10


async def test_good_and_bad_drafters_together_change_nothing():
    async with contextlib.AsyncExitStack() as stack:
        driver = await stack.enter_async_context(DraftDriver(backoff_s=0.02))
        answers = [oracle(true_continuation), *MISBEHAVIOURS.values()]
        drafters = [await stack.enter_async_context(ScriptedDrafter(a)) for a in answers[:8]]
        await driver.ready(*(d.member for d in drafters))
        verifiers = [ToyVerifier(driver, seq) for seq in range(12)]

        async def disturb():
            for drafter in drafters[::3]:
                await asyncio.sleep(0.05)
                drafter.end_streams()

        disturbing = asyncio.create_task(disturb())
        texts = await asyncio.gather(*(v.generate(NUM_TOKENS, step_time(0.003)) for v in verifiers))
        await disturbing
        assert texts == [EXPECTED] * 12
        assert driver.client.num_sessions == 0


@pytest.mark.parametrize("phase", [0, 1, 10], ids=["at open", "at first commit", "mid-stream"])
async def test_a_killed_drafter_changes_nothing_and_its_successor_is_primed(phase):
    """F1, N3: SIGKILL of a real process; then one on the same port, with nothing in memory."""
    async with DrafterProcess() as victim, DraftDriver(backoff_s=0.05) as driver:
        await driver.ready(victim.member)
        verifier = ToyVerifier(driver, 1)

        async def step(number):
            await asyncio.sleep(0.005)
            if number == phase:
                await victim.kill()

        assert await verifier.generate(NUM_TOKENS, step) == EXPECTED
        assert driver.drafter_of(1) is None
        assert driver.state(victim.incarnation) is not DrafterState.READY
        port = int(victim.address.rpartition(":")[2])
        async with DrafterProcess(port=port) as successor:
            driver.members([successor.member])
            again = ToyVerifier(driver, 2, TIMEOUT_S)
            await eventually(lambda: driver.state(successor.incarnation) is DrafterState.READY)
            assert await again.generate(NUM_TOKENS, once_live(driver, 2)) == EXPECTED
            assert again.num_accepted > 0.3 * NUM_TOKENS


async def test_sessions_of_a_killed_drafter_move_to_another():
    async with DrafterProcess() as victim, DrafterProcess() as other, DraftDriver() as driver:
        await driver.ready(victim.member, other.member)
        driver.open(*range(6))
        await driver.all_drafted()
        assert len({driver.drafter_of(seq) for seq in range(6)}) == 2
        await victim.kill()
        await eventually(
            lambda: {driver.drafter_of(seq) for seq in range(6)} == {other.incarnation}
        )
        driver.commit(3)
        await driver.all_drafted()


async def test_a_stopped_drafter_blocks_nothing_and_is_lost_in_seconds():
    """F2, F12: SIGSTOP. The kernel still takes its bytes, so only deadlines and pings can tell."""
    async with DrafterProcess() as victim, DrafterProcess() as other, DraftDriver() as driver:
        await driver.ready(victim.member, other.member)
        prompt = tuple(range(2_000))
        driver.open(*range(8), prompt=prompt)
        await driver.all_drafted()
        await victim.stop()
        start, slowest_s = time.monotonic(), 0.0
        while driver.state(victim.incarnation) is DrafterState.READY:
            before = time.monotonic()
            assert before - start < 60.0, "not noticed"
            driver.commit(*range(20))
            slowest_s = max(slowest_s, time.monotonic() - before)
            await asyncio.sleep(0.01)
        assert victim.is_stopped()
        assert slowest_s < SLACK_S
        await driver.all_drafted()
        assert {driver.drafter_of(seq) for seq in range(8)} == {other.incarnation}
        victim.resume()


async def test_a_drafter_that_is_told_to_end_drains(tmp_path):
    """F30: SIGTERM. Its sessions move, it ends by itself, and nothing is an error."""
    config = tmp_path / "drafter.yaml"
    config.write_text("max_sessions: 2")
    async with (
        DrafterProcess() as leaving,
        DrafterProcess("--config", str(config)) as other,
        DraftDriver() as driver,
    ):
        await driver.ready(leaving.member, other.member)
        verifiers = [ToyVerifier(driver, seq) for seq in range(6)]
        texts = asyncio.gather(*(v.generate(NUM_TOKENS, step_time(0.01)) for v in verifiers))
        await asyncio.sleep(0.1)
        assert await leaving.terminate() == 0
        assert await texts == [EXPECTED] * 6
        assert driver.client.counters.session_errors == 0
        assert not other.is_stopped()
