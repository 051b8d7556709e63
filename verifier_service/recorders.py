"""What the verifier's parts count as they work; verifier_service/metrics.py tells it."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cluster.metrics import DRAFT_RTT, DRAFT_WAIT, STEP_TOKENS, VERIFY_STEP, Distribution


class Fallback(StrEnum):
    """Why a sequence that wants the drafts of a drafter replica went on without."""

    LATE = "late"
    """Its draft missed the deadline; the next steps do not wait for it."""
    NO_DRAFTER = "no_drafter"
    """No drafter could take its session when it began."""
    LOST = "drafter_lost"
    DRAINING = "drafter_draining"
    FULL = "drafter_full"
    DISTRUSTED = "drafter_distrusted"
    """Almost none of its drafter's drafts are accepted."""
    REFUSED = "session_refused"
    """This drafter will not have the session."""
    ERROR = "session_error"
    RESYNC = "resync"
    """Its drafts hung on a prefix that is not ours."""


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """Of one moment, so that its parts fit together."""

    num_drafts: int
    """Steps of a sequence in which drafts were verified."""
    draft_tokens: Mapping[str, int]
    """Verified, by name of the drafter."""
    accepted_tokens: Mapping[str, int]
    """Emitted, by name of the drafter."""
    accepted_per_position: tuple[int, ...]


class SpeculationCounts:
    """What became of drafts since the start. May be used from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_drafts = 0
        self._draft_tokens: Counter[str] = Counter()
        self._accepted_tokens: Counter[str] = Counter()
        self._accepted_per_position: Counter[int] = Counter()

    def record(self, drafters: Sequence[str], num_accepted_tokens: int) -> None:
        """Count one step of a sequence in which drafts were verified, given who proposed each."""
        with self._lock:
            self._num_drafts += 1
            self._draft_tokens.update(drafters)
            self._accepted_tokens.update(drafters[:num_accepted_tokens])
            self._accepted_per_position.update(range(num_accepted_tokens))

    def totals(self) -> SpeculationTotals:
        with self._lock:
            per_position = self._accepted_per_position
            return SpeculationTotals(
                self._num_drafts,
                dict(self._draft_tokens),
                dict(self._accepted_tokens),
                tuple(per_position[position] for position in range(len(per_position))),
            )


class EngineRecorder:
    """Written by the engine's thread."""

    def __init__(self) -> None:
        self.step_seconds = Distribution(VERIFY_STEP)
        self.step_tokens = Distribution(STEP_TOKENS)
        self.draft_wait_seconds = Distribution(DRAFT_WAIT)
        self.speculation = SpeculationCounts()
        self.num_late = 0
        """Drafts that missed the deadline."""


class DraftRecorder:
    """Written by the draft client."""

    def __init__(self) -> None:
        self.rtt_seconds = Distribution(DRAFT_RTT)
        self.fallbacks: Counter[Fallback] = Counter()
