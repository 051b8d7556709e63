"""`paceline distill`, whole: on a tiny target in the test's process, and on the embedded one."""

from __future__ import annotations

import contextlib
import io
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from cluster.cli import main
from cluster.config import (
    EMBEDDED_MODEL,
    DrafterConfig,
    KVCacheConfig,
    ModelConfig,
)
from cluster.types import GenerationRequest, Member, SamplingParams
from cluster.types import Path as ServingPath
from drafter_service.service import DrafterService
from engine.loader import load_model
from tests.support.generation import running_verifier
from tests.support.tiny_drafter import make_tiny_drafter

MOST_CPU_SECONDS = 180
"""A busy machine takes half as much again as a free one."""
LENGTHS = re.compile(r"^all +(\S+) +(\S+) ", re.MULTILINE)


def distill(target: str, out: Path, *options: str) -> int:
    return main(["distill", "--target", target, "--out", str(out), "--device", "cpu", *options])


def lengths_in(printed: str) -> dict[str, float]:
    """Acceptance lengths over all kinds, by temperature."""
    return {temperature: float(length) for temperature, length in LENGTHS.findall(printed)}


SMALL = ("--layers", "1", "--vocabulary-size", "100")
TRAINED = ("--tokens", "6000", "--passes", "5", *SMALL)
UNTRAINED = ("--tokens", "1", "--passes", "0.01", *SMALL)


@dataclass(frozen=True)
class Distilled:
    """What the command made of the tiny target, and what it printed."""

    folder: Path
    printed: str


@pytest.fixture(scope="module")
def distilled(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Distilled:
    out, printed = tmp_path_factory.mktemp("distilled"), io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert distill(str(target_folder), out, *TRAINED) == 0
    return Distilled(out, printed.getvalue())


def test_it_says_where_it_is_and_what_came_out(distilled: Distilled) -> None:
    for words in ("the target writes", "the drafter learns", f"is in {distilled.folder}"):
        assert words in distilled.printed
    assert list(lengths_in(distilled.printed)) == ["0.0", "0.7", "1.0"]


def test_it_goes_on_where_it_was(
    target_folder: Path, distilled: Distilled, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here that is the end."""
    weights = (distilled.folder / "model.safetensors").read_bytes()
    assert distill(str(target_folder), distilled.folder, *TRAINED) == 0
    printed = capsys.readouterr().out
    assert "the drafter learns" not in printed
    assert "the target writes" not in printed
    assert (distilled.folder / "model.safetensors").read_bytes() == weights
    assert lengths_in(printed) == lengths_in(distilled.printed)


def test_it_learned_something(
    target_folder: Path, distilled: Distilled, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The target's own first layer, hardly trained, is worse."""
    assert distill(str(target_folder), tmp_path / "raw", *UNTRAINED) == 0
    untrained = lengths_in(capsys.readouterr().out)
    trained = lengths_in(distilled.printed)
    assert all(trained[temperature] > untrained[temperature] + 0.05 for temperature in trained)


async def test_a_distilled_drafter_changes_no_output(
    target_folder: Path, distilled: Distilled
) -> None:
    def requests(tag: object) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                request_id=f"{tag}-{index}",
                request_key=1000 + index,
                prompt_ids=tuple(range(3 + index, 20 + 2 * index)),
                sampling=SamplingParams(temperature=(0.0, 0.7, 1.0)[index % 3]),
                max_tokens=200,
                ignore_eos=True,
            )
            for index in range(9)
        ]

    config = DrafterConfig(
        kind="model",
        model=ModelConfig(source=str(distilled.folder), dtype="float32"),
        kv_cache=KVCacheConfig(num_blocks=256),
    )
    async with running_verifier(
        str(target_folder), dtype="float32", draft_deadline_ms=60_000
    ) as verifier:
        plain = await verifier.generate(requests("plain"), path=ServingPath.PLAIN)
        drafter = await DrafterService.start(config, host="127.0.0.1")
        member = Member(drafter.incarnation, drafter.address, model=drafter.name)
        try:
            await verifier.use_drafters(member)
            drafted = await verifier.generate_drafted(requests, min_accepted=20)
        finally:
            await drafter.stop(0.0)
    assert [a.token_ids for a in drafted] == [a.token_ids for a in plain]


# --- what it refuses --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (("--layers", "2"), "num_layers 1, not 2"),
        (("--seed", "7"), "seed 0, not 7"),
        (("--vocabulary-size", "50"), "vocabulary_size 100, not 50"),
    ],
)
def test_a_folder_with_another_distillation(
    target_folder: Path,
    distilled: Distilled,
    capsys: pytest.CaptureFixture[str],
    changed: tuple[str, str],
    words: str,
) -> None:
    options = {"--layers": "1", "--vocabulary-size": "100", "--seed": "0", changed[0]: changed[1]}
    given = [text for option in options.items() for text in option]
    assert distill(str(target_folder), distilled.folder, *given) == 1
    assert words in capsys.readouterr().err


def test_more_layers_than_the_target_has(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert distill(str(target_folder), tmp_path, "--layers", "9") == 1
    assert "the target has 2 only" in capsys.readouterr().err


def test_a_target_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert distill(str(tmp_path / "gone"), tmp_path / "out") == 1
    assert "there is no model" in capsys.readouterr().err


def test_a_target_that_is_a_drafter(
    target_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    drafter = make_tiny_drafter(tmp_path / "drafter", target_folder)
    assert distill(str(drafter), tmp_path / "out") == 1
    assert "--target is the model it drafts for" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--tokens", "--layers", "--vocabulary-size", "--passes"])
def test_a_number_that_is_none(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        distill("x", tmp_path, option, "0")
    assert ended.value.code == 2
    assert option in capsys.readouterr().err


# --- the embedded target ----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.alone
def test_two_minutes_on_the_embedded_target(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that is cut to what a core does in two minutes still learns, and gives a drafter."""
    start_s = time.process_time()
    options = ("--tokens", "4000", "--passes", "2", "--layers", "2", "--vocabulary-size", "4096")
    assert distill(EMBEDDED_MODEL, tmp_path, *options) == 0
    assert time.process_time() - start_s < MOST_CPU_SECONDS
    lengths = lengths_in(capsys.readouterr().out)
    assert min(lengths.values()) > 1.03
    assert load_model(ModelConfig(source=str(tmp_path))).card.vocab_size == 49_152
