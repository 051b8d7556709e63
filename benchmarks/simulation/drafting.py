"""Of one sequence: its drafts, as its verifier and its drafter hold them.

A drafter's tokens depend on the text alone, so a chain is named by where it starts, and both sides
only need to know how long theirs is.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from benchmarks.simulation.production import ChainNode, Chance, Path, Speculation, its_word
from benchmarks.simulation.scenario import MAX_CHAIN
from benchmarks.simulation.traffic import Pattern, Request

DRAFTER_NAME = "simulated"
"""All drafters have one model, so acceptance is learnt for all together."""
NO_CHAIN = Pattern((), 0)


@dataclass(slots=True)
class SimulatedSpeculation(Speculation):
    """A verifier's drafts of one sequence. Instead of a trie it holds one chain: of `pattern`, that
    starts behind `anchor` tokens of the answer, the first `known_len` drafts have come. Invariant:
    what the answer has gone beyond the anchor are right drafts of the chain, or it is NO_CHAIN."""

    pattern: Pattern = NO_CHAIN
    anchor: int = 0
    known_len: int = 0
    tip: int = 0
    """Tokens of the answer."""
    is_answered: bool = False
    """The drafter has said all it was asked for behind the tip."""
    chances: dict[float, float] = field(default_factory=dict)
    """Of confidences, for as long as the planner learns nothing: shared by a verifier's own."""

    @property
    def num_at_hand(self) -> int:
        """Drafts behind the tip."""
        return max(0, self.anchor + self.known_len - self.tip)

    @property
    def num_right(self) -> int:
        """How many drafts behind the tip are right; more than are at hand, perhaps."""
        return self.pattern.num_right - (self.tip - self.anchor)

    @property
    def answered(self) -> bool:
        return self.is_answered

    def holds_chain(self, max_len: int) -> bool:
        return self.num_at_hand >= min(self.depth, max_len)

    def is_due(self, max_len: int) -> bool:
        """A draft is on its way that a step of at most `max_len` drafts could use. In one piece: it
        is asked more often than anything else here."""
        return (
            not self.is_answered
            and self.live
            and not self.late
            and not self.rests
            and self.path is Path.SPECULATIVE
            and self.anchor + self.known_len - self.tip < min(self.depth, max_len)
        )

    def chain(self, max_len: int, chance: Chance = its_word) -> tuple[ChainNode, ...]:
        start = self.tip - self.anchor
        num_nodes = min(max_len, self.depth, self.known_len - start)
        if num_nodes <= 0 or self.path is Path.PLAIN:
            return ()
        chances, survival, nodes = self.chances, 1.0, []
        for confidence in self.pattern.confidences[start : start + num_nodes]:
            likely = chances.get(confidence)
            if likely is None:
                likely = chances[confidence] = chance(DRAFTER_NAME, confidence)
            survival *= likely
            nodes.append(ChainNode(0, confidence, survival, DRAFTER_NAME))
        return tuple(nodes)

    def insert(self, anchor: int, pattern: Pattern, length: int) -> None:
        """A draft has come: of a chain that starts at `anchor` the first `length`. It is used as
        far as it goes beyond what was there, and dropped where the answer went another way."""
        gone = self.tip - anchor
        if pattern.num_right >= gone and anchor + length > max(
            self.anchor + self.known_len, self.tip
        ):
            self.anchor, self.pattern, self.known_len = anchor, pattern, length

    def commit(self, num_tokens: int) -> None:
        """The answer has so many tokens more."""
        self.tip += num_tokens
        self.is_answered = False
        if self.num_right < 0:
            self.pattern, self.anchor, self.known_len = NO_CHAIN, self.tip, 0


@dataclass(slots=True, eq=False)
class DraftSession:
    """What a drafter holds of one sequence."""

    request: Request
    speculation: SimulatedSpeculation
    """The verifier's side."""
    verifier: int
    wanted: int
    """Length of the chain that answers a commit."""
    unread_tokens: int
    """Of its prompt."""
    pattern: Pattern = NO_CHAIN
    anchor: int = 0
    length: int = 0
    """Of the chain that was drafted."""
    told_tip: int = 0
    """Tokens of the answer that the drafter knows of."""
    owes: bool = False
    paused: bool = False
    closed: bool = False
    idle_mark_s: float = -1.0
    """How long the drafter had been idle when this session was answered; below 0 it is owed."""

    def catch_up(self) -> int:
        """Follow the answer to the tip that was told; how many drafts are missing then."""
        gone = self.told_tip - self.anchor
        is_lost = gone > min(self.pattern.num_right, self.length)
        if is_lost or gone + self.wanted > MAX_CHAIN:
            self.anchor, self.length, gone = self.told_tip, 0, 0
            self.pattern = self.request.pattern(self.told_tip)
        return max(0, self.wanted - (self.length - gone))
