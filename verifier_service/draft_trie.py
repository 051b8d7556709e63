"""The drafts of one sequence: a trie below its committed tokens.

A draft is valid by its content, not by its timing. It names the prefix it hangs on by position and
hash; what agrees with the committed tokens is walked, what contradicts them is dropped. So drafts
may come late, twice, in parts or in any order, and still nothing in the trie contradicts what is
committed.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count

from cluster.draft_law import DraftLaw
from cluster.protocol.prefix_hash import EMPTY_PREFIX_HASH, extend_prefix_hash
from cluster.types import Draft, DraftNode

MAX_TRIE_NODES = 1_024
"""A draft that would grow a trie beyond this is malformed."""
MAX_REMEMBERED_ANCHORS = 1_024

Anchor = tuple[int, int]
"""Position and prefix hash: what a draft hangs on."""


class DraftOutcome(StrEnum):
    """What became of a draft."""

    USED = "used"
    """It brought nodes, or the first word that no more are to come before the next commit."""
    LAWLESS = "lawless"
    """It brought nodes and was to tell their laws, and tells none or what cannot be. Its nodes are
    verified by coupling."""
    DUPLICATE = "duplicate"
    """It fits and says nothing new."""
    OFF_PATH = "off_path"
    """The committed tokens went another way."""
    UNKNOWN_ANCHOR = "unknown_anchor"
    """Its prefix is none of ours; the drafter's session must be opened again."""
    MALFORMED = "malformed"
    """It is no trie over this vocabulary, or too large, or answers what was not said yet."""


@dataclass(frozen=True, slots=True)
class ChainNode:
    """One token of a chain below the committed tokens."""

    token_id: int
    confidence: float
    """The drafter's word on its chance to be accepted, if all before it in the chain are."""
    survival: float
    """Product of the chances up to it."""
    drafter: str = ""
    """Who proposed it."""
    law: DraftLaw | None = None
    """That it was drawn from, as the drafter tells."""


Chance = Callable[[str, float], float]
"""(drafter, confidence) -> the chance that the confidence is worth."""


def its_word(drafter: str, confidence: float) -> float:
    """The chance as the drafter says."""
    return confidence


@dataclass(slots=True, eq=False)
class _Node:
    anchor: Anchor
    """Of what hangs below it: its own token is the last one of that prefix."""
    token_id: int
    confidence: float
    drafter: str = ""
    law: DraftLaw | None = None
    children: dict[int, _Node] = field(default_factory=dict)

    def descendants(self) -> Iterator[_Node]:
        """All nodes below, parents first."""
        pending = list(self.children.values())
        while pending:
            node = pending.pop()
            yield node
            pending += node.children.values()


class DraftTrie:
    """Invariant: every path from the root is an extension of the committed tokens; `_nodes` holds
    exactly the root and its descendants, by anchor."""

    def __init__(
        self,
        committed_token_ids: Iterable[int],
        vocab_size: int,
        max_nodes: int = MAX_TRIE_NODES,
    ) -> None:
        self._vocab_size = vocab_size
        self._max_nodes = max_nodes
        self._hashes = array("Q", [EMPTY_PREFIX_HASH])
        """Index i: hash of the first i committed tokens."""
        self._dropped: dict[Anchor, None] = {}
        """The latest anchors that fell off the committed path, oldest first."""
        self._answered_len: int | None = None
        """Committed tokens when the drafter last said that no more is to come."""
        self._append(committed_token_ids)
        self._root = self._new_root()
        self._nodes = {self._root.anchor: self._root}

    def __len__(self) -> int:
        """Nodes below the committed tokens."""
        return len(self._nodes) - 1

    @property
    def num_committed(self) -> int:
        return len(self._hashes) - 1

    @property
    def prefix_hash(self) -> int:
        """Of the committed tokens."""
        return self._hashes[-1]

    @property
    def answered(self) -> bool:
        """The drafter has said all that it was asked for behind the committed tip: there is nothing
        more to wait for."""
        return self._answered_len == self.num_committed

    def has_next(self, drafter: str) -> bool:
        """Whether this drafter proposed a token behind the committed ones."""
        return any(node.drafter == drafter for node in self._root.children.values())

    def holds_chain(self, length: int) -> bool:
        """Whether any chain below the committed tokens is this long."""
        pending, deepest = [self._root], self._root.anchor[0] + length
        while pending:
            node = pending.pop()
            if node.anchor[0] >= deepest:
                return True
            pending += node.children.values()
        return False

    def insert(self, draft: Draft, drafter: str = "") -> DraftOutcome:
        """Take what fits of a drafter's draft."""
        if not self._is_well_formed(draft):
            return DraftOutcome.MALFORMED
        anchor = (draft.anchor_position, draft.anchor_hash)
        if anchor in self._nodes:
            outcome = self._insert_at(self._nodes[anchor], draft.nodes, drafter)
        elif anchor in self._dropped or self._is_committed(anchor):
            outcome = self._insert_behind(anchor, draft.nodes, drafter)
        else:
            return DraftOutcome.UNKNOWN_ANCHOR
        is_news = draft.answers == self.num_committed and not self.answered
        if is_news:
            self._answered_len = draft.answers
        return DraftOutcome.USED if is_news else outcome

    def graft(self, nodes: Sequence[DraftNode], drafter: str) -> None:
        """Take a draft that a drafter of our own made for the committed tip, if there is room: half
        of it is kept for drafter replicas, whom nobody tells that it is taken."""
        if len(self) + len(nodes) <= self._max_nodes // 2:
            placed = [self._root]
            for node in nodes:
                placed.append(self._graft(placed[node.parent + 1], node, drafter)[0])

    def commit(self, token_ids: Iterable[int]) -> None:
        """Advance the committed tip; nodes that the tokens did not take are dropped."""
        for token_id in token_ids:
            root = self._root.children.pop(token_id, None)
            self._forget(self._root)
            self._append((token_id,))
            self._root = root or self._new_root()
            self._nodes[self._root.anchor] = self._root

    def best_chain(self, max_len: int) -> tuple[int, ...]:
        """Token ids of :meth:`best_path`."""
        return tuple(node.token_id for node in self.best_path(max_len))

    def best_path(self, max_len: int, chance: Chance = its_word) -> tuple[ChainNode, ...]:
        """The chain of at most `max_len` nodes of which most are expected to be accepted: the sum
        of their survivals is the highest. Of equal ones, the one that came first."""
        expected: dict[Anchor, float] = {}
        path: list[ChainNode] = []
        node, survival = self._root, 1.0
        while node.children and len(path) < max_len:
            children = _chances(node, chance)
            if len(children) > 1 and not expected:  # Most tries are one chain.
                expected = self._expected_lens(max_len, chance)
            node, likely = max(children, key=lambda child: expected.get(child[0].anchor, 0.0))
            survival *= likely
            path.append(ChainNode(node.token_id, node.confidence, survival, node.drafter, node.law))
        return tuple(path)

    def _expected_lens(self, max_len: int, chance: Chance) -> dict[Anchor, float]:
        """Per node: how many tokens of the best chain that starts with it will be accepted, if its
        parent was. Nodes deeper than `max_len` are left out."""
        deepest = self._root.anchor[0] + max_len
        parents = [n for n in self._root.descendants() if n.anchor[0] < deepest]
        expected: dict[Anchor, float] = {}
        for parent in [*reversed(parents), self._root]:
            for child, likely in _chances(parent, chance):
                below = (expected.get(node.anchor, 0.0) for node in child.children.values())
                expected[child.anchor] = likely * (1.0 + max(below, default=0.0))
        return expected

    def _is_well_formed(self, draft: Draft) -> bool:
        has_room = len(self) + len(draft.nodes) <= self._max_nodes
        speaks_of_past = draft.answers is None or 0 <= draft.answers <= self.num_committed
        return has_room and speaks_of_past and all(map(self._fits, draft.nodes, count()))

    def _fits(self, node: DraftNode, index: int) -> bool:
        return (
            -1 <= node.parent < index
            and 0 <= node.token_id < self._vocab_size
            and 0.0 <= node.confidence <= 1.0  # false for NaN
        )

    def _is_committed(self, anchor: Anchor) -> bool:
        position, prefix_hash = anchor
        return 0 <= position < len(self._hashes) and self._hashes[position] == prefix_hash

    def _insert_at(self, anchor: _Node, nodes: tuple[DraftNode, ...], drafter: str) -> DraftOutcome:
        news = False
        placed = [anchor]
        for node in nodes:
            child, is_new = self._graft(placed[node.parent + 1], node, drafter)
            placed.append(child)
            news |= is_new
        return DraftOutcome.USED if news else DraftOutcome.DUPLICATE

    def _insert_behind(
        self, anchor: Anchor, nodes: tuple[DraftNode, ...], drafter: str
    ) -> DraftOutcome:
        """Insert a draft that hangs on an earlier position: walk it along the committed tokens,
        graft what goes beyond them, and remember what goes another way."""
        placed: list[_Node | Anchor] = [anchor]
        any_new, any_off_path = False, not self._is_committed(anchor)
        for node in nodes:
            parent = placed[node.parent + 1]
            if isinstance(parent, _Node):
                child, is_new = self._graft(parent, node, drafter)
                placed.append(child)
                any_new |= is_new
                continue
            walked = _child_anchor(parent, node.token_id)
            placed.append(self._root if walked == self._root.anchor else walked)
            if not self._is_committed(walked):
                any_off_path = True
                self._remember_dropped(walked)
        if any_new:
            return DraftOutcome.USED
        return DraftOutcome.OFF_PATH if any_off_path else DraftOutcome.DUPLICATE

    def _graft(self, parent: _Node, node: DraftNode, drafter: str) -> tuple[_Node, bool]:
        """The child for `node`, and whether it is new. The latest word of the drafter that proposed
        it stands; another one takes it over if it is surer.

        A child is found by its anchor: two paths with one hash, which only malice would make, then
        share a node, and that costs speed alone.
        """
        anchor = _child_anchor(parent.anchor, node.token_id)
        child = self._nodes.get(anchor)
        if child is not None:
            if drafter == child.drafter or node.confidence > child.confidence:
                child.confidence, child.drafter = node.confidence, drafter
            return child, False
        child = _Node(anchor, node.token_id, node.confidence, drafter, node.law)
        parent.children[node.token_id] = child
        self._nodes[anchor] = child
        return child, True

    def _forget(self, node: _Node) -> None:
        """Take a node and all that is still below it out of the index."""
        del self._nodes[node.anchor]
        for below in node.descendants():
            del self._nodes[below.anchor]
            self._remember_dropped(below.anchor)

    def _remember_dropped(self, anchor: Anchor) -> None:
        self._dropped[anchor] = None
        if len(self._dropped) > MAX_REMEMBERED_ANCHORS:
            del self._dropped[next(iter(self._dropped))]

    def _append(self, token_ids: Iterable[int]) -> None:
        prefix_hash = self._hashes[-1]
        for token_id in token_ids:
            prefix_hash = extend_prefix_hash(prefix_hash, token_id)
            self._hashes.append(prefix_hash)

    def _new_root(self) -> _Node:
        return _Node((len(self._hashes) - 1, self._hashes[-1]), 0, 1.0)


def _chances(parent: _Node, chance: Chance) -> list[tuple[_Node, float]]:
    """The children, and the chance of each that it is accepted if the parent was. Of what one
    drafter proposes for one place only the first counts, unless that was taken back: the others
    are for when it was wrong."""
    spoken: set[str] = set()
    chances = []
    for child in parent.children.values():
        counts = child.confidence > 0.0 and child.drafter not in spoken
        chances.append((child, chance(child.drafter, child.confidence) if counts else 0.0))
        if counts:
            spoken.add(child.drafter)
    return chances


def _child_anchor(parent: Anchor, token_id: int) -> Anchor:
    position, prefix_hash = parent
    return position + 1, extend_prefix_hash(prefix_hash, token_id)
