"""Collects what one step has to say, to be posted as one value."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.load import VerifierLoad
from verifier_service.events import (
    DraftCommit,
    DraftOpen,
    DraftOrders,
    DraftVerdict,
    EngineOutput,
    SequenceEvent,
)


@dataclass(slots=True)
class Outbox:
    """The parts of the next EngineOutput; see there."""

    events: list[SequenceEvent] = field(default_factory=list)
    opens: list[DraftOpen] = field(default_factory=list)
    commits: list[DraftCommit] = field(default_factory=list)
    resyncs: list[int] = field(default_factory=list)
    malformed: list[int] = field(default_factory=list)
    paused: dict[int, bool] = field(default_factory=dict)
    """Last word of this step on each session: paused, or resumed."""
    closes: list[int] = field(default_factory=list)
    verdicts: list[DraftVerdict] = field(default_factory=list)

    @property
    def empty(self) -> bool:
        sessions = (self.opens, self.commits, self.resyncs, self.malformed, self.closes)
        return not (self.events or self.verdicts or self.paused or any(sessions))

    def output(self, load: VerifierLoad, least_survival: float) -> EngineOutput:
        orders = DraftOrders(
            opens=tuple(self.opens),
            commits=tuple(self.commits),
            resyncs=tuple(self.resyncs),
            malformed=tuple(self.malformed),
            pauses=tuple(seq for seq, paused in self.paused.items() if paused),
            resumes=tuple(seq for seq, paused in self.paused.items() if not paused),
            closes=tuple(self.closes),
            least_survival=least_survival,
        )
        return EngineOutput(tuple(self.events), orders, tuple(self.verdicts), load)
