"""The profile of a verifier's steps: kept over starts, measured anew where it no longer holds."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from cluster.commands.command_error import CommandError
from cluster.config import KVCacheConfig, ModelConfig
from engine.loader import load_model
from engine.model_runner import ModelRunner
from tests.support.tiny_models import make_tiny_model
from verifier_service import step_profile
from verifier_service.profile_command import add_command, plot, table
from verifier_service.step_profile import kept_profile, prompt_share, step_sizes

SPOILED = ("[]", '{"1": 0}', '{"1": "x"}', '{"1": 2.0}')
SPOILED_FILES = (
    '{"1": 2.0}',
    *(f'{{"ms": {ms}, "context_ms": 0, "prompt_share": 1}}' for ms in SPOILED),
    '{"ms": {"1": 1.0}, "context_ms": 0, "prompt_share": 0}',
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"), max_position_embeddings=400)


@pytest.fixture(scope="module")
def runner(folder) -> ModelRunner:
    config = ModelConfig(source=str(folder), dtype="float32")
    return ModelRunner(load_model(config), KVCacheConfig(num_blocks=30))


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path))
    return tmp_path / "profiles"


def test_a_second_start_reads_what_the_first_measured(runner, cache, monkeypatch) -> None:
    measured = kept_profile(runner, 1)
    assert sorted(measured.ms) == step_sizes(runner)
    [file] = cache.iterdir()
    monkeypatch.setattr(step_profile, "step_ms", lambda runner, num_tokens: measured.ms[1])
    assert kept_profile(runner, 1) == measured
    assert list(cache.iterdir()) == [file]


def test_a_size_takes_what_its_forwards_take_for_the_most_part(runner, monkeypatch) -> None:
    took_ms = iter((40.0, 9.0, 10.0, 11.0, 10.0))
    monkeypatch.setattr(step_profile, "_forward_ms", lambda *_: next(took_ms))
    assert step_profile.step_ms(runner, 1) == 10.0


def test_a_profile_that_no_longer_holds_is_measured_anew(runner, cache, monkeypatch) -> None:
    kept_profile(runner, 1)
    monkeypatch.setattr(step_profile, "step_ms", by_rows_and_context)
    profile = kept_profile(runner, 1)
    assert profile.ms[8] == 908.0
    assert profile.context_ms == pytest.approx(0.01)
    [file] = cache.iterdir()
    assert json.loads(file.read_text())["ms"]["8"] == 908.0


def by_rows_and_context(
    runner: ModelRunner, num_tokens: int, context_len: int = 0, num_logits: int | None = None
) -> float:
    return 900.0 + num_tokens * (1 + 0.01 * context_len)


@pytest.mark.parametrize(
    ("read_ms", "share"), [(64.0, 0.5), (128.0, 1.0), (900.0, 1.0), (0.5, 1 / 128)]
)
def test_a_prompts_token_costs_what_a_forward_without_its_logits_takes(
    runner, monkeypatch, read_ms, share
) -> None:
    asked = []

    def forward_ms(_runner, num_tokens, context_len, num_logits):
        asked.append((num_tokens, context_len, num_logits))
        return read_ms

    monkeypatch.setattr(step_profile, "_forward_ms", forward_ms)
    assert prompt_share(runner, {1: 1.0, 128: 128.0}) == share
    assert set(asked) == {(128, 0, 1)}


def test_other_threads_are_another_profile(runner, cache) -> None:
    kept_profile(runner, 1)
    kept_profile(runner, 2)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", "null", *SPOILED_FILES],
)
def test_a_spoiled_file_is_as_good_as_none(runner, cache, text: str) -> None:
    kept_profile(runner, 1)
    [file] = cache.iterdir()
    file.write_text(text)
    assert sorted(kept_profile(runner, 1).ms) == step_sizes(runner)


def test_a_folder_that_cannot_be_written_costs_only_the_time(runner, tmp_path, monkeypatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "file"))
    assert sorted(kept_profile(runner, 1).ms) == step_sizes(runner)


def test_the_pool_is_as_it_was(runner, cache) -> None:
    before = runner.kv.num_used_blocks
    kept_profile(runner, 1)
    assert runner.kv.num_used_blocks == before == 0


# --- the command --------------------------------------------------------------------------------


def run(*arguments: str) -> bool:
    parser = argparse.ArgumentParser()
    add_command(parser.add_subparsers())
    parsed = parser.parse_args(["profile", *arguments])
    return bool(parsed.command(parsed))


def test_the_command_measures_by_tokens_and_by_context(folder, tmp_path, capsys) -> None:
    out = tmp_path / "profile.json"
    assert run("--model", str(folder), "--dtype", "float32", "--out", str(out))
    report = json.loads(out.read_text())
    assert report["dtype"] == "float32"
    assert set(report["step_ms"]) == {"0", "256"}
    assert set(report["step_ms"]["0"]) > set(report["step_ms"]["256"]) - {"128"}
    assert all(ms > 0 for of in report["step_ms"].values() for ms in of.values())
    assert report["knee_tokens"] >= 1
    assert 0 < report["prompt_share"] <= 1
    shown = capsys.readouterr().out
    assert "knee" in shown
    assert str(out) in shown


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "./nowhere", "--out", "x.json"], "no model"),
        (["--model", "M", "--out", "/nowhere/x.json"], "no folder /nowhere"),
        (["--model", "M", "--device", "tpu9000", "--out", "x.json"], "use cpu or cuda"),
        (["--model", "M", "--dtype", "int3", "--out", "x.json"], "--dtype"),
        (["--model", "M", "--num-threads", "0", "--out", "x.json"], "--num-threads"),
    ],
)
def test_what_is_wrong_is_said(arguments: list[str], words: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=words):
        run(*arguments)


def test_the_plot_shows_the_knee_and_what_a_token_costs() -> None:
    lines = plot({1: 10.0, 8: 10.5, 16: 20.0})
    assert [line for line in lines if "< knee" in line] == [lines[3]]
    assert lines[2].split()[:2] == ["1", "100%"]
    assert lines[4].count("#") == 50
    assert table({0: {1: 10.0, 8: 10.5}, 256: {1: 11.0}})[-1].split() == ["8", "10.50"]
