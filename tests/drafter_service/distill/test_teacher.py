"""The target as a teacher: it writes what a verifier would, and notes its own probabilities."""

from __future__ import annotations

import pytest
import torch

from cluster.types import SamplingParams
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.teacher import NUM_CANDIDATES, Request, Teacher
from engine.decoder import SequenceSlice
from engine.model_runner import ModelRunner
from engine.sampling import SampleRow, sample

EOS = 2
SAMPLINGS = [SamplingParams(temperature=t) for t in (0.0, 0.7, 1.0)]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [
        Request(tuple(range(3 + i, 9 + 2 * i)), SAMPLINGS[i % 3], 1000 + i, 5 + 3 * i)
        for i in range(12)
    ]


def logits_over(runner: ModelRunner, token_ids: list[int]) -> torch.Tensor:
    """After each token of a text, [len, vocab]."""
    cache = runner.kv.open()
    assert runner.kv.reserve(cache, len(token_ids))
    piece = SequenceSlice(cache.block_table, 0, token_ids, len(token_ids))
    logits = runner.forward([piece])
    runner.kv.close(cache)
    return logits


def check_candidates(runner: ModelRunner, lesson: Lesson) -> None:
    """They are the likeliest tokens of what the model says of the text as a whole."""
    token_ids = lesson.token_ids.tolist()
    log_probs = torch.log_softmax(logits_over(runner, token_ids), dim=-1)
    expected = log_probs[lesson.num_context - 1 : -1].topk(NUM_CANDIDATES)
    torch.testing.assert_close(lesson.top_log_probs.float(), expected.values, rtol=2e-3, atol=2e-3)
    assert torch.equal(lesson.top_ids[:, 0].long(), expected.indices[:, 0])


def test_it_writes_token_after_token_by_the_noise_of_the_request(
    runner: ModelRunner, requests: list[Request]
) -> None:
    for request, lesson in zip(requests, Teacher(runner, 4).write(requests), strict=True):
        token_ids = lesson.token_ids.tolist()
        assert lesson.num_context == len(request.prompt_ids)
        assert tuple(token_ids[: lesson.num_context]) == request.prompt_ids
        logits = logits_over(runner, token_ids)[lesson.num_context - 1 : -1]
        rows = [
            SampleRow(request.sampling, request.request_key, position)
            for position in range(lesson.num_context, len(token_ids))
        ]
        assert token_ids[lesson.num_context :] == sample(logits, rows)
        assert EOS not in token_ids[lesson.num_context : -1]
        assert lesson.num_learned == request.max_tokens or token_ids[-1] == EOS
        check_candidates(runner, lesson)


def test_an_answer_does_not_depend_on_the_batch(
    runner: ModelRunner, requests: list[Request]
) -> None:
    assert _all_same(Teacher(runner, 1).write(requests), Teacher(runner, 12).write(requests))


def test_it_waits_for_room_in_the_pool(runner: ModelRunner) -> None:
    """Each may come to need a third of it."""
    third = runner.kv.num_slots // 3
    requests = [Request((5, 6, 7 + i), SAMPLINGS[0], i, third - 20) for i in range(5)]
    short = [Request(r.prompt_ids, r.sampling, r.request_key, 6) for r in requests]
    heard: list[int] = []
    long = Teacher(runner, 8).write(requests[:4], heard.append)
    assert max(heard) == 3
    for lesson, expected in zip(long, Teacher(runner, 8).write(short[:4]), strict=True):
        assert torch.equal(lesson.token_ids[:9], expected.token_ids)


def test_it_reads_a_text(runner: ModelRunner) -> None:
    text = [3 + (7 * i) % 120 for i in range(300)]
    lesson = Teacher(runner, 1).read(text)
    assert (lesson.token_ids.tolist(), lesson.num_context) == (text, 1)
    check_candidates(runner, lesson)


def test_no_block_is_left_behind(runner: ModelRunner, requests: list[Request]) -> None:
    Teacher(runner, 3).write(requests)
    runner.kv.check()
    assert runner.kv.num_used_blocks == 0


def _all_same(some: list[Lesson], others: list[Lesson]) -> bool:
    columns = ("token_ids", "top_ids", "top_log_probs")
    return len(some) == len(others) and all(
        torch.equal(getattr(one, column), getattr(other, column))
        for one, other in zip(some, others, strict=True)
        for column in columns
    )
