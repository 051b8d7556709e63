"""A simulated verifier's side of drafting: which drafter has which session, and the messages.

Who is spoken to and who gets a session is the production choice. A message takes half of the
pair's round trip; one leaves for every drafter after a step, and one from it after a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from benchmarks.simulation.clock import Clock
from benchmarks.simulation.drafter import Answer, SimulatedDrafter
from benchmarks.simulation.drafting import DraftSession
from benchmarks.simulation.production import (
    MAX_STREAMS,
    Candidate,
    DrafterLoad,
    DrafterState,
    choose_drafter,
    preferred_drafters,
)
from benchmarks.simulation.sequence import SimulatedSequence

LOADS_PERIOD_S = 0.25
"""What drafters tell of themselves is at most this old in a report."""
FULL_PAUSE_S = 1.0
"""A drafter that refused a session is left alone for so long."""


class SimulatedDraftClient:
    """Of one verifier."""

    def __init__(
        self,
        verifier: int,
        clock: Clock,
        drafters: Mapping[int, SimulatedDrafter],
        rtt_s: Callable[[int], float],
        receive: Callable[[Sequence[Answer]], None],
    ) -> None:
        self._verifier = verifier
        self._clock = clock
        self._drafters = drafters
        self._rtt_s = rtt_s
        self._receive = receive
        self._streams: dict[int, float] = {}
        """Round trip to each drafter that a stream is kept to."""
        self._num_sessions: dict[int, int] = {}
        self._full_until_s: dict[int, float] = {}
        self._unplaced: list[SimulatedSequence] = []
        self._loads: tuple[DrafterLoad, ...] = ()
        self._loads_at_s = -1.0

    def update_drafters(self) -> None:
        """Others came or are to go."""
        usable = {d.name: d.number for d in self._drafters.values() if not d.draining}
        preferred = preferred_drafters(f"verifier-{self._verifier}", usable, MAX_STREAMS)
        numbers = sorted(usable[name] for name in preferred)
        self._streams = {number: self._rtt_s(number) for number in numbers}
        self._loads_at_s = -1.0
        self.place_waiting()

    def open(self, sequence: SimulatedSequence) -> None:
        """Find a drafter for it, now or later."""
        if not self._place(sequence):
            self._unplaced.append(sequence)

    def place_waiting(self) -> None:
        """Try again for those that have none."""
        self._unplaced = [s for s in self._unplaced if not self._place(s)]

    def leave(self, drafter: int, sequences: Iterable[SimulatedSequence]) -> None:
        """Move the sessions of a drafter that is to go."""
        for sequence in sequences:
            if sequence.drafter == drafter:
                self._detach(sequence)
                sequence.speculation.live = False
                self.open(sequence)

    def close(self, sequence: SimulatedSequence) -> None:
        """It has ended."""
        if sequence.session is None:
            self._unplaced.remove(sequence)
        else:
            self._detach(sequence)

    def tell(self, sequences: Iterable[SimulatedSequence]) -> None:
        """Send the newest tokens of these to their drafters."""
        messages: dict[int, list[tuple[DraftSession, int]]] = {}
        for sequence in sequences:
            if (session := sequence.session) is not None:
                told = messages.setdefault(sequence.drafter, [])
                told.append((session, sequence.speculation.tip))
        for number, told in messages.items():
            self._send(number, told)

    def lead(self, sequence: SimulatedSequence) -> int:
        """Length of its drafter's chain with what was drafted ahead."""
        assert sequence.session is not None
        return self._drafters[sequence.drafter].lead(sequence.session)

    def deliver(self, drafter: int, answers: list[Answer]) -> None:
        """A drafter sends this."""
        delay_s = self._way_s(drafter)
        self._clock.after(delay_s, lambda: self._receive(answers))

    def loads(self) -> tuple[DrafterLoad, ...]:
        """Every drafter that a stream is kept to."""
        if self._clock.now >= self._loads_at_s + LOADS_PERIOD_S or self._loads_at_s < 0:
            self._loads = tuple(self._load(*stream) for stream in self._streams.items())
            self._loads_at_s = self._clock.now
        return self._loads

    def _load(self, number: int, rtt_s: float) -> DrafterLoad:
        drafter = self._drafters[number]
        return DrafterLoad(
            incarnation=drafter.name,
            state=DrafterState.READY,
            sessions=self._num_sessions.get(number, 0),
            tokens_per_s=drafter.tokens_per_s(),
            queue_ms=drafter.queue_ms,
            rtt_ms=1e3 * rtt_s,
            kind="model",
        )

    def _place(self, sequence: SimulatedSequence) -> bool:
        while (chosen := choose_drafter(self._candidates())) is not None:
            number = int(chosen.rpartition("-")[2])
            if self._open_at(number, sequence):
                return True
            self._full_until_s[number] = self._clock.now + FULL_PAUSE_S
        return False

    def _candidates(self) -> list[Candidate]:
        now = self._clock.now
        return [
            Candidate(self._drafters[number].name, self._num_sessions.get(number, 0), 1e3 * rtt_s)
            for number, rtt_s in self._streams.items()
            if self._full_until_s.get(number, 0.0) <= now
        ]

    def _open_at(self, number: int, sequence: SimulatedSequence) -> bool:
        speculation = sequence.speculation
        session = DraftSession(
            sequence.request,
            speculation,
            self._verifier,
            wanted=speculation.depth,
            unread_tokens=sequence.request.prompt_tokens + speculation.tip,
            told_tip=speculation.tip,
            paused=not sequence.speculation.engages,
        )
        if not self._drafters[number].open(session):
            return False
        sequence.session, sequence.drafter = session, number
        self._num_sessions[number] = self._num_sessions.get(number, 0) + 1
        return True

    def _detach(self, sequence: SimulatedSequence) -> None:
        assert sequence.session is not None
        self._drafters[sequence.drafter].close(sequence.session)
        self._num_sessions[sequence.drafter] -= 1
        sequence.session, sequence.drafter = None, -1

    def _send(self, number: int, told: list[tuple[DraftSession, int]]) -> None:
        if (drafter := self._drafters.get(number)) is not None:
            self._clock.after(self._way_s(number), lambda: drafter.take(told))

    def _way_s(self, number: int) -> float:
        rtt_s = self._streams.get(number)
        return (self._rtt_s(number) if rtt_s is None else rtt_s) / 2
