"""The decoder of every model that transformers has and no spec describes: its own modules, with
our attention and our linear layers in them. Also the oracle of the other decoders.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.attention import (
    ATTENTION_NAME,
    KVPool,
    LayerShape,
    ShapeProbe,
    choose_attention_tiling,
    plan_step,
)
from engine.decoder import SequenceSlice, UnsupportedModelError
from engine.linear import kernel_class, replace_linears
from engine.models.rows import pack_rows


class TransformersDecoder:
    """A Decoder; see engine/decoder.py."""

    name = "transformers"

    def __init__(self, folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Loads the weights. Raises UnsupportedModelError."""
        self.device = device
        self.kernel_class = f"transformers/{kernel_class(dtype, device)}"
        self._dtype = dtype
        self._model = _load(folder, config, dtype, device)
        self._min_step_rows = replace_linears(self._model, device)
        self._shapes = _layer_shapes(self._model)
        self._tiling = choose_attention_tiling(self._shapes, dtype, device)
        self._pool: KVPool | None = None

    def block_bytes(self, block_size: int) -> int:
        num_elements = sum(shape.num_elements for shape in self._shapes)
        return num_elements * block_size * self._dtype.itemsize

    def allocate(self, num_blocks: int, block_size: int) -> None:
        assert self._pool is None, "the pool is made once"
        self._pool = KVPool(self._shapes, num_blocks, block_size, self._dtype, self.device)

    def copy_block(self, source: int, target: int) -> None:
        assert self._pool is not None, "allocate comes first"
        self._pool.copy_block(source, target)

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        assert self._pool is not None, "allocate comes first"
        rows = pack_rows(slices)
        num_fillers = max(0, self._min_step_rows - len(rows.token_ids))
        step = plan_step(self._pool, rows.spans, num_fillers, self._tiling, self.device)
        output = self._model(
            input_ids=self._tensor([rows.token_ids + rows.token_ids[-1:] * num_fillers]),
            position_ids=self._tensor([rows.positions + rows.positions[-1:] * num_fillers]),
            use_cache=False,
            logits_to_keep=self._tensor(rows.wanted),
            attention_step=step,
        )
        logits: torch.Tensor = output.logits[0]
        return logits.float()

    def _tensor(self, values: Sequence[object]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.long, device=self.device)


def _load(folder: Path, config: Any, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        config=config,
        dtype=dtype,
        attn_implementation=ATTENTION_NAME,
        use_safetensors=True,
        trust_remote_code=False,
        local_files_only=True,
    )
    if model._is_stateful:
        raise UnsupportedModelError(
            f"{config.model_type} is not supported: it keeps a state that is not attention"
        )
    if not model._supports_attention_backend:
        raise UnsupportedModelError(
            f"{config.model_type} is not supported: it computes attention in its own way"
        )
    return model.to(device).eval().requires_grad_(False)


@torch.inference_mode()
def _layer_shapes(model: PreTrainedModel) -> tuple[LayerShape, ...]:
    """Keys and values of every layer, found by feeding one token."""
    probe = ShapeProbe()
    zero = torch.zeros(1, 1, dtype=torch.long, device=model.device)
    model(input_ids=zero, position_ids=zero, use_cache=False, attention_step=probe)
    num_layers = model.config.num_hidden_layers
    if sorted(probe.shapes) != list(range(num_layers)):
        raise UnsupportedModelError(
            f"{model.config.model_type} is not supported: of {num_layers} layers, "
            f"{sorted(probe.shapes)} have attention"
        )
    return tuple(probe.shapes[layer] for layer in range(num_layers))
