"""The policy that Serve runs in its controller."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field

import pytest

from cluster.autoscaling import PerReplicaTarget


@dataclass
class Context:
    target_num_replicas: int = 3
    aggregated_metrics: dict = field(default_factory=dict)


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


def test_it_needs_the_standard_library_only():
    script = (
        "import sys, cluster.autoscaling\n"
        "heavy = {'ray', 'torch', 'grpc', 'pydantic', 'numpy'} & set(sys.modules)\n"
        "sys.exit(len(heavy))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
