"""The planner and the path policy together, on a simulated clock, under load that swings.

A verifier whose steps cost what a full CPU core's do, with the production planner and averages; a
router with the production policy. Each speculating sequence has a chain of drafts at hand.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from cluster.config import PathPolicyConfig
from cluster.load import Aged, ClusterLoad, LocalDrafterLoad, VerifierLoad
from cluster.types import Path
from router.path_policy import PROBE_EVERY, PathPolicy
from verifier_service.draft_worth import DraftWorth
from verifier_service.planner import StepCost, plan_depths

FULL_CORE = {1: 25.0, 2: 32.0, 4: 45.0, 8: 65.0, 16: 115.0, 32: 217.0, 64: 425.0, 128: 840.0}
ROOMY_DEVICE = {1: 20.0, 32: 21.0, 64: 22.0, 128: 24.0}
CHAT = (0.6, 0.35, 0.2, 0.1)
COPY = (0.97, 0.95, 0.93, 0.91, 0.89, 0.87)
DRAFTING_MS = 0.05
"""Per sequence and step."""
TICK_S = 0.1


@dataclass
class Simulation:
    """One verifier and one router."""

    profile: dict[int, float]
    chain: tuple[float, ...]
    forced: Path | None = None
    now: float = 0.0
    switches: list[tuple[float, Path]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._cost = StepCost(self.profile)
        self._worth = DraftWorth()
        self._policy = PathPolicy(PathPolicyConfig(), 0.0)
        self._told_at = -1.0
        self.num_tokens = 0.0

    @property
    def mode(self) -> Path:
        return self.forced or self._policy.mode

    def run(self, running: int, seconds: float) -> None:
        """So many sequences decode for so long."""
        end = self.now + seconds
        while self.now < end:
            self._step(running)
            if self.now - self._told_at >= TICK_S:
                self._tick(running)

    def _step(self, running: int) -> None:
        speculative = self.mode is Path.SPECULATIVE
        num_probes = 0 if self.forced else -(-running // PROBE_EVERY)
        num_drafted_for = running if speculative else num_probes
        depths = plan_depths(self._cost, running, running, [self.chain] * num_drafted_for)
        num_tokens = running + sum(depths)
        gained = sum(sum(self.chain[:depth]) for depth in depths)
        self.num_tokens += running + gained
        drafting_ms = DRAFTING_MS * num_drafted_for
        plain_ms = self._cost(running)
        net = gained - running * (self._cost(num_tokens) / plain_ms - 1 + drafting_ms / plain_ms)
        self.now += (self._cost(num_tokens) + drafting_ms) / 1e3
        price = self._cost(2 * running) / plain_ms - 1
        self._worth.observe(self.now, price, net, num_drafted_for)

    def _tick(self, running: int) -> None:
        self._told_at = self.now
        report = VerifierLoad(
            running=running,
            draft_gain=self._worth.gain,
            draft_price=self._worth.price,
            local_drafters=(LocalDrafterLoad("suffix"),),
        )
        before = self.mode
        self._policy.observe(ClusterLoad({"v": Aged(report, 0.0)}), self.now)
        if self.mode is not before:
            self.switches.append((self.now, self.mode))


def test_a_load_that_swings_is_followed_within_two_seconds_by_one_switch_each_way() -> None:
    simulation = Simulation(FULL_CORE, CHAT)
    for _ in range(6):
        for running, path in ((1, Path.SPECULATIVE), (32, Path.PLAIN)):
            began, num_before = simulation.now, len(simulation.switches)
            simulation.run(running, 10.0)
            [(at, to)] = simulation.switches[num_before:]
            assert to is path
            assert at - began <= 2.0


@pytest.mark.parametrize("level", [6, 8, 10])
def test_after_much_to_and_fro_a_clear_change_is_still_followed_within_two_seconds(level) -> None:
    simulation = Simulation(FULL_CORE, CHAT)
    simulation.run(level, 10.0)
    for _ in range(5):  # Long enough for each to be followed, too short for the dwell to stay.
        for running in (1, 32):
            simulation.run(running, 3.0)
    assert len(simulation.switches) >= 10
    for running, path in ((1, Path.SPECULATIVE), (32, Path.PLAIN), (1, Path.SPECULATIVE)):
        began = simulation.now
        simulation.run(running, 4.0)
        assert simulation.mode is path
        assert simulation.switches[-1][0] - began <= 2.1


@pytest.mark.parametrize("period_s", [0.2, 1.0, 3.0])
@pytest.mark.parametrize("level", range(2, 16))
def test_a_load_that_oscillates_by_one_never_thrashes(level: int, period_s: float) -> None:
    simulation = Simulation(FULL_CORE, CHAT)
    simulation.run(level, 10.0)
    num_before = len(simulation.switches)
    for _ in range(round(60 / (2 * period_s))):
        simulation.run(level - 1, period_s)
        simulation.run(level + 1, period_s)
    assert len(simulation.switches) - num_before <= 6


@pytest.mark.parametrize("running", [1, 4, 16])
def test_copies_are_drafted_for_where_chat_is_not_any_more(running: int) -> None:
    simulation = Simulation(FULL_CORE, COPY)
    simulation.run(running, 20.0)
    assert simulation.mode is Path.SPECULATIVE


def test_a_text_that_begins_to_repeat_itself_under_load_is_noticed_by_probes() -> None:
    simulation = Simulation(FULL_CORE, CHAT)
    simulation.run(16, 20.0)
    assert simulation.mode is Path.PLAIN
    simulation.chain, began = COPY, simulation.now
    simulation.run(16, 10.0)
    assert simulation.mode is Path.SPECULATIVE
    assert simulation.switches[-1][0] - began <= 2.0


@pytest.mark.parametrize("chain", [CHAT, COPY, ()])
@pytest.mark.parametrize("profile", [FULL_CORE, ROOMY_DEVICE])
def test_at_every_load_auto_keeps_up_with_the_better_of_both_paths(
    profile: dict[int, float], chain: tuple[float, ...]
) -> None:
    """In steady load, after the first seconds; always speculating has the planner too."""
    for running in (1, 3, 6, 12, 24, 48):
        speed = {}
        for forced in (None, Path.PLAIN, Path.SPECULATIVE):
            simulation = Simulation(profile, chain, forced)
            simulation.run(running, 4.0)
            began, simulation.num_tokens = simulation.now, 0.0
            simulation.run(running, 8.0)
            speed[forced] = simulation.num_tokens / (simulation.now - began)
        assert speed[None] >= 0.97 * max(speed.values()), running


def test_a_device_with_room_speculates_at_every_load() -> None:
    simulation = Simulation(ROOMY_DEVICE, CHAT)
    for running in (1, 8, 32, 60):
        simulation.run(running, 5.0)
        assert simulation.mode is Path.SPECULATIVE
    assert len(simulation.switches) == 1
