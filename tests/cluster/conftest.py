"""What the tests of the command line share."""

from __future__ import annotations

import sys

import pytest

from cluster import cli


@pytest.fixture
def paceline(capsys):
    """Runs a command in this process: (exit code, stdout, stderr)."""

    def run(*argv: str) -> tuple[int, str, str]:
        code = cli.main(argv)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


@pytest.fixture
def terminal(monkeypatch):
    """Makes stdout say that it is a terminal."""

    def pretend() -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    return pretend
