"""Client packages, unmodified, get what they ask for, and the same with drafts and without."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.clients.packages import node_folder, python_of
from tests.clients.server import Served, found_by, run_client

PROGRAMS = Path(__file__).parent / "programs"


async def told_by(command: list[Path | str], model: Path, cwd: Path) -> dict[str, Any]:
    """What a program found out, which must not depend on drafts."""

    async def run(system: Served) -> dict[str, Any]:
        output = await run_client([*command, system.url, system.model], cwd=cwd)
        told: dict[str, Any] = json.loads(output.splitlines()[-1])
        return told

    drafted = await found_by(run, model, speculative=True)
    (plain,) = await found_by(run, model, speculative=False)
    assert all(told == plain for told in drafted)
    return plain


async def test_openai_python(model: Path, tmp_path: Path) -> None:
    told = await told_by([sys.executable, PROGRAMS / "openai_python.py"], model, tmp_path)
    assert told["refused"] == "suffix"


@pytest.mark.long
async def test_openai_node(model: Path) -> None:
    folder = node_folder()
    assert (await told_by(["node", PROGRAMS / "openai_node.mjs"], model, folder))["stream"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["langchain", "litellm", "llama_index"])
async def test_python_packages(name: str, model: Path, tmp_path: Path) -> None:
    assert await told_by([python_of(name), PROGRAMS / f"{name}.py"], model, tmp_path)
