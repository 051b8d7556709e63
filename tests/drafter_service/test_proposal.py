"""What is told of a proposal, however it grows and whatever is committed: everything once."""

from __future__ import annotations

import random

import pytest

from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import DraftNode
from drafter_service.proposal import Growth, Proposal, chain_len, nodes_behind
from verifier_service.draft_trie import DraftOutcome, DraftTrie

PROMPT = (1, 2, 3)


def nodes_of(*items):
    """(token id, parent) of each."""
    return tuple(DraftNode(token_id, parent, 0.5) for token_id, parent in items)


def chain(*token_ids):
    return nodes_of(*((token_id, i - 1) for i, token_id in enumerate(token_ids)))


def told(proposal, committed=PROMPT):
    draft = proposal.take_untold(len(committed), prefix_hash(committed))
    return draft.anchor_position, [(node.token_id, node.parent) for node in draft.nodes]


def test_only_what_is_new_is_told_below_the_deepest_node_above_it():
    proposal = Proposal()
    assert proposal.add(chain(4, 5)) == Growth(2)
    assert told(proposal) == (3, [(4, -1), (5, 0)])
    assert proposal.add(chain(4, 5, 6, 7)) == Growth(2)
    draft = proposal.take_untold(3, prefix_hash(PROMPT))
    assert (draft.anchor_position, draft.anchor_hash) == (5, prefix_hash((*PROMPT, 4, 5)))
    assert [node.token_id for node in draft.nodes] == [6, 7]
    assert not proposal.has_untold


def test_branches_at_two_places_are_told_with_the_chain_between_them():
    proposal = Proposal()
    proposal.add(chain(4, 5, 6))
    told(proposal)
    assert proposal.add((*chain(4, 5, 6), *nodes_of((8, 0), (9, 1), (10, 4)))) == Growth(3, 2)
    assert told(proposal) == (4, [(5, -1), (9, 0), (10, 1), (8, -1)])
    assert proposal.chain_len == 3


def test_a_commit_keeps_what_goes_on_from_it():
    proposal = Proposal()
    proposal.add((*chain(4, 5, 6), *nodes_of((8, 0), (9, 3))))
    told(proposal)
    proposal.commit((4,))
    assert proposal.chain_len == 2
    proposal.commit((8,))
    assert proposal.chain_len == 1
    proposal.add(chain(9, 10))
    assert told(proposal, (*PROMPT, 4, 8)) == (6, [(10, -1)])
    proposal.commit((7,))
    assert proposal.chain_len == 0
    assert not proposal.has_untold


def test_a_drafter_may_change_its_mind():
    """As an n-gram drafter does when it has seen more."""
    proposal = Proposal()
    proposal.add(chain(4, 5, 6, 7))
    told(proposal)
    proposal.add(chain(4, 8))
    assert proposal.chain_len == 2
    draft = proposal.take_untold(3, prefix_hash(PROMPT))
    assert draft.anchor_position == 4
    assert [(n.token_id, n.parent, n.confidence) for n in draft.nodes] == [
        (5, -1, 0.0),
        (8, -1, 0.5),
    ]
    proposal.add(())
    assert proposal.chain_len == 0


@pytest.mark.parametrize(
    ("behind", "expected"),
    [
        ((), [(4, -1), (5, 0), (8, 0), (9, 2), (6, 1)]),
        ((4,), [(5, -1), (8, -1), (9, 1), (6, 0)]),
        ((4, 8), [(9, -1)]),
        ((4, 8, 9), []),
        ((7,), []),
        ((4, 5, 6, 1), []),
    ],
)
def test_the_part_of_a_draft_behind_tokens_that_came_meanwhile(behind, expected):
    nodes = nodes_of((4, -1), (5, 0), (8, 0), (9, 2), (6, 1))
    found = [(node.token_id, node.parent) for node in nodes_behind(nodes, behind)]
    assert found == expected


def test_the_chain_of_a_draft_comes_first():
    assert chain_len(()) == 0
    assert chain_len(chain(4, 5)) == 2
    assert chain_len((*chain(4, 5), *nodes_of((8, -1), (9, 2)))) == 2


@pytest.mark.parametrize("seed", range(50))
def test_a_verifier_that_hears_all_of_it_knows_all_of_it(seed):
    """Chains and branches that grow, commits on them and beside them; drafts told now and then."""
    rng = random.Random(seed)
    committed = list(PROMPT)
    proposal, trie = Proposal(), DraftTrie(PROMPT, 20)
    proposed = set()
    for _ in range(60):
        match rng.choice(["add", "add", "tell", "commit"]):
            case "add":
                nodes, paths = [], [tuple(committed)]
                for index in range(rng.randint(0, 6)):
                    parent = rng.choice([index - 1, rng.randint(-1, index - 1)])
                    nodes.append(DraftNode(rng.randrange(3), parent, 0.5))
                    paths.append((*paths[parent + 1], nodes[-1].token_id))
                before = len(proposed)
                proposed |= set(paths[1:])
                assert proposal.add(nodes).num_nodes == len(proposed) - before
            case "tell":
                outcome = trie.insert(proposal.take_untold(len(committed), prefix_hash(committed)))
                assert outcome in (DraftOutcome.USED, DraftOutcome.DUPLICATE)
                assert len(trie) == len(proposed)
            case "commit":
                tokens = rng.choices(range(3), k=rng.randint(1, 3))
                if trie.best_chain(1) and rng.random() < 0.7:
                    tokens = [*trie.best_chain(rng.randint(1, 4)), rng.randrange(3)]
                proposal.commit(tokens)
                trie.commit(tokens)
                committed += tokens
                tip = len(committed)
                proposed = {p for p in proposed if len(p) > tip and p[:tip] == tuple(committed)}
