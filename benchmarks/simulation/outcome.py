"""What became of a request."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from benchmarks.loadtest.profile import Slo
from benchmarks.simulation.production import Path


class Outcome(StrEnum):
    """Where it stands at the end of the simulation."""

    DONE = "done"
    REFUSED = "refused"
    RUNNING = "running"
    """Under way, or waiting."""


@dataclass(slots=True, eq=False)
class RequestOutcome:
    """Of one request in one arm."""

    index: int
    kind: str
    arrival_s: float
    outcome: Outcome = Outcome.RUNNING
    path: Path = Path.PLAIN
    """When it was taken."""
    first_token_s: float | None = None
    """At the client."""
    end_s: float | None = None
    num_tokens: int = 0
    """Of its answer; all of them once it is done."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    @property
    def ttft_ms(self) -> float | None:
        return None if self.first_token_s is None else 1e3 * (self.first_token_s - self.arrival_s)

    @property
    def tpot_ms(self) -> float | None:
        """Time per token behind the first; None unless done with more than one."""
        if self.end_s is None or self.first_token_s is None or self.num_tokens < 2:
            return None
        return 1e3 * (self.end_s - self.first_token_s) / (self.num_tokens - 1)

    @property
    def e2e_ms(self) -> float | None:
        return None if self.end_s is None else 1e3 * (self.end_s - self.arrival_s)

    def is_good(self, slo: Slo) -> bool:
        """Done, and within every bound."""
        return self.outcome is Outcome.DONE and all(
            limit is None or value is None or value <= limit
            for value, limit in (
                (self.ttft_ms, slo.ttft_ms),
                (self.tpot_ms, slo.tpot_ms),
                (self.e2e_ms, slo.e2e_ms),
            )
        )
