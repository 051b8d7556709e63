"""A release lives: install, test, upgrade, rollback, uninstall, by a real helm against an API
server that checks every object."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest

from tests.helm.chart import CHART, NAMESPACE, RELEASE, Manifest, helm
from tests.helm.fake_kubernetes import FakeKubernetes
from tests.helm.kuberay_rules import problems
from tests.helm.operator_schemas import KINDS, schema_of
from tests.helm.pods import invalid
from tests.helm.rayservice_schema import RAY_SERVICE

GENERATED = {"paceline-api-keys", "paceline-member-token", "paceline-ray-token"}
TRIAL = CHART / "values-cpu-trial.yaml"
GKE = CHART / "values-gpu-gke.yaml"


def reason_against(manifest: Manifest) -> str | None:
    """Why the API server, or the controller of its kind, would refuse an object."""
    kind = manifest["kind"]
    if kind == "RayService":
        errors = [
            error.message
            for error in jsonschema.Draft202012Validator(RAY_SERVICE).iter_errors(manifest)
        ]
        return "; ".join(errors or problems(manifest)) or None
    if kind in KINDS:
        schema = jsonschema.Draft202012Validator(schema_of(manifest))
        return "; ".join(error.message for error in schema.iter_errors(manifest)) or None
    return invalid(manifest, "1.34")


class Cluster:
    """The fake API server and helm pointed at it."""

    def __init__(self, binary: Path, api: FakeKubernetes, folder: Path) -> None:
        self.api = api
        self._binary = binary
        self._environment = {
            "KUBECONFIG": str(api.write_kubeconfig(folder / "kubeconfig")),
            "HOME": str(folder),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return helm(self._binary, *arguments, "--namespace", NAMESPACE, **self._environment)

    def succeed(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def secrets(self) -> dict[str, Manifest]:
        """Without helm's own."""
        found = self.api.named("Secret")
        return {name: one for name, one in found.items() if not name.startswith("sh.helm.")}

    def service(self) -> Manifest:
        return self.api.named("RayService")["paceline"]


@pytest.fixture
def cluster(each_helm: Path, tmp_path: Path) -> Iterator[Cluster]:
    with FakeKubernetes(reason_against) as api:
        yield Cluster(each_helm, api, tmp_path)


@pytest.fixture
def new_cluster(helm: Path, tmp_path: Path) -> Iterator[Cluster]:
    """With the newest helm alone."""
    with FakeKubernetes(reason_against) as api:
        yield Cluster(helm, api, tmp_path)


def test_a_release_from_install_to_uninstall(cluster: Cluster):
    notes = cluster.succeed("install", RELEASE, str(CHART), "--values", str(TRIAL))
    assert "helm test paceline --namespace serving" in notes
    assert "WARNING" not in notes
    assert set(cluster.secrets()) == GENERATED
    made = cluster.secrets()

    tested = cluster.succeed("test", RELEASE)
    assert tested.count("Phase:          Succeeded") == 4
    assert not cluster.api.named("Pod")  # Removed, since they succeeded.

    first = cluster.service()["spec"]
    cluster.succeed(
        *("upgrade", RELEASE, str(CHART), "--values", str(TRIAL)),
        *("--set", "applications.router.args.path_policy.mode=off", "--set-string", "image.tag=2"),
    )
    second = cluster.service()["spec"]
    assert '"mode": "off"' in second["serveConfigV2"]
    assert "paceline:2" in str(second["rayClusterConfig"])
    assert {name: one["data"] for name, one in cluster.secrets().items()} == {
        name: one["data"] for name, one in made.items()
    }

    cluster.succeed("rollback", RELEASE, "1")
    assert cluster.service()["spec"] == first
    assert len(cluster.succeed("history", RELEASE).strip().split("\n")) == 1 + 3

    cluster.succeed("uninstall", RELEASE)
    left = {(collection.kind, name) for collection, name in cluster.api.store.objects}
    assert left == {("Secret", name) for name in GENERATED}

    cluster.succeed("install", RELEASE, str(CHART), "--values", str(TRIAL))
    assert {name: one["data"] for name, one in cluster.secrets().items()} == {
        name: one["data"] for name, one in made.items()
    }


@pytest.mark.long
def test_a_release_with_everything(cluster: Cluster):
    flags = ("--values", str(GKE))
    cluster.succeed("install", RELEASE, str(CHART), *flags)
    assert set(cluster.api.named("Job"))
    assert len(cluster.api.named("Certificate")) == 4
    jobs = set(cluster.api.named("Job"))
    model = "applications.drafter.args.model.source=Qwen/Qwen3-1.7B"
    cluster.succeed("upgrade", RELEASE, str(CHART), *flags, "--set", model)
    assert len(cluster.api.named("Job")) == 1
    assert set(cluster.api.named("Job")) != jobs  # A Job cannot be changed, so this is another one.
    cluster.succeed("uninstall", RELEASE)
    left = {(collection.kind, name) for collection, name in cluster.api.store.objects}
    kept = {("Secret", name) for name in GENERATED}
    assert left == kept | {("PersistentVolumeClaim", "paceline-model-cache")}


def test_what_the_api_server_refuses_fails_the_upgrade(new_cluster: Cluster):
    cluster = new_cluster
    cluster.succeed("install", RELEASE, str(CHART), "--values", str(TRIAL))
    bad = "extraObjects[0].spec.minAvailableX=1"
    done = cluster.run(
        *("upgrade", RELEASE, str(CHART), "--values", str(TRIAL)),
        *("--set", "extraObjects[0].apiVersion=policy/v1"),
        *("--set", "extraObjects[0].kind=PodDisruptionBudget"),
        *("--set", "extraObjects[0].metadata.name=bad", "--set", bad),
    )
    assert done.returncode != 0
    assert "minAvailableX" in done.stderr
    assert "failed" in cluster.succeed("history", RELEASE)
    cluster.succeed("rollback", RELEASE, "1")
