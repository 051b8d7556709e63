"""What is held for a request is given back, whatever becomes of the request: clients that leave by
the hundred, and minutes of everything that goes wrong at once.

A real router over HTTP, a real verifier and a real drafter with a model over gRPC; in the long
tests each is a process of its own, so that its memory can be told.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import Any

import httpx
import pytest

from cluster.config import (
    AdmissionConfig,
    DrafterConfig,
    KVCacheConfig,
    LimitsConfig,
    ModelConfig,
    RouterConfig,
    SchedulerConfig,
    SpeculationConfig,
    SuffixConfig,
    VerifierConfig,
)
from cluster.member_auth import Role
from cluster.types import Member
from router.cluster_scrape import SHARED_FOR_S
from tests.support.drafter_process import DrafterProcess
from tests.support.expositions import matching, total
from tests.support.member_processes import (
    Elsewhere,
    Handle,
    elsewhere,
    here,
    running_drafter,
    running_router,
    running_verifier,
)
from tests.support.polling import eventually, until
from tests.support.raw_stream import send_bytes
from tests.support.rude_clients import hang_up, send_raw, stop_reading, trickle
from tests.support.scripted_drafter import ScriptedDrafter, misbehaviours, noise
from tests.support.tiny_models import make_tiny_model
from tests.support.traffic import complete, steady_traffic

VOCAB_SIZE = 128
NUM_PLACES = 16
MAX_TOKENS = 400
GENERATE = "/paceline.generation.v1.Generation/Generate"
DRAFT = "/paceline.drafting.v1.Drafting/Draft"

SOAK_S = 600.0
FREED_WITHIN_S = 10.0
"""After all faults, on a machine that has other work; the bound of a second is the test above."""
WARM_UP_S = 120.0
SAMPLE_EVERY_S = 5.0
MAX_SLOPE_MB_PER_MIN = 0.5
MAX_MORE_FILES = 10
"""Open files and sockets after it, beyond those before: gRPC keeps a few for itself."""
LEAST_FIRED = 10
"""Times that each fault is to have come."""

Place = Callable[..., Any]
Request = tuple[str, dict[str, Any]]


@dataclass
class System:
    """What runs, and who was introduced to whom."""

    router: Handle
    verifier: Handle
    drafter: Handle
    url: str
    http: httpx.AsyncClient
    drafters: dict[str, Member] = field(default_factory=dict)
    """By what they are for."""

    @property
    def members(self) -> dict[str, Handle]:
        return {"router": self.router, "verifier": self.verifier, "drafter": self.drafter}

    async def introduce(self) -> None:
        """Tell the others which drafters there are."""
        verifier = await self.verifier.ask("member")
        drafters = {member.incarnation: member for member in self.drafters.values()}
        await self.verifier.ask("introduce", drafters)
        await self.router.ask("introduce", {verifier.incarnation: verifier}, drafters)

    async def held(self) -> dict[str, int]:
        """All that is held anywhere for any request, without what is not."""
        return {
            f"{name}: {what}": count
            for name, member in self.members.items()
            for what, count in (await member.ask("held")).items()
            if count
        }

    async def metrics(self) -> str:
        return (await self.http.get("/metrics")).text

    async def told(self) -> dict[str, float]:
        """The same as operators see it, without what is not; and of leases those that lapsed."""
        text = await self.metrics()
        report = (await self.http.get("/v1/cluster")).json()
        [router], [verifier] = report["routers"], report["verifiers"]
        gauges = {
            "running": total(text, "paceline_running_sequences"),
            "waiting": total(text, "paceline_waiting_sequences"),
            "blocks": total(text, "paceline_kv_blocks", state="used"),
            "sessions": total(text, "paceline_drafter_sessions"),
            "leases": total(text, "paceline_leases_expired_total"),
            "in_flight": router["in_flight"],
            **{f"report: {n}": verifier[n] for n in ("running", "waiting", "kv_blocks_used")},
            "report: sessions": sum(drafter["sessions"] for drafter in report["drafters"]),
        }
        return {name: value for name, value in gauges.items() if value}


@asynccontextmanager
async def running_system(model: str, place: Place) -> AsyncIterator[System]:
    """Each member at this `place`: here, or elsewhere."""
    target = ModelConfig(source=model, dtype="float32", name="tiny")
    blocks = KVCacheConfig(num_blocks=512)
    verifying = VerifierConfig(
        model=target,
        kv_cache=blocks,
        scheduler=SchedulerConfig(max_running_sequences=NUM_PLACES, max_waiting_sequences=1000),
        # Waits for each draft, so that those that are late are missed.
        speculation=SpeculationConfig(
            planner="fixed", suffix=SuffixConfig(max_remembered_tokens=4096)
        ),
    )
    drafting = DrafterConfig(kind="model", model=target, kv_cache=blocks)
    routing = RouterConfig(
        admission=AdmissionConfig(max_concurrent_requests=2000), limits=LimitsConfig(max_body_s=5.0)
    )
    async with (
        place(running_verifier, verifying) as verifier,
        place(running_drafter, drafting) as drafter,
        place(running_router, routing, await verifier.ask("card")) as router,
    ):
        url = await router.ask("url")
        async with httpx.AsyncClient(base_url=url, timeout=60) as http:
            drafters = {"steady": await drafter.ask("member")}
            system = System(router, verifier, drafter, url, http, drafters)
            await system.introduce()
            await until(lambda: is_ready(system), 20)
            yield system


async def is_ready(system: System) -> bool:
    response = await system.http.get("/health/ready")
    return response.status_code == 200 and await system.verifier.ask("num_ready_drafters") > 0


async def nothing_is_held(system: System, within_s: float) -> None:
    """Within that time, by the members' own books and then by what they tell of themselves."""
    ended = time.monotonic()
    for what in (system.held, system.told):
        while still := await what():
            assert time.monotonic() - ended < within_s, f"still held: {still}"
            await asyncio.sleep(0.02)


def request(rng: random.Random, number: int) -> Request:
    """One that nobody sent before: text, stream or not, choices, grammar, tenant, path."""
    prompt = f"{number} {rng.choice(['abcd', 'row row ', 'xyzzy-'])}" * rng.randint(1, 30)
    body: dict[str, Any] = {
        "model": "tiny",
        "max_tokens": MAX_TOKENS,
        "ignore_eos": True,
        "stream": rng.random() < 0.7,
        "n": rng.choice([1, 1, 1, 2]),
        "temperature": rng.choice([0.0, 0.8]),
        "speculation": {"mode": rng.choice(["on", "on", "auto", "off"])},
    }
    if rng.random() < 0.3:
        body["cache_salt"] = f"tenant {number}"
    if rng.random() < 0.2:
        body["stop"] = [f"stop {number}"]
    if rng.random() < 0.2:
        body |= {"prediction": {"type": "content", "content": prompt}}
    if rng.random() < 0.5:
        return "/v1/completions", body | {"prompt": prompt[:400]}
    if rng.random() < 0.3:
        schema = {"type": "object", "properties": {f"p{number % 50}": {"type": "string"}}}
        form = {"name": "made_up", "schema": schema}
        body |= {"response_format": {"type": "json_schema", "json_schema": form}}
    message = {"role": "user", "content": prompt[:400]}
    return "/v1/chat/completions", body | {"messages": [message]}


async def left(system: System) -> float:
    """Requests whose clients were gone before the answer was whole."""
    found = matching(await system.metrics(), "paceline_requests_total", status="499")
    return sum(value for _, value in found)


async def cancel_at_random(
    system: System, num_clients: int, spread_s: float, freed_within_s: float
) -> None:
    """Clients come within `spread_s`, and each leaves at a moment of its own; some before they are
    served. Then nothing is held."""
    rng = random.Random(11)
    peaks: Counter[str] = Counter()

    async def client(number: int) -> bool:
        path, body = request(rng, number)
        stay_s = rng.random() * spread_s
        await asyncio.sleep(rng.random() * spread_s)
        return await hang_up(system.url, path, body, stay_s)

    before = (await system.http.post("/v1/completions", json=PROBE)).json()["choices"]
    await nothing_is_held(system, 10.0)
    clients = asyncio.gather(*(client(number) for number in range(num_clients)))
    while not clients.done():
        for what, count in (await system.held()).items():
            peaks[what] = max(peaks[what], count)
        await asyncio.sleep(0.02)
    num_left = sum(await clients)
    await nothing_is_held(system, freed_within_s)
    # The proof that there was something to be freed, at every place.
    assert num_left > 0.7 * num_clients
    assert await left(system) > 0.5 * num_left
    assert peaks["verifier: running"] > NUM_PLACES / 2
    assert peaks["verifier: waiting"] > 0
    assert peaks["verifier: blocks"] > NUM_PLACES
    assert peaks["router: slots"] >= peaks["router: requests"] > NUM_PLACES
    assert peaks["verifier: leased"] > NUM_PLACES
    assert peaks["drafter: sessions"] > 0
    assert peaks["drafter: blocks"] > 0
    assert (await system.http.post("/v1/completions", json=PROBE)).json()["choices"] == before


PROBE = {"model": "tiny", "prompt": "abcd" * 20, "max_tokens": 40, "temperature": 0}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(make_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny", vocab_size=VOCAB_SIZE))


async def test_60_clients_that_leave_hold_nothing(model):
    async with running_system(model, here) as system:
        await cancel_at_random(system, 60, spread_s=0.5, freed_within_s=10.0)


@pytest.mark.long
@pytest.mark.alone
async def test_500_clients_that_leave_hold_nothing(model):
    async with running_system(model, elsewhere) as system:
        await cancel_at_random(system, 500, spread_s=4.0, freed_within_s=1.0)


# --- minutes of faults -------------------------------------------------------------------------


def steady_body(index: int, mode: str) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": f"prompt number {index} " * 3,
        "max_tokens": 200,
        "seed": index,
        "temperature": 0.7 if index % 2 else 0.0,
        "presence_penalty": 0.5 if index % 3 else 0.0,
        "ignore_eos": True,
        "speculation": {"mode": mode},
    }


MALFORMED: tuple[tuple[int, dict[str, Any]], ...] = (
    (400, {"content": b"{"}),
    (400, {"content": b"\xff\xfe" * 100}),
    (400, {"json": {"model": "tiny"}}),
    (400, {"json": PROBE | {"max_tokens": -1}}),
    (400, {"json": PROBE | {"temperature": "hot"}}),
    (400, {"json": PROBE | {"prompt": "x" * 5000}}),
    (400, {"json": PROBE | {"no_such_field": 1}}),
    (404, {"json": PROBE | {"model": "another"}}),
    (413, {"content": b"x" * (3 << 20)}),
)


class Faults:
    """Everything that goes wrong, each in a loop of its own until it is over."""

    def __init__(self, system: System) -> None:
        self.fired: Counter[str] = Counter()
        self._system = system
        self._rng = random.Random(5)
        self._numbers = itertools.count()
        self._over = asyncio.Event()
        self._loops: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Faults:
        kinds = (self._leave, self._kill, self._lie, self._be_late, self._send_garbage)
        more = (self._send_malformed, self._trickle, self._stop_reading)
        self._loops = [asyncio.create_task(self._repeat(kind)) for kind in kinds + more]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._over.set()
        await asyncio.gather(*self._loops)

    def check(self) -> None:
        """Raise what a loop raised."""
        for loop in self._loops:
            if loop.done():
                loop.result()

    async def _repeat(self, fault: Callable[[], Awaitable[None]]) -> None:
        while not self._over.is_set():
            await fault()
            await asyncio.sleep(self._rng.random())

    async def _leave(self) -> None:
        path, body = request(self._rng, next(self._numbers))
        self.fired["left"] += await hang_up(self._system.url, path, body, self._rng.random())

    async def _kill(self) -> None:
        """A drafter process at work is killed, or told to end."""
        async with DrafterProcess() as drafter, self._drafting("killed", drafter.member):
            await self._is_used(drafter.member)
            if self._rng.random() < 0.5:
                await drafter.kill()
                self.fired["killed"] += 1
            else:
                await drafter.terminate()
                self.fired["ended"] += 1

    async def _lie(self) -> None:
        answers = misbehaviours(VOCAB_SIZE)
        del answers["silence"]
        for name, answer in answers.items():
            async with ScriptedDrafter(answer) as liar, self._drafting("liar", liar.member):
                await self._is_used(liar.member)
                await self._for_a_while(1.0)
                self.fired[name] += len(liar.batches) > 0
            if self._over.is_set():
                return

    async def _be_late(self) -> None:
        """Each draft comes five deadlines after it was due."""
        async with ScriptedDrafter(noise(VOCAB_SIZE)) as late:
            late.delay_s = 0.1
            async with self._drafting("late", late.member):
                await self._for_a_while(5.0)

    async def _send_garbage(self) -> None:
        """To every port."""
        data = self._rng.randbytes(self._rng.randint(1, 3000))
        verifier = await self._system.verifier.ask("member")
        drafter = self._system.drafters["steady"]
        for member, role, method in (
            (verifier, Role.VERIFIER, GENERATE),
            (drafter, Role.DRAFTER, DRAFT),
        ):
            await send_bytes(member.address, role, method, [data])
            await send_raw(member.address, data, 0.1)
        await send_raw(self._system.url.removeprefix("http://"), data, 0.1)
        self.fired["garbage"] += 1

    async def _send_malformed(self) -> None:
        for status, what in MALFORMED:
            response = await self._system.http.post("/v1/completions", **what)
            assert response.status_code == status, response.text
            self.fired["malformed"] += 1

    async def _trickle(self) -> None:
        answer = await trickle(self._system.url, "/v1/completions", PROBE, 0.2)
        assert answer.startswith(b"HTTP/1.1 408"), answer
        self.fired["trickled"] += 1

    async def _stop_reading(self) -> None:
        path, body = "/v1/completions", PROBE | {"stream": True, "logprobs": 5, "ignore_eos": True}
        body |= {"max_tokens": MAX_TOKENS, "n": 4, "temperature": 1.0}
        answer = await stop_reading(self._system.url, path, body, 3.0)
        assert b"data: [DONE]" in answer, answer[-500:]
        self.fired["read nothing"] += 1

    @asynccontextmanager
    async def _drafting(self, what: str, member: Member) -> AsyncIterator[None]:
        self._system.drafters[what] = member
        await self._system.introduce()
        yield
        del self._system.drafters[what]
        await self._system.introduce()

    async def _is_used(self, member: Member) -> None:
        """Until it has a session."""
        verifier = self._system.verifier
        await until(lambda: verifier.ask("num_sessions_at", member.incarnation), 30)

    async def _for_a_while(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._over.wait()


Samples = dict[str, list[tuple[float, float]]]
"""(seconds, MB) by member."""


async def watch_memory(system: System, faults: Faults, duration_s: float) -> Samples:
    samples: Samples = defaultdict(list)
    started = time.monotonic()
    while (elapsed_s := time.monotonic() - started) < duration_s:
        for name, member in system.members.items():
            assert isinstance(member, Elsewhere)
            samples[name].append((elapsed_s, await member.memory_bytes() / 2**20))
        faults.check()
        await asyncio.sleep(SAMPLE_EVERY_S)
    return samples


def slope_mb_per_min(samples: list[tuple[float, float]], after_s: float) -> float:
    times_s, mb = zip(*(one for one in samples if one[0] >= after_s), strict=True)
    return 60 * linear_regression(times_s, mb).slope


async def soak(model: str, duration_s: float) -> tuple[Samples, Counter[str]]:
    """All faults for that long, under steady traffic, each answer of which is what it must be. The
    memory of each member, and how often each fault came."""
    async with running_system(model, elsewhere) as system:
        bodies = [steady_body(index, "on") for index in range(4)]
        expected = [await complete(system.http, steady_body(i, "off")) for i in range(4)]
        assert {answer.end for answer in expected} == {"[DONE]"}
        before, files = await system.metrics(), num_files(system)
        async with (
            steady_traffic(system.url, bodies) as traffic,
            Faults(system) as faults,
        ):
            samples = await watch_memory(system, faults, duration_s)
        print({name: [round(mb, 1) for _, mb in taken] for name, taken in samples.items()})
        await nothing_is_held(system, FREED_WITHIN_S)
        assert not traffic.wrong(expected)
        # Connections that wait for another request are closed after 5 s.
        await eventually(lambda: all_closed(num_files(system), files), 30, every_s=1.0)
        fired = faults.fired + await seen_by_the_system(system, before)
        fired["answers"] = len(traffic.answers)
    return samples, fired


def num_files(system: System) -> dict[str, int]:
    """Of each member."""
    members = system.members.items()
    return {name: m.num_files() for name, m in members if isinstance(m, Elsewhere)}


def all_closed(now: dict[str, int], before: dict[str, int]) -> bool:
    return all(count <= before[name] + MAX_MORE_FILES for name, count in now.items())


async def seen_by_the_system(system: System, before: str) -> Counter[str]:
    """Faults by the members' own counters, since `before`."""
    await asyncio.sleep(SHARED_FOR_S)
    text = await system.metrics()

    def since(name: str, **labels: str) -> int:
        return int(sum(v for _, v in matching(text, name, **labels))) - int(
            sum(v for _, v in matching(before, name, **labels))
        )

    seen: Counter[str] = Counter()
    for reason in ("late", "drafter_lost", "drafter_draining", "resync"):
        seen[f"fallback {reason}"] = since("paceline_fallbacks_total", reason=reason)
    for outcome in ("malformed", "unknown_anchor", "stale_epoch", "unknown_session"):
        seen[f"draft {outcome}"] = since("paceline_draft_outcomes_total", outcome=outcome)
    for status in ("499", "408", "400", "404", "413"):
        seen[f"status {status}"] = since("paceline_requests_total", status=status)
    return seen


@pytest.mark.long
@pytest.mark.alone
async def test_ten_minutes_of_faults_leave_memory_flat(model):
    samples, fired = await soak(model, SOAK_S)
    slopes = {name: slope_mb_per_min(taken, WARM_UP_S) for name, taken in samples.items()}
    print(dict(fired), slopes)
    assert min(fired.values()) >= LEAST_FIRED, fired
    assert max(slopes.values()) < MAX_SLOPE_MB_PER_MIN, slopes


def test_a_leak_would_be_seen():
    """Half a megabyte a minute on top of a memory that goes up and down."""
    rng = random.Random(1)
    flat = [(t, 300 + rng.random()) for t in range(0, int(SOAK_S), int(SAMPLE_EVERY_S))]
    leaking = [(t, mb + 0.6 * t / 60) for t, mb in flat]
    assert abs(slope_mb_per_min(flat, WARM_UP_S)) < 0.2
    assert slope_mb_per_min(leaking, WARM_UP_S) > MAX_SLOPE_MB_PER_MIN
