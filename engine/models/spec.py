"""Llama-like decoders as plain numbers: what a family's config says, and nothing else of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch


class Activation(StrEnum):
    """Between the two halves of a gated MLP."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's attention."""

    sliding_window: int | None
    """A row sees this many positions, its own included; None is all."""
    rope: int | None
    """Index in `DecoderSpec.ropes`; None is a layer without rotary embedding."""


@dataclass(frozen=True, slots=True)
class Rope:
    """A rotary embedding over halves: element i turns with element i + head_dim / 2."""

    inv_freq: torch.Tensor
    """[head_dim / 2] float32, radians per position."""
    factor: float
    """Multiplies cosine and sine (yarn); else 1."""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """Pre-norm decoder with rotary grouped-query attention and a gated MLP."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position: int
    """Positions from here on are never asked for."""
    rms_norm_eps: float
    activation: Activation
    attention_scaling: float
    """Of the scores."""
    embedding_scale: float
    """Multiplies the embeddings, rounded to the model's dtype first (Gemma); else 1."""
    layers: tuple[LayerSpec, ...]
    ropes: tuple[Rope, ...]


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Matrices [out_features, in_features] and biases in the model's dtype, norms float32 as they
    multiply (Gemma's one is added). None is absent."""

    attention_norm: torch.Tensor
    qkv: torch.Tensor
    """Rows: all query heads, all key heads, all value heads."""
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    """[head_dim]; of each head, before the rotary embedding."""
    k_norm: torch.Tensor | None
    o: torch.Tensor
    o_bias: torch.Tensor | None
    post_attention_norm: torch.Tensor | None
    """Of the attention's output, before it is added (Gemma 3)."""
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    """Rows: gate, then up."""
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None
    post_mlp_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights of a model."""

    embedding: torch.Tensor
    """[vocab_size, hidden_size]"""
    layers: Sequence[LayerWeights]
    """May be read from the checkpoint one by one: to be gone through once, in order."""
    final_norm: torch.Tensor
    head: torch.Tensor
    """[vocab_size, hidden_size]; the embedding itself where they are tied. Of a drafter that cannot
    say every token it has the rows of those that it can (engine/models/distilled.py)."""
