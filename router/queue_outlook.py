"""How long a request that comes now would wait for a place, as load reports tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cluster.load import VerifierLoad


@dataclass(frozen=True, slots=True)
class QueueOutlook:
    """Of one verifier, or of the best of several."""

    wait_s: float = 0.0
    """Until it gets a place; 0 where one is free, or nothing is known."""
    answer_s: float = 0.0
    """How long it holds the place then, if it is as long as others; 0 is not known."""
    room: int | None = None
    """Requests that the queue still takes; None is not known."""


def queue_outlook(load: VerifierLoad, num_unseen: int, num_own: int = 0) -> QueueOutlook:
    """`num_unseen`: requests sent there since the report came; `num_own`: all of this router that
    are there. A report may have passed a request on its way, so the latter are a bound.

    A place is free every answer_s / places seconds: so long a queue's next one waits, times those
    before it. While some wait, as many places are in use as the KV cache has room for.
    """
    if not load.max_running:
        return QueueOutlook()
    places = load.running if load.waiting else load.max_running
    num_there = max(load.running + load.waiting + num_unseen, num_own)
    num_before = num_there - places
    wait_s = max(0, num_before + 1) * load.place_s / max(1, places)
    return QueueOutlook(wait_s, load.place_s, load.max_waiting - max(0, num_before))


def best_outlook(outlooks: Iterable[QueueOutlook]) -> QueueOutlook:
    """Of the verifier that has room and the shortest wait; if none has room, of the one with the
    shortest wait. Nothing is known of no verifier."""
    return min(
        outlooks,
        key=lambda outlook: (outlook.room is not None and outlook.room <= 0, outlook.wait_s),
        default=QueueOutlook(),
    )
