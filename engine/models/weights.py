"""Reads a checkpoint of safetensors straight into the shapes that decoders multiply with.

No model of transformers is made. Files are mapped, copied tensor by tensor into their final place,
and let go after each layer, so that at most a layer is held twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import torch
from safetensors import safe_open

from engine.models.families import TensorLayout, tensor_layout
from engine.models.spec import DecoderSpec, DecoderWeights, LayerWeights

_EMBEDDING = "model.embed_tokens.weight"
_FINAL_NORM = "model.norm.weight"
_HEAD = "lm_head.weight"
_IGNORED_SUFFIX = "rotary_emb.inv_freq"
"""A buffer that old checkpoints carry; the config says the same."""
_FLOATS = frozenset({torch.float32, torch.float16, torch.bfloat16})


class UnsupportedWeightsError(ValueError):
    """The checkpoint is not what its config asks for; the message names the tensor."""


def read_weights(
    folder: Path, spec: DecoderSpec, config: Any, dtype: torch.dtype, device: torch.device
) -> DecoderWeights:
    """All weights of the checkpoint in `folder`, matrices and biases in `dtype`; the layers are
    read when they are asked for.

    The head is the embedding where the checkpoint has no other, and where `config` ties the two and
    they are equal; transformers does the same. Raises UnsupportedWeightsError for a tensor that is
    missing, left over, of a wrong shape or no float.
    """
    checkpoint = _Checkpoint(folder, dtype, device)
    reader = _Reader(checkpoint, spec, tensor_layout(config))
    ends = _read_ends(checkpoint, reader, config)
    layers = _Layers(checkpoint, reader, len(spec.layers))
    return DecoderWeights(ends.embedding, layers, ends.final_norm, ends.head)


@dataclass(frozen=True, slots=True)
class ModelEnds:
    """What is before and after the layers, as in `DecoderWeights`."""

    embedding: torch.Tensor
    final_norm: torch.Tensor
    head: torch.Tensor


def read_ends(
    folder: Path, spec: DecoderSpec, config: Any, dtype: torch.dtype, device: torch.device
) -> ModelEnds:
    """The ends of the checkpoint in `folder`, without its layers; see `read_weights`."""
    checkpoint = _Checkpoint(folder, dtype, device)
    return _read_ends(checkpoint, _Reader(checkpoint, spec, tensor_layout(config)), config)


def _read_ends(checkpoint: _Checkpoint, reader: _Reader, config: Any) -> ModelEnds:
    with checkpoint.mapped():
        embedding = reader.vocabulary_matrix(_EMBEDDING)
        final_norm = reader.norm(_FINAL_NORM, reader.hidden_size)
        head = reader.head(embedding, tied=bool(config.tie_word_embeddings))
    return ModelEnds(embedding, final_norm, head)


def weight_files(folder: Path) -> list[Path]:
    """The files of a checkpoint: model.safetensors, or those that the index names."""
    single = folder / "model.safetensors"
    if single.is_file():
        return [single]
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        raise UnsupportedWeightsError(f"{folder} holds no model.safetensors and no index of parts")
    parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    return [folder / part for part in sorted(parts)]


class _Checkpoint:
    """Tensors by name. Remembers which ones were read."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype = dtype
        self.device = device
        self._file_of = {name: file for file in weight_files(folder) for name in _names(file)}
        self._left = {name for name in self._file_of if not name.endswith(_IGNORED_SUFFIX)}
        self._stack = ExitStack()
        self._open: dict[Path, Any] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    @contextmanager
    def mapped(self) -> Iterator[None]:
        """Files that are read within stay mapped until its end."""
        with ExitStack() as self._stack:
            yield
            self._open.clear()

    def read(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        """A view of the mapped file."""
        if name not in self._file_of:
            raise UnsupportedWeightsError(f"the checkpoint has no tensor {name}")
        tensor: torch.Tensor = self._file(self._file_of[name]).get_tensor(name)
        if tuple(tensor.shape) != tuple(shape):
            raise UnsupportedWeightsError(
                f"{name} is {list(tensor.shape)} in the checkpoint and {list(shape)} in the config"
            )
        if tensor.dtype not in _FLOATS:
            raise UnsupportedWeightsError(f"{name} is {tensor.dtype}, not a float of 16 or 32 bits")
        self._left.discard(name)
        return tensor

    def check_nothing_left(self) -> None:
        if self._left:
            names = sorted(self._left)
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UnsupportedWeightsError(
                f"the checkpoint has tensors that the config knows nothing of: "
                f"{', '.join(names[:3])}{more}"
            )

    def _file(self, file: Path) -> Any:
        if file not in self._open:
            self._open[file] = self._stack.enter_context(safe_open(file, framework="pt"))
        return self._open[file]


class _Layers(Sequence[LayerWeights]):
    """Layers that are read anew each time, so that one may be packed before the next is there."""

    def __init__(self, checkpoint: _Checkpoint, reader: _Reader, num_layers: int) -> None:
        self._checkpoint = checkpoint
        self._reader = reader
        self._num_layers = num_layers
        self._unread = set(range(num_layers))

    def __len__(self) -> int:
        return self._num_layers

    @overload
    def __getitem__(self, index: int) -> LayerWeights: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerWeights]: ...
    def __getitem__(self, index: int | slice) -> LayerWeights | Sequence[LayerWeights]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        with self._checkpoint.mapped():
            layer = self._reader.layer(f"model.layers.{index}.")
        self._unread.discard(index)
        if not self._unread:
            self._checkpoint.check_nothing_left()
        return layer


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


class _Reader:
    """The parts of a model, by the names that Llama gave them."""

    def __init__(self, checkpoint: _Checkpoint, spec: DecoderSpec, layout: TensorLayout) -> None:
        self._checkpoint = checkpoint
        self._spec = spec
        self._layout = layout

    def matrix(self, names: Sequence[str], rows: Sequence[int], columns: int) -> torch.Tensor:
        """Matrices [rows, columns] one below the other."""
        return self._stacked(names, [(num_rows, columns) for num_rows in rows])

    def norm(self, name: str, size: int) -> torch.Tensor:
        weight = self._checkpoint.read(name, (size,)).to(self._checkpoint.device, torch.float32)
        return weight + self._layout.norm_offset

    @property
    def hidden_size(self) -> int:
        return self._spec.hidden_size

    def vocabulary_matrix(self, name: str) -> torch.Tensor:
        """[vocab_size, hidden_size]"""
        return self.matrix((name,), (self._spec.vocab_size,), self._spec.hidden_size)

    def head(self, embedding: torch.Tensor, *, tied: bool) -> torch.Tensor:
        if _HEAD not in self._checkpoint:
            return embedding
        head = self.vocabulary_matrix(_HEAD)
        return embedding if tied and torch.equal(head, embedding) else head

    def layer(self, prefix: str) -> LayerWeights:
        spec, layout = self._spec, self._layout
        attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
        q_size, kv_size = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        qkv = [f"{attention}{part}_proj" for part in "qkv"]
        gate_up = [f"{mlp}gate_proj", f"{mlp}up_proj"]
        hidden = (spec.hidden_size,)
        qkv_rows, gate_up_rows = (q_size, kv_size, kv_size), (spec.intermediate_size,) * 2
        return LayerWeights(
            attention_norm=self.norm(f"{prefix}input_layernorm.weight", spec.hidden_size),
            qkv=self._weight(qkv, qkv_rows, spec.hidden_size),
            qkv_bias=self._bias(qkv, qkv_rows, layout.qkv_bias),
            q_norm=self._head_norm(f"{attention}q_norm.weight"),
            k_norm=self._head_norm(f"{attention}k_norm.weight"),
            o=self._weight([f"{attention}o_proj"], hidden, q_size),
            o_bias=self._bias([f"{attention}o_proj"], hidden, layout.o_bias),
            gate_up=self._weight(gate_up, gate_up_rows, spec.hidden_size),
            gate_up_bias=self._bias(gate_up, gate_up_rows, layout.mlp_bias),
            down=self._weight([f"{mlp}down_proj"], hidden, spec.intermediate_size),
            down_bias=self._bias([f"{mlp}down_proj"], hidden, layout.mlp_bias),
            **self._inner_norms(prefix),
        )

    def _inner_norms(self, prefix: str) -> dict[str, Any]:
        """Llama names the MLP's norm for the attention before it, Gemma 3 names it for the MLP."""
        size, after_attention = self._spec.hidden_size, f"{prefix}post_attention_layernorm.weight"
        if not self._layout.post_norms:
            return {
                "post_attention_norm": None,
                "mlp_norm": self.norm(after_attention, size),
                "post_mlp_norm": None,
            }
        return {
            "post_attention_norm": self.norm(after_attention, size),
            "mlp_norm": self.norm(f"{prefix}pre_feedforward_layernorm.weight", size),
            "post_mlp_norm": self.norm(f"{prefix}post_feedforward_layernorm.weight", size),
        }

    def _head_norm(self, name: str) -> torch.Tensor | None:
        return self.norm(name, self._spec.head_dim) if self._layout.qk_norm else None

    def _weight(self, layers: Sequence[str], rows: Sequence[int], columns: int) -> torch.Tensor:
        return self.matrix([f"{layer}.weight" for layer in layers], rows, columns)

    def _bias(
        self, layers: Sequence[str], sizes: Sequence[int], present: bool
    ) -> torch.Tensor | None:
        names = [f"{layer}.bias" for layer in layers]
        return self._stacked(names, [(size,) for size in sizes]) if present else None

    def _stacked(self, names: Sequence[str], shapes: Sequence[Sequence[int]]) -> torch.Tensor:
        """Tensors one after the other, copied into one of the model's dtype."""
        num_rows = sum(shape[0] for shape in shapes)
        stacked = torch.empty(
            num_rows, *shapes[0][1:], dtype=self._checkpoint.dtype, device=self._checkpoint.device
        )
        parts = torch.split(stacked, [shape[0] for shape in shapes])
        for part, name, shape in zip(parts, names, shapes, strict=True):
            part.copy_(self._checkpoint.read(name, shape))
        return stacked
