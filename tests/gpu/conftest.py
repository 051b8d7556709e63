"""Checks that need a GPU: make test-gpu. They need neither Ray nor a network nor a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import models


@pytest.fixture(scope="session")
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no GPU")
    return torch.device("cuda")


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="session")
def large(device: torch.device, checkpoints: Path) -> Path:
    """An 8B of which there are 8 layers, bfloat16."""
    return models.write_checkpoint(checkpoints / "large", models.llama_8b(num_layers=8), device)


@pytest.fixture(scope="session")
def small(device: torch.device, checkpoints: Path) -> Path:
    """A whole 0.6B, bfloat16."""
    return models.write_checkpoint(checkpoints / "small", models.qwen3_06b(), device)


@pytest.fixture(scope="session", params=["llama", "qwen3"])
def shallow(request: pytest.FixtureRequest, device: torch.device, checkpoints: Path) -> Path:
    """Two layers of real size and a small vocabulary, so that a CPU can follow."""
    make = {"llama": models.llama_8b, "qwen3": models.qwen3_06b}[request.param]
    config = make(num_layers=2, vocab_size=4096)
    return models.write_checkpoint(checkpoints / f"shallow-{request.param}", config, device)
