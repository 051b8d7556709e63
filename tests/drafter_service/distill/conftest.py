"""A tiny target, and what it teaches."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from cluster.config import KVCacheConfig, ModelConfig
from drafter_service.distill.course import Course, Limits
from drafter_service.distill.dialogue import Dialogue
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.teacher import Teacher
from engine.loader import load_model
from engine.model_runner import ModelRunner
from tests.support.tiny_models import make_tiny_model

LIMITS = Limits(max_prompt_tokens=24, max_answer_tokens=32)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target") / "tiny", num_layers=2)


@pytest.fixture(scope="session")
def runner(target_folder: Path) -> ModelRunner:
    return run(target_folder)


@pytest.fixture(scope="session")
def dialogue(runner: ModelRunner) -> Dialogue:
    return Dialogue(runner.card)


@pytest.fixture(scope="session")
def lessons(runner: ModelRunner, dialogue: Dialogue) -> list[Lesson]:
    """Of one part."""
    return Course(Teacher(runner, 64), dialogue, 0, LIMITS).part(0)


def run(folder: Path) -> ModelRunner:
    """In float32, with a small pool."""
    loaded = load_model(ModelConfig(source=str(folder), dtype="float32"))
    return ModelRunner(loaded, KVCacheConfig(num_blocks=1024))


def same(one: Lesson, other: Lesson) -> bool:
    """Bit for bit."""
    return (
        one.num_context == other.num_context
        and torch.equal(one.token_ids, other.token_ids)
        and torch.equal(one.top_ids, other.top_ids)
        and torch.equal(one.top_log_probs, other.top_log_probs)
    )
