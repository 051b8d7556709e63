"""Every sampling parameter gives the same tokens with any drafter and with none.

The right answer is decoded token by token (tests/support/reference.py); the engine verifies blocks.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.config import SchedulerConfig, SpeculationConfig
from cluster.types import FinishReason, Path, SamplingParams
from tests.support.engine_driver import (
    EngineDriver,
    ScriptedDrafter,
    flaky_drafter,
    oracle_drafter,
)
from tests.support.reference import decode
from tests.support.scripted_target import EOS, VOCAB_SIZE, ScriptedRunner, hashed_law

token_ids = st.integers(0, VOCAB_SIZE - 1)
all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.7]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([1.0, 0.8, 1.4]),
    frequency_penalty=st.sampled_from([0.0, -0.6, 1.0]),
    presence_penalty=st.sampled_from([0.0, -0.7, 1.5]),
    logit_bias=st.dictionaries(token_ids, st.floats(-9, 9), max_size=3).map(
        lambda bias: tuple(sorted(bias.items()))
    ),
    bad_words=st.lists(st.lists(token_ids, min_size=1, max_size=2).map(tuple), max_size=4).map(
        tuple
    ),
    min_tokens=st.integers(0, 12),
)
DEPTH = 5


def drafters(
    seed: int, law: Any, params: SamplingParams, request_key: int
) -> dict[str, ScriptedDrafter | None]:
    rng = random.Random(seed)
    return {
        "none": None,
        "oracle": oracle_drafter(law, params, request_key, DEPTH),
        "flaky": flaky_drafter(rng, law),
        "garbage": lambda committed, request: [rng.randrange(VOCAB_SIZE) for _ in range(DEPTH)],
        "stubborn": lambda committed, request: [9] * DEPTH,
    }


@settings(max_examples=25)
@given(params=all_params, seed=st.integers(0, 1000))
def test_all_drafters_give_the_tokens_of_plain_decoding(params: SamplingParams, seed: int) -> None:
    law = hashed_law(salt=str(seed), sharpness=6.0)
    prompt = [random.Random(seed).randrange(3, VOCAB_SIZE) for _ in range(6)]
    expected = decode(law, prompt, max_tokens=14, sampling=params, request_key=seed)
    for name, drafter in drafters(seed, law, params, seed).items():
        driver = EngineDriver(
            ScriptedRunner(law),
            drafter=drafter,
            scheduler=SchedulerConfig(max_prefill_chunk_tokens=3),
            speculation=SpeculationConfig(planner="fixed", num_speculative_tokens=DEPTH),
        )
        seq = driver.submit(prompt, max_tokens=14, sampling=params, request_key=seed)
        result = driver.run()[seq]
        assert (result.error, result.token_ids) == (None, expected), name


def answer(law: Any, drafter: ScriptedDrafter | None, **fields: Any) -> tuple[list[int], Any]:
    driver = EngineDriver(
        ScriptedRunner(law),
        drafter=drafter,
        speculation=SpeculationConfig(planner="fixed", num_speculative_tokens=DEPTH),
    )
    seq = driver.submit([5, 6, 7], **fields)
    result = driver.run()[seq]
    assert result.finish is not None, result.error
    return result.token_ids, result.finish


def flat_law(favourite: int, strength: float = 5.0) -> Any:
    return lambda prefix: [strength * (i == favourite) for i in range(VOCAB_SIZE)]


def constant(token_id: int) -> ScriptedDrafter:
    return lambda committed, request: [token_id] * DEPTH


@pytest.mark.parametrize("drafted", [11, 12])
def test_a_banned_token_never_comes_not_even_as_a_draft(drafted: int) -> None:
    params = SamplingParams(temperature=1.0, logit_bias=((11, -100.0),))
    tokens, _ = answer(flat_law(11), constant(drafted), sampling=params, max_tokens=20)
    assert 11 not in tokens


def test_a_forced_token_comes_every_time() -> None:
    params = SamplingParams(temperature=0.0, logit_bias=((12, 100.0),))
    tokens, _ = answer(flat_law(11), constant(11), sampling=params, max_tokens=6)
    assert tokens == [12] * 6


def test_min_tokens_counts_tokens_and_not_steps() -> None:
    """The end is wanted from the start on; it comes right after min_tokens, in a block too."""
    params = SamplingParams(temperature=0.0, min_tokens=4)
    law = lambda prefix: [9.0 * (i == EOS) + 5.0 * (i == 8) for i in range(VOCAB_SIZE)]  # noqa: E731
    for drafter in (None, constant(8), constant(EOS)):
        tokens, finish = answer(law, drafter, sampling=params, max_tokens=20)
        assert tokens == [8, 8, 8, 8, EOS]
        assert finish.reason is FinishReason.STOP


def test_a_presence_penalty_flips_the_choice_where_the_token_was_seen() -> None:
    params = SamplingParams(temperature=0.0, presence_penalty=2.0)
    law = lambda prefix: [5.0 * (i == 8) + 4.0 * (i == 9) for i in range(VOCAB_SIZE)]  # noqa: E731
    for drafter in (None, constant(8), constant(9)):
        tokens, _ = answer(law, drafter, sampling=params, max_tokens=4)
        assert tokens == [8, 9, 8, 8]


def test_refused_drafts_are_not_penalised() -> None:
    """Token 9 is drafted in every round and wanted only later."""
    params = SamplingParams(temperature=0.0, frequency_penalty=0.5)

    def law(prefix: tuple[int, ...]) -> list[float]:
        wanted = 9 if len(prefix) >= 8 else 20 + len(prefix)
        return [5.0 * (i == wanted) for i in range(VOCAB_SIZE)]

    plain, _ = answer(law, None, sampling=params, max_tokens=8, path=Path.PLAIN)
    drafted, finish = answer(law, constant(9), sampling=params, max_tokens=8)
    assert drafted == plain
    assert drafted[5] == 9
    assert finish.stats.num_draft_tokens > finish.stats.num_accepted_tokens


def test_temperature_matters_behind_drafts() -> None:
    law = lambda prefix: [1.0 * (i in (8, 9, 10)) * 30 for i in range(VOCAB_SIZE)]  # noqa: E731
    seen = set()
    for key in range(60):
        params = SamplingParams(temperature=1.0)
        tokens, _ = answer(law, constant(9), sampling=params, request_key=key, max_tokens=2)
        seen |= set(tokens)
    assert seen == {8, 9, 10}


def many_answers(
    fields: list[dict[str, Any]], law: Any, *, serial: bool = False
) -> list[list[int]]:
    """All at once, or each after the end of the one before it; drafted for well and badly."""
    driver = EngineDriver(
        ScriptedRunner(law, num_blocks=400),
        drafter=flaky_drafter(random.Random(1), law),
        speculation=SpeculationConfig(planner="fixed", num_speculative_tokens=DEPTH),
    )
    for one in fields:
        driver.submit(max_tokens=12, **one)
        if serial:
            driver.run()
    return [result.token_ids for result in driver.run().values()]


def test_a_seed_is_honoured_beside_a_request_with_another() -> None:
    law = hashed_law(salt="seeds")
    seeded = {
        "prompt": [5, 6, 7],
        "sampling": SamplingParams(temperature=2.0),
        "request_key": 42,
    }
    [alone] = many_answers([seeded], law)
    other = {**seeded, "request_key": 977}
    assert many_answers([other, seeded], law)[1] == alone
    assert many_answers([other], law) != [alone], "the seed decides nothing"


def test_other_seeds_in_the_batch_leave_greedy_answers_alone() -> None:
    """Elsewhere they turned equal requests at temperature 0 into gibberish."""
    law = hashed_law(salt="greedy")
    same = [{"prompt": [5] * 8, "request_key": 0} for _ in range(8)]
    others = [{"prompt": [6 + i] * 5, "request_key": 100 + i} for i in range(8)]
    mixed = [one for pair in zip(same, others, strict=True) for one in pair]
    answers = many_answers(mixed, law)
    [alone] = many_answers(same[:1], law)
    assert answers[::2] == [alone] * 8
    assert answers == many_answers(mixed, law, serial=True)


def test_a_repetition_penalty_makes_no_answer_drift() -> None:
    """Elsewhere one answer in ten was another with drafts and a penalty."""
    law = hashed_law(salt="drift")
    sampling = SamplingParams(temperature=0.0, repetition_penalty=1.05)
    fields = [
        {"prompt": [3 + i % 30, 4, 5, 3 + i // 30], "sampling": sampling, "ignore_eos": True}
        for i in range(50)
    ]
    assert many_answers(fields, law) == [
        decode(
            law,
            one["prompt"],
            max_tokens=12,
            sampling=sampling,
            request_key=1,
            stop_ids=frozenset(),
        )
        for one in fields
    ]


def test_every_token_banned_is_an_error_of_that_request_alone() -> None:
    driver = EngineDriver(ScriptedRunner(hashed_law()))
    everything = tuple((token_id,) for token_id in range(VOCAB_SIZE))
    bad = driver.submit([5, 6], sampling=SamplingParams(bad_words=everything))
    good = driver.submit([5, 6], max_tokens=5)
    results = driver.run()
    assert results[bad].error is not None
    assert "bans every token" in results[bad].error.message
    assert results[good].finish is not None


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_the_model_s_own_at_every_position_of_a_block(
    temperature: float,
) -> None:
    """Not of what penalties, temperature and truncation make of it; with drafts as without."""
    law = hashed_law(sharpness=6.0)
    params = SamplingParams(temperature, top_k=5, frequency_penalty=0.5)
    told = []
    for drafter in (None, oracle_drafter(law, params, 1, DEPTH), constant(9)):
        driver = EngineDriver(
            ScriptedRunner(law),
            drafter=drafter,
            speculation=SpeculationConfig(planner="fixed", num_speculative_tokens=DEPTH),
        )
        seq = driver.submit([5, 6, 7], sampling=params, max_tokens=12, num_top_logprobs=3)
        result = driver.run()[seq]
        logprobs = [one for event in result.events for one in event.logprobs]
        assert len(logprobs) == len(result.token_ids)
        tokens = [5, 6, 7]
        for token_id, one in zip(result.token_ids, logprobs, strict=True):
            own = torch.log_softmax(torch.tensor(law(tuple(tokens))), -1)
            assert one.logprob == pytest.approx(float(own[token_id]), abs=1e-5)
            assert one.top_ids == tuple(own.topk(3).indices.tolist())
            assert one.top_logprobs == pytest.approx(own.topk(3).values.tolist(), abs=1e-5)
            tokens.append(token_id)
        told.append(logprobs)
    assert told[0] == told[1] == told[2]
