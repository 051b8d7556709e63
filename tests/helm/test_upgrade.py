"""What builds a second cluster, which needs room for all of its GPUs, and what does not."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import CHART, Rendered, render
from tests.helm.kuberay_rules import cluster_hash

IN_PLACE: dict[str, dict[str, Any]] = {
    "labels": {"commonLabels": {"team": "search"}, "commonAnnotations": {"team": "search"}},
    "replicas": {"workerGroups": {"verifier": {"minReplicas": 3, "maxReplicas": 12}}},
    "tolerations": {
        "workerGroups": {"drafter": {"tolerations": [{"key": "spot", "operator": "Exists"}]}}
    },
    "budget": {"workerGroups": {"router": {"pdb": {"minAvailable": 0}}}},
    "args": {"applications": {"verifier": {"args": {"speculation": {"draft_deadline_ms": 50}}}}},
    "model": {"applications": {"drafter": {"args": {"model": {"source": "Qwen/Qwen3-1.7B"}}}}},
    "mode": {
        "applications": {
            "router": {"deployment": {"user_config": {"path_policy": {"mode": "off"}}}}
        }
    },
    "scaling": {
        "applications": {"verifier": {"deployment": {"autoscaling_config": {"min_replicas": 3}}}}
    },
    "keys": {"apiKeys": {"keys": [{"tenant": "a", "sha256": "0" * 64}]}},
    "policies": {"networkPolicy": {"enabled": False}},
    "service": {"service": {"type": "LoadBalancer"}},
    "ingress": {"ingress": {"enabled": True, "hosts": ["a.example"]}},
    "metrics": {
        "metrics": {
            name: {"enabled": True}
            for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
        }
    },
    "deletion": {"rayService": {"deletionDelaySeconds": 900}},
    "certificates": {"tls": {"certManager": {"duration": "24h"}}},
    "tests": {"tests": {"enabled": False}},
}
NEW_CLUSTER: dict[str, dict[str, Any]] = {
    "image": {"image": {"tag": "0.2.0"}},
    "ray": {"ray": {"version": "2.61.0"}},
    "environment": {"ray": {"env": [{"name": "A", "value": "b"}]}},
    "resources": {"workerGroups": {"verifier": {"memory": "128Gi"}}},
    "node selector": {"workerGroups": {"verifier": {"nodeSelector": {"pool": "big"}}}},
    "drain": {"workerGroups": {"verifier": {"drainSeconds": 120}}},
    "new group": {"workerGroups": {"drafter-2": {"role": "drafter", "gpu": {"count": 1}}}},
    "cache": {"modelCache": {"type": "pvc"}},
    "tls": {"tls": {"enabled": True}},
    "autoscaler": {"autoscaler": {"idleTimeoutSeconds": 60}},
    "fault tolerance": {"gcsFaultTolerance": {"enabled": True, "redisAddress": "redis://r:6379"}},
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place(defaults: Rendered, rendering: Callable[..., Rendered], name: str):
    changed = rendering(IN_PLACE[name])
    assert cluster_hash(changed.ray_cluster) == cluster_hash(defaults.ray_cluster)


@pytest.mark.parametrize("name", NEW_CLUSTER)
def test_new_cluster(defaults: Rendered, rendering: Callable[..., Rendered], name: str):
    changed = rendering(NEW_CLUSTER[name])
    assert cluster_hash(changed.ray_cluster) != cluster_hash(defaults.ray_cluster)


def test_a_new_version_of_the_chart_alone_is_in_place(helm: Path, tmp_path: Path):
    """The image's tag is pinned, as it has to be where the chart's version is not the image's."""
    chart = Path(shutil.copytree(CHART, tmp_path / "paceline"))
    file = chart / "Chart.yaml"
    file.write_text(
        re.sub(r"^(version|appVersion): .*$", r'\1: "7.8.9"', file.read_text(), flags=re.M)
    )
    pinned = {"image": {"tag": "0.1.0"}}
    before, after = render(helm, pinned), render(helm, pinned, chart=chart)
    assert "paceline-7.8.9" in after.text
    assert cluster_hash(after.ray_cluster) == cluster_hash(before.ray_cluster)


def test_the_readme_says_which(defaults: Rendered):
    """Each word of the two tables above stands in the right list of the upgrade notes."""
    text = (CHART / "README.md").read_text()
    in_place = text[text.index("### In place") : text.index("### A second cluster")]
    new_cluster = text[text.index("### A second cluster") :]
    for section, values in ((in_place, IN_PLACE), (new_cluster, NEW_CLUSTER)):
        for change in values.values():
            for key in change:
                assert f"`{key}" in section, key
