"""The ratio tests, by exact enumeration: what is emitted has the target's law, whatever the
drafter's, and blocks accept at least as many as single tokens do."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from cluster.draft_law import LAW_TOTAL, MAX_LAW_LEN, DraftLaw, could_have_drawn
from engine.target import TargetProbs
from verifier_service.ratio_rules import (
    JudgedDraft,
    Odds,
    block_odds,
    draw_correction,
    num_accepted_by_block,
    num_accepted_by_token,
    token_odds,
)

VOCAB_SIZE = 3
DEPTH = 3
NUM_SEEDS = 20
TOLERANCE = 1e-12


def random_target(rng: random.Random, num_kept: int | None = None) -> TargetProbs:
    """Any distribution; sometimes truncated, to one token at the least."""
    num_kept = num_kept or rng.choice([1, 2, 3, 3, 3])
    token_ids = sorted(rng.sample(range(VOCAB_SIZE), num_kept))
    weights = np.array([rng.random() ** 2 + 1e-3 for _ in token_ids])
    return TargetProbs(np.array(token_ids), weights, float(weights.sum()))


def random_law(rng: random.Random, num_kept: int | None = None) -> DraftLaw:
    token_ids = rng.sample(range(VOCAB_SIZE), num_kept or rng.choice([1, 2, 3, 3]))
    cuts = sorted(rng.sample(range(1, LAW_TOTAL), len(token_ids) - 1))
    edges = [0, *cuts, LAW_TOTAL]
    return DraftLaw(tuple(token_ids), tuple(b - a for a, b in itertools.pairwise(edges)))


def prob_of(target: TargetProbs, token_id: int) -> float:
    return float(target.probs(np.array([token_id]))[0])


def by_prefix(make, seed):
    """One value for each prefix shorter than the depth and the bonus."""
    rng = random.Random(seed)
    prefixes = (p for n in range(DEPTH + 1) for p in itertools.product(range(VOCAB_SIZE), repeat=n))
    return {prefix: make(rng) for prefix in prefixes}


def chance_of(odds: Odds, rule: str, num_accepted: int) -> float:
    """That just so many are accepted."""
    chances = odds.chances
    if rule == "rejection":
        refused = 1.0 - chances[num_accepted] if num_accepted < len(chances) else 1.0
        return math.prod(chances[:num_accepted]) * refused
    taken = chances[num_accepted - 1] if num_accepted else 1.0
    return taken * math.prod([1.0 - chance for chance in chances[num_accepted:]])


WIDE_TARGETS = by_prefix(lambda rng: random_target(rng, VOCAB_SIZE), 1)
WIDE_LAWS = by_prefix(lambda rng: random_law(rng, VOCAB_SIZE), 2)
"""Of full support, where a wrong rule has room to be wrong."""
ODDS = {"rejection": token_odds, "block": block_odds}


def emitted_law(rule, targets, laws, depth_of, told=lambda law: law):
    """The law of the first DEPTH + 1 tokens and the mean number of accepted drafts, for one step
    and plain decoding behind it. `depth_of`: how many drafts of a chain are submitted; `told`: what
    the drafter says of the law that it draws from."""
    law = dict.fromkeys(itertools.product(range(VOCAB_SIZE), repeat=DEPTH + 1), 0.0)
    mean = 0.0

    def emit(tokens, prob):
        """With all that the target goes on with."""
        if len(tokens) == DEPTH + 1:
            law[tokens] += prob
            return
        for token_id in range(VOCAB_SIZE):
            if chance := prob_of(targets[tokens], token_id):
                emit((*tokens, token_id), prob * chance)

    for chain in itertools.product(range(VOCAB_SIZE), repeat=DEPTH):
        drawn = math.prod([laws[chain[:i]].prob(chain[i]) for i in range(DEPTH)])
        if not drawn:
            continue
        drafts = [
            JudgedDraft(chain[i], told(laws[chain[:i]]), targets[chain[:i]])
            for i in range(depth_of(chain))
        ]
        if not drafts:
            emit((), drawn)
            continue
        odds = ODDS[rule](drafts)
        for num_accepted in range(len(drafts) + 1):
            prob = drawn * chance_of(odds, rule, num_accepted)
            mean += prob * num_accepted
            if num_accepted == len(drafts):
                emit(chain[:num_accepted], prob)
                continue
            if prob < 1e-15:
                continue
            refused = drafts[num_accepted]
            weights = refused.residual(odds.shares[num_accepted])
            assert weights.sum() > 0
            for token_id, weight in zip(refused.target.token_ids, weights, strict=True):
                correction = (*chain[:num_accepted], int(token_id))
                emit(correction, prob * float(weight / weights.sum()))
    return law, mean


def target_law(targets):
    law = {}
    for tokens in itertools.product(range(VOCAB_SIZE), repeat=DEPTH + 1):
        chances = [prob_of(targets[tokens[:i]], tokens[i]) for i in range(DEPTH + 1)]
        law[tokens] = math.prod(chances)
    return law


def is_law(law, expected):
    return max(abs(law[tokens] - expected[tokens]) for tokens in expected) < TOLERANCE


@pytest.mark.parametrize("rule", ODDS)
def test_what_is_emitted_has_the_targets_law(rule):
    """At every depth, with distributions that are cut on either side."""
    for seed in range(NUM_SEEDS):
        targets, laws = by_prefix(random_target, seed), by_prefix(random_law, -seed - 1)
        depth = seed % (DEPTH + 1)
        law, _ = emitted_law(rule, targets, laws, lambda chain, depth=depth: depth)
        assert is_law(law, target_law(targets)), seed


@pytest.mark.parametrize("rule", ODDS)
def test_a_depth_may_hang_on_the_tokens_before_it(rule):
    """Whether draft i is submitted is decided by the drafts before it: causal, hence lossless."""
    depths = {0: 1, 1: 2, 2: DEPTH}
    law, mean = emitted_law(rule, WIDE_TARGETS, WIDE_LAWS, lambda chain: depths[chain[0]])
    assert mean > 0
    assert is_law(law, target_law(WIDE_TARGETS))


@pytest.mark.parametrize("rule", ODDS)
@pytest.mark.parametrize("position", [0, 1])
def test_a_depth_that_looks_at_its_own_token_is_caught(rule, position):
    """The control: dropping a draft for what it is, as a confidence of the drawn token would."""
    law, _ = emitted_law(
        rule, WIDE_TARGETS, WIDE_LAWS, lambda chain: position if chain[position] == 0 else DEPTH
    )
    assert not is_law(law, target_law(WIDE_TARGETS))


@pytest.mark.parametrize("rule", ODDS)
def test_a_law_that_was_rounded_after_the_draw_is_caught(rule):
    """The control: the ratio is of another law than the draft was drawn from."""
    law, _ = emitted_law(rule, WIDE_TARGETS, WIDE_LAWS, lambda chain: DEPTH, told=coarse)
    assert not is_law(law, target_law(WIDE_TARGETS))


def coarse(law: DraftLaw) -> DraftLaw:
    """In steps of a quarter."""
    step = LAW_TOTAL // 4
    weights = [max(step, weight // step * step) for weight in law.weights]
    largest = weights.index(max(weights))
    weights[largest] += LAW_TOTAL - sum(weights)
    return DraftLaw(law.token_ids, tuple(weights))


def test_blocks_accept_at_least_as_many_as_single_tokens():
    gains = []
    for seed in range(NUM_SEEDS):
        targets, laws = by_prefix(random_target, seed), by_prefix(random_law, -seed - 1)
        _, by_token = emitted_law("rejection", targets, laws, lambda chain: DEPTH)
        _, by_block = emitted_law("block", targets, laws, lambda chain: DEPTH)
        assert by_block >= by_token - TOLERANCE
        gains.append(by_block - by_token)
    assert max(gains) > 0.1


@pytest.mark.parametrize("rule", ODDS)
def test_a_draft_that_the_target_forbids_is_refused(rule):
    """Fast paths that accept a drafter of the family unseen, or the first draft of a block, are
    known faults; here a draft without a chance has none."""
    rng = random.Random(0)
    target = TargetProbs(np.array([0, 2]), np.array([1.0, 1.0]), 2.0)
    chain = [
        JudgedDraft(1, DraftLaw((1,), (LAW_TOTAL,)), target),
        JudgedDraft(0, DraftLaw((0,), (LAW_TOTAL,)), random_target(rng)),
    ]
    assert ODDS[rule](chain).chances[0] == 0.0
    accepted = {"rejection": num_accepted_by_token, "block": num_accepted_by_block}[rule]
    assert accepted(ODDS[rule](chain), [1e-9, 1e-9]) == 0


@pytest.mark.parametrize("rule", ODDS)
def test_one_law_accepts_everything(rule):
    law = DraftLaw((2, 0), (LAW_TOTAL // 4, LAW_TOTAL * 3 // 4))
    target = TargetProbs(np.array([0, 2]), np.array([3.0, 1.0]), 4.0)
    chances = ODDS[rule]([JudgedDraft(token_id, law, target) for token_id in (0, 2, 0)]).chances
    assert chances == (1.0, 1.0, 1.0)


def test_single_tokens_stop_at_the_first_refusal_and_blocks_at_the_last_acceptance():
    odds = Odds((0.5, 0.5, 0.5), (1.0, 1.0, 1.0))
    assert num_accepted_by_token(odds, [0.1, 0.9, 0.1]) == 1
    assert num_accepted_by_block(odds, [0.1, 0.9, 0.1]) == 3
    assert num_accepted_by_block(odds, [0.1, 0.9, 0.9]) == 1
    assert num_accepted_by_block(odds, [0.9, 0.9, 0.9]) == num_accepted_by_token(odds, [0.5] * 3)


def test_a_residual_that_rounding_took_is_drawn_from_the_target():
    law = DraftLaw((0, 1), (LAW_TOTAL // 2, LAW_TOTAL // 2))
    draft = JudgedDraft(0, law, TargetProbs(np.array([0, 1]), np.array([1.0, 1.0]), 2.0))
    assert not draft.residual(1.0).any()
    drawn = {draw_correction(draft, 1.0, key=7, position=position) for position in range(40)}
    assert drawn == {0, 1}


@pytest.mark.parametrize(
    ("law", "token_id"),
    [
        pytest.param(DraftLaw((1,), (LAW_TOTAL,)), 2, id="a token outside its law"),
        pytest.param(DraftLaw((1, 2), (LAW_TOTAL,)), 1, id="fewer weights than tokens"),
        pytest.param(DraftLaw((1, 2), (LAW_TOTAL, 1)), 1, id="too much mass"),
        pytest.param(DraftLaw((1, 2), (LAW_TOTAL - 2, 1)), 1, id="too little mass"),
        pytest.param(DraftLaw((1, 2), (LAW_TOTAL, 0)), 2, id="a weight of 0"),
        pytest.param(DraftLaw((1, 2), (LAW_TOTAL + 1, -1)), 1, id="a weight below 0"),
        pytest.param(DraftLaw((1, 1), (LAW_TOTAL - 1, 1)), 1, id="a token twice"),
        pytest.param(DraftLaw((1, 9), (LAW_TOTAL - 1, 1)), 1, id="a token of another vocabulary"),
        pytest.param(DraftLaw((), ()), 1, id="nothing"),
        pytest.param(
            DraftLaw(tuple(range(MAX_LAW_LEN + 1)), (LAW_TOTAL - MAX_LAW_LEN, *[1] * MAX_LAW_LEN)),
            1,
            id="too many tokens",
        ),
    ],
)
def test_a_law_that_cannot_be_is_none(law, token_id):
    assert not could_have_drawn(law, token_id, vocab_size=9)
    assert could_have_drawn(DraftLaw((1, 8), (LAW_TOTAL - 1, 1)), 8, vocab_size=9)
