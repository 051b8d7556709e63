"""The drafts of one sequence: a trie below its committed tokens.

A draft is valid by its content, not by its timing. It names the prefix it hangs on by position and
hash; what agrees with the committed tokens is walked, what contradicts them is dropped. So drafts
may come late, twice, in parts or in any order, and still nothing in the trie contradicts what is
committed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

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
    """It brought nodes, or the first word that there is nothing to propose."""
    DUPLICATE = "duplicate"
    """It fits and says nothing new."""
    OFF_PATH = "off_path"
    """The committed tokens went another way."""
    UNKNOWN_ANCHOR = "unknown_anchor"
    """Its prefix is none of ours; the drafter's session must be opened again."""
    MALFORMED = "malformed"
    """It is no trie over this vocabulary, or too large."""


@dataclass(frozen=True, slots=True)
class ChainNode:
    """One token of a chain below the committed tokens."""

    token_id: int
    confidence: float
    """The drafter's word on its chance to be accepted, if all before it in the chain are."""
    survival: float
    """Product of the confidences up to it."""


@dataclass(slots=True, eq=False)
class _Node:
    anchor: Anchor
    """Of what hangs below it: its own token is the last one of that prefix."""
    token_id: int
    confidence: float
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
        self._answered = False
        self._append(committed_token_ids)
        self._root = self._new_root()
        self._nodes = {self._root.anchor: self._root}

    def __len__(self) -> int:
        """Nodes below the committed tokens."""
        return len(self._nodes) - 1

    @property
    def answered(self) -> bool:
        """A draft for the committed tip, or from beyond it, has come since the last commit: there
        is nothing more to wait for."""
        return self._answered

    def insert(self, draft: Draft) -> DraftOutcome:
        """Take what fits of a draft."""
        if not self._is_well_formed(draft):
            return DraftOutcome.MALFORMED
        anchor = (draft.anchor_position, draft.anchor_hash)
        if anchor in self._nodes:
            return self._insert_at(self._nodes[anchor], draft.nodes)
        if anchor in self._dropped or self._is_committed(anchor):
            return self._insert_behind(anchor, draft.nodes)
        return DraftOutcome.UNKNOWN_ANCHOR

    def commit(self, token_ids: Iterable[int]) -> None:
        """Advance the committed tip; nodes that the tokens did not take are dropped."""
        for token_id in token_ids:
            self._answered = False
            root = self._root.children.pop(token_id, None)
            self._forget(self._root)
            self._append((token_id,))
            self._root = root or self._new_root()
            self._nodes[self._root.anchor] = self._root

    def best_chain(self, max_len: int) -> tuple[int, ...]:
        """Token ids of :meth:`best_path`."""
        return tuple(node.token_id for node in self.best_path(max_len))

    def best_path(self, max_len: int) -> tuple[ChainNode, ...]:
        """The chain of at most `max_len` nodes of which most are expected to be accepted: the sum
        of their survivals is the highest. Of equal ones, the one that came first."""
        expected = self._expected_lens(max_len)
        path: list[ChainNode] = []
        node, survival = self._root, 1.0
        while node.children and len(path) < max_len:
            node = max(node.children.values(), key=lambda child: expected[child.anchor])
            survival *= node.confidence
            path.append(ChainNode(node.token_id, node.confidence, survival))
        return tuple(path)

    def _expected_lens(self, max_len: int) -> dict[Anchor, float]:
        """Per node: how many tokens of the best chain that starts with it will be accepted, if its
        parent was. Nodes deeper than `max_len` are left out."""
        deepest = self._root.anchor[0] + max_len
        reachable = [n for n in self._root.descendants() if n.anchor[0] <= deepest]
        expected: dict[Anchor, float] = {}
        for node in reversed(reachable):
            below = (expected.get(child.anchor, 0.0) for child in node.children.values())
            expected[node.anchor] = node.confidence * (1.0 + max(below, default=0.0))
        return expected

    def _is_well_formed(self, draft: Draft) -> bool:
        return len(self) + len(draft.nodes) <= self._max_nodes and all(
            -1 <= node.parent < index
            and 0 <= node.token_id < self._vocab_size
            and 0.0 <= node.confidence <= 1.0  # false for NaN
            for index, node in enumerate(draft.nodes)
        )

    def _is_committed(self, anchor: Anchor) -> bool:
        position, prefix_hash = anchor
        return 0 <= position < len(self._hashes) and self._hashes[position] == prefix_hash

    def _insert_at(self, anchor: _Node, nodes: tuple[DraftNode, ...]) -> DraftOutcome:
        news = not self._answered
        self._answered = True
        placed = [anchor]
        for node in nodes:
            child, is_new = self._graft(placed[node.parent + 1], node)
            placed.append(child)
            news |= is_new
        return DraftOutcome.USED if news else DraftOutcome.DUPLICATE

    def _insert_behind(self, anchor: Anchor, nodes: tuple[DraftNode, ...]) -> DraftOutcome:
        """Insert a draft that hangs on an earlier position: walk it along the committed tokens,
        graft what goes beyond them, and remember what goes another way."""
        placed: list[_Node | Anchor] = [anchor]
        any_new, any_off_path = False, not self._is_committed(anchor)
        for node in nodes:
            parent = placed[node.parent + 1]
            if isinstance(parent, _Node):
                child, is_new = self._graft(parent, node)
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

    def _graft(self, parent: _Node, node: DraftNode) -> tuple[_Node, bool]:
        """The child for `node`, and whether it is new. The latest confidence stands.

        A child is found by its anchor: two paths with one hash, which only malice would make, then
        share a node, and that costs speed alone.
        """
        anchor = _child_anchor(parent.anchor, node.token_id)
        child = self._nodes.get(anchor)
        if child is not None:
            child.confidence = node.confidence
            return child, False
        child = _Node(anchor, node.token_id, node.confidence)
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


def _child_anchor(parent: Anchor, token_id: int) -> Anchor:
    position, prefix_hash = parent
    return position + 1, extend_prefix_hash(prefix_hash, token_id)
