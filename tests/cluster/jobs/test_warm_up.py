"""The warm-up job asks every verifier, and stops when nothing gets faster."""

from __future__ import annotations

import asyncio

import pytest

from cluster.commands.api_client import ApiClient, ApiError
from cluster.jobs import warm_up
from tests.router.deployment import deploy
from tests.support.http_server import serve_http
from tests.support.scripted_verifier import ScriptedVerifier, saying


async def test_every_verifier_is_asked_and_it_ends():
    verifiers = [ScriptedVerifier(saying("the quick brown fox")) for _ in range(3)]
    async with deploy(*verifiers) as deployment, serve_http(deployment.app) as url:
        medians = await asyncio.to_thread(warm_up.warm_up, ApiClient(url))
        assert all(verifier.submitted for verifier in verifiers)
        assert 2 <= len(medians) <= warm_up.MAX_ROUNDS
        assert deployment.is_idle


def test_a_router_that_is_not_there_is_exit_code_1(capsys):
    assert warm_up.main(["--url", "http://127.0.0.1:1"]) == 1
    assert "cannot reach" in capsys.readouterr().err
    with pytest.raises(ApiError):
        warm_up.warm_up(ApiClient("http://127.0.0.1:1"))
