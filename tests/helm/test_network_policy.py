"""Who reaches what: the members' ports are for those that have business there."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import pytest

from tests.helm.chart import ROLES, Rendered
from tests.helm.network_policy import Peer, allowed

HTTP, METRICS, DASHBOARD, GCS, RAYLET = 8000, 8080, 8265, 6379, 35_789
PORTS = {"verifier": 50_051, "drafter": 50_052, "router": 50_053}
ALLOWED_MEMBERS = {
    ("router", "verifier"),
    ("router", "drafter"),  # For metrics; drafts are refused to it by the drafter itself.
    ("router", "router"),
    ("verifier", "drafter"),
}
OPERATOR = Peer({"app.kubernetes.io/name": "kuberay-operator"}, namespace="kuberay-system")
PROMETHEUS = Peer({"app": "prometheus"}, namespace="monitoring")
STRANGER = Peer({"app": "other"}, namespace="other")
NEIGHBOUR = Peer({"app": "other"})
INTERNET = Peer(address="203.0.113.7")
API_SERVER = Peer(address="10.0.0.1")
DNS = Peer({"k8s-app": "kube-dns"}, namespace="kube-system")


@pytest.fixture
def policies(defaults: Rendered) -> list:
    return defaults.of_kind("NetworkPolicy")


def pods(rendered: Rendered) -> dict[str, Peer]:
    """Head and roles, with the labels that their pods carry."""
    return {
        template["metadata"]["labels"]["app.kubernetes.io/component"]: Peer(
            template["metadata"]["labels"]
        )
        for template in rendered.pod_templates.values()
    }


def test_members_ports(defaults: Rendered, policies):
    peers = pods(defaults)
    for source, target in product(peers, ROLES):
        expected = (source, target) in ALLOWED_MEMBERS
        reached = allowed(policies, peers[source], peers[target], PORTS[target])
        assert reached is expected, f"{source} to {target}"


@pytest.mark.parametrize("who", [STRANGER, NEIGHBOUR, PROMETHEUS, OPERATOR, INTERNET])
def test_nobody_else_reaches_a_member(defaults: Rendered, policies, who: Peer):
    for role in ROLES:
        assert not allowed(policies, who, pods(defaults)[role], PORTS[role])


def test_another_release_is_a_stranger(defaults: Rendered, policies):
    theirs = {**pods(defaults)["verifier"].labels, "app.kubernetes.io/instance": "another"}
    assert not allowed(policies, Peer(theirs), pods(defaults)["drafter"], PORTS["drafter"])
    elsewhere = Peer(pods(defaults)["verifier"].labels, namespace="other")
    assert not allowed(policies, elsewhere, pods(defaults)["drafter"], PORTS["drafter"])


def test_rays_pods_reach_one_another(defaults: Rendered, policies):
    peers = pods(defaults).values()
    for source, target in product(peers, peers):
        for port in (GCS, HTTP, METRICS, RAYLET, 1, 50_050, 50_054, 65_535):
            assert allowed(policies, source, target, port)


def test_the_head_is_for_the_operator(defaults: Rendered, policies):
    head = pods(defaults)["head"]
    for port in (DASHBOARD, HTTP):
        assert allowed(policies, OPERATOR, head, port)
        for who in (STRANGER, NEIGHBOUR, PROMETHEUS, INTERNET):
            assert not allowed(policies, who, head, port)
    for who in (OPERATOR, STRANGER, NEIGHBOUR, PROMETHEUS):
        assert not allowed(policies, who, head, GCS)
        assert not allowed(policies, who, head, 10_001)


def test_http_is_open_and_only_at_routers(defaults: Rendered, policies):
    peers = pods(defaults)
    for who in (STRANGER, NEIGHBOUR, PROMETHEUS, INTERNET):
        assert allowed(policies, who, peers["router"], HTTP)
        for role in ("verifier", "drafter"):
            assert not allowed(policies, who, peers[role], HTTP)


def test_rays_metrics_are_for_prometheus(defaults: Rendered, policies):
    for target in pods(defaults).values():
        assert allowed(policies, PROMETHEUS, target, METRICS)
        for who in (STRANGER, NEIGHBOUR, INTERNET):
            assert not allowed(policies, who, target, METRICS)


def test_http_can_be_closed_and_stays_open_to_helm_test(rendering: Callable[..., Rendered]):
    clients = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}}]
    rendered = rendering({"networkPolicy": {"httpFrom": clients}})
    found = rendered.of_kind("NetworkPolicy")
    router = pods(rendered)["router"]
    assert allowed(found, Peer({"any": "app"}, namespace="apps"), router, HTTP)
    assert not allowed(found, STRANGER, router, HTTP)
    for pod in rendered.of_kind("Pod"):
        assert allowed(found, Peer(pod["metadata"]["labels"]), router, HTTP)
        assert not allowed(found, Peer(pod["metadata"]["labels"]), router, PORTS["router"])


def test_jobs_can_be_submitted_from_where_the_values_say(rendering: Callable[..., Rendered]):
    ci = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "ci"}}}]
    rendered = rendering({"networkPolicy": {"dashboardFrom": ci}})
    head = pods(rendered)["head"]
    assert allowed(rendered.of_kind("NetworkPolicy"), Peer({}, namespace="ci"), head, DASHBOARD)
    assert not allowed(rendered.of_kind("NetworkPolicy"), Peer({}, namespace="ci"), head, GCS)


def test_outgoing_connections_are_free_by_default_and_can_be_closed(
    defaults: Rendered, rendering: Callable[..., Rendered]
):
    closed = rendering({"networkPolicy": {"egress": {"enabled": True}}})
    for source in pods(defaults).values():
        assert allowed(defaults.of_kind("NetworkPolicy"), source, STRANGER, 22)
    found = closed.of_kind("NetworkPolicy")
    peers = pods(closed)
    for source in peers.values():
        assert not allowed(found, source, STRANGER, 22)
        assert not allowed(found, source, INTERNET, 80)
        assert allowed(found, source, INTERNET, 443)
        assert allowed(found, source, DNS, 53, "UDP")
        assert allowed(found, source, API_SERVER, 6443)
        assert allowed(found, source, peers["head"], GCS)
    assert allowed(found, peers["router"], peers["verifier"], PORTS["verifier"])
    assert not allowed(found, peers["drafter"], peers["verifier"], PORTS["verifier"])


def test_without_policies_everything_is_open(rendering: Callable[..., Rendered]):
    """What the evaluator says where nothing applies, and so what the policies are for."""
    rendered = rendering({"networkPolicy": {"enabled": False}})
    assert rendered.of_kind("NetworkPolicy") == []
    assert allowed([], STRANGER, pods(rendered)["drafter"], PORTS["drafter"])


def test_no_member_listens_where_the_kernel_gives_ports_away(rendered: Rendered):
    reserved = set(_reserved_ports(rendered))
    listened = {
        port["containerPort"]
        for template in rendered.pod_templates.values()
        for port in template["spec"]["containers"][0]["ports"]
        if port["name"] == "members"
    }
    assert listened == set(PORTS.values()) == reserved


def _reserved_ports(rendered: Rendered) -> Iterator[int]:
    for name, template in rendered.pod_templates.items():
        if name == "head":
            continue
        (sysctl,) = template["spec"]["securityContext"]["sysctls"]
        first, last = map(int, sysctl["value"].split("-"))
        yield from range(first, last + 1)
