"""Monitors find what they are for; alerts read metrics and labels that exist."""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from cluster.load import DrafterState
from cluster.metrics import METRICS, Kind, Metric
from tests.helm.chart import CHART, NAMESPACE, Manifest, Rendered, render
from tests.helm.operator_schemas import KINDS, schema_of
from tests.helm.promql import grouping_labels, reads

ALL = {
    "tls": {"enabled": True},
    "metrics": {
        name: {"enabled": True}
        for name in ("serviceMonitor", "podMonitor", "prometheusRule", "dashboards")
    },
}
MEMBER_LABELS = {"application", "deployment", "replica"}
SCRAPE_LABELS = {"namespace", "service", "pod", "instance"}
"""What Prometheus' operator adds to what a ServiceMonitor finds."""


@pytest.fixture
def monitored(rendering: Callable[..., Rendered]) -> Rendered:
    return rendering(ALL)


def matches(selector: Manifest, labels: dict[str, str]) -> bool:
    """As Kubernetes' label selectors, with the one operator that the chart uses."""
    by_value = selector.get("matchLabels", {})
    by_set = selector.get("matchExpressions", ())
    assert all(one["operator"] == "In" for one in by_set)
    return by_value.items() <= labels.items() and all(
        labels.get(one["key"]) in one["values"] for one in by_set
    )


# --- validity -----------------------------------------------------------------------------------


def test_objects_of_other_operators_are_valid(monitored: Rendered):
    found = [one for one in monitored.manifests if one["kind"] in KINDS]
    assert {one["kind"] for one in found} == set(KINDS)
    for manifest in found:
        jsonschema.Draft202012Validator(schema_of(manifest)).validate(manifest)


def test_an_invalid_one_is_found(monitored: Rendered):
    for kind in KINDS:
        manifest = copy.deepcopy(monitored.of_kind(kind)[0])
        manifest["spec"]["intervall"] = "5s"
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.Draft202012Validator(schema_of(manifest)).validate(manifest)


def test_a_cluster_without_these_operators_gets_none_of_their_objects(defaults: Rendered):
    assert not [one for one in defaults.manifests if one["kind"] in KINDS]


# --- monitors -----------------------------------------------------------------------------------


def test_the_service_monitor_finds_the_service_alone_with_an_admins_key(monitored: Rendered):
    (monitor,) = monitored.of_kind("ServiceMonitor")
    found = [
        service
        for service in monitored.of_kind("Service")
        if matches(monitor["spec"]["selector"], service["metadata"]["labels"])
    ]
    assert [service["metadata"]["name"] for service in found] == ["paceline"]
    (endpoint,) = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in found[0]["spec"]["ports"]}
    assert endpoint["path"] == "/metrics"
    credentials = endpoint["authorization"]["credentials"]
    secret = monitored.named("Secret", credentials["name"])
    assert credentials["key"] in secret["stringData"]


def test_without_keys_it_shows_none(rendering: Callable[..., Rendered]):
    rendered = rendering({**ALL, "apiKeys": {"enabled": False}})
    (monitor,) = rendered.of_kind("ServiceMonitor")
    assert "authorization" not in monitor["spec"]["endpoints"][0]


def test_the_service_takes_routers_alone(monitored: Rendered):
    (service,) = monitored.of_kind("Service")
    selected = [
        name
        for name, template in monitored.pod_templates.items()
        if service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    ]
    assert selected == ["router"]
    (port,) = service["spec"]["ports"]
    container = monitored.pod_templates["router"]["spec"]["containers"][0]
    assert {"name": port["targetPort"], "containerPort": 8000} in container["ports"]


def test_the_pod_monitor_finds_all_of_rays_pods_and_no_other(rendering: Callable[..., Rendered]):
    rendered = rendering({**ALL, "modelCache": {"type": "pvc"}, "prefetch": {"enabled": True}})
    (monitor,) = rendered.of_kind("PodMonitor")
    selector = monitor["spec"]["selector"]
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    for template in rendered.pod_templates.values():
        assert matches(selector, template["metadata"]["labels"])
        ports = {
            port["name"]: port["containerPort"]
            for port in template["spec"]["containers"][0]["ports"]
        }
        assert ports[endpoint["port"]] == 8080
    for manifest in (*rendered.of_kind("Pod"), *rendered.of_kind("Job")):
        pod = manifest["spec"].get("template", manifest)
        assert not matches(selector, pod["metadata"]["labels"])


# --- alerts -------------------------------------------------------------------------------------


def rules(rendered: Rendered) -> list[Manifest]:
    (found,) = rendered.of_kind("PrometheusRule")
    return [rule for group in found["spec"]["groups"] for rule in group["rules"]]


def series() -> dict[str, Metric]:
    """Every series name that the cluster exports."""
    found = {}
    for metric in METRICS:
        suffixes = ("_bucket", "_count", "_sum") if metric.kind is Kind.HISTOGRAM else ("",)
        found.update({metric.name + suffix: metric for suffix in suffixes})
    return found


def problems_of(expression: str) -> list[str]:
    """Metrics and labels that nothing exports, and counters that are read without a rate."""
    exported, found = series(), []
    known: set[str] = set()
    for read in reads(expression):
        metric = exported.get(read.name)
        if metric is None:
            found.append(f"{read.name} is not exported")
            continue
        labels = {*metric.labels, *MEMBER_LABELS}
        known |= labels | ({"le"} if read.name.endswith("_bucket") else set())
        unknown = set(read.labels) - labels - SCRAPE_LABELS
        found += [f"{read.name} has no label {label}" for label in unknown]
    kept = grouping_labels(expression) - known
    return found + [f"no metric there has a label {label}" for label in kept]


def test_every_alert_reads_what_the_cluster_exports(monitored: Rendered):
    for rule in rules(monitored):
        assert reads(rule["expr"]), rule["alert"]
        assert problems_of(rule["expr"]) == [], rule["alert"]


@pytest.mark.parametrize(
    "expression",
    [
        "paceline_no_such_metric > 1",
        "paceline_ttft_seconds > 1",
        'paceline_requests_total{model="x"} > 1',
        "sum by (tenant) (paceline_running_sequences) > 1",
    ],
)
def test_an_alert_on_what_is_not_there_is_found(expression: str):
    assert problems_of(expression)


def test_every_alert_is_about_this_release(monitored: Rendered):
    for rule in rules(monitored):
        for read in reads(rule["expr"]):
            assert read.labels["namespace"] == NAMESPACE
            assert read.labels["service"] == "paceline"


def test_what_several_routers_tell_is_counted_once(monitored: Rendered):
    """Each of them answers for the whole cluster."""
    once = "max without (pod, instance)"
    for rule in rules(monitored):
        for aggregation in re.findall(r"\b(?:sum|avg)\b[^(]*(?:\([^()]*\) )?\((.*)", rule["expr"]):
            assert aggregation.startswith(once), rule["alert"]


def test_counters_are_read_as_rates(monitored: Rendered):
    for rule in rules(monitored):
        for name in re.findall(r"paceline_\w+(?:_total|_bucket|_count)", rule["expr"]):
            assert re.search(rf"(rate|increase)\({name}\{{", rule["expr"]), rule["alert"]


def test_states_in_alerts_are_states(monitored: Rendered):
    named = [
        read.labels["state"].split("|")
        for rule in rules(monitored)
        for read in reads(rule["expr"])
        if "state" in read.labels
    ]
    assert named
    assert {state for states in named for state in states} <= set(DrafterState)


def test_thresholds_come_from_the_values(rendering: Callable[..., Rendered]):
    limits = {"errorRatio": 0.123, "firstTokenSeconds": 12.5, "waitingSequences": 77}
    rule = {"prometheusRule": {"enabled": True, "thresholds": limits}}
    expressions = " ".join(one["expr"] for one in rules(rendering({"metrics": rule})))
    assert all(f"> {limit}" in expressions for limit in limits.values())


def test_alerts_are_named_once_and_say_what_to_do(monitored: Rendered):
    names = [rule["alert"] for rule in rules(monitored)]
    assert len(set(names)) == len(names) >= 12
    for rule in rules(monitored):
        assert rule["alert"].startswith("Paceline")
        texts = rule["annotations"]
        assert "{{`" not in texts["summary"]
        for label in re.findall(r"\$labels\.(\w+)", texts["summary"]):
            assert label in rule["expr"] or label in MEMBER_LABELS


def test_without_drafters_nothing_is_said_of_them(rendering: Callable[..., Rendered]):
    off: dict[str, Any] = {
        **ALL,
        "applications": {"drafter": {"enabled": False}},
        "workerGroups": {"drafter": None},
    }
    assert not [one for one in rules(rendering(off)) if "rafter" in one["alert"]]


# --- dashboards ---------------------------------------------------------------------------------


def test_a_dashboard_is_carried_as_it_is(helm: Path, tmp_path: Path):
    chart = Path(shutil.copytree(CHART, tmp_path / "paceline"))
    text = json.dumps({"uid": "x", "panels": [{"legendFormat": "{{replica}}"}]}, indent=1) + "\n"
    (chart / "dashboards" / "Of_a_test.json").write_text(text)
    rendered = render(helm, ALL, chart=chart)
    found = rendered.named("ConfigMap", "paceline-dashboard-of-a-test")
    assert found["data"] == {"Of_a_test.json": text}
    assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
    off = render(helm, chart=chart)
    assert not off.of_kind("ConfigMap")
