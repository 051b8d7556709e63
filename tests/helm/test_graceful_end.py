"""Pods end without a cut: each deadline leaves room for the one inside it; budgets bind."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from cluster.config import DrafterConfig, RouterConfig, VerifierConfig
from cluster.membership import DEPLOYMENT_OPTIONS
from tests.helm.chart import ROLES, Manifest, Rendered

CONFIGS = {"router": RouterConfig, "verifier": VerifierConfig, "drafter": DrafterConfig}
MARGIN_S = 10


def environment(template: Manifest) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in template["spec"]["containers"][0]["env"]}


def pre_stop_s(template: Manifest) -> int:
    lifecycle = template["spec"]["containers"][0].get("lifecycle")
    if lifecycle is None:
        return 0
    command, seconds = lifecycle["preStop"]["exec"]["command"]
    assert command == "sleep"
    return int(seconds)


def test_every_deadline_leaves_room_for_the_one_inside_it(rendered: Rendered):
    """A replica's own grace < Serve's timeout for it <= Ray's drain < Kubernetes' grace."""
    applications = {one["name"]: one for one in rendered.serve_config["applications"]}
    for name, template in rendered.pod_templates.items():
        drain_s = float(environment(template)["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
        grace_s = template["spec"]["terminationGracePeriodSeconds"]
        assert grace_s >= pre_stop_s(template) + drain_s + MARGIN_S
        if name == "head":
            continue
        application = applications[rendered.groups[name]["labels"]["paceline-role"]]
        config = CONFIGS[application["name"]].model_validate(application["args"])
        timeout_s = application["deployments"][0].get(
            "graceful_shutdown_timeout_s", DEPLOYMENT_OPTIONS["graceful_shutdown_timeout_s"]
        )
        assert getattr(config, "drain_grace_s", 0) < timeout_s <= drain_s


def test_an_old_cluster_outlives_the_longest_answer(rendered: Rendered):
    applications = {one["name"]: one for one in rendered.serve_config["applications"]}
    config = RouterConfig.model_validate(applications["router"]["args"])
    assert (
        rendered.ray_service["spec"]["rayClusterDeletionDelaySeconds"] >= config.request_timeout_s
    )


def test_clients_connections_end_before_the_router_does(defaults: Rendered):
    assert pre_stop_s(defaults.pod_templates["router"]) == 5
    assert pre_stop_s(defaults.pod_templates["verifier"]) == 0


def test_nothing_stops_ray_but_the_signal(rendered: Rendered):
    """`ray stop` in preStop hangs, and cuts what drains."""
    for template in rendered.pod_templates.values():
        assert "ray stop" not in str(template)


# --- budgets -----------------------------------------------------------------------------------


def test_a_budget_counts_in_whole_pods_and_never_blocks(rendered: Rendered):
    for budget in rendered.of_kind("PodDisruptionBudget"):
        spec = budget["spec"]
        assert set(spec) == {"minAvailable", "selector"}
        assert type(spec["minAvailable"]) is int
        group = rendered.groups[spec["selector"]["matchLabels"]["paceline-group"]]
        assert 0 < spec["minAvailable"] < group["minReplicas"]


def test_a_budget_selects_exactly_its_group(rendered: Rendered):
    for budget in rendered.of_kind("PodDisruptionBudget"):
        wanted = budget["spec"]["selector"]["matchLabels"]
        selected = [
            name
            for name, template in rendered.pod_templates.items()
            if wanted.items() <= template["metadata"]["labels"].items()
        ]
        assert selected == [wanted["paceline-group"]]


def test_each_role_has_a_budget_by_default(defaults: Rendered):
    found = [one["metadata"]["name"] for one in defaults.of_kind("PodDisruptionBudget")]
    assert sorted(found) == sorted(f"paceline-{role}" for role in ROLES)


def test_a_group_of_one_has_no_budget(rendering: Callable[..., Rendered]):
    alone = {"minReplicas": 1, "pdb": {"minAvailable": 0}}
    rendered = rendering({"workerGroups": {"router": alone}})
    found = [one["metadata"]["name"] for one in rendered.of_kind("PodDisruptionBudget")]
    assert sorted(found) == ["paceline-drafter", "paceline-verifier"]


# --- probes ------------------------------------------------------------------------------------


def probe(template: Manifest, kind: str) -> Manifest:
    found: Manifest = template["spec"]["containers"][0][f"{kind}Probe"]
    return found


def test_a_router_is_ready_when_the_api_is(rendered: Rendered):
    found = probe(rendered.pod_templates["router"], "readiness")
    assert found["httpGet"] == {"path": "/health/ready", "port": 8000}


def test_no_other_pod_waits_for_an_http_proxy(rendered: Rendered):
    for name, template in rendered.pod_templates.items():
        if name != "router":
            found = probe(template, "readiness")["httpGet"]
            assert found == {"path": "/api/healthz", "port": 52365}


def test_a_pod_is_killed_for_its_raylet_alone(rendered: Rendered):
    """Loading a model takes minutes and is no reason."""
    for template in rendered.pod_templates.values():
        for kind in ("startup", "liveness"):
            found = probe(template, kind)
            assert found["httpGet"] == {"path": "/api/healthz", "port": 52365}
            assert found["periodSeconds"] * found["failureThreshold"] >= 120


@pytest.mark.parametrize("kind", ["startup", "liveness", "readiness"])
def test_a_group_may_have_probes_of_its_own(rendering: Callable[..., Rendered], kind: str):
    own = {"tcpSocket": {"port": 50051}, "periodSeconds": 7}
    rendered = rendering({"workerGroups": {"verifier": {"probes": {kind: own}}}})
    assert probe(rendered.pod_templates["verifier"], kind) == own
    assert probe(rendered.pod_templates["drafter"], kind) != own
