"""Does the path follow a load that swings, and do drafts fare as before when it comes back?

    python -m benchmarks.load_swing [--swings N] [--phase-s S] [--clients 1,32] [--out FILE]

The system of benchmarks/envelope.py: a verifier on a core of its own, a router on another, auto
requests, the verifier's own suffix drafter. By turns few and many clients ask one request after the
other, the few of texts that repeat themselves, so that there are drafts to count; who is too many
leaves at once, in the middle of an answer. Told are how long after each change of load the path of
auto requests changed, how often it did in each phase, and what share of the drafts was accepted in
each phase of few.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from benchmarks.envelope import KINDS, OTHER_CORES, System, pinned_to, running_system
from benchmarks.measuring import print_table
from cluster.config import SpeculationConfig

NUM_TOKENS = 48
LOOK_S = 0.02
MOST_LAG_S, MOST_SWITCHES, MOST_CHANGE = 2.0, 2, 0.05


@dataclass(slots=True)
class Phase:
    """Some seconds with so many clients, who may be few or many."""

    clients: int
    kind: str
    """Of text."""
    began_in: str = ""
    """Path of auto requests before it."""
    switches: list[tuple[float, str]] = field(default_factory=list)
    """Seconds since the load changed, and the path from then on."""
    drafts: list[tuple[int, int]] = field(default_factory=list)
    """Verified and accepted, by answer that was given in it, whole."""

    def accepted(self, num_answers: int) -> float:
        """Share of the drafts of the first answers; of one client these are the same in all
        phases."""
        drafted, accepted = map(sum, zip(*self.drafts[:num_answers], strict=True))
        return accepted / drafted if drafted else 0.0

    def cells(self) -> list[str]:
        told = ", ".join(f"{path} after {after_s:.2f} s" for after_s, path in self.switches)
        acceptance = f"{self.accepted(len(self.drafts)):.3f}" if self.drafts else ""
        begin = [str(self.clients), self.began_in, told or "stays"]
        return [*begin, str(len(self.drafts)), acceptance]


async def ask_for_ever(system: System, phase: Phase, client: int) -> None:
    """One request after the other, the same in each phase; none finds what another left behind."""
    texts = KINDS[phase.kind]
    for number in itertools.count(client):
        salt = f"{id(phase)} {client} {number}"
        told = (await system.complete(texts[number % len(texts)], NUM_TOKENS, salt))["speculation"]
        phase.drafts.append((told["num_draft_tokens"], told["num_accepted_tokens"]))


@asynccontextmanager
async def clients(system: System, phase: Phase) -> AsyncIterator[None]:
    tasks = [asyncio.create_task(ask_for_ever(system, phase, n)) for n in range(phase.clients)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if not isinstance(result, asyncio.CancelledError):
                raise SystemExit(f"a client ended: {result!r}")


async def watch(system: System, phase: Phase, seconds: float) -> None:
    """Note each change of the path of auto requests."""
    started = time.perf_counter()
    path = phase.began_in
    while (after_s := time.perf_counter() - started) < seconds:
        if (now := system.router.policy.mode.value) != path:
            phase.switches.append((after_s, now))
            path = now
        await asyncio.sleep(LOOK_S)


async def swing(system: System, phases: list[Phase], phase_s: float) -> None:
    for phase in phases:
        phase.began_in = system.router.policy.mode.value
        async with clients(system, phase):
            await watch(system, phase, phase_s)
        print(f"  {phase.clients} clients are done", flush=True)


def tell(phases: list[Phase]) -> None:
    few = phases[0].clients
    lags = [phase.switches[0][0] for phase in phases[1:] if phase.switches]
    # Two phases are a swing.
    per_swing = [
        len(one.switches) + len(two.switches)
        for one, two in zip(phases[1::2], phases[2::2], strict=True)
    ]
    calm = [phase for phase in phases if phase.clients == few]
    num_answers = min(len(phase.drafts) for phase in calm)
    first, *later = (phase.accepted(num_answers) for phase in calm)
    change = max(abs(share / first - 1.0) for share in later) if first else 0.0
    print_table(
        "A load that swings",
        ["clients", "path before", "path", "answers", "accepted"],
        [phase.cells() for phase in phases],
        f"longest lag {max(lags, default=0.0):.2f} s (wanted: {MOST_LAG_S:g}); most switches of a "
        f"swing {max(per_swing)} (wanted: {MOST_SWITCHES}); acceptance with few clients changed by "
        f"{change:.1%} at most (wanted: {MOST_CHANGE:.0%})",
    )


async def run(arguments: argparse.Namespace) -> None:
    few, many = arguments.clients
    phases = [Phase(few, "copy")]
    for _ in range(arguments.swings):
        phases += [Phase(many, "chat"), Phase(few, "copy")]
    async with running_system(SpeculationConfig()) as system:
        await swing(system, [Phase(few, "copy")], arguments.phase_s)  # to warm up
        await swing(system, phases, arguments.phase_s)
    tell(phases)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps([asdict(phase) for phase in phases], indent=1) + "\n")


def _few_and_many(text: str) -> tuple[int, int]:
    few, many = (int(part) for part in text.split(","))
    return few, many


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--swings", type=int, default=4, help="(%(default)s)")
    parser.add_argument("--phase-s", type=float, default=10.0, help="(%(default)s)")
    parser.add_argument("--clients", type=_few_and_many, default=(1, 32), help="(1,32)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="JSON of every phase")
    with pinned_to(OTHER_CORES):
        asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
