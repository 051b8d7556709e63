"""One sequence's drafts: its trie, its session, and its statistics."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from cluster.config import VerificationRule
from cluster.draft_law import DraftLaw, could_have_drawn
from cluster.types import Draft, DraftNode, Path, SpeculationStats
from verifier_service.draft_trie import (
    ChainNode,
    Chance,
    DraftOutcome,
    DraftTrie,
    its_word,
)
from verifier_service.local_drafting import PREDICTION
from verifier_service.planner import DraftValue, MeanAcceptance


@dataclass(slots=True)
class Speculation:
    """Invariant: `late` is set only by a deadline that passed, and cleared only by a draft for the
    newest committed token, so that a drafter that hangs costs a sequence one deadline, no more."""

    depth: int
    """Most drafts of a drafter replica verified in a step; 0 means that this request never
    drafts."""
    path: Path
    local_depth: int = 0
    """Most drafts verified in a step where they come from inside the verifier."""
    local_kinds: frozenset[str] = frozenset()
    """Drafters inside the verifier that it may use."""
    remote: bool = True
    """It may use drafter replicas."""
    rule: VerificationRule = "coupled"
    """How drafts are verified that come with their laws; others are by coupling."""
    tells_laws: bool = False
    """The drafter that serves the session tells laws. Then its chain is all that is drafted from:
    a choice between that and another chain would hang on what was drawn."""
    mean: MeanAcceptance = field(default_factory=MeanAcceptance)
    """Of drafts with laws."""
    trie: DraftTrie | None = None
    """From the first time that drafts are wanted; so a request that is always plain pays for none
    of this."""
    ordered: bool = False
    """A session was ordered, which the draft client keeps alive until it is closed."""
    drafter: str = ""
    """Name of the drafter replica that has, or had, the session."""
    incarnation: str = ""
    live: bool = False
    """A drafter serves the session now."""
    late: bool = False
    resynced: bool = False
    """A re-sync was ordered and no draft has fitted since."""
    rests: bool = False
    """Drafter replicas are not asked for now: see drafter_trial.py."""
    asked_at: float = 0.0
    """time.monotonic() of the last word after which the drafter owes a draft."""
    value: DraftValue = field(default_factory=DraftValue)
    chosen: tuple[ChainNode, ...] = ()
    """The drafts that the planner wants verified in this step."""
    num_steps: int = 0
    accepted_by: Counter[str] = field(default_factory=Counter)
    """Accepted tokens by drafter."""
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)

    @property
    def wants_laws(self) -> bool:
        return self.rule != "coupled"

    @property
    def wanted(self) -> bool:
        return self.path is Path.SPECULATIVE and self.depth > 0

    @property
    def engages(self) -> bool:
        """Drafter replicas shall draft for it."""
        return self.wanted and self.remote and not self.rests

    @property
    def answered(self) -> bool:
        return self.trie is not None and self.trie.answered

    def holds_chain(self, max_len: int) -> bool:
        """As many drafts are at hand as a step of at most `max_len` verifies."""
        return self.trie is not None and self.trie.holds_chain(min(self.depth, max_len))

    @property
    def settled(self) -> bool:
        """Nothing is due: the drafter has said all, or a chain of the full depth is at hand."""
        return self.answered or self.holds_chain(self.depth)

    @property
    def due(self) -> bool:
        """Whether a draft is on its way that is worth a short wait."""
        return self.engages and self.live and not self.late and not self.settled

    @property
    def kinds_now(self) -> frozenset[str]:
        """Drafters inside the verifier that draft for it on its present path."""
        if self.tells_laws:
            return frozenset()
        if self.wanted:
            return self.local_kinds
        return self.local_kinds & {PREDICTION} if self.depth > 0 else frozenset()

    @property
    def drafts_now(self) -> bool:
        """Whether anything may draft for it on its present path."""
        return self.wanted or bool(self.kinds_now)

    @property
    def max_chain_len(self) -> int:
        """Most drafts verified in a step, whoever made them."""
        return max(self.depth, self.local_depth if self.local_kinds else 0)

    def chain(self, max_len: int, chance: Chance = its_word) -> tuple[ChainNode, ...]:
        """The best drafts at hand."""
        kinds = self.kinds_now
        if self.trie is None or not (self.wanted or kinds):
            return ()
        path = self.trie.best_path(min(max_len, self.max_chain_len), chance)
        allowed = self.depth if self.wanted else 0
        for index, node in enumerate(path):
            if index >= (self.local_depth if node.drafter in kinds else allowed):
                return path[:index]
        return path

    def use_laws(self, tells_laws: bool, token_ids: Sequence[int], vocab_size: int) -> None:
        """The session's drafter tells laws, or none any more. Drafts of one sort are never verified
        beside those of the other."""
        if self.tells_laws != tells_laws and self.trie is not None:
            self.trie = DraftTrie(token_ids, vocab_size)
        self.tells_laws = tells_laws

    def take(self, draft: Draft, vocab_size: int) -> DraftOutcome:
        """A draft of the session's drafter, which has a trie."""
        assert self.trie is not None
        if not self.tells_laws or all(_is_sound(node, vocab_size) for node in draft.nodes):
            return self.trie.insert(draft, self.drafter)
        nodes = tuple(node._replace(law=None) for node in draft.nodes)
        outcome = self.trie.insert(draft._replace(nodes=nodes), self.drafter)
        return DraftOutcome.LAWLESS if outcome is DraftOutcome.USED else outcome

    def laws(self, num_drafts: int) -> tuple[DraftLaw, ...]:
        """Of the first chosen drafts; none where they are to be verified by coupling."""
        if not self.tells_laws:
            return ()
        return tuple(node.law for node in self.chosen[:num_drafts] if node.law is not None)

    def record(self, drafters: Sequence[str], num_accepted: int) -> None:
        """Count one step that committed tokens, given who proposed each of its drafts."""
        self.num_steps += 1
        self.accepted_by.update(drafters[:num_accepted])
        self.accepted_by.update(dict.fromkeys(drafters, 0))
        num_drafted = len(drafters)
        missing = num_drafted - len(self.drafted_per_position)
        self.drafted_per_position += [0] * missing
        self.accepted_per_position += [0] * missing
        for position in range(num_drafted):
            self.drafted_per_position[position] += 1
            self.accepted_per_position[position] += position < num_accepted

    def stats(self) -> SpeculationStats:
        best = max(self.accepted_by, key=self.accepted_by.__getitem__, default=self.drafter)
        return SpeculationStats(
            best,
            self.num_steps,
            tuple(self.drafted_per_position),
            tuple(self.accepted_per_position),
        )


def _is_sound(node: DraftNode, vocab_size: int) -> bool:
    return node.law is not None and could_have_drawn(node.law, node.token_id, vocab_size)
