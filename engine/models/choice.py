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
from engine.linear import has_matrix_units
from engine.models.distilled import DistilledDrafter, read_distilled
from engine.models.draft_vocabulary import DraftVocabulary
from engine.models.families import UnsupportedFamilyError, decoder_spec
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.weights import UnsupportedWeightsError, read_ends, read_weights
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
    drafter: DistilledDrafter | None = None,
) -> Decoder:
    """Load the weights into the decoder that `config.implementation` names; auto is the fastest
    that can run this model here. With `drafter` that runs, and folder and config are its target's.
    Raises UnsupportedModelError with the reason."""
    wanted = config.implementation
    if drafter is not None and wanted == "transformers":
        raise UnsupportedModelError("a distilled drafter does not run in transformers' modules")
    if wanted != "transformers":
        try:
            spec = dataclasses.replace(decoder_spec(model_config), max_position=max_model_len)
            if drafter is not None:
                return _distilled(config, folder, drafter, spec, model_config, dtype, device)
            weights = read_weights(folder, spec, model_config, dtype, device)
            return _lean(config, spec, weights, dtype, device)
        except (UnsupportedFamilyError, UnsupportedWeightsError) as error:
            if drafter is not None:
                raise UnsupportedModelError(f"a drafter's target is not known: {error}") from error
            if wanted != "auto":
                raise UnsupportedModelError(f"implementation {wanted}: {error}") from error
            logger.info("transformers' own modules run this model: %s", error)
    from engine.models.transformers_decoder import TransformersDecoder

    return TransformersDecoder(folder, model_config, dtype, device)


def _distilled(
    config: ModelConfig,
    target_folder: Path,
    drafter: DistilledDrafter,
    target_spec: DecoderSpec,
    target_config: Any,
    dtype: torch.dtype,
    device: torch.device,
) -> Decoder:
    ends = read_ends(target_folder, target_spec, target_config, dtype, device)
    distilled = read_distilled(drafter, ends, target_spec, target_config)
    # It may be a little off: its target corrects it.
    int8 = dtype == torch.bfloat16
    decoder = _lean(config, distilled.spec, distilled.weights, dtype, device, int8=int8)
    if distilled.vocabulary is None:
        return decoder
    return DraftVocabulary(decoder, distilled.vocabulary, target_spec.vocab_size)


def _lean(
    config: ModelConfig,
    spec: DecoderSpec,
    weights: DecoderWeights,
    dtype: torch.dtype,
    device: torch.device,
    *,
    int8: bool = False,
) -> Decoder:
    """With `int8` where the decoder can."""
    if _runs_native(config, dtype, device):
        return NativeDecoder(spec, weights, dtype, config.num_threads, int8=int8)
    from engine.models.torch_decoder import TorchDecoder

    return TorchDecoder(spec, weights, dtype, device, deterministic=config.deterministic)


def _runs_native(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> bool:
    if config.implementation == "torch" or device.type != "cpu":
        return False
    if config.implementation == "auto" and dtype == torch.bfloat16 and has_matrix_units():
        return False  # Long prompts would wait: only oneDNN's products use such units.
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
