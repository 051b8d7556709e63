"""Trains a student on what its target writes, while the target goes on writing."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from drafter_service.distill.checkpoint import Checkpoint
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.loss import distance, teacher_probs
from drafter_service.distill.schedule import Schedule, choose_lessons
from drafter_service.distill.student import Student
from drafter_service.distill.vocabulary import frequent_tokens

_BETAS = (0.9, 0.95)
_MAX_GRADIENT_NORM = 1.0


@dataclass(frozen=True, slots=True)
class TrainingStep:
    """What a step did."""

    num_steps: int
    """This one included."""
    progress: float
    """From 0 to 1."""
    num_tokens: int
    """That were learned in it."""
    cross_entropy: float
    variation: float
    agreement: float


@dataclass(frozen=True, slots=True)
class _Gradient:
    """Of a part of a batch, and that part's share of each mean."""

    parts: tuple[torch.Tensor, ...]
    """In the order of the parameters."""
    cross_entropy: float
    variation: float
    agreement: float


class Training:
    """Steps of Adam, each over two halves of a batch, which have a thread each on a CPU.

    Its state is the student, the moments and how often each lesson was used; which lessons a step
    takes is a function of those and of the seed.
    """

    def __init__(
        self,
        student: Student,
        schedule: Schedule,
        lessons: Callable[[int], list[Lesson]],
        *,
        vocabulary_size: int,
        seed: int,
        batch_tokens: int,
    ) -> None:
        """`lessons`: gives a first part of the corpus that has at least so many tokens to learn,
        and is always the same for the same number."""
        self._student = student
        self._schedule = schedule
        self._lessons = lessons
        self._vocabulary_size = vocabulary_size
        self._seed = seed
        self._batch_tokens = batch_tokens
        self.vocabulary = torch.empty(0, dtype=torch.int64, device=student.device)
        """[draft vocabulary] int64, ascending: what the student learns to say. The head is the
        target's, so it may change as the corpus grows."""
        self._parameters = student.parameters()
        self._optimizer = torch.optim.Adam(self._parameters.values(), betas=_BETAS, fused=True)
        self._threads = ThreadPoolExecutor(2 if student.device.type == "cpu" else 1)
        self._num_steps = 0
        self._num_learned = 0
        self._num_uses: list[int] = []
        self._num_known = 0
        """Lessons that the vocabulary is made from."""

    def steps(self) -> Iterator[TrainingStep]:
        """To the end of the schedule."""
        self._read(self._progress)
        while self._num_learned < self._schedule.num_learned:
            yield self._step()

    def write(self, file: Path) -> None:
        """Where the training stands."""
        Checkpoint(
            self._num_steps,
            self._num_learned,
            torch.tensor(self._num_uses),
            self._parameters,
            self._moments(),
        ).write(file)

    def restore(self, checkpoint: Checkpoint) -> None:
        """Go on from there."""
        self._num_steps, self._num_learned = checkpoint.num_steps, checkpoint.num_learned
        self._num_uses = checkpoint.num_uses.tolist()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                parameter.copy_(checkpoint.parameters[name])
        state: dict[int, dict[str, torch.Tensor]] = {i: {} for i in range(len(self._parameters))}
        numbers = {name: number for number, name in enumerate(self._parameters)}
        for name, moment in checkpoint.moments.items():
            parameter_name, _, moment_name = name.rpartition("/")
            state[numbers[parameter_name]][moment_name] = moment
        groups = self._optimizer.state_dict()["param_groups"]
        self._optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _moments(self) -> dict[str, torch.Tensor]:
        return {
            f"{name}/{moment_name}": moment
            for name, parameter in self._parameters.items()
            for moment_name, moment in self._optimizer.state[parameter].items()
        }

    @property
    def _progress(self) -> float:
        return min(1.0, self._num_learned / self._schedule.num_learned)

    def _step(self) -> TrainingStep:
        progress = self._progress
        batch = self._batch(progress)
        halves = [half for half in (batch[::2], batch[1::2]) if half]
        num_tokens = _num_learned(batch)
        variation_weight = self._schedule.variation_weight(progress)
        gradient = partial(self._gradient, num_tokens=num_tokens, variation_weight=variation_weight)
        gradients = list(self._threads.map(gradient, halves))
        for parameter, *parts in zip(
            self._parameters.values(), *(gradient.parts for gradient in gradients), strict=True
        ):
            parameter.grad = sum(parts[1:], start=parts[0])
        for group in self._optimizer.param_groups:
            group["lr"] = self._schedule.learning_rate(progress)
        torch.nn.utils.clip_grad_norm_(self._parameters.values(), _MAX_GRADIENT_NORM)
        self._optimizer.step()
        self._num_steps += 1
        self._num_learned += num_tokens
        return TrainingStep(
            num_steps=self._num_steps,
            progress=self._progress,
            num_tokens=num_tokens,
            cross_entropy=sum(gradient.cross_entropy for gradient in gradients),
            variation=sum(gradient.variation for gradient in gradients),
            agreement=sum(gradient.agreement for gradient in gradients),
        )

    def _gradient(
        self, lessons: list[Lesson], num_tokens: int, variation_weight: float
    ) -> _Gradient:
        """Of a part of a batch, which has `num_tokens` in all."""
        student, vocabulary = self._student, self.vocabulary
        device = student.device
        teacher = teacher_probs(lessons, vocabulary, student.vocab_size)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            logits = student.logits(lessons, vocabulary)
        apart = distance(logits.float(), teacher)
        share = _num_learned(lessons) / num_tokens
        loss = share * (apart.cross_entropy + variation_weight * apart.variation)
        return _Gradient(
            torch.autograd.grad(loss, list(self._parameters.values())),
            share * apart.cross_entropy.item(),
            share * apart.variation.item(),
            share * apart.agreement.item(),
        )

    def _batch(self, progress: float) -> list[Lesson]:
        lessons = self._read(progress)
        rng = random.Random(f"batch-{self._seed}-{self._num_steps}")
        lengths = [len(lesson.token_ids) for lesson in lessons]
        chosen = choose_lessons(rng, lengths, self._num_uses, self._batch_tokens)
        for index in chosen:
            self._num_uses[index] += 1
        return [lessons[index] for index in chosen]

    def _read(self, progress: float) -> list[Lesson]:
        """The corpus so far."""
        lessons = self._lessons(self._schedule.num_written(progress))
        if len(lessons) > self._num_known:
            vocabulary = frequent_tokens(lessons, self._student.vocab_size, self._vocabulary_size)
            self.vocabulary = vocabulary.to(self._student.device)
            self._num_uses += [0] * (len(lessons) - len(self._num_uses))
            self._num_known = len(lessons)
        return lessons


def _num_learned(lessons: Iterable[Lesson]) -> int:
    return sum(lesson.num_learned for lesson in lessons)
