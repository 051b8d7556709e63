"""What a router counts of its requests, whatever becomes of them."""

from __future__ import annotations

import asyncio
import random
import string

import pytest

from cluster.config import AdmissionConfig, RouterConfig
from cluster.types import ErrorEvent, FinishReason
from router.choice import Delta
from router.metrics import RequestMetrics, RequestRecord
from tests.router.deployment import Deployment, deploy
from tests.support.expositions import matching, series_of, total
from tests.support.polling import eventually
from tests.support.scripted_verifier import ScriptedVerifier, Step, endless


async def scrape(deployment: Deployment) -> str:
    """Of this router alone, and so not shared."""
    return deployment.service.metrics_text()


async def statuses(deployment: Deployment) -> dict[str, float]:
    found: dict[str, float] = {}
    for series, value in matching(await scrape(deployment), "paceline_requests_total"):
        status = series.label("status")
        found[status] = found.get(status, 0) + value
    return found


# --- times, on a clock that the test sets ---------------------------------------------------------


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_times_are_those_between_the_chunks() -> None:
    clock, metrics = Clock(), RequestMetrics()
    record = RequestRecord(metrics, clock)
    last = FinishReason.LENGTH
    for now, delta in (
        (100.5, Delta(0, "a", 2)),
        (100.8, Delta(0, "b", 3)),
        (100.8, Delta(1, "x", 1)),
        (101.0, Delta(0, "", 0)),  # no token, so no chunk
        (101.2, Delta(0, "c", 1, finish_reason=last)),
        (101.3, Delta(1, "", 0, finish_reason=last)),
    ):
        clock.now = now
        record.saw(delta)
    record.answered(200)
    clock.now = 101.5
    record.ended()
    assert (metrics.ttft.count, metrics.ttft.sum) == (1, pytest.approx(0.5))
    assert (metrics.inter_chunk.count, metrics.inter_chunk.sum) == (2, pytest.approx(0.7))
    assert (metrics.inter_token.count, metrics.inter_token.sum) == (4, pytest.approx(0.7))
    # Six tokens in 0.7 s behind the first; the other choice has a single token.
    assert (metrics.tpot.count, metrics.tpot.sum) == (1, pytest.approx(0.7 / 5))
    assert (metrics.e2e.count, metrics.e2e.sum) == (1, pytest.approx(1.5))


def test_only_whole_answers_count_as_such() -> None:
    metrics = RequestMetrics()
    record = RequestRecord(metrics, Clock())
    record.saw(Delta(0, "a", 1))
    record.answered(200)
    record.left()
    record.ended()
    assert metrics.requests == {("none", "none", "499"): 1}
    assert metrics.e2e.count == 0
    assert metrics.ttft.count == 1


# --- requests over HTTP ---------------------------------------------------------------------------


async def test_every_request_is_counted_once_by_its_end(deployment: Deployment) -> None:
    assert (await deployment.complete()).status_code == 200
    assert (await deployment.chat(stream=True)).status_code == 200
    assert (await deployment.chat(temperature=9)).status_code == 400
    assert (await deployment.chat(model="other")).status_code == 404
    assert (await deployment.client.post("/v1/completions", content=b"{")).status_code == 400
    assert (await deployment.client.get("/v1/completions")).status_code == 405
    assert (await deployment.client.get("/health")).status_code == 200
    assert await statuses(deployment) == {"200": 2, "400": 2, "404": 1}
    text = await scrape(deployment)
    assert total(text, "paceline_requests_total", path="plain", reason="no_drafter_ready") == 2
    assert total(text, "paceline_e2e_seconds_count") == 2
    assert total(text, "paceline_ttft_seconds_count") == 2


async def test_an_error_after_the_first_byte_is_no_success() -> None:
    broken = ErrorEvent("", "InternalError", "broken")

    def script(request):
        yield Step((65,))
        yield Step((), error=broken)

    async with deploy(ScriptedVerifier(script)) as deployment:
        response = await deployment.complete(stream=True)
        assert response.status_code == 200
        assert "broken" in response.text
        assert "[DONE]" not in response.text
        assert await statuses(deployment) == {"500": 1}
        assert total(await scrape(deployment), "paceline_e2e_seconds_count") == 0


async def test_a_client_that_leaves() -> None:
    async with deploy(ScriptedVerifier(endless(), step_s=0.01)) as deployment:
        asking = asyncio.create_task(deployment.complete(max_tokens=400))
        await eventually(lambda: deployment.verifier.num_running == 1)
        asking.cancel()
        await eventually(lambda: deployment.is_idle)
        assert await statuses(deployment) == {"499": 1}


async def test_what_is_refused_for_want_of_room_is_counted_by_its_code() -> None:
    admission = AdmissionConfig(max_concurrent_requests=1)
    config = RouterConfig(admission=admission)
    async with deploy(ScriptedVerifier(endless(), step_s=0.01), config=config) as deployment:
        asking = asyncio.create_task(deployment.complete(max_tokens=400))
        await eventually(lambda: deployment.verifier.num_running == 1)
        assert (await deployment.complete()).status_code == 503
        assert (await deployment.complete()).status_code == 503
        asking.cancel()
        await eventually(lambda: deployment.is_idle)
        text = await scrape(deployment)
        assert total(text, "paceline_admission_rejections_total", reason="overloaded") == 2
        assert await statuses(deployment) == {"499": 1, "503": 2}
    async with deploy() as deployment:
        assert (await deployment.complete()).status_code == 503
        text = await scrape(deployment)
        assert total(text, "paceline_admission_rejections_total", reason="not_ready") == 1


async def test_a_resume_and_a_switch_of_the_mode_are_counted() -> None:
    verifiers = [ScriptedVerifier(endless(), step_s=0.005) for _ in range(2)]
    async with deploy(*verifiers) as deployment:
        before = await scrape(deployment)
        assert total(before, "paceline_path_mode", path="plain") == 1
        for verifier in verifiers:
            verifier.ready_drafter()
        await eventually(lambda: deployment.service.policy.mode == "speculative")
        asking = asyncio.create_task(deployment.complete(max_tokens=100))
        await eventually(lambda: any(verifier.num_running for verifier in verifiers))
        await next(verifier for verifier in verifiers if verifier.num_running).kill()
        assert (await asking).status_code == 200
        text = await scrape(deployment)
        assert total(text, "paceline_resumes_total") == 1
        assert total(text, "paceline_path_mode", path="speculative") == 1
        assert total(text, "paceline_path_mode", path="plain") == 0
        switches = "paceline_path_switches_total"
        assert total(text, switches, to="speculative", reason="drafts_cheap") == 1


async def test_nothing_that_a_client_says_makes_new_series(deployment: Deployment) -> None:
    rng = random.Random(5)

    def word() -> str:
        return "".join(rng.choices(string.ascii_letters, k=8))

    async def ask() -> None:
        fields = {
            "model": rng.choice(["tiny", word()]),
            "user": word(),
            "cache_salt": word(),
            "temperature": rng.choice([0, 1, -1]),
            "speculation": {"mode": rng.choice(["auto", "on", "off", word()])},
            rng.choice(["seed", word()]): 1,
        }
        headers = {"X-Request-ID": word(), "X-Session-Affinity": word(), word(): word()}
        path = rng.choice(["/v1/completions", "/v1/completions", f"/v1/{word()}"])
        body = {"prompt": word(), "max_tokens": 2, **fields}
        await deployment.client.post(path, json=body, headers=headers)

    for _ in range(60):
        await ask()
    first = series_of(await scrape(deployment)).keys()
    for _ in range(200):
        await ask()
    assert len(series_of(await scrape(deployment)).keys() - first) <= 4
    labels = {value for series in first for name, value in series.labels if name != "le"}
    known = {"", "Router", "plain", "speculative", "none", "200", "400", "404", *("0", "1")}
    known |= {"no_drafter_ready", "request_mode_on", "request_mode_off", "router", "verifier"}
    known |= {"drafter", "no_load_report", "drafts_cheap", deployment.service.identity.incarnation}
    assert labels <= known


# --- the endpoint ---------------------------------------------------------------------------------


async def test_get_and_head(deployment: Deployment) -> None:
    response = await deployment.client.get("/metrics")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert total(response.text, "paceline_path_mode") == 1
    head = await deployment.client.head("/metrics")
    assert head.status_code == 200
    assert head.headers["content-type"] == response.headers["content-type"]


async def test_a_flood_of_scrapes_asks_the_members_once(deployment: Deployment) -> None:
    answers = await asyncio.gather(*(deployment.client.get("/metrics") for _ in range(50)))
    assert len({answer.text for answer in answers}) == 1
    # The scripted verifier serves no Members: each round that asked it counts one error.
    assert deployment.service.scrape.errors["verifier"] == 1


async def test_other_routers_stand_in_the_cluster_report(deployment: Deployment) -> None:
    other = await _other_router(deployment)
    members = {m.incarnation: m for m in (deployment.service.identity, other.identity)}
    deployment.service.update_routers(members)
    report = (await deployment.client.get("/v1/cluster")).json()
    assert [row["incarnation"] for row in report["routers"]] == list(members)
    assert [row["state"] for row in report["routers"]] == ["ready", "not ready"]
    assert {row["mode"] for row in report["routers"]} == {"plain"}
    assert all(row["in_flight"] == 0 and row["reason"] for row in report["routers"])
    await other.close()


async def test_a_router_that_is_gone_is_silent(deployment: Deployment) -> None:
    other = await _other_router(deployment)
    await other.close()
    deployment.service.update_routers({other.identity.incarnation: other.identity})
    report = (await deployment.client.get("/v1/cluster")).json()
    assert [row["state"] for row in report["routers"]] == ["ready", "silent"]
    assert isinstance(report["routers"][1]["ready"], bool)


async def _other_router(deployment: Deployment):
    other = type(deployment.service)(RouterConfig())
    await other.listen("127.0.0.1")
    return other
