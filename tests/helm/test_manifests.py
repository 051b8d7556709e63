"""What Kubernetes asks of objects, and a platform team of pods."""

from __future__ import annotations

import copy
import re

import pytest

from tests.helm.chart import Rendered, pod_specs
from tests.helm.pods import KUBERNETES_VERSIONS, builtin_manifests, invalid


def test_every_object_is_valid(rendered: Rendered):
    found = [invalid(one, "1.34") for one in builtin_manifests(rendered)]
    assert [problem for problem in found if problem] == []


@pytest.mark.long
@pytest.mark.parametrize("version", KUBERNETES_VERSIONS)
def test_every_object_is_valid_for_every_kubernetes(rendered: Rendered, version: str):
    found = [invalid(one, version) for one in builtin_manifests(rendered)]
    assert [problem for problem in found if problem] == []


def test_an_invalid_object_is_found(defaults: Rendered):
    for manifest in builtin_manifests(defaults):
        spoiled = copy.deepcopy(manifest)
        spoiled["specc"] = {}
        assert invalid(spoiled, "1.34"), manifest["kind"]
    pod = copy.deepcopy(builtin_manifests(defaults)[-1])
    pod["spec"]["containers"][0]["imagePullPolice"] = "Always"
    assert "imagePullPolice" in (invalid(pod, "1.34") or "")


def test_pods_are_restricted(rendered: Rendered):
    """Pod Security Standards, level restricted, and a read-only root."""
    for name, spec in pod_specs(rendered):
        context = spec["securityContext"]
        assert context["runAsNonRoot"] is True, name
        assert context["runAsUser"] > 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            assert not spec.get(key)
        assert {sysctl["name"] for sysctl in context.get("sysctls", ())} <= SAFE_SYSCTLS
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["readOnlyRootFilesystem"] is True
            assert own["capabilities"]["drop"] == ["ALL"]
            assert "add" not in own["capabilities"]


SAFE_SYSCTLS = {"net.ipv4.ip_local_reserved_ports"}
"""Allowed by the standard since Kubernetes 1.27."""


def test_the_autoscaler_is_restricted_too(defaults: Rendered):
    own = defaults.ray_cluster["autoscalerOptions"]["securityContext"]
    assert own["readOnlyRootFilesystem"] is True
    assert own["capabilities"]["drop"] == ["ALL"]


def test_a_read_only_root_has_places_to_write(rendered: Rendered):
    for name, template in rendered.pod_templates.items():
        spec = template["spec"]
        mounts = {mount["mountPath"]: mount for mount in spec["containers"][0]["volumeMounts"]}
        assert {"/tmp", "/home/paceline", "/dev/shm"} <= set(mounts)
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert set(volumes) == {mount["name"] for mount in mounts.values()}
        shm = volumes[mounts["/dev/shm"]["name"]]["emptyDir"]
        assert shm["medium"] == "Memory"
        assert shm["sizeLimit"]
        environment = {one["name"]: one.get("value") for one in spec["containers"][0]["env"]}
        assert environment["HOME"] == "/home/paceline"
        if name != "head":
            assert environment["PACELINE_CACHE"] in mounts
            assert environment["HF_HOME"].startswith(environment["PACELINE_CACHE"])


def test_only_the_head_may_ask_kubernetes(rendered: Rendered):
    for name, spec in pod_specs(rendered):
        asks = name == "group head" and rendered.ray_cluster["enableInTreeAutoscaling"]
        assert spec["automountServiceAccountToken"] is asks, name
    accounts = {one["metadata"]["name"]: one for one in rendered.of_kind("ServiceAccount")}
    assert {spec["serviceAccountName"] for _, spec in pod_specs(rendered)} == set(accounts)
    assert not rendered.of_kind("Role")
    assert not rendered.of_kind("ClusterRole")


def test_images_are_named_exactly_and_pulled_with_the_secrets(rendering):
    rendered = rendering(
        {
            "imagePullSecrets": [{"name": "registry"}],
            "modelCache": {"type": "pvc"},
            "prefetch": {"enabled": True},
        }
    )
    names = [name for name, _ in pod_specs(rendered)]
    assert any(name.startswith("Job") for name in names)
    assert any(name.startswith("Pod") for name in names)
    for name, spec in pod_specs(rendered):
        assert spec["imagePullSecrets"] == [{"name": "registry"}], name
        for container in spec["containers"]:
            assert re.search(r"(:[\w.-]+|@sha256:[0-9a-f]{64})$", container["image"])
            assert not container["image"].endswith(":latest")


def test_a_digest_goes_before_the_tag(rendering):
    digest = "sha256:" + "0" * 64
    rendered = rendering({"image": {"tag": "1", "digest": digest}})
    images = {spec["containers"][0]["image"] for _, spec in pod_specs(rendered)}
    assert images == {f"paceline@{digest}"}


def test_commands_of_jobs_and_tests_are_in_the_image(rendering):
    rendered = rendering({"modelCache": {"type": "pvc"}, "prefetch": {"enabled": True}})
    for manifest in (*rendered.of_kind("Job"), *rendered.of_kind("Pod")):
        spec = manifest["spec"].get("template", manifest)["spec"]
        assert spec["containers"][0]["command"][0] == "python"
