"""The load spread over Ray workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from benchmarks.loadtest.record import Outcome
from benchmarks.loadtest.results import read_results
from cluster.cli import main
from tests.benchmarks.loadtest.scripted_server import answering, scripted_server
from tests.support.ray_nodes import ENVIRONMENT

PROFILE = """
prompts: {kind: generated}
load: {kind: open, arrivals: constant, rate: [20], duration_s: 2}
warmup_requests: 0
"""

pytestmark = [pytest.mark.ray, pytest.mark.long]


@pytest.fixture
def ray_cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()


def test_workers_share_one_clock_and_one_load(
    tmp_path: Path, ray_cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, out = tmp_path / "profile.yaml", tmp_path / "out"
    profile.write_text(PROFILE)
    with scripted_server(answering(2, 1)) as server:
        words = ["--url", server.url, "--profile", str(profile), "--out", str(out)]
        succeeded = main(["loadtest", *words, "--workers", "2"])
    results, records = read_results(out)
    assert succeeded == 0, results.warnings
    assert results.run.workers == 2
    assert sorted(record.index for record in records) == list(range(39))
    assert {record.outcome for record in records} == {Outcome.OK}
    for record in records:
        assert record.scheduled_s == pytest.approx(0.05 * (record.index + 1))
        assert -0.01 < record.schedule_delay_s < 5.0  # Timers are coarse, and machines busy.
    assert "39 ok" in capsys.readouterr().err
