"""How many replicas Serve shall run, from what the replicas report of themselves.

Tokens travel past Serve, so its own policy sees idle replicas whatever their load. The reports come
from `record_autoscaling_stats`. Serve ships this module by value into its controller and calls the
policy many times a second there: standard library only, no I/O. Delays, bounds and factors are
Serve's and stand in `autoscaling_config`. Scaling takes seconds to minutes; what it has to answer
for is the load that stays after routers have chosen the path, within milliseconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

_MOST_GROWTH = 2.0
"""By which a queue that is too long multiplies the replicas at most, in one decision."""


class Context(Protocol):
    """What the policies read of Serve's AutoscalingContext."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]]
    """Figure -> replica -> its value, averaged over Serve's look-back window."""


class QueueContext(Context, Protocol):
    """And what the policy of a deployment that may have no replica at all reads."""

    @property
    def total_queued_requests(self) -> float | None:
        """Calls that wait for a replica."""


class PerReplicaTarget:
    """Keeps the sum of some reported figures near `target` per replica.

    In the Serve YAML, under `autoscaling_config`:

        policy:
          policy_function: cluster.autoscaling:PerReplicaTarget
          policy_kwargs: {metrics: [running, waiting], target: 12}
    """

    def __init__(self, metrics: Sequence[str], target: float) -> None:
        if not metrics or target <= 0:
            raise ValueError("policy_kwargs: metrics must name a figure, target must be over 0")
        self._metrics = metrics
        self._target = target

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """(replicas wanted, no state). Without any report the number stays as it is."""
        reports = [context.aggregated_metrics.get(metric, {}) for metric in self._metrics]
        if not any(reports):
            return context.target_num_replicas, {}
        return sum(sum(report.values()) for report in reports) / self._target, {}


class VerifierReplicas:
    """Verifiers for the tokens in flight, at the load that their own steps say they can bear.

    A sequence is a token in each step. Up to the knee of a verifier's step time they cost nearly
    nothing, so a replica is to hold `knee_share` of its knee: at 1 a step without drafts still has
    its idle arithmetic to itself, at 2 and more the device is used for throughput. A replica is
    never counted on for fewer than `least_running` sequences, since the knee of a small device may
    be a single token, nor for more than `places_share` of its places. And where requests wait
    longer than `max_queue_s` for a place, there shall be more replicas whatever the load says.

        policy:
          policy_function: cluster.autoscaling:VerifierReplicas
          policy_kwargs: {knee_share: 1.0, least_running: 8, max_queue_s: 2.0}
    """

    def __init__(
        self,
        knee_share: float = 1.0,
        least_running: float = 8.0,
        places_share: float = 0.75,
        max_queue_s: float = 2.0,
    ) -> None:
        if min(knee_share, least_running, places_share, max_queue_s) <= 0 or places_share > 1:
            raise ValueError("policy_kwargs must be over 0, and places_share at most 1")
        self._knee_share = knee_share
        self._least_running = least_running
        self._places_share = places_share
        self._max_queue_s = max_queue_s

    def __call__(self, context: Context) -> tuple[float, dict[str, Any]]:
        """(replicas wanted, no state). Without any report the number stays as it is."""
        metrics = context.aggregated_metrics
        running, waiting = metrics.get("running", {}), metrics.get("waiting", {})
        if not running:
            return context.target_num_replicas, {}
        in_flight = sum(running.values()) + sum(waiting.values())
        by_load = in_flight / self._capacity(metrics)
        queue_s = _mean(metrics.get("queue_s", {}))
        by_queue = len(running) * _growth(queue_s, self._max_queue_s)
        return max(by_load, by_queue), {}

    def _capacity(self, metrics: Mapping[str, Mapping[Any, float]]) -> float:
        """Sequences that a replica is to hold."""
        knee = self._knee_share * _mean(metrics.get("knee_tokens", {}))
        places = self._places_share * _mean(metrics.get("max_running", {}))
        wanted = max(self._least_running, knee)
        return min(wanted, places) if places else wanted


class DrafterReplicas:
    """Drafters for the sessions that want drafts now; none where nobody does.

    Routers that go plain pause their sessions, so speculation that does not pay shows here as few
    sessions: only those of the probes. With `min_replicas: 0` the deployment sleeps when nobody has
    wanted drafts for `downscale_delay_s`. A verifier that wants one then calls its handle once; the
    call waits for a replica, and that is what wakes it.

        policy:
          policy_function: cluster.autoscaling:DrafterReplicas
          policy_kwargs: {sessions: 64, max_queue_ms: 20}
    """

    def __init__(self, sessions: float, max_queue_ms: float = 20.0) -> None:
        if min(sessions, max_queue_ms) <= 0:
            raise ValueError("policy_kwargs: sessions and max_queue_ms must be over 0")
        self._sessions = sessions
        self._max_queue_ms = max_queue_ms

    def __call__(self, context: QueueContext) -> tuple[float, dict[str, Any]]:
        """(replicas wanted, no state). Without any report the number stays as it is."""
        metrics = context.aggregated_metrics
        active = metrics.get("active_sessions", {})
        is_called = bool(context.total_queued_requests)
        if not active:
            return max(context.target_num_replicas, int(is_called)), {}
        total = sum(active.values())
        by_queue = 0.0
        if total:
            queue_ms = _mean(metrics.get("queue_ms", {}))
            by_queue = len(active) * _growth(queue_ms, self._max_queue_ms)
        return max(math.ceil(total / self._sessions), by_queue, int(is_called)), {}


def _mean(values: Mapping[Any, float]) -> float:
    """0 of none."""
    return sum(values.values()) / len(values) if values else 0.0


def _growth(value: float, most: float) -> float:
    """Factor by which there shall be more replicas, since `value` is over `most`; else 0."""
    return min(value / most, _MOST_GROWTH) if value > most else 0.0
