"""Laws of the draft trie, against a model that keeps whole token paths in a set."""

from __future__ import annotations

import math

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

import verifier_service.draft_trie as draft_trie
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import Draft, DraftNode
from verifier_service.draft_trie import DraftOutcome, DraftTrie

VOCAB_SIZE = 10
PROMPT = (1, 2, 3)

Tokens = tuple[int, ...]


def draft_at(
    prefix: Tokens,
    *nodes: tuple[int, int] | tuple[int, int, float],
    answers: int | None = None,
) -> Draft:
    """A draft of (token_id, parent[, confidence]) nodes below `prefix`."""
    made = tuple(DraftNode(*node) for node in nodes)
    return Draft(len(prefix), prefix_hash(prefix), made, answers)


def chain_at(prefix: Tokens, *token_ids: int, confidence: float = 0.9) -> Draft:
    return draft_at(prefix, *((t, i - 1, confidence) for i, t in enumerate(token_ids)))


class PathModel:
    """The trie as a set of full paths from the first prompt token on."""

    def __init__(self, committed: Tokens) -> None:
        self.committed = committed
        self.confidence: dict[Tokens, float] = {}
        self.dropped: set[Tokens] = set()
        self.answered = False

    def insert(
        self, prefix: Tokens, nodes: tuple[DraftNode, ...], answers: int | None
    ) -> DraftOutcome:
        if answers is not None and answers > len(self.committed):
            return DraftOutcome.MALFORMED
        on_path = self._is_on_path(prefix)
        if not on_path and prefix not in self.dropped:
            return DraftOutcome.UNKNOWN_ANCHOR
        news = answers == len(self.committed) and not self.answered
        self.answered |= news
        off_path = not on_path
        paths = [prefix]
        for node in nodes:
            path = (*paths[node.parent + 1], node.token_id)
            paths.append(path)
            if path[: len(self.committed)] == self.committed and path != self.committed:
                news |= path not in self.confidence
                self.confidence[path] = node.confidence
            elif path != self.committed[: len(path)]:
                off_path = True
                self.dropped.add(path)
        if news:
            return DraftOutcome.USED
        return DraftOutcome.OFF_PATH if off_path else DraftOutcome.DUPLICATE

    def commit(self, token_ids: Tokens) -> None:
        for token_id in token_ids:
            self.committed += (token_id,)
            self.answered = False
            kept = {
                path: confidence
                for path, confidence in self.confidence.items()
                if path[: len(self.committed)] == self.committed
            }
            self.dropped |= self.confidence.keys() - kept.keys()
            kept.pop(self.committed, None)
            self.dropped.discard(self.committed)
            self.confidence = kept

    def chance(self, path: Tokens) -> float:
        """Of the tokens proposed for one place only the first counts that is not taken back."""
        for other, confidence in self.confidence.items():
            if other[:-1] == path[:-1] and confidence > 0:
                return confidence if other == path else 0.0
        return 0.0

    def expected_len(self, chain: Tokens) -> float:
        survival, total = 1.0, 0.0
        for end in range(1, len(chain) + 1):
            survival *= self.chance(self.committed + chain[:end])
            total += survival
        return total

    def best_expected_len(self, max_len: int) -> float:
        tip = len(self.committed)
        chains = (path[tip:] for path in self.confidence if len(path) - tip <= max_len)
        return max((self.expected_len(chain) for chain in chains), default=0.0)

    def _is_on_path(self, prefix: Tokens) -> bool:
        return prefix == self.committed[: len(prefix)] or prefix in self.confidence


tokens = st.integers(0, 2)
confidences = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
node_lists = st.lists(st.tuples(tokens, st.integers(0, 5), confidences), max_size=5)


class TrieMachine(RuleBasedStateMachine):
    """Drafts that are made, lost, late, twice and out of order, between commits of any kind."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PathModel(PROMPT)
        self.trie = DraftTrie(PROMPT, VOCAB_SIZE)
        self.made: list[tuple[Tokens, tuple[DraftNode, ...], int | None]] = []

    @rule(
        back=st.integers(0, 6),
        ahead=st.lists(tokens, max_size=3),
        nodes=node_lists,
        answers=st.none() | st.integers(-6, 1),
    )
    def make(
        self,
        back: int,
        ahead: list[int],
        nodes: list[tuple[int, int, float]],
        answers: int | None,
    ) -> None:
        """A draft from some tokens ago, on some guess of what follows, is on its way."""
        end = max(0, len(self.model.committed) - back)
        made = tuple(
            DraftNode(token_id, min(parent, i) - 1, confidence)
            for i, (token_id, parent, confidence) in enumerate(nodes)
        )
        if answers is not None:
            answers = max(0, len(self.model.committed) + answers)
        self.made.append(((*self.model.committed[:end], *ahead), made, answers))

    @precondition(lambda self: self.made)
    @rule(data=st.data())
    def arrive(self, data: st.DataObject) -> None:
        """Any draft ever made comes, for the first time or again."""
        prefix, nodes, answers = data.draw(st.sampled_from(self.made))
        expected = self.model.insert(prefix, nodes, answers)
        draft = Draft(len(prefix), prefix_hash(prefix), nodes, answers)
        assert self.trie.insert(draft) is expected

    @rule(token_ids=st.lists(tokens, min_size=1, max_size=3))
    def commit_anything(self, token_ids: list[int]) -> None:
        self.model.commit(tuple(token_ids))
        self.trie.commit(token_ids)

    @rule(max_len=st.integers(1, 4), correction=tokens)
    def commit_what_was_drafted(self, max_len: int, correction: int) -> None:
        accepted = (*self.trie.best_chain(max_len), correction)
        self.model.commit(accepted)
        self.trie.commit(accepted)

    @invariant()
    def holds_the_same_paths(self) -> None:
        assert len(self.trie) == len(self.model.confidence)
        assert self.trie.answered == self.model.answered
        tip = len(self.model.committed)
        longest = max((len(path) - tip for path in self.model.confidence), default=0)
        assert self.trie.holds_chain(longest)
        assert not self.trie.holds_chain(longest + 1)

    @invariant()
    def best_chain_is_a_best_one_of_the_model(self) -> None:
        for max_len in range(5):
            path = self.trie.best_path(max_len)
            chain = self.trie.best_chain(max_len)
            assert chain == tuple(node.token_id for node in path)
            assert len(chain) <= max_len
            assert not chain or self.model.committed + chain in self.model.confidence
            best = self.model.best_expected_len(max_len)
            assert self.model.expected_len(chain) == pytest.approx(best)
            assert sum(node.survival for node in path) == pytest.approx(best)


TestTrieMachine = TrieMachine.TestCase
TestTrieMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.parametrize(
    "nodes",
    [
        [(1, 0)],
        [(1, -2)],
        [(1, -1), (2, 1)],
        [(1, -1), (2, 7)],
        [(VOCAB_SIZE, -1)],
        [(-1, -1)],
        [(2**31 - 1, -1)],
        [(1, -1, math.nan)],
        [(1, -1, math.inf)],
        [(1, -1, -0.1)],
        [(1, -1, 1.1)],
        [(1, -1), (2, 0), (3, 5)],
    ],
)
def test_a_malformed_draft_leaves_no_trace(nodes):
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    trie.insert(chain_at(PROMPT, 4, 5))
    trie.commit((4,))
    assert trie.insert(draft_at((*PROMPT, 4), *nodes)) is DraftOutcome.MALFORMED
    assert trie.best_chain(8) == (5,)
    assert not trie.answered


def test_a_trie_does_not_grow_beyond_its_bound():
    trie = DraftTrie(PROMPT, VOCAB_SIZE, max_nodes=4)
    assert trie.insert(draft_at(PROMPT, *((t, -1) for t in range(5)))) is DraftOutcome.MALFORMED
    assert trie.insert(chain_at(PROMPT, 1, 2, 3)) is DraftOutcome.USED
    assert trie.insert(chain_at(PROMPT, 4, 5)) is DraftOutcome.MALFORMED
    assert len(trie) == 3


def test_what_was_dropped_is_remembered_within_bounds(monkeypatch):
    """A draft on a branch that lost is off the path, not a reason to open the session again."""
    monkeypatch.setattr(draft_trie, "MAX_REMEMBERED_ANCHORS", 20)
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    committed = PROMPT
    for i in range(100):
        trie.insert(chain_at(committed, 7, 8))
        trie.commit((i % 5,))
        lost, committed = (*committed, 7), (*committed, i % 5)
        assert trie.insert(chain_at(lost, 1)) is DraftOutcome.OFF_PATH
    assert trie.insert(chain_at((*PROMPT, 7), 1)) is DraftOutcome.UNKNOWN_ANCHOR
    assert len(trie) == 0


def test_an_anchor_that_is_not_ours_is_unknown():
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    for wrong in (Draft(3, 0xBAD), Draft(2**32 - 1, 0xBAD), Draft(0, 0xBAD), Draft(-1, 0xBAD)):
        assert trie.insert(wrong) is DraftOutcome.UNKNOWN_ANCHOR
    assert not trie.answered


def test_an_empty_draft_answers():
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    assert trie.insert(draft_at(PROMPT)) is DraftOutcome.DUPLICATE
    assert not trie.answered, "it did not say that this is all"
    assert trie.insert(draft_at(PROMPT, answers=3)) is DraftOutcome.USED
    assert trie.answered
    assert trie.insert(draft_at(PROMPT, answers=3)) is DraftOutcome.DUPLICATE
    trie.commit((4,))
    assert not trie.answered
    assert trie.insert(draft_at(PROMPT, answers=3)) is DraftOutcome.DUPLICATE
    assert not trie.answered


def test_what_was_drafted_ahead_stays_and_does_not_answer():
    """A chain that came in pieces; a commit of a part of it; a piece more."""
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    trie.insert(chain_at(PROMPT, 4, 5))
    assert trie.insert(chain_at((*PROMPT, 4, 5), 6, 7)) is DraftOutcome.USED
    trie.commit((4, 5, 6))
    assert trie.best_chain(8) == (7,)
    assert trie.insert(chain_at((*PROMPT, 4, 5, 6, 7), 8)) is DraftOutcome.USED
    assert trie.best_chain(8) == (7, 8)
    assert not trie.answered


def test_an_answer_to_what_was_not_said_is_malformed():
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    assert trie.insert(draft_at(PROMPT, (4, -1), answers=4)) is DraftOutcome.MALFORMED
    assert len(trie) == 0
    trie.commit((4,))
    assert not trie.answered


def test_a_foreseen_correction_goes_on_at_once():
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    trie.insert(draft_at(PROMPT, (4, -1, 0.8), (5, 0, 0.8), (6, -1, 0.2), (7, 2, 0.9)))
    assert trie.best_chain(4) == (4, 5)
    trie.commit((6,))
    assert trie.best_chain(4) == (7,)


def test_the_best_chain_is_the_one_of_which_most_is_expected():
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    trie.insert(draft_at(PROMPT, (4, -1, 0.5)), "one")
    trie.insert(draft_at(PROMPT, (5, -1, 0.5), (6, 0, 1.0), (7, 1, 1.0)), "two")
    assert trie.best_chain(1) == (4,)
    assert trie.best_chain(3) == (5, 6, 7)
    assert [node.survival for node in trie.best_path(3)] == [0.5, 0.5, 0.5]
    assert trie.best_chain(0) == ()


def test_a_prepared_correction_never_stands_for_the_chain():
    """However long it is, and however sure: a drafter's first token for a place is its choice,
    until it takes that back."""
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    trie.insert(draft_at(PROMPT, (4, -1, 0.1), (5, -1, 0.8), (6, 1, 1.0), (7, 2, 1.0)))
    assert trie.best_chain(3) == (4,)
    trie.insert(draft_at(PROMPT, (4, -1, 0.0)))
    assert trie.best_chain(3) == (5, 6, 7)
    trie.commit((5,))
    assert trie.best_chain(3) == (6, 7)


def test_two_drafters_may_both_be_sure_of_another_token():
    trie = DraftTrie(PROMPT, VOCAB_SIZE)
    trie.insert(draft_at(PROMPT, (4, -1, 0.9)), "one")
    trie.insert(draft_at(PROMPT, (5, -1, 0.9), (6, 0, 0.9)), "two")
    assert trie.best_chain(3) == (5, 6)
