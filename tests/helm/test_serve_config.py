"""serveConfigV2 deploys what the files of cluster/serve do, and every part of it is known."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from tests.cluster.serve_config import problems
from tests.helm.chart import ROLES, ROOT, VALUES_FILES, Manifest, Rendered

SERVE = ROOT / "cluster" / "serve"
TLS = {
    "certificate": "/etc/paceline/tls/tls.crt",
    "key": "/etc/paceline/tls/tls.key",
    "ca": "/etc/paceline/tls/ca.crt",
}
PORTS = {"verifier": 50051, "drafter": 50052, "router": 50053}
TOKEN_FILE = "/etc/paceline/member-token/token"
CPU_TRIAL = next(file for file in VALUES_FILES if file.stem == "values-cpu-trial")


def read(name: str) -> dict[str, Manifest]:
    """The applications of a file of cluster/serve, by name, without what the chart decides: where
    members listen, their credentials, and placement."""
    config = yaml.safe_load((SERVE / name).read_text())
    return applications(config)


def applications(config: Manifest) -> dict[str, Manifest]:
    found = {}
    for application in copy.deepcopy(config["applications"]):
        application["args"].pop("rpc", None)
        application["args"].pop("auth", None)
        for deployment in application["deployments"]:
            deployment.pop("max_replicas_per_node", None)
            deployment["ray_actor_options"].pop("label_selector", None)
        found[application["name"]] = application
    return found


def test_the_defaults_are_those_of_prod(defaults: Rendered):
    assert applications(defaults.serve_config) == read("prod.yaml")


def test_the_cpu_trial_is_local(rendering: Callable[..., Rendered]):
    assert applications(rendering(files=[CPU_TRIAL]).serve_config) == read("local.yaml")


@pytest.mark.parametrize("name", ["prod.yaml", "local.yaml"])
def test_the_same_settings_give_the_same_config(rendering: Callable[..., Rendered], name: str):
    """Whatever args and options stand in a file, given as values they come out as they are."""
    given = {
        application["name"]: {
            "args": application["args"],
            "deployment": {
                key: value for key, value in application["deployments"][0].items() if key != "name"
            },
        }
        for application in read(name).values()
    }
    if (
        name == "local.yaml"
    ):  # It says less than the defaults: start from the file that clears them.
        rendered = rendering({"applications": given}, files=[CPU_TRIAL])
    else:
        rendered = rendering({"applications": given})
    assert applications(rendered.serve_config) == read(name)


def test_what_is_around_the_applications_is_that_of_prod(defaults: Rendered):
    prod = yaml.safe_load((SERVE / "prod.yaml").read_text())
    config = defaults.serve_config
    for key in ("proxy_location", "http_options", "logging_config"):
        assert config[key] == prod[key]


def test_no_key_is_unknown_and_every_import_path_imports(rendered: Rendered):
    assert problems(rendered.serve_config) == []


def test_an_unknown_key_is_found(defaults: Rendered):
    config = defaults.serve_config
    config["applications"][0]["deployments"][0]["num_replicaz"] = 2
    assert problems(config)


def test_applications_are_named_and_routed_as_users_know_them(rendered: Rendered):
    found = {one["name"]: one for one in rendered.serve_config["applications"]}
    assert set(found) == set(ROLES)
    for name, application in found.items():
        assert application["route_prefix"] == ("/" if name == "router" else None)
        assert [one["name"] for one in application["deployments"]] == [name.title()]


def test_members_listen_where_the_policies_say(rendered: Rendered):
    for application in rendered.serve_config["applications"]:
        assert application["args"]["rpc"]["port"] == PORTS[application["name"]]


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("tls", [True, False])
def test_members_show_what_is_mounted(rendering: Callable[..., Rendered], token: bool, tls: bool):
    values: dict[str, Any] = {"memberToken": {"enabled": token}, "tls": {"enabled": tls}}
    rendered = rendering(values)
    assert problems(rendered.serve_config) == []
    for application in rendered.serve_config["applications"]:
        rpc = application["args"]["rpc"]
        assert rpc.get("token_file") == (TOKEN_FILE if token else None)
        assert rpc.get("tls") == (TLS if tls else None)
        container = rendered.pod_templates[application["name"]]["spec"]["containers"][0]
        mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert ("/etc/paceline/tls" in mounted) is tls
        assert ("/etc/paceline/member-token" in mounted) is token


def test_only_routers_know_of_api_keys(defaults: Rendered, rendering: Callable[..., Rendered]):
    for rendered, expected in (
        (defaults, "/etc/paceline/api-keys/keys.yaml"),
        (rendering({"apiKeys": {"enabled": False}}), None),
    ):
        for application in rendered.serve_config["applications"]:
            file = application["args"].get("auth", {}).get("keys_file")
            assert file == (expected if application["name"] == "router" else None)


def test_large_numbers_stay_whole(defaults: Rendered):
    """Helm holds numbers as floats, and prints large ones as 5.1e+10 if it is let."""
    text = defaults.ray_service["spec"]["serveConfigV2"]
    assert '"memory_bytes": 51539607552' in text
    assert "e+" not in text
