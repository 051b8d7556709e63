"""What the configs of Llama-like families say, in the terms of engine/models/spec.py.

Whatever a spec cannot express exactly is refused in words; transformers runs such a model then.
The families and their fields are those of transformers 5: each entry was read off the family's
modelling code, and tests compare every one with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.models.spec import Activation, DecoderSpec, LayerSpec, Rope


class UnsupportedFamilyError(ValueError):
    """No spec says exactly what this config does; the message says why."""


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Which tensors a checkpoint has, beyond those that every family has."""

    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    """Norms of the attention's and the MLP's outputs (Gemma 3)."""
    norm_offset: float = 0.0
    """Is added to the weights of norms (Gemma)."""


def decoder_spec(config: Any) -> DecoderSpec:
    """The spec of a transformers config. Raises UnsupportedFamilyError with every reason."""
    reasons = list(_reasons_against(config))
    if reasons:
        raise UnsupportedFamilyError(f"{config.model_type}: {'; '.join(reasons)}")
    rope_keys = _rope_keys(config)
    return DecoderSpec(
        hidden_size=config.hidden_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_dim=_head_dim(config),
        intermediate_size=config.intermediate_size,
        vocab_size=config.vocab_size,
        max_position=config.max_position_embeddings,
        rms_norm_eps=config.rms_norm_eps,
        activation=_ACTIVATIONS[_activation_name(config)],
        attention_scaling=_attention_scaling(config),
        embedding_scale=config.hidden_size**0.5 if config.model_type in _GEMMAS else 1.0,
        layers=tuple(_layer(config, index, rope_keys) for index in range(config.num_hidden_layers)),
        ropes=tuple(_rope(config, key) for key in rope_keys),
    )


def tensor_layout(config: Any) -> TensorLayout:
    """Which tensors the checkpoint of a config that has a spec must have."""
    attention_bias = bool(getattr(config, "attention_bias", False))
    return TensorLayout(
        qkv_bias=attention_bias or config.model_type == "qwen2",
        o_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=config.model_type in ("qwen3", "gemma3_text"),
        post_norms=config.model_type == "gemma3_text",
        norm_offset=1.0 if config.model_type in _GEMMAS else 0.0,
    )


_GEMMAS = frozenset({"gemma", "gemma3_text"})
_WINDOWS_BY_LAYER_TYPE = frozenset({"qwen2", "qwen3", "smollm3", "gemma3_text"})
_FAMILIES = frozenset({"llama", "mistral", "gemma"}) | _WINDOWS_BY_LAYER_TYPE

_ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
}
_ROPE_TYPES = frozenset({"default", "linear", "llama3", "yarn"})
"""Those whose frequencies are the same for every step."""

_FOREIGN_FIELDS = {
    "attention_multiplier": "it scales scores in its own way",
    "attn_logit_softcapping": "its attention caps scores",
    "clip_qkv": "it clips queries, keys and values",
    "embedding_multiplier": "it scales embeddings in its own way",
    "final_logit_softcapping": "it caps logits",
    "logit_scale": "it scales logits",
    "logits_scaling": "it scales logits",
    "num_experts": "it is a mixture of experts",
    "num_local_experts": "it is a mixture of experts",
    "quantization_config": "its weights are quantised",
    "residual_multiplier": "it scales residuals",
    "use_bidirectional_attention": "its attention looks ahead",
    "use_qk_norm": "it may norm queries and keys",
}
"""Fields of other families that change the maths where a config has them."""


def _reasons_against(config: Any) -> Iterable[str]:
    if config.model_type not in _FAMILIES:
        yield "no spec is known for this family"
        return
    if getattr(config, "is_heterogeneous", False):
        yield "its layers have configs of their own"
        return
    for name, reason in _FOREIGN_FIELDS.items():
        if getattr(config, name, None):
            yield f"{reason} ({name})"
    if _activation_name(config) not in _ACTIVATIONS:
        yield f"its activation {_activation_name(config)!r} is not known"
    if config.num_attention_heads % config.num_key_value_heads:
        yield "its KV heads do not divide its heads"
    if _head_dim(config) % 2:
        yield f"its head_dim {_head_dim(config)} is odd"
    yield from _reasons_against_windows(config)
    yield from _reasons_against_ropes(config)


# --- fields that families name differently ----------------------------------------------------


def _head_dim(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None)
    return int(head_dim or config.hidden_size // config.num_attention_heads)


def _activation_name(config: Any) -> str:
    gemma3 = config.model_type == "gemma3_text"
    return str(config.hidden_activation if gemma3 else config.hidden_act)


def _attention_scaling(config: Any) -> float:
    if config.model_type == "gemma3_text":
        return float(config.query_pre_attn_scalar**-0.5)
    return float(_head_dim(config) ** -0.5)


# --- layers and their windows -----------------------------------------------------------------


def _layer(config: Any, index: int, rope_keys: list[str | None]) -> LayerSpec:
    rope = rope_keys.index(config.layer_types[index]) if len(rope_keys) > 1 else 0
    has_rope = config.model_type != "smollm3" or config.no_rope_layers[index]
    return LayerSpec(
        sliding_window=config.sliding_window if _slides(config, index) else None,
        rope=rope if has_rope else None,
    )


def _slides(config: Any, index: int) -> bool:
    if config.model_type in _WINDOWS_BY_LAYER_TYPE:
        return bool(config.layer_types[index] == "sliding_attention")
    return bool(config.model_type == "mistral")


def _reasons_against_windows(config: Any) -> Iterable[str]:
    layer_types: list[str] = getattr(config, "layer_types", None) or []
    window = getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        yield f"its sliding window of {window} shows nothing"
    if config.model_type not in _WINDOWS_BY_LAYER_TYPE:
        if set(layer_types) - {"full_attention"}:
            yield f"layer_types {sorted(set(layer_types))} are not part of this family"
        return
    if len(layer_types) < config.num_hidden_layers:
        yield "layer_types does not name every layer"
    others = sorted(set(layer_types) - {"full_attention", "sliding_attention"})
    if others:
        yield f"its layers {others} are no attention that is known"
    has_window = window is not None and getattr(config, "use_sliding_window", True)
    if "sliding_attention" in layer_types and not has_window:
        yield "it has sliding layers and no window"
    if config.model_type == "smollm3" and len(config.no_rope_layers) < config.num_hidden_layers:
        yield "no_rope_layers does not name every layer"


# --- rotary embeddings ------------------------------------------------------------------------


def _rope_keys(config: Any) -> list[str | None]:
    """What `rope_parameters` is nested under; [None] where there is one embedding."""
    if config.model_type != "gemma3_text":
        return [None]
    return list(dict.fromkeys(config.layer_types[: config.num_hidden_layers]))


def _rope_fields(config: Any, key: str | None) -> dict[str, Any]:
    parameters: dict[str, Any] = config.rope_parameters
    return parameters if key is None else parameters[key]


def _reasons_against_ropes(config: Any) -> Iterable[str]:
    for key in _rope_keys(config):
        fields = (config.rope_parameters or {}) if key is None else config.rope_parameters.get(key)
        if not fields or fields.get("rope_theta") is None:
            yield "its rotary embedding is not described"
            continue
        rope_type = fields.get("rope_type", "default")
        if rope_type not in _ROPE_TYPES:
            yield f"its rotary embedding {rope_type!r} is not the same for every step"
        if fields.get("partial_rotary_factor", 1.0) != 1.0:
            yield "its rotary embedding turns a part of each head only"


def _rope(config: Any, key: str | None) -> Rope:
    fields = _rope_fields(config, key)
    head_dim = _head_dim(config)
    if fields["rope_type"] == "default":
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
        return Rope(1.0 / (fields["rope_theta"] ** exponents), 1.0)
    nested = {} if key is None else {"layer_type": key}
    inv_freq, factor = ROPE_INIT_FUNCTIONS[fields["rope_type"]](config, **nested)
    assert inv_freq.shape == (head_dim // 2,)
    return Rope(inv_freq.float(), float(factor))
