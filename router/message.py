"""An assistant's message, whole or in the making."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class CallDelta:
    """What was added to one call."""

    index: int
    """Of the call in its message."""
    arguments: str = ""
    id: str = ""
    """Only with what comes first of a call, as is the name."""
    name: str = ""


@dataclass(frozen=True, slots=True)
class MessageDelta:
    """What was added to a message."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    """At most one of each call."""

    def __bool__(self) -> bool:
        return bool(self.content or self.reasoning or self.calls)


@dataclass(slots=True)
class Call:
    """A call of a function."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """All that was added."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, delta: MessageDelta) -> None:
        """Take in what comes next."""
        self.content += delta.content
        self.reasoning += delta.reasoning
        for call in delta.calls:
            if call.index == len(self.calls):
                self.calls.append(Call(call.id, call.name))
            self.calls[call.index].arguments += call.arguments


def joined(deltas: Iterable[MessageDelta]) -> MessageDelta:
    """Several deltas as one."""
    content = reasoning = ""
    calls: dict[int, CallDelta] = {}
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.calls:
            begun = calls.get(call.index)
            calls[call.index] = (
                CallDelta(call.index, begun.arguments + call.arguments, begun.id, begun.name)
                if begun
                else call
            )
    return MessageDelta(content, reasoning, tuple(calls.values()))
