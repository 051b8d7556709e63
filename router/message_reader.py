"""From the text of a generation to the parts of a message."""

from __future__ import annotations

from dataclasses import dataclass

from cluster.types import FinishReason
from router.message import Message, MessageDelta, joined
from router.thinking import Thinking, ThinkingReader
from router.tools.call_format import CallFormat
from router.tools.call_reader import CallReader

_PIECE_LEN = 4096
"""What is read at once of a long text: the cost of a piece grows faster than its length."""


@dataclass(frozen=True, slots=True)
class MessageForm:
    """What a generation's text may hold besides content."""

    thinking: Thinking = Thinking.NONE
    call_format: CallFormat | None = None
    """None if a call would be content like anything else."""
    names: tuple[str, ...] = ()
    """Of the functions that may be called."""
    named: bool = False
    """The client chose the function that is called."""

    def finish_reason(self, reason: FinishReason, called: bool) -> str:
        """As OpenAI tells it: `tool_calls` after calls, but `stop` where the client itself chose
        the function."""
        if called and not self.named and reason is FinishReason.STOP:
            return "tool_calls"
        return reason.value

    def read(self, text: str) -> tuple[Message, bool]:
        """(the message that a whole text holds, whether it ends in complete calls)."""
        message, reader = Message(), MessageReader(self)
        for start in range(0, len(text), _PIECE_LEN):
            message.add(reader.push(text[start : start + _PIECE_LEN]))
        message.add(reader.finish())
        return message, reader.called


PLAIN = MessageForm()
"""All is content."""


class MessageReader:
    """Reads one message as it comes. What it makes of a text does not depend on how that is cut."""

    def __init__(self, form: MessageForm) -> None:
        self._thinking = ThinkingReader(form.thinking)
        self._calls = CallReader(form.call_format, form.names) if form.call_format else None

    @property
    def called(self) -> bool:
        """There are calls, and none of them is unfinished."""
        return self._calls is not None and self._calls.called

    def push(self, text: str) -> MessageDelta:
        """What this piece adds."""
        reasoning, answer = self._thinking.push(text)
        return joined([reasoning, self._read(answer)])

    def finish(self) -> MessageDelta:
        """What is left, when no text follows."""
        reasoning, answer = self._thinking.finish()
        parts = [reasoning, self._read(answer)]
        return joined([*parts, self._calls.finish()] if self._calls else parts)

    def _read(self, answer: str) -> MessageDelta:
        return self._calls.push(answer) if self._calls else MessageDelta(answer)
