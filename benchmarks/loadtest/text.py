"""Figures and HTML as a report writes them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from benchmarks.loadtest.statistics import Estimate

NOTHING = "–"


def number(value: float | None) -> str:
    """Three significant digits, no exponent."""
    if value is None or not math.isfinite(value):
        return NOTHING
    if value == 0:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    shown = f"{value:.{min(digits, 6)}f}"
    return shown.rstrip("0").rstrip(".") if "." in shown else shown


def percent(value: float | None) -> str:
    """Of a share."""
    return NOTHING if value is None else f"{number(100 * value)} %"


def estimate(value: Estimate | None) -> str:
    """With its interval."""
    if value is None:
        return NOTHING
    return f"{number(value.value)} [{number(value.low)}, {number(value.high)}]"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first column names a row. Cells are escaped."""
    titles = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    lines = "".join(
        f'<tr><th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(cell)}</td>" for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    body = f"<thead><tr>{titles}</tr></thead><tbody>{lines}</tbody>"
    return f'<div class="wide"><table>{body}</table></div>'


def details(title: str, content: str) -> str:
    """Folded until asked for; works without a script."""
    return f"<details><summary>{escape(title)}</summary>{content}</details>"
