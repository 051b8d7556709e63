"""Compiles the kernels once per machine, and keeps the library under $PACELINE_CACHE/native.

Compiled where it runs, so that it uses all that this CPU has. Needs a C++ compiler ($CXX, c++, g++
or clang++), and nothing else.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

from filelock import FileLock

from engine.cache_folder import cache_folder

_SOURCES = Path(__file__).with_name("kernels")
_SOURCE = _SOURCES / "decoder.cpp"
_FLAGS = (
    "-std=c++17 -O3 -march=native -fopenmp -fPIC -shared "
    "-fno-exceptions -fno-rtti -fno-math-errno -ffp-contract=fast"
)
_COMPILE_TIMEOUT_S = 300


class NativeUnavailableError(RuntimeError):
    """The native decoder cannot be compiled or run here; the message says why."""


@lru_cache
def native_library() -> tuple[ctypes.CDLL, str]:
    """The compiled kernels, and a hash of their machine code and of who made the CPU: makers may
    round products of bfloat16 in their own ways.

    Safe when processes race. Raises NativeUnavailableError.
    """
    try:
        file = _compiled(_compiler())
        identity = hashlib.sha256(file.read_bytes() + _cpu(b"vendor_id"))
        return ctypes.CDLL(str(file)), identity.hexdigest()[:16]
    except (OSError, subprocess.SubprocessError) as error:
        raise NativeUnavailableError(f"decoder.cpp: {_reason(error)}") from error


def _compiler() -> str:
    for name in filter(None, (os.environ.get("CXX"), "c++", "g++", "clang++")):
        if path := shutil.which(name):
            return path
    raise NativeUnavailableError("there is no C++ compiler; install g++ or set CXX")


def _compiled(compiler: str) -> Path:
    folder = cache_folder() / "native"
    file = folder / f"decoder-{_identity(compiler)}.so"
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{file}.lock"):
        if not file.is_file():
            _compile(compiler, file)
    return file


def _compile(compiler: str, file: Path) -> None:
    with tempfile.TemporaryDirectory(dir=file.parent) as folder:
        unfinished = Path(folder) / file.name
        subprocess.run(
            [compiler, *_FLAGS.split(), "-o", str(unfinished), str(_SOURCE)],
            check=True,
            capture_output=True,
            text=True,
            timeout=_COMPILE_TIMEOUT_S,
        )
        unfinished.rename(file)


def _identity(compiler: str) -> str:
    """Of all that the machine code depends on."""
    version = subprocess.run([compiler, "--version"], check=True, capture_output=True, timeout=60)
    sources = [file.read_bytes() for file in sorted(_SOURCES.iterdir())]
    digest = hashlib.sha256()
    cpu = _cpu(b"model name", b"cpu family", b"model\t", b"flags", b"Features")
    for part in (*sources, version.stdout, _FLAGS.encode(), cpu):
        digest.update(b"\0" + part)
    return digest.hexdigest()[:16]


def _cpu(*names: bytes) -> bytes:
    """What Linux tells of this machine's CPU under these names."""
    info = Path("/proc/cpuinfo")
    lines = info.read_bytes().split(b"\n") if info.is_file() else []
    return b"\n".join(sorted({line for line in lines if line.startswith(names)}))


def _reason(error: Exception) -> str:
    output = getattr(error, "stderr", None)
    return f"{error}: {output.strip()[-500:]}" if output else str(error)
