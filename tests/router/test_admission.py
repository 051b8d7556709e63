"""What is refused, at once, and what the refused are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.config import AdmissionConfig
from cluster.errors import InvalidRequestError, OverloadedError, TenantOverloadedError
from cluster.load import VerifierLoad
from router.admission import LONGEST_RETRY_AFTER_S, Admission
from router.api_keys import ANYONE, Tenant
from router.queue_outlook import QueueOutlook, best_outlook, queue_outlook

TENANT = Tenant("small", admin=False, max_concurrent_requests=2)


def admission(most: int = 4) -> Admission:
    return Admission(AdmissionConfig(max_concurrent_requests=most, retry_after_s=1.0))


def refusal(taken: Admission, outlook: QueueOutlook, left_s: float = 600.0) -> OverloadedError:
    """Of one more generation."""
    with (
        pytest.raises(OverloadedError) as refused,
        taken.slots(1, outlook=outlook, left_s=left_s),
    ):
        pass
    return refused.value


def test_slots_are_held_and_given_back() -> None:
    taken = admission()
    with taken.slots(3), taken.slots(1, TENANT):
        assert taken.in_flight == 4
        with pytest.raises(OverloadedError, match="4 of 4"), taken.slots(1):
            pass
    assert taken.in_flight == 0
    with taken.slots(4):
        assert taken.in_flight == 4


def test_what_never_fits_is_a_bad_request() -> None:
    for count, tenant in ((5, ANYONE), (3, TENANT)):
        with pytest.raises(InvalidRequestError, match="at once"), admission().slots(count, tenant):
            pass


def test_a_tenant_over_its_share_is_told_so_though_there_is_room() -> None:
    taken = admission()
    with taken.slots(2, TENANT), pytest.raises(TenantOverloadedError), taken.slots(1, TENANT):
        pass
    with taken.slots(1, TENANT):
        assert taken.in_flight == 1


def test_a_full_queue_refuses_before_the_verifier_has_to() -> None:
    full = QueueOutlook(wait_s=7.2, answer_s=3.0, room=0)
    refused = refusal(admission(), full)
    assert "the queue is full" in refused.message
    assert (refused.code, refused.retry_after_s) == ("queue_full", 8.0)


def test_an_answer_that_would_come_too_late_is_refused_at_once() -> None:
    long = QueueOutlook(wait_s=7.0, answer_s=3.0, room=9)
    with admission().slots(1, outlook=long, left_s=10.1):
        pass
    refused = refusal(admission(), long, left_s=9.9)
    assert "10.0 s, of which 7.0 s in the queue" in refused.message
    assert refused.code == "queue_too_long"


def test_an_idle_verifier_takes_what_the_last_ones_took_long_for() -> None:
    with admission().slots(1, outlook=QueueOutlook(answer_s=99.0, room=0), left_s=1.0):
        pass


@given(st.floats(0, 1e6))
def test_retry_after_follows_the_queue_within_bounds(wait_s: float) -> None:
    taken = admission(1)
    with taken.slots(1):
        told_s = refusal(taken, QueueOutlook(wait_s)).retry_after_s
    assert told_s is not None
    assert 1.0 <= told_s <= LONGEST_RETRY_AFTER_S
    assert told_s >= min(wait_s, LONGEST_RETRY_AFTER_S)


# --- the outlook ------------------------------------------------------------------------------


def load(running: int, waiting: int, place_s: float = 8.0) -> VerifierLoad:
    return VerifierLoad(
        running=running, waiting=waiting, max_running=4, max_waiting=10, place_s=place_s
    )


@pytest.mark.parametrize(
    ("report", "num_unseen", "wait_s", "room"),
    [
        (load(0, 0), 0, 0.0, 10),
        (load(3, 0), 0, 0.0, 10),
        (load(4, 0), 0, 2.0, 10),  # a place is free every 8 / 4 s
        (load(3, 0), 1, 2.0, 10),
        (load(4, 5), 0, 12.0, 5),
        (load(4, 5), 3, 18.0, 2),
        (load(2, 5), 0, 24.0, 5),  # the KV cache has room for two at a time
        (load(4, 10), 2, 26.0, -2),
        (load(4, 3, place_s=0.0), 0, 0.0, 7),
    ],
)
def test_the_wait_is_that_of_those_before_it(
    report: VerifierLoad, num_unseen: int, wait_s: float, room: int
) -> None:
    outlook = queue_outlook(report, num_unseen)
    assert (outlook.wait_s, outlook.room) == (pytest.approx(wait_s), room)


def test_what_this_router_sent_is_there_whatever_an_old_report_says() -> None:
    report = load(4, 1)
    assert queue_outlook(report, 0, num_own=9) == queue_outlook(report, 4)
    assert queue_outlook(report, 6, num_own=9) == queue_outlook(report, 6)


def test_a_verifier_that_tells_nothing_is_no_reason_to_refuse() -> None:
    assert queue_outlook(VerifierLoad(running=9, waiting=9), 9) == QueueOutlook()
    assert best_outlook([]) == QueueOutlook()


def test_the_best_verifier_has_room_and_the_shortest_wait() -> None:
    full = QueueOutlook(wait_s=1.0, room=0)
    long, short = QueueOutlook(wait_s=9.0, room=3), QueueOutlook(wait_s=2.0, room=3)
    assert best_outlook([full, long, short]) == short
    assert best_outlook([full, QueueOutlook(wait_s=0.5, room=-1)]).wait_s == 0.5
