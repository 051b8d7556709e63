"""The prediction drafter: it proposes the prediction's own text, and no edit makes it lose that."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.types import SamplingParams
from engine.drafting.interface import DraftRequest, DraftSession
from engine.drafting.prediction import PredictionDrafter

PROMPT = (9, 9, 9)
tokens = st.lists(st.integers(0, 5), max_size=60)


def begin(
    drafter: PredictionDrafter,
    prediction: list[int],
    output: list[int] | None = None,
    session_key: int = 1,
) -> None:
    token_ids = (*PROMPT, *(output or ()))
    drafter.begin(
        DraftSession(
            session_key, token_ids, 3, 0, SamplingParams(), prediction_ids=tuple(prediction)
        )
    )


def draft(drafter: PredictionDrafter, num_tokens: int, session_key: int = 1) -> list[int]:
    (nodes,) = drafter.draft([DraftRequest(session_key, num_tokens)])
    assert [node.parent for node in nodes] == list(range(-1, len(nodes) - 1))
    assert all(0.0 < node.confidence < 1.0 for node in nodes)
    return [node.token_id for node in nodes]


def steps_of(drafter: PredictionDrafter, answer: list[int], depth: int = 16) -> int:
    """Steps that an answer takes when every right draft is accepted, and each brings one more."""
    num_steps, done = 0, 0
    while done < len(answer):
        proposed = draft(drafter, depth)
        num_right = 0
        for ours, theirs in zip(proposed, answer[done:], strict=False):
            if ours != theirs:
                break
            num_right += 1
        drafter.extend(1, answer[done : done + num_right + 1])
        done += num_right + 1
        num_steps += 1
    return num_steps


@settings(max_examples=60, deadline=None)
@given(prediction=tokens, pieces=st.lists(tokens, max_size=4), num_tokens=st.integers(0, 20))
def test_a_proposal_is_always_a_piece_of_the_prediction(prediction, pieces, num_tokens):
    drafter = PredictionDrafter()
    begin(drafter, prediction)
    for piece in pieces:
        drafter.extend(1, piece)
        proposed = draft(drafter, num_tokens)
        assert len(proposed) <= num_tokens
        starts = range(len(prediction) - len(proposed) + 1)
        assert any(prediction[i : i + len(proposed)] == proposed for i in starts)


@settings(max_examples=40, deadline=None)
@given(prediction=tokens, output=tokens, cut=st.integers(0, 60))
def test_its_state_is_a_function_of_the_tokens(prediction, output, cut):
    """Begun in the middle, as after a verifier was lost, it says what it would have said."""
    whole, resumed = PredictionDrafter(), PredictionDrafter()
    begin(whole, prediction)
    whole.extend(1, output)
    begin(resumed, prediction, output[:cut])
    resumed.extend(1, output[cut:])
    assert whole.draft([DraftRequest(1, 9)]) == resumed.draft([DraftRequest(1, 9)])
    assert whole.num_resyncs(1) == resumed.num_resyncs(1)


def test_it_proposes_the_whole_of_a_right_prediction():
    drafter = PredictionDrafter()
    prediction = list(range(100, 200))
    begin(drafter, prediction)
    assert draft(drafter, 16) == prediction[:16]
    assert drafter.follow(1, prediction) == (True,) * 100
    assert draft(drafter, 16) == []
    assert drafter.num_resyncs(1) == 0


def test_an_empty_prediction_and_one_that_is_over_propose_nothing():
    drafter = PredictionDrafter()
    begin(drafter, [])
    assert draft(drafter, 8) == []
    assert drafter.follow(1, [1, 2, 3]) == (False,) * 3
    assert draft(drafter, 8) == []


LINES = [[100 + 10 * line + column for column in range(9)] + [7] for line in range(20)]
TEXT = [token for line in LINES for token in line]
EDITS = {
    "replaced": [*TEXT[:64], 1, *TEXT[65:]],
    "replaced by more": [*TEXT[:64], 1, 2, 3, 4, *TEXT[65:]],
    "inserted": [*TEXT[:64], 1, 2, *TEXT[64:]],
    "inserted a line": [*TEXT[:60], *range(40, 55), 7, *TEXT[60:]],
    "removed": [*TEXT[:64], *TEXT[66:]],
    "removed lines": [*TEXT[:60], *TEXT[110:]],
    "rewrote a line": [*TEXT[:60], *range(40, 49), 7, *TEXT[70:]],
    "moved a block up": [*TEXT[:40], *TEXT[120:160], *TEXT[40:120], *TEXT[160:]],
    "repeated a block": [*TEXT[:80], *TEXT[40:]],
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_edit_costs_little_and_the_text_behind_it_matches_again(edit):
    answer = EDITS[edit]
    drafter = PredictionDrafter()
    begin(drafter, TEXT)
    num_edits = {"moved a block up": 3}.get(edit, 1)
    assert drafter.num_resyncs(1) == 0
    num_new = sum(token < 100 and token != 7 for token in answer)
    # 17 tokens a step where all is right, and a few steps for each place that differs.
    assert steps_of(drafter, answer) <= len(answer) / 17 + num_new + 7 * num_edits
    assert num_edits <= drafter.num_resyncs(1) <= num_edits + 1


def test_many_edits_are_all_survived():
    rng = random.Random(3)
    answer = list(TEXT)
    changes = [line * 10 + 4 for line in range(0, 20, 4)]
    for place in changes:
        answer[place] = rng.randrange(20, 90)
    drafter = PredictionDrafter()
    begin(drafter, TEXT)
    assert steps_of(drafter, answer) < 0.25 * len(answer)
    assert drafter.num_resyncs(1) == len(changes)


def test_only_what_was_expected_counts_as_predicted():
    drafter = PredictionDrafter()
    begin(drafter, [1, 2, 3, 4, 5, 6])
    assert drafter.follow(1, [1, 2, 9, 4, 5, 6]) == (True, True, False, True, True, True)


def test_a_prediction_that_has_nothing_to_do_with_the_answer_soon_proposes_little():
    rng = random.Random(5)
    drafter = PredictionDrafter()
    begin(drafter, [rng.randrange(1000, 2000) for _ in range(300)])
    proposed = 0
    for _ in range(100):
        proposed += len(draft(drafter, 16))
        drafter.extend(1, [rng.randrange(3000, 4000)])
    assert proposed < 100


def test_confidence_grows_with_what_agreed():
    drafter = PredictionDrafter()
    begin(drafter, TEXT)
    drafter.extend(1, [*TEXT[:30], 1])
    (unsure,) = drafter.draft([DraftRequest(1, 1)])
    drafter.extend(1, TEXT[31:40])
    (sure,) = drafter.draft([DraftRequest(1, 1)])
    assert unsure[0].confidence < 0.6 < 0.9 < sure[0].confidence


def test_sessions_share_nothing_and_an_ended_one_is_gone():
    drafter = PredictionDrafter()
    begin(drafter, TEXT)
    begin(drafter, [5, 6, 7, 8, 9], session_key=2)
    assert draft(drafter, 2) == TEXT[:2]
    assert draft(drafter, 2, session_key=2) == [5, 6]
    drafter.end(1)
    with pytest.raises(KeyError):
        drafter.draft([DraftRequest(1, 4)])
