"""Which decoder runs a model.

A decoder is imported when it is chosen: a verifier that runs natively starts without transformers'
modelling code.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import torch

from cluster.config import ModelConfig
from engine.decoder import Decoder, UnsupportedModelError
from engine.linear import multiplies_bfloat16
from engine.models.families import UnsupportedFamilyError, decoder_spec
from engine.models.spec import DecoderSpec
from engine.models.weights import UnsupportedWeightsError, read_weights
from engine.native.build import NativeUnavailableError
from engine.native.native_decoder import NativeDecoder
from engine.native.native_linear import DTYPES, check_kernels

logger = logging.getLogger(__name__)


def make_decoder(
    config: ModelConfig,
    folder: Path,
    model_config: Any,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    """Load the weights into the decoder that `config.implementation` names; auto is the fastest
    that can run this model here. Raises UnsupportedModelError with the reason."""
    wanted = config.implementation
    if wanted != "transformers":
        try:
            spec = dataclasses.replace(decoder_spec(model_config), max_position=max_model_len)
            return _lean(config, folder, spec, model_config, dtype, device)
        except (UnsupportedFamilyError, UnsupportedWeightsError) as error:
            if wanted != "auto":
                raise UnsupportedModelError(f"implementation {wanted}: {error}") from error
            logger.info("transformers' own modules run this model: %s", error)
    from engine.models.transformers_decoder import TransformersDecoder

    return TransformersDecoder(folder, model_config, dtype, device)


def _lean(
    config: ModelConfig,
    folder: Path,
    spec: DecoderSpec,
    model_config: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    native = _runs_native(config, dtype, device)
    weights = read_weights(folder, spec, model_config, dtype, device)
    if native:
        return NativeDecoder(spec, weights, dtype, config.num_threads)
    from engine.models.torch_decoder import TorchDecoder

    return TorchDecoder(spec, weights, dtype, device, deterministic=config.deterministic)


def _runs_native(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    if config.implementation == "torch" or device.type != "cpu":
        return False
    if config.implementation == "auto" and dtype == torch.bfloat16 and multiplies_bfloat16():
        return False  # oneDNN's products need fewer steps of the CPU than ours, which widen first.
    try:
        if dtype not in DTYPES:
            raise NativeUnavailableError(f"it has no kernels for {dtype}")
        check_kernels()
    except NativeUnavailableError as error:
        if config.implementation == "native":
            raise UnsupportedModelError(f"implementation native: {error}") from error
        logger.warning("torch's products run this model, which is slower: %s", error)
        return False
    return True
