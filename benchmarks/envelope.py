"""Is auto at least as fast as the better of always and never speculating, at every load?

    python -m benchmarks.envelope [--quick] [--rounds N] [--clients 1,32] [--drafters suffix,model]
                                  [--out FILE]

A verifier with the embedded model in a process and on a core of its own; on the others a router in
this process, and the embedded drafter in one of its own. Each cell is a kind of text, a drafter and
a number of clients, each of which has one request under way at any time; their first answers are of
different lengths, so that in every mode a client's prompt is read amid the others' answers. In each
of its rounds all modes answer the same prompts, in an order that rotates, so that what else runs on
the machine meets all of them alike. Answers that do not count go before, for verifier and router to
get used to the load. Figures are tokens per second of wall-clock time, from the end of the first
answer, before which all prompts are read at once, until a client finds no prompt left, after which
fewer are under way. The bound is the 2.5 % quantile of a bootstrap over rounds. First of all, while
neither has served much: 32 plain streams on a verifier that could speculate against those on one
that cannot, by turns.
benchmarks/envelope_prediction.py compares what `--out` writes with the simulator.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import os
import random
import statistics
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx

from benchmarks.measuring import print_table
from cluster.config import (
    EMBEDDED_DRAFTER,
    EMBEDDED_MODEL,
    ModelConfig,
    RouterConfig,
    SchedulerConfig,
    SpeculationConfig,
    VerifierConfig,
)
from cluster.types import Member
from router.api import create_app
from router.service import RouterService
from tests.support import prompts
from tests.support.drafter_process import DrafterProcess
from tests.support.member_processes import Elsewhere, elsewhere, running_verifier
from tests.support.polling import eventually, until

MODES = ("off", "on", "auto")
KINDS = {"chat": prompts.CHAT, "copy": [f"{line}\n" * 4 for line in prompts.LINES]}
DRAFTERS = ("suffix", "model")
CONCURRENCIES = (1, 2, 4, 8, 16, 32)
QUICK_CONCURRENCIES = (1, 8, 32)
LEAST_MEAN, LEAST_BOUND, MOST_TAX = 0.97, 0.93, 0.02
RESAMPLES = 1000
MIN_ANSWERS = 4
"""Of a round; by default three of each client."""
START_TIMEOUT_S = 120.0
PROFILE_CONTEXTS = (0, 256)
"""A profile is taken after each round, for the simulator."""
CORES = sorted(os.sched_getaffinity(0))
VERIFIER_CORES, OTHER_CORES = set(CORES[:1]), set(CORES[1:] or CORES)
NEVER = SpeculationConfig(num_speculative_tokens=0, local_drafters=())


@dataclass(frozen=True, slots=True)
class System:
    """A router over one verifier."""

    http: httpx.AsyncClient
    router: RouterService
    verifier: Elsewhere
    model: str

    async def run(
        self, texts: Sequence[str], num_clients: int, num_tokens: int, salt: str, **speculation: str
    ) -> Run:
        """All texts, more than one for each of so many clients."""
        waiting = iter(enumerate(texts))
        replies: dict[int, dict[str, Any]] = {}
        seen: list[tuple[float, int]] = []
        """When a client came for another prompt, and how many tokens there were by then."""
        ends: list[int] = []
        """Places in `seen` where one found none."""

        async def ask() -> None:
            for index, text in waiting:
                length = answer_tokens(index, num_clients, num_tokens)
                replies[index] = await self.complete(text, length, salt, **speculation)
                seen.append((time.perf_counter(), self.num_tokens))
            ends.append(len(seen) - 1)

        await asyncio.gather(*(ask() for _ in range(num_clients)))
        (started, before), (ended, after) = seen[0], seen[ends[0]]
        told = [replies[index]["speculation"] for index in range(len(texts))]
        return Run(
            (after - before) / (ended - started),
            sum(one["path"] == "plain" for one in told) / len(texts),
            [one["num_accepted_tokens"] / max(1, one["num_steps"]) for one in told],
            statistics.mean(_tokens_read(reply["usage"]) for reply in replies.values()),
        )

    @property
    def num_tokens(self) -> int:
        """That the router has seen so far."""
        metrics = self.router.requests
        return metrics.ttft.count + metrics.inter_token.count

    async def complete(
        self, text: str, num_tokens: int, salt: str, **speculation: str
    ) -> dict[str, Any]:
        """The reply to a request for so many tokens."""
        body = {
            "model": self.model,
            "prompt": text,
            "max_tokens": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            # No run may read what the one before it has computed.
            "cache_salt": salt,
            "speculation": speculation,
        }
        response = await self.http.post("/v1/completions", json=body)
        response.raise_for_status()
        reply: dict[str, Any] = response.json()
        return reply


@dataclass(frozen=True, slots=True)
class Run:
    """Of one mode in one round."""

    tokens_per_s: float
    plain_share: float
    """Of the answers that ended on the plain path."""
    accepted_per_step: Sequence[float] = ()
    """Drafts, over a sequence's steps of all kinds; of each answer."""
    prompt_tokens: float = 0.0
    """Mean length, without what the prefix cache held."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One point of the envelope."""

    kind: str
    drafter: str
    concurrency: int
    runs: dict[str, list[Run]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    def speeds(self, mode: str) -> list[float]:
        return [run.tokens_per_s for run in self.runs[mode]]

    @property
    def ratio(self) -> float:
        """Auto over the better of the other two."""
        return _ratio({mode: self.speeds(mode) for mode in MODES})

    @property
    def bound(self) -> float:
        """Lower end of the ratio's 95 % interval. Rounds are drawn whole: what slows one down slows
        all its modes."""
        rng = random.Random(0)
        measured = zip(*(self.speeds(mode) for mode in MODES), strict=True)
        rounds = [dict(zip(MODES, speeds, strict=True)) for speeds in measured]
        resampled = sorted(
            _ratio({mode: [speeds[mode] for speeds in drawn] for mode in MODES})
            for drawn in (rng.choices(rounds, k=len(rounds)) for _ in range(RESAMPLES))
        )
        return resampled[round(0.025 * RESAMPLES)]

    def cells(self) -> list[str]:
        means = [statistics.mean(self.speeds(mode)) for mode in MODES]
        plain = statistics.mean(run.plain_share for run in self.runs["auto"])
        name = f"{self.kind}, {self.drafter}, {self.concurrency}"
        figures = [f"{mean:.1f}" for mean in means]
        return [name, *figures, f"{plain:.0%}", f"{self.ratio:.3f}", f"{self.bound:.3f}"]


def _tokens_read(usage: dict[str, Any]) -> int:
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    return int(usage["prompt_tokens"]) - cached


def _ratio(speeds: Mapping[str, Sequence[float]]) -> float:
    mean = {mode: statistics.mean(values) for mode, values in speeds.items()}
    return mean["auto"] / max(mean["on"], mean["off"])


@asynccontextmanager
async def running_system(
    speculation: SpeculationConfig, drafters: Sequence[Member] = ()
) -> AsyncIterator[System]:
    """A verifier in a process and on a core of its own, and a router in this one."""
    config = VerifierConfig(
        model=ModelConfig(source=EMBEDDED_MODEL),
        scheduler=SchedulerConfig(max_running_sequences=32),
        speculation=speculation,
    )
    async with AsyncExitStack() as stack:
        with pinned_to(VERIFIER_CORES):
            verifier = await stack.enter_async_context(elsewhere(running_verifier, config))
        await verifier.ask("introduce", {member.incarnation: member for member in drafters})
        card, member = await verifier.ask("card"), await verifier.ask("member")
        router = RouterService(RouterConfig(), card=card)
        stack.push_async_callback(router.close)
        router.start()
        router.update_members({member.incarnation: member})
        await eventually(lambda: router.not_ready_reason is None, START_TIMEOUT_S)

        async def has_drafters() -> bool:
            return bool(await verifier.ask("num_ready_drafters") == len(drafters))

        await until(has_drafters, START_TIMEOUT_S)
        transport = httpx.ASGITransport(create_app(router))
        client = httpx.AsyncClient(transport=transport, base_url="http://router", timeout=None)
        yield System(await stack.enter_async_context(client), router, verifier, card.name)


async def measure(system: System, cell: Cell, number: int, num_tokens: int) -> None:
    """One round of a cell."""
    asked = texts_of(cell.kind, max(MIN_ANSWERS, 3 * cell.concurrency))
    prefix = f"{cell.kind} {cell.drafter} {cell.concurrency} {number}"

    async def run(texts: Sequence[str], salt: str, **mode: str) -> Run:
        drafter = cell.drafter
        return await system.run(texts, cell.concurrency, num_tokens, salt, drafter=drafter, **mode)

    await run(asked[: 2 * cell.concurrency], f"{prefix} before")
    for index in range(len(MODES)):
        mode = MODES[(number + index) % len(MODES)]
        cell.runs[mode].append(await run(asked, f"{prefix} {mode}", mode=mode))


def answer_tokens(index: int, num_clients: int, num_tokens: int) -> int:
    """Length of an answer: so many tokens, but for the first ones of the clients."""
    return num_tokens if index >= num_clients else math.ceil(num_tokens * (index + 1) / num_clients)


def texts_of(kind: str, count: int) -> list[str]:
    return list(itertools.islice(itertools.cycle(KINDS[kind]), count))


def print_envelope(cells: Sequence[Cell]) -> None:
    """All cells, and whether they keep what is promised."""
    mean = math.exp(statistics.mean(math.log(cell.ratio) for cell in cells))
    lowest = min(cells, key=lambda cell: cell.bound)
    print_table(
        "Tokens per second",
        ["text, drafter, clients", *MODES, "plain", "auto/better", "bound"],
        [cell.cells() for cell in cells],
        f"geometric mean {mean:.3f} (wanted: {LEAST_MEAN}); lowest bound {lowest.bound:.3f} in "
        f"{lowest.cells()[0]} (wanted: {LEAST_BOUND})",
    )


async def print_tax(configured: System, rounds: int, num_tokens: int) -> None:
    """What a verifier that could speculate loses while nobody does."""
    texts = texts_of("chat", 2 * 32)
    speeds: dict[str, list[float]] = {"could": [], "cannot": []}
    async with running_system(NEVER) as never:
        for number in range(rounds):
            order = [("could", configured), ("cannot", never)]
            for name, system in order if number % 2 else reversed(order):
                run = await system.run(texts, 32, num_tokens, f"tax {number} {name}", mode="off")
                speeds[name].append(run.tokens_per_s)
    could, cannot = (statistics.median(speeds[name]) for name in ("could", "cannot"))
    print_table(
        "32 plain streams, tokens per second",
        ["verifier", "median", "all"],
        [
            [name, f"{statistics.median(values):.1f}", " ".join(f"{v:.1f}" for v in values)]
            for name, values in speeds.items()
        ],
        f"speculation that nobody uses costs {1 - could / cannot:.1%} (wanted: under "
        f"{MOST_TAX:.0%})",
    )


@contextmanager
def pinned_to(cores: set[int]) -> Iterator[None]:
    """This thread, and what it starts meanwhile, runs on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


async def run(arguments: argparse.Namespace) -> None:
    concurrencies = arguments.clients or (QUICK_CONCURRENCIES if arguments.quick else CONCURRENCIES)
    num_tokens = 32 if arguments.quick else 64
    rounds = arguments.rounds or (3 if arguments.quick else 8)
    cells = [Cell(*key) for key in itertools.product(KINDS, arguments.drafters, concurrencies)]
    async with AsyncExitStack() as stack:
        members = []
        if "model" in arguments.drafters:
            process = DrafterProcess("--kind", "model", "--model", EMBEDDED_DRAFTER)
            members.append((await stack.enter_async_context(process)).member)
        system = await stack.enter_async_context(running_system(SpeculationConfig(), members))
        await system.run(KINDS["chat"][:4], 2, 16, "warm", mode="on")
        await print_tax(system, rounds, num_tokens)
        profiles = []
        for number in range(rounds):
            for cell in cells:
                await measure(system, cell, number, num_tokens)
            profiles.append(await system.verifier.ask("profile", PROFILE_CONTEXTS))
            print(f"round {number + 1} of {rounds} is done", flush=True)
        print_envelope(cells)
        if arguments.out is not None:
            report = {
                "num_tokens": num_tokens,
                "num_texts": {kind: len(texts) for kind, texts in KINDS.items()},
                "cells": [asdict(cell) for cell in cells],
                "profiles": profiles,
            }
            arguments.out.write_text(json.dumps(report, indent=1) + "\n")


def _clients(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def _drafters(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= set(DRAFTERS):
        raise argparse.ArgumentTypeError(f"must be of {', '.join(DRAFTERS)}")
    return names


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="a smaller grid, in about 5 minutes")
    parser.add_argument("--rounds", type=int, help="by default 8, quick 3")
    parser.add_argument("--clients", type=_clients, help="by default 1,2,4,8,16,32, quick 1,8,32")
    parser.add_argument("--drafters", type=_drafters, default=DRAFTERS, help="suffix,model")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of every run")
    with pinned_to(OTHER_CORES):
        asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
