"""Loads a causal language model from the hub, a folder, a .gguf file or the embedded model.

Weights come as safetensors only, code only from transformers itself. A model that cannot keep the
law (its output a function of its own tokens alone) is refused in words.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cluster.config import EMBEDDED_DRAFTER, EMBEDDED_MODEL, ModelConfig
from cluster.fingerprint import vocabulary_fingerprint
from cluster.types import ModelCard
from engine.decoder import Decoder, UnsupportedModelError
from engine.embedded import (
    EMBEDDED_DRAFTER_FOLDER,
    content_identity,
    converted_folder,
    embedded_model_folder,
)
from engine.memory import (
    available_bytes,
    check_weights_fit,
    give_back_freed_memory,
    weight_bytes,
)
from engine.models.choice import make_decoder
from engine.models.distilled import DistilledDrafter, find_drafter

logger = logging.getLogger(__name__)

_ATTENTION_LAYERS = frozenset({"full_attention", "sliding_attention"})
_ROPE_OF_THE_WHOLE_STEP = frozenset({"dynamic", "longrope"})
_HUB_FILES = ["*.json", "*.safetensors", "*.jinja"]
_HUB_DUPLICATES = ["*/*", "consolidated*"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run, and what its peers must know of it."""

    decoder: Decoder
    """Not allocated yet; one ModelRunner does it."""
    card: ModelCard


def load_model(config: ModelConfig) -> LoadedModel:
    """Load what `config` names. Raises UnsupportedModelError with the reason."""
    torch.set_num_threads(config.num_threads)
    own_folder = model_folder(config)
    weight_files = _weight_files(own_folder)
    drafter = find_drafter(own_folder)
    # Of a distilled drafter all but the layers is its target's.
    folder = own_folder if drafter is None else _target_folder(config, drafter)
    model_config = read_model_config(folder)
    device = device_of(config)
    dtype = torch.bfloat16 if config.dtype == "auto" else getattr(torch, config.dtype)
    max_model_len = _max_model_len(config, model_config)
    check_weights_fit(config.source, _weight_bytes(weight_files, dtype), available_bytes(device))
    decoder = make_decoder(config, folder, model_config, max_model_len, dtype, device, drafter)
    give_back_freed_memory()
    logger.info("%s runs in the %s decoder (%s)", own_folder, decoder.name, decoder.kernel_class)
    identity = _identity(own_folder, weight_files, dtype, decoder)
    card = _card(folder, config, model_config, max_model_len, decoder, identity)
    return LoadedModel(decoder, card)


def device_of(config: ModelConfig) -> torch.device:
    """Where a model runs."""
    name = config.device
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


# --- where a model comes from -----------------------------------------------------------------


def model_folder(config: ModelConfig) -> Path:
    """Where the files of `config.source` lie; fetches or converts them first if need be. Raises
    UnsupportedModelError."""
    if config.source == EMBEDDED_MODEL:
        return embedded_model_folder()
    if config.source == EMBEDDED_DRAFTER:
        return EMBEDDED_DRAFTER_FOLDER
    path = Path(config.source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise UnsupportedModelError(f"there is no file {path}")
        return converted_folder(path)
    if path.is_dir():
        return path
    if config.source.startswith(("embedded:", "/", ".")):
        raise UnsupportedModelError(f"there is no model {config.source!r}")
    return _download(config.source, config.revision)


def _target_folder(config: ModelConfig, drafter: DistilledDrafter) -> Path:
    of_target = {
        "source": drafter.description.target,
        "revision": drafter.description.target_revision,
    }
    folder = model_folder(config.model_copy(update=of_target))
    if find_drafter(folder) is not None:
        raise UnsupportedModelError(f"the target of {drafter.folder} is a drafter itself: {folder}")
    return folder


def _download(hub_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            hub_id,
            revision=revision,
            allow_patterns=_HUB_FILES,
            ignore_patterns=_HUB_DUPLICATES,
        )
    )


def _weight_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModelError(
            f"{folder} holds no .safetensors weights. Pickled weights (.bin, .pt) are not loaded, "
            "because reading them runs code; convert them with save_pretrained first."
        )
    return files


def _weight_bytes(files: list[Path], dtype: torch.dtype) -> int:
    try:
        return weight_bytes(files, dtype)
    except SafetensorError as error:
        raise UnsupportedModelError(
            f"a file of weights in {files[0].parent} is damaged: {error}"
        ) from error


# --- what is refused --------------------------------------------------------------------------


def read_model_config(folder: Path) -> Any:
    """The transformers config in a folder. Raises UnsupportedModelError with every reason not to
    serve that model."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (KeyError, OSError, ValueError) as error:
        raise UnsupportedModelError(f"{folder}: transformers cannot read it: {error}") from error
    reasons = list(_reasons_against(config))
    if reasons:
        raise UnsupportedModelError(f"{config.model_type} is not supported: {'; '.join(reasons)}")
    return config


def _reasons_against(config: Any) -> Iterable[str]:
    architectures = set(config.architectures or ())
    if not architectures <= set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()) or not architectures:
        yield f"{sorted(architectures)} has no causal language model head"
    if config.is_encoder_decoder:
        yield "it is an encoder-decoder"
    others = set(getattr(config, "layer_types", None) or ()) - _ATTENTION_LAYERS
    if others:
        yield (
            f"its layers {sorted(others)} keep a state that is not attention; packed sequences "
            "would mix in it, and a rejected draft could not be taken back"
        )
    if getattr(config, "quantization_config", None) is not None:
        yield "its weights are quantised"
    if getattr(config, "attn_logit_softcapping", None) is not None:
        yield "its attention caps scores"
    rope_types = _ROPE_OF_THE_WHOLE_STEP & _rope_types(config)
    if rope_types:
        yield f"its rotary embedding ({sorted(rope_types)}) depends on other tokens of the step"


def _rope_types(config: Any) -> set[str]:
    """Of all layers: rope_parameters holds one set, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(fields.get("rope_type", "default")) for fields in (parameters, *nested)}


# --- what peers must know ---------------------------------------------------------------------


def _identity(folder: Path, weight_files: list[Path], dtype: torch.dtype, decoder: Decoder) -> str:
    """Hash of everything the output depends on, the vocabulary excepted."""
    digest = hashlib.sha256(b"paceline-model-v1")
    for file in (folder / "config.json", folder / "generation_config.json"):
        digest.update(file.read_bytes() if file.is_file() else b"")
    for file in weight_files:
        digest.update(f"\0{file.name}\0{content_identity(file)}".encode())
    # Grammars shape the output too, and another version may allow other tokens.
    grammars = f"llguidance-{metadata.version('llguidance')}"
    digest.update(f"\0{dtype}\0{decoder.kernel_class}\0{grammars}".encode())
    return digest.hexdigest()


def _card(
    folder: Path,
    config: ModelConfig,
    model_config: Any,
    max_model_len: int,
    decoder: Decoder,
    identity: str,
) -> ModelCard:
    tokenizer_file = folder / "tokenizer.json"
    if not tokenizer_file.is_file():
        raise UnsupportedModelError(f"{folder} has no tokenizer.json; save it as a fast tokenizer")
    tokenizer_json = tokenizer_file.read_text(encoding="utf-8")
    eos_token_ids = _eos_token_ids(folder, model_config)
    vocabulary = vocabulary_fingerprint(tokenizer_json, eos_token_ids)
    tokenizer_config = _read_json(folder / "tokenizer_config.json")
    return ModelCard(
        name=config.name or _default_name(config.source),
        max_model_len=max_model_len,
        vocab_size=model_config.vocab_size,
        vocabulary=vocabulary,
        decoder=decoder.name,
        fingerprint=hashlib.sha256(f"{identity}\0{vocabulary}".encode()).hexdigest()[:32],
        eos_token_ids=eos_token_ids,
        tokenizer_json=tokenizer_json,
        chat_template=_chat_template(folder, tokenizer_config),
        bos_token=_special_token(tokenizer_config, "bos_token"),
        eos_token=_special_token(tokenizer_config, "eos_token"),
        pad_token=_special_token(tokenizer_config, "pad_token"),
    )


def _default_name(source: str) -> str:
    return Path(source.removeprefix("embedded:")).name.removesuffix(".gguf")


def _max_model_len(config: ModelConfig, model_config: Any) -> int:
    window: int = model_config.max_position_embeddings
    if config.max_model_len is None:
        return window
    if config.max_model_len > window:
        raise UnsupportedModelError(
            f"max_model_len {config.max_model_len} is over the model's window of {window}"
        )
    return config.max_model_len


def _eos_token_ids(folder: Path, model_config: Any) -> tuple[int, ...]:
    """Of the model's config and its generation config together; either may be a list or absent."""
    generation = _read_json(folder / "generation_config.json")
    token_ids: set[int] = set()
    for value in (model_config.eos_token_id, generation.get("eos_token_id")):
        if isinstance(value, int):
            token_ids.add(value)
        elif value is not None:
            token_ids.update(value)
    return tuple(sorted(token_ids))


def _chat_template(folder: Path, tokenizer_config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = tokenizer_config.get("chat_template") or ""
    if isinstance(template, str):
        return template
    return next((str(t["template"]) for t in template if t["name"] == "default"), "")


def _special_token(tokenizer_config: dict[str, Any], name: str) -> str:
    token = tokenizer_config.get(name) or ""
    return str(token["content"]) if isinstance(token, dict) else str(token)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    content = json.loads(file.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}
