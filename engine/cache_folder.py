"""Where Paceline keeps what it can make again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$PACELINE_CACHE, by default ~/.cache/paceline."""
    return Path(os.environ.get("PACELINE_CACHE") or Path.home() / ".cache" / "paceline")
