"""The law on a scripted target: whatever drafters, batch, pool and path do, the tokens are those
of decoding one by one."""

from __future__ import annotations

import contextlib
import queue
import random
import threading
import time

import pytest

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.types import FinishReason, Path, SamplingParams
from tests.support.engine_driver import (
    GREEDY,
    EngineDriver,
    chain_draft,
    flaky_drafter,
    oracle_drafter,
)
from tests.support.reference import decode
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law
from verifier_service.draft_trie import DraftOutcome
from verifier_service.drafter_trial import DrafterTrial
from verifier_service.engine import Engine
from verifier_service.events import (
    Cancelled,
    DraftArrived,
    DraftSessionLive,
    DraftSessionLost,
    PathChanged,
    Reconfigured,
    Submitted,
)
from verifier_service.planner import StepProfile

SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.9),
    SamplingParams(temperature=0.8, top_k=5),
]


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_those_of_decoding_one_by_one(seed):
    """Many requests, a pool too small for them, prompts in chunks, a drafter of every humour."""
    rng = random.Random(seed)
    law = hashed_law(salt=str(seed))
    runner = ScriptedRunner(law, num_blocks=rng.choice([14, 20, 64]), block_size=rng.choice([1, 4]))
    limit = runner.kv.num_blocks * runner.kv.block_size
    driver = EngineDriver(
        runner,
        drafter=flaky_drafter(rng, law),
        scheduler=SchedulerConfig(
            max_running_sequences=rng.choice([2, 8]),
            max_step_tokens=rng.choice([3, 16, 64]),
            max_prefill_chunk_tokens=rng.choice([1, 3, 64]),
        ),
    )
    expected = {}
    for _ in range(12):
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(1, limit // 2))]
        fields = {
            "max_tokens": rng.randrange(1, limit // 2),
            "sampling": rng.choice(SAMPLINGS),
            "request_key": rng.getrandbits(64),
        }
        seq = driver.submit(prompt, path=rng.choice(list(Path)), **fields)
        expected[seq] = decode(law, prompt, **fields)
    results = driver.run()
    assert {seq: result.token_ids for seq, result in results.items()} == expected
    assert all(result.finish is not None for result in results.values())
    assert runner.kv.num_used_blocks == 0
    assert not driver.sessions, "a draft session outlived its sequence"


def test_a_pool_that_is_too_small_preempts_and_still_finishes():
    law = hashed_law()
    runner = ScriptedRunner(law, num_blocks=8, block_size=2)
    driver = EngineDriver(runner)
    fields = {"max_tokens": 10, "sampling": GREEDY, "request_key": 1}
    prompts = [[3, 4, 5 + i] for i in range(6)]
    for prompt in prompts:
        driver.submit(prompt, **fields)
    results = driver.run()
    assert driver.engine.num_preemptions > 0, "the pool was not tight: the test shows nothing"
    assert [r.token_ids for r in results.values()] == [decode(law, p, **fields) for p in prompts]


def test_drafts_yield_before_any_sequence_is_preempted():
    law = hashed_law()
    runner = ScriptedRunner(law, num_blocks=4, block_size=4)
    drafter = oracle_drafter(law, GREEDY, 1, depth=8)
    driver = EngineDriver(runner, drafter=drafter)
    for i in range(2):
        driver.submit([3, 4 + i], max_tokens=6)
    driver.run()
    assert driver.engine.num_preemptions == 0


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_drafter_that_knows_the_answer_is_always_accepted(sampling):
    law = hashed_law(salt="oracle")
    runner = ScriptedRunner(law)
    driver = EngineDriver(runner, drafter=oracle_drafter(law, sampling, 5, depth=4))
    driver.submit([3, 4], max_tokens=20, sampling=sampling, request_key=5, ignore_eos=True)
    result = driver.run()[1]
    stats = result.finish.stats
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
    assert len(result.token_ids) / stats.num_steps >= 3.5


def test_a_step_holds_no_more_than_its_budget():
    law = hashed_law()
    runner = ScriptedRunner(law, num_blocks=200)
    driver = EngineDriver(
        runner,
        drafter=oracle_drafter(law, GREEDY, 1, depth=8),
        scheduler=SchedulerConfig(max_step_tokens=10, max_prefill_chunk_tokens=6),
    )
    for i in range(6):
        driver.submit([3 + i] * 30, max_tokens=10)
    driver.run()
    assert runner.max_rows <= 10


def run_until_ended(driver, seqs):
    for _ in range(1_000):
        driver.step()
        if all(driver.results[seq].ended for seq in seqs):
            return
    raise AssertionError("not finished")


@pytest.mark.parametrize("max_step_tokens", [1, 2, 4])
def test_drafts_that_no_step_had_room_for_take_nothing_back(max_step_tokens):
    """Seven are proposed and fewer verified. Elsewhere the history was cut by those proposed."""
    law = hashed_law()
    driver = EngineDriver(
        ScriptedRunner(law),
        drafter=oracle_drafter(law, GREEDY, 1, depth=7),
        scheduler=SchedulerConfig(max_step_tokens=max_step_tokens, max_prefill_chunk_tokens=1),
        speculation=SpeculationConfig(planner="fixed", num_speculative_tokens=7),
    )
    seq = driver.submit([3, 4, 5], max_tokens=30, ignore_eos=True)
    result = driver.results[seq]
    while not result.ended:
        driver.step()
        for sequence in driver.engine._scheduler.running:
            assert list(sequence.token_ids) == [3, 4, 5, *result.token_ids]
    assert max(event.num_draft_tokens for event in result.events) < max_step_tokens
    assert result.token_ids == decode(
        law, [3, 4, 5], max_tokens=30, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )


@pytest.mark.parametrize("block_size", [1, 16])
def test_after_200_requests_that_end_in_every_way_no_block_is_missing(block_size):
    rng, law = random.Random(block_size), hashed_law()
    driver = EngineDriver(
        ScriptedRunner(law, num_blocks=512 // block_size, block_size=block_size),
        drafter=flaky_drafter(rng, law),
        speculation=SpeculationConfig(
            draft_deadline_ms=1.0, planner="fixed", num_speculative_tokens=5
        ),
    )
    kv = driver.runner.kv
    for _ in range(10):
        seqs = [
            driver.submit(
                [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 20))],
                max_tokens=rng.randint(1, 12),
                stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 8]))),
            )
            for _ in range(20)
        ]
        for _ in range(3):
            driver.step()
        gone = rng.sample(seqs, 4)
        for seq in gone:
            driver.engine.inbox.put(Cancelled(seq))
        run_until_ended(driver, set(seqs) - set(gone))
        assert kv.num_used_blocks == 0
        assert not driver.sessions
    reasons = {result.finish.reason for result in driver.results.values() if result.finish}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}


def test_sessions_that_fail_among_many_leave_nothing_running():
    """Elsewhere requests whose drafter raised stayed for ever."""
    law = hashed_law()
    driver = EngineDriver(
        ScriptedRunner(law, num_blocks=400),
        drafter=oracle_drafter(law, GREEDY, 1, depth=4),
        scheduler=SchedulerConfig(max_running_sequences=50),
    )
    seqs = [driver.submit([3 + i % 30, 4], max_tokens=30, ignore_eos=True) for i in range(50)]
    driver.step()
    for seq in seqs[::10]:
        driver.engine.inbox.put(DraftSessionLost(seq))
    results = driver.run()
    assert all(len(result.token_ids) == 30 for result in results.values())
    assert driver.engine.load().running == 0
    assert not driver.sessions
    again = driver.submit([3, 4], max_tokens=5)
    assert driver.run()[again].finish is not None


def test_a_draft_that_comes_after_the_end_is_not_the_next_requests():
    """It takes the place and the blocks of the one before. Elsewhere a late draft revived it."""
    law = hashed_law()
    runner = ScriptedRunner(law, num_blocks=8)
    driver = EngineDriver(
        runner,
        drafter=lambda committed, request: [] if request.request_id == "1" else None,
        scheduler=SchedulerConfig(max_running_sequences=1),
    )
    gone = driver.submit([3] * 12, max_tokens=10, ignore_eos=True)
    for _ in range(3):
        driver.step()
    committed = [3] * 12 + driver.results[gone].token_ids
    driver.engine.inbox.put(Cancelled(gone))
    seq = driver.submit([4] * 12, max_tokens=10, ignore_eos=True)
    driver.step()
    driver.engine.inbox.put(DraftArrived(gone, chain_draft(committed, [9, 9, 9])))
    run_until_ended(driver, [seq])
    result = driver.results[seq]
    assert result.token_ids == decode(
        law, [4] * 12, max_tokens=10, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )
    assert result.finish.stats.num_draft_tokens == 0
    assert not driver.results[gone].ended, "it was cancelled"
    assert runner.kv.num_used_blocks == 0


def test_a_draft_that_is_refused_again_and_again_holds_up_nothing():
    """Elsewhere the same checkpoint was restored for ever."""
    law = hashed_law()
    driver = EngineDriver(ScriptedRunner(law), drafter=lambda committed, request: [39] * 4)
    seq = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    for num_tokens in range(1, 31):
        driver.step()
        assert len(driver.results[seq].token_ids) >= num_tokens
    assert driver.results[seq].finish.stats.num_draft_tokens > 20


def test_one_of_eight_is_cancelled_and_the_others_finish():
    law = hashed_law()
    driver = EngineDriver(
        ScriptedRunner(law, num_blocks=100), drafter=oracle_drafter(law, GREEDY, 1, depth=3)
    )
    seqs = [driver.submit([3 + i, 4], max_tokens=20, ignore_eos=True) for i in range(8)]
    for _ in range(3):
        driver.step()
    driver.engine.inbox.put(Cancelled(seqs[3]))
    staying = [seq for seq in seqs if seq != seqs[3]]
    run_until_ended(driver, staying)
    for seq in staying:
        assert driver.results[seq].token_ids == decode(
            law, [3 + seq - 1, 4], max_tokens=20, sampling=GREEDY, request_key=1,
            stop_ids=frozenset(),
        )  # fmt: skip
    assert len(driver.results[seqs[3]].token_ids) < 20
    assert driver.runner.kv.num_used_blocks == 0


def test_a_long_prompt_does_not_stall_the_others():
    law = hashed_law()
    runner = ScriptedRunner(law, num_blocks=200)
    driver = EngineDriver(runner, scheduler=SchedulerConfig(max_prefill_chunk_tokens=8))
    short = driver.submit([3, 4], max_tokens=100, ignore_eos=True)
    driver.step()
    driver.submit([5] * 80, max_tokens=1)
    for num_tokens in range(2, 10):
        driver.step()
        assert len(driver.results[short].token_ids) == num_tokens


@pytest.mark.parametrize("when", range(6))
def test_cancelling_at_any_moment_frees_everything(when):
    law = hashed_law()
    runner = ScriptedRunner(law)
    driver = EngineDriver(
        runner,
        drafter=oracle_drafter(law, GREEDY, 1, depth=3),
        scheduler=SchedulerConfig(max_prefill_chunk_tokens=2),
    )
    gone = driver.submit([3, 4, 5, 6, 7], max_tokens=50, ignore_eos=True)
    stays = driver.submit([8, 9], max_tokens=12, ignore_eos=True)
    for _ in range(when):
        driver.step()
    driver.engine.inbox.put(Cancelled(gone))
    driver.step()
    assert gone not in driver.sessions
    driver.engine.inbox.put(DraftArrived(gone, chain_draft([3, 4, 5, 6, 7], [1])))
    while not driver.results[stays].ended:
        driver.step()
    expected = decode(
        law, [8, 9], max_tokens=12, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )
    assert driver.results[stays].token_ids == expected
    assert runner.kv.num_used_blocks == 0


def test_path_changes_pause_and_resume_the_session_and_change_no_token():
    law = hashed_law()
    runner = ScriptedRunner(law)
    driver = EngineDriver(runner, drafter=oracle_drafter(law, GREEDY, 1, depth=3))
    seq = driver.submit([3, 4], max_tokens=40, ignore_eos=True)
    for path in (Path.PLAIN, Path.SPECULATIVE, Path.PLAIN, Path.SPECULATIVE):
        driver.step()
        driver.engine.inbox.put(PathChanged(seq, path))
    result = driver.run()[seq]
    orders = [output.orders for output in driver.outputs]
    assert sum(len(o.pauses) for o in orders) == sum(len(o.resumes) for o in orders) == 2
    assert sum(len(o.opens) for o in orders) == 1
    assert result.token_ids == decode(
        law, [3, 4], max_tokens=40, sampling=GREEDY, request_key=1, stop_ids=frozenset()
    )


def test_replicas_that_do_not_pay_rest_and_are_tried_again_and_no_token_changes(monkeypatch):
    """The trial is the real one; what it is told is not, since a clock would decide."""
    told = []

    def stepped(trial, step):
        told.append(step)
        num_turns = len(told) // 10
        trial.engages = num_turns % 2 == 0
        return len(told) % 10 == 0

    monkeypatch.setattr(DrafterTrial, "stepped", stepped)
    law = hashed_law()
    driver = EngineDriver(
        ScriptedRunner(law, num_blocks=256),
        drafter=oracle_drafter(law, GREEDY, 1, depth=3),
        profile=StepProfile({1: 10.0, 512: 10.1}),
    )
    first = driver.submit([3, 4], max_tokens=90, ignore_eos=True)
    plain = driver.submit([3, 4], max_tokens=90, ignore_eos=True, path=Path.PLAIN)
    second = None
    while not all(result.ended for result in driver.results.values()):
        driver.step()
        if second is None and len(told) == 12:
            second = driver.submit([3, 4, 5], max_tokens=50, ignore_eos=True)
    orders = [output.orders for output in driver.outputs]
    pauses = [seq for order in orders for seq in order.pauses]
    resumes = [seq for order in orders for seq in order.resumes]
    assert pauses[0] == resumes[0] == first
    assert plain not in (*pauses, *resumes)
    opened = [order for order in orders if any(o.seq == second for o in order.opens)]
    assert len(opened) == 1
    resting = next(i for i, order in enumerate(orders) if order.pauses)
    assert orders.index(opened[0]) >= next(i for i, o in enumerate(orders) if o.resumes) > resting
    shares = [step.engaged_share for step in told]
    assert {0.0, 1.0} <= set(shares)
    assert all(share == 0.0 for share in shares[10:20]), "a replica drafted while it should rest"
    for seq, prompt, count in ((first, [3, 4], 90), (plain, [3, 4], 90), (second, [3, 4, 5], 50)):
        assert driver.results[seq].token_ids == decode(
            law, prompt, max_tokens=count, sampling=GREEDY, request_key=1, stop_ids=frozenset()
        )


def test_plain_means_no_session_and_no_drafts():
    law = hashed_law()
    driver = EngineDriver(ScriptedRunner(law), drafter=oracle_drafter(law, GREEDY, 1, depth=3))
    driver.submit([3, 4], path=Path.PLAIN)
    result = driver.run()[1]
    assert result.finish.stats.num_draft_tokens == 0
    assert all(not output.orders.opens for output in driver.outputs)


def test_a_silent_drafter_costs_one_deadline_and_no_more():
    law = hashed_law()
    deadline_ms = 100.0
    driver = EngineDriver(
        ScriptedRunner(law),
        drafter=lambda committed, request: None,
        speculation=SpeculationConfig(draft_deadline_ms=deadline_ms),
    )
    driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    started = time.monotonic()
    driver.run()
    assert time.monotonic() - started >= deadline_ms / 1e3
    assert driver.engine.recorder.num_late == 1


def test_a_drafter_that_answers_only_what_is_past_costs_one_deadline_too():
    """Malformed drafts, and drafts for a token that is long committed, are no answer."""
    driver = EngineDriver(
        ScriptedRunner(hashed_law()),
        drafter=lambda committed, request: None,
        speculation=SpeculationConfig(draft_deadline_ms=100.0),
    )
    seq = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    while not driver.results[seq].ended:
        driver.engine.inbox.put(DraftArrived(seq, chain_draft([3, 4], [VOCAB_SIZE])))
        driver.engine.inbox.put(DraftArrived(seq, chain_draft([3, 4], [5])))
        driver.step()
    assert driver.engine.recorder.num_late == 1
    assert any(output.orders.malformed for output in driver.outputs)


def test_the_last_word_on_a_path_in_one_step_holds():
    driver = EngineDriver(ScriptedRunner(hashed_law()), drafter=lambda committed, request: [])
    seq = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    driver.step()
    for path in (Path.PLAIN, Path.SPECULATIVE, Path.PLAIN):
        driver.engine.inbox.put(PathChanged(seq, path))
    driver.step()
    orders = [output.orders for output in driver.outputs]
    assert [seq for order in orders for seq in order.pauses] == [seq]
    assert not any(order.resumes for order in orders)


def test_a_late_draft_is_used_as_far_as_it_still_fits():
    law = hashed_law()
    runner = ScriptedRunner(law)
    driver = EngineDriver(runner, drafter=lambda committed, request: None)
    fields = {"max_tokens": 20, "sampling": GREEDY, "request_key": 1}
    seq = driver.submit([3, 4], ignore_eos=True, **fields)
    answer = decode(law, [3, 4], stop_ids=frozenset(), **fields)
    for _ in range(3):
        driver.step()
    done = len(driver.results[seq].token_ids)
    driver.engine.inbox.put(DraftArrived(seq, chain_draft([3, 4], answer[: done + 4])))
    driver.step()
    assert len(driver.results[seq].token_ids) == done + 5
    assert driver.run()[seq].token_ids == answer


def test_a_lost_session_goes_on_plain_and_comes_back():
    law = hashed_law()
    driver = EngineDriver(ScriptedRunner(law), drafter=oracle_drafter(law, GREEDY, 1, depth=2))
    seq = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    driver.step()
    driver.engine.inbox.put(DraftSessionLost(seq))
    driver.step()
    driver.engine.inbox.put(DraftSessionLive(seq, "other", "incarnation-2"))
    result = driver.run()[seq]
    assert result.finish.stats.drafter == "other"
    assert result.finish.stats.num_accepted_tokens > 0


def test_a_drafter_that_names_unknown_anchors_gets_one_resync_not_a_loop():
    law = hashed_law()
    driver = EngineDriver(ScriptedRunner(law), drafter=lambda committed, request: [])
    seq = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    for _ in range(10):
        driver.step()
        driver.engine.inbox.put(DraftArrived(seq, chain_draft([9, 9, 9], [1])))
    driver.engine._receive(block=False)
    assert driver.engine.draft_outcomes[DraftOutcome.UNKNOWN_ANCHOR] == 10
    resyncs = [seq for output in driver.outputs for seq in output.orders.resyncs]
    assert 1 <= len(resyncs) <= 10


def test_a_poisoned_row_fails_its_request_only():
    sane = hashed_law()

    def law(prefix):
        logits = sane(prefix)
        return [float("nan")] * VOCAB_SIZE if prefix[0] == 9 and len(prefix) > 5 else logits

    driver = EngineDriver(ScriptedRunner(law))
    poisoned = driver.submit([9, 3], max_tokens=10, ignore_eos=True)
    good = driver.submit([4, 3], max_tokens=10, ignore_eos=True)
    results = driver.run()
    assert results[poisoned].error.kind == "InternalError"
    assert len(results[good].token_ids) == 10
    assert driver.runner.kv.num_used_blocks == 0


def test_a_poisoned_row_that_only_a_wrong_draft_reaches_is_no_error():
    sane = hashed_law()
    wrong = 39

    def law(prefix):
        return [float("nan")] * VOCAB_SIZE if prefix[-1] == wrong else [*sane(prefix)[:39], -9.0]

    driver = EngineDriver(ScriptedRunner(law), drafter=lambda committed, request: [wrong, wrong])
    driver.submit([4, 3], max_tokens=10, ignore_eos=True)
    result = driver.run()[1]
    assert result.error is None
    assert result.finish.stats.num_draft_tokens > 0
    assert len(result.token_ids) == 10


def test_a_forward_that_raises_fails_its_sequences_and_the_engine_lives():
    law = hashed_law()
    runner = ScriptedRunner(law)
    driver = EngineDriver(runner)
    first = driver.submit([3, 4])
    good_forward = runner.forward

    def bad_forward(slices):
        runner.forward = good_forward
        raise RuntimeError("out of memory")

    runner.forward = bad_forward
    assert driver.run()[first].error.kind == "InternalError"
    second = driver.submit([3, 4])
    assert driver.run()[second].finish is not None


def test_what_can_never_fit_is_refused_with_the_field():
    runner = ScriptedRunner(hashed_law(), num_blocks=4, block_size=4, max_model_len=100)
    driver = EngineDriver(runner)
    too_big = driver.submit([3] * 4, max_tokens=50)
    too_long = driver.submit([3] * 100, max_tokens=50)
    results = driver.run()
    assert results[too_big].error.param == "max_tokens"
    assert results[too_long].error.param == "prompt_ids"


def test_a_full_queue_refuses():
    scheduler = SchedulerConfig(max_running_sequences=1, max_waiting_sequences=2)
    driver = EngineDriver(ScriptedRunner(hashed_law()), scheduler=scheduler)
    for _ in range(5):
        driver.submit([3, 4], max_tokens=3)
    kinds = [r.error.kind for r in driver.run().values() if r.error]
    assert kinds
    assert set(kinds) == {"OverloadedError"}


def test_a_deadline_ends_the_request():
    driver = EngineDriver(ScriptedRunner(hashed_law()))
    driver.submit([3, 4], max_tokens=100, ignore_eos=True, deadline_ms=1)
    time.sleep(0.005)
    assert driver.run()[1].error.kind == "DeadlineExceededError"


def test_resuming_with_delivered_tokens_continues_the_same_answer():
    law = hashed_law()
    sampling = SamplingParams(temperature=1.0)
    fields = {"max_tokens": 20, "sampling": sampling, "request_key": 77}
    answer = decode(law, [3, 4], stop_ids=frozenset(), **fields)
    driver = EngineDriver(ScriptedRunner(law))
    seq = driver.submit([3, 4], ignore_eos=True, resumed_ids=tuple(answer[:8]), **fields)
    driver.results[seq].token_ids = answer[:8]
    assert driver.run()[seq].token_ids == answer


def test_other_limits_and_depth_hold_from_the_next_request_on():
    law = hashed_law()
    drafter = oracle_drafter(law, GREEDY, 1, depth=8)
    driver = EngineDriver(ScriptedRunner(law, num_blocks=200), drafter=drafter)
    deep = driver.submit([3, 4], max_tokens=30, ignore_eos=True)
    driver.run()
    driver.engine.inbox.put(
        Reconfigured(
            SchedulerConfig(max_running_sequences=1), SpeculationConfig(num_speculative_tokens=2)
        )
    )
    shallow = [driver.submit([3, 4 + i], max_tokens=30, ignore_eos=True) for i in range(3)]
    while not driver.results[shallow[-1]].ended:
        driver.step()
        assert driver.engine.load().running <= 1
    assert len(driver.results[deep].finish.stats.drafted_per_position) == 8
    assert len(driver.results[shallow[0]].finish.stats.drafted_per_position) == 2


def test_the_thread_serves_and_stops():
    outputs = []
    engine = Engine(
        ScriptedRunner(hashed_law()),
        SchedulerConfig(),
        SpeculationConfig(),
        outputs.append,
    )
    engine.start()
    driver = EngineDriver(ScriptedRunner(hashed_law()))
    driver.submit([3, 4], max_tokens=5)
    submitted = driver.engine.inbox.get()
    assert isinstance(submitted, Submitted)
    engine.inbox.put(submitted)
    deadline = time.monotonic() + 60
    while engine.stalled_for_s() or not outputs:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    engine.stop(60.0)
    assert not engine.alive


def test_a_wait_whose_time_passes_as_it_begins_ends():
    """A deadline for drafts may leave nanoseconds; Python's SimpleQueue then never returns."""

    def wait():
        make = type(EngineDriver(ScriptedRunner(hashed_law())).engine.inbox)
        for timeout_s in (1e-9, 3e-8, 1e-7, 1e-6) * 10_000:
            with contextlib.suppress(queue.Empty):
                make().get(timeout=timeout_s)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(timeout=60)
    assert not waiting.is_alive(), "the engine would wait for ever"
