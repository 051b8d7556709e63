"""Progress: one line that changes on a terminal, lines now and then elsewhere."""

from __future__ import annotations

import io

from drafter_service.distill.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_now_and_then() -> None:
    stream = io.StringIO()
    progress = Progress(stream)
    for second in range(100):
        progress.show("it learns", second / 100, f"step {second}", float(second))
    progress.show("it writes", 1.0, "token 1", 99.5)
    progress.say("Done.")
    assert stream.getvalue().splitlines() == [
        "  0%  it learns: step 0",
        " 30%  it learns: step 30",
        " 60%  it learns: step 60",
        " 90%  it learns: step 90",
        "100%  it writes: token 1",
        "Done.",
    ]


def test_one_line_on_a_terminal() -> None:
    stream = Terminal()
    progress = Progress(stream)
    progress.show("it learns", 0.0, "step 0", 0.0)
    progress.show("it learns", 0.5, "step 1", 0.1)
    progress.say("Done.")
    *shown, last = stream.getvalue().split("\r\x1b[K")
    assert shown == [
        "",
        "·" * 24 + "   0%  it learns: step 0",
        "█" * 12 + "·" * 12 + "  50%  it learns: step 1",
    ]
    assert last == "Done.\n"
