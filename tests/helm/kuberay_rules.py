"""What KubeRay's controller (1.7) refuses in a RayService beyond its schema, and how it tells a
change that needs a new cluster from one that does not."""

from __future__ import annotations

import copy
import hashlib
import json
import re
from collections.abc import Iterator
from typing import Any

from tests.helm.chart import Manifest

_LABEL = re.compile(r"([A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?)?")
_EXCLUSIVE_WITH_RESOURCES = {"num-cpus", "num-gpus", "memory", "resources"}
_FAULT_TOLERANCE_ENV = {"RAY_REDIS_ADDRESS", "REDIS_PASSWORD"}


def problems(service: Manifest) -> list[str]:
    """Everything that the controller would refuse."""
    spec = service["spec"]
    cluster = spec["rayClusterConfig"]
    found = list(_name_problems(service["metadata"]))
    if spec["upgradeStrategy"]["type"] not in ("NewCluster", "None"):
        found.append("upgradeStrategy.type is none that the chart offers")
    found += _cluster_problems(cluster)
    for group in cluster["workerGroupSpecs"]:
        name = group["groupName"]
        found += [f"{name}: {problem}" for problem in _group_problems(group, cluster)]
    for group in [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]:
        found += _pod_problems(group, cluster)
    return found


def _name_problems(metadata: Manifest) -> Iterator[str]:
    if len(metadata["name"]) > 47:
        yield "the name is over 47 characters"
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", metadata["name"]):
        yield "the name is no DNS-1035 label"
    if "ray.io/ft-enabled" in metadata.get("annotations", {}):
        yield "the annotation ray.io/ft-enabled excludes gcsFaultToleranceOptions"


def _cluster_problems(cluster: Manifest) -> Iterator[str]:
    version = tuple(map(int, cluster.get("rayVersion", "0.0.0").split(".")))
    if cluster["authOptions"]["mode"] == "token" and version < (2, 52, 0):
        yield "token authentication needs rayVersion 2.52.0"
    if "autoscalerOptions" in cluster and not cluster["enableInTreeAutoscaling"]:
        yield "autoscalerOptions without enableInTreeAutoscaling"
    names = [group["groupName"] for group in cluster["workerGroupSpecs"]]
    if len(set(names)) < len(names):
        yield "two groups have one name"
    if "headService" in cluster["headGroupSpec"]:
        yield "headService must not be named"


def _group_problems(group: Manifest, cluster: Manifest) -> Iterator[str]:
    if "minReplicas" not in group or "maxReplicas" not in group:
        yield "minReplicas and maxReplicas must both be set"
    elif not 0 <= group["minReplicas"] <= group["maxReplicas"]:
        yield "minReplicas is over maxReplicas"
    for key, value in group.get("labels", {}).items():
        if not _LABEL.fullmatch(value) or not _LABEL.fullmatch(key.rpartition("/")[2]):
            yield f"{key}={value} is no label"
    if "labels" in group["rayStartParams"]:
        yield "labels stand in rayStartParams"
    if "resources" in group and _EXCLUSIVE_WITH_RESOURCES & set(group["rayStartParams"]):
        yield "resources stand in the group and in rayStartParams"
    version = cluster.get("autoscalerOptions", {}).get("version")
    if "idleTimeoutSeconds" in group and version != "v2":
        yield "idleTimeoutSeconds needs autoscaler v2"


def _pod_problems(group: Manifest, cluster: Manifest) -> Iterator[str]:
    spec = group["template"]["spec"]
    if not spec["containers"] or not spec["containers"][0]["name"].startswith("ray-"):
        yield "Ray's container is not the first"
    version = cluster.get("autoscalerOptions", {}).get("version")
    if version == "v2" and spec.get("restartPolicy", "Never") != "Never":
        yield "autoscaler v2 needs restartPolicy Never or none"
    for container in spec["containers"]:
        names = [entry["name"] for entry in container.get("env", ())]
        if "RAY_enable_autoscaler_v2" in names:
            yield "the autoscaler's version is set twice"
        if "gcsFaultToleranceOptions" in cluster and _FAULT_TOLERANCE_ENV & set(names):
            yield "Redis is set twice"
    if any(not isinstance(value, str) for value in group["rayStartParams"].values()):
        yield "rayStartParams must be strings"


def duplicates(spec: Manifest) -> list[str]:
    """Names that stand twice in a list of a pod that the API server keys by name."""
    found = _twice("volumes", [volume["name"] for volume in spec.get("volumes", ())])
    for container in spec["containers"]:
        found += _twice("env", [entry["name"] for entry in container.get("env", ())])
        ports = [port["containerPort"] for port in container.get("ports", ())]
        found += _twice("ports", ports)
        found += _twice("ports", [port["name"] for port in container.get("ports", ())])
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", ())]
        found += _twice("volumeMounts", mounts)
    return found


def _twice(what: str, names: list[Any]) -> list[str]:
    return [f"{what}: {name} stands there twice" for name in {*names} if names.count(name) > 1]


def cluster_hash(cluster: Manifest) -> str:
    """Changes exactly when KubeRay builds a new cluster: it looks at the whole of rayClusterConfig
    but for counts of replicas, tolerations, and a few fields that the chart does not write."""
    looked_at = copy.deepcopy(cluster)
    for group in [looked_at["headGroupSpec"], *looked_at["workerGroupSpecs"]]:
        group["template"]["spec"].pop("tolerations", None)
        for name in ("replicas", "minReplicas", "maxReplicas"):
            group.pop(name, None)
    return hashlib.sha256(json.dumps(looked_at, sort_keys=True).encode()).hexdigest()
