"""Sequences that wait for a place in the engine, and which of them is next.

The lowest `priority` goes first, equal ones in the order they came. Nobody starves: whom others
that came later have passed `MAX_PASSES` times goes before all. A preempted sequence had its place
already, so it goes before those that never had one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine.sequence import Sequence

MAX_PASSES = 32


@dataclass(slots=True)
class _Waiting:
    sequence: Sequence
    num_passes: int = 0
    """Sequences behind it in the queue that left before it."""
    preempted: bool = False

    @property
    def rank(self) -> tuple[bool, int]:
        """Lower goes first."""
        privileged = self.preempted or self.num_passes >= MAX_PASSES
        return not privileged, 0 if privileged else self.sequence.request.priority


class WaitingQueue:
    """Holds its entries in order of arrival, preempted ones before the others."""

    def __init__(self) -> None:
        self._entries: list[_Waiting] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Sequence]:
        return (entry.sequence for entry in self._entries)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._entries.append(_Waiting(sequence))

    def give_back(self, sequence: Sequence) -> None:
        """Queue a sequence that was preempted."""
        self._entries.insert(0, _Waiting(sequence, preempted=True))

    def remove(self, sequence: Sequence) -> None:
        """It waits no longer, and got no place."""
        del self._entries[self._index(sequence)]

    def next(self) -> Sequence:
        """Who gets the next place; the queue must not be empty."""
        return min(self._entries, key=lambda entry: entry.rank).sequence

    def take(self, sequence: Sequence) -> None:
        """It got a place."""
        index = self._index(sequence)
        for entry in self._entries[:index]:
            entry.num_passes += 1
        del self._entries[index]

    def _index(self, sequence: Sequence) -> int:
        return next(i for i, entry in enumerate(self._entries) if entry.sequence is sequence)
