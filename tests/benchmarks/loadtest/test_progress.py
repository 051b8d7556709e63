"""A bar on a terminal, lines elsewhere."""

from __future__ import annotations

import io

from benchmarks.loadtest.progress import Progress
from tests.benchmarks.loadtest.records import ok, refused


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(out: io.StringIO) -> str:
    progress = Progress(2, out)
    for title in ("first", "second"):
        progress.begin(title)
        progress.ended(ok())
        progress.ended(refused())
        progress.finish("1 ok, 1 not")
    return out.getvalue()


def test_lines_where_there_is_no_terminal() -> None:
    assert shown(io.StringIO()) == "[1/2] first: 1 ok, 1 not\n[2/2] second: 1 ok, 1 not\n"


def test_a_bar_on_a_terminal() -> None:
    text = shown(Terminal())
    assert "[........................] 1/2 first: 0 ended, 0 s" in text
    assert "[############............] 2/2 second" in text
    assert [line.split("\x1b[K")[-1] for line in text.removesuffix("\n").split("\n")] == [
        "[1/2] first: 1 ok, 1 not",
        "[2/2] second: 1 ok, 1 not",
    ]
