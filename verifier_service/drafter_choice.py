"""Which drafters a verifier talks to, and which of them takes a session. Pure functions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

MAX_BACKOFF_S = 30.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A drafter that could take a session."""

    incarnation: str
    num_sessions: int
    """Sessions this verifier has there."""
    rtt_ms: float


def choose_drafter(candidates: Iterable[Candidate]) -> str | None:
    """Incarnation of the one with the fewest sessions, of equal ones the nearest."""
    best = min(candidates, key=lambda c: (c.num_sessions, c.rtt_ms, c.incarnation), default=None)
    return best.incarnation if best else None


def preferred_drafters(verifier: str, drafters: Iterable[str], limit: int) -> set[str]:
    """The `limit` drafters that this verifier keeps streams to, by rendezvous hashing: every
    verifier prefers others, and a drafter that comes or goes moves only its own share."""
    ranked = sorted(drafters, key=lambda drafter: _weight(verifier, drafter))
    return set(ranked[:limit])


def _weight(verifier: str, drafter: str) -> bytes:
    return hashlib.blake2b(f"{verifier}\0{drafter}".encode(), digest_size=8).digest()


def next_backoff_s(backoff_s: float) -> float:
    """The pause after a pause that did not help."""
    return min(2.0 * backoff_s, MAX_BACKOFF_S)


def reopen_pause_s(num_failures: int, first_s: float) -> float:
    """How long a session that went wrong `num_failures` times before stays without a drafter: not
    at all the first time, then ever longer."""
    if num_failures == 0:
        return 0.0
    return min(first_s * 2.0 ** min(num_failures - 1, 16), MAX_BACKOFF_S)
