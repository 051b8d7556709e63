"""The whole of a distillation: a corpus, a training, a drafter, its acceptance."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from cluster.commands.command_error import CommandError
from cluster.config import KVCacheConfig, ModelConfig
from drafter_service.distill.acceptance import NOTHING, NUM_SPECULATIVE_TOKENS, Acceptance, measure
from drafter_service.distill.checkpoint import Checkpoint
from drafter_service.distill.corpus import Corpus
from drafter_service.distill.course import Course, Limits
from drafter_service.distill.dialogue import Dialogue
from drafter_service.distill.export import write_drafter
from drafter_service.distill.given_text import NO_TEXT, GivenText, read_text
from drafter_service.distill.lesson import Lesson
from drafter_service.distill.progress import Progress
from drafter_service.distill.prompts import ASKED_KINDS, Kind, held_out_prompts
from drafter_service.distill.schedule import Schedule
from drafter_service.distill.settings import Settings, check_same
from drafter_service.distill.student import Student, first_layers
from drafter_service.distill.target import Target, load_target
from drafter_service.distill.teacher import Teacher
from drafter_service.distill.training import Training, TrainingStep
from engine.loader import load_model
from engine.model_runner import ModelRunner
from engine.models.distilled import FORMAT, DrafterDescription, embeddings_identity

_LIMITS = Limits(max_prompt_tokens=384, max_answer_tokens=192)
_TEACHER_BATCH = 64
"""Sequences that the target writes at a time."""
_BATCH_TOKENS = 768
"""Of a training step, context included."""
_CHECKPOINT_EVERY_S = 60.0
_TEMPERATURES = (0.0, 0.7, 1.0)
_HELD_OUT_PER_KIND = 4
_HELD_OUT_TOKENS = 128


class Lessons:
    """The corpus as far as it is needed; the target writes on when it is not enough."""

    def __init__(self, corpus: Corpus, course: Course, progress: Progress) -> None:
        self._corpus = corpus
        self._course = course
        self._progress = progress
        self._num_parts = 0
        self._num_tokens = 0
        self._lessons: list[Lesson] = []

    def at_least(self, num_tokens: int) -> list[Lesson]:
        """As many parts as have so many tokens to learn."""
        while self._num_tokens < num_tokens:
            if not self._corpus.has(self._num_parts):
                self._write(self._num_parts, num_tokens)
            lessons = self._corpus.read(self._num_parts)
            self._num_parts += 1
            self._num_tokens += sum(lesson.num_learned for lesson in lessons)
            self._lessons += lessons
        return self._lessons

    def _write(self, part: int, wanted: int) -> None:
        start_s, written = time.monotonic(), 0

        def on_tokens(num_tokens: int) -> None:
            nonlocal written
            written += num_tokens
            now_s = time.monotonic()
            rate = written / max(1e-9, now_s - start_s)
            have = min(self._num_tokens + written, wanted)
            details = f"{have:,} of {wanted:,} tokens, {rate:.0f} a second"
            self._progress.show("the target writes", have / wanted, details, now_s)

        self._corpus.write(part, self._course.part(part, on_tokens))


@dataclass(frozen=True, slots=True)
class Distillation:
    """In a folder, where it goes on if it was begun there before."""

    settings: Settings
    folder: Path
    device: str
    progress: Progress

    def run(self) -> None:
        """Raises CommandError."""
        work = self.folder / "training"
        check_same(work, self.settings)
        target = load_target(self._model(self.settings.target))
        self._check_layers(target)
        dialogue = Dialogue(target.runner.card)
        teacher = Teacher(target.runner, _TEACHER_BATCH)
        given = self._given_text(dialogue)
        course = Course(teacher, dialogue, self.settings.seed, _LIMITS, given)
        lessons = Lessons(Corpus(work / "corpus"), course, self.progress)
        self._train(target, lessons, work / "checkpoint.safetensors")
        self._measure(target)

    def _model(self, source: str) -> ModelConfig:
        return ModelConfig(source=source, device=self.device)

    def _given_text(self, dialogue: Dialogue) -> GivenText:
        text = self.settings.text
        if text is None:
            return NO_TEXT
        return read_text(Path(text), dialogue, _LIMITS.max_answer_tokens)

    def _check_layers(self, target: Target) -> None:
        num_layers = len(target.spec.layers)
        if self.settings.num_layers > num_layers:
            raise CommandError(
                f"--layers {self.settings.num_layers}: the target has {num_layers} only"
            )

    # --- training --------------------------------------------------------------------------

    def _train(self, target: Target, lessons: Lessons, file: Path) -> None:
        schedule = Schedule(self.settings.num_tokens, self.settings.num_passes)
        weights = target.weights()
        student = first_layers(target.spec, weights, self.settings.num_layers)
        training = Training(
            student,
            schedule,
            lessons.at_least,
            vocabulary_size=self.settings.vocabulary_size,
            seed=self.settings.seed,
            batch_tokens=_BATCH_TOKENS,
        )
        if file.is_file():
            training.restore(Checkpoint.read(file))
        for step in _checkpointed(training, file):
            now_s = time.monotonic()
            self.progress.show("the drafter learns", step.progress, _report(step), now_s)
        self._export(target, student, training.vocabulary)

    def _export(self, target: Target, student: Student, vocabulary: torch.Tensor) -> None:
        description = DrafterDescription(
            format=FORMAT,
            target=_findable(self.settings.target),
            target_embeddings=embeddings_identity(student.weights.embedding),
            num_layers=self.settings.num_layers,
        )
        says_all = len(vocabulary) == target.spec.vocab_size
        write_drafter(
            self.folder, description, student.parameters(), None if says_all else vocabulary
        )
        self.progress.say(f"The drafter is in {self.folder}: `model.source` of a drafter.")

    # --- acceptance ------------------------------------------------------------------------

    def _measure(self, target: Target) -> None:
        drafter = ModelRunner(load_model(self._model(str(self.folder))), KVCacheConfig())
        measured = measure(
            target.runner,
            drafter,
            held_out_prompts(self.settings.seed, _HELD_OUT_PER_KIND),
            _TEMPERATURES,
            batch_size=_TEACHER_BATCH,
            max_tokens=_HELD_OUT_TOKENS,
            seed=self.settings.seed,
        )
        for line in acceptance_table(measured):
            self.progress.say(line)


def _checkpointed(training: Training, file: Path) -> Iterator[TrainingStep]:
    """The steps, with the state written now and then and at the end."""
    written_s = time.monotonic()
    for step in training.steps():
        yield step
        if time.monotonic() - written_s >= _CHECKPOINT_EVERY_S:
            training.write(file)
            written_s = time.monotonic()
    training.write(file)


def _report(step: TrainingStep) -> str:
    return (
        f"step {step.num_steps}: cross entropy {step.cross_entropy:.3f}, overlap "
        f"{1 - step.variation:.3f}, same likeliest token {step.agreement:.3f}"
    )


def _findable(source: str) -> str:
    """As the drafter names its target: a path from anywhere."""
    path = Path(source)
    return str(path.resolve()) if path.exists() else source


def acceptance_table(measured: dict[tuple[Kind, float], Acceptance]) -> Iterable[str]:
    """Lines of text."""
    positions = "".join(f"{i:>7}" for i in range(1, NUM_SPECULATIVE_TOKENS + 1))
    yield f"{'held-out prompts':18}{'T':>5}{'length':>8}   first n accepted:{positions}"
    for temperature in _TEMPERATURES:
        total = NOTHING
        for kind in ASKED_KINDS:
            total += measured[kind, temperature]
            yield _row(kind, temperature, measured[kind, temperature])
        yield _row("all", temperature, total)


def _row(name: str, temperature: float, acceptance: Acceptance) -> str:
    survival = "".join(f"{share:7.3f}" for share in acceptance.survival)
    return f"{name:18}{temperature:>5}{acceptance.length:>8.3f}{'':20}{survival}"
