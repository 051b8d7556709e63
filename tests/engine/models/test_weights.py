"""What a checkpoint is read as, and which are refused in which words."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from engine.models.families import decoder_spec
from engine.models.spec import DecoderWeights
from engine.models.weights import UnsupportedWeightsError, read_weights
from tests.support.decoders import CPU, read_model

Tensors = dict[str, torch.Tensor]


def read(folder: Path, dtype: torch.dtype = torch.float32) -> DecoderWeights:
    return read_model(folder, dtype)[1]


def tensors_of(folder: Path) -> Tensors:
    return load_file(folder / "model.safetensors")


def rewritten(source: Path, folder: Path, edit: Callable[[Tensors], None]) -> Path:
    """The checkpoint with its tensors edited."""
    folder.mkdir()
    (folder / "config.json").write_bytes((source / "config.json").read_bytes())
    tensors = tensors_of(source)
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.fixture
def llama(family_folders: dict[str, Path]) -> Path:
    return family_folders["llama-biases-wide-heads"]


def test_parts_lie_below_each_other(llama: Path) -> None:
    tensors, weights = tensors_of(llama), read(llama)
    prefix, layer = "model.layers.1.", weights.layers[1]
    parts = [f"{prefix}self_attn.{part}_proj" for part in "qkv"]
    assert torch.equal(layer.qkv, torch.cat([tensors[f"{part}.weight"] for part in parts]))
    assert layer.qkv_bias is not None
    assert torch.equal(layer.qkv_bias, torch.cat([tensors[f"{part}.bias"] for part in parts]))
    halves = [tensors[f"{prefix}mlp.{part}_proj.weight"] for part in ("gate", "up")]
    assert torch.equal(layer.gate_up, torch.cat(halves))
    assert torch.equal(layer.mlp_norm, tensors[f"{prefix}post_attention_layernorm.weight"])


def test_matrices_are_converted_and_norms_stay_float32(llama: Path) -> None:
    weights = read(llama, torch.bfloat16)
    layer = weights.layers[0]
    for tensor in (weights.embedding, weights.head, layer.qkv, layer.qkv_bias, layer.down_bias):
        assert tensor is not None
        assert tensor.dtype == torch.bfloat16
    assert weights.final_norm.dtype == layer.attention_norm.dtype == torch.float32


def test_what_is_read_does_not_need_the_file_any_more(llama: Path, tmp_path: Path) -> None:
    folder = rewritten(llama, tmp_path / "model", lambda tensors: None)
    weights = read(folder)
    layers = list(weights.layers)
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        opened.write(bytes(file.stat().st_size))
    assert torch.equal(weights.embedding, read(llama).embedding)
    for got, want in zip(layers, read(llama).layers, strict=True):
        assert torch.equal(got.qkv, want.qkv)


def test_gemmas_one_is_added(family_folders: dict[str, Path]) -> None:
    folder = family_folders["gemma3"]
    tensors, layer = tensors_of(folder), read(folder).layers[0]
    for norm, name in (
        (layer.attention_norm, "input_layernorm"),
        (layer.q_norm, "self_attn.q_norm"),
        (layer.post_attention_norm, "post_attention_layernorm"),
        (layer.mlp_norm, "pre_feedforward_layernorm"),
        (layer.post_mlp_norm, "post_feedforward_layernorm"),
    ):
        assert norm is not None
        assert torch.equal(norm, 1.0 + tensors[f"model.layers.0.{name}.weight"])


def test_parts_of_a_sharded_checkpoint_are_found(llama: Path, tmp_path: Path) -> None:
    tensors = tensors_of(llama)
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    files = {name: f"model-{index % 3}.safetensors" for index, name in enumerate(tensors)}
    for file in set(files.values()):
        part = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        save_file(part, tmp_path / file)
    index = {"metadata": {}, "weight_map": files}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    got, want = read(tmp_path), read(llama)
    assert torch.equal(got.embedding, want.embedding)
    assert torch.equal(got.layers[1].gate_up, want.layers[1].gate_up)


# --- the head ---------------------------------------------------------------------------------


def test_a_tied_head_is_the_embedding(family_folders: dict[str, Path], tmp_path: Path) -> None:
    tied = family_folders["qwen2"]
    weights = read(tied)
    assert weights.head is weights.embedding

    def copy_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    weights = read(rewritten(tied, tmp_path / "copied", copy_head))
    assert weights.head is weights.embedding


def test_a_head_that_differs_is_not_tied(family_folders: dict[str, Path], tmp_path: Path) -> None:
    def other_head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0

    weights = read(rewritten(family_folders["qwen2"], tmp_path / "other", other_head))
    assert torch.equal(weights.head, weights.embedding + 1.0)


def test_an_absent_head_is_the_embedding(family_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = rewritten(family_folders["llama"], tmp_path / "m", lambda t: t.pop("lm_head.weight"))
    weights = read(folder)
    assert weights.head is weights.embedding


# --- what is refused --------------------------------------------------------------------------

_DOWN = "model.layers.1.mlp.down_proj.weight"
_EXTRA = "model.layers.2.mlp.down_proj.weight"


REFUSALS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda tensors: tensors.pop(_DOWN), f"has no tensor {_DOWN}"),
    "left over": (lambda tensors: tensors.update({_EXTRA: torch.ones(2)}), _EXTRA),
    "shape": (
        lambda tensors: tensors.update({_DOWN: torch.ones(3, 5)}),
        f"{_DOWN} is [3, 5] in the checkpoint and [64, 96] in the config",
    ),
    "integers": (
        lambda tensors: tensors.update({_DOWN: torch.ones(64, 96, dtype=torch.int8)}),
        f"{_DOWN} is torch.int8, not a float",
    ),
    "many left over": (
        lambda tensors: tensors.update({f"x.{i}": torch.ones(1) for i in range(5)}),
        "x.0, x.1, x.2 and 2 more",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_tensor_that_does_not_fit_is_named(name: str, llama: Path, tmp_path: Path) -> None:
    edit, words = REFUSALS[name]
    folder = rewritten(llama, tmp_path / "model", lambda tensors: (edit(tensors), None)[1])
    with pytest.raises(UnsupportedWeightsError) as refusal:
        list(read(folder).layers)
    assert words in str(refusal.value)


def test_old_rotary_buffers_are_ignored(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    folder = rewritten(llama, tmp_path / "m", lambda t: t.update({name: torch.ones(16)}))
    assert torch.equal(read(folder).embedding, read(llama).embedding)


def test_a_folder_without_weights_is_refused(llama: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(llama)
    with pytest.raises(UnsupportedWeightsError, match=r"no model\.safetensors and no index"):
        read_weights(tmp_path, decoder_spec(config), config, torch.float32, CPU)
