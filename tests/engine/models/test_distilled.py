"""Distilled drafters: read as they were written, and refused if they are not for their target."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from cluster.config import EMBEDDED_DRAFTER, EMBEDDED_MODEL, ModelConfig
from engine.decoder import UnsupportedModelError
from engine.loader import load_model
from engine.models.distilled import WEIGHTS_FILE
from engine.native.native_linear import has_int8
from tests.support.decoders import feed, pieces_of, pool_blocks, random_ids, read_model
from tests.support.tiny_drafter import make_tiny_drafter, untrained_student
from tests.support.tiny_families import CONFIGS, save_random_model
from tests.support.tiny_models import make_tiny_gpt2, make_tiny_model

VOCABULARY = [*range(2, 128, 3)]
TOKENS = random_ids(1, 50)
MOST_BYTES = 16 * 2**20


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("distilled") / "target", num_layers=3)


@pytest.fixture
def drafter(target: Path, tmp_path: Path) -> Path:
    """One that a test may spoil."""
    return make_tiny_drafter(tmp_path / "drafter", target, vocabulary=VOCABULARY)


def logits_of(folder: Path, implementation: str = "native") -> torch.Tensor:
    """After each of TOKENS, [50, vocab]."""
    config = ModelConfig(source=str(folder), dtype="float32", implementation=implementation)  # type: ignore[arg-type]
    decoder = load_model(config).decoder
    assert decoder.name == implementation
    decoder.allocate(pool_blocks(len(TOKENS)), 16)
    return feed(decoder, [TOKENS], pieces_of(20, 1))[0]


# --- what it computes -------------------------------------------------------------------------


def test_with_all_its_layers_it_is_its_target(target: Path, tmp_path: Path) -> None:
    """But for the rounding to int8."""
    drafter = make_tiny_drafter(tmp_path / "all", target, num_layers=3)
    theirs, ours = logits_of(target), logits_of(drafter)
    assert (theirs.argmax(-1) == ours.argmax(-1)).float().mean() > 0.9
    assert (theirs - ours).abs().mean() < 0.05 * theirs.abs().mean()


@pytest.mark.parametrize(("dtype", "is_int8"), [("bfloat16", True), ("float32", False)])
def test_in_bfloat16_it_multiplies_with_int8_and_its_target_does_not(
    target: Path, drafter: Path, dtype: str, is_int8: bool
) -> None:
    def kernels(folder: Path) -> str:
        config = ModelConfig(source=str(folder), dtype=dtype, implementation="native")
        return load_model(config).decoder.kernel_class

    assert kernels(drafter).endswith("-int8") == (is_int8 and has_int8())
    assert not kernels(target).endswith("-int8")


@pytest.mark.parametrize("implementation", ["native", "torch"])
def test_a_smaller_vocabulary_leaves_the_other_logits_as_they_are(
    target: Path, drafter: Path, tmp_path: Path, implementation: str
) -> None:
    ours = logits_of(drafter, implementation)
    full = logits_of(make_tiny_drafter(tmp_path / "full", target), implementation)
    assert ours.shape == full.shape == (len(TOKENS), 128)
    assert torch.equal(ours[:, VOCABULARY], full[:, VOCABULARY])
    others = [token_id for token_id in range(128) if token_id not in VOCABULARY]
    assert (ours[:, others] == -torch.inf).all()


@pytest.mark.parametrize("implementation", ["native", "torch"])
@pytest.mark.parametrize("family", list(CONFIGS))
def test_every_family(family: str, implementation: str, tmp_path: Path) -> None:
    """With all layers of its target and no rounding it gives the same bits."""
    target = save_random_model(tmp_path / "target", CONFIGS[family]())
    num_layers = len(read_model(target)[0].layers)
    drafter = make_tiny_drafter(tmp_path / "drafter", target, num_layers=num_layers)
    as_they_are = untrained_student(target, num_layers).parameters()
    save_file(as_they_are, drafter / WEIGHTS_FILE)
    ours, theirs = (logits_of(folder, implementation) for folder in (drafter, target))
    assert torch.equal(ours, theirs)


def test_floats_are_read_as_they_are(target: Path, drafter: Path) -> None:
    """A file may hold matrices that are not quantised."""
    file = drafter / WEIGHTS_FILE
    quantised = logits_of(drafter)
    tensors = load_file(file)
    for name in [name for name in tensors if name.endswith(".scale")]:
        scale, matrix = tensors.pop(name), name.removesuffix(".scale")
        tensors[matrix] = tensors[matrix].float() * scale[:, None]
    save_file(tensors, file)
    assert torch.equal(logits_of(drafter), quantised)


def test_its_card_is_its_targets(target: Path, drafter: Path) -> None:
    ours, theirs = (load_model(ModelConfig(source=str(f))).card for f in (drafter, target))
    assert ours.name == "drafter"
    assert ours.fingerprint != theirs.fingerprint
    for field in ("vocabulary", "vocab_size", "tokenizer_json", "eos_token_ids", "max_model_len"):
        assert getattr(ours, field) == getattr(theirs, field)


# --- what is refused --------------------------------------------------------------------------


def refused(folder: Path, words: str, implementation: str = "auto") -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        load_model(ModelConfig(source=str(folder), implementation=implementation))  # type: ignore[arg-type]


def describe(drafter: Path, **fields: object) -> None:
    file = drafter / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_another_target(drafter: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=5)
    describe(drafter, target=str(other))
    refused(drafter, "distilled from another model")


def test_a_target_that_is_gone(drafter: Path, tmp_path: Path) -> None:
    describe(drafter, target=str(tmp_path / "gone"))
    refused(drafter, "there is no model")


def test_a_target_that_is_a_drafter(drafter: Path, target: Path, tmp_path: Path) -> None:
    other = make_tiny_drafter(tmp_path / "other", target)
    describe(drafter, target=str(other))
    refused(drafter, "a drafter itself")


def test_a_target_of_an_unknown_family(drafter: Path, tmp_path: Path) -> None:
    describe(drafter, target=str(make_tiny_gpt2(tmp_path / "gpt2")))
    refused(drafter, "gpt2: no spec is known")


def test_more_layers_than_the_target(drafter: Path) -> None:
    describe(drafter, num_layers=4)
    refused(drafter, "has 4 layers, and its target 3")


def test_more_layers_than_the_file(drafter: Path) -> None:
    describe(drafter, num_layers=2)
    refused(drafter, "has no tensor layers.1")


@pytest.mark.parametrize("fields", [{"version": 2}, {"num_layers": 0}, {"surprise": 1}])
def test_a_description_of_another_version(drafter: Path, fields: dict[str, object]) -> None:
    describe(drafter, **fields)
    refused(drafter, f"no drafter that we know(.|\n)*{next(iter(fields))}")


def test_transformers_does_not_run_it(drafter: Path) -> None:
    refused(drafter, "does not run in transformers' modules", implementation="transformers")


def without(name: str) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (without("final_norm"), "has no tensor final_norm"),
        (without("layers.0.qkv.scale"), "has no tensor layers.0.qkv.scale"),
        (with_tensor("layers.0.o", torch.zeros(64, 32)), r"layers.0.o is \[64, 32\] and must be"),
        (with_tensor("layers.0.qkv_bias", torch.zeros(128)), "knows nothing of layers.0.qkv_bias"),
        (with_tensor("vocabulary", torch.tensor([5, 4])), "no list of ascending token ids"),
        (with_tensor("vocabulary", torch.tensor([5, 128])), "ascending token ids below 128"),
        (with_tensor("vocabulary", torch.tensor([-1, 5])), "ascending token ids below 128"),
        (with_tensor("vocabulary", torch.empty(0, dtype=torch.int32)), "no list of ascending"),
        (with_tensor("vocabulary", torch.tensor([[5, 6]])), "no list of ascending"),
        (with_tensor("vocabulary", torch.tensor([0.5, 6.0])), "no list of ascending"),
    ],
)
def test_a_file_that_is_not_what_it_says(
    drafter: Path, spoil: Callable[[dict[str, torch.Tensor]], object], words: str
) -> None:
    file = drafter / WEIGHTS_FILE
    tensors = load_file(file)
    spoil(tensors)
    save_file(tensors, file)
    refused(drafter, words)


def test_a_file_that_ends_early(drafter: Path) -> None:
    file = drafter / WEIGHTS_FILE
    file.write_bytes(file.read_bytes()[:-1000])
    refused(drafter, "is damaged")


def test_no_file(drafter: Path) -> None:
    (drafter / WEIGHTS_FILE).unlink()
    refused(drafter, "holds no .safetensors weights")


# --- the embedded one -------------------------------------------------------------------------


def test_the_embedded_drafter_fits_its_target() -> None:
    drafter = load_model(ModelConfig(source=EMBEDDED_DRAFTER)).card
    target = load_model(ModelConfig(source=EMBEDDED_MODEL)).card
    assert (drafter.name, drafter.vocabulary) == ("smollm2-135m-drafter", target.vocabulary)


def test_the_embedded_drafter_is_small() -> None:
    from engine.embedded import EMBEDDED_DRAFTER_FOLDER

    assert sum(f.stat().st_size for f in EMBEDDED_DRAFTER_FOLDER.iterdir()) <= MOST_BYTES
