"""What the draft client does with a drafter of which almost nothing is accepted, over real gRPC."""

from __future__ import annotations

import verifier_service.acceptance_breaker as acceptance_breaker
from cluster.load import DrafterState
from tests.support.draft_driver import DraftDriver
from tests.support.polling import eventually
from tests.support.scripted_drafter import ScriptedDrafter, chain
from verifier_service.acceptance_breaker import (
    MAX_PROBE_REFUSALS,
    MAX_PROBE_SESSIONS,
    MAX_REFUSALS,
)
from verifier_service.events import DraftOrders, DraftVerdict
from verifier_service.recorders import Fallback


def judge(driver, drafter, num_verdicts, num_accepted=0):
    """Drafts of it were verified so often, a chain of 4 each."""
    for _ in range(num_verdicts):
        driver.client.record(DraftVerdict(drafter.incarnation, 4, num_accepted))


def distrusted(driver):
    return driver.client.recorder.fallbacks[Fallback.DISTRUSTED]


async def test_its_sessions_go_to_another_and_those_that_begin_too():
    async with (
        ScriptedDrafter(chain(3)) as bad,
        ScriptedDrafter(chain(3)) as good,
        DraftDriver(backoff_s=60.0) as driver,
    ):
        await driver.ready(bad.member, good.member)
        driver.open(*range(6))
        await driver.all_drafted()
        judge(driver, good, 10, num_accepted=1)
        judge(driver, bad, MAX_REFUSALS - 1)
        assert len(bad.sessions) == 3
        judge(driver, bad, 1)
        await eventually(lambda: len(good.sessions) == 6 and not bad.sessions)
        assert driver.state(bad.incarnation) is DrafterState.DISTRUSTED
        assert driver.state(good.incarnation) is DrafterState.READY
        assert distrusted(driver) == 3
        driver.open(6, 7)
        driver.commit(3)
        await driver.all_drafted()
        assert {driver.drafter_of(seq) for seq in range(8)} == {good.incarnation}
        assert bad.num_streams == 1


async def test_alone_it_gets_a_probe_and_all_of_them_back_once_that_is_accepted():
    async with ScriptedDrafter(chain(3)) as drafter, DraftDriver(backoff_s=0.05) as driver:
        await driver.ready(drafter.member)
        driver.open(*range(6))
        await driver.all_drafted()
        for num_refusals in (MAX_REFUSALS, MAX_PROBE_REFUSALS):
            judge(driver, drafter, num_refusals)
            assert {driver.drafter_of(seq) for seq in range(6)} == {None}
            await eventually(lambda: driver.client.loads()[0].sessions == MAX_PROBE_SESSIONS)
            driver.open(max(driver.tokens) + 1)
            driver.commit(3)
            served = [seq for seq in driver.tokens if driver.client._sessions[seq].link]
            await eventually(lambda served=served: all(map(driver.has_draft, served)))
            assert len(served) == len(drafter.sessions) == MAX_PROBE_SESSIONS
            assert driver.state(drafter.incarnation) is DrafterState.READY
        judge(driver, drafter, 3, num_accepted=1)
        driver.commit(3)
        await driver.all_drafted()
        assert len(drafter.sessions) == 8
        assert driver.client.counters.times_distrusted == 2


async def test_sessions_that_want_no_drafts_now_are_no_probe():
    async with ScriptedDrafter(chain(3)) as drafter, DraftDriver(backoff_s=0.05) as driver:
        await driver.ready(drafter.member)
        driver.open(*range(4))
        await driver.all_drafted()
        driver.client.apply(DraftOrders(pauses=(0, 1, 2)))
        judge(driver, drafter, MAX_REFUSALS)
        assert distrusted(driver) == 1, "who wanted no drafts misses none"
        await eventually(lambda: drafter.sessions.keys() == {3})
        driver.client.apply(DraftOrders(resumes=(1,)))
        await eventually(lambda: drafter.sessions.keys() == {1, 3})


async def test_a_probe_that_nobody_judges_ends(monkeypatch):
    """Though its drafts come as they should."""
    monkeypatch.setattr(acceptance_breaker, "PROBE_S", 0.1)
    async with ScriptedDrafter(chain(3)) as drafter, DraftDriver(backoff_s=0.05) as driver:
        await driver.ready(drafter.member)
        driver.open(*range(4))
        await driver.all_drafted()
        judge(driver, drafter, MAX_REFUSALS)
        await eventually(lambda: driver.client.counters.times_distrusted == 3)
        assert driver.client.counters.streams_lost == 0


async def test_a_new_stream_to_it_is_no_new_beginning():
    async with ScriptedDrafter(chain(3)) as drafter, DraftDriver(backoff_s=0.05) as driver:
        await driver.ready(drafter.member)
        driver.open(*range(4))
        await driver.all_drafted()
        judge(driver, drafter, MAX_REFUSALS)
        drafter.end_streams()
        await eventually(lambda: driver.client.counters.streams_opened == 2)
        await eventually(lambda: len(drafter.sessions) == MAX_PROBE_SESSIONS)
        judge(driver, drafter, MAX_PROBE_REFUSALS)
        assert driver.state(drafter.incarnation) is DrafterState.DISTRUSTED
        assert driver.client.counters.times_distrusted == 2
