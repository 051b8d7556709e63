"""A router over one scripted verifier."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.router.deployment import Deployment, deploy
from tests.support.scripted_verifier import ScriptedVerifier, saying


@pytest.fixture
async def deployment() -> AsyncIterator[Deployment]:
    """A router whose one verifier says a short sentence."""
    async with deploy(ScriptedVerifier(saying("the quick brown fox"))) as started:
        yield started
