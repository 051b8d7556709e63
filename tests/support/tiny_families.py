"""A tiny random float32 checkpoint of every family that has a spec, in all of its variants.

Norms and biases are drawn too, so that a decoder which leaves one out, or adds it in the wrong
place, gives other logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.support.tiny_models import save_tokenizer

WINDOW = 24
"""Of the sliding layers; prompts of tests are longer."""
VOCAB_SIZE = 128

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def _rope(rope_type: str, **fields: Any) -> dict[str, Any]:
    return {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 4.0, **fields}


_LLAMA3 = _rope(
    "llama3", low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64
)
_YARN = _rope("yarn", original_max_position_embeddings=64, factor=8.0)
_MIXED_LAYERS = ["full_attention", "sliding_attention"]

CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SIZES),
    "llama-tied-linear": lambda: LlamaConfig(
        **_SIZES | {"tie_word_embeddings": True, "rope_parameters": _rope("linear")}
    ),
    "llama-llama3": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_LLAMA3)),
    "llama-yarn": lambda: LlamaConfig(**_SIZES, rope_parameters=dict(_YARN)),
    "llama-biases-wide-heads": lambda: LlamaConfig(
        **_SIZES, attention_bias=True, mlp_bias=True, head_dim=32
    ),
    "llama-one-kv-head-odd-mlp": lambda: LlamaConfig(
        **_SIZES | {"num_key_value_heads": 1, "intermediate_size": 77}
    ),
    "llama-no-groups": lambda: LlamaConfig(**_SIZES | {"num_key_value_heads": 4}),
    "smollm3": lambda: SmolLM3Config(
        **_SIZES | {"tie_word_embeddings": True},
        no_rope_layers=[1, 0],
        use_sliding_window=True,
        sliding_window=WINDOW,
    ),
    "qwen2": lambda: Qwen2Config(**_SIZES | {"tie_word_embeddings": True}),
    "qwen2-sliding": lambda: Qwen2Config(
        **_SIZES, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": lambda: Qwen3Config(**_SIZES | {"tie_word_embeddings": True}, head_dim=32),
    "qwen3-biases-sliding": lambda: Qwen3Config(
        **_SIZES,
        head_dim=16,
        attention_bias=True,
        use_sliding_window=True,
        sliding_window=WINDOW,
        layer_types=_MIXED_LAYERS,
    ),
    "mistral": lambda: MistralConfig(**_SIZES, sliding_window=WINDOW),
    "mistral-wide-heads": lambda: MistralConfig(**_SIZES, sliding_window=None, head_dim=24),
    "gemma": lambda: GemmaConfig(**_SIZES | {"tie_word_embeddings": True}, head_dim=32),
    "gemma3": lambda: Gemma3TextConfig(
        **_SIZES | {"num_hidden_layers": 3},
        head_dim=32,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        query_pre_attn_scalar=24,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1_000.0},
            "full_attention": _rope("linear"),
        },
    ),
}
"""Configs by the name of the variant."""


def tiny_families(root: Path) -> Iterator[tuple[str, Path]]:
    """Write every variant under `root`; its name and its folder."""
    for name, make_config in CONFIGS.items():
        yield name, save_random_model(root / name, make_config())


def save_random_model(folder: Path, config: PreTrainedConfig, *, seed: int = 0) -> Path:
    """A checkpoint with a tokenizer, every parameter drawn."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw(model)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def _draw(model: PreTrainedModel) -> None:
    """Every layer matters, and logits are about two units wide."""
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            parameter.data += 0.3 * torch.randn_like(parameter)
            continue
        scaled = "embed" not in name or tied
        torch.nn.init.normal_(parameter, std=2.0 * parameter.shape[1] ** -0.5 if scaled else 1.0)
