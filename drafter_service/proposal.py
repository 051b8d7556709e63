"""What a drafter proposes for one session: a trie below the committed tokens, and how much of it
the verifier was told.

Nothing is queued: what is to be told is the difference, taken when the stream can write. So a
verifier that reads slowly costs no memory, and what a commit has contradicted is never sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cluster.draft_law import DraftLaw
from cluster.protocol.prefix_hash import extend_prefix_hash
from cluster.types import Draft, DraftNode


@dataclass(slots=True, eq=False)
class _Node:
    confidence: float = 1.0
    law: DraftLaw | None = None
    told: bool = False
    children: dict[int, _Node] = field(default_factory=dict)
    """By token id."""


@dataclass(frozen=True, slots=True)
class Growth:
    """What a draft added to what was proposed before."""

    num_nodes: int = 0
    num_branches: int = 0
    """How many of the nodes begin a branch."""


class Proposal:
    """A node is told once, and once more when it is taken back."""

    def __init__(self) -> None:
        self._root = _Node(told=True)
        self._chain: list[int] = []
        """What the drafter holds to be next."""

    @property
    def chain_len(self) -> int:
        """Tokens of the chain that branches hang on."""
        return len(self._chain)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Only what goes on from these tokens stands. What was a branch may be the chain now."""
        for token_id in token_ids:
            self._root = self._root.children.get(token_id) or _Node()
        self._root.told = True
        foreseen = self._chain[: len(token_ids)] == list(token_ids)
        self._chain = self._chain[len(token_ids) :] if foreseen else _first_path(self._root)

    def add(self, nodes: Sequence[DraftNode]) -> Growth:
        """Take a draft from the committed tokens. Where its chain leaves the one before, that is
        taken back: a verifier would go on to hold it for the drafter's choice."""
        placed = [self._root]
        num_nodes = num_branches = 0
        for node in nodes:
            siblings = placed[node.parent + 1].children
            if node.token_id not in siblings:
                num_nodes += 1
                num_branches += bool(siblings)
            placed.append(siblings.setdefault(node.token_id, _Node(node.confidence, node.law)))
        chain = [node.token_id for node in nodes[: chain_len(nodes)]]
        self._take_back(chain)
        self._chain = chain
        return Growth(num_nodes, num_branches)

    def _take_back(self, chain: Sequence[int]) -> None:
        node = self._root
        for ours, theirs in zip(self._chain, chain, strict=False):
            if ours != theirs:
                node.children[ours].confidence, node.children[ours].told = 0.0, False
                return
            node = node.children[ours]

    def take_untold(self, position: int, prefix_hash: int) -> Draft:
        """The new nodes, which count as told from now on. The draft hangs on the deepest known node
        that is above all of them.

        `position` and `prefix_hash` are of the committed tokens.
        """
        node = self._root
        while len(news := _with_news(node)) == 1 and news[0][1].told:
            [(token_id, node)] = news
            position, prefix_hash = position + 1, extend_prefix_hash(prefix_hash, token_id)
        nodes: list[DraftNode] = []
        _collect(node, -1, nodes)
        return Draft(position, prefix_hash, tuple(nodes))

    @property
    def has_untold(self) -> bool:
        return _has_news(self._root)


def _first_path(node: _Node) -> list[int]:
    path: list[int] = []
    while node.children:
        token_id, node = next(iter(node.children.items()))
        path.append(token_id)
    return path


def _has_news(node: _Node) -> bool:
    return not node.told or any(map(_has_news, node.children.values()))


def _with_news(node: _Node) -> list[tuple[int, _Node]]:
    """The children that were not told, or not all that is below them."""
    return [(token_id, child) for token_id, child in node.children.items() if _has_news(child)]


def _collect(node: _Node, index: int, nodes: list[DraftNode]) -> None:
    """Append the children with news, and what is new below them, as told."""
    for token_id, child in _with_news(node):
        child.told = True
        nodes.append(DraftNode(token_id, index, child.confidence, child.law))
        _collect(child, len(nodes) - 1, nodes)


def chain_len(nodes: Sequence[DraftNode]) -> int:
    """Tokens of a draft's chain, which comes before its branches."""
    length = 0
    while length < len(nodes) and nodes[length].parent == length - 1:
        length += 1
    return length


def nodes_behind(nodes: Sequence[DraftNode], token_ids: Iterable[int]) -> tuple[DraftNode, ...]:
    """What of a draft goes on from these tokens, as a draft from there."""
    root = -1
    for token_id in token_ids:
        following = (i for i, n in enumerate(nodes) if (n.parent, n.token_id) == (root, token_id))
        if (found := next(following, None)) is None:
            return ()
        root = found
    kept = {root: -1}
    behind: list[DraftNode] = []
    for index, node in enumerate(nodes):
        if node.parent in kept:
            kept[index] = len(behind)
            behind.append(node._replace(parent=kept[node.parent]))
    return tuple(behind)
