"""What a drafter tells of itself to whoever scrapes the cluster."""

from __future__ import annotations

from cluster.metrics import DRAFTER_SESSIONS, LEASES_EXPIRED, Exposition, MemberLabels
from drafter_service.session import SessionTable


class DrafterMetrics:
    """Reads the numbers where they are kept."""

    def __init__(self, labels: MemberLabels, table: SessionTable) -> None:
        self._labels = labels
        self._table = table

    def text(self) -> str:
        """The exposition of this moment."""
        exposition = Exposition(self._labels)
        exposition.add(DRAFTER_SESSIONS, len(self._table))
        exposition.add(LEASES_EXPIRED, self._table.num_expired)
        return exposition.text()
