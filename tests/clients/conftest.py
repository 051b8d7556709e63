"""The model that clients talk to."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One character is one token."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=4096)
