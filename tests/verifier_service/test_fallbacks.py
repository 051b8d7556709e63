"""Sequences that go on without a replica's drafts are counted, by why, and the drafter is told that
its verifier lives."""

from __future__ import annotations

import pytest

from tests.support.draft_driver import DraftDriver
from tests.support.polling import eventually
from tests.support.scripted_drafter import ScriptedDrafter, chain
from verifier_service.draft_client import HEARTBEAT_S, LEASE_S
from verifier_service.recorders import Fallback, SpeculationCounts


def fallbacks(driver: DraftDriver) -> dict[Fallback, int]:
    return dict(driver.client.recorder.fallbacks)


async def test_without_a_drafter_and_when_it_is_lost():
    async with DraftDriver() as driver:
        driver.open(1)
        assert fallbacks(driver) == {Fallback.NO_DRAFTER: 1}
        async with ScriptedDrafter(chain(3)) as drafter:
            await driver.ready(drafter.member)
            driver.open(2)
            await driver.all_drafted()
            assert fallbacks(driver) == {Fallback.NO_DRAFTER: 1}
        await eventually(lambda: Fallback.LOST in fallbacks(driver))
        assert fallbacks(driver) == {Fallback.NO_DRAFTER: 1, Fallback.LOST: 2}
        assert driver.client.recorder.rtt_seconds.count == 2


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("OverloadedError", Fallback.FULL),
        ("InvalidRequestError", Fallback.REFUSED),
        ("InternalError", Fallback.ERROR),
    ],
)
async def test_when_the_drafter_ends_a_session(kind, reason):
    async with ScriptedDrafter(chain(3)) as drafter, DraftDriver() as driver:
        await driver.ready(drafter.member)
        driver.open(1)
        await driver.all_drafted()
        drafter.fail_session(1, kind)
        await eventually(lambda: fallbacks(driver) == {reason: 1})


async def test_a_drafter_hears_of_us_once_a_second_while_sessions_are_open():
    assert 3 * HEARTBEAT_S < LEASE_S
    async with ScriptedDrafter(chain(3)) as drafter, DraftDriver() as driver:
        await driver.ready(drafter.member)
        driver.open(1)
        await driver.all_drafted()
        told = len(drafter.batches)
        await eventually(lambda: len(drafter.batches) >= told + 2)
        beat = drafter.batches[-1]
        assert not any((beat.opens, beat.commits, beat.pauses, beat.resumes, beat.closes))
        assert drafter.sessions.keys() == {1}


def test_counts_of_drafts_fit_together():
    counts = SpeculationCounts()
    counts.record(["ngram", "ngram", "replica"], 2)
    counts.record(["replica"], 1)
    counts.record(["replica", "replica"], 0)
    totals = counts.totals()
    assert totals.num_drafts == 3
    assert totals.draft_tokens == {"ngram": 2, "replica": 4}
    assert totals.accepted_tokens == {"ngram": 2, "replica": 1}
    assert totals.accepted_per_position == (2, 1)
