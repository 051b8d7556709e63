"""The engine's benchmark measures what it says it does."""

from __future__ import annotations

import pytest

from benchmarks.engine import PHASES, timed_phases
from benchmarks.measuring import generate, short_prompts
from cluster.config import KVCacheConfig, ModelConfig
from engine.loader import load_model
from engine.model_runner import ModelRunner
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
    config = ModelConfig(source=str(folder), dtype="float32")
    return ModelRunner(load_model(config), KVCacheConfig(num_blocks=256))


def test_every_decoding_step_is_counted(runner: ModelRunner) -> None:
    steps = generate(runner, short_prompts(runner, 3), 16)
    assert steps.num_decoding == 15, "a step too many or too few would be a wrong speed"
    assert steps.tokens_per_s == pytest.approx(3 * 15 / steps.seconds)


def test_the_phases_are_parts_of_the_step(runner: ModelRunner) -> None:
    with timed_phases() as clock:
        steps = generate(runner, short_prompts(runner, 3), 16, clock=clock)
    assert all(steps.phase_s(phase) > 0 for phase in PHASES), "a phase was never entered"
    assert sum(map(steps.phase_s, PHASES)) < steps.seconds, "phases overlap"


def test_nothing_stays_wrapped(runner: ModelRunner) -> None:
    functions = [getattr(owner, name) for owner, name in PHASES.values()]
    with timed_phases() as clock:
        pass
    generate(runner, short_prompts(runner, 1), 2)
    assert [getattr(owner, name) for owner, name in PHASES.values()] == functions
    assert not any(clock.values())
