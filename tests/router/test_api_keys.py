"""API keys: closed by default, tenants apart, and nothing told to whoever has no key."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
from pathlib import Path

import httpx
import pytest
import yaml
from fastapi.routing import APIRoute

from cluster.commands.api_client import KEY_VARIABLE, ApiClient, ApiError
from cluster.config import AuthConfig, LimitsConfig, RouterConfig
from cluster.errors import AuthenticationError
from cluster.member_auth import ConfigurationError
from router.api_keys import ApiKeys
from router.gate import ADMIN_PATHS, OPEN_PATHS
from tests.router.deployment import deploy
from tests.support.http_server import serve_http
from tests.support.polling import TIMEOUT_S, eventually
from tests.support.scripted_verifier import ScriptedVerifier, endless, saying

HI = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}]}
CLIENT, OTHER, ADMIN = "client-key", "other-key", "admin-key"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def write_keys(path: Path, **limits: int) -> str:
    entries = [
        {"tenant": "acme", "sha256": digest(CLIENT), **limits},
        {"tenant": "other", "sha256": digest(OTHER)},
        {"tenant": "operators", "sha256": digest(ADMIN), "admin": True},
    ]
    path.write_text(yaml.safe_dump({"keys": entries}))
    return str(path)


def config(path: Path, **limits: int) -> RouterConfig:
    return RouterConfig(auth=AuthConfig(keys_file=write_keys(path / "keys.yaml", **limits)))


@pytest.fixture
async def closed(tmp_path):
    """A router with keys."""
    verifier = ScriptedVerifier(saying("the quick brown fox"))
    async with deploy(verifier, config=config(tmp_path)) as deployment:
        yield deployment


async def test_every_route_but_the_probes_asks_for_a_key(closed):
    walked = set()
    for route in closed.app.routes:
        methods = route.methods - {"OPTIONS"} if isinstance(route, APIRoute) else {"GET"}
        for method in methods:
            path = route.path.replace("{name:path}", "tiny")
            answer = await closed.client.request(method, path)
            if path in OPEN_PATHS:
                assert answer.status_code == 200, path
            else:
                assert answer.status_code == 401, (method, path)
                assert answer.headers["www-authenticate"] == "Bearer"
                walked.add(path)
    assert {"/", "/docs", "/openapi.json", "/v1/models", "/v1/chat/completions"} < walked
    assert (await closed.client.get("/no/such/route")).status_code == 401
    assert not closed.verifier.submitted


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {CLIENT}", CLIENT, f"Bearer {CLIENT}x"],
)
async def test_what_is_no_key_is_refused_in_openais_shape(closed, header):
    answer = await closed.client.get("/v1/models", headers={"Authorization": header})
    assert answer.status_code == 401
    error = answer.json()["error"]
    assert error["type"] == "authentication_error"
    assert error["code"] in ("missing_api_key", "invalid_api_key")
    assert CLIENT not in answer.text


async def test_a_key_opens_the_api_and_only_an_admins_the_cluster(closed):
    chat = await closed.client.post("/v1/chat/completions", json=HI, headers=bearer(CLIENT))
    assert chat.status_code == 200
    for path in sorted(ADMIN_PATHS - {"/metrics"}):
        refused = await closed.client.get(path, headers=bearer(CLIENT))
        assert refused.status_code == 401
        assert refused.json()["error"]["code"] == "admin_key_needed"
        assert (await closed.client.get(path, headers=bearer(ADMIN))).status_code == 200


async def test_without_keys_a_header_is_not_looked_at(deployment):
    for header in ("Bearer ", "Bearer anything", "nonsense"):
        answer = await deployment.client.get("/v1/models", headers={"Authorization": header})
        assert answer.status_code == 200


async def test_tenants_share_no_cache_whatever_salt_they_send(closed):
    for key, salt in ((CLIENT, None), (OTHER, None), (CLIENT, "x"), (OTHER, "4:acme:x")):
        fields = {} if salt is None else {"cache_salt": salt}
        answer = await closed.client.post(
            "/v1/chat/completions", json=HI | fields, headers=bearer(key)
        )
        assert answer.status_code == 200
    salts = [request.cache_salt for request in closed.verifier.submitted]
    assert len(set(salts)) == 4
    assert all(salts)


async def test_a_tenant_over_its_share_is_told_so_and_others_go_on(tmp_path):
    verifier = ScriptedVerifier(endless(), step_s=0.01)
    router = config(tmp_path, max_concurrent_requests=2)
    async with deploy(verifier, config=router) as deployment, serve_http(deployment.app):

        async def ask(key: str, **fields: object):
            return await deployment.client.post(
                "/v1/chat/completions", json=HI | fields, headers=bearer(key)
            )

        running = [asyncio.create_task(ask(CLIENT, max_tokens=100)) for _ in range(2)]
        await eventually(lambda: deployment.verifier.num_running == 2)
        refused = await ask(CLIENT, max_tokens=1)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert int(refused.headers["retry-after"]) >= 1
        assert (await ask(CLIENT, n=3)).status_code == 400  # Never fits.
        assert (await ask(OTHER, max_tokens=1)).status_code == 200
        for task in running:
            assert (await task).status_code == 200
        assert (await ask(CLIENT, max_tokens=1)).status_code == 200
        await eventually(lambda: deployment.is_idle)


async def test_a_changed_file_is_taken_and_a_broken_one_is_not(tmp_path, caplog):
    path = tmp_path / "keys.yaml"
    keys = ApiKeys(write_keys(path))
    assert keys.authenticate(f"Bearer {CLIENT}").name == "acme"
    path.write_text(yaml.safe_dump({"keys": [{"tenant": "acme", "sha256": digest("new")}]}))
    keys.refresh(10)
    with pytest.raises(AuthenticationError):
        keys.authenticate(f"Bearer {CLIENT}")
    with caplog.at_level(logging.ERROR, logger="paceline.router"):
        path.write_text("keys: [{tenant: acme, sha256: a-secret-in-clear}]")
        keys.refresh(20)
        path.unlink()
        keys.refresh(30)
    assert len(caplog.records) == 2
    assert "a-secret-in-clear" not in caplog.text
    assert keys.authenticate("Bearer new").name == "acme"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "keys: []",
        "keys: [{tenant: a}]",
        "keys: [{tenant: a, sha256: short}]",
        f"keys: [{{tenant: a, sha256: {digest('k')}, unknown: 1}}]",
        f"keys: [{{tenant: 'a b', sha256: {digest('k')}}}]",
        f"keys: [{{tenant: a, sha256: {digest('k')}}}, {{tenant: b, sha256: {digest('k')}}}]",
        f"keys: [{{tenant: a, sha256: {digest('k')}}},"
        f" {{tenant: a, sha256: {digest('l')}, max_concurrent_requests: 1}}]",
        ":\n  - {",
    ],
)
def test_a_file_that_is_no_key_file_is_refused_at_start(tmp_path, text):
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=r"auth\.keys_file"):
        ApiKeys(str(path))
    with pytest.raises(ConfigurationError, match="cannot read"):
        ApiKeys(str(tmp_path / "missing"))


# --- what a slow or large client may hold --------------------------------------------------------


async def test_headers_over_the_limit_are_refused(deployment):
    answer = await deployment.client.get("/v1/models", headers={"X-Long": "x" * 40_000})
    assert answer.status_code == 400
    assert "headers" in answer.json()["error"]["message"]


async def test_a_body_that_trickles_in_ends_in_408_and_holds_no_slot():
    limits = LimitsConfig(max_body_s=0.3)
    verifier = ScriptedVerifier(saying("hi"))
    async with (
        deploy(verifier, config=RouterConfig(limits=limits)) as deployment,
        serve_http(deployment.app) as url,
    ):
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(HI).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n"
        writer.write(head.encode() + b"\r\n" + body[:5])
        await writer.drain()
        status = await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        assert b" 408 " in status
        assert deployment.service.admission.in_flight == 0
        with contextlib.suppress(ConnectionError):
            writer.write(body[5:10])  # It goes on, and holds its connection for that no longer.
            await asyncio.wait_for(reader.read(), TIMEOUT_S)
        writer.close()
        assert (await deployment.chat()).status_code == 200


@pytest.mark.parametrize(("length", "status"), [(100, 401), (1 << 40, 413)])
async def test_who_is_refused_cannot_hold_the_connection_by_more_of_the_body(
    closed, deployment, length, status
):
    asked = closed if status == 401 else deployment
    async with serve_http(asked.app) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n"
        writer.write(head.encode() + b"\r\nhello")
        assert f" {status} ".encode() in await asyncio.wait_for(reader.readline(), TIMEOUT_S)
        with contextlib.suppress(ConnectionError):
            writer.write(b"more")
            await asyncio.wait_for(reader.read(), TIMEOUT_S)
        writer.close()


@pytest.mark.parametrize("status", [401, 413])
async def test_who_is_refused_reads_why_however_large_the_body(closed, deployment, status):
    """All of it is sent before the answer is read, as most clients do."""
    asked = closed if status == 401 else deployment
    async with serve_http(asked.app) as url, httpx.AsyncClient(base_url=url) as client:
        for _ in range(5):
            response = await client.post("/v1/chat/completions", content=b"x" * (16 << 20))
            assert response.status_code == status


async def test_the_command_line_takes_its_key_from_the_environment(closed, monkeypatch):
    async with serve_http(closed.app) as url:
        client = ApiClient(url)
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        with pytest.raises(ApiError, match=KEY_VARIABLE):
            await asyncio.to_thread(client.get_json, "/v1/cluster")
        monkeypatch.setenv(KEY_VARIABLE, ADMIN)
        assert (await asyncio.to_thread(client.get_json, "/v1/cluster"))["mode"]
