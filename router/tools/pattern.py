"""Matches the beginning of a text that is still coming: yes, no, or not yet known."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

_MAX_SPACE = 32
"""Longest run of white space, so that what waits for an answer is bounded."""
_SPACE = re.compile(r"\s{0,33}")
_NAME = re.compile(r"[a-zA-Z0-9_-]{0,65}")


class Piece(Enum):
    """What a pattern holds besides fixed texts."""

    SPACE = auto()
    """White space, or none."""
    NAME = auto()
    """One of the names that are known."""


class Outcome(Enum):
    """Whether a text begins with a pattern."""

    YES = auto()
    NO = auto()
    OPEN = auto()
    """More text may make it so."""


@dataclass(frozen=True, slots=True)
class Match:
    """How far a pattern fits."""

    outcome: Outcome
    end: int = 0
    name: str = ""


_NO, _OPEN = Match(Outcome.NO), Match(Outcome.OPEN)


class Pattern:
    """Fixed texts, white space and a name, in order. It never ends in white space, so that where
    a match ends does not depend on what follows."""

    def __init__(self, pieces: Sequence[str | Piece], names: Sequence[str] = ()) -> None:
        self._pieces = pieces
        self._names = frozenset(names)

    def match(self, text: str) -> Match:
        """Does `text` begin with this?"""
        at, name = 0, ""
        for piece in self._pieces:
            if piece is Piece.SPACE:
                length = _length(_SPACE, text, at)
                if length > _MAX_SPACE:
                    return _NO
            elif piece is Piece.NAME:
                length = _length(_NAME, text, at)
                name = text[at : at + length]
                if at + length == len(text):
                    begun = any(known.startswith(name) for known in self._names)
                    return _OPEN if begun else _NO
                if name not in self._names:
                    return _NO
            else:
                length = len(piece)
                if not text.startswith(piece, at):
                    return _OPEN if piece.startswith(text[at : at + length]) else _NO
            at += length
        return Match(Outcome.YES, at, name)


def _length(runs: re.Pattern[str], text: str, at: int) -> int:
    found = runs.match(text, at)
    return len(found[0]) if found else 0


def spaced(text: str) -> list[str | Piece]:
    """The pieces of a text whose white space may be other white space, or none."""
    pieces: list[str | Piece] = []
    for word in re.split(r"\s+", text):
        pieces += [word, Piece.SPACE] if word else [Piece.SPACE]
    return pieces[:-1]
