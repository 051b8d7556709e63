"""Penalties and bans: a block is adjusted as its tokens would be one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import SamplingParams
from engine.adjustments import Adjustments, adjustments_of

VOCAB = 12
STOP_IDS = (2, 5)

token_lists = st.lists(st.integers(0, VOCAB - 1), max_size=8)
all_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.5]),
    frequency_penalty=st.sampled_from([0.0, -0.5, 1.2]),
    presence_penalty=st.sampled_from([0.0, -1.0, 0.8]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=3).map(
        lambda bias: tuple(bias.items())
    ),
    bad_words=st.lists(
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple), max_size=3
    ).map(tuple),
    min_tokens=st.integers(0, 8),
)


def textbook(
    logits: torch.Tensor, params: SamplingParams, prompt: list[int], generated: list[int]
) -> torch.Tensor:
    """One row, token by token."""
    row = logits.tolist()
    for token_id in range(VOCAB):
        if token_id in prompt or token_id in generated:
            factor = params.repetition_penalty
            row[token_id] *= 1 / factor if row[token_id] > 0 else factor
        row[token_id] -= params.frequency_penalty * generated.count(token_id)
        row[token_id] -= params.presence_penalty * (token_id in generated)
    for token_id, bias in params.logit_bias:
        row[token_id] += bias
    before = (*prompt, *generated)
    for word in params.bad_words:
        if len(word) == 1 or before[1 - len(word) :] == word[:-1]:
            row[word[-1]] = -torch.inf
    for stop_id in STOP_IDS if len(generated) < params.min_tokens else ():
        row[stop_id] = -torch.inf
    return torch.tensor(row)


def random_logits(num_rows: int) -> torch.Tensor:
    return 3 * torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(num_rows))


@settings(max_examples=300, deadline=None)
@given(params=all_params, prompt=token_lists, generated=token_lists, drafts=token_lists)
def test_every_row_of_a_block_is_the_textbook_s(
    params: SamplingParams, prompt: list[int], generated: list[int], drafts: list[int]
) -> None:
    adjustments = Adjustments(params, prompt, STOP_IDS, VOCAB)
    for start in range(0, len(generated), 3):
        adjustments.commit(generated[start : start + 3])
    logits = random_logits(len(drafts) + 1)
    expected = [
        textbook(row, params, prompt, generated + drafts[:j]) for j, row in enumerate(logits)
    ]
    adjustments.apply(logits, drafts)
    torch.testing.assert_close(logits, torch.stack(expected), rtol=1e-5, atol=1e-5)


@settings(max_examples=100, deadline=None)
@given(params=all_params, prompt=token_lists, tokens=token_lists, data=st.data())
def test_bits_do_not_depend_on_how_the_tokens_were_cut_into_blocks(
    params: SamplingParams, prompt: list[int], tokens: list[int], data: Any
) -> None:
    logits = random_logits(len(tokens) + 1)
    whole = logits.clone()
    Adjustments(params, prompt, STOP_IDS, VOCAB).apply(whole, tokens)
    adjustments = Adjustments(params, prompt, STOP_IDS, VOCAB)
    start = 0
    while start < len(tokens):
        n = data.draw(st.integers(0, len(tokens) - start), label="drafts")
        num_accepted = data.draw(st.integers(0, n), label="accepted")
        refused = [0] * (n - num_accepted)
        block = logits[start : start + n + 1].clone()
        adjustments.apply(block, [*tokens[start : start + num_accepted], *refused])
        rows = slice(start, start + num_accepted + 1)
        assert torch.equal(block[: num_accepted + 1], whole[rows])
        taken = tokens[start : start + num_accepted + 1]
        adjustments.commit(taken)
        start += len(taken)


def test_a_refused_draft_leaves_no_trace() -> None:
    """Penalties count what was emitted, not what was proposed."""
    adjustments = Adjustments(SamplingParams(frequency_penalty=2.0), [1], (), VOCAB)
    for _ in range(5):
        adjustments.apply(torch.zeros(3, VOCAB), [9, 9])
        adjustments.commit([3])
    logits = torch.zeros(1, VOCAB)
    adjustments.apply(logits, [])
    assert logits[0, 9] == 0
    assert logits[0, 3] == -10


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, False),
        ({"temperature": 0.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1}, False),
        ({"presence_penalty": 0.1}, True),
        ({"min_tokens": 1}, True),
        ({"bad_words": ((1,),)}, True),
        ({"logit_bias": ((1, 1.0),)}, True),
    ],
)
def test_only_requests_that_need_it_pay(fields: dict[str, Any], expected: bool) -> None:
    made = adjustments_of(SamplingParams(**fields), [1, 2], (), VOCAB)
    assert (made is not None) == expected


def test_a_large_vocabulary_and_a_long_history_cost_little() -> None:
    """Only seen tokens are touched, so that a block of nine takes about as long as one row."""
    rng = random.Random(0)
    vocab, params = 151_936, SamplingParams(frequency_penalty=0.5, repetition_penalty=1.1)
    adjustments = Adjustments(params, [rng.randrange(vocab) for _ in range(4000)], (), vocab)
    logits = torch.zeros(9, vocab)
    adjustments.apply(logits, [rng.randrange(vocab) for _ in range(8)])
    assert int((logits != 0).sum()) == sum(range(9))  # Zero logits: only drafts show.


@settings(max_examples=100, deadline=None)
@given(params=all_params, drafts=token_lists, num_rows=st.integers(1, 9))
def test_the_last_rows_of_a_block_alone(
    params: SamplingParams, drafts: list[int], num_rows: int
) -> None:
    num_rows = min(num_rows, len(drafts) + 1)
    logits = random_logits(len(drafts) + 1)
    last = logits[-num_rows:].clone()
    adjustments = Adjustments(params, [1, 2], STOP_IDS, VOCAB)
    adjustments.apply(logits, drafts)
    adjustments.apply(last, drafts)
    assert torch.equal(last, logits[-num_rows:])


def test_ids_without_a_logit_change_nothing() -> None:
    params = SamplingParams(
        repetition_penalty=2.0, logit_bias=((99, 5.0),), bad_words=((99,), (99, 1)), min_tokens=5
    )
    adjustments = Adjustments(params, [99, 1], [99], VOCAB)
    adjustments.commit([99])
    logits = torch.ones(1, VOCAB)
    adjustments.apply(logits, [])
    assert logits[0].tolist() == [1, -torch.inf] + [1] * (VOCAB - 2)
