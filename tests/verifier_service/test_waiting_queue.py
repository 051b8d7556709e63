"""Laws of the queue for a place in the engine."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from cluster.types import GenerationRequest, SamplingParams
from engine.sequence import Sequence
from verifier_service.waiting_queue import MAX_PASSES, WaitingQueue


def sequence(seq: int, priority: int = 0) -> Sequence:
    request = GenerationRequest(
        request_id=str(seq),
        request_key=seq,
        prompt_ids=(1, 2, 3),
        sampling=SamplingParams(),
        max_tokens=4,
        priority=priority,
    )
    return Sequence(seq, request, frozenset(), 100)


def drain(queue: WaitingQueue) -> list[int]:
    order = []
    while len(queue):
        queue.take(chosen := queue.next())
        order.append(chosen.seq)
    return order


@given(st.lists(st.integers(-2, 2), max_size=MAX_PASSES))
def test_the_lowest_goes_first_and_equal_ones_in_the_order_they_came(priorities) -> None:
    queue = WaitingQueue()
    for seq, priority in enumerate(priorities):
        queue.add(sequence(seq, priority))
    assert drain(queue) == sorted(range(len(priorities)), key=priorities.__getitem__)


def test_nobody_starves() -> None:
    queue = WaitingQueue()
    queue.add(sequence(0, priority=9))
    for seq in range(1, MAX_PASSES + 1):
        queue.add(sequence(seq))
        assert queue.next().seq == seq
        queue.take(queue.next())
    queue.add(sequence(999, priority=-9))
    assert queue.next().seq == 0


def test_a_preempted_sequence_goes_before_all_that_never_had_a_place() -> None:
    queue = WaitingQueue()
    queue.add(sequence(1, priority=-5))
    for seq in (2, 3):
        queue.give_back(sequence(seq, priority=5))
    assert drain(queue) == [3, 2, 1]


def test_whom_nobody_waits_for_any_more_is_passed_by_nobody() -> None:
    rng = random.Random(5)
    queue = WaitingQueue()
    sequences = [sequence(seq, rng.choice((0, 1))) for seq in range(20)]
    for one in sequences:
        queue.add(one)
    for one in sequences[::2]:
        queue.remove(one)
    kept = sequences[1::2]
    assert list(queue) == kept
    expected = sorted(kept, key=lambda one: (one.request.priority, one.seq))
    assert drain(queue) == [one.seq for one in expected]
