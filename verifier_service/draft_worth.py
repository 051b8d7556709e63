"""What drafting is worth on one verifier, as routers are told it.

Two figures, neither of which depends on how many sequences are drafted for, so that a few probes
tell what it would be worth for all:

- *price*: what one draft for every sequence would lengthen a step by, as a share of it. Near 0 a
  step has room to spare and drafts are free; near 1 the device is full and a draft costs a token.
- *gain*: tokens per step that a sequence gains from drafts, after what verifying them and making
  them costs all. 0.5 is half a token more than the one that it draws anyway.

The price says whether any text could gain, the gain whether the present ones do.
"""

from __future__ import annotations

import math

AVERAGED_S = 0.5
"""Time constant of both averages."""
_LEAST_EVIDENCE = 0.01
"""Sequences' steps, faded, below which the gain counts as unknown."""


class DraftWorth:
    """Averages of an engine's steps. Knows no clock: `now` is in seconds, and never declines."""

    def __init__(self) -> None:
        self._at: float | None = None
        self._price = 0.0
        self._gained = 0.0
        self._num_drafted_for = 0.0

    @property
    def price(self) -> float:
        """0 before the first step."""
        return self._price

    @property
    def gain(self) -> float | None:
        """None if no sequence was drafted for of late. May be below 0."""
        known = self._num_drafted_for >= _LEAST_EVIDENCE
        return self._gained / self._num_drafted_for if known else None

    def observe(self, now: float, price: float, gained: float, num_drafted_for: int) -> None:
        """A step that ended at `now`: its price, and the tokens that `num_drafted_for` sequences
        gained in it together."""
        kept = 0.0 if self._at is None else math.exp(-max(0.0, now - self._at) / AVERAGED_S)
        self._at = now
        self._price = kept * self._price + (1.0 - kept) * price
        self._gained = kept * self._gained + gained
        self._num_drafted_for = kept * self._num_drafted_for + num_drafted_for
