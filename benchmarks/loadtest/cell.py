"""The order of a load test: which arm is run at which level, and when its requests are due."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.loadtest.arrivals import Arrival, draw_arrivals, replay_arrivals
from benchmarks.loadtest.profile import (
    Arm,
    ClosedLoad,
    OpenLoad,
    Profile,
    ReplayLoad,
    SwingLoad,
)
from benchmarks.loadtest.trace import read_trace

REQUESTS_PER_LEVEL = 10_000_000
"""Apart lie the requests of two levels, so that no prompt is asked twice except by another arm."""


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of a closed load."""

    users: int
    until_s: float
    """Its end, since the start of the cell; infinite where requests are counted."""


@dataclass(frozen=True, slots=True)
class ClosedOffer:
    """Users that each wait for their answer."""

    phases: tuple[Phase, ...]
    num_requests: int | None
    """None: until the last phase ends."""


@dataclass(frozen=True, slots=True)
class OpenOffer:
    """Requests at set times."""

    arrivals: tuple[Arrival, ...]
    duration_s: float


@dataclass(frozen=True, slots=True)
class Level:
    """A point of a sweep."""

    label: str
    """As the report calls it."""
    value: float
    """Its place on an axis: users, or requests per second, or speed of a replay."""
    offer: ClosedOffer | OpenOffer


@dataclass(frozen=True, slots=True)
class Cell:
    """One level with one arm, once."""

    index: int
    repeat: int
    level: Level
    arm: Arm
    first_request: int
    """Index of its first prompt. Cells of one level and repeat ask the same."""

    @property
    def title(self) -> str:
        return f"{self.level.label}, {self.arm.name}"


def plan_cells(profile: Profile, capacity_rps: float | None = None) -> list[Cell]:
    """All cells in the order of running: levels as given, arms by turns in an order that the seed
    draws anew for each level and repeat.

    Args:
        capacity_rps: Requests per second that the server can answer; needed where rates are
            multiples of it.
    """
    order = np.random.default_rng((profile.seed, 1))
    cells: list[Cell] = []
    for repeat in range(profile.repeats):
        for number, level in enumerate(_levels(profile, repeat, capacity_rps)):
            first = (repeat * 1_000 + number) * REQUESTS_PER_LEVEL
            for position in order.permutation(len(profile.arms)):
                arm = profile.arms[position]
                cells.append(Cell(len(cells), repeat, level, arm, first))
    return cells


def capacity_cell(profile: Profile, load: OpenLoad) -> Cell:
    """The closed cell that measures capacity, before all others and with requests of its own."""
    phase = Phase(load.capacity_concurrency, load.duration_s)
    level = Level("capacity", load.capacity_concurrency, ClosedOffer((phase,), None))
    return Cell(-1, 0, level, profile.arms[0], -REQUESTS_PER_LEVEL)


def _levels(profile: Profile, repeat: int, capacity_rps: float | None) -> list[Level]:
    load = profile.load
    if isinstance(load, ClosedLoad):
        return [_closed(load, users) for users in load.concurrency]
    if isinstance(load, SwingLoad):
        return [_swing(load)]
    if isinstance(load, ReplayLoad):
        return _replays(load)
    return _open(load, (profile.seed, 2, repeat), capacity_rps)


def _closed(load: ClosedLoad, users: int) -> Level:
    until_s = float("inf") if load.duration_s is None else load.duration_s
    return Level(
        f"{users} user{'s' * (users > 1)}",
        users,
        ClosedOffer((Phase(users, until_s),), load.requests),
    )


def _swing(load: SwingLoad) -> Level:
    users = [load.low, load.high] * load.cycles + [load.low]
    phases = tuple(Phase(count, load.hold_s * (half + 1)) for half, count in enumerate(users))
    return Level(f"{load.low} to {load.high} users", load.high, ClosedOffer(phases, None))


def _replays(load: ReplayLoad) -> list[Level]:
    trace = read_trace(load.trace)
    return [
        Level(f"trace x {speed:g}", speed, _offer(replay_arrivals(trace, load, speed), load))
        for speed in load.speed
    ]


def _open(load: OpenLoad, seed: Sequence[int], capacity_rps: float | None) -> list[Level]:
    labelled = [(f"{rate:g} req/s", rate) for rate in load.rate]
    if load.rate_of_capacity:
        assert capacity_rps is not None, "the capacity is measured first"
        labelled = [
            (f"{factor:g} x capacity", factor * capacity_rps) for factor in load.rate_of_capacity
        ]
    return [
        Level(label, rate, _offer(draw_arrivals(load, rate, (*seed, number)), load))
        for number, (label, rate) in enumerate(labelled)
    ]


def _offer(arrivals: tuple[Arrival, ...], load: OpenLoad | ReplayLoad) -> OpenOffer:
    return OpenOffer(arrivals, load.duration_s)
