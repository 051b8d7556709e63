"""The RayService is one that the API server and KubeRay's controller take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from tests.helm.chart import Manifest, Rendered
from tests.helm.kuberay_rules import duplicates, problems
from tests.helm.rayservice_schema import RAY_SERVICE

VALIDATOR = jsonschema.Draft202012Validator(RAY_SERVICE)


def schema_problems(service: Manifest) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(service)]


VARIANTS: dict[str, dict[str, Any]] = {
    "fault tolerance": {
        "gcsFaultTolerance": {
            "enabled": True,
            "redisAddress": "redis://redis:6379",
            "existingSecret": "redis",
        }
    },
    "fixed": {
        "autoscaler": {"enabled": False},
        "workerGroups": {
            "verifier": {"minReplicas": 8},
            "drafter": {"minReplicas": 8},
        },
    },
    "no drafters": {
        "applications": {"drafter": {"enabled": False}},
        "workerGroups": {"drafter": None},
    },
    "no token": {"rayToken": {"enabled": False}},
    "upgrade by hand": {"rayService": {"upgradeType": "None"}},
}


def test_every_values_file_gives_a_valid_one(rendered: Rendered):
    assert schema_problems(rendered.ray_service) == []
    assert problems(rendered.ray_service) == []


@pytest.mark.parametrize("name", VARIANTS)
def test_every_variant_gives_a_valid_one(rendering: Callable[..., Rendered], name: str):
    service = rendering(VARIANTS[name]).ray_service
    assert schema_problems(service) == []
    assert problems(service) == []


def test_no_list_of_a_pod_names_a_thing_twice(rendered: Rendered):
    for template in rendered.pod_templates.values():
        assert duplicates(template["spec"]) == []


def test_the_head_holds_no_replica_and_is_no_endpoint(rendered: Rendered):
    head = rendered.ray_cluster["headGroupSpec"]
    assert head["rayStartParams"]["num-cpus"] == "0"
    assert head["rayStartParams"]["dashboard-host"] == "0.0.0.0"
    assert "labels" not in head
    assert rendered.ray_service["spec"]["excludeHeadPodFromServeSvc"] is True


def test_a_group_is_removed_by_null_and_added_by_name(rendering: Callable[..., Rendered]):
    extra = {"role": "drafter", "maxReplicas": 3, "gpu": {"count": 2}}
    groups = rendering({"workerGroups": {"spot-2": extra}}).groups
    assert set(groups) == {"router", "verifier", "drafter", "spot-2"}
    added = groups["spot-2"]
    assert (added["minReplicas"], added["maxReplicas"]) == (1, 3)
    assert added["labels"]["paceline-role"] == "drafter"
    limits = added["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": "2"}
    assert "drafter" not in rendering(VARIANTS["no drafters"]).groups


def test_without_the_autoscaler_every_group_is_fixed(rendering: Callable[..., Rendered]):
    rendered = rendering(VARIANTS["fixed"])
    assert rendered.ray_cluster["enableInTreeAutoscaling"] is False
    assert {group["replicas"] for group in rendered.groups.values()} == {2, 8}
    head = rendered.pod_templates["head"]["spec"]
    assert head["automountServiceAccountToken"] is False


def test_the_autoscaler_owns_the_number_of_replicas(defaults: Rendered):
    assert not [group for group in defaults.groups.values() if "replicas" in group]


# --- negative controls: the checks find what they are there for ---------------------------------

SPOILERS: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "unknown key": (("spec", "rayClusterConfig", "enableInTreeAutoScaling"), True),
    "unknown key of a group": (
        ("spec", "rayClusterConfig", "workerGroupSpecs", 0, "maxReplica"),
        1,
    ),
    "map for a string": (("spec", "serveConfigV2"), {}),
    "number for a string": (
        ("spec", "rayClusterConfig", "headGroupSpec", "rayStartParams", "num-cpus"),
        0,
    ),
    "autoscaler": (("spec", "rayClusterConfig", "autoscalerOptions", "version"), "v3"),
    "string for a number": (
        ("spec", "rayClusterConfig", "workerGroupSpecs", 0, "minReplicas"),
        "2",
    ),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_the_schema_refuses(defaults: Rendered, name: str):
    path, value = SPOILERS[name]
    assert schema_problems(spoiled(defaults.ray_service, path, value))


GROUP = ("spec", "rayClusterConfig", "workerGroupSpecs", 0)
BROKEN_RULES: dict[str, tuple[tuple[str | int, ...], Any]] = {
    "over 47": (("metadata", "name"), "x" * 48),
    "DNS-1035": (("metadata", "name"), "9lives"),
    "upgradeStrategy": (("spec", "upgradeStrategy", "type"), "Recreate"),
    "2.52.0": (("spec", "rayClusterConfig", "rayVersion"), "2.51.0"),
    "without enableInTreeAutoscaling": (
        ("spec", "rayClusterConfig", "enableInTreeAutoscaling"),
        False,
    ),
    "over maxReplicas": ((*GROUP, "minReplicas"), 9),
    "is no label": ((*GROUP, "labels", "a b"), "c"),
    "labels stand": ((*GROUP, "rayStartParams", "labels"), "a=b"),
    "one name": ((*GROUP, "groupName"), "router"),
    "restartPolicy": ((*GROUP, "template", "spec", "restartPolicy"), "Always"),
    "not the first": ((*GROUP, "template", "spec", "containers", 0, "name"), "sidecar"),
    "set twice": (
        (*GROUP, "template", "spec", "containers", 0, "env", 0, "name"),
        "RAY_enable_autoscaler_v2",
    ),
}


@pytest.mark.parametrize("words", BROKEN_RULES)
def test_the_rules_refuse(defaults: Rendered, words: str):
    path, value = BROKEN_RULES[words]
    found = problems(spoiled(defaults.ray_service, path, value))
    assert any(words in problem for problem in found), found


def test_a_name_that_stands_twice_is_found(defaults: Rendered):
    spec = copy.deepcopy(defaults.pod_templates["verifier"]["spec"])
    assert duplicates(spec) == []
    spec["volumes"].append(spec["volumes"][0])
    spec["containers"][0]["env"].append(spec["containers"][0]["env"][0])
    assert len(duplicates(spec)) == 2


def spoiled(service: Manifest, path: tuple[str | int, ...], value: Any) -> Manifest:
    """The service with one value changed or added."""
    service = copy.deepcopy(service)
    place: Any = service
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return service
