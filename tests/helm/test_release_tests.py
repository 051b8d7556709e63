"""`helm test`: hooks that clean up after themselves, and a script that tells a good release from a
bad one, here against a real router."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from cluster.config import AdmissionConfig, AuthConfig, RouterConfig
from cluster.types import Member
from router.api import create_app
from router.service import RouterService
from tests.helm.chart import Manifest, Rendered
from tests.helm.promql import reads
from tests.router.deployment import deploy
from tests.support.drafter_process import DrafterProcess
from tests.support.generation import running_verifier
from tests.support.http_server import serve_http
from tests.support.polling import eventually
from tests.support.tiny_models import make_tiny_model


def test_pods(rendered: Rendered) -> dict[str, Manifest]:
    """By check."""
    return {pod["spec"]["containers"][0]["name"]: pod for pod in rendered.of_kind("Pod")}


test_pods.__test__ = False  # type: ignore[attr-defined]


def test_every_test_is_a_hook_that_ends_and_is_removed(rendered: Rendered):
    pods = test_pods(rendered)
    assert set(pods) == {"health", "completion", "metrics", "auth"}
    for pod in pods.values():
        annotations = pod["metadata"]["annotations"]
        assert annotations["helm.sh/hook"] == "test"
        policy = annotations["helm.sh/hook-delete-policy"].split(",")
        assert set(policy) == {"before-hook-creation", "hook-succeeded"}
        assert pod["spec"]["restartPolicy"] == "Never"
        assert pod["spec"]["activeDeadlineSeconds"] > 0
        resources = pod["spec"]["containers"][0]["resources"]
        assert resources["requests"] == resources["limits"]


def test_they_ask_the_service(rendered: Rendered):
    (service,) = rendered.of_kind("Service")
    name, namespace = service["metadata"]["name"], service["metadata"]["namespace"]
    port = service["spec"]["ports"][0]["port"]
    for pod in test_pods(rendered).values():
        environment = {one["name"]: one.get("value") for one in pod["spec"]["containers"][0]["env"]}
        assert environment["PACELINE_URL"] == f"http://{name}.{namespace}:{port}"


def test_what_needs_a_key_is_not_asked_without_one(rendering):
    assert set(test_pods(rendering({"apiKeys": {"enabled": False}}))) == {
        "health",
        "completion",
        "metrics",
    }
    own = {"existingSecret": "mine", "adminKey": ""}
    assert set(test_pods(rendering({"apiKeys": own}))) == {"health", "auth"}
    assert not test_pods(rendering({"tests": {"enabled": False}}))


# --- the script against a router, and alerts against what is scraped there ----------------------


@asynccontextmanager
async def router(keys_file: Path | None) -> AsyncIterator[str]:
    """The URL of a router without verifiers."""
    auth = AuthConfig(keys_file=str(keys_file) if keys_file else None)
    async with (
        deploy(config=RouterConfig(auth=auth)) as deployment,
        serve_http(deployment.app) as url,
    ):
        yield url


@asynccontextmanager
async def system(keys_file: Path, folder: Path) -> AsyncIterator[str]:
    """The URL of a router over a verifier with a tiny model and a drafter, all real. It takes one
    generation at once."""
    auth = AuthConfig(keys_file=str(keys_file))
    model = str(make_tiny_model(folder / "tiny"))
    async with running_verifier(model, dtype="float32") as verifier, DrafterProcess() as drafter:
        await verifier.use_drafters(drafter.member)
        config = RouterConfig(auth=auth, admission=AdmissionConfig(max_concurrent_requests=1))
        service = RouterService(config, card=verifier.service.card)
        service.start()
        member = Member(
            verifier.service.incarnation,
            verifier.service.address,
            fingerprint=verifier.service.card.fingerprint,
        )
        service.update_members({member.incarnation: member})
        service.update_drafters({drafter.member.incarnation: drafter.member})
        await eventually(lambda: service.not_ready_reason is None)
        async with serve_http(create_app(service)) as url:
            yield url
        await service.close()


async def run_check(rendered: Rendered, check: str, url: str, key: str | None) -> tuple[int, str]:
    """Exit code and output of a test pod's command."""
    container = test_pods(rendered)[check]["spec"]["containers"][0]
    (program, flag), arguments = container["command"], container["args"]
    assert program == "python"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        flag,
        *arguments,
        env={"PACELINE_URL": url, **({"PACELINE_API_KEY": key} if key else {})},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await asyncio.wait_for(process.communicate(), 60)
    assert process.returncode is not None
    return process.returncode, output.decode()


def write_keys(rendered: Rendered, folder: Path) -> tuple[Path, str]:
    """The file that routers mount, and the admin's key."""
    secret = rendered.named("Secret", "paceline-api-keys")["stringData"]
    file = folder / "keys.yaml"
    file.write_text(secret["keys.yaml"])
    return file, secret["admin-key"]


async def test_a_good_release_passes_every_check_and_exports_what_alerts_read(
    defaults: Rendered, rendering: Callable[..., Rendered], tmp_path: Path
):
    keys_file, key = write_keys(defaults, tmp_path)
    alerts = rendering({"metrics": {"prometheusRule": {"enabled": True}}})
    async with system(keys_file, tmp_path) as url:
        for check in test_pods(defaults):
            assert await run_check(defaults, check, url, key) == (0, f"{check}: ok\n")
        authorization = {"Authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, headers=authorization) as http:
            body = {"model": "tiny", "prompt": "a", "max_tokens": 900, "ignore_eos": True}
            async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as busy:
                await anext(busy.aiter_lines())
                refused = await http.post("/v1/completions", json=body)
                assert refused.status_code == 503, refused.text
            await scraped_within(5.0, http, alert_families(alerts))


async def scraped_within(timeout_s: float, http: httpx.AsyncClient, families: set[str]) -> None:
    """Scrape until all are there: some come with the first event of their kind."""
    missing = families
    deadline = time.monotonic() + timeout_s
    while missing and time.monotonic() < deadline:
        scraped = (await http.get("/metrics")).text
        missing = families - set(re.findall(r"^# TYPE (\S+) ", scraped, flags=re.M))
    assert missing == set()


def alert_families(rendered: Rendered) -> set[str]:
    """Metrics that alerts read, as an exposition names them."""
    (found,) = rendered.of_kind("PrometheusRule")
    expressions = [rule["expr"] for group in found["spec"]["groups"] for rule in group["rules"]]
    names = {read.name for expression in expressions for read in reads(expression)}
    assert len(names) >= 15
    return {re.sub("_(bucket|count|sum)$", "", name) for name in names}


async def test_an_open_release_fails_the_check_of_keys(defaults: Rendered):
    async with router(None) as url:
        code, output = await run_check(defaults, "auth", url, "any")
    assert code == 1
    assert "FAILED: /v1/models answers 200" in output


async def test_a_wrong_key_fails_the_others(defaults: Rendered, tmp_path: Path):
    keys_file, _ = write_keys(defaults, tmp_path)
    async with router(keys_file) as url:
        for check in ("completion", "metrics"):
            code, output = await run_check(defaults, check, url, "wrong")
            assert code == 1
            assert "answers 401" in output


async def test_a_release_without_a_verifier_is_not_healthy(defaults: Rendered):
    async with router(None) as url:
        code, output = await run_check(defaults, "health", url, None)
    assert code == 1
    assert "/health/ready answers 503" in output
