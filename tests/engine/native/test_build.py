"""Compiling the kernels: once per machine, by one process, and never in the way of a start."""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import ModelConfig
from engine.decoder import UnsupportedModelError
from engine.linear import product_kernel
from engine.loader import load_model
from engine.native import build
from engine.native.build import NativeUnavailableError, native_library
from engine.native.native_linear import NativeLinear, check_kernels
from tests.support.tiny_models import make_tiny_model


@pytest.fixture(scope="module")
def compiled() -> Path:
    """The library of this machine, compiled by the first test ever that needed it."""
    return build._compiled(build._compiler())


@pytest.fixture(autouse=True)
def fresh(compiled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache without any library, in this process too."""
    monkeypatch.setenv("PACELINE_CACHE", str(tmp_path / "cache"))
    for cached in (native_library, check_kernels, product_kernel):
        cached.cache_clear()
    yield tmp_path
    for cached in (native_library, check_kernels, product_kernel):
        cached.cache_clear()


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def keep(library: Path, folder: Path) -> None:
    """Put it where it is looked for, so that nothing is compiled."""
    kept = folder / "cache" / "native" / library.name
    kept.parent.mkdir(parents=True)
    shutil.copy(library, kept)


def libraries(folder: Path) -> list[Path]:
    return sorted((folder / "cache" / "native").glob("*.so"))


def test_processes_that_race_compile_once(fresh: Path) -> None:
    """Each compilation appends a line to a file."""
    count = fresh / "count"
    compiler = script(fresh / "cxx", f'[ "$1" = --version ] || echo . >> {count}\nexec c++ "$@"')
    code = "from engine.native.build import native_library; print(native_library()[1])"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            env={"CXX": str(compiler), "PACELINE_CACHE": str(fresh / "cache"), "PATH": "/usr/bin"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(3)
    ]
    hashes = {process.communicate(timeout=120)[0] for process in processes}
    assert len(hashes) == 1
    assert count.read_text().split() == ["."]
    [library] = libraries(fresh)
    assert library.stat().st_size > 10_000


def test_without_a_compiler_torch_runs_the_model(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(fresh))
    monkeypatch.delenv("CXX", raising=False)
    folder = str(make_tiny_model(fresh / "tiny"))
    loaded = load_model(ModelConfig(source=folder, dtype="float32"))
    assert loaded.card.decoder == "torch"
    assert "no C++ compiler" in caplog.text
    with pytest.raises(UnsupportedModelError, match=r"implementation native: .*install g"):
        load_model(ModelConfig(source=folder, dtype="float32", implementation="native"))


def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = '[ "$1" = --version ] && exit 0\necho "cannot find -lgomp" >&2; exit 1'
    monkeypatch.setenv("CXX", str(script(fresh / "cxx", body)))
    with pytest.raises(NativeUnavailableError, match="cannot find -lgomp"):
        native_library()
    assert libraries(fresh) == []


def test_kernels_that_multiply_wrongly_are_not_used(
    fresh: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(compiled, fresh)
    right = NativeLinear.__call__
    monkeypatch.setattr(NativeLinear, "__call__", lambda self, rows: right(self, rows) * 1.1)
    folder = str(make_tiny_model(fresh / "tiny"))
    assert load_model(ModelConfig(source=folder, dtype="float32")).card.decoder == "torch"


def test_another_compiler_makes_another_library(
    fresh: Path, compiled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is quick: it copies what another has made."""
    keep(compiled, fresh)
    native_library()
    assert len(libraries(fresh)) == 1
    body = '[ "$1" = --version ] && echo other && exit 0\n'
    body += f'while [ "$1" != -o ]; do shift; done\ncp {compiled} "$2"'
    monkeypatch.setenv("CXX", str(script(fresh / "cxx", body)))
    native_library.cache_clear()
    native_library()
    assert len(libraries(fresh)) == 2


def test_a_dtype_without_kernels_runs_on_torch(fresh: Path, compiled: Path) -> None:
    keep(compiled, fresh)
    folder = str(make_tiny_model(fresh / "tiny"))
    assert load_model(ModelConfig(source=folder, dtype="float16")).card.decoder == "torch"
    with pytest.raises(UnsupportedModelError, match=r"no kernels for torch\.float16"):
        load_model(ModelConfig(source=folder, dtype="float16", implementation="native"))
