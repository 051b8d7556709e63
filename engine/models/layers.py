"""The maths of a decoder in few torch operations, for whatever multiplies and attends.

Everything here works row by row: on a CPU a row's bits do not depend on how many rows there are.
Products and attention, where shape may decide bits, are given. Norms, the rotary embedding and the
activation are computed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.nn import functional

from engine.attention import AttentionStep
from engine.models.spec import Activation, DecoderSpec, DecoderWeights, LayerWeights, Rope

Product = Callable[[torch.Tensor], torch.Tensor]
"""[n, in_features] -> [n, out_features]"""
MakeProduct = Callable[[torch.Tensor, torch.Tensor | None], Product]
"""From a matrix [out_features, in_features] and a bias."""
Angles = tuple[torch.Tensor, torch.Tensor]
"""Cosine, and sine with the sign of the rotation; each [n, 1, head_dim] float32."""

_GELU_TANH_SCALE = (2.0 / torch.pi) ** 0.5


@dataclass(frozen=True, slots=True)
class RowKernels:
    """What is done to each row between products; a compiler may fuse each of them."""

    norm: Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]
    normed_rotated: Callable[
        [torch.Tensor, torch.Tensor | None, float, Angles | None], torch.Tensor
    ]
    gated: Callable[[torch.Tensor, Activation], torch.Tensor]


def rms_norm(rows: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[n, size] times weight [size] over its root mean square, in the dtype of the rows."""
    return functional.rms_norm(rows.float(), weight.shape, weight, eps).to(rows.dtype)


def norm_and_rotate(
    heads: torch.Tensor, weight: torch.Tensor | None, eps: float, angles: Angles | None
) -> torch.Tensor:
    """Queries and keys before attention.

    heads   # [n, num_heads, head_dim]
    weight  # [num_heads, head_dim] of the norm of each head; None is no norm
    angles  # of the rows' positions; None is no rotary embedding
    """
    turned = heads.float()
    if weight is not None:
        turned = functional.rms_norm(turned, weight.shape[1:], None, eps) * weight
    if angles is not None:
        cosine, sine = angles
        turned = turned * cosine + torch.roll(turned, turned.shape[-1] // 2, -1) * sine
    return turned.to(heads.dtype)


def gate(gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
    """[n, 2 * size] -> [n, size]: the activated first half times the second.

    Written out, because torch's own kernels compute the last elements of a tensor on another path,
    whose last bits differ: they would depend on the number of rows where size is odd enough.
    """
    gates, ups = gate_up.chunk(2, dim=-1)
    x = gates.float()
    if activation is Activation.SILU:
        activated = x / (1.0 + torch.exp(-x))
    else:
        inner = torch.tanh(_GELU_TANH_SCALE * (x + 0.044715 * (x * x * x)))
        activated = 0.5 * x * (1.0 + inner)
    return (activated * ups).to(gate_up.dtype)


def plain_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    """The library's own product, whatever it does with a number of rows."""
    return lambda rows: functional.linear(rows, weight, bias)


EAGER = RowKernels(rms_norm, norm_and_rotate, gate)


def rope_angles(rope: Rope, positions: torch.Tensor) -> Angles:
    """Angles of rows at positions [n]."""
    angles = positions[:, None].float() * rope.inv_freq
    cosine, sine = torch.cos(angles) * rope.factor, torch.sin(angles) * rope.factor
    both = torch.cat([cosine, cosine], dim=-1), torch.cat([-sine, sine], dim=-1)
    return both[0].unsqueeze(1), both[1].unsqueeze(1)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's weights as they are used."""

    attention_norm: torch.Tensor
    qkv: Product
    qk_norm: torch.Tensor | None
    o: Product
    post_attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: Product
    down: Product
    post_mlp_norm: torch.Tensor | None


class DecoderLayers:
    """All layers of a model and its head."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        make_product: MakeProduct,
        kernels: RowKernels = EAGER,
    ) -> None:
        self.spec = spec
        self.dtype = weights.embedding.dtype
        self.device = weights.embedding.device
        self._kernels = kernels
        self._embedding = weights.embedding
        # Rounded to the model's dtype, as Gemma was trained; see transformers' embed_scale.
        self._embedding_scale = torch.tensor(
            spec.embedding_scale, dtype=self.dtype, device=self.device
        )
        self._ropes = [Rope(rope.inv_freq.to(self.device), rope.factor) for rope in spec.ropes]
        self._layers = [_layer(spec, layer, make_product) for layer in weights.layers]
        self._final_norm = weights.final_norm
        self._head = make_product(weights.head, None)

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep
    ) -> torch.Tensor:
        """Of rows [n] after the last layer, [n, hidden_size]."""
        hidden = functional.embedding(token_ids, self._embedding)
        if self.spec.embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        angles = [rope_angles(rope, positions) for rope in self._ropes]
        for index, layer in enumerate(self._layers):
            hidden = hidden + self._attention(index, layer, hidden, angles, step)
            hidden = hidden + self._mlp(layer, hidden)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, hidden_size] -> [n, vocab_size] float32."""
        return self._head(self._norm(hidden, self._final_norm)).float()

    def _attention(
        self,
        index: int,
        layer: _Layer,
        hidden: torch.Tensor,
        angles: list[Angles],
        step: AttentionStep,
    ) -> torch.Tensor:
        spec, of_layer = self.spec, self.spec.layers[index]
        num_turned = spec.num_heads + spec.num_kv_heads
        qkv = layer.qkv(self._norm(hidden, layer.attention_norm))
        qkv = qkv.view(len(hidden), -1, spec.head_dim)
        turned = self._kernels.normed_rotated(
            qkv[:, :num_turned],
            layer.qk_norm,
            spec.rms_norm_eps,
            None if of_layer.rope is None else angles[of_layer.rope],
        )
        output = step.attend(
            index,
            turned[:, : spec.num_heads].transpose(0, 1),
            turned[:, spec.num_heads :].transpose(0, 1),
            qkv[:, num_turned:].transpose(0, 1),
            spec.attention_scaling,
            of_layer.sliding_window,
        )
        return self._post_norm(layer.o(output.flatten(1)), layer.post_attention_norm)

    def _mlp(self, layer: _Layer, hidden: torch.Tensor) -> torch.Tensor:
        gate_up = layer.gate_up(self._norm(hidden, layer.mlp_norm))
        gated = self._kernels.gated(gate_up, self.spec.activation)
        return self._post_norm(layer.down(gated), layer.post_mlp_norm)

    def _norm(self, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self._kernels.norm(rows, weight, self.spec.rms_norm_eps)

    def _post_norm(self, rows: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        return rows if weight is None else self._norm(rows, weight)


def _layer(spec: DecoderSpec, weights: LayerWeights, make_product: MakeProduct) -> _Layer:
    return _Layer(
        attention_norm=weights.attention_norm,
        qkv=make_product(weights.qkv, weights.qkv_bias),
        qk_norm=_qk_norm(spec, weights),
        o=make_product(weights.o, weights.o_bias),
        post_attention_norm=weights.post_attention_norm,
        mlp_norm=weights.mlp_norm,
        gate_up=make_product(weights.gate_up, weights.gate_up_bias),
        down=make_product(weights.down, weights.down_bias),
        post_mlp_norm=weights.post_mlp_norm,
    )


def _qk_norm(spec: DecoderSpec, weights: LayerWeights) -> torch.Tensor | None:
    """[num_heads + num_kv_heads, head_dim]: queries' and keys' norms, head by head."""
    if weights.q_norm is None or weights.k_norm is None:
        return None
    heads = [weights.q_norm] * spec.num_heads + [weights.k_norm] * spec.num_kv_heads
    return torch.stack(heads)
