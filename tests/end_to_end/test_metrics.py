"""/metrics of a cluster that runs: two routers, a verifier and a drafter, real gRPC, no Ray."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from cluster.config import DrafterConfig, PathPolicyConfig, RouterConfig
from cluster.metrics import METRICS, Kind
from cluster.types import Member
from drafter_service.service import DrafterService
from router.api import create_app
from router.cluster_scrape import DEADLINE_S, SHARED_FOR_S
from router.service import RouterService
from tests.support.expositions import matching, series_of, total, types_of
from tests.support.generation import RunningVerifier, running_verifier
from tests.support.polling import TIMEOUT_S, eventually, until
from tests.support.tiny_models import make_tiny_model

SPECULATE = {"speculation": {"mode": "on"}}
NOWHERE = "127.0.0.1:1"


@dataclass
class Router:
    """One router without a socket for HTTP, and a clock that also stands still for nobody."""

    service: RouterService
    http: httpx.AsyncClient
    skipped_s: list[float] = field(default_factory=lambda: [0.0])

    async def scrape(self) -> str:
        """A fresh one: what is shared for a while is over."""
        self.skipped_s[0] += 2 * SHARED_FOR_S
        response = await self.http.get("/metrics")
        assert response.status_code == 200
        return response.text

    async def complete(self, prompt: str, **fields: object) -> httpx.Response:
        body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
        return await self.http.post("/v1/completions", json=body)


@asynccontextmanager
async def running_router(verifier: RunningVerifier) -> AsyncIterator[Router]:
    skipped_s = [0.0]
    loop = asyncio.get_running_loop()
    # Skipping time makes load reports look old, which is not to change the mode.
    config = RouterConfig(path_policy=PathPolicyConfig(max_load_age_s=86_400))
    service = RouterService(
        config, card=verifier.service.card, clock=lambda: loop.time() + skipped_s[0]
    )
    await service.listen("127.0.0.1")
    service.start()
    transport = httpx.ASGITransport(create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield Router(service, http, skipped_s)
    await service.close()


@dataclass
class Cluster:
    """What runs, and who knows whom."""

    routers: list[Router]
    verifier: RunningVerifier
    drafter: DrafterService

    def introduce(self, *more_drafters: Member) -> None:
        service, drafter = self.verifier.service, self.drafter
        fingerprint = service.card.fingerprint
        verifiers = [Member(service.incarnation, service.address, fingerprint=fingerprint)]
        drafters = [Member(drafter.incarnation, drafter.address), *more_drafters]
        for router in self.routers:
            router.service.update_members({m.incarnation: m for m in verifiers})
            router.service.update_drafters({m.incarnation: m for m in drafters})
            identities = [other.service.identity for other in self.routers]
            router.service.update_routers({m.incarnation: m for m in identities})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny"))


@pytest.fixture
async def cluster(model: str) -> AsyncIterator[Cluster]:
    async with AsyncExitStack() as stack:
        drafter = await DrafterService.start(DrafterConfig(), host="127.0.0.1")
        stack.push_async_callback(drafter.stop, 0.5)
        # A deadline that is never missed: what is drafted for depends on nobody's speed.
        running = running_verifier(model, dtype="float32", draft_deadline_ms=10_000)
        verifier = await stack.enter_async_context(running)
        await verifier.use_drafters(Member(drafter.incarnation, drafter.address))
        routers = [await stack.enter_async_context(running_router(verifier)) for _ in range(2)]
        made = Cluster(routers, verifier, drafter)
        made.introduce()
        await eventually(lambda: all(router.service.pool.ready for router in routers))
        yield made


def prompts() -> Iterator[str]:
    """Texts that repeat, so that n-grams are found."""
    for word in ("abcd", "row row ", "xyzzy-"):
        yield word * 40


async def draft_much(router: Router) -> int:
    """Requests until drafts were accepted and refused; returns how many were sent. Some answers
    are over before a drafter has read their prompts."""
    num_sent = 0

    async def was_enough() -> bool:
        nonlocal num_sent
        for prompt in prompts():
            reply = await router.complete(prompt, max_tokens=40, **SPECULATE)
            assert reply.status_code == 200
            num_sent += 1
        text = await router.scrape()
        return all(total(text, f"paceline_{name}_tokens_total") for name in ("accepted", "wasted"))

    await until(was_enough, TIMEOUT_S)
    return num_sent


async def test_every_metric_is_told_and_numbers_add_up(cluster: Cluster) -> None:
    first, second = cluster.routers
    before = await first.scrape()
    # Who takes differences must see these before the first draft.
    for name in ("num_drafts", "num_draft_tokens", "num_accepted_tokens"):
        assert total(before, f"vllm:spec_decode_{name}_total") == 0
    positions = {
        series.label("position")
        for series, _ in matching(before, "vllm:spec_decode_num_accepted_tokens_per_pos_total")
    }
    assert positions == {str(position) for position in range(8)}

    num_drafted = await draft_much(first)
    assert (await first.complete(next(prompts()), max_tokens=40, **SPECULATE)).status_code == 200
    num_drafted += 1
    plain = await second.complete("hello", max_tokens=5, speculation={"mode": "off"})
    assert plain.status_code == 200
    streamed = await second.complete("abc" * 20, max_tokens=30, stream=True, n=2)
    assert streamed.text.endswith("data: [DONE]\n\n")
    refused = await first.complete("hello", max_tokens=-1)
    assert refused.status_code == 400
    num_answered = num_drafted + 2

    text = await first.scrape()
    types = types_of(text)
    told = {metric.name for metric in METRICS} & types.keys()
    # These have no series before the first: nothing was refused for want of room, or went unasked.
    missing = {metric.name for metric in METRICS} - told
    assert missing <= {"paceline_admission_rejections_total"}
    assert all(types[metric.name] == metric.kind for metric in METRICS if metric.name in told)

    # Requests.
    assert total(text, "paceline_requests_total") == num_answered + 1
    assert total(text, "paceline_requests_total", status="200") == num_answered
    assert total(text, "paceline_requests_total", status="400", path="none", reason="none") == 1
    assert total(text, "paceline_requests_total", path="plain", reason="request_mode_off") == 1
    on = total(text, "paceline_requests_total", path="speculative", reason="request_mode_on")
    assert on == num_drafted
    for name in ("ttft", "e2e"):
        assert total(text, f"paceline_{name}_seconds_count") == num_answered
    num_choices = num_answered + 1
    assert total(text, "paceline_tpot_seconds_count") == num_choices
    num_tokens = 40 * num_drafted + 5 + 2 * 30
    num_chunks = total(text, "paceline_inter_chunk_seconds_count")
    num_later_tokens = total(text, "paceline_inter_token_seconds_count")
    assert num_chunks < num_later_tokens < num_tokens, "a chunk held several tokens"
    later_s = total(text, "paceline_inter_token_seconds_sum")
    assert later_s == pytest.approx(total(text, "paceline_inter_chunk_seconds_sum"))
    assert 0 < later_s < 2 * total(text, "paceline_e2e_seconds_sum"), "at most two choices at once"
    assert 0 < total(text, "paceline_ttft_seconds_sum") < total(text, "paceline_e2e_seconds_sum")

    # Speculation.
    drafted = total(text, "paceline_draft_tokens_total")
    accepted = total(text, "paceline_accepted_tokens_total")
    assert drafted == accepted + total(text, "paceline_wasted_tokens_total")
    assert total(text, "paceline_accepted_tokens_per_position_total") == accepted > 0
    assert total(text, "vllm:spec_decode_num_draft_tokens_total") == drafted
    assert total(text, "vllm:spec_decode_num_accepted_tokens_total") == accepted
    assert total(text, "vllm:spec_decode_num_accepted_tokens_per_pos_total") == accepted
    num_drafts = total(text, "vllm:spec_decode_num_drafts_total")
    assert 0 < num_drafts <= drafted
    # Every accepted draft is a token that no step of its own was needed for.
    num_steps = total(text, "paceline_verify_step_seconds_count")
    assert num_steps == total(text, "paceline_step_tokens_count") > 0
    used = total(text, "paceline_draft_outcomes_total", outcome="used")
    assert total(text, "paceline_draft_rtt_seconds_count") > 0
    assert used > 0
    assert total(text, "paceline_draft_wait_seconds_count") > 0
    assert total(text, "paceline_draft_price") >= 0
    assert matching(text, "paceline_draft_gain"), "it is known of what was drafted for"

    # State.
    assert total(text, "paceline_running_sequences") == 0
    assert total(text, "paceline_kv_blocks", state="used") == 0
    assert total(text, "paceline_kv_blocks") == 1024
    assert total(text, "paceline_drafter_breaker_state", state="ready") == 1
    assert total(text, "paceline_drafter_breaker_state") == 1
    assert total(text, "paceline_prefix_cache_hits_total") > 0
    hits, queries = (f"paceline_prefix_cache_{name}_total" for name in ("hits", "queries"))
    assert total(text, hits) < total(text, queries)
    for router in cluster.routers:
        replica = router.service.identity.incarnation
        modes = dict(matching(text, "paceline_path_mode", replica=replica))
        assert sorted(modes.values()) == [0, 1]


async def test_two_routers_agree(cluster: Cluster) -> None:
    first, second = cluster.routers
    for router in cluster.routers:
        assert (await router.complete("abcd" * 30, max_tokens=20, **SPECULATE)).status_code == 200
    await eventually(lambda: cluster.drafter.num_sessions == 0)
    one, other = await first.scrape(), await second.scrape()
    assert series_of(one) == series_of(other)
    replicas = {series.label("replica") for series in series_of(one)}
    assert len(replicas) == 4, "a router, or another member, is missing"


async def test_each_of_ten_equal_requests_is_drafted_for(cluster: Cluster) -> None:
    """This answer repeats itself over and over from its 7th token on, and is long enough for a
    session to be opened meanwhile, however busy the machine is."""
    first, _ = cluster.routers
    counts = []
    for _ in range(10):
        await first.complete("abcd" * 40, max_tokens=300, **SPECULATE)
        counts.append(total(await first.scrape(), "vllm:spec_decode_num_drafts_total"))
    assert counts == sorted(set(counts)), "one of them brought no drafts"


async def test_sessions_that_are_open_show(cluster: Cluster) -> None:
    first, _ = cluster.routers
    running = asyncio.create_task(first.complete("abcd" * 30, max_tokens=600, **SPECULATE))
    await eventually(lambda: cluster.drafter.num_sessions == 1)
    text = await first.scrape()
    assert not running.done(), "it was over too soon to show anything"
    assert total(text, "paceline_drafter_sessions") == 1
    assert total(text, "paceline_running_sequences") == 1
    assert total(text, "paceline_kv_blocks", state="used") > 0
    await running
    await eventually(lambda: cluster.drafter.num_sessions == 0)
    assert total(await first.scrape(), "paceline_drafter_sessions") == 0


async def test_a_dead_member_costs_its_series_and_no_more_than_the_deadline(
    cluster: Cluster,
) -> None:
    first, _ = cluster.routers
    silent = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = silent.sockets[0].getsockname()[1]
    cluster.introduce(Member("hangs", f"127.0.0.1:{port}"), Member("is-gone", NOWHERE))
    loop = asyncio.get_running_loop()
    for round_ in (1, 2):
        started = loop.time()
        text = await first.scrape()
        assert loop.time() - started < 10 * DEADLINE_S
        assert total(text, "paceline_scrape_errors_total", role="drafter") == 2 * round_
        assert total(text, "paceline_scrape_errors_total", role="verifier") == 0
        assert total(text, "paceline_drafter_sessions") == 0
        assert total(text, "paceline_kv_blocks") == 1024
    silent.close()
    cluster.introduce()
    text = await first.scrape()
    assert total(text, "paceline_scrape_errors_total", role="drafter") == 4


def test_counters_are_declared_with_their_suffix() -> None:
    """aiperf takes them for untyped otherwise; what _total is not is no counter."""
    for metric in METRICS:
        assert (metric.kind is Kind.COUNTER) == metric.name.endswith("_total")
