"""JSON Schemas of what the chart writes for Prometheus' operator and cert-manager, and no more."""

from __future__ import annotations

from typing import Any

from tests.helm.chart import Manifest

Schema = dict[str, Any]

STRING: Schema = {"type": "string", "minLength": 1}
MAP: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
PROMETHEUS_DURATION: Schema = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"}
GO_DURATION: Schema = {"type": "string", "pattern": r"^([0-9]+h)?([0-9]+m)?([0-9]+s)?$"}


def _object(required: str, /, **properties: Schema) -> Schema:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def _list_of(item: Schema) -> Schema:
    return {"type": "array", "minItems": 1, "items": item}


_SELECTOR = _object(
    "",
    matchLabels=MAP,
    matchExpressions=_list_of(
        _object("key operator", key=STRING, operator=STRING, values=_list_of(STRING))
    ),
)
_ENDPOINT = {
    "port": STRING,
    "path": STRING,
    "interval": PROMETHEUS_DURATION,
    "scrapeTimeout": PROMETHEUS_DURATION,
}
_ISSUER_REF = _object("name", name=STRING, kind={"enum": ["Issuer", "ClusterIssuer"]}, group=STRING)

_SPECS: dict[str, Schema] = {
    "ServiceMonitor": _object(
        "selector endpoints",
        selector=_SELECTOR,
        endpoints=_list_of(
            _object(
                "port",
                **_ENDPOINT,
                authorization=_object(
                    "credentials",
                    type={"const": "Bearer"},
                    credentials=_object("key", name=STRING, key=STRING),
                ),
            )
        ),
    ),
    "PodMonitor": _object(
        "selector podMetricsEndpoints",
        selector=_SELECTOR,
        podMetricsEndpoints=_list_of(
            _object(
                "port",
                **_ENDPOINT,
                relabelings=_list_of(
                    _object(
                        "sourceLabels targetLabel",
                        sourceLabels=_list_of(STRING),
                        targetLabel=STRING,
                    )
                ),
            )
        ),
    ),
    "PrometheusRule": _object(
        "groups",
        groups=_list_of(
            _object(
                "name rules",
                name=STRING,
                rules=_list_of(
                    {
                        **_object(
                            "alert expr labels annotations",
                            alert=STRING,
                            expr=STRING,
                            labels=_object(
                                "severity", severity={"enum": ["critical", "warning", "info"]}
                            ),
                            annotations=_object(
                                "summary description", summary=STRING, description=STRING
                            ),
                            **{"for": PROMETHEUS_DURATION},
                        )
                    }
                ),
            )
        ),
    ),
    "Certificate": _object(
        "secretName issuerRef",
        secretName=STRING,
        isCA={"type": "boolean"},
        commonName=STRING,
        dnsNames=_list_of(STRING),
        usages=_list_of(
            {"enum": ["digital signature", "key encipherment", "server auth", "client auth"]}
        ),
        duration=GO_DURATION,
        renewBefore=GO_DURATION,
        privateKey=_object(
            "",
            algorithm={"enum": ["ECDSA", "RSA", "Ed25519"]},
            size={"type": "integer"},
            rotationPolicy={"enum": ["Always", "Never"]},
        ),
        issuerRef=_ISSUER_REF,
    ),
    "Issuer": {
        "oneOf": [
            _object("selfSigned", selfSigned=_object("")),
            _object("ca", ca=_object("secretName", secretName=STRING)),
        ]
    },
}
_API_VERSIONS = {
    "ServiceMonitor": "monitoring.coreos.com/v1",
    "PodMonitor": "monitoring.coreos.com/v1",
    "PrometheusRule": "monitoring.coreos.com/v1",
    "Certificate": "cert-manager.io/v1",
    "Issuer": "cert-manager.io/v1",
}
KINDS = tuple(_SPECS)


def schema_of(manifest: Manifest) -> Schema:
    """For a manifest of one of KINDS."""
    kind = manifest["kind"]
    return _object(
        "apiVersion kind metadata spec",
        apiVersion={"const": _API_VERSIONS[kind]},
        kind={"const": kind},
        metadata=_object("name", name=STRING, namespace=STRING, labels=MAP, annotations=MAP),
        spec=_SPECS[kind],
    )
