"""What a distillation says while it runs: one line that changes on a terminal, else a line now and
then."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TextIO

_BAR_WIDTH = 24
_EVERY_S = 30.0


@dataclass(slots=True)
class Progress:
    """Knows no clock: `now_s` is any clock that does not go back."""

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    _last: tuple[str, float] | None = None
    """What was done when a line was last written, and when that was."""

    def show(self, doing: str, share: float, details: str, now_s: float) -> None:
        """Where it stands, from 0 to 1, and what it does. The first line of each doing is always
        written."""
        text = f"{doing}: {details}"
        is_due = self._last is None or self._last[0] != doing or now_s >= self._last[1] + _EVERY_S
        if self.stream.isatty():
            filled = round(_BAR_WIDTH * share)
            bar = "█" * filled + "·" * (_BAR_WIDTH - filled)
            self.stream.write(f"\r\x1b[K{bar} {share:4.0%}  {text}")
        elif is_due:
            self._last = (doing, now_s)
            self.stream.write(f"{share:4.0%}  {text}\n")
        self.stream.flush()

    def say(self, text: str) -> None:
        """A line that stays."""
        clear = "\r\x1b[K" if self.stream.isatty() else ""
        self.stream.write(f"{clear}{text}\n")
        self.stream.flush()
