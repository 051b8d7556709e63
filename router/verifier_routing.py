"""Which verifier takes a request: the least loaded, or the one likely to hold its prefix."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

AFFINITY_TOKENS = 32
"""Prompt tokens that make two requests neighbours."""
AFFINITY_SLACK = 2
"""Requests that the preferred verifier may have over the least loaded one."""


@dataclass(frozen=True, slots=True)
class VerifierView:
    """One verifier as this router sees it."""

    incarnation: str
    running: int = 0
    waiting: int = 0
    unstarted: int = 0
    """Requests of this router without a token yet; its report may not show them."""

    @property
    def load(self) -> int:
        return self.running + self.waiting + self.unstarted


def choose_verifier(views: Sequence[VerifierView], affinity: bytes) -> str | None:
    """Incarnation of the verifier to take, None if there is none.

    Requests with the same affinity go to the same verifier (rendezvous hashing, so that a member
    that comes or goes moves only its own), unless it is busier than the least loaded one by more
    than the slack. Equal load is spread by the same hash.
    """
    if not views:
        return None
    least = min(view.load for view in views)
    near = [view for view in views if view.load <= least + AFFINITY_SLACK]
    preferred = max(views, key=lambda view: _weight(affinity, view.incarnation))
    if preferred in near:
        return preferred.incarnation
    idlest = (view for view in views if view.load == least)
    return max(idlest, key=lambda view: _weight(affinity, view.incarnation)).incarnation


def prompt_affinity(prompt_ids: Sequence[int]) -> bytes:
    """Affinity of a prompt: its first tokens."""
    head = prompt_ids[:AFFINITY_TOKENS]
    return b"".join(token_id.to_bytes(4, "little") for token_id in head)


def _weight(affinity: bytes, incarnation: str) -> bytes:
    return hashlib.blake2b(affinity + incarnation.encode(), digest_size=8).digest()
