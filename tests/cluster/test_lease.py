"""A lease lapses by the peer's silence, and by nothing else."""

from __future__ import annotations

from cluster.lease import Lease


def lease(duration_s: float = 3.0) -> Lease:
    made = Lease(100.0)
    made.duration_s = duration_s
    return made


def lapses(held: Lease, start: float, end: float, every_s: float = 0.5) -> list[float]:
    """When it lapses, checked every so often."""
    count = round((end - start) / every_s)
    times = [start + every_s * (index + 1) for index in range(count)]
    return [now for now in times if held.has_lapsed(now)]


def test_it_lapses_after_its_duration_and_again_after_another():
    assert lapses(lease(), 100.0, 108.0) == [103.0, 106.0]


def test_whoever_is_heard_keeps_it():
    held = lease()
    for second in range(20):
        assert lapses(held, 100.0 + second, 101.0 + second) == []
        held.renew()
    assert lapses(held, 120.0, 130.0) == [123.0, 126.0, 129.0]


def test_without_a_duration_it_never_lapses():
    assert lapses(lease(0.0), 100.0, 1100.0) == []


def test_our_own_standstill_is_not_the_peers_silence():
    held = lease()
    assert not held.has_lapsed(160.0)  # a minute without a check counts for a second
    assert lapses(held, 160.0, 163.0) == [162.0]
