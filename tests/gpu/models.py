"""Random checkpoints of the shapes of real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, PreTrainedConfig, Qwen3Config
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from tests.support.tiny_models import save_tokenizer

TOKENIZER_SIZE = 128
"""Ids beyond it are rows that a padded model has and no text needs."""


def qwen3_06b(num_layers: int = 28, vocab_size: int = 151_936) -> PreTrainedConfig:
    """Qwen3-0.6B."""
    return Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=num_layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )


def llama_8b(num_layers: int = 32, vocab_size: int = 128_256) -> PreTrainedConfig:
    """Llama-3.1-8B."""
    rope: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=num_layers,
        num_attention_heads=32,
        num_key_value_heads=8,
        max_position_embeddings=131_072,
        rms_norm_eps=1e-5,
        rope_parameters=rope,
    )


@torch.no_grad()
def write_checkpoint(
    folder: Path,
    config: PreTrainedConfig,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> Path:
    """Drawn on the device, wide enough that continuations vary."""
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            scaled = "embed" not in name or config.tie_word_embeddings
            parameter.normal_(std=2.0 * parameter.shape[1] ** -0.5 if scaled else 1.0)
    model.save_pretrained(folder)
    save_tokenizer(folder, TOKENIZER_SIZE)
    return folder
