"""Values: what is refused and in which words, and that values, schema and templates agree."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from tests.helm.chart import CHART, Rendered, RenderError, render
from tests.helm.config_schema import SCHEMA, with_config


@cache
def load_schema() -> Any:
    return json.loads(SCHEMA.read_text())


@cache
def load_values() -> Any:
    return yaml.safe_load((CHART / "values.yaml").read_text())


def merged(defaults: Any, values: Any) -> Any:
    """As helm merges values over those of the chart."""
    if not (isinstance(defaults, dict) and isinstance(values, dict)):
        return values
    return defaults | {key: merged(defaults.get(key), value) for key, value in values.items()}


BAD: dict[str, Any] = {
    "replicas": {"replicas": 3},
    "tagg": {"image": {"tagg": "1"}},
    "tag": {"image": {"tag": 2}},
    "digest": {"image": {"digest": "sha256:abc"}},
    "repository": {"image": {"repository": "Paceline'; rm"}},
    "pullPolicy": {"image": {"pullPolicy": "Sometimes"}},
    "version": {"ray": {"version": "2.60"}},
    "upgradeType": {"rayService": {"upgradeType": "NewClusterWithIncrementalUpgrade"}},
    "deletionDelaySeconds": {"rayService": {"deletionDelaySeconds": 2**31}},
    "redisAddress": {"gcsFaultTolerance": {"enabled": True}},
    "modle": {"applications": {"verifier": {"args": {"modle": {}}}}},
    "devise": {"applications": {"verifier": {"args": {"model": {"devise": "cuda"}}}}},
    "block_size": {"applications": {"verifier": {"args": {"kv_cache": {"block_size": 0}}}}},
    "kind": {"applications": {"drafter": {"args": {"kind": "magic"}}}},
    "plain_above_running": {
        "applications": {
            "router": {
                "deployment": {"user_config": {"path_policy": {"plain_above_running": "many"}}}
            }
        }
    },
    "num_replica": {"applications": {"router": {"deployment": {"num_replica": 3}}}},
    "max_replicas_per_node": {
        "applications": {"router": {"deployment": {"max_replicas_per_node": 2}}}
    },
    "policy_function": {
        "applications": {
            "verifier": {
                "deployment": {"autoscaling_config": {"policy": {"policy_function": "nowhere"}}}
            }
        }
    },
    "sidecar": {"applications": {"sidecar": {}}},
    "minReplicas": {"workerGroups": {"verifier": {"minReplicas": -1}}},
    "maxReplicas": {"workerGroups": {"verifier": {"maxReplicas": 2**63}}},
    "cpu": {"workerGroups": {"router": {"cpu": 0.5}}},
    "memory": {"workerGroups": {"router": {"memory": 8}}},
    "role": {"workerGroups": {"router": {"role": "head"}}},
    "resourceName": {"workerGroups": {"drafter": {"gpu": {"resourceName": "gpu"}}}},
    "Drafter_Spot": {"workerGroups": {"Drafter_Spot": {"role": "drafter"}}},
    "minAvailable": {"workerGroups": {"router": {"pdb": {"minAvailable": "50%"}}}},
    "maxUnavailable": {"workerGroups": {"router": {"pdb": {"maxUnavailable": 1}}}},
    "effect": {"workerGroups": {"router": {"tolerations": [{"key": "a", "effect": "Never"}]}}},
    "topologySpreadConstraints": {
        "workerGroups": {"router": {"topologySpreadConstraints": [{"maxSkew": 1}]}}
    },
    "podLabels": {"workerGroups": {"router": {"podLabels": {"ray.io/cluster": "x"}}}},
    "rayLabels": {"workerGroups": {"router": {"rayLabels": {"paceline-role": "verifier"}}}},
    "env": {"ray": {"env": [{"name": "HF_TOKEN", "value": "hf_secret"}]}},
    "commonLabels": {"commonLabels": {"a b": "c"}},
    "size": {"modelCache": {"size": "lots"}},
    "hostPath": {"modelCache": {"type": "hostPath"}},
    "runAsNonRoot": {"podSecurityContext": {"runAsNonRoot": False}},
    "allowPrivilegeEscalation": {"containerSecurityContext": {"allowPrivilegeEscalation": True}},
    "existingSecret": {"apiKeys": {"existingSecret": "No_Name"}},
    "sha256": {"apiKeys": {"keys": [{"tenant": "a", "sha256": "plain-text-key"}]}},
    "duration": {"tls": {"certManager": {"duration": "90 days"}}},
    "operatorFrom": {"networkPolicy": {"operatorFrom": []}},
    "cidr": {"networkPolicy": {"httpFrom": [{"ipBlock": {"cidr": "10.0.0.0"}}]}},
    "type": {"service": {"type": "ExternalName"}},
    "port": {"service": {"port": 70000}},
    "hosts": {"ingress": {"enabled": True}},
    "interval": {"metrics": {"serviceMonitor": {"interval": 15}}},
    "errorRatio": {"metrics": {"prometheusRule": {"thresholds": {"errorRatio": 5}}}},
    "extraObjects": {"extraObjects": [{"kind": "ConfigMap"}]},
}
"""A wrong value by the key that the refusal must name."""


@pytest.mark.parametrize("key", BAD)
def test_a_bad_value_is_refused_by_name(key: str):
    """By the schema alone, in milliseconds; below by helm."""
    validator = jsonschema.Draft7Validator(load_schema())
    errors = list(validator.iter_errors(merged(load_values(), BAD[key])))
    reasons = [f"{one.json_path}: {one.message}" for error in errors for one in _causes(error)]
    assert any(re.search(rf"\b{re.escape(key)}\b", reason) for reason in reasons), reasons


def _causes(error: jsonschema.ValidationError) -> Iterator[jsonschema.ValidationError]:
    yield error
    for below in error.context or ():
        yield from _causes(below)


@pytest.mark.parametrize("key", ["devise", "minAvailable", "Drafter_Spot", "redisAddress"])
def test_helm_refuses_it(each_helm: Path, key: str):
    with pytest.raises(RenderError, match=rf"\b{re.escape(key)}\b") as caught:
        render(each_helm, BAD[key])
    assert "specifications of the schema" in str(caught.value)


@pytest.mark.long
@pytest.mark.parametrize("key", BAD)
def test_helm_refuses_all_of_them(each_helm: Path, key: str):
    with pytest.raises(RenderError, match=rf"\b{re.escape(key)}\b"):
        render(each_helm, BAD[key])


CONFLICTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "no group for a role": (
        {"workerGroups": {"verifier": None}},
        ("applications.verifier may have 8 replicas", "add a group with role verifier"),
    ),
    "a group without a role": (
        {"workerGroups": {"more": {"cpu": 2}}},
        ("workerGroups.more.role is missing", "set router, verifier or drafter"),
    ),
    "a group for what is off": (
        {"applications": {"drafter": {"enabled": False}}},
        ("workerGroups.drafter.role is drafter", "workerGroups.drafter: null"),
    ),
    "fewest over most": (
        {"workerGroups": {"router": {"minReplicas": 4}}},
        ("workerGroups.router.minReplicas is 4", "raise maxReplicas"),
    ),
    "a budget that blocks": (
        {"workerGroups": {"router": {"pdb": {"minAvailable": 2}}}},
        ("workerGroups.router.pdb.minAvailable is 2", "below minReplicas"),
    ),
    "more replicas than pods": (
        {"workerGroups": {"drafter": {"maxReplicas": 4}}},
        ("applications.drafter may have 8 replicas", "4 pods at most", "raise their maxReplicas"),
    ),
    "fixed groups too small": (
        {"autoscaler": {"enabled": False}},
        ("may have 8 replicas", "raise their minReplicas"),
    ),
    "a drain that is cut": (
        {"workerGroups": {"verifier": {"drainSeconds": 60}}},
        ("workerGroups.verifier.drainSeconds is 60", "set at least 90"),
    ),
    "a grace that is cut": (
        {"applications": {"verifier": {"args": {"drain_grace_s": 90}}}},
        ("applications.verifier.args.drain_grace_s is 90", "graceful_shutdown_timeout_s"),
    ),
    "answers that are cut": (
        {"rayService": {"deletionDelaySeconds": 60}},
        ("rayService.deletionDelaySeconds is 60", "set at least 600"),
    ),
    "answers that are cut, by default": (
        {
            "rayService": {"deletionDelaySeconds": 60},
            "applications": {"router": {"args": {"request_timeout_s": None}}},
        },
        ("rayService.deletionDelaySeconds is 60", "set at least 600"),
    ),
    "a GPU too few": (
        {"workerGroups": {"drafter": {"gpu": {"count": 0}}}},
        ("workerGroups.drafter.gpu.count is 0", "asks for 1", "num_gpus"),
    ),
    "a core too few": (
        {"workerGroups": {"verifier": {"cpu": 2}}},
        ("workerGroups.verifier.cpu is 2", "asks for 4", "num_cpus"),
    ),
    "both fixed and scaled": (
        {"applications": {"verifier": {"deployment": {"num_replicas": 2}}}},
        ("applications.verifier.deployment has both", "to null"),
    ),
    "a port of one's own": (
        {"applications": {"verifier": {"args": {"rpc": {"port": 1234}}}}},
        ("applications.verifier.args.rpc.port is the chart's", "memberToken and tls"),
    ),
    "a token of one's own": (
        {"applications": {"router": {"args": {"rpc": {"token_file": "/t"}}}}},
        ("applications.router.args.rpc.token_file is the chart's", "memberToken"),
    ),
    "keys of one's own": (
        {"applications": {"router": {"args": {"auth": {"keys_file": "/k"}}}}},
        ("applications.router.args.auth.keys_file is the chart's", "use apiKeys"),
    ),
    "an old Ray": (
        {"ray": {"version": "2.51.0"}},
        ("ray.version is 2.51.0", "needs Ray 2.60"),
    ),
    "a cache that nobody shares": (
        {"prefetch": {"enabled": True}},
        ("prefetch.enabled needs a cache", "modelCache.type to pvc"),
    ),
    "a monitor without a key": (
        {"metrics": {"serviceMonitor": {"enabled": True}}, "apiKeys": {"adminKey": ""}},
        ("metrics.serviceMonitor.enabled needs an admin key", "apiKeys.adminKey"),
    ),
}
"""Values that do not go together, and what the message says: the key, and the remedy."""


@pytest.mark.parametrize("name", CONFLICTS)
def test_values_that_do_not_go_together_are_refused_with_a_remedy(helm: Path, name: str):
    values, words = CONFLICTS[name]
    with pytest.raises(RenderError) as caught:
        render(helm, values)
    message = str(caught.value)
    assert "execution error" in message
    assert all(word in message for word in words), message


# --- values.yaml, the schema and the templates agree --------------------------------------------


def test_the_schema_holds_the_configuration_as_it_is():
    assert load_schema() == with_config(load_schema()), "run python -m tests.helm.config_schema"


def test_the_schema_is_a_draft_that_every_helm_takes_and_refers_to_nothing_outside():
    schema = load_schema()
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    jsonschema.Draft7Validator.check_schema(schema)
    references = re.findall(r'"\$ref": "([^"]*)"', SCHEMA.read_text())
    assert references
    for reference in references:
        assert reference.removeprefix("#/definitions/") in schema["definitions"]


def test_the_defaults_satisfy_the_schema():
    jsonschema.Draft7Validator(load_schema()).validate(load_values())


def test_every_key_has_a_comment():
    """Right above it; what stands in an item of a list needs none."""
    lines = (CHART / "values.yaml").read_text().split("\n")
    bare = [
        line
        for before, line in itertools.pairwise(lines)
        if re.match(r" *[A-Za-z_]+:", line)
        and not before.lstrip().startswith("#")
        and not before.lstrip().startswith("- ")
    ]
    assert bare == []


FREE = {"args", "deployment", "workerGroups", "podSecurityContext", "containerSecurityContext"}
"""Where a user adds keys of an open set, or the schema offers more than the defaults set."""


def test_values_and_schema_name_the_same_keys():
    schema = load_schema()
    assert sorted(_differences(load_values(), schema, schema, "")) == []


def _differences(values: Any, schema: Any, whole: Any, path: str) -> Iterator[str]:
    if "$ref" in schema:
        schema = whole["definitions"][schema["$ref"].rpartition("/")[2]]
    if not isinstance(values, dict) or not values or "properties" not in schema:
        return  # What is empty by default is a Kubernetes object, or a list of them.
    if schema is whole["definitions"]["workerGroup"]:
        schema = {**schema, "properties": {**schema["properties"]}}
        schema["properties"].pop("role")  # Of a group alone: no default makes sense.
    for key in set(values) ^ set(schema["properties"]):
        yield f"{path}.{key}"
    for key in set(values) & set(schema["properties"]) - FREE:
        yield from _differences(values[key], schema["properties"][key], whole, f"{path}.{key}")


def test_every_object_of_the_schema_is_closed():
    """Or has keys of the user's choosing, which then have a form, or is a Kubernetes object."""
    open_objects = [
        path
        for path, schema in _schemas(load_schema(), "")
        if schema.get("type") == "object"
        and schema.get("additionalProperties") is not False
        and not isinstance(schema.get("additionalProperties"), dict)
    ]
    assert sorted(open_objects) == [
        ".definitions.affinity.properties.nodeAffinity",
        ".definitions.affinity.properties.podAffinity",
        ".definitions.affinity.properties.podAntiAffinity",
        ".definitions.deployment.properties.autoscaling_config.properties.policy.properties."
        "policy_kwargs",
        ".definitions.deployment.properties.ray_actor_options.properties.runtime_env",
        ".definitions.env.properties.valueFrom",
        ".definitions.workerGroup.properties.volumes.items",
        ".properties.extraObjects.items",
        ".properties.global",
    ]


def _schemas(schema: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(schema, dict):
        yield path, schema
        for key, value in schema.items():
            yield from _schemas(value, f"{path}.{key}")
    elif isinstance(schema, list):
        for index, value in enumerate(schema):
            yield from _schemas(value, f"{path}[{index}]")


def test_every_value_is_used():
    """Each path of values.yaml stands in some template, itself or a section that is taken whole."""
    templates = "".join(file.read_text() for file in (CHART / "templates").rglob("*.*"))
    used = {"global", *re.findall(r"[Vv]alues\.([A-Za-z.]+)", templates)}
    unused = [
        path
        for path in _paths(load_values(), "")
        if not any(path == name or path.startswith(f"{name}.") for name in used)
        and not any(name.startswith(f"{path}.") for name in used)
    ]
    assert unused == []


def _paths(values: Any, path: str) -> Iterator[str]:
    for key, value in values.items():
        here = f"{path}.{key}".removeprefix(".")
        yield here
        if isinstance(value, dict) and value:
            yield from _paths(value, here)


def test_an_example_file_says_only_what_differs(values_file: Path | None, helm: Path):
    if values_file is None:
        return
    values = yaml.safe_load(values_file.read_text())
    assert _repeated(values, load_values(), "") == []


def _repeated(values: Any, defaults: Any, path: str) -> list[str]:
    found = []
    for key, value in values.items():
        if key not in defaults:
            continue
        if isinstance(value, dict) and isinstance(defaults[key], dict):
            found += _repeated(value, defaults[key], f"{path}.{key}")
        elif value == defaults[key] and value != []:
            found.append(f"{path}.{key}")
    return found


def test_a_number_as_a_tag_needs_set_string(helm: Path, rendering: Callable[..., Rendered]):
    with pytest.raises(RenderError, match="tag"):
        render(helm, more=["--set", "image.tag=2"])
    text = render(helm, more=["--set-string", "image.tag=2"]).text
    assert 'image: "paceline:2"' in text
