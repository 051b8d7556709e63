"""Stop strings, found across token and block borders."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Looks for stop strings in a text that comes piece by piece.

    The match that completes first wins, and of those the one that began first; so the outcome does
    not depend on how the text is cut into pieces. Text that may be the beginning of a match is held
    back, never more of it than the longest stop string less one character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""

    def push(self, piece: str) -> tuple[str, bool]:
        """The text that may be shown now, and whether a stop string was completed."""
        text = self._held + piece
        match = self._first_match(text)
        if match is not None:
            self._held = ""
            return text[:match], True
        cut = len(text) - self._partial_len(text)
        self._held = text[cut:]
        return text[:cut], False

    def finish(self) -> str:
        """The text held back, when nothing follows."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the match begins."""
        found = [(text.find(stop), stop) for stop in self._stops]
        matches = [(start + len(stop), start) for start, stop in found if start >= 0]
        return min(matches)[1] if matches else None

    def _partial_len(self, text: str) -> int:
        """Length of the longest end of `text` that is the beginning of a stop string."""
        return max((_overlap(text, stop) for stop in self._stops), default=0)


def _overlap(text: str, stop: str) -> int:
    longest = min(len(text), len(stop) - 1)
    return next((k for k in range(longest, 0, -1) if text.endswith(stop[:k])), 0)
