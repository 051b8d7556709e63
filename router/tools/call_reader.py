"""From the text that a model writes to content and calls, as it comes.

The outcome does not depend on how the text is cut into pieces. What may be the beginning of a call
is held back; what turns out to be none is content, so that nothing is lost but white space around
calls.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from enum import Enum, auto

from router.message import CallDelta, MessageDelta, joined
from router.tools.call_format import CallFormat
from router.tools.pattern import Outcome, Pattern, Piece, spaced


class _State(Enum):
    TEXT = auto()
    """Content, or what may be the beginning of a call."""
    ARGUMENTS = auto()
    """Within the arguments of the newest call."""
    END = auto()
    """Behind the arguments of a call."""


class CallReader:
    """Reads one message."""

    def __init__(self, form: CallFormat, names: Sequence[str]) -> None:
        head = [
            *spaced(form.marker + form.before_name),
            Piece.NAME,
            *spaced(form.before_arguments),
        ]
        self._marker = form.marker
        self._begin = Pattern([*head, "{"], names)
        self._end = Pattern([Piece.SPACE, *spaced(form.end)])
        self._state = _State.TEXT
        self._held = ""
        """Text that is not understood yet."""
        self._space = ""
        """White space that is content if more content follows."""
        self._num_calls = 0
        self._has_content = False
        self._bare = True
        """No content yet, or none since the last call."""
        self._arguments = _ObjectScanner()

    @property
    def called(self) -> bool:
        """There are calls, and none of them is unfinished."""
        return self._num_calls > 0 and self._state is not _State.ARGUMENTS

    def push(self, text: str) -> MessageDelta:
        """What this piece adds."""
        self._held += text
        return joined(self._advance(last=False))

    def finish(self) -> MessageDelta:
        """What is left, when no text follows."""
        rest = joined(self._advance(last=True))
        around_call = self._bare and self._num_calls
        return rest if around_call else joined([rest, MessageDelta(self._space)])

    def _advance(self, last: bool) -> Iterator[MessageDelta]:
        while self._held:
            before = self._state, len(self._held)
            match self._state:
                case _State.TEXT:
                    yield from self._read_text(last)
                case _State.ARGUMENTS:
                    yield self._read_arguments()
                case _State.END:
                    self._read_end(last)
            if (self._state, len(self._held)) == before:
                return

    # --- text ---

    def _read_text(self, last: bool) -> Iterator[MessageDelta]:
        start = self._next_candidate()
        yield self._content(start)
        if not self._held:
            return
        found = self._begin.match(self._held)
        if found.outcome is Outcome.YES:
            yield self._begin_call(found.name)
            self._held = self._held[found.end - 1 :]  # The brace belongs to the arguments.
        elif found.outcome is Outcome.NO:
            yield self._content(1)
        elif last and self._bare and self._num_calls:
            self._held = ""  # Another call was cut off before its name: no text of an answer.
        elif last:
            yield self._content(len(self._held))

    def _next_candidate(self) -> int:
        """Where in the held text a call may begin."""
        text = self._held
        if not self._marker:
            space = len(text) - len(text.lstrip())
            return len(text) if self._has_content or self._num_calls else space
        start = text.find(self._marker)
        return start if start >= 0 else len(text) - _overlap(text, self._marker)

    def _content(self, length: int) -> MessageDelta:
        text, self._held = self._held[:length], self._held[length:]
        if self._bare and self._num_calls:
            text = text.lstrip()
        text = self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :]
        if shown:
            self._has_content, self._bare = True, False
        return MessageDelta(shown)

    # --- calls ---

    def _begin_call(self, name: str) -> MessageDelta:
        index = self._num_calls
        self._num_calls += 1
        self._bare = True
        if not self._has_content:
            self._space = ""
        self._state = _State.ARGUMENTS
        self._arguments = _ObjectScanner()
        return MessageDelta(calls=(CallDelta(index, "", f"call_{secrets.token_hex(12)}", name),))

    def _read_arguments(self) -> MessageDelta:
        length = self._arguments.push(self._held)
        arguments, self._held = self._held[:length], self._held[length:]
        if self._arguments.complete:
            self._state = _State.END
        return MessageDelta(calls=(CallDelta(self._num_calls - 1, arguments),))

    def _read_end(self, last: bool) -> None:
        found = self._end.match(self._held)
        if found.outcome is Outcome.OPEN and not last:
            return
        length = len(self._held) if found.outcome is Outcome.OPEN else found.end
        self._held = self._held[length:]
        self._state = _State.TEXT


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that is the beginning of the marker."""
    longest = min(len(text), len(marker) - 1)
    return next((k for k in range(longest, 0, -1) if text.endswith(marker[:k])), 0)


class _ObjectScanner:
    """Finds the end of a JSON object by its brackets."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self.complete = False

    def push(self, text: str) -> int:
        """How many of these characters belong to the object."""
        for index, char in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._in_string:
                self._escaped = char == "\\"
                self._in_string = char != '"'
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.complete = True
                    return index + 1
        return len(text)
