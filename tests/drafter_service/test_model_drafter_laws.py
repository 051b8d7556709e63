"""A session that wants laws: every draft was drawn from the law that comes with it, by noise of the
drafter's own, and nothing but the law is told of it."""

from __future__ import annotations

import torch

from cluster.draft_law import LAW_TOTAL, could_have_drawn
from cluster.protocol.prefix_hash import prefix_hash
from cluster.types import SamplingParams
from drafter_service.model_drafter import ModelDrafter
from engine.drafting.interface import DraftRequest, DraftSession
from engine.drafting.law import draft_key, draw_draft, law_of
from engine.sampling import SampleRow, sample
from tests.support.output_law import REJECT_BELOW, p_value
from tests.support.scripted_target import VOCAB_SIZE, ScriptedRunner, hashed_law

LAW = hashed_law(sharpness=6.0)
PROMPT = (1, 2, 3)
WARM = SamplingParams(temperature=0.8, top_p=0.95)


def drafter_of(num_blocks: int = 64, vocab_size: int | None = None) -> ModelDrafter:
    runner = ScriptedRunner(LAW, num_blocks=num_blocks)
    return ModelDrafter(runner, vocab_size=vocab_size, max_step_tokens=64)


def session(key: int, request_key: int, *, token_ids=PROMPT, wants_laws=True, sampling=WARM):
    return DraftSession(key, token_ids, len(PROMPT), request_key, sampling, wants_laws=wants_laws)


def drafted(drafter: ModelDrafter, key: int, num_tokens: int = 5, **fields: int):
    [nodes] = drafter.draft([DraftRequest(key, num_tokens, **fields)])
    return nodes


def expected_chain(token_ids, request_key, num_tokens):
    """Drawn one by one, without the drafter."""
    tokens = list(token_ids)
    for _ in range(num_tokens):
        law = law_of(torch.tensor(LAW(tuple(tokens))), WARM)
        tokens.append(draw_draft(law, draft_key(request_key), prefix_hash(tokens)))
    return tokens[len(token_ids) :]


def test_a_chain_is_drawn_from_its_laws():
    drafter = drafter_of()
    drafter.begin(session(1, 11))
    nodes = drafted(drafter, 1)
    assert [node.token_id for node in nodes] == expected_chain(PROMPT, 11, 5)
    assert all(could_have_drawn(node.law, node.token_id, VOCAB_SIZE) for node in nodes)


def test_drafts_are_a_function_of_the_committed_tokens():
    """However they came, in whatever batch, and behind whatever chain was refused."""
    drafter = drafter_of()
    for key in range(1, 6):
        drafter.begin(session(key, 11))
    drafter.draft([DraftRequest(key, 6) for key in range(1, 6)])
    committed = (*expected_chain(PROMPT, 11, 2), 7, 8)
    drafter.extend(1, committed[:3])
    drafted(drafter, 1)
    drafter.extend(1, committed[3:])
    again = drafter_of()
    again.begin(session(9, 11, token_ids=PROMPT + committed))
    assert drafted(drafter, 1) == drafted(again, 9)
    tokens = [node.token_id for node in drafted(again, 9)]
    assert tokens == expected_chain(PROMPT + committed, 11, 5)


def test_a_chain_that_was_foreseen_goes_on():
    drafter = drafter_of()
    drafter.begin(session(1, 11))
    first = [node.token_id for node in drafted(drafter, 1, 6)]
    drafter.extend(1, first[:2])
    assert [node.token_id for node in drafted(drafter, 1, 4)] == first[2:]


def test_tokens_over_many_requests_follow_the_law_that_is_told():
    drafter = drafter_of()
    tokens, laws = [], set()
    for key in range(400):
        drafter.begin(session(key, key * 7919 + 1))
        [node] = drafted(drafter, key, 1)
        tokens.append((node.token_id,))
        laws.add(node.law)
        drafter.end(key)
    [law] = laws
    told = {(i,): w / LAW_TOTAL for i, w in zip(*law, strict=True)}
    assert p_value(tokens, told) > REJECT_BELOW


def test_the_noise_is_not_the_requests():
    """Else the same noise would draw a draft and judge it: of many first drafts only so many are
    the coupled draw as chance makes them."""
    drafter, num_same = drafter_of(), 0
    logits = torch.tensor([LAW(PROMPT)])
    for key in range(200):
        drafter.begin(session(key, key))
        [node] = drafted(drafter, key, 1)
        num_same += [node.token_id] == sample(logits, [SampleRow(WARM, key, len(PROMPT))])
    by_chance = sum((weight / LAW_TOTAL) ** 2 for weight in node.law.weights)
    assert num_same / 200 < by_chance + 0.15


def test_a_confidence_tells_nothing_of_the_token():
    drafter, seen = drafter_of(), {}
    for key in range(30):
        drafter.begin(session(key, key))
        [node] = drafted(drafter, key, 1)
        seen.setdefault(node.token_id, node.confidence)
    assert len(seen) > 3
    assert len(set(seen.values())) == 1


def test_there_are_no_branches():
    drafter = drafter_of()
    drafter.begin(session(1, 11))
    drafter.begin(session(2, 11, wants_laws=False))
    for key, is_chain in ((1, True), (2, False)):
        for _ in range(3):
            nodes = drafted(drafter, key, 4, num_branches=4, branch_len=3)
        assert (len(nodes) == 4) is is_chain, "the other one shows that branches were to be had"


def test_a_law_keeps_to_the_vocabulary():
    """A padded model has rows for ids that mean nothing: those are left out before the draw, not
    after it."""
    drafter = drafter_of(vocab_size=10)
    for key in range(20):
        drafter.begin(session(key, key))
        nodes = drafted(drafter, key, 3)
        assert len(nodes) == 3
        assert all(max(node.law.token_ids) < 10 for node in nodes)


def test_a_law_follows_the_sampling_parameters():
    logits = torch.tensor(LAW(PROMPT))
    assert len(law_of(logits, SamplingParams(top_k=3)).token_ids) == 3
    assert len(law_of(logits, SamplingParams(temperature=1e-6)).token_ids) == 1
    narrow = law_of(logits, SamplingParams(top_p=0.2))
    assert len(narrow.token_ids) < len(law_of(logits, SamplingParams()).token_ids)
    least = law_of(logits, SamplingParams(min_p=0.5))
    assert min(least.weights) * 2 >= max(least.weights) - 2
    assert law_of(torch.full((9,), -torch.inf), WARM) is None
    assert law_of(torch.tensor([1.0, torch.nan]), WARM) is None
