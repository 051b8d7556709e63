"""The policies that Serve runs in its controller."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from cluster.autoscaling import DrafterReplicas, PerReplicaTarget, VerifierReplicas


@dataclass
class Context:
    target_num_replicas: int = 3
    aggregated_metrics: dict = field(default_factory=dict)
    total_queued_requests: float | None = None


def wanted(reports, target=10.0, metrics=("running", "waiting")):
    context = Context(aggregated_metrics=reports)
    return PerReplicaTarget(metrics, target)(context)[0]


def test_as_many_replicas_as_the_load_asks_for():
    reports = {"running": {"a": 8.0, "b": 12.0}, "waiting": {"a": 0.0, "b": 20.0}}
    assert wanted(reports) == 4.0


def test_idle_replicas_ask_for_none():
    assert wanted({"running": {"a": 0.0}}) == 0.0


def test_without_reports_nothing_changes():
    assert wanted({}) == 3
    assert wanted({"running": {}, "queue_ms": {"a": 5.0}}) == 3


@pytest.mark.parametrize("arguments", [([], 1.0), (["running"], 0.0), (["running"], -1.0)])
def test_arguments_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match="policy_kwargs"):
        PerReplicaTarget(*arguments)


# --- verifiers ----------------------------------------------------------------------------------


def verifiers(*loads, knee=100.0, places=64.0, queue_s=0.0, **arguments):
    """Replicas wanted where these are (running, waiting)."""
    names = [f"v{index}" for index in range(len(loads))]
    reports = {
        "running": dict(zip(names, (float(running) for running, _ in loads), strict=True)),
        "waiting": dict(zip(names, (float(waiting) for _, waiting in loads), strict=True)),
        "knee_tokens": dict.fromkeys(names, knee),
        "max_running": dict.fromkeys(names, places),
        "queue_s": dict.fromkeys(names, queue_s),
    }
    return VerifierReplicas(**arguments)(Context(aggregated_metrics=reports))[0]


def test_verifiers_are_filled_up_to_their_knee_and_no_further_than_their_places():
    assert verifiers((40, 0), (40, 0), knee=20.0) == 4.0
    assert verifiers((40, 0), (40, 0), knee=20.0, knee_share=2.0) == 2.0
    assert verifiers((48, 0), (48, 0), knee=500.0) == 2.0  # three quarters of 64 places
    assert verifiers((8, 0), (8, 0), knee=1.0) == 2.0  # the least that a replica is to hold


def test_what_waits_counts_too():
    assert verifiers((16, 16), knee=16.0) == 2.0


def test_a_long_queue_asks_for_more_whatever_the_load_is():
    assert verifiers((4, 0), (4, 0), queue_s=1.9) == pytest.approx(8 / 48)
    assert verifiers((4, 0), (4, 0), queue_s=3.0) == 3.0
    assert verifiers((4, 0), (4, 0), queue_s=900.0) == 4.0, "at most twice as many at once"


def test_verifiers_without_reports_stay():
    assert VerifierReplicas()(Context())[0] == 3


@pytest.mark.parametrize("name", ["knee_share", "least_running", "places_share", "max_queue_s"])
def test_verifiers_arguments_that_make_no_sense_are_refused(name):
    with pytest.raises(ValueError, match="policy_kwargs"):
        VerifierReplicas(**{name: 0.0})


# --- drafters -----------------------------------------------------------------------------------


def drafters(*active, queue_ms=0.0, queued=None, target=3):
    names = [f"d{index}" for index in range(len(active))]
    reports = {
        "active_sessions": dict(zip(names, map(float, active), strict=True)),
        "queue_ms": dict.fromkeys(names, queue_ms),
    }
    context = Context(target, reports, queued)
    return DrafterReplicas(sessions=64)(context)[0]


def test_drafters_follow_the_sessions_that_want_drafts():
    assert drafters(64, 64) == 2
    assert drafters(65, 64) == 3
    assert drafters(1, 0) == 1


def test_drafters_sleep_when_nobody_wants_drafts_and_one_call_wakes_them():
    assert drafters(0, 0, queue_ms=99.0) == 0
    asleep = Context(target_num_replicas=0, aggregated_metrics={}, total_queued_requests=0.0)
    assert DrafterReplicas(sessions=64)(asleep)[0] == 0
    asleep.total_queued_requests = 1.0
    assert DrafterReplicas(sessions=64)(asleep)[0] == 1
    assert drafters(0, queued=1.0) == 1, "not gone again before the caller has its session"


def test_drafters_that_are_late_are_joined_by_others():
    assert drafters(10, 10, queue_ms=30.0) == 3.0
    assert drafters(10, 10, queue_ms=1e6) == 4.0


@pytest.mark.parametrize("arguments", [(0.0,), (64.0, 0.0)])
def test_drafters_arguments_that_make_no_sense_are_refused(arguments):
    with pytest.raises(ValueError, match="policy_kwargs"):
        DrafterReplicas(*arguments)


def test_it_needs_the_standard_library_only():
    script = (
        "import sys, cluster.autoscaling\n"
        "heavy = {'ray', 'torch', 'grpc', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(len(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
