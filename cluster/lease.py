"""A lease: what is held for a peer for as long as it is heard."""

from __future__ import annotations

MAX_TICK_S = 1.0
"""Counted of the time between two checks. If they are further apart, it is we who stood still, and
what the peer said meanwhile may not have been read yet."""


class Lease:
    """Lapses when nothing is heard for `duration_s`. Knows no clock; check it about once a second
    or more often."""

    def __init__(self, now: float) -> None:
        self.duration_s = 0.0
        """0: it never lapses."""
        self._silent_s = 0.0
        self._checked_at = now

    def renew(self) -> None:
        """The peer was heard."""
        self._silent_s = 0.0

    def has_lapsed(self, now: float) -> bool:
        """Whether the peer was silent for too long; each lapse is told once, and the next begins
        from here."""
        self._silent_s += min(now - self._checked_at, MAX_TICK_S)
        self._checked_at = now
        if not 0 < self.duration_s <= self._silent_s:
            return False
        self._silent_s = 0.0
        return True
