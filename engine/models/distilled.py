"""Distilled drafters: a few layers in a folder, between ends that are taken from their target.

A folder holds config.json, which names the target, and model.safetensors:

    layers.I.FIELD  a tensor of `LayerWeights`: matrices and biases as floats, or as int8 with one
                    float32 scale a row in layers.I.FIELD.scale; norms as they multiply
    final_norm      as it multiplies
    vocabulary      int32, ascending: the token ids that the drafter can say, which are the rows
                    that its head takes of the target's; absent where it can say all

Embeddings and head are the target's, so a drafter for a model of any vocabulary is small.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import safe_open

from engine.decoder import UnsupportedModelError
from engine.models.families import TensorLayout, tensor_layout
from engine.models.spec import DecoderSpec, DecoderWeights, LayerWeights
from engine.models.weights import ModelEnds

FORMAT = "paceline-drafter"
WEIGHTS_FILE = "model.safetensors"
SCALE_SUFFIX = ".scale"
_NUM_SAMPLED_ROWS = 64


class DrafterDescription(BaseModel):
    """config.json of a distilled drafter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: str = Field(pattern=f"^{FORMAT}$")
    version: int = Field(default=1, ge=1, le=1)
    target: str
    """Hub id, folder, .gguf file, or embedded model, as in `model.source`."""
    target_revision: str | None = None
    target_embeddings: str
    """See `embeddings_identity`."""
    num_layers: int = Field(ge=1)


@dataclass(frozen=True, slots=True)
class DistilledDrafter:
    """A drafter on disk."""

    folder: Path
    description: DrafterDescription


def find_drafter(folder: Path) -> DistilledDrafter | None:
    """The drafter in a folder; None if that holds another kind of model. Raises
    UnsupportedModelError."""
    file = folder / "config.json"
    try:
        content = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError:
        return None  # Whoever reads the folder as a model will say so.
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        return None
    try:
        return DistilledDrafter(folder, DrafterDescription.model_validate(content))
    except ValidationError as error:
        raise UnsupportedModelError(f"{file} describes no drafter that we know: {error}") from error


def embeddings_identity(embedding: torch.Tensor) -> str:
    """Hash of a matrix's shape and of evenly spaced rows as bfloat16; 64 hex digits. What a drafter
    shares with its target, whatever file that comes in.

    embedding  # [vocab_size, hidden_size]
    """
    rows = torch.linspace(0, len(embedding) - 1, _NUM_SAMPLED_ROWS).long()
    values = embedding.cpu()[rows].bfloat16().contiguous()
    digest = hashlib.sha256(f"paceline-embeddings-v1 {list(embedding.shape)}".encode())
    digest.update(values.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def drafter_spec(target: DecoderSpec, num_layers: int) -> DecoderSpec:
    """Of a drafter with so many layers, which attend as the first ones of its target do."""
    return dataclasses.replace(target, layers=target.layers[:num_layers])


@dataclass(frozen=True, slots=True)
class DistilledWeights:
    """A drafter as decoders take it."""

    spec: DecoderSpec
    weights: DecoderWeights
    vocabulary: torch.Tensor | None
    """[rows of the head] int64, ascending; None where that is the target's."""


def read_distilled(
    drafter: DistilledDrafter, target: ModelEnds, target_spec: DecoderSpec, target_config: Any
) -> DistilledWeights:
    """The drafter in the dtype and on the device of its target's ends. Raises
    UnsupportedModelError."""
    description = drafter.description
    if embeddings_identity(target.embedding) != description.target_embeddings:
        raise UnsupportedModelError(
            f"the drafter in {drafter.folder} was distilled from another model than "
            f"{description.target!r} is now: the embeddings differ; run `paceline distill` on that"
        )
    if description.num_layers > len(target_spec.layers):
        raise UnsupportedModelError(
            f"the drafter in {drafter.folder} has {description.num_layers} layers, and its target "
            f"{len(target_spec.layers)}"
        )
    spec = drafter_spec(target_spec, description.num_layers)
    shapes = layer_shapes(spec, tensor_layout(target_config))
    embedding = target.embedding
    file = _DrafterFile(drafter.folder / WEIGHTS_FILE, embedding.dtype, embedding.device)
    vocabulary = file.vocabulary(spec.vocab_size)
    weights = DecoderWeights(
        embedding=embedding,
        layers=[file.layer(index, shapes) for index in range(len(spec.layers))],
        final_norm=file.norm("final_norm", (spec.hidden_size,)),
        head=target.head if vocabulary is None else target.head[vocabulary],
    )
    file.check_nothing_left()
    return DistilledWeights(spec, weights, vocabulary)


def layer_shapes(spec: DecoderSpec, layout: TensorLayout) -> dict[str, tuple[int, ...]]:
    """Of the tensors that a layer of this family has, by the fields of `LayerWeights`."""
    hidden, head = (spec.hidden_size,), (spec.head_dim,)
    q_size = spec.num_heads * spec.head_dim
    qkv_size = q_size + 2 * spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": hidden,
        "qkv": (qkv_size, spec.hidden_size),
        "o": (spec.hidden_size, q_size),
        "mlp_norm": hidden,
        "gate_up": (2 * spec.intermediate_size, spec.hidden_size),
        "down": (spec.hidden_size, spec.intermediate_size),
    }
    if layout.qkv_bias:
        shapes["qkv_bias"] = (qkv_size,)
    if layout.o_bias:
        shapes["o_bias"] = hidden
    if layout.mlp_bias:
        shapes |= {"gate_up_bias": (2 * spec.intermediate_size,), "down_bias": hidden}
    if layout.qk_norm:
        shapes |= {"q_norm": head, "k_norm": head}
    if layout.post_norms:
        shapes |= {"post_attention_norm": hidden, "post_mlp_norm": hidden}
    return shapes


class _DrafterFile:
    """The tensors of a drafter, which are small enough to be read at once."""

    def __init__(self, file: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._file = file
        self._dtype = dtype
        self._device = device
        self._tensors = _tensors(file)
        self._left = set(self._tensors)

    def vocabulary(self, vocab_size: int) -> torch.Tensor | None:
        if "vocabulary" not in self._tensors:
            return None
        vocabulary = self._take("vocabulary")
        if not _is_vocabulary(vocabulary, vocab_size):
            raise self._refusal(
                f"its vocabulary is no list of ascending token ids below {vocab_size}"
            )
        return vocabulary.to(self._device, torch.int64)

    def norm(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self._shaped(name, shape).to(self._device, torch.float32)

    def layer(self, index: int, shapes: Mapping[str, tuple[int, ...]]) -> LayerWeights:
        names = [field.name for field in dataclasses.fields(LayerWeights)]
        tensors = {name: self._layer_tensor(index, name, shapes.get(name)) for name in names}
        return LayerWeights(**tensors)  # type: ignore[arg-type]  # A family has those it must have.

    def check_nothing_left(self) -> None:
        if self._left:
            names = ", ".join(sorted(self._left)[:3])
            raise self._refusal(f"the target's family knows nothing of {names}")

    def _layer_tensor(
        self, index: int, field: str, shape: tuple[int, ...] | None
    ) -> torch.Tensor | None:
        name = f"layers.{index}.{field}"
        if shape is None:
            return None
        if field.endswith("_norm"):
            return self.norm(name, shape)
        tensor = self._shaped(name, shape)
        if tensor.dtype == torch.int8:
            scale = self._shaped(name + SCALE_SUFFIX, shape[:1])
            tensor = tensor.float() * scale[(...,) + (None,) * (len(shape) - 1)]
        return tensor.to(self._device, self._dtype)

    def _shaped(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self._take(name)
        if tuple(tensor.shape) != shape:
            raise self._refusal(f"{name} is {list(tensor.shape)} and must be {list(shape)}")
        return tensor

    def _take(self, name: str) -> torch.Tensor:
        if name not in self._tensors:
            raise self._refusal(f"it has no tensor {name}")
        self._left.discard(name)
        return self._tensors[name]

    def _refusal(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self._file} is no drafter for its target: {reason}")


def _is_vocabulary(values: torch.Tensor, vocab_size: int) -> bool:
    """Whether these are ascending token ids."""
    if values.dim() != 1 or not len(values) or values.is_floating_point():
        return False
    ascends = bool((values.diff() > 0).all())
    return ascends and values[0].item() >= 0 and values[-1].item() < vocab_size


def _tensors(file: Path) -> dict[str, torch.Tensor]:
    """Whoever loads a model has seen that the file is there and whole."""
    with safe_open(file, framework="pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
