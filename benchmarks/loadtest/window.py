"""What lies within a cell's window: tokens by time, requests due, requests under way."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from benchmarks.loadtest.profile import Slo
from benchmarks.loadtest.record import Outcome, RequestRecord

NUM_SLICES = 20
"""Of a cell's window; throughput varies between them, which gives its interval."""


def slice_rates(records: Sequence[RequestRecord], window_s: float) -> list[float]:
    """Output tokens per second in each slice of the window, of requests that ended well."""
    if window_s <= 0:
        return []
    return list(token_rates(records, window_s, NUM_SLICES))


def good_rates(records: Sequence[RequestRecord], window_s: float, slo: Slo) -> list[float]:
    """Requests per second that met the SLO, in each slice of the window, by when they were due."""
    if window_s <= 0:
        return []
    due_s = [record.scheduled_s for record in records if record.meets(slo)]
    counted, _ = np.histogram(due_s, NUM_SLICES, (0.0, window_s * (1 + 1e-9)))
    return [float(count) * NUM_SLICES / window_s for count in counted]


def token_rates(
    records: Sequence[RequestRecord], until_s: float, num_bins: int
) -> NDArray[np.float64]:
    """The same for any number of bins from 0 to `until_s`."""
    times: list[float] = []
    tokens: list[float] = []
    for record in records:
        if record.outcome is Outcome.OK:
            times += record.chunk_s
            tokens += record.new_tokens()
    # The last chunk of a counted window comes at its very end, give or take rounding.
    counted, _ = np.histogram(times, num_bins, (0.0, until_s * (1 + 1e-9)), weights=tokens)
    return np.asarray(counted, np.float64) * num_bins / until_s


def mean_under_way(records: Sequence[RequestRecord], start_s: float, end_s: float) -> float:
    """Requests under way, averaged over time."""
    spans = (min(r.end_s, end_s) - max(r.scheduled_s, start_s) for r in records)
    return sum(max(0.0, span) for span in spans) / max(1e-9, end_s - start_s)


def under_way(
    records: Sequence[RequestRecord], until_s: float, num_bins: int
) -> NDArray[np.float64]:
    """Requests under way in each bin, averaged within it."""
    step_s = until_s / num_bins
    edges = np.arange(num_bins + 1) * step_s
    busy = np.zeros(num_bins)
    for record in records:
        first = max(0, int(record.scheduled_s / step_s))
        last = min(num_bins - 1, int(record.end_s / step_s))
        for place in range(first, last + 1):
            start_s = max(record.scheduled_s, edges[place])
            busy[place] += max(0.0, min(record.end_s, edges[place + 1]) - start_s)
    return busy / step_s
