"""What a terminal is given and a file or pipe is not."""

from __future__ import annotations

import os
from typing import TextIO

CLEAR = "\x1b[H\x1b[2J"
CYAN = "36"
DIM = "2"
_CONTROL = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


def has_colour(out: TextIO) -> bool:
    """A terminal, unless its owner set NO_COLOR."""
    return out.isatty() and not os.environ.get("NO_COLOR")


def styled(text: str, style: str) -> str:
    return f"\x1b[{style}m{text}\x1b[0m" if text else ""


def printable(text: str) -> str:
    """Without control characters: what a model writes must not command a terminal."""
    return text.translate(_CONTROL)
