"""JSON Schema of the fields of a RayService (ray.io/v1) that the chart writes; nothing else passes.

Pod templates are not looked into: those are checked as pods.
"""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

INT32: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
STRING: Schema = {"type": "string"}
BOOLEAN: Schema = {"type": "boolean"}


def _object(required: tuple[str, ...] = (), /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": list(required),
        "properties": properties,
    }


def _map_of(value: Schema) -> Schema:
    return {"type": "object", "additionalProperties": value}


_QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9.]+(m|k|[MGTPE]|[KMGTPE]i)?$"}
_RESOURCES = _object(requests=_map_of(_QUANTITY), limits=_map_of(_QUANTITY))
_SECRET_KEY = _object(("secretKeyRef",), secretKeyRef=_object(("key",), name=STRING, key=STRING))
_METADATA = _object(
    ("name",),
    name=STRING,
    namespace=STRING,
    labels=_map_of(STRING),
    annotations=_map_of(STRING),
)
_TEMPLATE = _object(
    ("metadata", "spec"),
    metadata=_object(labels=_map_of(STRING), annotations=_map_of(STRING)),
    spec={"type": "object", "required": ["containers"]},
)
_AUTOSCALER = _object(
    version={"enum": ["v1", "v2"]},
    idleTimeoutSeconds=INT32,
    upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
    imagePullPolicy={"enum": ["Always", "IfNotPresent", "Never"]},
    resources=_RESOURCES,
    securityContext={"type": "object"},
    env={"type": "array", "items": _object(("name",), name=STRING, value=STRING)},
    volumeMounts={
        "type": "array",
        "items": _object(("name", "mountPath"), name=STRING, mountPath=STRING),
    },
)
_HEAD = _object(("rayStartParams", "template"), rayStartParams=_map_of(STRING), template=_TEMPLATE)
_GROUP = _object(
    ("groupName", "rayStartParams", "template"),
    groupName=STRING,
    replicas=INT32,
    minReplicas=INT32,
    maxReplicas=INT32,
    idleTimeoutSeconds=INT32,
    labels=_map_of(STRING),
    rayStartParams=_map_of(STRING),
    template=_TEMPLATE,
)
_CLUSTER = _object(
    ("headGroupSpec",),
    rayVersion=STRING,
    authOptions=_object(mode={"enum": ["disabled", "token"]}, secretName=STRING),
    gcsFaultToleranceOptions=_object(
        ("redisAddress",), redisAddress=STRING, redisPassword=_object(valueFrom=_SECRET_KEY)
    ),
    enableInTreeAutoscaling=BOOLEAN,
    autoscalerOptions=_AUTOSCALER,
    headGroupSpec=_HEAD,
    workerGroupSpecs={"type": "array", "items": _GROUP},
)

RAY_SERVICE = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"const": "ray.io/v1"},
    kind={"const": "RayService"},
    metadata=_METADATA,
    spec=_object(
        ("serveConfigV2", "rayClusterConfig"),
        upgradeStrategy=_object(type=STRING),
        rayClusterDeletionDelaySeconds=INT32,
        excludeHeadPodFromServeSvc=BOOLEAN,
        serveConfigV2=STRING,
        rayClusterConfig=_CLUSTER,
    ),
)
