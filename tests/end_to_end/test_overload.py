"""Far more work than there is capacity for, through a real router and a real verifier, asked by
`paceline loadtest`: as much as ever gets done, the rest is refused at once and cleanly, and nothing
is left of it afterwards. Every part is a process of its own."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from benchmarks.loadtest.record import Outcome, RequestRecord, read_records
from cluster.config import (
    KVCacheConfig,
    ModelConfig,
    RouterConfig,
    SchedulerConfig,
    VerifierConfig,
)
from tests.support.member_processes import Elsewhere, elsewhere, running_router, running_verifier
from tests.support.polling import until
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.long, pytest.mark.alone]

NUM_PLACES = 4
NUM_TOKENS = 64
OVERLOAD = 5
CALM_S, OVERLOAD_S = 10.0, 60.0
RAMP_S = 2.0
RECOVERY_S = 5.0
REFUSAL_S = 0.05
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Load:
    """What came of a while of it."""

    records: list[RequestRecord]
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of whole answers, while it lasted; a half one is worth nothing."""
        ended = [one for one in self.records if RAMP_S < one.end_s <= self.seconds]
        answered = sum(one.output_tokens or 0 for one in ended if one.outcome is Outcome.OK)
        return answered / (self.seconds - RAMP_S)

    @property
    def answered_per_s(self) -> float:
        return self.tokens_per_s / NUM_TOKENS

    @property
    def refused(self) -> list[RequestRecord]:
        return [one for one in self.records if one.outcome is Outcome.REFUSED]

    @property
    def drained_s(self) -> float:
        """From the end of the load to the end of the last answer."""
        return max(one.end_s for one in self.records) - self.seconds


@dataclass(frozen=True, slots=True)
class System:
    """What is asked."""

    url: str
    members: tuple[Elsewhere, Elsewhere]

    async def is_idle(self) -> bool:
        held = [await member.ask("held") for member in self.members]
        return not any(held[0].values()) and not (held[1]["running"] or held[1]["waiting"])


@asynccontextmanager
async def running_system(config: VerifierConfig) -> AsyncIterator[System]:
    async with elsewhere(running_verifier, config) as verifier:
        member, card = await verifier.ask("member"), await verifier.ask("card")
        async with elsewhere(running_router, RouterConfig(), card) as router:
            await router.ask("introduce", {member.incarnation: member})

            async def is_usable() -> bool:
                return bool(await router.ask("num_usable_verifiers"))

            await until(is_usable, 20.0)
            yield System(await router.ask("url"), (router, verifier))


def write_profile(folder: Path, load: dict[str, object], seconds: float) -> Path:
    """Of a load test; its folder is made."""
    folder.mkdir()
    profile = {
        "endpoint": "completions",
        "prompts": {"kind": "generated", "output_tokens": {"low": NUM_TOKENS, "high": NUM_TOKENS}},
        "body": {"temperature": 0, "ignore_eos": True},
        "load": {**load, "duration_s": seconds},
    }
    path = folder / "profile.yaml"
    path.write_text(yaml.safe_dump(profile))
    return path


async def run(system: System, folder: Path, load: dict[str, object], seconds: float) -> Load:
    """`paceline loadtest` as a process, to its end."""
    profile = write_profile(folder, load, seconds)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cluster.cli", "loadtest", "--url", system.url),
        *("--profile", str(profile), "--out", str(folder)),
        cwd=REPOSITORY,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode()
    return Load(read_records(folder / "requests.jsonl"), seconds)


def quantile(values: list[float]) -> float:
    """p99."""
    return sorted(values)[int(0.99 * len(values))]


@pytest.fixture
async def system(tmp_path):
    """A model large enough that the engine, and not the router, is what is full."""
    source = make_tiny_model(
        tmp_path / "model", hidden_size=256, intermediate_size=768, num_layers=4
    )
    config = VerifierConfig(
        model=ModelConfig(source=str(source), dtype="float32"),
        kv_cache=KVCacheConfig(num_blocks=1024),
        scheduler=SchedulerConfig(max_running_sequences=NUM_PLACES, max_waiting_sequences=8),
    )
    async with running_system(config) as running:
        yield running


async def test_a_minute_of_five_times_the_capacity(system, tmp_path):
    full = {"kind": "closed", "concurrency": [NUM_PLACES + 2]}
    peak = await run(system, tmp_path / "before", full, CALM_S)
    assert {one.outcome for one in peak.records} == {Outcome.OK}

    rate = OVERLOAD * peak.answered_per_s
    flood = {"kind": "open", "rate": [rate]}
    overloaded = await run(system, tmp_path / "overload", flood, OVERLOAD_S)
    await until(system.is_idle, RECOVERY_S)
    again = await run(system, tmp_path / "after", full, CALM_S)

    refused = overloaded.refused
    refused_s = quantile([one.e2e_s for one in refused])
    answers = dict(Counter((one.status, one.code) for one in overloaded.records))
    print(
        f"\ntokens/s: {peak.tokens_per_s:.0f} before, {overloaded.tokens_per_s:.0f} at "
        f"{rate:.0f} requests/s, {again.tokens_per_s:.0f} after; {len(refused)} of "
        f"{len(overloaded.records)} refused, p99 {1e3 * refused_s:.1f} ms; idle after "
        f"{overloaded.drained_s:.1f} s; {answers}"
    )
    assert len(refused) > len(overloaded.records) / 2, "it was no overload"
    assert {one.status for one in overloaded.records} <= {200, 429, 503, 504}
    assert {one.outcome for one in overloaded.records} <= {Outcome.OK, Outcome.REFUSED}
    assert {one.code for one in refused} <= {"queue_full", "queue_too_long", "overloaded"}
    assert all((one.retry_after_s or 0) >= 1 for one in refused)
    assert refused_s < REFUSAL_S

    assert overloaded.drained_s < RECOVERY_S
    assert {one.outcome for one in again.records} == {Outcome.OK}
    # The machine may have other work before or after: the peak is what it had in both.
    assert overloaded.tokens_per_s >= 0.9 * min(peak.tokens_per_s, again.tokens_per_s)
    # A place that was lost would cost a quarter.
    assert again.tokens_per_s >= 0.8 * min(peak.tokens_per_s, overloaded.tokens_per_s)
