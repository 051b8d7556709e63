"""Checkpoints of every family that has a spec."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_families import CONFIGS, tiny_families


@pytest.fixture(scope="session")
def family_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By the name of the variant."""
    return dict(tiny_families(tmp_path_factory.mktemp("families")))


@pytest.fixture(scope="session", params=list(CONFIGS))
def family_folder(request: pytest.FixtureRequest, family_folders: dict[str, Path]) -> Path:
    """Each variant in turn."""
    return family_folders[request.param]
