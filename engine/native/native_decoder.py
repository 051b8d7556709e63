"""The decoder of a CPU: the whole step is one call into kernels of ours (kernels/).

A row's bits do not depend on what else is in the step, by construction: see kernels/decoder.cpp.
The GIL is free while a step runs.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence

import torch

from engine.decoder import SequenceSlice
from engine.int8 import quantized
from engine.models.spec import Activation, DecoderSpec, DecoderWeights, LayerWeights
from engine.native.build import native_library
from engine.native.native_linear import DTYPES, has_int8
from engine.native.packing import filled_up, pack, padded
from engine.native.structures import ELEMENT_TYPES, Layer, Matrix, Model, Span, Step


class NativeDecoder:
    """A Decoder; see engine/decoder.py."""

    name = "native"
    device = torch.device("cpu")

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        dtype: torch.dtype,
        num_threads: int,
        *,
        int8: bool = False,
    ) -> None:
        """Packs the weights. With `int8` the matrices become the nearest int8, where this CPU has
        kernels for that: half as many bytes come from memory as of bfloat16. Raises
        NativeUnavailableError where there are no kernels at all."""
        assert dtype in DTYPES
        self._library, machine_code = native_library()
        int8 = int8 and has_int8()
        self.kernel_class = f"native-{machine_code}" + int8 * "-int8"
        self._library.paceline_workspace_floats.restype = ctypes.c_int64
        self._spec = spec
        self._dtype = dtype
        self._int8 = int8
        self._num_logits = len(weights.head)
        self._panel_width: int = self._library.paceline_panel_width()
        self._slot_group: int = self._library.paceline_slot_group()
        self._kept: list[torch.Tensor] = []
        """Owns the memory that the structures point to."""
        self._pool: list[torch.Tensor] = []
        """Keys and values of each layer, [num_blocks, bytes of a block]."""
        self._layers = (Layer * len(spec.layers))()
        self._rotations = [self._rotation(index) for index in range(len(spec.ropes))]
        for index, layer in enumerate(weights.layers):
            self._fill_layer(index, layer)
        self._model = Model(
            weight_type=ELEMENT_TYPES[torch.int8 if int8 else dtype],
            type=ELEMENT_TYPES[dtype],
            num_layers=len(spec.layers),
            hidden=spec.hidden_size,
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            intermediate=spec.intermediate_size,
            is_gelu=spec.activation is Activation.GELU_TANH,
            num_threads=num_threads,
            eps=spec.rms_norm_eps,
            attention_scaling=spec.attention_scaling,
            # In the model's dtype, as transformers multiplies.
            embedding_scale=float(torch.tensor(spec.embedding_scale, dtype=dtype)),
            layers=self._layers,
            final_norm=self._norm(weights.final_norm),
            head=self._matrix(weights.head),
        )
        if int8 or weights.head is not weights.embedding:
            self._model.embedding = self._keep(weights.embedding.contiguous())

    # --- memory --------------------------------------------------------------------------------

    def block_bytes(self, block_size: int) -> int:
        return len(self._spec.layers) * sum(self._layer_block_bytes(block_size))

    def allocate(self, num_blocks: int, block_size: int) -> None:
        assert not self._model.block_size, "the pool is made once"
        self._model.block_size = block_size
        key_bytes, value_bytes = self._layer_block_bytes(block_size)
        for layer in self._layers:
            keys = torch.zeros(num_blocks, key_bytes, dtype=torch.uint8)
            values = torch.zeros(num_blocks, value_bytes, dtype=torch.uint8)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            self._pool += keys, values

    def copy_block(self, source: int, target: int) -> None:
        for blocks in self._pool:
            blocks[target] = blocks[source]

    def _layer_block_bytes(self, block_size: int) -> tuple[int, int]:
        """Of keys and of values; slots and values' elements are filled up to whole groups."""
        spec = self._spec
        slots = padded(block_size, self._slot_group)
        slot_bytes = spec.num_kv_heads * slots * self._dtype.itemsize
        return slot_bytes * spec.head_dim, slot_bytes * padded(spec.head_dim, self._slot_group)

    # --- a step --------------------------------------------------------------------------------

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        spans = (Span * len(slices))()
        tables = [array("i", piece.block_table) for piece in slices]
        token_ids, logit_rows = array("q"), array("q")
        for span, piece, table in zip(spans, slices, tables, strict=True):
            span.first_row, span.start = len(token_ids), piece.start
            span.num_rows = len(piece.token_ids)
            span.block_table = table.buffer_info()[0]
            token_ids.extend(piece.token_ids)
            logit_rows.extend(range(len(token_ids) - piece.num_logits, len(token_ids)))
        num_positions = max((span.start + span.num_rows for span in spans), default=0)
        logits = torch.empty(len(logit_rows), padded(self._num_logits, self._panel_width))
        workspace = torch.empty(
            self._library.paceline_workspace_floats(
                ctypes.byref(self._model),
                ctypes.c_int64(len(token_ids)),
                ctypes.c_int64(num_positions),
            )
        )
        step = Step(
            num_rows=len(token_ids),
            num_spans=len(slices),
            num_logits=len(logit_rows),
            token_ids=token_ids.buffer_info()[0],
            spans=spans,
            logit_rows=logit_rows.buffer_info()[0],
            logits=logits.data_ptr(),
            workspace=workspace.data_ptr(),
        )
        self._library.paceline_forward(ctypes.byref(self._model), ctypes.byref(step))
        return logits[:, : self._num_logits]

    # --- weights -------------------------------------------------------------------------------

    def _fill_layer(self, index: int, weights: LayerWeights) -> None:
        layer, spec = self._layers[index], self._spec.layers[index]
        for name in ("qkv", "o", "gate_up", "down"):
            matrix = self._matrix(getattr(weights, name), getattr(weights, f"{name}_bias"))
            setattr(layer, name, matrix)
        for name in Layer.NORMS:
            setattr(layer, name, self._norm(getattr(weights, name)))
        layer.window = spec.sliding_window or 0
        if spec.rope is not None:
            layer.cosine, layer.sine = self._rotations[spec.rope]

    def _matrix(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Matrix:
        if self._int8:
            whole, scale = quantized(weight)
            packed = pack(whole, bias, scale)
        else:
            packed = pack(weight.to(self._dtype), bias)
        self._kept += packed.tensors
        return packed.matrix

    def _norm(self, values: torch.Tensor | None) -> int | None:
        """Address of a vector in float32, filled up with zeros to whole panels."""
        if values is None:
            return None
        return self._keep(filled_up(values))

    def _rotation(self, index: int) -> tuple[int, int]:
        """Cosines and sines of all positions.

        A table made in one piece, because torch's cosine may differ in the last bit with the place
        of an element in its tensor.
        """
        rope = self._spec.ropes[index]
        positions = torch.arange(self._spec.max_position, dtype=torch.float32)
        angles = torch.outer(positions, rope.inv_freq.float())
        return self._keep(angles.cos() * rope.factor), self._keep(angles.sin() * rope.factor)

    def _keep(self, tensor: torch.Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()
