"""Serve's controller as far as autoscaling goes: a production policy, delays and bounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from benchmarks.simulation.production import replica_policy
from benchmarks.simulation.scenario import Scaling

PERIOD_S = 1.0
"""Between two looks."""

Stats = Mapping[str, Mapping[str, float]]
"""Replica -> figure -> value."""


@dataclass(frozen=True, slots=True)
class Context:
    """What a policy reads of Serve's AutoscalingContext."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[str, float]]


@dataclass
class Scaler:
    """Of one deployment. Call `decide` once a PERIOD_S."""

    config: Scaling
    target: int
    """Replicas that there shall be."""
    _reports: deque[Stats] = field(default_factory=deque)
    _wanted_since_s: float | None = None
    _wants_more: bool = False

    def __post_init__(self) -> None:
        self._policy = replica_policy(self.config.policy_function, self.config.policy_kwargs)

    def decide(self, stats: Stats, now: float) -> int:
        """Take in what the replicas report of themselves; the target from now on."""
        self._reports.append(stats)
        while len(self._reports) > max(1, round(self.config.look_back_period_s / PERIOD_S)):
            self._reports.popleft()
        wanted, _ = self._policy(Context(self.target, self._averages(stats)))
        bounded = min(self.config.max_replicas, max(self.config.min_replicas, _up(wanted)))
        if bounded == self.target:
            self._wanted_since_s = None
            return self.target
        wants_more = bounded > self.target
        if self._wanted_since_s is None or wants_more is not self._wants_more:
            self._wanted_since_s, self._wants_more = now, wants_more
        delay_s = self.config.upscale_delay_s if wants_more else self.config.downscale_delay_s
        if now - self._wanted_since_s >= delay_s:
            self.target, self._wanted_since_s = bounded, None
        return self.target

    def _averages(self, latest: Stats) -> dict[str, dict[str, float]]:
        """Figure -> replica -> its mean over its reports; of replicas that are there."""
        averages: dict[str, dict[str, float]] = {}
        for replica, figures in latest.items():
            told = [report[replica] for report in self._reports if replica in report]
            for figure in figures:
                mean = sum(one[figure] for one in told) / len(told)
                averages.setdefault(figure, {})[replica] = mean
        return averages


def _up(wanted: float) -> int:
    return -int(-wanted // 1)
