"""Replicas find a pod that fits them, on the nodes meant for them, and never the head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helm.chart import CHART, ROLES, Manifest, Rendered, render, render_file

GPU = "nvidia.com/gpu"
GPU_FILES = [CHART / "values-gpu-gke.yaml", CHART / "values-gpu-eks.yaml"]


def deployments(rendered: Rendered) -> dict[str, Manifest]:
    """The one deployment of each application."""
    return {
        application["name"]: application["deployments"][0]
        for application in rendered.serve_config["applications"]
    }


def groups_of(rendered: Rendered, role: str) -> list[Manifest]:
    """Those whose nodes have all the labels that the deployment selects by."""
    selector = deployments(rendered)[role]["ray_actor_options"]["label_selector"]
    groups = rendered.groups.values()
    return [group for group in groups if selector.items() <= group["labels"].items()]


def limits(group: Manifest) -> dict[str, str]:
    found: dict[str, str] = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    return found


def test_a_deployment_runs_on_the_groups_of_its_role_and_no_others(rendered: Rendered):
    for role in ROLES:
        found = {group["groupName"] for group in groups_of(rendered, role)}
        by_component = {
            name
            for name, template in rendered.pod_templates.items()
            if template["metadata"]["labels"]["app.kubernetes.io/component"] == role
        }
        assert found
        assert found == by_component


def test_a_replica_fits_a_pod_and_takes_it_alone(rendered: Rendered):
    for role, deployment in deployments(rendered).items():
        assert deployment["max_replicas_per_node"] == 1
        wanted = deployment["ray_actor_options"]
        for group in groups_of(rendered, role):
            assert wanted.get("num_cpus", 1) <= int(limits(group)["cpu"])
            assert wanted.get("num_gpus", 0) <= int(limits(group).get(GPU, 0))


def test_there_is_a_pod_for_every_replica(rendered: Rendered):
    grows = rendered.ray_cluster["enableInTreeAutoscaling"]
    for role, deployment in deployments(rendered).items():
        scaling = deployment.get("autoscaling_config") or {}
        most = scaling.get("max_replicas", deployment.get("num_replicas"))
        count = "maxReplicas" if grows else "minReplicas"
        assert sum(group[count] for group in groups_of(rendered, role)) >= most


def test_requests_are_limits_and_only_model_holders_have_gpus(rendered: Rendered):
    for name, template in rendered.pod_templates.items():
        resources = template["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]
        role = template["metadata"]["labels"]["app.kubernetes.io/component"]
        if role in ("head", "router"):
            assert GPU not in resources["limits"], name


def test_gpu_pods_tolerate_the_gpu_taint(rendered: Rendered):
    for group in rendered.groups.values():
        if GPU in limits(group):
            keys = {one["key"] for one in group["template"]["spec"].get("tolerations", ())}
            assert GPU in keys


@pytest.mark.parametrize("file", GPU_FILES, ids=lambda file: file.stem)
def test_drafters_and_verifiers_never_share_a_node(helm: Path, file: Path):
    rendered = render_file(helm, file)
    selectors = {
        name: template["spec"]["nodeSelector"] for name, template in rendered.pod_templates.items()
    }
    for other in ("drafter", "router", "head"):
        assert any(
            key not in selectors[other] or selectors[other][key] != value
            for key, value in selectors["verifier"].items()
        )
    assert selectors["drafter"] != selectors["verifier"]


def test_pods_of_a_role_spread_over_zones_and_nodes(rendered: Rendered):
    for name, template in rendered.pod_templates.items():
        if name == "head":
            continue
        labels = template["metadata"]["labels"]
        spread = template["spec"]["topologySpreadConstraints"]
        assert {one["topologyKey"] for one in spread} == {
            "topology.kubernetes.io/zone",
            "kubernetes.io/hostname",
        }
        for constraint in spread:
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()
            assert constraint["labelSelector"]["matchLabels"]["app.kubernetes.io/component"]


def test_drafters_may_be_spot_and_a_few_stay(helm: Path):
    files = [CHART / "values-gpu-gke.yaml", CHART / "values-spot-drafters.yaml"]
    rendered = render(helm, files=files)
    stays, spot = rendered.groups["drafter"], rendered.groups["drafter-spot"]
    assert stays["minReplicas"] == stays["maxReplicas"] == 2
    assert spot["minReplicas"] == 0
    assert spot["template"]["spec"]["nodeSelector"] == {"cloud.google.com/gke-spot": "true"}
    # GKE gives a pod on a spot node 25 s at most.
    assert spot["template"]["spec"]["terminationGracePeriodSeconds"] <= 25


def test_groups_of_one_role_share_its_replicas(rendering: Callable[..., Rendered]):
    more = {
        "verifier-b": {"role": "verifier", "maxReplicas": 4, "cpu": 8, "gpu": {"count": 1}}
        | {"drainSeconds": 100},
        "verifier": {"maxReplicas": 4},
    }
    rendered = rendering({"workerGroups": more})
    assert {group["groupName"] for group in groups_of(rendered, "verifier")} == set(more)


def test_the_head_is_not_moved(rendered: Rendered):
    annotations = rendered.pod_templates["head"]["metadata"]["annotations"]
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
