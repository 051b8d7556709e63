"""Tells a person how far a load test is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from typing import TextIO

from benchmarks.loadtest.record import Outcome, RequestRecord

REDRAW_S = 0.2
BAR_LEN = 24
CLEAR_LINE = "\r\x1b[K"


class Progress:
    """Of a run of so many cells."""

    def __init__(self, num_cells: int, out: TextIO) -> None:
        self._num_cells = num_cells
        self._num_done = 0
        self._title = ""
        self._num_ended = 0
        self._num_bad = 0
        self._started = 0.0
        self._drawn = 0.0
        self._out = out
        self._on_terminal = out.isatty()

    def begin(self, title: str) -> None:
        """A cell starts."""
        self._title = title
        self._num_ended = self._num_bad = 0
        self._started = time.monotonic()
        self._draw()

    def ended(self, record: RequestRecord) -> None:
        """A request of this cell has ended."""
        self._num_ended += 1
        self._num_bad += record.outcome is not Outcome.OK
        if time.monotonic() - self._drawn > REDRAW_S:
            self._draw()

    def finish(self, summary: str) -> None:
        """The cell is over."""
        self._num_done += 1
        start = CLEAR_LINE if self._on_terminal else ""
        place = f"{self._num_done}/{self._num_cells}"
        self._out.write(f"{start}[{place}] {self._title}: {summary}\n")
        self._out.flush()

    def _draw(self) -> None:
        if not self._on_terminal:
            return
        self._drawn = time.monotonic()
        filled = BAR_LEN * self._num_done // max(1, self._num_cells)
        bar = "#" * filled + "." * (BAR_LEN - filled)
        bad = f", {self._num_bad} not ok" if self._num_bad else ""
        self._out.write(
            f"{CLEAR_LINE}[{bar}] {self._num_done + 1}/{self._num_cells} {self._title}: "
            f"{self._num_ended} ended{bad}, {self._drawn - self._started:.0f} s"
        )
        self._out.flush()
