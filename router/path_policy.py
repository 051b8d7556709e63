"""Which path a request takes: a threshold on decoding load, with hysteresis and dwell."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from cluster.config import PathPolicyConfig
from cluster.load import ClusterLoad, DrafterState
from cluster.types import Path


class SpeculationMode(StrEnum):
    """What a request asks for."""

    AUTO = "auto"
    """The cluster's mode decides."""
    ON = "on"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class PathDecision:
    """A path and why, in words that a person can read."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True)
class _Wish:
    """The mode that the load of this moment asks for."""

    path: Path
    reason: str
    urgent: bool = False
    """Does not wait for the dwell: there is nothing to speculate with, or nothing is known."""


class PathPolicy:
    """The cluster's mode as one router sees it. Knows no clock: time is an argument.

    Speculating asks for fewer running sequences than leaving it, and a mode stays for at least
    `min_dwell_s`. Only one thing goes at once: to plain, when no load is known or no drafter ready.
    """

    def __init__(self, config: PathPolicyConfig, now: float) -> None:
        self._config = config
        self._decision = PathDecision(Path.PLAIN, "no load report yet")
        self._since = now
        self._num_switches = 0

    @property
    def mode(self) -> Path:
        """The path of auto requests."""
        return self._decision.path

    @property
    def reason(self) -> str:
        return self._decision.reason

    @property
    def config(self) -> PathPolicyConfig:
        return self._config

    def since_s(self, now: float) -> float:
        """How long the mode has held."""
        return max(0.0, now - self._since)

    def reconfigure(self, config: PathPolicyConfig) -> None:
        """Take other thresholds; the mode stays until the load asks for another."""
        self._config = config

    def decide(self, load: ClusterLoad, mode: SpeculationMode, now: float) -> PathDecision:
        """The path of a new request. `on` and `off` are honoured whatever the load."""
        self.observe(load, now)
        if mode is SpeculationMode.ON:
            return PathDecision(Path.SPECULATIVE, "the request asks for it (speculation.mode on)")
        if mode is SpeculationMode.OFF:
            return PathDecision(Path.PLAIN, "the request asks for it (speculation.mode off)")
        return self._decision

    def observe(self, load: ClusterLoad, now: float) -> bool:
        """Take in the load of this moment; True if the mode switched."""
        wish = self._wish(load)
        if wish.path is self.mode:
            self._decision = PathDecision(wish.path, wish.reason)
            return False
        if not wish.urgent and self._dwells(now):
            return False
        self._decision = PathDecision(wish.path, wish.reason)
        self._since = now
        self._num_switches += 1
        return True

    def _dwells(self, now: float) -> bool:
        return self._num_switches > 0 and now - self._since < self._config.min_dwell_s

    def _wish(self, load: ClusterLoad) -> _Wish:
        if self._config.mode == "off":
            return _Wish(Path.PLAIN, "the cluster's mode is set to off", urgent=True)
        if self._config.mode == "on":
            return _Wish(Path.SPECULATIVE, "the cluster's mode is set to on", urgent=True)
        return self._without_means(load) or self._by_load(load)

    def _without_means(self, load: ClusterLoad) -> _Wish | None:
        """Plain, if speculation lacks its means."""
        max_age_s = self._config.max_load_age_s
        youngest_s = min((aged.age_s for aged in load.verifiers.values()), default=None)
        if youngest_s is None:
            return _Wish(Path.PLAIN, "auto: no verifier has reported its load", urgent=True)
        if youngest_s > max_age_s:
            reason = f"auto: the newest load report is {youngest_s:.1f} s old, over {max_age_s:g} s"
            return _Wish(Path.PLAIN, reason, urgent=True)
        num_ready = sum(
            aged.value.state is DrafterState.READY and aged.age_s <= max_age_s
            for aged in load.drafters.values()
        )
        if num_ready == 0:
            reason = f"auto: 0 of {len(load.drafters)} drafters are ready"
            return _Wish(Path.PLAIN, reason, urgent=True)
        return None

    def _by_load(self, load: ClusterLoad) -> _Wish:
        running = mean_running(load, self._config.max_load_age_s)
        above, below = self._config.plain_above_running, self._config.speculative_below_running
        said = f"auto: {running:.1f} running per verifier"
        if running > above:
            return _Wish(Path.PLAIN, f"{said}, over {above}")
        if running < below:
            return _Wish(Path.SPECULATIVE, f"{said}, below {below}")
        return _Wish(self.mode, f"{said}, between {below} and {above}: stays {self.mode}")


def mean_running(load: ClusterLoad, max_age_s: float) -> float:
    """Mean running sequences of the verifiers whose report is fresh; 0 if none is."""
    fresh = [aged.value.running for aged in load.verifiers.values() if aged.age_s <= max_age_s]
    return sum(fresh) / len(fresh) if fresh else 0.0
