"""Models that the engine's tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from cluster.config import KVCacheConfig, ModelConfig
from engine.loader import LoadedModel, load_model
from engine.model_runner import ModelRunner
from tests.support.tiny_models import (
    make_tiny_gpt2,
    make_tiny_mistral,
    make_tiny_model,
    make_tiny_qwen3,
)

TINY_MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": make_tiny_model,
    "qwen3": make_tiny_qwen3,
    "gpt2": make_tiny_gpt2,
    "mistral": make_tiny_mistral,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders of the tiny models, by family."""
    root = tmp_path_factory.mktemp("models")
    return {name: make(root / name) for name, make in TINY_MODELS.items()}


@pytest.fixture(scope="session", params=list(TINY_MODELS))
def tiny_folder(request: pytest.FixtureRequest, tiny_folders: dict[str, Path]) -> Path:
    """Each family in turn."""
    return tiny_folders[request.param]


@pytest.fixture(scope="session")
def embedded() -> LoadedModel:
    """The embedded model; the first run ever on a machine converts it (25 s)."""
    return load_model(ModelConfig())


@pytest.fixture(scope="session")
def embedded_runner(embedded: LoadedModel) -> ModelRunner:
    return ModelRunner(embedded, KVCacheConfig(num_blocks=256))


def tiny_runner(
    folder: Path, num_blocks: int = 256, block_size: int = 16, **fields: Any
) -> ModelRunner:
    loaded = load_model(ModelConfig(source=str(folder), dtype="float32", **fields))
    return ModelRunner(loaded, KVCacheConfig(num_blocks=num_blocks, block_size=block_size))
