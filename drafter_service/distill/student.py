"""The drafter in training: the target's first layers, made trainable, between its own ends."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from drafter_service.distill.lesson import Lesson
from engine.models.distilled import drafter_spec
from engine.models.layers import DecoderLayers, plain_product
from engine.models.spec import DecoderSpec, DecoderWeights, LayerWeights


@dataclass(frozen=True, slots=True)
class Student:
    """A decoder of a target's family over its embeddings, all in float32."""

    spec: DecoderSpec
    weights: DecoderWeights
    """Layers and final norm are trained; embedding and head are the target's and stay as they
    are."""

    def parameters(self) -> dict[str, torch.Tensor]:
        """What is trained, by name."""
        named = {
            f"layers.{index}.{name}": tensor
            for index, layer in enumerate(self.weights.layers)
            for name, tensor in layer_tensors(layer)
        }
        return {**named, "final_norm": self.weights.final_norm}

    @property
    def device(self) -> torch.device:
        return self.weights.embedding.device

    @property
    def vocab_size(self) -> int:
        """Of the target."""
        return len(self.weights.embedding)

    def logits(self, lessons: Sequence[Lesson], vocabulary: torch.Tensor) -> torch.Tensor:
        """Of the tokens of a vocabulary in the place of every token that is to be learned.

        vocabulary  # [draft vocabulary] int64
        returns     # [sum of num_learned, draft vocabulary]
        """
        device = self.device
        lengths = [len(lesson.token_ids) - 1 for lesson in lessons]
        token_ids = torch.cat([lesson.token_ids[:-1] for lesson in lessons]).to(device).long()
        positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
        learned = torch.cat(
            [
                torch.arange(length) >= lesson.num_context - 1
                for length, lesson in zip(lengths, lessons, strict=True)
            ]
        ).to(device)
        # Made anew, since a graph is walked once.
        weights = dataclasses.replace(self.weights, head=self.weights.head[vocabulary])
        layers = DecoderLayers(self.spec, weights, plain_product)
        hidden = layers.hidden(token_ids, positions, _WholeTexts(lengths, device))
        return layers.logits(hidden[learned])


def first_layers(spec: DecoderSpec, target: DecoderWeights, num_layers: int) -> Student:
    """A student that starts as the target's first layers, the only ones that are read. Weights are
    float32."""
    layers = [_trainable(target.layers[index]) for index in range(num_layers)]
    weights = DecoderWeights(
        embedding=target.embedding,
        layers=layers,
        final_norm=target.final_norm.clone().requires_grad_(),
        head=target.head,
    )
    return Student(drafter_spec(spec, num_layers), weights)


def layer_tensors(layer: LayerWeights) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a layer has, by the names of its fields."""
    for field in dataclasses.fields(layer):
        if (tensor := getattr(layer, field.name)) is not None:
            yield field.name, tensor


def _trainable(layer: LayerWeights) -> LayerWeights:
    tensors = {name: tensor.requires_grad_() for name, tensor in layer_tensors(layer)}
    return dataclasses.replace(layer, **tensors)


class _WholeTexts:
    """An AttentionStep over texts of which nothing was computed before, one after the other."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self._num_texts, self._longest = len(lengths), max(lengths)
        places = [
            torch.arange(length) + index * self._longest for index, length in enumerate(lengths)
        ]
        self._places = torch.cat(places).to(device)

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scaling: float,
        sliding_window: int | None,
    ) -> torch.Tensor:
        groups = len(query) // len(key)
        output = functional.scaled_dot_product_attention(
            self._side_by_side(query),
            self._side_by_side(key.repeat_interleave(groups, dim=0)),
            self._side_by_side(value.repeat_interleave(groups, dim=0)),
            attn_mask=self._mask(sliding_window, query.device),
            is_causal=not self._slides(sliding_window),
            scale=scaling,
        )
        return output.transpose(1, 2).flatten(0, 1)[self._places]

    def _side_by_side(self, heads: torch.Tensor) -> torch.Tensor:
        """[num_heads, n, head_dim] -> [num_texts, num_heads, longest, head_dim]"""
        padded = heads.new_zeros(self._num_texts * self._longest, len(heads), heads.shape[-1])
        padded = padded.index_copy(0, self._places, heads.transpose(0, 1))
        texts = padded.view(self._num_texts, self._longest, *padded.shape[1:])
        return texts.transpose(1, 2)

    def _slides(self, window: int | None) -> bool:
        return window is not None and window < self._longest

    def _mask(self, window: int | None, device: torch.device) -> torch.Tensor | None:
        if window is None or not self._slides(window):
            return None
        places = torch.arange(self._longest, device=device)
        distances = places[:, None] - places
        return (distances >= 0) & (distances < window)
