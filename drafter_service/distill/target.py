"""The target of a distillation: it runs as a verifier would run it, and gives its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from cluster.commands.command_error import CommandError
from cluster.config import KVCacheConfig, ModelConfig
from engine.decoder import UnsupportedModelError
from engine.loader import device_of, load_model, model_folder, read_model_config
from engine.memory import MemoryLimitError
from engine.model_runner import ModelRunner
from engine.models.distilled import find_drafter
from engine.models.families import UnsupportedFamilyError, decoder_spec
from engine.models.spec import DecoderSpec, DecoderWeights
from engine.models.weights import UnsupportedWeightsError, read_weights


@dataclass(frozen=True, slots=True)
class Target:
    """A loaded target."""

    config: ModelConfig
    runner: ModelRunner
    spec: DecoderSpec
    transformers_config: Any

    def weights(self) -> DecoderWeights:
        """In float32, to be trained. Layers are read when they are asked for."""
        try:
            return read_weights(
                model_folder(self.config),
                self.spec,
                self.transformers_config,
                torch.float32,
                device_of(self.config),
            )
        except UnsupportedWeightsError as error:
            raise CommandError(f"{self.config.source}: {error}") from error


def load_target(config: ModelConfig) -> Target:
    """Raises CommandError for a model that cannot be loaded or of a family that is not known."""
    try:
        folder = model_folder(config)
        if find_drafter(folder) is not None:
            raise CommandError(f"{config.source} is a drafter; --target is the model it drafts for")
        transformers_config = read_model_config(folder)
        spec = decoder_spec(transformers_config)
        runner = ModelRunner(load_model(config), KVCacheConfig())
    except UnsupportedFamilyError as error:
        raise CommandError(f"no drafter can be made of {config.source}: {error}") from error
    except (UnsupportedModelError, MemoryLimitError) as error:
        raise CommandError(str(error)) from error
    return Target(config, runner, spec, transformers_config)
