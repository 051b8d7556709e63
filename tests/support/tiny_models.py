"""Tiny random float32 models on disk, with everything that the whole system needs to run them.

Weights are drawn wide enough that greedy continuations vary and margins are not tiny.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
_PRINTABLE = [chr(code) for code in range(32, 127)] + ["\n"]


def make_tiny_model(
    folder: Path,
    *,
    seed: int = 0,
    vocab_size: int = 128,
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    intermediate_size: int = 128,
    max_position_embeddings: int = 1024,
) -> Path:
    """A Llama; one character is one token, so any ASCII text can be asked of it."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        max_position_embeddings=max_position_embeddings,
        **_special_ids(),
    )
    return save_model(folder, config, seed)


def make_blurred_model(folder: Path, target: Path, amount: float) -> Path:
    """A draft model: the target's weights with some noise on them."""
    model = AutoModelForCausalLM.from_pretrained(target)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter *= 1 + amount * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    for file in target.glob("tokenizer*"):
        shutil.copy(file, folder)
    return folder


def make_tiny_qwen3(folder: Path, *, seed: int = 0, vocab_size: int = 128) -> Path:
    """Norms on queries and keys, heads wider than hidden_size / num_heads, tied embeddings."""
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        **_special_ids(),
    )
    return save_model(folder, config, seed)


def make_tiny_gpt2(folder: Path, *, seed: int = 0, vocab_size: int = 128) -> Path:
    """Learned positions, biases, Conv1D layers, LayerNorm, no grouped queries."""
    config = GPT2Config(
        vocab_size=vocab_size, n_positions=512, n_embd=64, n_layer=2, n_head=4, **_special_ids()
    )
    return save_model(folder, config, seed)


def make_tiny_mistral(folder: Path, *, seed: int = 0, sliding_window: int = 24) -> Path:
    """Every layer looks back over a window only."""
    config = MistralConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        sliding_window=sliding_window,
        **_special_ids(),
    )
    return save_model(folder, config, seed)


def save_model(folder: Path, config: PreTrainedConfig, seed: int) -> Path:
    """Write a random model of this config with a tokenizer and a chat template."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _widen(model)
    model.save_pretrained(folder)
    save_tokenizer(folder, config.vocab_size)
    return folder


def save_tokenizer(folder: Path, vocab_size: int) -> None:
    """A tokenizer whose first tokens are special, then ASCII characters, then words w0, w1, ..."""
    tokens = [*SPECIAL_TOKENS, *_PRINTABLE][:vocab_size]
    tokens += [f"w{index}" for index in range(vocab_size - len(tokens))]
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=SPECIAL_TOKENS[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {
        "pad_token": SPECIAL_TOKENS[0],
        "bos_token": SPECIAL_TOKENS[1],
        "eos_token": SPECIAL_TOKENS[2],
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(fields), encoding="utf-8")


def _special_ids() -> dict[str, int]:
    return {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}


def _widen(model: PreTrainedModel) -> None:
    """Draw the matrices so that every layer matters and logits are about two units wide."""
    tied = model.config.tie_word_embeddings
    for name, parameter in model.named_parameters():
        if parameter.ndim != 2:
            continue
        is_embedding = "embed" in name or "wte" in name or "wpe" in name
        std = 1.0 if is_embedding and not tied else 2.0 * parameter.shape[1] ** -0.5
        torch.nn.init.normal_(parameter, std=std)
