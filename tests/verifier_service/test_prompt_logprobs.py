"""Log probabilities of prompts: the model's own, each told once, whatever the engine does."""

from __future__ import annotations

import math
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path as FilePath

import pytest
import torch

from cluster.config import SchedulerConfig
from cluster.types import FinishReason, GenerationRequest, Path, SamplingParams, TokenLogprobs
from engine.decoder import SequenceSlice
from tests.support.engine_driver import GREEDY, EngineDriver, Result, flaky_drafter
from tests.support.generation import RunningVerifier, running_verifier
from tests.support.reference import decode
from tests.support.scripted_target import VOCAB_SIZE, Law, ScriptedRunner, hashed_law
from tests.support.tiny_models import make_tiny_model
from verifier_service import scheduler as scheduler_module

LAW = hashed_law()


def expected_logprobs(law: Law, prompt: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """From the law itself, one position after the other."""
    told = []
    for position in range(1, len(prompt)):
        row = torch.tensor(law(tuple(prompt[:position])))
        log_probs = torch.log_softmax(row, dim=-1)
        top = log_probs.topk(num_top)
        own = float(log_probs[prompt[position]])
        told.append(TokenLogprobs(own, tuple(top.indices.tolist()), tuple(top.values.tolist())))
    return told


def words(rng: random.Random, most: int) -> list[int]:
    return [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, most))]


class CountingRunner(ScriptedRunner):
    """Counts the rows of logits of its largest step."""

    max_logits = 0

    def forward(self, slices: Sequence[SequenceSlice]) -> torch.Tensor:
        self.max_logits = max(self.max_logits, sum(part.num_logits for part in slices))
        return super().forward(slices)


@pytest.mark.parametrize("seed", range(6))
def test_they_are_the_models_own_whatever_else_runs(seed: int) -> None:
    """Chunks of any size, a tight pool, neighbours that draft, prefixes that others computed, and
    sequences that lose their place while they are scored."""
    rng, law = random.Random(seed), hashed_law(salt=str(seed))
    runner = ScriptedRunner(
        law,
        num_blocks=rng.choice([20, 30, 90]),
        block_size=rng.choice([1, 2, 4]),
        prefix_cache=seed % 2 == 0,
    )
    driver = EngineDriver(
        runner,
        drafter=flaky_drafter(rng, law),
        scheduler=SchedulerConfig(
            max_running_sequences=rng.choice([2, 8]),
            max_step_tokens=rng.choice([3, 16, 64]),
            max_prefill_chunk_tokens=rng.choice([1, 3, 7, 64]),
        ),
    )
    longest = min(40, runner.kv.num_slots - 12)
    beginning = words(rng, longest // 2)
    answers, scores = {}, {}
    num_forced = 0
    while len(answers) < 12 or not all(result.ended for result in driver.results.values()):
        if len(answers) < 12 and rng.random() < 0.4:
            prompt = [*rng.choice([[], beginning]), *words(rng, 9)][:longest]
            fields = {"max_tokens": rng.randint(1, 12), "sampling": GREEDY, "request_key": 1}
            num_top = rng.choice([None, 0, 3])
            seq = driver.submit(
                prompt, path=rng.choice(list(Path)), num_prompt_logprobs=num_top, **fields
            )
            answers[seq] = decode(law, prompt, **fields)
            scores[seq] = [] if num_top is None else expected_logprobs(law, prompt, num_top)
        if num_forced < 8 and rng.random() < 0.1 and driver.engine._scheduler.running:
            driver.engine._scheduler._preempt_newest()
            num_forced += 1
        driver.step()
    assert {seq: result.token_ids for seq, result in driver.results.items()} == answers
    assert {seq: result.prompt_logprobs for seq, result in driver.results.items()} == scores
    assert runner.kv.num_used_blocks == 0


def score(driver: EngineDriver, prompt: Sequence[int], **fields: object) -> Result:
    """Score a prompt and generate nothing."""
    seq = driver.submit(prompt, max_tokens=0, num_prompt_logprobs=1, **fields)
    return driver.run()[seq]


def test_a_prompt_that_is_scored_only_gets_no_token() -> None:
    driver = EngineDriver(ScriptedRunner(LAW))
    for prompt in ([5, 6, 7, 8, 9], [5, 6], [5]):
        result = score(driver, prompt)
        assert result.prompt_logprobs == expected_logprobs(LAW, prompt, 1)
        assert result.finish is not None
        assert (result.token_ids, result.finish.reason) == ([], FinishReason.LENGTH)
    assert driver.runner.kv.num_used_blocks == 0


def test_a_request_for_nothing_ends_without_a_step() -> None:
    """So does one that goes on from a lost verifier which had told the whole prompt."""
    driver = EngineDriver(ScriptedRunner(LAW))
    seq = driver.submit([5, 6, 7], max_tokens=0)
    result = driver.run()[seq]
    assert result.finish is not None
    assert result.finish.reason is FinishReason.LENGTH
    assert driver.runner.num_forwards == 0


def test_a_prompt_may_fill_the_window_if_nothing_follows() -> None:
    driver = EngineDriver(ScriptedRunner(LAW, max_model_len=8))
    prompt = [3, 4, 5, 6, 7, 8, 9, 3]
    assert score(driver, prompt).prompt_logprobs == expected_logprobs(LAW, prompt, 1)
    too_long = score(driver, [*prompt, 4])
    assert too_long.error is not None
    assert too_long.error.kind == "InvalidRequestError"


def test_a_known_prefix_is_computed_again_to_be_scored_and_serves_the_next() -> None:
    driver = EngineDriver(ScriptedRunner(LAW, block_size=2))
    prompt = [3, 4, 5, 6, 7, 8, 9]
    driver.submit(prompt, max_tokens=1)
    driver.run()
    assert score(driver, prompt).prompt_logprobs == expected_logprobs(LAW, prompt, 1)
    assert driver.runner.num_fed == 2 * len(prompt)
    seq = driver.submit(prompt, max_tokens=1)
    (event,) = driver.run()[seq].events
    assert event.num_cached_prompt_tokens == 6


def test_a_step_holds_a_bounded_number_of_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a large vocabulary and long prompts would take all memory."""
    monkeypatch.setattr(scheduler_module, "MAX_SCORED_TOKENS", 5)
    runner = CountingRunner(LAW)
    driver = EngineDriver(runner)
    prompts = [[3 + (i + j) % 9 for j in range(17)] for i in range(4)]
    seqs = [driver.submit(p, max_tokens=0, num_prompt_logprobs=1) for p in prompts]
    other = driver.submit(prompts[0], max_tokens=3)
    results = driver.run()
    for seq, prompt in zip(seqs, prompts, strict=True):
        assert results[seq].prompt_logprobs == expected_logprobs(LAW, prompt, 1)
    assert results[other].finish is not None
    assert 5 <= runner.max_logits <= 6


def test_no_draft_session_is_opened_where_no_draft_can_be_used() -> None:
    driver = EngineDriver(ScriptedRunner(LAW), drafter=lambda committed, request: [])
    for max_tokens in (0, 1, 2):
        driver.submit([5, 6, 7], max_tokens=max_tokens, num_prompt_logprobs=1)
    driver.run()
    assert sum(len(output.orders.opens) for output in driver.outputs) == 1


def test_logits_that_are_no_numbers_end_that_request_alone() -> None:
    """One request for log probabilities among five normal ones: it fails, they go on."""

    def law(prefix: tuple[int, ...]) -> list[float]:
        return [math.nan] * VOCAB_SIZE if prefix == (5, 6) else LAW(prefix)

    driver = EngineDriver(ScriptedRunner(law))
    bad = driver.submit([5, 6, 7, 8], num_prompt_logprobs=1)
    good = [driver.submit([7, 3 + i]) for i in range(5)]
    results = driver.run()
    error = results[bad].error
    assert error is not None
    assert error.kind == "InternalError"
    assert not results[bad].token_ids
    assert all(results[seq].finish is not None for seq in good)


# --- a model --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> FilePath:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def verifier(model: FilePath) -> AsyncIterator[RunningVerifier]:
    async with running_verifier(str(model), dtype="float32") as started:
        yield started


def request(name: str, prompt: Sequence[int], **fields: object) -> GenerationRequest:
    defaults = {"max_tokens": 0, "sampling": SamplingParams(temperature=0.0), "request_key": 1}
    return GenerationRequest(request_id=name, prompt_ids=tuple(prompt), **{**defaults, **fields})


async def test_a_token_is_scored_as_it_was_when_it_was_generated(verifier: RunningVerifier) -> None:
    """To the bit: in a decode step, and in a prefill of everything, alone and beside others."""
    rng = random.Random(1)
    prompts = [[rng.randrange(3, 128) for _ in range(rng.randint(2, 40))] for _ in range(5)]
    sampled = SamplingParams(temperature=0.9, top_k=20, repetition_penalty=1.2)
    answers = await verifier.generate(
        [
            request(f"a{i}", p, max_tokens=24, num_top_logprobs=4, sampling=sampled, request_key=i)
            for i, p in enumerate(prompts)
        ]
    )
    told = [[one for event in answer.events for one in event.logprobs] for answer in answers]
    assert all(len(logprobs) >= 8 for logprobs in told)
    wholes = [[*p, *answer.token_ids] for p, answer in zip(prompts, answers, strict=True)]
    asked = [request(f"b{i}", w, num_prompt_logprobs=4) for i, w in enumerate(wholes)]
    together = await verifier.generate(asked)
    (alone,) = await verifier.generate([replace(asked[0], request_id="c")])
    assert alone.prompt_logprobs == together[0].prompt_logprobs
    for prompt, logprobs, scored in zip(prompts, told, together, strict=True):
        assert scored.prompt_logprobs[len(prompt) - 1 :] == logprobs
        assert scored.reason is FinishReason.LENGTH
