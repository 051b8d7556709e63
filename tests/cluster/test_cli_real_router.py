"""The commands against the router itself: what one writes the other reads."""

from __future__ import annotations

import asyncio
import re

import pytest

from tests.router.deployment import deploy
from tests.support.http_server import serve_http
from tests.support.scripted_verifier import ScriptedVerifier, saying


@pytest.mark.parametrize("argv", [("status",), ("status", "--json"), ("chat", "hi")])
async def test_a_command_succeeds(argv, paceline):
    async with (
        deploy(ScriptedVerifier(saying("the quick brown fox", 3))) as deployment,
        serve_http(deployment.app) as url,
    ):
        code, out, err = await asyncio.to_thread(paceline, *argv, "--url", url)
    assert (code, err) == (0, "")
    assert out.strip()


async def test_a_verifier_shows_in_the_status(paceline):
    async with (
        deploy(ScriptedVerifier(saying("the quick brown fox", 3))) as deployment,
        serve_http(deployment.app) as url,
    ):
        _, out, _ = await asyncio.to_thread(paceline, "status", "--url", url)
        assert deployment.verifier.member.address in out


async def test_a_chat_shows_what_was_drafted(paceline, terminal):
    terminal()
    async with (
        deploy(ScriptedVerifier(saying("the quick brown fox", 3))) as deployment,
        serve_http(deployment.app) as url,
    ):
        _, out, _ = await asyncio.to_thread(paceline, "chat", "hi", "--url", url)
    assert re.sub(r"\x1b\[\d+m", "", out).startswith("the quick brown fox\n[")
    assert "\x1b[36m" in out
    assert "drafts accepted" in out


async def test_a_router_without_a_verifier_refuses_a_chat(paceline):
    async with deploy() as deployment, serve_http(deployment.app) as url:
        code, out, err = await asyncio.to_thread(paceline, "chat", "hi", "--url", url)
    assert (code, out) == (1, "")
    assert "Try again in 2 s" in err
