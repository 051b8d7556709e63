"""Leaves a drafter alone of whose drafts the target takes almost none, and tries it again later.

Weights gone bad, or another model than was meant, break no rule of the protocol: what shows is that
step after step refuses the first draft. Each such verdict is evidence: the log of how much likelier
it is of a broken drafter than of a poor one. Closed, evidence is added up from the last point that
speaks for the drafter (Page's test), so the same run of refusals opens the breaker, however good it
was before. After a pause a few sessions are a probe (Wald's test): the breaker closes, or opens for
longer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from verifier_service.drafter_choice import next_backoff_s

POOR = 0.1
"""Share of its first drafts that is accepted of a drafter that is kept, on a hard text."""
BROKEN = 0.01
"""The same of one that is not kept: it draws at random, or always one token. What lies between goes
by the nearer one: a drafter is kept from 4 % on."""
_ACCEPTED = math.log(BROKEN / POOR)
_REFUSED = math.log((1.0 - BROKEN) / (1.0 - POOR))
_OPENS_AT = math.log(1e6)
"""A poor drafter opens the breaker once in a million verdicts, or less often."""
_REOPENS_AT = math.log(20.0)
"""One poor drafter in 20 fails its probe at most."""
_CLOSES_AT = -math.log(1e3)
"""One broken drafter in 1000 passes its probe at most."""
MAX_REFUSALS = math.ceil(_OPENS_AT / _REFUSED)
"""In a row, after which the breaker is open."""
MAX_PROBE_REFUSALS = math.ceil(_REOPENS_AT / _REFUSED)
MAX_PROBE_SESSIONS = 2
PROBE_S = 10.0
"""A probe that is undecided for so long has failed: a planner that expects nothing of the drafter
verifies none of its drafts, and silence is no recovery."""
EARNED_S = 30.0
"""Closed for this long, the next pause is a short one again."""


@dataclass(frozen=True, slots=True)
class Turn:
    """A breaker opened or closed."""

    pause_s: float
    """How long it stays open; 0: it closed."""
    num_judged: int
    """First drafts that it went by."""
    num_accepted: int


class AcceptanceBreaker:
    """Of one drafter's incarnation. Time is an argument, in seconds, and never declines."""

    def __init__(self, first_pause_s: float) -> None:
        self._first_pause_s = first_pause_s
        self._next_pause_s = first_pause_s
        self._evidence = 0.0
        self._num_judged = 0
        self._num_accepted = 0
        """First drafts that the present evidence is of."""
        self._retry_at: float | None = None
        """The pause ends, or ended, then; None: closed."""
        self._closed_at = -math.inf
        self._probed_at: float | None = None
        """When the first session of this probe was seen."""

    def is_open(self, now: float) -> bool:
        """The drafter is to have no session."""
        return self._retry_at is not None and now < self._retry_at

    def may_take(self, now: float, *, num_sessions: int, drafts: bool) -> bool:
        """Whether a drafter with so many sessions may have one more; `drafts`: drafts are wanted of
        that now, without which it is no probe."""
        if self._retry_at is None:
            return True
        return drafts and now >= self._retry_at and num_sessions < MAX_PROBE_SESSIONS

    def record(self, now: float, *, accepted: bool) -> Turn | None:
        """The first draft of a sequence's step was verified. What is judged while the breaker is
        open had come before."""
        if self.is_open(now):
            return None
        self._num_judged += 1
        self._num_accepted += accepted
        self._evidence += _ACCEPTED if accepted else _REFUSED
        if self._retry_at is None:
            if self._evidence >= _OPENS_AT:
                return self._open(now)
            if self._evidence < 0.0:
                self._forget()
        elif self._evidence >= _REOPENS_AT:
            return self._open(now)
        elif self._evidence <= _CLOSES_AT:
            return self._close(now)
        return None

    def watch(self, num_sessions: int, now: float) -> Turn | None:
        """Call now and then: ends a probe that has had sessions and comes to no decision."""
        if self._retry_at is None or self.is_open(now):
            return None
        if self._probed_at is None and num_sessions:
            self._probed_at = now
        if self._probed_at is not None and now - self._probed_at >= PROBE_S:
            return self._open(now)
        return None

    def _open(self, now: float) -> Turn:
        if self._retry_at is None and now - self._closed_at > EARNED_S:
            self._next_pause_s = self._first_pause_s
        pause_s = self._next_pause_s
        self._next_pause_s = next_backoff_s(pause_s)
        self._retry_at = now + pause_s
        self._probed_at = None
        return self._turn(pause_s)

    def _close(self, now: float) -> Turn:
        self._retry_at = None
        self._closed_at = now
        return self._turn(0.0)

    def _turn(self, pause_s: float) -> Turn:
        turn = Turn(pause_s, self._num_judged, self._num_accepted)
        self._forget()
        return turn

    def _forget(self) -> None:
        self._evidence = 0.0
        self._num_judged = self._num_accepted = 0
