"""What configs are read as, and which are refused in which words. That the specs are right shows in
test_decoders.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from engine.models.families import UnsupportedFamilyError, decoder_spec
from engine.models.spec import Activation, LayerSpec

_SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def test_a_config_is_read_field_by_field() -> None:
    spec = decoder_spec(LlamaConfig(**_SMALL, rms_norm_eps=1e-5, head_dim=32))
    assert spec.hidden_size == 64
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (4, 2, 32)
    assert spec.intermediate_size == 80
    assert spec.vocab_size == 96
    assert spec.max_position == 128
    assert spec.rms_norm_eps == 1e-5
    assert spec.activation is Activation.SILU
    assert spec.attention_scaling == 32**-0.5
    assert spec.embedding_scale == 1.0
    assert spec.layers == (LayerSpec(None, 0), LayerSpec(None, 0))
    assert spec.ropes[0].inv_freq.shape == (16,)
    assert spec.ropes[0].inv_freq.dtype == torch.float32


def test_windows_go_to_the_layers_that_slide() -> None:
    qwen = Qwen2Config(**_SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=1)
    assert [layer.sliding_window for layer in decoder_spec(qwen).layers] == [None, 9]
    mistral = MistralConfig(**_SMALL, sliding_window=9)
    assert [layer.sliding_window for layer in decoder_spec(mistral).layers] == [9, 9]
    unused = Qwen3Config(**_SMALL, sliding_window=9)
    assert [layer.sliding_window for layer in decoder_spec(unused).layers] == [None, None]


def test_gemma_3_has_a_rope_per_kind_of_layer() -> None:
    spec = decoder_spec(Gemma3TextConfig(**_SMALL | {"num_hidden_layers": 6}, head_dim=16))
    assert [layer.rope for layer in spec.layers] == [0, 0, 0, 0, 0, 1]
    assert spec.ropes[0].inv_freq[1] > spec.ropes[1].inv_freq[1]  # base 10,000 and 1,000,000
    assert spec.attention_scaling == 256**-0.5


def test_layers_without_a_rope_have_none() -> None:
    spec = decoder_spec(SmolLM3Config(**_SMALL, no_rope_layers=[0, 1]))
    assert [layer.rope for layer in spec.layers] == [None, 0]


def _dynamic() -> dict[str, Any]:
    return {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}


def _longrope() -> dict[str, Any]:
    factors = [1.0] * 8
    return {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }


def _partial() -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}


def _odd_heads() -> PreTrainedConfig:
    config = LlamaConfig(**_SMALL)
    config.head_dim = 15
    return config


REFUSALS: dict[str, tuple[PreTrainedConfig, str]] = {
    "a mixture": (MixtralConfig(**_SMALL), "mixtral: no spec is known for this family"),
    "gemma 2": (Gemma2Config(**_SMALL), "gemma2: no spec is known"),
    "caps of scores": (
        Gemma3TextConfig(**_SMALL, attn_logit_softcapping=50.0),
        "caps scores (attn_logit_softcapping)",
    ),
    "caps of logits": (
        Gemma3TextConfig(**_SMALL, final_logit_softcapping=30.0),
        "caps logits (final_logit_softcapping)",
    ),
    "looks ahead": (GemmaConfig(**_SMALL, use_bidirectional_attention=True), "looks ahead"),
    "clips": (LlamaConfig(**_SMALL, clip_qkv=8.0), "clips queries, keys and values (clip_qkv)"),
    "quantised": (LlamaConfig(**_SMALL, quantization_config={"bits": 4}), "quantised"),
    "scales logits": (LlamaConfig(**_SMALL, logit_scale=0.1), "scales logits"),
    "experts": (LlamaConfig(**_SMALL, num_local_experts=4), "mixture of experts"),
    "activation": (LlamaConfig(**_SMALL, hidden_act="gelu"), "activation 'gelu' is not known"),
    "heads": (
        LlamaConfig(**_SMALL | {"num_key_value_heads": 3}),
        "its KV heads do not divide its heads",
    ),
    "odd heads": (_odd_heads(), "head_dim 15 is odd"),
    "dynamic": (LlamaConfig(**_SMALL, rope_parameters=_dynamic()), "'dynamic' is not the same"),
    "longrope": (LlamaConfig(**_SMALL, rope_parameters=_longrope()), "'longrope' is not the same"),
    "partial rotary": (LlamaConfig(**_SMALL, rope_parameters=_partial()), "a part of each head"),
    "foreign layers": (
        MistralConfig(**_SMALL, layer_types=["sliding_attention", "full_attention"]),
        "are not part of this family",
    ),
    "no attention": (
        Qwen3Config(**_SMALL, layer_types=["full_attention", "linear_attention"]),
        "['linear_attention'] are no attention that is known",
    ),
    "no window": (
        Qwen3Config(**_SMALL, layer_types=["full_attention", "sliding_attention"]),
        "sliding layers and no window",
    ),
    "empty window": (MistralConfig(**_SMALL, sliding_window=0), "window of 0 shows nothing"),
    "few nope layers": (
        SmolLM3Config(**_SMALL, no_rope_layers=[1], layer_types=["full_attention"] * 2),
        "no_rope_layers does not name every layer",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_no_spec_can_express_is_refused_in_words(name: str) -> None:
    config, words = REFUSALS[name]
    with pytest.raises(UnsupportedFamilyError) as refusal:
        decoder_spec(config)
    assert words in str(refusal.value)


def test_layers_with_configs_of_their_own_are_refused() -> None:
    config = LlamaConfig(**_SMALL, per_layer_config={0: {"intermediate_size": 40}})
    assert config.is_heterogeneous
    with pytest.raises(UnsupportedFamilyError, match="configs of their own"):
        decoder_spec(config)


def test_all_reasons_are_given_at_once() -> None:
    config = LlamaConfig(**_SMALL, hidden_act="gelu", clip_qkv=8.0)
    with pytest.raises(UnsupportedFamilyError, match=r"llama: .*clip_qkv.*; .*'gelu'"):
        decoder_spec(config)
