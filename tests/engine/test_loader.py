"""What the loader accepts, what it refuses and in which words, and what the card says."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from transformers import (
    BertConfig,
    MambaConfig,
    PreTrainedConfig,
    Qwen3NextConfig,
    T5Config,
)

from cluster.config import ModelConfig
from cluster.fingerprint import vocabulary_fingerprint
from cluster.types import ModelCard
from engine.linear import has_matrix_units
from engine.loader import LoadedModel, UnsupportedModelError, load_model
from tests.support.tiny_models import CHAT_TEMPLATE, make_tiny_model, save_tokenizer


def card_of(folder: Path, **fields: Any) -> ModelCard:
    return load_model(ModelConfig(source=str(folder), dtype="float32", **fields)).card


def edit_json(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, **fields}))


@pytest.fixture
def llama(tiny_folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy that a test may spoil."""
    return Path(shutil.copytree(tiny_folders["llama"], tmp_path / "llama"))


def refused(folder: Path, words: str, **fields: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        card_of(folder, **fields)


# --- the card ---------------------------------------------------------------------------------


def test_card_of_a_folder(llama: Path) -> None:
    card = card_of(llama)
    assert (card.name, card.vocab_size, card.max_model_len) == ("llama", 128, 1024)
    assert card.eos_token_ids == (2,)
    assert (card.bos_token, card.eos_token, card.pad_token) == ("<bos>", "<eos>", "<pad>")
    assert card.chat_template == CHAT_TEMPLATE
    assert card.tokenizer_json == (llama / "tokenizer.json").read_text()
    assert card.vocabulary == vocabulary_fingerprint(card.tokenizer_json, card.eos_token_ids)


def test_card_of_the_embedded_model(embedded: LoadedModel) -> None:
    card = embedded.card
    assert (card.name, card.vocab_size) == ("smollm2-135m-instruct", 49_152)
    assert (card.max_model_len, card.eos_token_ids, card.eos_token) == (8192, (2,), "<|im_end|>")
    assert "<|im_start|>" in card.chat_template
    fastest = "torch" if has_matrix_units() else "native"
    assert card.decoder == embedded.decoder.name == fastest


def test_name_and_window_can_be_set(llama: Path) -> None:
    card = card_of(llama, name="mine", max_model_len=100)
    assert (card.name, card.max_model_len) == ("mine", 100)
    refused(llama, "window of 1024", max_model_len=1025)


@pytest.mark.parametrize(
    ("of_model", "of_generation", "expected"),
    [(2, [5, 7], (2, 5, 7)), (None, None, ()), ([9, 2], 2, (2, 9)), (None, 3, (3,))],
)
def test_end_of_sequence_is_the_union_of_both_configs(
    llama: Path, of_model: Any, of_generation: Any, expected: tuple[int, ...]
) -> None:
    edit_json(llama / "config.json", eos_token_id=of_model)
    edit_json(llama / "generation_config.json", eos_token_id=of_generation)
    assert card_of(llama).eos_token_ids == expected


def test_chat_template_may_be_a_file_a_list_or_absent(llama: Path) -> None:
    tokenizer_config = llama / "tokenizer_config.json"
    templates = [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]
    edit_json(tokenizer_config, chat_template=templates)
    assert card_of(llama).chat_template == "D"
    (llama / "chat_template.jinja").write_text("J")
    assert card_of(llama).chat_template == "J"
    (llama / "chat_template.jinja").unlink()
    tokenizer_config.unlink()
    card = card_of(llama)
    assert (card.chat_template, card.bos_token) == ("", "")


def test_special_tokens_may_be_objects(llama: Path) -> None:
    edit_json(llama / "tokenizer_config.json", bos_token={"content": "<bos>", "special": True})
    assert card_of(llama).bos_token == "<bos>"


# --- the fingerprint --------------------------------------------------------------------------


def test_fingerprint_is_a_function_of_what_the_output_depends_on(
    llama: Path, tmp_path: Path
) -> None:
    card = card_of(llama)
    moved = Path(shutil.copytree(llama, tmp_path / "elsewhere" / "copy"))
    assert card_of(moved).fingerprint == card.fingerprint
    assert replace(card_of(moved), name="llama") == card

    other_weights = make_tiny_model(tmp_path / "other", seed=1)
    bfloat16 = load_model(ModelConfig(source=str(llama), dtype="bfloat16")).card
    edit_json(moved / "config.json", rms_norm_eps=1e-3)
    save_tokenizer(llama, 127)
    cards = [card, card_of(other_weights), bfloat16, card_of(moved), card_of(llama)]
    assert len({c.fingerprint for c in cards}) == len(cards)
    assert len({c.vocabulary for c in cards[:4]}) == 1


# --- refusals ---------------------------------------------------------------------------------


def folder_of(config: PreTrainedConfig, architecture: str, folder: Path) -> Path:
    """A folder that claims this config; its weights are never reached."""
    config.architectures = [architecture]
    config.save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_pickled_weights_are_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    refused(llama, "Pickled weights")


def test_another_version_of_the_grammar_library_is_another_model(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its masks shape the output, so no request moves between the two."""
    before = card_of(llama).fingerprint
    assert card_of(llama).fingerprint == before
    monkeypatch.setattr(metadata, "version", lambda name: "0.0")
    assert card_of(llama).fingerprint != before


def test_hybrids_are_refused(tmp_path: Path) -> None:
    hybrid = folder_of(Qwen3NextConfig(), "Qwen3NextForCausalLM", tmp_path / "hybrid")
    refused(hybrid, "linear_attention.*state that is not attention")


def test_state_space_models_are_refused(tmp_path: Path) -> None:
    config = MambaConfig(vocab_size=128, hidden_size=32, num_hidden_layers=1, state_size=4)
    from transformers import MambaForCausalLM

    MambaForCausalLM(config).save_pretrained(tmp_path)
    refused(tmp_path, "state that is not attention")


@pytest.mark.parametrize(
    ("config", "architecture"),
    [(BertConfig(), "BertForMaskedLM"), (T5Config(), "T5ForConditionalGeneration")],
)
def test_models_without_a_causal_head_are_refused(
    config: PreTrainedConfig, architecture: str, tmp_path: Path
) -> None:
    refused(folder_of(config, architecture, tmp_path / "model"), "no causal language model head")


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_rotary_embeddings_that_look_at_the_whole_step_are_refused(
    rope_type: str, llama: Path
) -> None:
    rope: dict[str, Any] = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    edit_json(llama / "config.json", rope_parameters=rope)
    refused(llama, "depends on other tokens of the step")


def test_quantised_weights_are_refused(llama: Path) -> None:
    edit_json(llama / "config.json", quantization_config={"quant_method": "fp8"})
    refused(llama, "quantised")


def test_code_that_comes_with_a_model_is_never_run(llama: Path) -> None:
    (llama / "evil.py").write_text("raise SystemExit('ran')")
    edit_json(
        llama / "config.json",
        model_type="evil",
        auto_map={"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M"},
    )
    refused(llama, "transformers cannot read it")


def test_a_missing_tokenizer_or_model_is_told(llama: Path, tmp_path: Path) -> None:
    (llama / "tokenizer.json").unlink()
    refused(llama, "no tokenizer.json")
    refused(tmp_path / "nothing", "there is no model")
    refused(tmp_path / "nothing.gguf", "there is no file")
    with pytest.raises(UnsupportedModelError, match="there is no model"):
        load_model(ModelConfig(source="embedded:unknown"))
