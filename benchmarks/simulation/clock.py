"""Simulated time: what is due next happens next."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

Action = Callable[[], None]


class Clock:
    """A queue of actions. Of those due at one time the one ordered first comes first, so that a
    simulation is a function of its seed."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds."""
        self._due: list[tuple[float, int, Action]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Action) -> None:
        """Do this then; `time_s` must not be past."""
        heapq.heappush(self._due, (time_s, next(self._numbers), action))

    def after(self, delay_s: float, action: Action) -> None:
        """Do this so much later."""
        heapq.heappush(self._due, (self.now + delay_s, next(self._numbers), action))

    def every(self, period_s: float, action: Action, first_s: float = 0.0) -> None:
        """Do this again and again, for the first time at `first_s`."""

        def again() -> None:
            action()
            self.after(period_s, again)

        self.at(first_s, again)

    def run(self, until_s: float) -> None:
        """All that is due before `until_s`, which is the time then."""
        due, pop = self._due, heapq.heappop
        while due and due[0][0] < until_s:
            self.now, _, action = pop(due)
            action()
        self.now = until_s
