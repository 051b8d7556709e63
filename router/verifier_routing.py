"""Which verifier takes a request: the one that holds its prefix, unless that one has its share.

Consistent hashing with bounded loads. Each verifier has points on a ring of hashes; a request's
affinity is a place on it, and the verifiers that follow are its candidates, in an order on which
all routers agree and which a member that comes or goes hardly changes. The first candidate that is
not over its bounds takes the request, so what one replica cannot take goes to the same next one,
which then holds the prefix too.
"""

from __future__ import annotations

import hashlib
import math
import struct
from bisect import bisect_right, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

AFFINITY_TOKENS = 32
"""Prompt tokens that make two requests neighbours."""
MAX_CANDIDATES = 8
"""Verifiers that are looked at for one request, however many there are."""
_BOUND = 1.25
"""What a verifier may have, as a factor of the mean of all."""
_SLACK = 1.0
"""And so many requests more."""
_NUM_POINTS = 64
"""Of a member; a digest gives eight."""
_RECENT_HALF_LIFE_S = 30.0


@dataclass(frozen=True, slots=True)
class VerifierView:
    """One verifier as this router sees it."""

    incarnation: str
    running: int = 0
    waiting: int = 0
    unstarted: int = 0
    """Requests of this router without a token yet; its report may not show them."""
    recent: float = 0.0
    """Requests that this router sent there of late, faded: load that is over before it shows."""

    @property
    def load(self) -> int:
        return self.running + self.waiting + self.unstarted


@dataclass(frozen=True, slots=True)
class FleetMean:
    """Means over all verifiers that may be used."""

    load: float = 0.0
    recent: float = 0.0


def fleet_mean(views: Sequence[VerifierView]) -> FleetMean:
    """Of these; zeros of none."""
    count = max(1, len(views))
    return FleetMean(
        sum(view.load for view in views) / count, sum(view.recent for view in views) / count
    )


def choose_verifier(candidates: Sequence[VerifierView], mean: FleetMean) -> str | None:
    """Incarnation of the verifier to take, None if there is none. `candidates`: in the order of the
    ring. If all are over their bounds it is the least loaded."""
    for view in candidates:
        if _is_within(view.load, mean.load) and _is_within(view.recent, mean.recent):
            return view.incarnation
    least = min(candidates, key=lambda view: (view.load, view.recent), default=None)
    return None if least is None else least.incarnation


def _is_within(value: float, mean: float) -> bool:
    return value <= _BOUND * mean + _SLACK


class HashRing:
    """The members' points, to be walked from any place."""

    def __init__(self) -> None:
        self._points: list[tuple[int, str]] = []
        self._members: set[str] = set()

    def set_members(self, members: set[str]) -> None:
        """Take the members there are now. Those that stay keep their points."""
        if self._members - members:
            self._points = [point for point in self._points if point[1] in members]
        added = [point for member in members - self._members for point in _points_of(member)]
        if len(added) > _NUM_POINTS:
            self._points = sorted([*self._points, *added])
        else:
            for point in added:
                insort(self._points, point)
        self._members = set(members)

    def walk(self, affinity: bytes) -> Iterator[str]:
        """All members, each once, from the affinity's place on."""
        start = bisect_right(self._points, (_hash(affinity), ""))
        seen: set[str] = set()
        for index in range(len(self._points)):
            member = self._points[(start + index) % len(self._points)][1]
            if member not in seen:
                seen.add(member)
                yield member
            if len(seen) == len(self._members):
                return


class RecentCount:
    """How many there were of late: each counts half as much after every half-life."""

    def __init__(self) -> None:
        self._count = 0.0
        self._at = -math.inf

    def add(self, now: float) -> None:
        self._count = self.value(now) + 1.0
        self._at = now

    def value(self, now: float) -> float:
        """`now` in seconds; never declines."""
        age_s = max(0.0, now - self._at)
        return self._count * math.exp2(-age_s / _RECENT_HALF_LIFE_S) if self._count else 0.0


def prompt_affinity(prompt_ids: Sequence[int], cache_salt: str = "") -> bytes:
    """Affinity of a prompt: its first tokens, and who may reuse their KV."""
    head = prompt_ids[:AFFINITY_TOKENS]
    return cache_salt.encode() + b"".join(token_id.to_bytes(4, "little") for token_id in head)


def _points_of(member: str) -> list[tuple[int, str]]:
    points = []
    for index in range(_NUM_POINTS // 8):
        digest = hashlib.blake2b(f"{index}:{member}".encode(), digest_size=64).digest()
        points += [(point, member) for point in struct.unpack("<8Q", digest)]
    return points


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")
