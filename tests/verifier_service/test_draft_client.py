"""The draft client against real gRPC servers that do all a drafter can do, right and wrong."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import math
import time

import grpc
import pytest

import verifier_service.drafter_link as drafter_link
import verifier_service.drafter_stream as drafter_stream
from cluster.config import DrafterConfig
from cluster.load import DrafterState
from cluster.protocol.messages import MAX_DRAFTS_PER_MESSAGE, DrafterBatch, DrafterReport
from cluster.types import Member
from drafter_service.service import DrafterService
from tests.support.draft_driver import HELLO, PROMPT, DraftDriver
from tests.support.polling import eventually
from tests.support.scripted_drafter import (
    ScriptedDrafter,
    chain,
    chain_of,
    draft_of,
    duplicated,
    far_anchor,
    nothing,
    silence,
    stale_epoch,
    unknown_session,
)
from verifier_service.drafter_link import MAX_STRIKES
from verifier_service.events import DraftCommit, DraftOrders, DraftVerdict, Foresight


@contextlib.asynccontextmanager
async def scripted(count, answer=nothing, **hello):
    """Some scripted drafters and a driver that has streams to all of them."""
    async with contextlib.AsyncExitStack() as stack:
        drafters = [
            await stack.enter_async_context(ScriptedDrafter(answer, **hello)) for _ in range(count)
        ]
        driver = await stack.enter_async_context(DraftDriver())
        await driver.ready(*(d.member for d in drafters))
        yield driver, *drafters


# --- sessions ----------------------------------------------------------------------------------


async def test_a_session_lives_from_open_to_close():
    async with scripted(1, chain(3, 1)) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        assert driver.drafter_of(1) == drafter.incarnation
        assert [n.token_id for n in driver.drafts(1)[0].nodes] == [3, 1]
        driver.commit(3, 9)
        await driver.all_drafted()
        assert drafter.sessions[1].token_ids == [*PROMPT, 3, 9]
        driver.close(1)
        await eventually(lambda: not drafter.sessions)
        assert driver.client.num_sessions == 0
        assert driver.client.counters.drafts == 2


async def test_everything_of_a_step_is_one_message():
    async with scripted(1) as (driver, drafter):
        driver.open(*range(20))
        await driver.all_drafted()
        for step in range(5):
            driver.commit(step)
            await driver.all_drafted()
        assert len(drafter.batches) == 6
        assert {len(batch.commits) for batch in drafter.batches[1:]} == {20}


async def test_pause_is_told_and_resume_is_warm():
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        driver.client.apply(DraftOrders(pauses=(1,)))
        driver.commit(5)
        driver.commit(6)
        await eventually(lambda: drafter.sessions[1].token_ids == [*PROMPT, 5, 6])
        assert drafter.sessions[1].paused
        assert not driver.has_draft(1)
        driver.client.apply(DraftOrders(resumes=(1,)))
        await driver.all_drafted()
        assert len(drafter.batches[0].opens) == 1
        assert not any(batch.opens for batch in drafter.batches[1:])


async def test_an_unknown_sequence_is_ignored():
    async with scripted(1) as (driver, drafter):
        driver.client.apply(DraftOrders(pauses=(8,), resumes=(8,), closes=(8,), resyncs=(8,)))
        driver.open(1)
        await driver.all_drafted()
        assert len(drafter.batches) == 1


async def test_each_message_says_which_drafts_are_worth_making():
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        for least in (0.25, 0.5, 0.0):
            start = len(driver.tokens[1])
            driver.tokens[1].append(5)
            commit = DraftCommit(1, start, (5,))
            driver.client.apply(DraftOrders(commits=(commit,), least_survival=least))
            await driver.all_drafted()
            assert drafter.batches[-1].least_survival == least


async def test_sessions_spread_over_the_drafters():
    async with scripted(3) as (driver, *drafters):
        driver.open(*range(9))
        await driver.all_drafted()
        assert [len(d.sessions) for d in drafters] == [3, 3, 3]
        assert [load.sessions for load in driver.client.loads()] == [3, 3, 3]


async def test_a_sequence_may_ask_for_a_drafter_by_name():
    async with (
        ScriptedDrafter() as one,
        ScriptedDrafter(drafter="other") as other,
        DraftDriver() as driver,
    ):
        await driver.ready(one.member, other.member)
        driver.open(1, 2, drafter="other")
        driver.open(3, drafter="nobody")
        await eventually(lambda: len(other.sessions) == 2)
        assert not one.sessions
        assert driver.drafter_of(3) is None


async def test_a_place_that_becomes_free_is_taken_without_a_refusal():
    async with scripted(1, max_sessions=2) as (driver, drafter):
        driver.open(1, 2, 3)
        await eventually(lambda: driver.has_draft(1) and driver.has_draft(2))
        assert driver.drafter_of(3) is None
        driver.close(1)
        await driver.all_drafted()
        assert drafter.sessions.keys() == {2, 3}
        first_two, closing, third = drafter.batches
        assert (len(first_two.opens), closing.closes, len(third.opens)) == (2, (1,), 1)


async def test_a_message_has_a_bound(monkeypatch):
    monkeypatch.setattr(drafter_link, "MAX_BATCH_TOKENS", 12)
    async with scripted(1) as (driver, drafter):
        driver.open(*range(10))
        await driver.all_drafted()
        assert len(drafter.batches) == 4
        assert sum(len(batch.opens) for batch in drafter.batches) == 10


# --- no drafter --------------------------------------------------------------------------------


async def test_without_drafters_sequences_wait_in_peace():
    """N6: none at first, one later, none again."""
    async with DraftDriver() as driver:
        driver.open(1)
        driver.commit(3)
        await asyncio.sleep(0.1)
        driver.members(())
        driver.commit(4)
        await asyncio.sleep(0.1)
        assert driver.inbox == []
        async with ScriptedDrafter() as drafter:
            driver.members([drafter.member])
            await driver.all_drafted()
            assert drafter.sessions[1].token_ids == [*PROMPT, 3, 4]
        await eventually(lambda: driver.drafter_of(1) is None)
        driver.commit(5)
        driver.close(1)


async def test_a_dead_address_is_tried_ever_more_rarely(monkeypatch):
    attempts = []
    run_stream = drafter_stream.run_stream

    async def counted(*args):
        attempts.append(asyncio.get_running_loop().time())
        await run_stream(*args)

    monkeypatch.setattr("verifier_service.grpc_network.run_stream", counted)
    async with DraftDriver(backoff_s=0.05) as driver:
        driver.open(1)
        driver.members([Member("gone", "127.0.0.1:9")])
        await eventually(lambda: len(attempts) >= 4)
        pauses = [b - a for a, b in itertools.pairwise(attempts)]
        assert pauses[0] > 0.02
        assert pauses[2] > 0.08
        assert driver.state("gone") in (DrafterState.LOST, DrafterState.CONNECTING)
        assert driver.inbox == []


# --- a drafter is lost --------------------------------------------------------------------------


async def test_a_lost_drafters_sessions_go_on_elsewhere():
    async with scripted(2) as (driver, one, two):
        driver.open(*range(6))
        await driver.all_drafted()
        driver.commit(3)
        await one.stop()
        await driver.all_drafted()
        await eventually(lambda: len(two.sessions) == 6)
        driver.commit(4)
        await driver.all_drafted()
        assert {driver.drafter_of(seq) for seq in range(6)} == {two.incarnation}
        assert {tuple(s.token_ids) for s in two.sessions.values()} == {(*PROMPT, 3, 4)}
        moved = {s.opening.epoch for s in two.sessions.values()}
        assert moved == {1, 2}
        assert driver.state(one.incarnation) is DrafterState.LOST


async def test_a_drafter_that_comes_back_is_used_again():
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        drafter.end_streams()
        await eventually(lambda: drafter.num_streams == 0)
        driver.commit(3)
        await driver.all_drafted()
        assert driver.drafter_of(1) == drafter.incarnation
        assert drafter.sessions[1].opening.epoch == 2
        assert drafter.sessions[1].opening.token_ids == (*PROMPT, 3)


async def test_a_drafter_that_is_silent_is_lost(monkeypatch):
    """Its transport is alive; its drafts do not come. What it owed is not asked of the next one,
    which may be slow."""
    monkeypatch.setattr(drafter_link, "SILENCE_TIMEOUT_S", 0.2)
    async with scripted(2) as (driver, one, two):
        one.answer, two.delay_s = silence, 0.1
        driver.open(*range(4))
        await driver.all_drafted()
        assert {driver.drafter_of(seq) for seq in range(4)} == {two.incarnation}
        assert driver.client.counters.streams_lost == 1


async def test_a_drafter_that_owes_nothing_may_be_silent(monkeypatch):
    """Pausing cancels what is owed, and so does opening anew elsewhere."""
    monkeypatch.setattr(drafter_link, "SILENCE_TIMEOUT_S", 0.1)
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        drafter.answer = silence
        driver.commit(3)
        await eventually(lambda: drafter.sessions[1].token_ids == [*PROMPT, 3])
        driver.client.apply(DraftOrders(pauses=(1,)))
        await asyncio.sleep(0.05)
        driver.client.apply(DraftOrders(resumes=(1,)))
        driver.client.apply(DraftOrders(pauses=(1,)))
        await asyncio.sleep(0.4)
        assert driver.drafter_of(1) == drafter.incarnation
        assert driver.client.counters.streams_lost == 0


async def test_a_drained_drafters_sessions_move():
    async with scripted(2) as (driver, one, two):
        driver.open(*range(4))
        await driver.all_drafted()
        one.send(DrafterBatch(drain=True))
        await eventually(lambda: len(two.sessions) == 4 and not one.sessions)
        await driver.all_drafted()
        assert driver.state(one.incarnation) is DrafterState.DRAINING
        driver.open(9)
        await driver.all_drafted()
        assert 9 in two.sessions


async def test_a_drained_drafter_serves_on_while_there_is_no_other():
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        drafter.send(DrafterBatch(drain=True))
        await eventually(lambda: driver.state(drafter.incarnation) is DrafterState.DRAINING)
        driver.commit(3)
        await driver.all_drafted()
        driver.open(2)
        async with ScriptedDrafter() as other:
            driver.members([drafter.member, other.member])
            await eventually(lambda: len(other.sessions) == 2)
            await driver.all_drafted()


async def test_a_member_that_is_gone_from_the_list_serves_on_and_takes_nothing_new():
    async with scripted(2) as (driver, one, two):
        driver.open(1, 2)
        await driver.all_drafted()
        driver.members([two.member])
        driver.open(3, 4, 5)
        driver.commit(3)
        await driver.all_drafted()
        assert len(one.sessions) == 1
        one.end_streams()
        await eventually(lambda: len(two.sessions) == 5)
        await eventually(lambda: driver.state(one.incarnation) is None)


# --- handshakes ---------------------------------------------------------------------------------


async def test_a_refusal_is_final():
    """N5, K2: the drafter says that it does not fit."""
    async with ScriptedDrafter() as one, ScriptedDrafter() as two, DraftDriver(0.02) as driver:
        one.refusal = (grpc.StatusCode.FAILED_PRECONDITION, "another vocabulary")
        driver.open(1, 2)
        driver.members([one.member, two.member])
        await driver.all_drafted()
        await eventually(lambda: driver.state(one.incarnation) is DrafterState.REFUSED)
        driver.members([two.member])
        await asyncio.sleep(0.2)
        driver.members([one.member, two.member])
        await asyncio.sleep(0.2)
        assert len(one.target_hellos) == 1
        assert len(two.sessions) == 2
        assert driver.client.counters.streams_refused == 1


@pytest.mark.parametrize(
    "change",
    [
        {"vocabulary": "vocabulary-b"},
        {"noise_version": 99},
        {"protocol_version": 99},
        {"incarnation": "another life"},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_drafter_that_does_not_fit_is_refused(change):
    """The drafter did not notice; or another process has its address now."""
    async with ScriptedDrafter() as drafter, DraftDriver(0.02) as driver:
        drafter.hello = dataclasses.replace(drafter.hello, **change)
        driver.open(1)
        driver.members([drafter.member])
        await eventually(lambda: driver.state(drafter.incarnation) is DrafterState.REFUSED)
        await asyncio.sleep(0.1)
        assert len(drafter.target_hellos) == 1
        assert driver.inbox == []


async def test_a_drafter_with_other_special_tokens_is_used_and_told_of(caplog):
    """K4."""
    hello = dataclasses.replace(HELLO, vocabulary="text-special-2")
    async with (
        ScriptedDrafter(chain(3), vocabulary="text-others-2.3") as drafter,
        DraftDriver(hello=hello) as driver,
    ):
        await driver.ready(drafter.member)
        driver.open(1)
        await driver.all_drafted()
        assert "scripted" in caplog.text
        assert "other special tokens than target" in caplog.text


@pytest.mark.parametrize("fault", ["mute", "no hello", "unavailable"])
async def test_a_handshake_that_fails_is_tried_again(fault, monkeypatch):
    monkeypatch.setattr(drafter_stream, "HANDSHAKE_TIMEOUT_S", 0.1)
    async with ScriptedDrafter() as drafter, DraftDriver(0.02) as driver:
        hello = drafter.hello
        if fault == "mute":
            drafter.mute_handshake = True
        elif fault == "no hello":
            drafter.hello = None
        else:
            drafter.refusal = (grpc.StatusCode.UNAVAILABLE, "this drafter drains")
        driver.open(1)
        driver.members([drafter.member])
        await eventually(lambda: len(drafter.target_hellos) >= 2)
        assert driver.inbox == []
        drafter.mute_handshake, drafter.hello, drafter.refusal = False, hello, None
        await driver.all_drafted()


# --- what a drafter may say wrongly --------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "counter"), [(stale_epoch, "stale_epochs"), (unknown_session, "unknown_sessions")]
)
async def test_drafts_of_no_session_of_ours_are_dropped(answer, counter):
    async with scripted(1, answer) as (driver, drafter):
        driver.open(1)
        await eventually(lambda: getattr(driver.client.counters, counter) > 0)
        assert driver.inbox == []
        drafter.answer = nothing
        driver.commit(3)
        await driver.all_drafted()


async def test_a_late_draft_of_an_earlier_opening_is_dropped():
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        old, num_drafts = drafter.sessions[1], len(driver.drafts(1))
        driver.client.apply(DraftOrders(resyncs=(1,)))
        await eventually(lambda: len(driver.drafts(1)) == num_drafts + 1)
        assert drafter.sessions[1].opening.epoch == 2
        drafter.send(DrafterBatch(drafts=(draft_of(old, chain_of([1])),)))
        await eventually(lambda: driver.client.counters.stale_epochs == 1)
        assert len(driver.drafts(1)) == num_drafts + 1


async def test_a_flood_of_drafts_is_cut_off():
    async with scripted(1, duplicated(chain(3), times=100)) as (driver, _):
        driver.open(1)
        await eventually(lambda: driver.client.counters.streams_lost == 1)
        assert len(driver.drafts(1)) == MAX_DRAFTS_PER_MESSAGE
        assert driver.client.counters.surplus_drafts == MAX_STRIKES + 1


async def test_a_drafter_of_malformed_drafts_is_dropped():
    async with scripted(2) as (driver, one, two):
        driver.open(1, 2)
        await driver.all_drafted()
        (seq,) = one.sessions
        for _ in range(MAX_STRIKES):
            driver.client.apply(DraftOrders(malformed=(seq,)))
        assert driver.drafter_of(seq) == one.incarnation
        driver.client.apply(DraftOrders(malformed=(seq,)))
        assert driver.state(one.incarnation) is DrafterState.LOST
        await driver.all_drafted()
        await eventually(lambda: driver.drafter_of(seq) == two.incarnation)


async def test_a_huge_message_ends_its_stream():
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        huge = draft_of(drafter.sessions[1], chain_of(range(1_000)))
        drafter.send(DrafterBatch(drafts=(huge,) * 300))
        await eventually(lambda: driver.client.counters.streams_lost == 1)
        await driver.all_drafted()
        assert driver.client.counters.drafts == 1
        driver.commit(3)
        await driver.all_drafted()


async def test_a_report_of_nonsense_is_not_passed_on():
    async with scripted(1) as (driver, drafter):
        drafter.send(DrafterBatch(load=DrafterReport(1, 5.0, 2.0)))
        await eventually(lambda: driver.client.loads()[0].tokens_per_s == 5.0)
        drafter.send(DrafterBatch(load=DrafterReport(1, float("nan"), float("inf"))))
        driver.open(1)
        await driver.all_drafted()
        assert driver.client.loads()[0].tokens_per_s == 5.0


# --- session errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["UnknownSessionError", "InternalError", "ErrorOfTheFuture"])
async def test_a_session_that_the_drafter_lost_is_opened_again(kind):
    async with scripted(1) as (driver, drafter):
        driver.open(1, 2)
        await driver.all_drafted()
        drafter.fail_session(1, kind)
        driver.commit(3)
        await eventually(lambda: drafter.sessions.keys() == {1, 2})
        await driver.all_drafted()
        epochs = {seq: session.opening.epoch for seq, session in drafter.sessions.items()}
        assert epochs == {1: 2, 2: 1}


async def test_the_error_of_an_unknown_session_counts_unless_it_is_older_than_the_opening():
    async with scripted(1) as (driver, drafter):
        driver.open(1)
        await driver.all_drafted()
        drafter.fail_session(1, "UnknownSessionError", epoch=0)
        await eventually(lambda: 1 in drafter.sessions)
        assert drafter.sessions[1].opening.epoch == 2
        await driver.all_drafted()

        drafter.answer = silence
        driver.client.apply(DraftOrders(pauses=(1,)))
        driver.open(2)
        await eventually(lambda: 2 in drafter.sessions)
        drafter.fail_session(2, "UnknownSessionError", epoch=0)
        await eventually(lambda: driver.client.counters.stale_epochs == 1)


async def test_a_full_drafter_is_left_alone_for_a_while():
    async with scripted(2) as (driver, one, two):
        driver.open(1, 2)
        await driver.all_drafted()
        (seq,) = one.sessions
        one.fail_session(seq, "OverloadedError")
        await eventually(lambda: len(two.sessions) == 2)
        driver.commit(3)
        await driver.all_drafted()


async def test_a_drafter_that_will_not_have_a_session_is_not_asked_again():
    """J2: the drafter's window is shorter than the sequence."""
    async with scripted(1) as (driver, drafter):
        driver.open(1, 2)
        await driver.all_drafted()
        drafter.fail_session(1, "InvalidRequestError")
        await eventually(lambda: driver.drafter_of(1) is None)
        for _ in range(5):
            driver.commit(3)
            await asyncio.sleep(0.03)
        assert drafter.sessions.keys() == {2}
        assert driver.drafter_of(2) == drafter.incarnation


async def test_a_drafter_that_fails_every_session_makes_no_loop():
    async with scripted(1) as (driver, drafter):

        def fail(session):
            drafter.fail_session(session.opening.session, "UnknownSessionError")
            return []

        drafter.answer = fail
        counters, started = driver.client.counters, time.monotonic()
        driver.open(1)
        await eventually(lambda: counters.sessions_opened >= 5)
        # At pauses of 0, 50, 100, 200 ms, doubling.
        assert counters.sessions_opened <= 3 + math.log2(1 + (time.monotonic() - started) / 0.05)


async def test_a_drafter_on_wrong_prefixes_makes_no_loop():
    """The engine asks to re-sync whenever an unknown anchor comes."""
    async with scripted(1, far_anchor) as (driver, _):
        driver.open(*range(10))
        for _ in range(50):
            seqs = tuple({s for s in range(10) if driver.drafts(s)})
            driver.client.apply(DraftOrders(resyncs=seqs))
            driver.commit(3)
            await asyncio.sleep(0.005)
        assert driver.client.counters.streams_lost >= 1
        assert driver.client.counters.sessions_opened < 60


# --- load and end --------------------------------------------------------------------------------


async def test_the_round_trip_is_measured():
    async with scripted(1) as (driver, drafter):
        drafter.delay_s = 0.05
        driver.open(1)
        await driver.all_drafted()
        for accepted, foresight in (
            (8, Foresight(corrected=False, is_ready=True)),
            (5, Foresight(corrected=True, is_ready=True)),
            (2, Foresight(corrected=True, is_ready=False)),
            (0, None),
        ):
            driver.client.record(DraftVerdict(drafter.incarnation, 8, accepted, foresight))
        driver.client.record(DraftVerdict("nobody", 8, 2))
        (load,) = driver.client.loads()
        assert 50 <= load.rtt_ms < 1_000  # A busy machine adds to it.
        assert (load.num_draft_tokens, load.num_accepted_tokens) == (32, 15)
        assert (load.num_accepted_chains, load.num_ahead_hits) == (1, 1)
        assert (load.num_corrections, load.num_correction_hits) == (2, 1)
        assert (load.state, load.sessions) == (DrafterState.READY, 1)


@contextlib.asynccontextmanager
async def ngram_service():
    service = await DrafterService.start(DrafterConfig(), host="127.0.0.1")
    try:
        yield service, Member(service.incarnation, service.address)
    finally:
        await service.stop(0)


def tasks():
    """All but gRPC's own of the servers."""
    names = {task: task.get_coro().__qualname__ for task in asyncio.all_tasks()}
    return {task for task, name in names.items() if not name.startswith("AioServer.")}


async def test_close_leaves_no_task_and_no_session():
    async with ngram_service() as (service, member):
        before = tasks()
        driver = DraftDriver()
        driver.members([member, Member("gone", "127.0.0.1:9")])
        driver.open(*range(8))
        await driver.all_drafted()
        assert service.num_sessions == 8
        await driver.client.close()
        await driver.client.close()
        await eventually(lambda: service.num_sessions == 0)
        driver.members([member])
        driver.commit(3)
        await eventually(lambda: tasks() <= before)


async def test_a_busy_hour_in_small_leaves_nothing():
    """Sessions come, pause, re-sync and go over two real drafters; at the end both are empty."""
    async with (
        ngram_service() as (one, member_one),
        ngram_service() as (two, member_two),
        DraftDriver() as driver,
    ):
        await driver.ready(member_one, member_two)
        for seq in range(60):
            driver.open(seq)
            if seq % 3 == 0:
                driver.client.apply(DraftOrders(resyncs=(seq,), pauses=(seq,)))
            driver.commit(seq % 5)
            await asyncio.sleep(0.001)
            if seq % 2:
                driver.close(seq, seq - 1)
        assert driver.client.num_sessions == 0
        await eventually(lambda: one.num_sessions == two.num_sessions == 0)
        assert one.num_session_errors == two.num_session_errors == {}
