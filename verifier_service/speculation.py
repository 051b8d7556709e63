"""One sequence's drafts: its trie, its session, and its statistics."""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.types import Path, SpeculationStats
from verifier_service.draft_trie import ChainNode, DraftTrie
from verifier_service.planner import DraftValue


@dataclass(slots=True)
class Speculation:
    """Invariant: `late` is set only by a deadline that passed, and cleared only by a draft for the
    newest committed token, so that a drafter that hangs costs a sequence one deadline, no more."""

    depth: int
    """Most drafts verified in a step; 0 means that this request never drafts."""
    path: Path
    trie: DraftTrie | None = None
    """From the first order of a session on, which the draft client keeps alive until it is closed;
    so a request that is always plain pays for none of this."""
    drafter: str = ""
    incarnation: str = ""
    live: bool = False
    """A drafter serves the session now."""
    late: bool = False
    resynced: bool = False
    """A re-sync was ordered and no draft has fitted since."""
    asked_at: float = 0.0
    """time.monotonic() of the last commit that the drafter was told."""
    value: DraftValue = field(default_factory=DraftValue)
    chosen: tuple[ChainNode, ...] = ()
    """The drafts that the planner wants verified in this step."""
    num_steps: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def wanted(self) -> bool:
        return self.path is Path.SPECULATIVE and self.depth > 0

    @property
    def answered(self) -> bool:
        return self.trie is not None and self.trie.answered

    @property
    def due(self) -> bool:
        """Whether a draft is on its way that is worth a short wait."""
        return self.wanted and self.live and not self.late and not self.answered

    def chain(self, max_len: int) -> tuple[ChainNode, ...]:
        """The best drafts at hand."""
        if not self.wanted or self.trie is None:
            return ()
        return self.trie.best_path(min(max_len, self.depth))

    def record(self, num_drafted: int, num_accepted: int) -> None:
        """Count one step that committed tokens."""
        self.num_steps += 1
        missing = num_drafted - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for position in range(num_drafted):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < num_accepted

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            self.drafter,
            self.num_steps,
            tuple(self.drafted_per_position),
            tuple(self.accepted_per_position),
        )
