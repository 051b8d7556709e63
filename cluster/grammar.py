"""What a generation must look like, as members tell one another. Pure data.

`grammar_matcher.py` gives a spec its meaning, `grammar_check.py` finds out whether it is safe.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_GRAMMAR_BYTES = 1 << 17
"""Longest text of a spec, in UTF-8."""


class GrammarKind(StrEnum):
    """How the text of a spec is to be read."""

    JSON_OBJECT = "json_object"
    """Any JSON object; there is no text."""
    JSON_SCHEMA = "json_schema"
    """A JSON Schema, an object or a boolean, as JSON."""
    REGEX = "regex"
    """A regular expression for the whole output."""
    LARK = "lark"
    """A context-free grammar in Lark's notation, or in GBNF's."""
    CHOICE = "choice"
    """The strings to choose from, as a JSON list."""


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A constraint on the text of one generation, as a client stated it."""

    kind: GrammarKind
    text: str = ""


class GrammarError(ValueError):
    """A grammar cannot be used, or came to a point where it cannot go on. The message is short and
    made for the client."""


def check_size(spec: GrammarSpec) -> None:
    """Raise GrammarError if the text is too long to be looked at."""
    try:
        size = len(spec.text.encode())
    except UnicodeEncodeError:
        raise GrammarError("the grammar holds half a surrogate pair") from None
    if size > MAX_GRAMMAR_BYTES:
        raise GrammarError(f"the grammar is over the limit of {MAX_GRAMMAR_BYTES} bytes")
