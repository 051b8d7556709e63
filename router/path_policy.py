"""Which path a request takes: by what drafts cost and gain, with hysteresis and dwell.

Verifiers report two figures (see cluster/load.py). The *price* of drafts says how full their steps
are. Where it is low, requests speculate: a draft costs next to nothing, and any text may begin to
repeat itself. Where it is high the *gain* of the drafts of the moment decides. On the plain path a
few requests go on speculating as probes, so that a gain that comes back is seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.config import PathPolicyConfig
from cluster.load import ClusterLoad, DrafterState, VerifierLoad
from cluster.types import Path

PROBE_EVERY = 16
"""On the plain path one of so many auto requests in flight speculates, and at least one."""


_HASTY = 4
"""A mode that lasts less than so many dwells makes the next dwell twice as long: a load that goes
to and fro about a threshold costs ever fewer switches."""
_MAX_HASTE = 8
_CLEAR_GAIN = 0.25
"""Tokens per step, from which on there is no doubt that drafting pays."""


class SpeculationMode(StrEnum):
    """What a request asks for."""

    AUTO = "auto"
    """The cluster's mode decides."""
    ON = "on"
    OFF = "off"


class ServiceTier(StrEnum):
    """How long a request keeps speculation as load grows."""

    FLEX = "flex"
    """Batch work: goes plain first."""
    DEFAULT = "default"
    PRIORITY = "priority"
    """Goes plain last."""


class PathReason(StrEnum):
    """Why a path was chosen, as metrics name it."""

    NO_REPORT = "no_load_report"
    STALE_REPORT = "stale_load_report"
    NO_DRAFTER = "no_drafter_ready"
    SET_ON = "cluster_mode_on"
    SET_OFF = "cluster_mode_off"
    DRAFTS_CHEAP = "drafts_cheap"
    DRAFTS_GAIN = "drafts_gain"
    DRAFTS_COST = "drafts_cost_more"
    BETWEEN = "between"
    """Neither asks for a change, so that the mode stays."""
    HIGH_LOAD = "high_load"
    """Over the limit on running sequences."""
    PROBE = "probe"
    """The mode is plain; this request shows whether it should be."""
    REQUEST_ON = "request_mode_on"
    REQUEST_OFF = "request_mode_off"
    NO_SUCH_DRAFTER = "no_such_drafter"
    NO_PREDICTION = "no_prediction"


_BY_VALUE = frozenset({PathReason.DRAFTS_COST, PathReason.BETWEEN})
"""Why the mode may be plain although drafting is possible and allowed."""


@dataclass(frozen=True, slots=True)
class PathDecision:
    """A path and why."""

    path: Path
    reason: str
    """In words that a person can read."""
    code: PathReason

    @property
    def follows_load(self) -> bool:
        """Whether the cluster's mode may change it; not where nothing can draft for the request."""
        return self.code not in (PathReason.NO_SUCH_DRAFTER, PathReason.NO_PREDICTION)


@dataclass(frozen=True, slots=True)
class _Wish:
    """The mode that the load of this moment asks for."""

    path: Path
    reason: str
    code: PathReason
    urgent: bool = False
    """Does not wait for the dwell: there is nothing to speculate with, or nothing is known."""
    clear: bool = False
    """Far from the thresholds: waits for one dwell, however often the mode went to and fro."""


@dataclass(frozen=True, slots=True)
class _Thresholds:
    """Of one tier."""

    plain_above_price: float
    speculative_below_price: float
    plain_below_gain: float
    speculative_above_gain: float


_TIER_FACTORS = {
    ServiceTier.FLEX: (0.6, 3.0),
    ServiceTier.DEFAULT: (1.0, 1.0),
    ServiceTier.PRIORITY: (1.4, 1 / 3),
}
"""By which a tier's thresholds of price and of gain are multiplied."""


class _Mode:
    """The mode of one tier, with its hysteresis and dwell."""

    def __init__(self, now: float) -> None:
        self.decision = PathDecision(Path.PLAIN, "no load report yet", PathReason.NO_REPORT)
        self.since = now
        self._has_switched = False
        self._haste = 1
        """Factor of the dwell, from 1 to _MAX_HASTE."""

    def follow(self, wish: _Wish, now: float, min_dwell_s: float) -> bool:
        """True if the mode switched."""
        if wish.path is not self.decision.path:
            held_s, dwell_s = now - self.since, self._haste * min_dwell_s
            least_s = min_dwell_s if wish.clear else dwell_s
            if self._has_switched and not wish.urgent and held_s < least_s:
                return False
            hasty = self._has_switched and held_s < _HASTY * dwell_s
            self._haste = min(2 * self._haste, _MAX_HASTE) if hasty else 1
            self.since, self._has_switched = now, True
        switched = wish.path is not self.decision.path
        self.decision = PathDecision(wish.path, wish.reason, wish.code)
        return switched


class PathPolicy:
    """The cluster's mode as one router sees it. Knows no clock: time is an argument.

    A mode stays for at least `min_dwell_s`, and longer where the load goes to and fro. Only one
    thing goes at once: to plain, when no load is known or nothing drafts.
    """

    def __init__(self, config: PathPolicyConfig, now: float) -> None:
        self._config = config
        self._modes = {tier: _Mode(now) for tier in ServiceTier}
        self.switches: Counter[tuple[Path, PathReason]] = Counter()
        """How often the mode changed, by its new path and why."""

    @property
    def mode(self) -> Path:
        """The path of auto requests of the default tier."""
        return self.decision.path

    @property
    def reason(self) -> str:
        return self.decision.reason

    @property
    def decision(self) -> PathDecision:
        """Of auto requests of the default tier."""
        return self._modes[ServiceTier.DEFAULT].decision

    @property
    def config(self) -> PathPolicyConfig:
        return self._config

    def since_s(self, now: float) -> float:
        """How long the mode has held."""
        return max(0.0, now - self._modes[ServiceTier.DEFAULT].since)

    def reconfigure(self, config: PathPolicyConfig) -> None:
        """Take other thresholds; the mode stays until the load asks for another."""
        self._config = config

    def decide(
        self,
        load: ClusterLoad,
        mode: SpeculationMode,
        now: float,
        drafter: str = "auto",
        tier: ServiceTier = ServiceTier.DEFAULT,
    ) -> PathDecision:
        """The path of a new request. `on` and `off` are honoured whatever the load. A kind of
        `drafter` that is nowhere is plain. Whether an auto request that would go plain is a probe
        is for :func:`with_probes` to say."""
        self.observe(load, now)
        if mode is not SpeculationMode.OFF and drafter != "auto":
            kinds = drafter_kinds(load, self._config.max_load_age_s)
            if drafter not in kinds:
                there = ", ".join(sorted(kinds)) or "none"
                reason = f"no {drafter} drafter is ready (kinds that are: {there})"
                return PathDecision(Path.PLAIN, reason, PathReason.NO_SUCH_DRAFTER)
        if mode is SpeculationMode.ON:
            reason = "the request asks for it (speculation.mode on)"
            return PathDecision(Path.SPECULATIVE, reason, PathReason.REQUEST_ON)
        if mode is SpeculationMode.OFF:
            reason = "the request asks for it (speculation.mode off)"
            return PathDecision(Path.PLAIN, reason, PathReason.REQUEST_OFF)
        return self._modes[tier].decision

    def of_tier(self, tier: ServiceTier) -> PathDecision:
        """The mode of auto requests of this tier."""
        return self._modes[tier].decision

    def observe(self, load: ClusterLoad, now: float) -> bool:
        """Take in the load of this moment; True if the mode of any tier switched."""
        fixed = self._fixed() or self._without_means(load)
        value = None if fixed else draft_value(load, self._config.max_load_age_s)
        any_switched = False
        for tier, mode in self._modes.items():
            wish = fixed
            if wish is None:
                assert value is not None
                wish = self._by_running(value, mode) or self._by_value(value, mode, tier)
            switched = mode.follow(wish, now, self._config.min_dwell_s)
            any_switched |= switched
            if switched and tier is ServiceTier.DEFAULT:
                self.switches[wish.path, wish.code] += 1
        return any_switched

    def _fixed(self) -> _Wish | None:
        """What the configuration says, whatever the load."""
        if self._config.mode == "off":
            reason = "the cluster's mode is set to off"
            return _Wish(Path.PLAIN, reason, PathReason.SET_OFF, urgent=True)
        if self._config.mode == "on":
            reason = "the cluster's mode is set to on"
            return _Wish(Path.SPECULATIVE, reason, PathReason.SET_ON, urgent=True)
        return None

    def _without_means(self, load: ClusterLoad) -> _Wish | None:
        """Plain, if speculation lacks its means."""
        max_age_s = self._config.max_load_age_s
        youngest_s = min((aged.age_s for aged in load.verifiers.values()), default=None)
        if youngest_s is None:
            reason = "auto: no verifier has reported its load"
            return _Wish(Path.PLAIN, reason, PathReason.NO_REPORT, urgent=True)
        if youngest_s > max_age_s:
            reason = f"auto: the newest load report is {youngest_s:.1f} s old, over {max_age_s:g} s"
            return _Wish(Path.PLAIN, reason, PathReason.STALE_REPORT, urgent=True)
        num_ready = sum(
            aged.value.state is DrafterState.READY and aged.age_s <= max_age_s
            for aged in load.drafters.values()
        )
        drafts_locally = any(
            local.kind != "prediction"
            for verifier in _fresh(load, max_age_s)
            for local in verifier.local_drafters
        )
        if num_ready == 0 and not drafts_locally:
            reason = f"auto: 0 of {len(load.drafters)} drafters are ready"
            return _Wish(Path.PLAIN, reason, PathReason.NO_DRAFTER, urgent=True)
        return None

    def _by_running(self, value: DraftWorthNow, mode: _Mode) -> _Wish | None:
        """Plain, if more run than the configured limit allows."""
        above = self._config.plain_above_running
        if above is None:
            return None
        below = self._config.speculative_below_running or above
        over = mode.decision.code is PathReason.HIGH_LOAD
        if value.running > above or (over and value.running >= below):
            limit = f"over {above}" if value.running > above else f"not below {below} yet"
            reason = f"auto: {value.running:.1f} running per verifier, {limit}"
            return _Wish(Path.PLAIN, reason, PathReason.HIGH_LOAD)
        return None

    def _by_value(self, value: DraftWorthNow, mode: _Mode, tier: ServiceTier) -> _Wish:
        now, limits = mode.decision.path, self._thresholds(tier)
        price, gain = value.price, value.gain
        said = f"auto: a draft for each sequence lengthens a step by {price:.0%}"
        at = f"at {value.running:.1f} running"
        gains = "drafts' gain is not known"
        if gain is not None:
            gains = f"drafts gain a sequence {gain:.2f} tokens a step"
        cheap_below, most_loss = limits.speculative_below_price, self._config.max_drafting_loss / 2
        if now is Path.SPECULATIVE:
            cheap_below, most_loss = limits.plain_above_price, self._config.max_drafting_loss
        if price <= cheap_below and (gain is None or gain >= -most_loss):
            reason = f"{said} {at}, which is cheap (up to {cheap_below:.0%})"
            clear = price <= cheap_below / 2
            return _Wish(Path.SPECULATIVE, reason, PathReason.DRAFTS_CHEAP, clear=clear)
        if gain is not None and gain > limits.speculative_above_gain:
            reason = f"auto: {gains} {at}, over {limits.speculative_above_gain:.2f}"
            clear = gain >= _CLEAR_GAIN
            return _Wish(Path.SPECULATIVE, reason, PathReason.DRAFTS_GAIN, clear=clear)
        if gain is not None and gain < limits.plain_below_gain:
            reason = f"auto: {gains} {at}, under {limits.plain_below_gain:.2f}"
            clear = gain <= 0 and price >= (1.0 + cheap_below) / 2
            return _Wish(Path.PLAIN, reason, PathReason.DRAFTS_COST, clear=clear)
        return _Wish(now, f"{said} {at}; {gains}: stays {now}", PathReason.BETWEEN)

    def _thresholds(self, tier: ServiceTier) -> _Thresholds:
        by_price, by_gain = _TIER_FACTORS[tier]
        return _Thresholds(
            self._config.plain_above_price * by_price,
            self._config.speculative_below_price * by_price,
            self._config.plain_below_gain * by_gain,
            self._config.speculative_above_gain * by_gain,
        )


def with_probes(
    decisions: Sequence[PathDecision], num_others: int = 0, num_speculating: int = 0
) -> list[PathDecision]:
    """The paths of auto requests, some of which go on speculating as probes where the mode is
    plain by what drafts are worth. `num_others` more are in flight, of which `num_speculating`
    speculate."""
    chosen = list(decisions)
    wanted = -(-(num_others + len(chosen)) // PROBE_EVERY) - num_speculating
    wanted -= sum(decision.path is Path.SPECULATIVE for decision in chosen)
    for index, decision in enumerate(chosen):
        if wanted > 0 and decision.path is Path.PLAIN and decision.code in _BY_VALUE:
            reason = f"a probe, while others go plain ({decision.reason})"
            chosen[index] = PathDecision(Path.SPECULATIVE, reason, PathReason.PROBE)
            wanted -= 1
    return chosen


@dataclass(frozen=True, slots=True)
class DraftWorthNow:
    """What drafting is worth in the cluster: means over verifiers, by what runs there."""

    running: float
    price: float
    gain: float | None


def draft_value(load: ClusterLoad, max_age_s: float) -> DraftWorthNow:
    """From the verifiers whose report is fresh; idle ones count as if one sequence ran."""
    fresh = _fresh(load, max_age_s)
    running = sum(one.running for one in fresh) / len(fresh) if fresh else 0.0
    price = _weighted(fresh, lambda one: one.draft_price)
    told = [one for one in fresh if one.draft_gain is not None]
    gain = _weighted(told, lambda one: one.draft_gain or 0.0) if told else None
    return DraftWorthNow(running, price, gain)


def drafter_kinds(load: ClusterLoad, max_age_s: float) -> set[str]:
    """Kinds of drafter that are ready: in replicas, and inside verifiers."""
    replicas = {
        aged.value.kind
        for aged in load.drafters.values()
        if aged.value.state is DrafterState.READY and aged.age_s <= max_age_s
    }
    local = {one.kind for verifier in _fresh(load, max_age_s) for one in verifier.local_drafters}
    return (replicas | local) - {""}


def _fresh(load: ClusterLoad, max_age_s: float) -> list[VerifierLoad]:
    return [aged.value for aged in load.verifiers.values() if aged.age_s <= max_age_s]


def _weighted(loads: list[VerifierLoad], figure: Callable[[VerifierLoad], float]) -> float:
    """Mean of a figure, each verifier weighing as much as runs there; 0 of none."""
    weights = [max(1, load.running) for load in loads]
    total = sum(weight * figure(load) for weight, load in zip(weights, loads, strict=True))
    return total / sum(weights) if weights else 0.0
