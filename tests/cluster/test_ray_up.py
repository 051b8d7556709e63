"""The files for `ray up` are what Ray takes, and place what the Serve config asks for."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from cluster import cli

FOLDER = Path(cli.__file__).parent / "ray_up"
FILES = sorted(FOLDER.glob("*.yaml"))
CLOUDS = [path for path in FILES if path.stem != "local"]


def load(path: Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    return config


def checked(config: dict[str, Any]) -> dict[str, Any]:
    prepared: dict[str, Any] = prepare_config(copy.deepcopy(config))
    validate_config(prepared)
    return prepared


def test_the_three_are_there():
    assert {path.stem for path in FILES} == {"aws", "gcp", "local"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_ray_takes_the_file(path):
    assert checked(load(path))["head_node_type"]


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
@pytest.mark.parametrize(
    "spoil",
    [
        lambda config: config.update(max_workerz=3),
        lambda config: config.update(head_node_type="nope"),
        lambda config: config["available_node_types"]["drafter"].update(min_workers="x"),
        lambda config: config["available_node_types"]["drafter"].update(lables={}),
    ],
)
def test_ray_would_have_refused_a_mistake(path, spoil):
    config = load(path)
    spoil(config)
    with pytest.raises(Exception):  # noqa: B017, PT011  whatever Ray raises
        checked(config)


@pytest.mark.parametrize("path", CLOUDS, ids=lambda path: path.stem)
def test_every_replica_of_prod_fits_a_node_of_its_label_and_none_but_routers_the_head(path):
    nodes = load(path)["available_node_types"]
    prod = yaml.safe_load((FOLDER.parent / "serve" / "prod.yaml").read_text())
    for application in prod["applications"]:
        [deployment] = application["deployments"]
        wanted = deployment["ray_actor_options"]
        fitting = [
            name
            for name, node in nodes.items()
            if node["labels"].items() >= wanted["label_selector"].items()
            and node["resources"]["CPU"] >= wanted.get("num_cpus", 1)
            and node["resources"]["GPU"] >= wanted.get("num_gpus", 0)
        ]
        assert fitting == [{"router": "head"}.get(application["name"], application["name"])]
        if scaling := deployment.get("autoscaling_config"):
            node = nodes[fitting[0]]
            assert node["min_workers"] >= scaling["min_replicas"]
            assert node["max_workers"] >= scaling["max_replicas"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_cluster_is_closed(path):
    config = load(path)
    starts = [
        command
        for command in config["head_start_ray_commands"] + config["worker_start_ray_commands"]
        if "ray start" in command
    ]
    assert len(starts) == 2
    for command in starts:
        assert "RAY_AUTH_MODE=token" in command
        assert "0.0.0.0" not in command
    assert any("auth_token" in target for target in config["file_mounts"])
