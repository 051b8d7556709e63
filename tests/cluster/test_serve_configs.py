"""The Serve configs that we ship say what they seem to say."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster import cli
from tests.cluster.serve_config import problems

FOLDER = cli.DEFAULT_CONFIG.parent
CONFIGS = sorted(FOLDER.glob("*.yaml"))


def load(name: str) -> Any:
    return yaml.safe_load((FOLDER / name).read_text())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_a_shipped_config_has_no_problem(path: Path):
    assert problems(yaml.safe_load(path.read_text())) == []


def test_both_configs_are_shipped():
    assert {path.name for path in CONFIGS} >= {"local.yaml", "prod.yaml"}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_the_three_applications_are_there_and_only_the_router_has_a_route(path: Path):
    applications = yaml.safe_load(path.read_text())["applications"]
    routes = {application["name"]: application["route_prefix"] for application in applications}
    assert routes == {"verifier": None, "drafter": None, "router": "/"}


def test_prod_is_scaled_and_placed():
    config = load("prod.yaml")
    deployments = {a["name"]: a["deployments"][0] for a in config["applications"]}
    assert deployments["router"]["num_replicas"] >= 2
    for name in ("verifier", "drafter"):
        scaling = deployments[name]["autoscaling_config"]
        assert 1 <= scaling["min_replicas"] < scaling["max_replicas"]
        assert deployments[name]["ray_actor_options"]["num_gpus"] >= 1
    for name, deployment in deployments.items():
        selector = deployment["ray_actor_options"]["label_selector"]
        assert selector == {"paceline-role": name}
        assert deployment["health_check_timeout_s"] >= deployment["health_check_period_s"]


# --- negative controls: the check finds what it is there for ------------------------------------

VERIFIER, DRAFTER, ROUTER = 0, 1, 2

SPOILERS: dict[str, tuple[str, list[Any], Any]] = {
    "top level": ("proxy_locations", ["proxy_locations"], "EveryNode"),
    "http options": ("http_options.ports", ["http_options", "ports"], 8000),
    "logging": ("logging_config", ["logging_config", "encodng"], "JSON"),
    "application": ("applications[0].route", ["applications", VERIFIER, "route"], "/"),
    "args": ("applications[0].args", ["applications", VERIFIER, "args", "modle"], {}),
    "args section": (
        "applications[0].args",
        ["applications", VERIFIER, "args", "model", "devise"],
        "cuda",
    ),
    "args value": ("applications[0].args", ["applications", VERIFIER, "args", "drain_grace_s"], -1),
    "drafter's args": (
        "applications[1].args",
        ["applications", DRAFTER, "args", "ngram"],
        {"max_ngram": 1, "min_ngram": 2},
    ),
    "drafter without its model": (
        "applications[1].args",
        ["applications", DRAFTER, "args", "model"],
        None,
    ),
    "deployment": (
        "applications[2].deployments[0].num_replica",
        ["applications", ROUTER, "deployments", 0, "num_replica"],
        3,
    ),
    "actor options": (
        "applications[0].deployments[0].ray_actor_options.num_gpu",
        ["applications", VERIFIER, "deployments", 0, "ray_actor_options", "num_gpu"],
        1,
    ),
    "label selector": (
        "label_selector",
        ["applications", VERIFIER, "deployments", 0, "ray_actor_options", "label_selector"],
        {"paceline role": "verifier"},
    ),
    "autoscaling": (
        "autoscaling_config.max_replica",
        ["applications", VERIFIER, "deployments", 0, "autoscaling_config", "max_replica"],
        3,
    ),
    "autoscaling bounds": (
        "autoscaling_config",
        ["applications", VERIFIER, "deployments", 0, "autoscaling_config", "max_replicas"],
        1,
    ),
    "autoscaling delay": (
        "autoscaling_config.upscale_delay_s",
        ["applications", VERIFIER, "deployments", 0, "autoscaling_config", "upscale_delay_s"],
        1,
    ),
    "autoscaling policy": (
        "autoscaling_config.policy.policy_func",
        ["applications", VERIFIER, "deployments", 0, "autoscaling_config", "policy"],
        {"policy_func": "a:b"},
    ),
    "autoscaling policy that does not exist": (
        "autoscaling_config.policy",
        ["applications", VERIFIER, "deployments", 0, "autoscaling_config", "policy"],
        {"policy_function": "cluster.config:no_such_policy"},
    ),
    "replicas both fixed and scaled": (
        "num_replicas",
        ["applications", VERIFIER, "deployments", 0, "num_replicas"],
        2,
    ),
    "user config": (
        "user_config",
        ["applications", ROUTER, "deployments", 0, "user_config", "path_policy", "mod"],
        "auto",
    ),
    "user config of one that takes none": (
        "user_config",
        ["applications", DRAFTER, "deployments", 0, "user_config"],
        {},
    ),
    "deployment's name": (
        "applications[2].deployments[0].name",
        ["applications", ROUTER, "deployments", 0, "name"],
        "router",
    ),
    "application's name": ("applications[2].name", ["applications", ROUTER, "name"], "rooter"),
    "import path": (
        "applications[0].import_path",
        ["applications", VERIFIER, "import_path"],
        "verifier_servce.app:build",
    ),
    "builder": (
        "applications[0].import_path",
        ["applications", VERIFIER, "import_path"],
        "verifier_service.app:biuld",
    ),
    "another application's builder": (
        "applications[1].args",
        ["applications", DRAFTER, "import_path"],
        "verifier_service.app:build",
    ),
    "grace": (
        "graceful_shutdown_timeout_s",
        ["applications", VERIFIER, "deployments", 0, "graceful_shutdown_timeout_s"],
        60,
    ),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_a_mistake_is_found(name: str):
    words, path, value = SPOILERS[name]
    found = problems(spoiled(load("prod.yaml"), path, value))
    assert any(words in problem for problem in found), found


def test_grace_is_compared_with_the_default_of_the_code_too():
    config = spoiled(load("local.yaml"), ["applications", VERIFIER, "args", "drain_grace_s"], 20)
    assert any("graceful_shutdown_timeout_s: 20" in problem for problem in problems(config))


def spoiled(config: Any, path: list[Any], value: Any) -> Any:
    """The config with one value changed or added."""
    config = copy.deepcopy(config)
    place = config
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return config
