"""Objects of Kubernetes' own kinds, checked as Kubernetes would."""

from __future__ import annotations

import copy
import json
from functools import lru_cache
from importlib.resources import files
from typing import Any

import jsonschema
from referencing import Registry, Resource

from tests.helm.chart import Manifest, Rendered

KUBERNETES_VERSIONS = ("1.28", "1.31", "1.34", "1.37")
"""From what Chart.yaml asks for to the newest that the schemas know."""

OTHERS_KINDS = {
    "RayService",
    "Certificate",
    "Issuer",
    "ServiceMonitor",
    "PodMonitor",
    "PrometheusRule",
}


def invalid(manifest: Manifest, version: str) -> str | None:
    """Why Kubernetes would refuse it, unknown keys included."""
    validator = _validator(version, manifest["apiVersion"], manifest["kind"])
    errors = [f"{error.json_path}: {error.message}" for error in validator.iter_errors(manifest)]
    return f"{manifest['kind']}: {'; '.join(errors)}" if errors else None


@lru_cache
def _validator(version: str, api_version: str, kind: str) -> jsonschema.Draft202012Validator:
    """For one kind, out of the package's schemas; its own function reads them for each object."""
    group, _, name = api_version.rpartition("/")
    prefix = f"{group.split('.')[0]}-" if group else ""
    schema = _schema(version, f"{kind.lower()}-{prefix}{name}.json")
    return jsonschema.Draft202012Validator(schema, registry=_definitions(version))


@lru_cache
def _definitions(version: str) -> Registry[Any]:
    return Resource.from_contents(_schema(version, "_definitions.json")) @ Registry()


def _schema(version: str, name: str) -> Any:
    folder = files("kubernetes_validate") / "kubernetes-json-schema"
    (release,) = (
        one
        for one in folder.iterdir()
        if one.name.startswith(f"v{version}.") and "strict" in one.name
    )
    return json.loads((release / name).read_text())


def builtin_manifests(rendered: Rendered) -> list[Manifest]:
    """All of Kubernetes' own kinds, with Ray's pod templates as pods."""
    own = [one for one in rendered.manifests if one["kind"] not in OTHERS_KINDS]
    pods = [as_pod(name, template) for name, template in rendered.pod_templates.items()]
    return own + pods


def as_pod(name: str, template: Manifest) -> Manifest:
    template = copy.deepcopy(template)
    metadata: dict[str, Any] = {"name": name, **template["metadata"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
