"""Training: it learns, and an interruption does not show in what comes out."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
import torch

from drafter_service.distill.checkpoint import Checkpoint
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.loss import distance, teacher_probs
from drafter_service.distill.schedule import Schedule, choose_lessons
from drafter_service.distill.student import Student
from drafter_service.distill.training import Training, TrainingStep
from tests.support.tiny_drafter import untrained_student

VOCABULARY_SIZE = 90
NUM_STEPS = 12


MakeTraining = Callable[[], Training]


@pytest.fixture(scope="module")
def make_training(target_folder: Path, lessons: list[Lesson]) -> MakeTraining:
    """A student of one layer; its corpus grows as the schedule asks."""

    def make() -> Training:
        return Training(
            untrained_student(target_folder, 1),
            Schedule(sum(lesson.num_learned for lesson in lessons), 6.0),
            lambda num_tokens: first_lessons(lessons, num_tokens),
            vocabulary_size=VOCABULARY_SIZE,
            seed=0,
            batch_tokens=512,
        )

    return make


@dataclass(frozen=True)
class Finished:
    """A whole training."""

    steps: list[TrainingStep]
    vocabulary: torch.Tensor
    checkpoint: Checkpoint


@pytest.fixture(scope="module")
def finished(make_training: MakeTraining, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    training, file = make_training(), tmp_path_factory.mktemp("whole") / "checkpoint.safetensors"
    steps = list(training.steps())
    training.write(file)
    return Finished(steps, training.vocabulary, Checkpoint.read(file))


def first_lessons(lessons: list[Lesson], num_tokens: int) -> list[Lesson]:
    """As few as have so many tokens."""
    taken: list[Lesson] = []
    while sum(lesson.num_learned for lesson in taken) < num_tokens:
        taken.append(lessons[len(taken)])
    return taken


def parameters_of(training: Training) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in training._student.parameters().items()}


def same_parameters(one: Training, other: Training) -> bool:
    ours, theirs = parameters_of(one), parameters_of(other)
    return all(torch.equal(ours[name], theirs[name]) for name in ours | theirs)


def test_the_loss_falls_and_agreement_rises(finished: Finished) -> None:
    first, last = finished.steps[:3], finished.steps[-3:]
    assert sum(s.cross_entropy for s in last) < 0.95 * sum(s.cross_entropy for s in first)
    assert sum(s.variation for s in last) < 0.95 * sum(s.variation for s in first)
    assert sum(s.agreement for s in last) > 1.2 * sum(s.agreement for s in first)
    assert finished.steps[-1].progress == 1.0


def test_a_training_that_was_interrupted_gives_the_same(
    make_training: MakeTraining, tmp_path: Path
) -> None:
    whole, file = make_training(), tmp_path / "checkpoint.safetensors"
    list(islice(whole.steps(), NUM_STEPS))
    first = make_training()
    list(islice(first.steps(), 5))
    first.write(file)
    list(islice(first.steps(), 2))  # Lost with the process.
    second = make_training()
    second.restore(Checkpoint.read(file))
    assert not same_parameters(whole, second)
    list(islice(second.steps(), NUM_STEPS - 5))
    assert same_parameters(whole, second)
    assert torch.equal(whole.vocabulary, second.vocabulary)


def test_the_seed_decides_what_a_step_takes(
    make_training: MakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, same, other = (make_training() for _ in range(3))
    monkeypatch.setattr(other, "_seed", 1)
    for training in (one, same, other):
        list(islice(training.steps(), 2))
    assert same_parameters(one, same)
    assert not same_parameters(one, other)


def test_a_training_that_is_over_has_no_steps(
    make_training: MakeTraining, finished: Finished
) -> None:
    again = make_training()
    again.restore(finished.checkpoint)
    assert list(again.steps()) == []
    assert torch.equal(again.vocabulary, finished.vocabulary)


# --- the loss ---------------------------------------------------------------------------------


def lesson_of(probs: list[list[tuple[int, float]]]) -> Lesson:
    """A text of which the target says this."""
    ids = torch.tensor([[token_id for token_id, _ in row] for row in probs], dtype=torch.int32)
    log_probs = torch.tensor([[p for _, p in row] for row in probs]).log().half()
    return Lesson(torch.zeros(len(probs) + 1, dtype=torch.int32), 1, ids, log_probs)


def test_distances() -> None:
    vocabulary = torch.tensor([2, 5, 7])
    lesson = lesson_of([[(5, 0.5), (9, 0.25), (2, 0.25)], [(9, 0.5), (7, 0.25), (5, 0.25)]])
    teacher = teacher_probs([lesson], vocabulary, 10)
    assert torch.equal(teacher.sayable, torch.tensor([True, False]))
    logits = torch.tensor([[0.25, 0.5, 0.25], [0.5, 0.25, 0.25]]).log()
    apart = distance(logits, teacher)
    first = -(0.5 * torch.tensor(0.5).log() + 0.25 * torch.tensor(0.25).log())
    second = -(0.5 * torch.tensor(0.25).log())
    assert apart.cross_entropy == pytest.approx((first + second).item() / 2, rel=1e-3)
    assert apart.variation == pytest.approx(1 - (0.75 + 0.5) / 2, rel=1e-3)
    assert apart.agreement == 0.5


def test_a_student_is_its_target_where_it_has_all_layers(
    target_folder: Path, lessons: list[Lesson]
) -> None:
    """The maths of training and of serving are one."""
    student: Student = untrained_student(target_folder, 2)
    everything = torch.arange(student.vocab_size)
    with torch.no_grad():
        logits = student.logits(lessons[:9], everything)
    log_probs = torch.log_softmax(logits, dim=-1)
    top_ids = torch.cat([lesson.top_ids for lesson in lessons[:9]]).long()
    noted = torch.cat([lesson.top_log_probs for lesson in lessons[:9]]).float()
    torch.testing.assert_close(log_probs.gather(1, top_ids), noted, rtol=5e-3, atol=5e-3)


# --- the schedule -----------------------------------------------------------------------------


def test_the_corpus_grows_in_the_first_half() -> None:
    schedule = Schedule(1000, 3.0)
    assert schedule.num_learned == 3000
    written = [schedule.num_written(progress / 10) for progress in range(11)]
    assert written[0] == 200
    assert written == sorted(written)
    assert set(written[5:]) == {1000}


def test_the_rate_goes_up_and_down() -> None:
    rates = [Schedule(1000, 3.0).learning_rate(progress / 100) for progress in range(101)]
    top = max(rates)
    assert rates[0] < 0.1 * top
    assert rates[10] == rates[50] == top
    assert rates[100] < 0.1 * top
    assert min(rates) > 0.0


def test_lessons_that_were_used_least_come_first() -> None:
    lengths, num_uses = [10] * 6, [1, 0, 2, 0, 0, 1]
    chosen = choose_lessons(random.Random(0), lengths, num_uses, 45)
    assert set(chosen[:3]) == {1, 3, 4}
    assert chosen[3] in (0, 5)
    assert len(chosen) == 4
    assert len(choose_lessons(random.Random(0), [1000], [7], 45)) == 1
