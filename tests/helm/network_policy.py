"""Would Kubernetes let a pod open a connection to another one? As NetworkPolicy defines it."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field

from tests.helm.chart import NAMESPACE, Manifest


@dataclass(frozen=True)
class Peer:
    """One end of a connection."""

    labels: dict[str, str] = field(default_factory=dict)
    namespace: str = NAMESPACE
    address: str | None = None
    """Of what is no pod."""


def allowed(
    policies: Sequence[Manifest], source: Peer, target: Peer, port: int, protocol: str = "TCP"
) -> bool:
    """Whether both ends' policies let the connection pass."""
    leaves = _passes(policies, source, "Egress", target, port, protocol)
    return leaves and _passes(policies, target, "Ingress", source, port, protocol)


def _passes(
    policies: Sequence[Manifest], owner: Peer, way: str, other: Peer, port: int, protocol: str
) -> bool:
    """One end's policies: none that applies means anything passes, else one must say so."""
    if owner.address is not None:
        return True
    applying = [
        policy["spec"]
        for policy in policies
        if policy["metadata"]["namespace"] == owner.namespace
        and way in policy["spec"]["policyTypes"]
        and _selects(policy["spec"]["podSelector"], owner.labels)
    ]
    rules = [rule for spec in applying for rule in spec.get(way.lower()) or ()]
    peers = "from" if way == "Ingress" else "to"
    return not applying or any(
        _has_port(rule.get("ports"), port, protocol)
        and _has_peer(rule.get(peers), other, owner.namespace)
        for rule in rules
    )


def _has_port(ports: Sequence[Manifest] | None, port: int, protocol: str) -> bool:
    return not ports or any(
        protocol == one.get("protocol", "TCP")
        and ("port" not in one or one["port"] <= port <= one.get("endPort", one["port"]))
        for one in ports
    )


def _has_peer(peers: Sequence[Manifest] | None, other: Peer, namespace: str) -> bool:
    return not peers or any(_is_peer(peer, other, namespace) for peer in peers)


def _is_peer(peer: Manifest, other: Peer, namespace: str) -> bool:
    if "ipBlock" in peer:
        block = ipaddress.ip_network(peer["ipBlock"]["cidr"])
        return other.address is not None and ipaddress.ip_address(other.address) in block
    if other.address is not None:
        return False
    if "namespaceSelector" in peer:
        named = {"kubernetes.io/metadata.name": other.namespace}
        if not _selects(peer["namespaceSelector"], named):
            return False
    elif other.namespace != namespace:
        return False
    return _selects(peer.get("podSelector", {}), other.labels)


def _selects(selector: Manifest, labels: dict[str, str]) -> bool:
    wanted = selector.get("matchLabels", {})
    return all(labels.get(key) == value for key, value in wanted.items()) and all(
        _matches(expression, labels) for expression in selector.get("matchExpressions", ())
    )


def _matches(expression: Manifest, labels: dict[str, str]) -> bool:
    value = labels.get(expression["key"])
    match expression["operator"]:
        case "In":
            return value in expression["values"]
        case "NotIn":
            return value not in expression["values"]
        case "Exists":
            return value is not None
        case _:
            return value is None
