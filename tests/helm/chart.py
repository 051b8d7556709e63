"""The chart, rendered by a real helm."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "helm"
VALUES_FILES = sorted(CHART.glob("values-*.yaml"))
RELEASE = "paceline"
NAMESPACE = "serving"
ROLES = ("router", "verifier", "drafter")

Manifest = dict[str, Any]


class RenderError(Exception):
    """helm refused; the message is its own."""


@dataclass(frozen=True)
class Rendered:
    """What a release would consist of."""

    text: str

    @cached_property
    def manifests(self) -> list[Manifest]:
        loaded = yaml.load_all(self.text, Loader=yaml.CSafeLoader)
        return [manifest for manifest in loaded if manifest]

    def of_kind(self, kind: str) -> list[Manifest]:
        return [manifest for manifest in self.manifests if manifest["kind"] == kind]

    def named(self, kind: str, name: str) -> Manifest:
        (found,) = (one for one in self.of_kind(kind) if one["metadata"]["name"] == name)
        return found

    @property
    def ray_service(self) -> Manifest:
        (found,) = self.of_kind("RayService")
        return found

    @property
    def ray_cluster(self) -> Manifest:
        cluster: Manifest = self.ray_service["spec"]["rayClusterConfig"]
        return cluster

    @property
    def serve_config(self) -> Manifest:
        config: Manifest = yaml.safe_load(self.ray_service["spec"]["serveConfigV2"])
        return config

    @property
    def groups(self) -> dict[str, Manifest]:
        return {group["groupName"]: group for group in self.ray_cluster["workerGroupSpecs"]}

    @property
    def pod_templates(self) -> dict[str, Manifest]:
        """Of Ray, by group; the head's under "head"."""
        workers = {name: group["template"] for name, group in self.groups.items()}
        return {"head": self.ray_cluster["headGroupSpec"]["template"], **workers}


def helm(binary: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run helm, without looking at how it ends."""
    return subprocess.run(
        [str(binary), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={"HOME": tempfile.gettempdir(), "PATH": "/usr/bin:/bin", **environment},
    )


def value_flags(files: Sequence[Path], values: Mapping[str, Any] | None, folder: Path) -> list[str]:
    """Flags for values files, and for values that are given here, which go last."""
    flags = [flag for file in files for flag in ("--values", str(file))]
    if values is not None:
        own = folder / "values.yaml"
        own.write_text(yaml.safe_dump(dict(values)))
        flags += ["--values", str(own)]
    return flags


def render(
    binary: Path,
    values: Mapping[str, Any] | None = None,
    *,
    files: Sequence[Path] = (),
    chart: Path = CHART,
    release: str = RELEASE,
    more: Sequence[str] = (),
) -> Rendered:
    """Render the chart with values files, then `values`. Raises RenderError."""
    with tempfile.TemporaryDirectory() as folder:
        flags = [*value_flags(files, values, Path(folder)), *more]
        command = ["template", release, str(chart), "--namespace", NAMESPACE, *flags]
        return _rendered(binary, command)


@lru_cache
def render_file(binary: Path, file: Path | None) -> Rendered:
    """The chart with one of its own values files, or with none."""
    return render(binary, files=[file] if file else [])


def _rendered(binary: Path, command: Sequence[str]) -> Rendered:
    done = helm(binary, *command)
    if done.returncode:
        raise RenderError(done.stderr)
    return Rendered(done.stdout)


def pod_specs(rendered: Rendered) -> list[tuple[str, Manifest]]:
    """(what it is of, spec) of every pod that the release brings about."""
    found = [(f"group {name}", pod["spec"]) for name, pod in rendered.pod_templates.items()]
    for manifest in rendered.manifests:
        name = f"{manifest['kind']} {manifest['metadata']['name']}"
        if manifest["kind"] == "Job":
            found.append((name, manifest["spec"]["template"]["spec"]))
        elif manifest["kind"] == "Pod":
            found.append((name, manifest["spec"]))
    return found
