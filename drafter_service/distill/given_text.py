"""A file to learn from, besides what the target writes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from cluster.commands.command_error import CommandError
from drafter_service.distill.dialogue import Dialogue


@dataclass(frozen=True, slots=True)
class GivenText:
    """Of a file, only one of the two is there."""

    pieces: tuple[tuple[int, ...], ...] = ()
    """Token ids of plain text, which the target reads."""
    questions: tuple[str, ...] = ()
    """Of a file of conversations; the target answers them."""


NO_TEXT = GivenText()


def read_text(file: Path, dialogue: Dialogue, piece_tokens: int) -> GivenText:
    """Plain text, or with the suffix .jsonl one conversation a line: {"messages": [...]} as OpenAI
    writes it. Raises CommandError."""
    try:
        content = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"--text {file} cannot be read: {error}") from error
    if file.suffix == ".jsonl":
        lines = content.splitlines()
        questions = [_question(file, n, line) for n, line in enumerate(lines, 1) if line.strip()]
        given = GivenText(questions=tuple(questions))
    else:
        token_ids = dialogue.text(content)
        starts = range(0, len(token_ids) - 1, piece_tokens)
        pieces = [token_ids[start : start + piece_tokens] for start in starts]
        given = GivenText(pieces=tuple(piece for piece in pieces if len(piece) > 1))
    if not given.pieces and not given.questions:
        raise CommandError(f"--text {file} holds nothing to learn")
    return given


def _question(file: Path, line_number: int, line: str) -> str:
    """The first words of the user."""
    try:
        messages = json.loads(line)["messages"]
        return next(str(m["content"]) for m in messages if m["role"] == "user")
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise CommandError(
            f"--text {file}, line {line_number}: no object with messages, one of them a user's"
        ) from error
