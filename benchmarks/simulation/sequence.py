"""One generation as a simulated verifier holds it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.simulation.drafting import DraftSession, SimulatedSpeculation
from benchmarks.simulation.outcome import RequestOutcome
from benchmarks.simulation.production import Path
from benchmarks.simulation.traffic import Request

Told = Callable[[int, bool], None]
"""(tokens of the answer, whether it has ended): for the router, at the first token and at the last
one."""


@dataclass(slots=True, eq=False)
class SimulatedSequence:
    """Invariant: `uncomputed` is 0 while it decodes; each step then draws at least one token."""

    request: Request
    router: int
    outcome: RequestOutcome
    tell: Told
    speculation: SimulatedSpeculation
    uncomputed: int = field(init=False)
    """Tokens to be read before it decodes: the prompt, after a preemption the answer too."""
    kv_tokens: int = 0
    """Held in the cache."""
    placed_at_s: float | None = None
    """When it was first given a place."""
    session: DraftSession | None = None
    drafter: int = -1
    """Number of the drafter that has the session; -1: none has."""
    wants_session: bool = False
    """A session was ordered."""

    def __post_init__(self) -> None:
        self.uncomputed = self.request.prompt_tokens

    @property
    def num_left(self) -> int:
        """Tokens until its end."""
        return self.request.output_tokens - self.speculation.tip

    @property
    def max_draft_len(self) -> int:
        """A step draws one token itself."""
        return self.num_left - 1

    @property
    def is_plain(self) -> bool:
        return self.speculation.path is Path.PLAIN
