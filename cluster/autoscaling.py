"""How many replicas Serve shall run, from what the replicas report of themselves.

Tokens travel past Serve, so its own policy sees idle replicas whatever their load. The reports come
from `record_autoscaling_stats`. Serve ships this module by value into its controller and calls the
policy many times a second there: standard library only, no I/O. Delays, bounds and factors are
Serve's and stand in `autoscaling_config`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Context(Protocol):
    """What the policy reads of Serve's AutoscalingContext."""

    target_num_replicas: int
    aggregated_metrics: Mapping[str, Mapping[Any, float]]
    """Figure -> replica -> its value, averaged over Serve's look-back window."""


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
